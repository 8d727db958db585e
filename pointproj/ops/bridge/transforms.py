"""Operators under the transforms of ``torch.func``: ``grad``, ``jacrev``, ``hessian``, ``vmap`` and others.

These transforms need an autograd function with ``setup_context``, which operators registered with
``torch.library`` do not have. Outside of a transform the operator is called as it is.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pointproj.ops.bridge.torch_internals import unwrapped


def transformed(operator: Callable, save: Callable, chain: Callable, push: Callable) -> Callable[..., Any]:
    """An operator as it is called under a transform.

    Parameters
    ----------
    operator : callable
        Takes tensors, lists of tensors, numbers and strings; returns one or several tensors.
    save, chain : callable
        As ``setup_context`` and ``backward`` of ``torch.library.register_autograd``.
    push : callable
        ``push(ctx, *tangents)``: the derivative of each output (None: zero) along one tangent for each
        argument (None: zero).

    Returns
    -------
    callable
        Takes and returns what ``operator`` does.
    """

    class Transformed(torch.autograd.Function):
        @staticmethod
        def forward(layout: _Layout, *members: Any) -> Any:
            return operator(*layout.gathered(members))

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
            ctx.layout, *members = inputs
            save(_Context(ctx), ctx.layout.gathered(members), output)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple:
            return None, *ctx.layout.members(chain(_Context(ctx), *grads))

        @staticmethod
        def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> Any:
            made = push(_Context(ctx), *ctx.layout.gathered(tangents))
            return made if len(made) > 1 else made[0]

        @staticmethod
        def vmap(info: Any, in_dims: tuple, layout: _Layout, *members: Any) -> tuple[Any, Any]:
            """One call for each element of the batch."""
            made = []
            for element in range(info.batch_size):
                with_dims = zip(members, in_dims[1:], strict=True)
                own = [m if dim is None else m.select(dim, element) for m, dim in with_dims]
                made.append(operator(*layout.gathered(own)))
            if isinstance(made[0], Tensor):
                return torch.stack(made), 0
            return tuple(torch.stack(t) for t in zip(*made, strict=True)), (0,) * len(made[0])

    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling():
            raise NotImplementedError(
                "torch.compile cannot trace this operator under a transform of torch.func: compile the "
                "function without the transform, or transform it without compiling it"
            )
        layout = _Layout(args)
        return Transformed.apply(layout, *layout.members(args))

    return call


class _Layout:
    """Which of an operator's arguments are lists: transforms see the tensors among members alone."""

    def __init__(self, args: Sequence[Any]) -> None:
        self.sizes = [len(a) if isinstance(a, list) else None for a in args]

    def members(self, values: Sequence[Any]) -> list[Any]:
        """Values for the arguments, those of a list one by one; None for a list means None for each."""
        pairs = zip(values, self.sizes, strict=True)
        return [m for v, size in pairs for m in ((v,) if size is None else v or [None] * size)]

    def gathered(self, members: Sequence[Any]) -> tuple[Any, ...]:
        """The inverse."""
        rest = iter(members)
        return tuple(next(rest) if size is None else [next(rest) for _ in range(size)] for size in self.sizes)


class _Context:
    """An autograd context whose arguments are those of the operator, with lists among them."""

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
    def saved_tensors(self) -> Sequence[Tensor]:
        return unwrapped(self.ctx.saved_tensors)  # the transform may have ended

    @property
    def needs_input_grad(self) -> tuple:
        return self.ctx.layout.gathered(self.ctx.needs_input_grad[1:])
