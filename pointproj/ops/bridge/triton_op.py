"""Torch operators made of Triton kernels: torch.compile and AOTInductor trace into them.

Kernels run on CUDA, and on a CPU in Triton's interpreter (``TRITON_INTERPRET=1``), which is for tests.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
from torch.library import wrap_triton

from pointproj.ops.bridge.torch_op import opaque, torch_op
from pointproj.ops.torch_internals import has_modes

Grid = tuple[int, ...] | Callable[[dict[str, Any]], tuple[int, ...]]

INTERPRETED = triton.knobs.runtime.interpret
launching = threading.RLock()  # Triton keeps the arguments of a launch in the kernel, until it has tuned it


def runs_kernels(tensor: Tensor) -> bool:
    """Whether work on this tensor is done by kernels, and not by torch operators."""
    return tensor.is_cuda or INTERPRETED


def tuned(configs: list[triton.Config], key: list[str]) -> Callable[[Any], Any]:
    """``triton.autotune``; there is nothing to time where kernels are interpreted."""
    return triton.autotune(configs=configs[:1] if INTERPRETED else configs, key=key)


def cdiv(count: int, size: int) -> int:
    """The quotient rounded up, also of symbolic numbers."""
    return (count + size - 1) // size


def launch(kernel: Any, grid: Grid, *args: Any, **options: Any) -> None:
    """Launch a kernel, tuned or not: under a tracer through torch, otherwise through Triton alone.

    The kernel must be at module level. ``args`` are its tensors and numbers in the order of its parameters,
    ``options`` its constants by name and ``num_warps``. A callable grid gets the tuned constants.
    """
    with launching:
        if has_modes():
            wrap_triton(kernel)[grid](*args, **options)
            return
        tensor = next(a for a in args if isinstance(a, Tensor))
        with torch.cuda.device_of(tensor):  # Triton launches on the current device
            kernel[grid](*args, **options)


def _traceable(name: str, function: Callable, fake: Callable) -> Any:
    """Register ``function``, which launches kernels on CUDA and calls torch on a CPU.

    Its CPU part may loop over chunks, which no tracer can follow for unknown sizes: in traces it
    stands as an operator of its own.
    """
    on_cpu = opaque(f"{name}_on_cpu", function, fake)

    def dispatch(*args: Any) -> Any:
        first = next(a for a in args if isinstance(a, Tensor))
        return function(*args) if first.is_cuda else on_cpu(*args)

    dispatch.__signature__ = function.__signature__
    # torch reads the source of this function to find kernels, and imports its compiler for that, which takes
    # seconds. There are none to find here, and our version is part of the key of compiled code anyway.
    dispatch.__code__ = dispatch.__code__.replace(co_filename="<operator of Triton kernels>")
    operator = torch.library.triton_op(name, dispatch, mutates_args=())
    operator.register_kernel("cpu")(function)
    operator.register_fake(fake)
    return operator


triton_op = functools.partial(torch_op, register=_traceable)
"""As :func:`pointproj.ops.bridge.torch_op.torch_op`, of kernels that torch traces, forward and backward."""
