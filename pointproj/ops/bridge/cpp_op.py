"""An operator that C++ has registered gets its fake kernel and its derivatives from Python.

torch's stable ABI, by which one library serves many versions of torch, knows neither autograd nor batching
nor fake kernels. All operators of a library get them here, by :mod:`pointproj.ops.bridge.torch_op`.
"""

import inspect
from collections.abc import Callable, Sequence
from operator import itemgetter
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from pointproj.ops.bridge.torch_internals import (
    any_requires_grad,
    apply_of,
    below_autograd,
    builtin_of,
    go_straight_to,
)
from pointproj.ops.bridge.torch_op import Saved, Spec, torch_op

ANNOTATIONS = {
    "Tensor": Tensor,
    "Optional[Tensor]": Tensor | None,
    "List[bool]": list[bool],
    "int": int,
    "float": float,
    "Optional[float]": float | None,
    "bool": bool,
    "str": str,
}


class CppOp:
    """An operator of a library, as :mod:`pointproj.ops.bridge.torch_op` wants what is registered."""

    direct: Callable[..., Any]  # in plain eager mode

    def __init__(self, operator: Any) -> None:
        self.operator = operator
        self.in_cpp = builtin_of(operator)

    def __call__(self, *args: Any) -> Any:
        return self.operator(*args)

    def alone(self, *args: Any) -> Any:
        """What C++ does, without what torch records of it."""
        try:
            with below_autograd():
                return self.in_cpp(*args)
        except MemoryError as error:  # the stable ABI cannot throw torch's own
            raise torch.OutOfMemoryError(str(error)) from None

    def register_autograd(self, backward: Callable, *, setup_context: Callable) -> None:
        """As :func:`torch.library.register_autograd`."""
        torch.library.register_autograd(self.operator, backward, setup_context=setup_context)

    def differentiate_by(self, backward: "CppOp", differentiable: Sequence[str]) -> None:
        """In plain eager mode go to the operator ``backward`` without what is general in torch_op.

        A GPU's backward runs in a thread of its own, where Python takes several times as long as elsewhere.
        So little of it is left: few calls put the values together, and their functions are at hand.
        """
        arguments, results = self.operator._schema.arguments, self.operator._schema.returns
        width, places = len(arguments), [i for i, a in enumerate(arguments) if a.name in differentiable]
        tensors = [i for i, a in enumerate(arguments) if "Tensor" in str(a.type)]
        others = [i for i in range(width) if i not in tensors]
        saved = [*tensors, *range(width, width + len(results)), *others]
        take_tensors, take_others, take = itemgetter(*tensors), itemgetter(*others), itemgetter(*places)
        restore = itemgetter(*(saved.index(i) for i in range(width + len(results))))
        first, in_cpp = slice(len(places)), backward.in_cpp

        def forward(ctx: Any, *given: Any) -> Tensor:
            args, made = given[-2:]
            ctx.save_for_backward(*take_tensors(args), *made)
            ctx.others = take_others(args)
            return made[0]

        def differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
            needs = list(ctx.needs_input_grad[first])
            values = restore(ctx.saved_tensors + ctx.others)
            if torch.is_grad_enabled():
                outputs = (output.detach() for output in values[width:])  # as in torch_op
                made = backward(grad.contiguous(), needs, *values[:width], *outputs)
            else:
                with below_autograd():
                    made = in_cpp(grad.contiguous(), needs, *values)
            return *made, None, None  # torch leaves out those that are not needed

        methods = {"forward": staticmethod(forward), "backward": staticmethod(differentiate)}
        function = type(self.operator.name().replace("::", "_"), (torch.autograd.Function,), methods)
        apply = apply_of(function)
        go_straight_to(function, differentiate)

        def call(*args: Any) -> Any:
            made = self.alone(*args)
            if torch.is_grad_enabled() and any_requires_grad(take(args)):
                return apply(*take(args), args, made), *made[1:]
            return made

        self.direct = call


def cpp_op(
    library: Any, name: str, outputs: Callable[[SimpleNamespace], tuple[Spec, ...]], **derivatives: Any
) -> Callable[..., Tensor | tuple[Tensor, ...]]:
    """Make an operator of a loaded library compilable and differentiable.

    Parameters
    ----------
    library : namespace of torch.ops
        It has the operator, and, if that is differentiable, ``<name>_backward``: its arguments are the
        gradients, ``bool[] needs``, and the forward's arguments and outputs; it returns an empty tensor where
        none is needed.
    name : str
        Without the namespace.
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
    made = {}
    schema = getattr(library, name).default._schema
    names = [argument.name for argument in schema.arguments]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD

    def in_cpp(*_: Any) -> tuple[Tensor, ...]:
        raise NotImplementedError(f"{name} is implemented in C++ alone")

    def first_backward(grads: tuple, needs: dict[str, bool], saved: Saved) -> tuple[Tensor, ...]:
        backward = made[f"{schema.name}_backward"]
        return backward.alone(*grads, [*needs.values()], *saved.inputs.values(), *saved.outputs)

    def register(qualified: str, function: Callable, fake: Callable) -> CppOp:
        operator = made[qualified] = CppOp(getattr(library, qualified.partition("::")[2]).default)
        torch.library.register_fake(operator.operator, fake)
        return operator

    in_cpp.__signature__ = inspect.Signature(
        [inspect.Parameter(a.name, kind, annotation=ANNOTATIONS[str(a.type)]) for a in schema.arguments],
        return_annotation=tuple[(Tensor,) * len(schema.returns)],
    )
    operator = torch_op(
        schema.name,
        in_cpp,
        lambda *args: outputs(SimpleNamespace(**dict(zip(names, args, strict=True)))),
        backward=first_backward if "differentiable" in derivatives else None,
        register=register,
        **derivatives,
    )
    if "differentiable" in derivatives:
        operator.differentiate_by(made[f"{schema.name}_backward"], derivatives["differentiable"])
    return operator
