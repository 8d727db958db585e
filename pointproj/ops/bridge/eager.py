"""The ways to call an operator: directly, under a transform of ``torch.func``, and by torch's dispatcher.

torch's way to an operator written in Python (schema, dispatcher, autograd, trees of arguments) takes longer
than most kernels. Calls need it that are observed: by a tracer, a mode, a profiler, or a subclass of Tensor.
For all others an autograd function of the operator's own does the same without it. Transforms (``grad``,
``jacrev``, ``hessian``, ``vmap`` and others) need one too, with ``setup_context``. All of them differentiate
by the same :class:`Rule`.
"""

import functools
from collections.abc import Callable, Sequence
from itertools import chain, islice
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
    unwrapped,
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
    for a in args:
        if type(a) is list and not PLAIN.issuperset(map(type, a)):
            return False
        # Wrappers may be left over from a transform that ended; torch resolves negative bits on its way.
        if isinstance(a, Tensor) and (is_wrapped(a) or a.is_neg()):
            return False
    return True


def taker(places: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """What takes the values in these places."""
    return itemgetter(*places) if len(places) > 1 else lambda values: tuple(values[i] for i in places)


def all_of(made: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The results of an operator, also of one that returns a single tensor."""
    return (made,) if isinstance(made, Tensor) else made


class Kept:
    """How values are kept for a backward: tensors, also those in lists, where torch watches over them."""

    def __init__(self, kinds: Sequence[Any]) -> None:
        self.size = len(kinds)
        self.lists = [i for i, kind in enumerate(kinds) if kind == list[Tensor]]
        tensors = [i for i, kind in enumerate(kinds) if kind in (Tensor, Tensor | None)]
        others = [i for i in range(self.size) if i not in (*tensors, *self.lists)]
        order = [*tensors, *others, *self.lists]
        self.tensors, self.others, self.count = taker(tensors), taker(others), len(tensors)
        self.ordered = taker([order.index(i) for i in range(self.size)])

    def taken(self, ctx: Any, values: Sequence[Any]) -> tuple[Tensor | None, ...]:
        """The tensors, for torch to save; what else there is stays in the context."""
        lists = [values[i] for i in self.lists]
        ctx.others, ctx.sizes = self.others(values), [len(members) for members in lists]
        return (*self.tensors(values), *chain.from_iterable(lists))

    def restored(self, ctx: Any, saved: Sequence[Tensor | None]) -> tuple[Any, ...]:
        """The values."""
        members = iter(saved[self.count :])
        lists = [[*islice(members, size)] for size in ctx.sizes]
        return self.ordered((*saved[: self.count], *ctx.others, *lists))


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

    def save(self, ctx: Any, args: Sequence[Any], output: Tensor | tuple[Tensor, ...]) -> tuple:
        """Tensors for torch to save; sets the context up."""
        made = all_of(output)
        ctx.mark_non_differentiable(*made[self.heads :])
        ctx.set_materialize_grads(False)  # no zeros for outputs that no gradient arrives for
        return self.kept.taken(ctx, (*args, *made)[: self.kept.size])

    def differentiate(self, grads: Sequence[Any], needs: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        """One gradient for each argument, in the structure that torch expects: lists stay lists."""
        wanted = [needs[place] for place in self.places]
        made = self.vjp(grads[: self.heads], wanted, values, False)
        every: list[Any] = [None] * len(needs)
        for place in self.kept.lists:
            every[place] = [None] * len(values[place])
        for place, gradient, need in zip(self.places, made, wanted, strict=True):
            every[place] = gradient if need else None
        return every


def register_ways(name: str, operator: Any, count: int, rule: Rule) -> None:
    """Differentiate an operator with ``count`` outputs by a rule, however it is called.

    It has ``names`` of its arguments, and ``body(*args)``, which does what it does without derivatives.
    """

    def setup_context(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
        ctx.save_for_backward(*rule.save(ctx, inputs, output))

    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        values = rule.kept.restored(ctx, ctx.saved_tensors)
        return tuple(rule.differentiate(grads, ctx.needs_input_grad, values))

    operator.register_autograd(backward, setup_context=setup_context)
    operator.direct = _direct(name, operator, count, rule)
    operator.transformed = _transformed(name, operator, count, rule)
    operator.__class__ = _called_in_three_ways(type(operator))


@functools.cache
def _called_in_three_ways(kind: type) -> type:
    """torch's class of operators, whose calls take the shortest way; torch.compile does not come here."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs:
            args = (*args, *(kwargs[name] for name in self.names[len(args) :]))
        if is_unobserved(args):
            return self.direct(*args)
        return self.transformed(*args) if is_transforming() else kind.__call__(self, *args)

    return type("Operator", (kind,), {"__call__": call})


def _function(name: str, **methods: Callable) -> type[torch.autograd.Function]:
    methods = {key: staticmethod(method) for key, method in methods.items()}
    return type(name.replace("::", "_"), (torch.autograd.Function,), methods)


def _direct(name: str, operator: Any, count: int, rule: Rule) -> Callable[..., Any]:
    """The way of plain eager mode.

    A GPU's backward runs in a thread of its own, where Python takes several times as long as elsewhere: so
    little of it is left.
    """
    body, kept, take, first = operator.body, rule.kept, taker(rule.places), slice(len(rule.places))

    def forward(ctx: Any, *given: Any) -> Any:
        args, made = given[-2:]
        ctx.save_for_backward(*kept.taken(ctx, (*args, *made)[: kept.size]))
        return made[0] if rule.heads == 1 else made[: rule.heads]

    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        needs, values = [*ctx.needs_input_grad[first]], kept.restored(ctx, ctx.saved_tensors)
        alone = not torch.is_grad_enabled() and is_unobserved(grads)
        made = rule.vjp(grads, needs, values, alone)
        return *[g if need else None for g, need in zip(made, needs, strict=True)], None, None

    function = _function(name, forward=forward, backward=backward)
    apply = apply_of(function)
    go_straight_to(function, backward)

    def direct(*args: Any) -> Any:
        made = body(*args)
        if not (torch.is_grad_enabled() and any_requires_grad(inputs := take(args))):
            return made
        made = all_of(made)
        heads = apply(*inputs, args, made)
        return heads if count == 1 else (*all_of(heads), *made[rule.heads :])

    return direct


def _transformed(name: str, operator: Any, count: int, rule: Rule) -> Callable[..., Any]:
    """The way under a transform, which sees the tensors among an autograd function's own arguments alone.

    So members of lists are passed one by one, and last of all the sizes of these lists.
    """

    def forward(*given: Any) -> Any:
        return operator(*_gathered(given))

    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.layout = inputs[-1]
        saved = rule.save(ctx, _gathered(inputs), output)
        ctx.save_for_backward(*saved)
        ctx.save_for_forward(*saved)

    def values_of(ctx: Any) -> tuple[Any, ...]:  # the transform may have ended
        return rule.kept.restored(ctx, unwrapped(ctx.saved_tensors))

    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        needs = _gathered((*ctx.needs_input_grad[:-1], ctx.layout))
        return *_members(rule.differentiate(grads, needs, values_of(ctx)), ctx.layout), None

    def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
        own = _gathered((*tangents[:-1], ctx.layout))
        made = [*rule.jvp([own[place] for place in rule.places], values_of(ctx))]
        made += [None] * (count - rule.heads)
        return tuple(made) if count > 1 else made[0]

    def vmap(info: Any, in_dims: tuple, *given: Any) -> tuple[Any, Any]:
        """One call for each element of the batch."""
        made = []
        for element in range(info.batch_size):
            with_dims = zip(given[:-1], in_dims[:-1], strict=True)
            own = [m if dim is None else m.select(dim, element) for m, dim in with_dims]
            made.append(operator(*_gathered((*own, given[-1]))))
        if count == 1:
            return torch.stack(made), 0
        return tuple(torch.stack(t) for t in zip(*made, strict=True)), (0,) * count

    function = _function(
        name, forward=forward, setup_context=setup_context, backward=backward, jvp=jvp, vmap=vmap
    )

    def transformed(*args: Any) -> Any:
        if torch.compiler.is_compiling():
            raise NotImplementedError(
                "torch.compile cannot trace this operator under a transform of torch.func: compile the "
                "function without the transform, or transform it without compiling it"
            )
        layout = tuple(len(a) if isinstance(a, list) else None for a in args)
        return function.apply(*_members(args, layout), layout)

    return transformed


def _members(values: Sequence[Any], layout: tuple[int | None, ...]) -> list[Any]:
    """Values for the arguments, those of a list one by one; None for a list means None for each."""
    pairs = zip(values, layout, strict=True)
    return [m for v, size in pairs for m in ((v,) if size is None else v or [None] * size)]


def _gathered(given: Sequence[Any]) -> tuple[Any, ...]:
    """The inverse, of members and the layout behind them."""
    rest = iter(given[:-1])
    return tuple(next(rest) if size is None else [next(rest) for _ in range(size)] for size in given[-1])
