"""An operator that C++ has registered gets its fake kernel and its derivatives from Python."""

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from pointproj.ops.backends.native.build import extension
from pointproj.ops.bridge.eager import is_transforming
from pointproj.ops.bridge.torch_op import Saved, Spec, torch_op

ANNOTATIONS = {
    "Tensor": Tensor,
    "Optional[Tensor]": Tensor | None,
    "List[Tensor]": list[Tensor],
    "int": int,
    "float": float,
    "bool": bool,
    "str": str,
}


class CppOp:
    """An operator of the extension, as :mod:`pointproj.ops.bridge.torch_op` wants what is registered."""

    transformed: Callable[..., Any]  # set by pointproj.ops.bridge.transforms

    def __init__(self, operator: OpOverload) -> None:
        self.operator = operator

    def __call__(self, *args: Any) -> Any:
        if is_transforming():
            return self.transformed(*args)
        return self.operator(*args)

    def register_autograd(self, *_: Any, **__: Any) -> None:
        """Nothing is left to do: the extension has registered each operator with autograd."""


def cpp_op(
    name: str, outputs: Callable[[SimpleNamespace], tuple[Spec, ...]], **derivatives: Any
) -> Callable[..., Tensor | tuple[Tensor, ...]]:
    """Make ``torch.ops.pointproj.<name>`` of the extension compilable and differentiable.

    Parameters
    ----------
    name : str
        Without the namespace. The first backward, if it is differentiable, is the extension's
        ``<name>_backward``: its arguments are the gradients, ``bool[] needs``, and the forward's arguments
        and outputs; it returns an empty tensor where none is needed.
    outputs : Callable
        ``outputs(call)``: shape and dtype of every output; ``call`` holds the arguments by the names that
        the operator's schema gives them.
    **derivatives
        ``differentiable`` and ``second_backward`` as for :func:`pointproj.ops.bridge.torch_op.torch_op`.

    Returns
    -------
    Callable
        The operator.
    """
    schema = _operator(name)._schema
    names = [argument.name for argument in schema.arguments]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD

    def in_cpp(*_: Any) -> tuple[Tensor, ...]:
        raise NotImplementedError(f"{name} is implemented in C++ alone")

    def first_backward(grads: tuple, needs: dict[str, bool], saved: Saved) -> tuple[Tensor, ...]:
        operator = _operator(f"{name}_backward")
        return operator(*grads, [*needs.values()], *saved.inputs.values(), *saved.outputs)

    in_cpp.__signature__ = inspect.Signature(
        [inspect.Parameter(a.name, kind, annotation=ANNOTATIONS[str(a.type)]) for a in schema.arguments],
        return_annotation=tuple[(Tensor,) * len(schema.returns)],
    )
    return torch_op(
        f"pointproj::{name}",
        in_cpp,
        lambda *args: outputs(SimpleNamespace(**dict(zip(names, args, strict=True)))),
        backward=first_backward if "differentiable" in derivatives else None,
        register=_register,
        **derivatives,
    )


def whole_call(name: str, in_parts: Callable[..., Any]) -> Callable[..., Any]:
    """An operator of the extension that calls others, which alone are known to compiler and autograd.

    Parameters
    ----------
    name : str
        As for :func:`cpp_op`.
    in_parts : Callable
        The same by the other operators, for transforms of ``torch.func``.

    Returns
    -------
    Callable
        The operator.
    """
    operator = _operator(name)

    def call(*args: Any) -> Any:
        return in_parts(*args) if is_transforming() else operator(*args)

    return call


def _operator(name: str) -> OpOverload:
    return getattr(extension(), name).default


def _register(name: str, function: Callable, fake: Callable) -> CppOp:
    operator = _operator(name.removeprefix("pointproj::"))
    torch.library.register_fake(operator, fake)
    return CppOp(operator)
