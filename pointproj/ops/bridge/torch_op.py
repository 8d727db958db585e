"""One declaration, one torch operator with fake kernel, first and second backward.

A function with annotated arguments becomes ``torch.ops.<namespace>.<name>``; its backward and second
backward become operators of their own, so that ``torch.compile``, CUDA graphs, activation checkpointing
and ``create_graph=True`` all see nothing but functional operators.

Nothing passes from forward to backward on the side: whatever a backward needs arrives through its
arguments, so recomputing a forward, or keeping two graphs alive, cannot mix runs up.
"""

import inspect
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pointproj.ops.bridge.compiler_cache import key_by_version
from pointproj.ops.bridge.eager import nobody_looks_on
from pointproj.ops.bridge.replay import Replayable, detached
from pointproj.ops.bridge.transforms import transformable

Spec = tuple[Sequence[int], torch.dtype]  # shape and dtype of an output


class _Saved(NamedTuple):
    """Stands for a list of so many tensors that are saved."""

    count: int


_SAVED = object()  # stands for one tensor


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
    replayable: bool = False,
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
    replayable : bool
        Whether forward and backward are as :class:`pointproj.ops.bridge.replay.Replayable` asks for it: eager
        calls with known shapes then do not run them again.

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
    arguments = _Arguments(name, forward, tuple(differentiable), grad_outputs)

    def fake(*args: Any) -> tuple[Tensor, ...]:
        device = next(a.device for a in args if isinstance(a, Tensor))
        return tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in outputs(*args))

    count = len(inspect.signature(forward).return_annotation.__args__)
    directly = Replayable if replayable else _with_detached
    operator, body = _define(name, arguments.parameters, count, forward, fake, register, directly(forward))
    if backward is None or not differentiable:
        backward_directly = first = second = _refuse(
            f"{name} was declared without a backward"
            if differentiable
            else f"{name} has no gradient: it was declared without differentiable inputs"
        )
    else:
        made = _backward_op(arguments, count, backward, second_backward, register, directly)
        first, second, backward_directly = made
    width = len(arguments.names)

    def save(ctx: Any, inputs: tuple, output: Tensor | tuple[Tensor, ...]) -> None:
        made = _all(output)
        ctx.mark_non_differentiable(*made[grad_outputs:])
        ctx.set_materialize_grads(False)  # no zeros for outputs that no gradient arrives for
        _save(ctx, (*inputs, *made))

    def chain(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        asked = ctx.needs_input_grad
        needs = [asked[place] for place in arguments.places]
        flat = _load(ctx)
        inputs, outputs = flat[:width], flat[width:]
        heads = zip(grads[:grad_outputs], outputs, strict=False)
        grads = tuple(_zeros_like(o) if g is None else g.contiguous() for g, o in heads)
        if not torch.is_grad_enabled() and nobody_looks_on(grads):
            made = backward_directly(*grads, needs, *inputs, *outputs)
        else:
            # Outputs are functions of the inputs, and derivatives count them as such: with their history, a
            # second backward would come back here once more, with gradients of zero.
            made = _all(first(*grads, needs, *inputs, *detached(outputs)))
        return arguments.gradients(inputs, made, needs)

    def push(ctx: Any, *tangents: Any) -> tuple[Tensor | None, ...]:
        # The second backward is the gradient of <tangents, backward(grad)>, by the grad among others: that is
        # the derivative along the tangents.
        flat = _load(ctx)
        directions = arguments.directions(flat, tangents)
        grads = (torch.zeros_like(o) for o in flat[width:][:grad_outputs])
        made = _all(second(*directions, *grads, *flat))[:grad_outputs]
        return *made, *([None] * (count - len(made)))

    operator.register_autograd(chain, setup_context=save)
    return transformable(operator, body, save, chain, push)


class _Arguments:
    """The forward's arguments, and where they stand in the flat argument lists of its derivatives."""

    def __init__(self, name: str, forward: Callable, differentiable: tuple[str, ...], grad_outputs: int):
        self.name = name
        self.parameters = {p.name: p.annotation for p in inspect.signature(forward).parameters.values()}
        self.names = list(self.parameters)
        self.differentiable = differentiable
        self.grad_outputs = grad_outputs
        unknown = set(differentiable) - set(self.names)
        if unknown:
            raise TypeError(f"{name}: differentiable names no argument of forward: {sorted(unknown)}")
        self.places = [self.names.index(n) for n in differentiable]

    def saved(self, flat: Sequence[Any]) -> Saved:
        split = len(self.names)
        return Saved(dict(zip(self.names, flat[:split], strict=True)), tuple(flat[split:]))

    def gradients(
        self, inputs: Sequence[Any], made: Sequence[Tensor | None], needs: Sequence[bool]
    ) -> tuple[Any, ...]:
        """One gradient for each input, in the structure torch expects: lists stay lists."""
        every = [[None] * len(a) if isinstance(a, list) else None for a in inputs]
        for place, gradient, need in zip(self.places, made, needs, strict=True):
            if need:
                every[place] = gradient
        return tuple(every)

    def directions(self, flat: Sequence[Any], tangents: Sequence[Any]) -> list[Tensor]:
        """The tangent of each differentiable input, zeros where it has none."""
        pairs = zip(self.differentiable_of(flat), self.differentiable_of(tangents), strict=True)
        return [_zeros_like(i) if t is None else t.contiguous() for i, t in pairs]

    def differentiable_of(self, flat: Sequence[Any]) -> list[Tensor | None]:
        return [flat[place] for place in self.places]


def _backward_op(
    arguments: _Arguments,
    count: int,
    backward: Any,
    second_backward: Any,
    register: Register,
    directly: Callable[[Callable], Callable],
) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """The first and the second derivative as operators, and what the first does.

    The first takes grads, needs, inputs, outputs, and returns gradients.
    """
    heads = arguments.grad_outputs
    grads = {f"grad_{i}": Tensor for i in range(heads)}
    saved = arguments.parameters | {f"output_{i}": Tensor for i in range(count)}

    def run(*args: Any) -> tuple[Tensor, ...]:
        grads, needs, flat = args[:heads], args[heads], args[heads + 1 :]
        needed = dict(zip(arguments.differentiable, needs, strict=True))
        return backward(grads, needed, arguments.saved(flat))

    def fake(*args: Any) -> tuple[Tensor, ...]:
        inputs = arguments.differentiable_of(args[heads + 1 :])
        pairs = zip(inputs, args[heads], strict=True)
        return tuple(_contiguous_like(i) if need else args[0].new_empty(0) for i, need in pairs)

    name, width = f"{arguments.name}_backward", len(arguments.differentiable)
    run_directly = directly(run)
    parameters = grads | {"needs": list[bool]} | saved
    operator, body = _define(name, parameters, width, run, fake, register, run_directly)
    second = _second_backward_op(arguments, grads | saved, second_backward)

    def save(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)
        ctx.needed = inputs[heads]
        _save(ctx, inputs[:heads] + inputs[heads + 1 :])

    def chain(ctx: Any, *directions: Tensor) -> tuple[Tensor | None, ...]:
        flat = _load(ctx)
        inputs = arguments.differentiable_of(flat[heads:])
        whole = tuple(
            d.contiguous() if need and d is not None else _zeros_like(i)
            for d, need, i in zip(directions, ctx.needed, inputs, strict=True)
        )
        made = _all(second(*whole, *flat))
        present = [i is not None for i in inputs]
        gradients = arguments.gradients(flat[heads : heads + len(arguments.names)], made[heads:], present)
        return (*made[:heads], None, *gradients, *([None] * count))

    def push(ctx: Any, *tangents: Any) -> tuple[Tensor, ...]:
        # Linear in the upstream gradients; by the inputs, the second derivatives are symmetric.
        flat = _load(ctx)
        grads, tangents = tangents[:heads], tangents[heads + 1 :]
        grads = tuple(torch.zeros_like(g) if t is None else t for g, t in zip(flat, grads, strict=False))
        along_grads = _all(first(*grads, ctx.needed, *flat[heads:]))
        along_inputs = _all(second(*arguments.directions(flat[heads:], tangents), *flat))[heads:]
        made = zip(along_grads, along_inputs, ctx.needed, strict=True)
        return tuple(g + x if need else g for g, x, need in made)

    operator.register_autograd(chain, setup_context=save)
    first = transformable(operator, body, save, chain, push)
    return first, second, run_directly


def _second_backward_op(
    arguments: _Arguments, parameters: dict[str, Any], second_backward: Any
) -> Callable[..., Any]:
    """The second derivative as an operator: (directions, grads, inputs, outputs) -> gradients."""
    name = arguments.name
    if second_backward is None:
        return _refuse(f"{name} was declared without a second backward: create_graph=True is not supported")
    width, heads = len(arguments.differentiable), arguments.grad_outputs

    def run(*args: Any) -> tuple[Tensor, ...]:
        directions, grads, flat = args[:width], args[width : width + heads], args[width + heads :]
        return second_backward(directions, grads, arguments.saved(flat))

    def fake(*args: Any) -> tuple[Tensor, ...]:
        grads, inputs = args[width : width + heads], arguments.differentiable_of(args[width + heads :])
        return tuple(grads[0].new_empty(0) if t is None else _contiguous_like(t) for t in (*grads, *inputs))

    directions = {f"direction_{i}": Tensor for i in range(width)}
    of_second = directions | parameters
    name, run_directly = f"{name}_second_backward", _with_detached(run)
    second, body = _define(name, of_second, heads + width, run, fake, opaque, run_directly)
    refuse = _refuse(f"{arguments.name} has no third derivative")
    second.register_autograd(refuse, setup_context=lambda *_, **__: None)
    return transformable(second, body, lambda *_, **__: None, refuse, refuse)


def _with_detached(function: Callable) -> Callable[..., Any]:
    """The function, whose arguments nothing has to be differentiated by."""
    return lambda *args: function(*(detached(args) if torch._C._any_requires_grad(*args) else args))


def _define(
    name: str,
    parameters: dict[str, Any],
    count: int,
    function: Callable,
    fake: Callable,
    register: Register,
    directly: Callable,
) -> tuple[Any, Callable[..., Any]]:
    """Register an operator of these parameters with ``count`` results; also what it does in eager mode.

    Torch reads parameters and results off that function's signature. There are no optional results.
    """

    def body_of(function: Callable) -> Callable[..., Any]:
        def body(*args: Any) -> Any:
            made = function(*args)
            return single_or_all([args[0].new_empty(0) if m is None else m for m in made])

        return body

    def single_or_all(made: Sequence[Tensor]) -> Any:
        return tuple(made) if count > 1 else made[0]

    body = body_of(_with_detached(function))
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    body.__signature__ = inspect.Signature(
        [inspect.Parameter(n, kind, annotation=annotation) for n, annotation in parameters.items()],
        return_annotation=tuple[(Tensor,) * count] if count > 1 else Tensor,
    )
    return register(name, body, lambda *args: single_or_all(fake(*args))), body_of(directly)


def _all(made: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (made,) if isinstance(made, Tensor) else made


def _refuse(message: str) -> Callable[..., Any]:
    def refuse(*_: Any) -> Any:
        raise NotImplementedError(message)

    return refuse


def _save(ctx: Any, args: tuple) -> None:
    """Keep tensors, also those in lists, where torch watches over them, and the rest in its place."""
    tensors, ctx.rest = [], []
    for a in args:
        if isinstance(a, Tensor):
            tensors.append(a)
            ctx.rest.append(_SAVED)
        elif isinstance(a, list):
            tensors += a
            ctx.rest.append(_Saved(len(a)))
        else:
            ctx.rest.append(a)
    ctx.save_for_backward(*tensors)


def _load(ctx: Any) -> tuple:
    tensors = iter(ctx.saved_tensors)
    return tuple(
        next(tensors) if r is _SAVED else list(islice(tensors, r.count)) if type(r) is _Saved else r
        for r in ctx.rest
    )


def _contiguous_like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _zeros_like(tensor: Tensor | None) -> Tensor:
    return (
        torch.zeros(0) if tensor is None else torch.zeros_like(tensor, memory_format=torch.contiguous_format)
    )
