"""One declaration, one torch operator with fake kernel, first and second backward.

A function with annotated arguments becomes ``torch.ops.<namespace>.<name>``; its backward and second
backward become operators of their own, so that ``torch.compile``, CUDA graphs, activation checkpointing
and ``create_graph=True`` all see nothing but functional operators.

Nothing passes from forward to backward on the side: whatever a backward needs arrives through its
arguments, so recomputing a forward, or keeping two graphs alive, cannot mix runs up.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from itertools import chain, islice
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pointproj.ops.bridge.compiler_cache import key_by_version
from pointproj.ops.bridge.eager import Derivative, functions_of, needs_of, nobody_looks_on, save_by, saved_by
from pointproj.ops.bridge.torch_internals import any_requires_grad, is_transforming

Spec = tuple[Sequence[int], torch.dtype]  # shape and dtype of an output


class Saved(NamedTuple):
    """What a backward works with: the forward's inputs by name, and its outputs in order."""

    inputs: dict[str, Any]
    outputs: tuple[Tensor, ...]


def opaque(name: str, function: Callable, fake: Callable) -> Any:
    """Register a function as an operator that torch.compile does not look into."""
    operator = torch.library.custom_op(name, function, mutates_args=())
    operator.register_fake(fake)
    return operator


Register = Callable[[str, Callable, Callable], Any]


def signed(function: Callable, parameters: dict[str, Any], returns: Any) -> Callable:
    """Give a function of any arguments the names and annotations that torch reads."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    listed = [inspect.Parameter(name, kind, annotation=a) for name, a in parameters.items()]
    function.__signature__ = inspect.Signature(listed, return_annotation=returns)
    return function


def torch_op(
    name: str,
    forward: Callable[..., tuple[Tensor, ...]],
    outputs: Callable[..., tuple[Spec, ...]],
    *,
    differentiable: Sequence[str] = (),
    grad_outputs: int = 1,
    backward: Callable[[tuple[Tensor, ...], dict[str, bool], Saved], tuple[Tensor | None, ...]] | None = None,
    second_backward: Callable[[tuple[Tensor, ...], tuple[Tensor, ...], Saved], tuple[Tensor, ...]]
    | None = None,
    register: Register = opaque,
) -> Callable[..., Tensor | tuple[Tensor, ...]]:
    """Register an operator and its derivatives with torch.

    Parameters
    ----------
    name : str
        ``"namespace::operator"``.
    forward : callable
        Its annotated arguments (``Tensor``, ``Tensor | None``, ``list[Tensor]``, ``int``, ``float``,
        ``bool``, ``str``) are the operator's. It returns a tuple of new tensors, annotated as such; the
        operator returns that tuple, or the tensor if it is one. Tensors arrive detached.
    outputs : callable
        Same arguments; shape and dtype of every output, from shapes and numbers alone.
    differentiable : sequence of str
        Names of the inputs that get a gradient.
    grad_outputs : int
        How many of the outputs, from the first, a gradient can arrive for.
    backward : callable, optional
        ``backward(grads, needs, saved)``: one gradient for each differentiable input, in their order, of
        that input's shape and dtype; None where ``needs[name]`` is false.
    second_backward : callable, optional
        ``second_backward(directions, grads, saved)``: gradients of ``sum(direction * gradient)`` over the
        gradients that ``backward`` returned; first for ``grads``, then for the differentiable inputs.
    register : callable
        ``register(name, function, fake)`` makes the operators of ``forward`` and ``backward``, and returns
        what has ``register_autograd``; by default they are opaque to torch.compile.

    Returns
    -------
    callable
        The operator: it takes the arguments of ``forward``.

    Raises
    ------
    NotImplementedError
        At the backward call, when a derivative is asked for that was not given here.
    """
    key_by_version()
    declared = _Declared(name, forward, tuple(differentiable), grad_outputs)
    if backward is None or not differentiable:
        what = "a backward" if differentiable else "differentiable inputs, and has no gradient"
        first = second = _refuse(f"{name} was declared without {what}")
    else:
        second = _second_backward_op(declared, second_backward)
        first = _backward_op(declared, backward, second, register)

    def fake(*args: Any) -> tuple[Tensor, ...]:
        device = next(a.device for a in args if isinstance(a, Tensor))
        return tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in outputs(*args))

    def save(ctx: Any, inputs: Sequence[Any], output: Tensor | tuple[Tensor, ...]) -> None:
        made = _all(output)
        ctx.mark_non_differentiable(*made[grad_outputs:])
        ctx.set_materialize_grads(False)  # no zeros for outputs that no gradient arrives for
        declared.kept.save(ctx, (*inputs, *made))

    def pull(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs, outputs = declared.split(declared.kept.load(ctx))
        heads = zip(grads[:grad_outputs], outputs, strict=False)
        grads = [_zeros_like(o) if g is None else g.contiguous() for g, o in heads]
        needs = [*declared.differentiable_of(needs_of(ctx))]
        if not torch.is_grad_enabled() and nobody_looks_on(grads):  # nor at what the forward was called with
            made = first.body(*grads, needs, *inputs, *outputs)
        else:
            # Outputs are functions of the inputs, and derivatives count them as such: with their history, a
            # second backward would come back here once more, with gradients of zero.
            made = first(*grads, needs, *inputs, *detached(outputs))
        return declared.gradients(inputs, _all(made), needs)

    def push(ctx: Any, *tangents: Any) -> tuple[Tensor | None, ...]:
        # The second backward is the gradient of <tangents, backward(grad)>, by the grad among others: that is
        # the derivative along the tangents.
        flat = declared.kept.load(ctx)
        _, outputs = declared.split(flat)
        grads = (torch.zeros_like(o) for o in outputs[:grad_outputs])
        made = _all(second(*declared.directions(flat, tangents), *grads, *flat))[:grad_outputs]
        return *made, *([None] * (declared.count - grad_outputs))

    derivative = save, pull, push
    return _define(name, declared.parameters, declared.count, forward, fake, derivative, register)


class _Declared:
    """The forward's arguments, and where they stand in the flat argument lists of its derivatives."""

    def __init__(self, name: str, forward: Callable, differentiable: tuple[str, ...], grad_outputs: int):
        signature = inspect.signature(forward, eval_str=True)
        self.name = name
        self.parameters = {p.name: p.annotation for p in signature.parameters.values()}
        self.names = list(self.parameters)
        self.count = len(signature.return_annotation.__args__)  # of outputs
        self.differentiable = differentiable
        self.grad_outputs = grad_outputs
        unknown = set(differentiable) - set(self.names)
        if unknown:
            raise TypeError(f"{name}: differentiable names no argument of forward: {sorted(unknown)}")
        self.places = [self.names.index(n) for n in differentiable]
        self.differentiable_of = _taker(self.places)
        outputs = {f"output_{i}": Tensor for i in range(self.count)}
        self.of_backward = {f"grad_{i}": Tensor for i in range(grad_outputs)}, self.parameters | outputs
        self.kept = _Kept(self.of_backward[1])  # by the forward

    def split(self, flat: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        """Inputs and outputs."""
        return flat[: len(self.names)], flat[len(self.names) :]

    def saved(self, flat: Sequence[Any]) -> Saved:
        inputs, outputs = self.split(flat)
        return Saved(dict(zip(self.names, inputs, strict=True)), tuple(outputs))

    def gradients(
        self, inputs: Sequence[Any], made: Sequence[Tensor | None], needs: Sequence[bool]
    ) -> tuple[Any, ...]:
        """One gradient for each input, in the structure torch expects: lists stay lists."""
        every = [[None] * len(a) if type(a) is list else None for a in inputs]
        for place, gradient, need in zip(self.places, made, needs, strict=True):
            if need:
                every[place] = gradient
        return tuple(every)

    def directions(self, flat: Sequence[Any], tangents: Sequence[Any]) -> list[Tensor]:
        """The tangent of each differentiable input, zeros where it has none."""
        pairs = zip(self.differentiable_of(flat), self.differentiable_of(tangents), strict=True)
        return [_zeros_like(i) if t is None else t.contiguous() for i, t in pairs]


def _backward_op(declared: _Declared, backward: Callable, second: Callable, register: Register) -> Callable:
    """The first derivative as an operator: (grads, needs, inputs, outputs) -> gradients."""
    heads, width = declared.grad_outputs, len(declared.differentiable)
    grads, saved = declared.of_backward
    kept = _Kept(grads | saved)

    def run(*args: Any) -> tuple[Tensor | None, ...]:
        needed = dict(zip(declared.differentiable, args[heads], strict=True))
        return backward(args[:heads], needed, declared.saved(args[heads + 1 :]))

    def fake(*args: Any) -> tuple[Tensor, ...]:
        pairs = zip(declared.differentiable_of(args[heads + 1 :]), args[heads], strict=True)
        return tuple(_contiguous_like(i) if need else args[0].new_empty(0) for i, need in pairs)

    def save(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
        ctx.set_materialize_grads(False)
        ctx.needed = inputs[heads]
        kept.save(ctx, (*inputs[:heads], *inputs[heads + 1 :]))

    def pull(ctx: Any, *directions: Tensor) -> tuple[Tensor | None, ...]:
        grads, flat = (values := kept.load(ctx))[:heads], values[heads:]
        inputs = declared.differentiable_of(flat)
        whole = (
            d.contiguous() if need and d is not None else _zeros_like(i)
            for d, need, i in zip(directions, ctx.needed, inputs, strict=True)
        )
        made = _all(second(*whole, *grads, *flat))
        present = [i is not None for i in inputs]
        gradients = declared.gradients(declared.split(flat)[0], made[heads:], present)
        return *made[:heads], None, *gradients, *([None] * declared.count)

    def push(ctx: Any, *tangents: Any) -> tuple[Tensor, ...]:
        # Linear in the upstream gradients; by the inputs, the second derivatives are symmetric.
        grads, flat = (values := kept.load(ctx))[:heads], values[heads:]
        along = (torch.zeros_like(g) if t is None else t for g, t in zip(grads, tangents, strict=False))
        along_grads = _all(first(*along, ctx.needed, *flat))
        directions = declared.directions(flat, tangents[heads + 1 :])
        along_inputs = _all(second(*directions, *grads, *flat))[heads:]
        made = zip(along_grads, along_inputs, ctx.needed, strict=True)
        return tuple(g + x if need else g for g, x, need in made)

    name, parameters = f"{declared.name}_backward", grads | {"needs": list[bool]} | saved
    first = _define(name, parameters, width, run, fake, (save, pull, push), register)
    return first


def _second_backward_op(declared: _Declared, second_backward: Callable | None) -> Callable[..., Any]:
    """The second derivative as an operator: (directions, grads, inputs, outputs) -> gradients."""
    name, width, heads = declared.name, len(declared.differentiable), declared.grad_outputs
    if second_backward is None:
        return _refuse(f"{name} was declared without a second backward: create_graph=True is not supported")
    directions, (grads, saved) = {f"direction_{i}": Tensor for i in range(width)}, declared.of_backward

    def run(*args: Any) -> tuple[Tensor, ...]:
        flat = declared.saved(args[width + heads :])
        return second_backward(args[:width], args[width : width + heads], flat)

    def fake(*args: Any) -> tuple[Tensor, ...]:
        grads, inputs = args[width : width + heads], declared.differentiable_of(args[width + heads :])
        return tuple(grads[0].new_empty(0) if t is None else _contiguous_like(t) for t in (*grads, *inputs))

    refuse = _refuse(f"{name} has no third derivative")
    derivative = (lambda *_, **__: None), refuse, refuse
    parameters = directions | grads | saved
    return _define(f"{name}_second_backward", parameters, heads + width, run, fake, derivative, opaque)


def _define(
    name: str,
    parameters: dict[str, Any],
    count: int,
    function: Callable[..., Sequence[Tensor | None]],
    fake: Callable[..., Sequence[Tensor]],
    derivative: Derivative,
    register: Register,
) -> Any:
    """Register an operator of these parameters with ``count`` results.

    There are no optional results: an empty tensor stands for None. Plain eager mode needs no more than
    ``alone(*args)``, if what ``register`` makes has it.
    """

    def single_or_all(made: Sequence[Tensor]) -> Any:
        return tuple(made) if count > 1 else made[0]

    def body(*args: Any) -> Any:
        made = function(*detached(args))
        return single_or_all([args[0].new_empty(0) if m is None else m for m in made])

    signed(body, parameters, tuple[(Tensor,) * count] if count > 1 else Tensor)
    operator = register(name, body, lambda *args: single_or_all(fake(*args)))
    operator.register_autograd(derivative[1], setup_context=derivative[0])
    operator.names, operator.body = list(parameters), getattr(operator, "alone", body)
    operator.direct, operator.transformed = functions_of(name, operator.body, operator, derivative)
    if hasattr(operator, "register_kernel") or hasattr(operator, "alone"):
        operator.__class__ = _called_in_three_ways(type(operator))
    return operator


@functools.cache
def _called_in_three_ways(kind: type) -> type:
    """torch's class of operators, whose calls take the shortest way; torch.compile does not come here."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs:
            args = (*args, *(kwargs[name] for name in self.names[len(args) :]))
        if nobody_looks_on(args):
            return self.direct(*args)
        return self.transformed(*args) if is_transforming() else kind.__call__(self, *args)

    return type("Operator", (kind,), {"__call__": call})


def detached(args: Sequence[Any]) -> Sequence[Any]:
    """Tensors, also those in lists, without ``requires_grad``, which foreign libraries trip over."""
    if not any_requires_grad(args):
        return args
    return [
        (a.detach() if a.requires_grad else a)
        if isinstance(a, Tensor)
        else detached(a)
        if isinstance(a, list)
        else a
        for a in args
    ]


def _all(made: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (made,) if isinstance(made, Tensor) else made


def _refuse(message: str) -> Callable[..., Any]:
    def refuse(*_: Any) -> Any:
        raise NotImplementedError(message)

    refuse.body = refuse
    return refuse


class _Kept:
    """How arguments are kept for a backward: tensors, also those in lists, where torch watches over them."""

    def __init__(self, parameters: dict[str, Any]) -> None:
        kinds = list(parameters.values())
        self.lists = [i for i, kind in enumerate(kinds) if kind == list[Tensor]]
        tensors = [i for i, kind in enumerate(kinds) if kind in (Tensor, Tensor | None)]
        others = [i for i in range(len(kinds)) if i not in (*tensors, *self.lists)]
        order = [*tensors, *others, *self.lists]
        self.tensors, self.others, self.count = _taker(tensors), _taker(others), len(tensors)
        self.ordered = _taker([order.index(i) for i in range(len(kinds))])

    def save(self, ctx: Any, args: Sequence[Any]) -> None:
        lists = [args[i] for i in self.lists]
        ctx.others, ctx.sizes = self.others(args), [len(members) for members in lists]
        save_by(ctx, (*self.tensors(args), *chain.from_iterable(lists)))

    def load(self, ctx: Any) -> tuple[Any, ...]:
        saved = saved_by(ctx)
        members = iter(saved[self.count :])
        lists = [[*islice(members, size)] for size in ctx.sizes]
        return self.ordered((*saved[: self.count], *ctx.others, *lists))


def _taker(places: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """What takes the values in these places."""
    return itemgetter(*places) if len(places) > 1 else lambda values: tuple(values[i] for i in places)


def _contiguous_like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _zeros_like(tensor: Tensor | None) -> Tensor:
    return (
        torch.zeros(0) if tensor is None else torch.zeros_like(tensor, memory_format=torch.contiguous_format)
    )
