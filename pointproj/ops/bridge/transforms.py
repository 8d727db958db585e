"""Operators under the transforms of ``torch.func``: ``grad``, ``jacrev``, ``hessian``, ``vmap`` and others.

These transforms need an autograd function with ``setup_context``, which operators registered with
``torch.library`` do not have. Outside of a transform the operator is called as it is.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import unwrap_dead_wrappers
from torch._library.custom_ops import CustomOpDef
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from pointproj.ops.bridge.eager import direct, is_transforming, nobody_looks_on


def transformable(operator: Any, body: Callable, save: Callable, chain: Callable, push: Callable) -> Any:
    """Teach an operator to be called under transforms, and directly where nobody looks on.

    Parameters
    ----------
    operator : callable
        Takes tensors, lists of tensors, numbers and strings; returns one or several tensors.
    body : callable
        What the operator does, as for :func:`pointproj.ops.bridge.eager.direct`.
    save, chain : callable
        As ``setup_context`` and ``backward`` of ``torch.library.register_autograd``.
    push : callable
        ``push(ctx, *tangents)``: the derivative of each output (None: zero) along one tangent for each
        argument (None: zero).

    Returns
    -------
    callable
        The same operator. If torch has not made it, its ``__call__`` has to call ``transformed``, which it
        now has, under a transform.
    """

    class Transformed(torch.autograd.Function):
        @staticmethod
        def forward(structure: Any, *leaves: Any) -> Any:
            return operator(*tree_unflatten(leaves, structure))

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
            structure, *leaves = inputs
            ctx.call_structure = structure
            save(_Context(ctx), tree_unflatten(leaves, structure), output)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple:
            made = zip(chain(_Context(ctx), *grads), ctx.call_structure.children(), strict=True)
            return None, *(leaf for gradient, argument in made for leaf in _leaves(gradient, argument))

        @staticmethod
        def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> Any:
            made = push(_Context(ctx), *tree_unflatten(tangents, ctx.call_structure))
            return made if len(made) > 1 else made[0]

        @staticmethod
        def vmap(info: Any, in_dims: tuple, structure: Any, *leaves: Any) -> tuple[Any, Any]:
            """One call for each element of the batch."""
            made = []
            for element in range(info.batch_size):
                with_dims = zip(leaves, in_dims[1:], strict=True)
                own = [leaf if dim is None else leaf.select(dim, element) for leaf, dim in with_dims]
                made.append(operator(*tree_unflatten(own, structure)))
            if isinstance(made[0], Tensor):
                return torch.stack(made), 0
            return tuple(torch.stack(t) for t in zip(*made, strict=True)), (0,) * len(made[0])

    def transformed(*args: Any) -> Any:
        if torch.compiler.is_compiling():
            raise NotImplementedError(
                "torch.compile cannot trace this operator under a transform of torch.func: compile the "
                "function without the transform, or transform it without compiling it"
            )
        leaves, structure = tree_flatten(args)
        return Transformed.apply(structure, *leaves)

    operator.transformed = transformed
    if isinstance(operator, CustomOpDef):
        operator.direct = direct(operator._qualname, body, save, chain)
        operator.save, operator.chain = save, chain
        operator.__class__ = TransformableOp
    return operator


class TransformableOp(CustomOpDef):
    """torch's own definition of an operator, called in other ways under a transform and in eager mode.

    torch.compile does not come here: it knows what torch's definitions are.
    """

    transformed: Callable[..., Any]
    direct: Callable[..., Any]
    save: Callable[..., None]
    chain: Callable[..., tuple]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs:
            names = (argument.name for argument in self._opoverload._schema.arguments[len(args) :])
            args = (*args, *(kwargs[name] for name in names))
        if is_transforming():
            return self.transformed(*args)
        return self.direct(*args) if nobody_looks_on(args) else super().__call__(*args)


class _Context:
    """An autograd context whose arguments are those of the operator, not their leaves."""

    def __init__(self, ctx: Any) -> None:
        object.__setattr__(self, "ctx", ctx)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ctx, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.ctx, name, value)

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.ctx.save_for_backward(*tensors)
        self.ctx.save_for_forward(*tensors)

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        return unwrap_dead_wrappers(self.ctx.saved_tensors)  # the transform may have ended

    @property
    def needs_input_grad(self) -> tuple:
        return tree_unflatten(self.ctx.needs_input_grad[1:], self.ctx.call_structure)


def _leaves(gradient: Any, argument: TreeSpec) -> list:
    """One gradient for each leaf of an argument."""
    return [None] * argument.num_leaves if gradient is None else tree_flatten(gradient)[0]
