"""How kernels are launched: directly in eager calls, and so that torch can trace them everywhere else.

Triton's own launch binds arguments by name, tunes, and looks a kernel up by all it knows of them: up to 30 us
of host time, more than most of these kernels take. Here what Triton returned is kept by what it compiles a
kernel anew for: dtypes, constants, whether pointers are aligned, and whether numbers are 1, multiples of 16
or wide.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import wrap_triton
from triton.runtime import driver
from triton.runtime.autotuner import Autotuner

from pointproj.ops.backends.triton.tiles import INTERPRETED
from pointproj.ops.bridge.replay import Run, Source, recording

Grid = tuple[int, ...] | Callable[[dict[str, Any]], tuple[int, ...]]
ALIGNMENT = 16  # of pointers and numbers, in what Triton tells apart


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
    """A launch as it was made, to be made again."""

    launch: Callable[..., None]
    values: list[Any]
    arrays: list[int]  # which of these are addresses

    @property
    def pointers(self) -> list[int]:
        return [self.values[i] for i in self.arrays]

    @staticmethod
    def again(launches: Sequence["Made"], sources: Sequence[Sequence[Source]]) -> Run:
        """See :class:`pointproj.ops.bridge.replay.Launch`."""
        calls = []
        for made, of_launch in zip(launches, sources, strict=True):
            pairs = zip(made.arrays, of_launch, strict=True)
            moved = [(i, *source) for i, source in pairs if source is not None]
            calls.append((made.launch, made.values, moved))

        def run(_: Any, addresses: list[int], stream: int) -> None:
            for launch, values, moved in calls:
                for i, place, offset in moved:
                    values[i] = addresses[place] + offset
                launch(*values, stream=stream)

        return run


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
        made = compiled[programs]
        made(*values, *others, stream=driver.active.get_current_stream(device))
        return Made(made, [*values, *others], [i for i, arg in enumerate(args) if isinstance(arg, Tensor)])

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
