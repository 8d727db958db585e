"""The ways to call an operator: directly, under a transform of ``torch.func``, and by torch's dispatcher.

torch's way to an operator written in Python (schema, dispatcher, autograd, trees of arguments) takes longer
than most kernels. It is needed wherever somebody looks on: a tracer, a mode, a profiler, a subclass of
Tensor. Where nobody does, an autograd function of the operator's own does the same without it. Transforms
(``grad``, ``jacrev``, ``hessian``, ``vmap`` and others) need such a function too, with ``setup_context``.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pointproj.ops.bridge.torch_internals import (
    any_requires_grad,
    apply_of,
    is_observed,
    unwrapped,
    wrapper_test,
)

# What an operator can be called with directly. Symbolic numbers, proxies and subclasses are not among it.
PLAIN = frozenset({Tensor, torch.nn.Parameter, bool, int, float, str, list, torch.dtype, type(None)})


def nobody_looks_on(args: Sequence[Any]) -> bool:
    """Whether work on these arguments, the first of them a tensor, can be done directly."""
    if torch.compiler.is_compiling() or is_observed():
        return False
    if not PLAIN.issuperset(map(type, args)) or not isinstance(args[0], Tensor) or args[0].is_meta:
        return False
    is_wrapped = wrapper_test()
    for a in args:
        if type(a) is list and not PLAIN.issuperset(map(type, a)):
            return False
        # Wrappers may be left over from a transform that ended; torch resolves negative bits on its way.
        if isinstance(a, Tensor) and (is_wrapped(a) or a.is_neg()):
            return False
    return True


class Layout:
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


# setup_context and backward of torch.library.register_autograd, then ``push(ctx, *tangents)``: the derivative
# of each output along one tangent for each argument, None for zero.
Derivative = tuple[Callable[..., None], Callable[..., tuple], Callable[..., tuple]]


def functions_of(
    name: str, body: Callable, operator: Callable, derivative: Derivative
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """An operator in plain eager mode, where ``body`` is what it does, and the same under a transform.

    The context of ``derivative`` has an attribute ``layout``, which is not None under a transform: see
    :func:`needs_of`, :func:`save_by` and :func:`saved_by`.
    """
    save, chain, push = derivative

    def forward(*members: Any) -> Any:
        *members, layout = members
        return body(*members) if layout is None else operator(*layout.gathered(members))

    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        *members, ctx.layout = inputs
        save(ctx, members if ctx.layout is None else ctx.layout.gathered(members), output)

    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        made = chain(ctx, *grads)
        if ctx.layout is None:  # a list of tensors is one argument here, and has no gradient
            return *[None if type(g) is list else g for g in made], None
        return *ctx.layout.members(made), None

    def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
        made = push(ctx, *ctx.layout.gathered(tangents[:-1]))
        return made if len(made) > 1 else made[0]

    def vmap(info: Any, in_dims: tuple, *members: Any) -> tuple[Any, Any]:
        """One call for each element of the batch."""
        made, (*members, layout) = [], members
        for element in range(info.batch_size):
            with_dims = zip(members, in_dims[:-1], strict=True)
            own = [m if dim is None else m.select(dim, element) for m, dim in with_dims]
            made.append(operator(*layout.gathered(own)))
        if isinstance(made[0], Tensor):
            return torch.stack(made), 0
        return tuple(torch.stack(t) for t in zip(*made, strict=True)), (0,) * len(made[0])

    methods = {f.__name__: staticmethod(f) for f in (forward, setup_context, backward, jvp, vmap)}
    function = type(name.replace("::", "_"), (torch.autograd.Function,), methods)
    apply = apply_of(function)

    def direct(*args: Any) -> Any:
        if torch.is_grad_enabled() and any_requires_grad(args):
            return apply(*args, None)
        return body(*args)

    def transformed(*args: Any) -> Any:
        if torch.compiler.is_compiling():
            raise NotImplementedError(
                "torch.compile cannot trace this operator under a transform of torch.func: compile the "
                "function without the transform, or transform it without compiling it"
            )
        layout = Layout(args)
        return function.apply(*layout.members(args), layout)

    return direct, transformed


def needs_of(ctx: Any) -> Sequence[Any]:
    """Which arguments of an operator need a gradient."""
    layout = getattr(ctx, "layout", None)
    return ctx.needs_input_grad if layout is None else layout.gathered(ctx.needs_input_grad[:-1])


def save_by(ctx: Any, tensors: Sequence[Tensor]) -> None:
    """Save tensors, for both ways of differentiation under a transform."""
    ctx.save_for_backward(*tensors)
    if getattr(ctx, "layout", None) is not None:
        ctx.save_for_forward(*tensors)


def saved_by(ctx: Any) -> Sequence[Tensor]:
    """The tensors that a context has saved; its transform may have ended."""
    return ctx.saved_tensors if getattr(ctx, "layout", None) is None else unwrapped(ctx.saved_tensors)
