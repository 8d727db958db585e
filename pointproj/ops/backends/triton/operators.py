"""Torch operators made of Triton kernels: torch.compile and AOTInductor trace into them."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pointproj.ops.backends.triton.tiles import INTERPRETED
from pointproj.ops.bridge.torch_op import opaque, torch_op


def runs_kernels(tensor: Tensor) -> bool:
    """Whether work on this tensor is done by kernels, and not by torch operators."""
    return tensor.is_cuda or INTERPRETED


def _traceable(name: str, function: Callable, fake: Callable) -> Any:
    """Register ``function``, which launches traceable kernels on CUDA and calls torch on a CPU.

    Its CPU part may loop over chunks, which no tracer can follow for unknown sizes: in traces it
    stands as an operator of its own.
    """
    on_cpu = opaque(f"{name}_on_cpu", function, fake)

    def dispatch(*args: Any) -> Any:
        first = next(a for a in args if isinstance(a, Tensor))
        return function(*args) if first.is_cuda else on_cpu(*args)

    dispatch.__signature__ = function.__signature__
    # Torch looks for kernels in a function whose source it knows, and imports its compiler for that, which
    # takes seconds. It would find none behind this one, and what it compiles is kept under our version.
    dispatch.__code__ = dispatch.__code__.replace(co_filename="<operator of Triton kernels>")
    operator = torch.library.triton_op(name, dispatch, mutates_args=())
    operator.register_kernel("cpu")(function)
    operator.register_fake(fake)
    return operator


kernel_op = functools.partial(torch_op, register=_traceable, replayable=True)
"""As :mod:`pointproj.ops.bridge.torch_op`, with ``torch.library.triton_op`` for forward and backward."""
