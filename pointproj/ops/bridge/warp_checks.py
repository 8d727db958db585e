"""Checks of a launcher, which run at its first call with arguments of these kinds.

Work that neither torch nor the adjoint sees gives wrong values, or gradients of zero, and no error: launches
by ``wp.launch``, torch's arithmetic between launches, inputs that kernels write to, grids that are gone.
"""

import contextlib
import gc
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import warp as wp
from torch import Tensor

from pointproj.ops.bridge.warp_launch import Launch, has_gradient
from pointproj.ops.torch_internals import after_operators

FILLS = {"fill_", "zero_", "copy_"}  # they read nothing of the tensor that they write to
WITH_ID = (wp.HashGrid, wp.Mesh, wp.Bvh, wp.Volume)  # kernels get these by their number


def kinds_of(args: Sequence[Any]) -> tuple:
    """What a launcher may branch on: dtypes and devices of tensors, types of floats, other values."""
    known = {Tensor: lambda a: (a.dtype, a.device), float: type}
    return tuple(known.get(Tensor if isinstance(a, Tensor) else type(a), lambda a: a)(a) for a in args)


class CheckedLaunch(Launch):
    """A :class:`Launch` that follows what depends on the differentiable inputs, if the adjoint is wanted."""

    def __init__(
        self, device: torch.device, name: str, inputs: dict[str, Any], differentiable: Sequence[str]
    ):
        super().__init__(device)
        self.name = name
        self._tensors = {n: v for n, v in inputs.items() if isinstance(v, Tensor)}
        self._depend = {_memory(inputs[n]) for n in differentiable if has_gradient(inputs[n])}
        self._constant = {_memory(v) for v in self._tensors.values()} - self._depend
        self._has_adjoint = bool(differentiable)
        self._lost: set[int] = set()  # memory whose derivative the adjoint does not know
        self._kept: list[Tensor] = []  # so that no other tensor gets its memory
        self._numbered: list[weakref.ref] = []

    @contextlib.contextmanager
    def watching(self, mutable: Sequence[str]) -> Iterator[None]:
        """Watch a call of the launcher, which may write to the inputs named ``mutable``."""
        watched = {n: v for n, v in self._tensors.items() if n not in mutable and not _is_captured(v)}
        before = {n: v.clone() for n, v in watched.items()}
        following = after_operators(self._after) if self._has_adjoint else contextlib.nullcontext()
        with _tape(self.name), following:
            yield
        for n, old in before.items():
            if not ((old == watched[n]) | (old != old)).all():
                raise TypeError(
                    f"{self.name}: a kernel wrote to the input {n!r}, which torch takes for unchanged: write "
                    f'mutates_args=["{n}"] in warp_op, or make {n!r} an output'
                )

    def __call__(self, kernel: wp.Kernel, dim: Any, *args: Any, block_dim: int = 256) -> None:
        if self._has_adjoint:
            self._follow(kernel, args)
        super().__call__(kernel, dim, *args, block_dim=block_dim)

    def _follow(self, kernel: wp.Kernel, args: Sequence[Any]) -> None:
        for parameter, value in zip(kernel.adj.args, args, strict=False):
            if has_gradient(value) and _memory(value) in self._lost:
                self.refuse(f"the argument {parameter.label!r} of {kernel.key}")
            fields = {} if isinstance(value, Tensor) else getattr(parameter.type, "vars", {})
            for field in fields:
                inner = getattr(value, field, None)
                if has_gradient(inner) and _memory(inner) in self._depend | self._lost:
                    raise TypeError(
                        f"{self.name}: the adjoint gives no gradient to fields of structs: make "
                        f"{field!r} an argument of {kernel.key}, in place of a field of {parameter.label!r}"
                    )
            if parameter.type is wp.uint64 and type(value) is int and value:
                owners = (o for o in gc.get_objects() if issubclass(type(o), WITH_ID))
                self._numbered += [weakref.ref(o) for o in owners if o.id == value]
        tensors = [a for a in args if has_gradient(a)]
        if any(_memory(t) in self._depend for t in tensors):
            self._depend |= {_memory(t) for t in tensors} - self._constant
            self._kept += tensors

    def _after(self, operator: Any, args: list[Any], made: list[Any]) -> None:
        """Follow an operator of torch that the launcher has called."""
        name = operator._schema.name.split("::")[-1]
        if operator.is_view or name.endswith("_like") or name.startswith("new_"):
            return
        read = [t for t in args if has_gradient(t)]
        known = any(_memory(t) in self._depend | self._lost for t in (read[1:] if name in FILLS else read))
        if not known:
            return
        if any(a.alias_info and a.alias_info.is_write for a in operator._schema.arguments):
            self.refuse(f"torch's {name}")
        results = [t for t in made if has_gradient(t)]
        self._lost |= {_memory(t) for t in results}
        self._kept += results

    def refuse(self, what: str) -> None:
        raise TypeError(
            f"{self.name}: {what} has a value that torch computed from an input with gradient, between "
            "launches; backward=ADJOINT differentiates launches only: compute it in a kernel, write "
            "launch(kernel, dim, *inputs, *outputs), or compute it before the operator"
        )

    def check_owners(self) -> None:
        """Call this when the launcher has returned."""
        if any(owner() is None for owner in self._numbered):
            raise TypeError(
                f"{self.name}: a grid or mesh that the launcher made is gone before the adjoint reads it: "
                "pass it itself, launch(kernel, dim, ..., grid, ...) in place of grid.id"
            )


class _Tape(wp.Tape):
    """Refuses what one thread launches by ``wp.launch``."""

    def __init__(self, name: str):
        super().__init__()
        self.name, self.thread = name, threading.get_ident()

    def record_launch(self, kernel: wp.Kernel, dim: Any, *_: Any, **__: Any) -> None:
        if threading.get_ident() == self.thread:
            names = ", ".join(a.label for a in kernel.adj.args)
            raise TypeError(
                f"{self.name}: wp.launch takes {kernel.key} past the operator: it has no gradient there, and "
                f"is not on torch's stream; write launch({kernel.key}, {dim}, {names}), with torch tensors"
            )


def _tape(name: str) -> contextlib.AbstractContextManager:
    """A tape of Warp, unless another one records."""
    tape = _Tape(name)
    with contextlib.suppress(RuntimeError):
        tape.__enter__()
        stack = contextlib.ExitStack()
        stack.push(tape.__exit__)
        return stack
    return contextlib.nullcontext()


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_captured(tensor: Tensor) -> bool:
    """Whether nothing can be read back, since a CUDA graph captures the work."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
