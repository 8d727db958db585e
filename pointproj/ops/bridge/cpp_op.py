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
from torch._ops import OpOverload

from pointproj.ops.bridge.eager import direct, is_transforming, nobody_looks_on
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

    transformed: Callable[..., Any]  # set by pointproj.ops.bridge.transforms

    def __init__(self, operator: OpOverload) -> None:
        self.operator = operator
        self.direct = self.alone  # in plain eager mode

    def __call__(self, *args: Any) -> Any:
        if nobody_looks_on(args):
            return self.direct(*args)
        return self.transformed(*args) if is_transforming() else self.operator(*args)

    def alone(self, *args: Any) -> Any:
        """What C++ does, without what torch records of it."""
        try:
            with torch._C._AutoDispatchBelowAutograd():
                return self.operator(*args)
        except MemoryError as error:  # the stable ABI cannot throw torch's own
            raise torch.OutOfMemoryError(str(error)) from None

    def register_autograd(self, backward: Callable, *, setup_context: Callable) -> None:
        """As :func:`torch.library.register_autograd`, which plain eager calls do without."""
        torch.library.register_autograd(self.operator, backward, setup_context=setup_context)
        self.direct = direct(self.operator.name(), self.alone, setup_context, backward)

    def differentiate_by(self, backward: "CppOp", differentiable: Sequence[str]) -> None:
        """In plain eager mode go to the operator ``backward`` without what is general in torch_op.

        Where tensors and other values stand among the arguments is known from the schema: they are put apart
        and together again by few calls, which for small clouds take as long as the kernels.
        """
        arguments = self.operator._schema.arguments
        width, count = len(arguments), len(self.operator._schema.returns)
        is_tensor = ["Tensor" in str(a.type) for a in arguments]
        tensors = [i for i in range(width) if is_tensor[i]]
        others = [i for i in range(width) if not is_tensor[i]]
        saved = [*tensors, *range(width, width + count), *others]
        take_tensors, take_others = itemgetter(*tensors), itemgetter(*others)
        restore = itemgetter(*(saved.index(i) for i in range(width + count)))
        places = [i for i, a in enumerate(arguments) if a.name in differentiable]
        needed = itemgetter(*places)

        def save(ctx: Any, args: tuple, made: tuple[Tensor, ...]) -> None:
            ctx.mark_non_differentiable(*made[1:])
            ctx.set_materialize_grads(False)  # no zeros for outputs that no gradient arrives for
            ctx.save_for_backward(*take_tensors(args), *made)
            ctx.others = take_others(args)

        def chain(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
            if grad is None:
                return (None,) * width
            needs = list(needed(ctx.needs_input_grad))
            values = restore(ctx.saved_tensors + ctx.others)
            grad = grad.contiguous()
            if torch.is_grad_enabled() or torch.compiler.is_compiling():
                values = *values[:width], *(output.detach() for output in values[width:])  # as in torch_op
                made = backward(grad, needs, *values)
            else:
                made = backward.alone(grad, needs, *values)
            gradients = [None] * width
            for place, need, gradient in zip(places, needs, made, strict=True):
                if need:
                    gradients[place] = gradient
            return tuple(gradients)

        self.direct = direct(self.operator.name(), self.alone, save, chain)


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
