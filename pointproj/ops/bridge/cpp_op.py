"""An operator that C++ has registered gets its fake kernel and its derivatives from Python."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from pointproj.ops.backends.native.build import extension
from pointproj.ops.bridge.torch_op import Spec, torch_op

KINDS = {
    "Tensor": Tensor,
    "Optional[Tensor]": Tensor | None,
    "List[Tensor]": list[Tensor],
    "int": int,
    "float": float,
}


class CppOp(NamedTuple):
    """An operator of the extension, as :mod:`pointproj.ops.bridge.torch_op` wants what is registered."""

    operator: OpOverload

    def __call__(self, *args: Any) -> Any:
        return self.operator(*args)

    def register_autograd(self, backward: Callable, *, setup_context: Callable) -> None:
        torch.library.register_autograd(self.operator, backward, setup_context=setup_context)


def cpp_op(
    name: str, outputs: Callable[..., tuple[Spec, ...]], **derivatives: Any
) -> Callable[..., Tensor | tuple[Tensor, ...]]:
    """Make ``torch.ops.pointproj.<name>`` of the extension compilable and differentiable.

    Parameters
    ----------
    name
        Without the namespace. The first backward, if it is differentiable, is the extension's
        ``<name>_backward``: its arguments are the gradients, ``bool[] needs``, and the forward's arguments
        and outputs; it returns an empty tensor where none is needed.
    outputs, derivatives
        As for :func:`pointproj.ops.bridge.torch_op.torch_op`.
    """
    backward = _done_in_cpp if "differentiable" in derivatives else None
    forward = _like(_operator(name))
    return torch_op(f"pointproj::{name}", forward, outputs, backward=backward, register=_bind, **derivatives)


def _operator(name: str) -> OpOverload:
    return getattr(extension(), name).default


def _bind(name: str, function: Callable, fake: Callable) -> CppOp:
    operator = _operator(name.removeprefix("pointproj::"))
    torch.library.register_fake(operator, fake)
    return CppOp(operator)


def _like(operator: OpOverload) -> Callable[..., tuple[Tensor, ...]]:
    """A function with the operator's arguments and results, for its signature alone."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    schema = operator._schema

    def function(*_: Any) -> tuple[Tensor, ...]:
        return _done_in_cpp()

    function.__signature__ = inspect.Signature(
        [inspect.Parameter(a.name, kind, annotation=KINDS[str(a.type)]) for a in schema.arguments],
        return_annotation=tuple[(Tensor,) * len(schema.returns)],
    )
    return function


def _done_in_cpp(*_: Any) -> Any:
    raise NotImplementedError("this operator is C++ alone")
