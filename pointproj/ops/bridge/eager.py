"""The ways to call an operator: directly, under a transform of ``torch.func``, and by torch's dispatcher.

The dispatcher's way to an operator written in Python (schema, autograd, trees of arguments) takes longer than
most kernels. Only calls that a tracer, a mode, a profiler or a subclass of Tensor observes need that way. All
others go through an autograd function that each operator has. Transforms (``grad``, ``jacrev``, ``hessian``,
``vmap`` and others) have a third way. All three differentiate by the same :class:`Rule`.
"""

import functools
from collections.abc import Callable, Sequence
from itertools import repeat
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pointproj.ops.bridge.flops import announce
from pointproj.ops.bridge.open_numbers import call_with_numbers, open_arguments
from pointproj.ops.torch_internals import (
    any_requires_grad,
    apply_of,
    go_straight_to,
    is_observed,
    is_transforming,
    wrapper_test,
)

# Types of arguments in a direct call. Symbolic numbers, proxies and subclasses are not among them.
PLAIN = frozenset({Tensor, torch.nn.Parameter, bool, int, float, str, list, torch.dtype, type(None)})


Choice = Callable[[Sequence[Any]], tuple[Any, ...]]


def is_unobserved(args: Sequence[Any], tensors_of: Choice = tuple) -> bool:
    """Whether work on these arguments, the first of them a tensor, can be done directly."""
    if torch.compiler.is_compiling() or is_observed() or not PLAIN.issuperset(map(type, args)):
        return False
    first, is_wrapped = args[0], wrapper_test()
    if not isinstance(first, Tensor) or first.is_meta:
        return False
    for tensor in tensors_of(args):
        # Wrappers may be left over from a transform that ended; torch resolves negative bits on its way.
        if isinstance(tensor, Tensor) and (is_wrapped(tensor) or tensor.is_neg()):
            return False
    return True


def _at(places: Sequence[int]) -> Choice:
    """A function that takes what stands at these places."""
    return itemgetter(*places) if len(places) > 1 else lambda values: tuple(values[i] for i in places)


def all_of(made: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The results of an operator, also of one that returns a single tensor."""
    return (made,) if isinstance(made, Tensor) else made


class Rule(NamedTuple):
    """How an operator is differentiated.

    Attributes
    ----------
    places : sequence of int
        Positions of the arguments that get a gradient; empty: all tensors.
    heads : int
        How many outputs, from the first, a gradient can arrive for.
    saved : int
        How many of ``values``, from the first, are saved for the backward.
    vjp : callable
        ``vjp(grads, needs, values, unobserved)``: a gradient for each place, any value where ``needs`` is
        false. ``values`` are the arguments, then the outputs; grads may be None; ``unobserved`` says that
        kernels can be called directly.
    jvp : callable
        ``jvp(tangents, values)``: derivatives of the heads along a tangent for each place, None for zero.
    """

    places: Sequence[int]
    heads: int
    saved: int
    vjp: Callable[..., Sequence[Tensor]]
    jvp: Callable[..., Sequence[Tensor]]


def register_ways(name: str, operator: Any, count: int, rule: Rule) -> None:
    """Differentiate an operator with ``count`` outputs by a rule, however it is called.

    The operator has ``parameters``, the annotations of its arguments by name, and ``body(*args)``, which does
    its work without derivatives. It gets ``direct(*args)``, which is called where ``is_direct(args)``.
    """
    places, heads, saved, vjp, jvp = rule
    kinds = [*operator.parameters.values(), *[Tensor] * count]
    tensors = [i for i, kind in enumerate(kinds) if kind in (Tensor, Tensor | None)]
    places = places or [i for i in tensors if i < len(operator.parameters)]
    watched = [i for i in tensors if i < saved]  # torch checks that nobody writes to them
    others = [i for i in range(saved) if i not in watched]
    apart = [*watched, *others]
    watched_of, others_of, needs_of = _at(watched), _at(others), _at(places)
    in_order = _at([apart.index(i) for i in range(saved)])

    def setup_context(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
        outputs = all_of(output)
        if count > heads:
            ctx.mark_non_differentiable(*outputs[heads:])
        ctx.set_materialize_grads(False)  # no zeros for outputs that no gradient arrives for
        values = (*inputs, *outputs)
        ctx.save_for_backward(*watched_of(values))
        ctx.others = others_of(values)

    def setup_both_ways(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
        setup_context(ctx, inputs, output)
        ctx.save_for_forward(*watched_of((*inputs, *all_of(output))))

    def saved_values(ctx: Any) -> tuple[Any, ...]:
        return in_order(ctx.saved_tensors + ctx.others)

    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        needed, grads = ctx.needs_input_grad, grads[:heads]
        every, needs = [None] * len(needed), [*needs_of(needed)]
        unobserved = not torch.is_grad_enabled() and is_unobserved(grads)
        made = vjp(grads, needs, saved_values(ctx), unobserved)
        for place, gradient, need in zip(places, made, needs, strict=True):
            if need:
                every[place] = gradient
        return tuple(every)

    def along(ctx: Any, *tangents: Tensor | None) -> Any:
        made = (*jvp([*needs_of(tangents)], saved_values(ctx)), *[None] * (count - heads))
        return made if count > 1 else made[0]

    torch.library.register_autograd(name, backward, setup_context=setup_context)
    function = _function(name, setup_context=setup_context, forward=operator.body, backward=backward)
    apply = apply_of(function)
    go_straight_to(function, backward)

    def direct(*args: Any) -> Any:
        is_recorded = torch.is_grad_enabled() and any_requires_grad(needs_of(args))
        return (apply if is_recorded else operator.body)(*args)

    methods = {"forward": operator, "backward": backward, "jvp": along, "vmap": _vmap_of(operator, count)}
    operator.transformed = _function(name, setup_context=setup_both_ways, **methods).apply
    arguments = range(len(operator.parameters))
    operator.is_direct = functools.partial(
        is_unobserved, tensors_of=_at([i for i in tensors if i in arguments])
    )
    operator.direct, operator.full_name = direct, name
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
    """A subclass of torch's class of operators, whose calls take the shortest way.

    torch.compile does not enter it.
    """

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) < len(self.parameters):
            args = _complete(self, args, kwargs)
        if not torch.compiler.is_dynamo_compiling() and self.is_direct(args):
            return self.direct(*args)
        if not is_transforming():
            if not torch.compiler.is_compiling():
                announce(self.full_name)
            elif names := open_arguments(self, args):
                return call_with_numbers(self, names, args)
            return kind.__call__(self, *args)
        if torch.compiler.is_compiling():
            raise NotImplementedError(
                "torch.compile cannot trace this operator under a transform of torch.func: compile the "
                "function without the transform, or transform it without compiling it"
            )
        return self.transformed(*args)

    return type("Operator", (kind,), {"__call__": call})


def _complete(operator: Any, args: tuple, kwargs: dict[str, Any]) -> tuple:
    """All arguments by their places; what is given wrongly is for torch to refuse."""
    names = [*operator.parameters]
    every = dict(zip(names[len(names) - len(operator.defaults) :], operator.defaults, strict=True))
    every |= dict(zip(names, args, strict=False)) | kwargs
    missing = [name for name in names if name not in every]
    if missing or len(every) > len(names):
        unknown = [name for name in every if name not in names]
        raise TypeError(f"{operator}: missing are the arguments {missing}, unknown are {unknown}")
    return tuple(every[name] for name in names)


def _function(name: str, **methods: Callable) -> type[torch.autograd.Function]:
    methods = {key: staticmethod(method) for key, method in methods.items()}
    return type(name.replace("::", "_"), (torch.autograd.Function,), methods)
