"""The ways to call an operator: directly, under a transform of ``torch.func``, and by torch's dispatcher.

torch's way to an operator written in Python (schema, dispatcher, autograd, trees of arguments) takes longer
than most kernels. Calls need it that are observed: by a tracer, a mode, a profiler, or a subclass of Tensor.
For all others an autograd function of the operator's own does the same without it. Transforms (``grad``,
``jacrev``, ``hessian``, ``vmap`` and others) need one too. All differentiate by the same :class:`Rule`.
"""

import functools
from collections.abc import Callable, Sequence
from itertools import repeat
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pointproj.ops.bridge.torch_internals import (
    any_requires_grad,
    apply_of,
    go_straight_to,
    is_observed,
    is_transforming,
    wrapper_test,
)

# What an operator can be called with directly. Symbolic numbers, proxies and subclasses are not among it.
PLAIN = frozenset({Tensor, torch.nn.Parameter, bool, int, float, str, list, torch.dtype, type(None)})


def is_unobserved(args: Sequence[Any]) -> bool:
    """Whether work on these arguments, the first of them a tensor, can be done directly."""
    if torch.compiler.is_compiling() or is_observed():
        return False
    if not PLAIN.issuperset(map(type, args)) or not isinstance(args[0], Tensor) or args[0].is_meta:
        return False
    is_wrapped = wrapper_test()
    # Wrappers may be left over from a transform that ended; torch resolves negative bits on its way.
    return not any(isinstance(a, Tensor) and (is_wrapped(a) or a.is_neg()) for a in args)


def taker(places: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """What takes the values in these places."""
    return itemgetter(*places) if len(places) > 1 else lambda values: tuple(values[i] for i in places)


def all_of(made: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The results of an operator, also of one that returns a single tensor."""
    return (made,) if isinstance(made, Tensor) else made


def tensor_places(kinds: Sequence[Any]) -> list[int]:
    return [i for i, kind in enumerate(kinds) if kind in (Tensor, Tensor | None)]


class Kept:
    """How values are kept for a backward: tensors where torch watches over them, others in the context."""

    def __init__(self, kinds: Sequence[Any]) -> None:
        tensors = tensor_places(kinds)
        others = [i for i in range(len(kinds)) if i not in tensors]
        order = [*tensors, *others]
        self.tensors, self.others = taker(tensors), taker(others)
        self.ordered = taker([order.index(i) for i in range(len(kinds))])

    def taken(self, ctx: Any, values: Sequence[Any]) -> tuple[Tensor | None, ...]:
        """The tensors, for torch to save."""
        ctx.others = self.others(values)
        return self.tensors(values)

    def restored(self, ctx: Any) -> tuple[Any, ...]:
        return self.ordered((*ctx.saved_tensors, *ctx.others))


class Rule(NamedTuple):
    """How an operator is differentiated; ``values`` are its arguments, then its outputs, as far as kept.

    The arguments at ``places`` get gradients, which arrive for the first ``heads`` outputs. ``vjp(grads,
    needs, values, alone)`` gives a gradient for each place, of any value where ``needs`` is false; grads may
    be None, and ``alone`` says that the call is unobserved. ``jvp(tangents, values)`` gives derivatives of
    heads along a tangent for each place, None for zero.
    """

    places: Sequence[int]
    heads: int
    kept: Kept
    vjp: Callable[..., Sequence[Tensor]]
    jvp: Callable[..., Sequence[Tensor]]


def register_ways(name: str, operator: Any, count: int, rule: Rule) -> None:
    """Differentiate an operator with ``count`` outputs by a rule, however it is called.

    It has ``names`` of its arguments, and ``body(*args)``, which does what it does without derivatives.
    """
    places, heads, kept, vjp, jvp = rule
    take = taker(places)

    def setup_context(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
        made = (output,) if count == 1 else output
        if count > heads:
            ctx.mark_non_differentiable(*made[heads:])
        ctx.set_materialize_grads(False)  # no zeros for outputs that no gradient arrives for
        ctx.save_for_backward(*kept.taken(ctx, (*inputs, *made)))

    def backward_of(direct: bool) -> Callable[..., tuple[Any, ...]]:
        def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
            needs = ctx.needs_input_grad
            every, wanted = [None] * len(needs), [*take(needs)]
            alone = direct and not torch.is_grad_enabled() and is_unobserved(grads)
            made = vjp(grads[:heads], wanted, kept.restored(ctx), alone)
            for place, gradient, need in zip(places, made, wanted, strict=True):
                if need:
                    every[place] = gradient
            return tuple(every)

        return backward

    torch.library.register_autograd(name, backward_of(False), setup_context=setup_context)
    methods = {"setup_context": setup_context, "forward": operator.body, "backward": backward_of(True)}
    function = _function(name, **methods)
    apply = apply_of(function)
    go_straight_to(function, methods["backward"])

    def direct(*args: Any) -> Any:
        if torch.is_grad_enabled() and any_requires_grad(take(args)):
            return apply(*args)
        return operator.body(*args)

    def keep_for_both(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
        setup_context(ctx, inputs, output)
        ctx.save_for_forward(*kept.taken(ctx, (*inputs, *all_of(output))))

    def along(ctx: Any, *tangents: Tensor | None) -> Any:
        made = (*jvp(take(tangents), kept.restored(ctx)), *[None] * (count - heads))
        return made if count > 1 else made[0]

    methods = {"setup_context": keep_for_both, "forward": operator, "backward": backward_of(False)}
    function = _function(name, jvp=along, vmap=_vmap_of(operator, count), **methods)
    operator.direct, operator.transformed = direct, function.apply
    operator.__class__ = _called_in_three_ways(type(operator))


def _vmap_of(operator: Any, count: int) -> Callable[..., tuple[Any, Any]]:
    """One call for each element of the batch."""

    def vmap(info: Any, in_dims: Sequence[Any], *batch: Any) -> tuple[Any, Any]:
        made = [operator(*map(_selected, batch, in_dims, repeat(i))) for i in range(info.batch_size)]
        if count == 1:
            return torch.stack(made), 0
        return tuple(torch.stack(t) for t in zip(*made, strict=True)), (0,) * count

    return vmap


def _selected(value: Any, dim: Any, element: int) -> Any:
    return value.select(dim, element) if isinstance(dim, int) else value


@functools.cache
def _called_in_three_ways(kind: type) -> type:
    """torch's class of operators, whose calls take the shortest way; torch.compile does not come here."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs:
            args = (*args, *(kwargs[name] for name in self.names[len(args) :]))
        if is_unobserved(args):
            return self.direct(*args)
        if not is_transforming():
            return kind.__call__(self, *args)
        if torch.compiler.is_compiling():
            raise NotImplementedError(
                "torch.compile cannot trace this operator under a transform of torch.func: compile the "
                "function without the transform, or transform it without compiling it"
            )
        return self.transformed(*args)

    return type("Operator", (kind,), {"__call__": call})


def _function(name: str, **methods: Callable) -> type[torch.autograd.Function]:
    methods = {key: staticmethod(method) for key, method in methods.items()}
    return type(name.replace("::", "_"), (torch.autograd.Function,), methods)
