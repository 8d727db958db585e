"""How kernels are launched: directly in eager calls, and so that torch can trace them everywhere else.

Triton's own launch binds arguments by name, tunes, and looks a kernel up by all it knows of them: up to 30 us
of host time, more than most of these kernels take. Here what Triton returned is kept by what it compiles a
kernel anew for: dtypes, constants, whether pointers are aligned, and whether numbers are 1, multiples of 16
or wide.
"""

import ctypes
import functools
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import wrap_triton
from triton.runtime import driver
from triton.runtime.autotuner import Autotuner

from pointproj.ops.backends.triton.tiles import INTERPRETED
from pointproj.ops.bridge.parameters import WORD, Parameters
from pointproj.ops.bridge.replay import Run, Source, recording

Grid = tuple[int, ...] | Callable[[dict[str, Any]], tuple[int, ...]]
ALIGNMENT = 16  # of pointers and numbers, in what Triton tells apart
NO_SCRATCH = 0, 0  # kernels take the addresses of two pieces of memory after all other parameters


def launch(kernel: Any, grid: Grid, *args: Any, **options: Any) -> None:
    """Launch a kernel, tuned or not.

    Parameters
    ----------
    kernel : triton.JITFunction or Autotuner
        At module level: what is compiled of it is kept for good.
    grid : tuple of int or callable
        How many programs there are; a callable gets the constants that are not among ``args``.
    *args : tensor, int, bool
        In the order of the kernel's parameters, all but those that are tuned or options.
    **options : int
        Constants by name, and ``num_warps``.
    """
    now = recording()
    if now is None and torch._C._len_torch_dispatch_stack() > 0:  # a tracer looks on
        wrap_triton(kernel)[grid](*args, **options)
        return
    made = None
    if INTERPRETED:
        kernel[grid](*args, **options)
    else:
        made = _in_eager_mode(kernel).launch(grid, args, options)
    if now is not None:
        now.report(made)


class Made(NamedTuple):
    """A launch as it was made, to be made again: by the driver, since nothing is left to look up."""

    compiled: Any
    programs: tuple[int, int, int]
    words: list[int]  # the parameters
    arrays: list[int]  # which of these are addresses

    @property
    def pointers(self) -> list[int]:
        return [self.words[i] for i in self.arrays]

    @staticmethod
    def again(launches: Sequence["Made"], sources: Sequence[Sequence[Source]]) -> Run:
        """See :class:`pointproj.ops.bridge.replay.Launch`."""
        blocks = [struct.pack(f"{len(made.words)}q", *made.words) for made in launches]
        pointers = [[i * WORD for i in made.arrays] for made in launches]
        parameters = Parameters(blocks, pointers, sources)
        launch_kernel, calls = _launch_kernel(), []
        for made, address in zip(launches, parameters.addresses, strict=True):
            if 0 in made.programs:  # nothing to do for no points, and the driver refuses it
                continue
            block = (ctypes.c_void_p * len(made.words))(
                *range(address, address + WORD * len(made.words), WORD)
            )
            about = made.compiled.metadata
            threads = 32 * about.num_warps, 1, 1
            calls.append(
                (made.compiled, (made.compiled.function, *made.programs, *threads, about.shared), block)
            )

        def run(_: Any, addresses: list[int], stream: int) -> None:
            parameters.point_into(addresses)
            for compiled, fixed, block in calls:
                error = launch_kernel(*fixed, stream, block, None)
                if error:
                    raise RuntimeError(f"the kernel {compiled.name} was not launched: CUDA error {error}")

        return run


@functools.cache
def _launch_kernel() -> Any:
    launch_kernel = ctypes.CDLL("libcuda.so.1").cuLaunchKernel
    address = ctypes.c_void_p
    launch_kernel.argtypes = [address, *[ctypes.c_uint] * 7, address, address, address]
    return launch_kernel


def _made(compiled: Any, programs: tuple[int, int, int], values: Sequence[Any]) -> Made | None:
    """What the driver needs to launch a kernel with these values: of tensors, their addresses.

    None where that is more than a grid, a block, addresses and whole numbers.
    """
    about = compiled.metadata
    extra = about.launch_cooperative_grid, about.launch_pdl, about.global_scratch_size, about.num_ctas - 1
    kinds = compiled.src.signature.values()
    passed = [(kind, value) for kind, value in zip(kinds, values, strict=True) if kind != "constexpr"]
    if about.target.backend != "cuda" or any(extra) or any(kind[0] not in "*iu" for kind, _ in passed):
        return None
    words = [*(int(value) for _, value in passed), *NO_SCRATCH]
    return Made(compiled, programs, words, [i for i, (kind, _) in enumerate(passed) if kind[0] == "*"])


class _Kernel:
    """A kernel's compiled forms."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.is_tuned = isinstance(kernel, Autotuner)
        parameters = (kernel.fn if self.is_tuned else kernel).params
        tuned_for = kernel.keys if self.is_tuned else ()
        self.names = [p.name for p in parameters]
        self.by_value = [p.is_constexpr or p.name in tuned_for for p in parameters]
        self.forms: dict[tuple, tuple[Any, dict[str, Any], list[Any]]] = {}

    def launch(self, grid: Grid, args: tuple[Any, ...], options: dict[str, Any]) -> Made | None:
        """None: how to make it again is not known before the second time."""
        device = driver.active.get_current_device()
        values = [arg.data_ptr() if isinstance(arg, Tensor) else arg for arg in args]
        key = device, *options.values(), *map(_kind_of, args, values, self.by_value)
        form = self.forms.get(key)
        if form is None:
            compiled = self.kernel[grid](*args, **options)
            self.forms[key] = compiled, *self._constants(len(args), options)
            return None
        compiled, constants, others = form
        programs = (*(grid(constants) if callable(grid) else grid), 1, 1)[:3]
        compiled[programs](*values, *others, stream=driver.active.get_current_stream(device))
        return _made(compiled, programs, [*values, *others]) if recording() is not None else None

    def _constants(self, given: int, options: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
        """The constants that are not among the arguments: by name, and in the kernel's order."""
        constants = {**options, **(self.kernel.best_config.kwargs if self.is_tuned else {})}
        return constants, [constants[name] for name in self.names[given:]]


_kernels: dict[int, _Kernel] = {}


def _in_eager_mode(kernel: Any) -> _Kernel:
    known = _kernels.get(id(kernel))
    if known is None:
        known = _kernels[id(kernel)] = _Kernel(kernel)
    return known


def _kind_of(arg: Any, value: Any, by_value: bool) -> Any:
    """What Triton tells apart of an argument; ``value`` is a tensor's address, or the argument itself."""
    if arg is not value:
        return arg.dtype if value % ALIGNMENT == 0 else (arg.dtype, "not aligned")
    return value if by_value else (value == 1, value % ALIGNMENT == 0, value >= 2**31)
