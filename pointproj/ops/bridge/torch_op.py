"""One declaration, one torch operator with fake kernel, first and second backward.

A function with annotated arguments becomes ``torch.ops.<namespace>.<name>``; its backward and second
backward become operators of their own, so that ``torch.compile``, CUDA graphs, activation checkpointing
and ``create_graph=True`` all see nothing but functional operators.

Nothing passes from forward to backward on the side: whatever a backward needs arrives through its
arguments, so recomputing a forward, or keeping two graphs alive, cannot mix runs up.
"""

import hashlib
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pointproj.ops.bridge.eager import Rule, all_of, register_ways
from pointproj.ops.bridge.open_numbers import WithNumbers, operators
from pointproj.ops.specification.records import OptionalTensors, Saved, Tensors
from pointproj.ops.torch_internals import any_requires_grad

Spec = tuple[Sequence[int], torch.dtype]  # shape and dtype of an output

# torch.compile's cache on disk holds sizes of our operators' outputs, and its key only the operators' names.
# With a hash of our sources in the key, an update does not find code of an earlier version.
_sources = sorted(Path(__file__).parents[1].rglob("*.py"))
_digest = hashlib.sha256(b"\0".join(path.read_bytes() for path in _sources))
_version = f"pointproj-{_digest.hexdigest()[:16]}"


def opaque(name: str, function: Callable, fake: Callable, mutates_args: Sequence[str] = ()) -> Any:
    """Register a function as an operator that torch.compile does not look into."""
    operator = torch.library.custom_op(name, function, mutates_args=mutates_args)
    operator.register_fake(fake)
    return operator


Register = Callable[[str, Callable, Callable], Any]


def signed(
    function: Callable, parameters: dict[str, Any], returns: Any, defaults: Sequence[Any] = ()
) -> Callable:
    """Give a function of any arguments the names, annotations and last defaults that torch reads."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    listed = [inspect.Parameter(name, kind, annotation=a) for name, a in parameters.items()]
    for i, default in enumerate(defaults, len(listed) - len(defaults)):
        listed[i] = listed[i].replace(default=default)
    function.__signature__ = inspect.Signature(listed, return_annotation=returns)
    return function


def with_defaults(args: Sequence[Any], size: int, defaults: Sequence[Any]) -> Sequence[Any]:
    """All of ``size`` arguments; torch leaves out the last ones, where they are the defaults."""
    missing = size - len(args)
    return (*args, *defaults[-missing:]) if missing else args


def torch_op(
    name: str,
    forward: Callable[..., tuple[Tensor, ...]],
    outputs: Callable[..., tuple[Spec, ...]],
    *,
    differentiable: Sequence[str] = (),
    grad_outputs: int = 1,
    backward: Callable[[Tensors, dict[str, bool], Saved], OptionalTensors] | None = None,
    second_backward: Callable[[Tensors, Tensors, Saved], Tensors] | None = None,
    register: Register = opaque,
    numbers: Sequence[str] = (),
) -> Callable[..., Tensor | tuple[Tensor, ...]]:
    """Register an operator and its derivatives with torch.

    Parameters
    ----------
    name : str
        ``"namespace::operator"``.
    forward : callable
        Its annotated arguments (``Tensor``, ``Tensor | None``, ``int``, ``float``, ``bool``, ``str``) are
        the operator's. It returns a tuple of new tensors, annotated as such; the
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
        gradients that ``backward`` returned; first for ``grads``, then for the differentiable inputs. As an
        operator it has ``needs`` behind the directions, and a direction of 0 may be an empty tensor.
    register : callable
        ``register(name, function, fake)`` makes the operators of ``forward``, ``backward`` and
        ``second_backward``, and returns what calls them; by default they are opaque to torch.compile.
    numbers : sequence of str
        Arguments of type ``float`` that no shape depends on: torch.compile need not compile for each value.

    Returns
    -------
    callable
        The operator: it takes the arguments of ``forward``.

    Raises
    ------
    NotImplementedError
        At the backward call, when a derivative is asked for that was not given here.
    """
    tag = torch.compiler.config.cache_key_tag
    if _version not in tag:  # others may set it too
        torch.compiler.config.cache_key_tag = f"{tag} {_version}".lstrip()
    declared = _Declared(name, forward, tuple(differentiable), grad_outputs)
    if backward is None or not differentiable:
        what = "a backward" if differentiable else "differentiable inputs, and has no gradient"
        first = second = _refuse(f"{name} was declared without {what}")
    else:
        second = _second_backward_op(declared, second_backward, register)
        first = _backward_op(declared, backward, second, register)

    size = len(declared.parameters)

    def fake(*args: Any) -> tuple[Tensor, ...]:
        device = next(a.device for a in args if isinstance(a, Tensor))
        return tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in outputs(*args))

    def vjp(grads: Sequence, needs: list[bool], values: Sequence, unobserved: bool) -> tuple[Tensor, ...]:
        grads = _filled(grads, values[size:])
        if unobserved:
            return all_of(first.body(*grads, needs, *values))
        # The derivatives already treat outputs as functions of the inputs. With their history, a second
        # backward would come here once more, with gradients of zero.
        return all_of(first(*grads, needs, *values[:size], *detached(values[size:])))

    def jvp(tangents: Sequence, values: Sequence) -> tuple[Tensor, ...]:
        # The second backward differentiates <tangents, backward(grad)>. Its gradient by grad is the
        # derivative along the tangents.
        grads = [torch.zeros_like(o) for o in values[size:][:grad_outputs]]
        needs = [True] * grad_outputs + [False] * len(differentiable)
        return all_of(second(*_directions(tangents, grads[0]), needs, *grads, *values))[:grad_outputs]

    rule = Rule(declared.places, grad_outputs, len(declared.saved), vjp, jvp)
    operator = _define(
        name, declared.parameters, declared.count, forward, fake, rule, register, declared.defaults
    )
    operator.open_numbers = tuple(numbers)
    operator.made_with_numbers = partial(_with_numbers, declared, operator, outputs, first, second)
    operators[operator.full_name] = operator
    return operator


def _with_numbers(
    declared: "_Declared",
    operator: Any,
    outputs: Callable[..., tuple[Spec, ...]],
    first: Any,
    second: Any,
    numbers: Sequence[str],
) -> Callable[..., Tensor | tuple[Tensor, ...]]:
    """The operator and its derivatives with the arguments of these names in one tensor, the last argument."""
    by = WithNumbers(declared.parameters, numbers)

    def flat(saved: Saved) -> list[Any]:
        return [*by.whole([*saved.inputs.values()]), *saved.outputs]

    def forward(*args: Any) -> tuple[Tensor, ...]:
        return all_of(operator.body(*by.whole(args)))

    def backward(grads: Tensors, needs: dict[str, bool], saved: Saved) -> OptionalTensors:
        return all_of(first.body(*grads, [*needs.values()], *flat(saved)))

    def second_backward(directions: Tensors, grads: Tensors, saved: Saved) -> Tensors:
        needs = [True] * (len(directions) + len(grads))
        return all_of(second.body(*_directions(directions, grads[0]), needs, *grads, *flat(saved)))

    return torch_op(
        f"{declared.name}_with_{'_and_'.join(numbers)}",
        signed(forward, by.parameters, tuple[(Tensor,) * declared.count]),
        lambda *args: outputs(*by.whole(args, known=False)),
        differentiable=declared.differentiable,
        grad_outputs=len(declared.grads),
        backward=backward,
        second_backward=second_backward,
    )


class _Declared:
    """The forward's arguments, and where they stand in the flat argument lists of its derivatives."""

    def __init__(self, name: str, forward: Callable, differentiable: tuple[str, ...], grad_outputs: int):
        signature = inspect.signature(forward, eval_str=True)
        self.name = name
        self.parameters = {p.name: p.annotation for p in signature.parameters.values()}
        self.defaults = [p.default for p in signature.parameters.values() if p.default is not p.empty]
        self.count = len(signature.return_annotation.__args__)  # of outputs
        self.differentiable = differentiable
        unknown = set(differentiable) - set(self.parameters)
        if unknown:
            raise TypeError(f"{name}: differentiable names no argument of forward: {sorted(unknown)}")
        self.places = [[*self.parameters].index(n) for n in differentiable]
        self.grads = {f"grad_{i}": Tensor for i in range(grad_outputs)}
        self.saved = self.parameters | {f"output_{i}": Tensor for i in range(self.count)}

    def differentiable_of(self, flat: Sequence[Any]) -> list[Any]:
        return [flat[place] for place in self.places]

    def saved_as(self, flat: Sequence[Any]) -> Saved:
        return Saved(dict(zip(self.parameters, flat, strict=False)), tuple(flat[len(self.parameters) :]))


def _backward_op(declared: _Declared, backward: Callable, second: Callable, register: Register) -> Callable:
    """The first derivative as an operator: (grads, needs, inputs, outputs) -> gradients."""
    heads, width = len(declared.grads), len(declared.differentiable)
    parameters = declared.grads | {"needs": list[bool]} | declared.saved

    def run(*args: Any) -> tuple[Tensor | None, ...]:
        needed = dict(zip(declared.differentiable, args[heads], strict=True))
        return backward(args[:heads], needed, declared.saved_as(args[heads + 1 :]))

    def fake(*args: Any) -> tuple[Tensor, ...]:
        pairs = zip(declared.differentiable_of(args[heads + 1 :]), args[heads], strict=True)
        return tuple(empty_like(i) if need else args[0].new_empty(0) for i, need in pairs)

    def vjp(
        directions: Sequence, needs: list[bool], values: Sequence, unobserved: bool
    ) -> tuple[Tensor, ...]:
        grads, needed, flat = values[:heads], values[heads], values[heads + 1 :]
        directions = [d if need else None for d, need in zip(directions, needed, strict=True)]
        derive = second.body if unobserved else second
        return all_of(derive(*_directions(directions, grads[0]), needs, *grads, *flat))

    def jvp(tangents: Sequence, values: Sequence) -> tuple[Tensor, ...]:
        # Linear in the upstream gradients; by the inputs, the second derivatives are symmetric.
        grads, needed, flat = values[:heads], values[heads], values[heads + 1 :]
        along_grads = all_of(first(*_filled(tangents[:heads], grads), needed, *flat))
        directions = _directions(tangents[heads:], grads[0])
        along_inputs = all_of(second(*directions, [False] * heads + needed, *grads, *flat))[heads:]
        made = zip(along_grads, along_inputs, needed, strict=True)
        return tuple(g + x if need else g for g, x, need in made)

    places = [*range(heads), *(heads + 1 + place for place in declared.places)]
    rule = Rule(places, width, len(parameters), vjp, jvp)
    first = _define(f"{declared.name}_backward", parameters, width, run, fake, rule, register)
    return first


def _second_backward_op(
    declared: _Declared, second_backward: Callable | None, register: Register
) -> Callable[..., Any]:
    """The second derivative as an operator: (directions, needs, grads, inputs, outputs) -> gradients."""
    name, width = declared.name, len(declared.differentiable)
    count = width + len(declared.grads)
    if second_backward is None:
        return _refuse(
            f"{name} was declared without a second backward, which create_graph=True and derivatives in "
            "forward mode (jvp, hessian) need: declare one, second_backward="
        )
    parameters = {f"direction_{i}": Tensor for i in range(width)} | {"needs": list[bool]}
    parameters |= declared.grads | declared.saved

    def run(*args: Any) -> tuple[Tensor | None, ...]:
        directions, needs, grads = args[:width], args[width], args[width + 1 : count + 1]
        flat = args[count + 1 :]
        directions = [None if d.numel() == 0 else d for d in directions]
        directions = tuple(_filled(directions, declared.differentiable_of(flat)))
        made = second_backward(directions, grads, declared.saved_as(flat))
        return tuple(m if need else None for m, need in zip(made, needs, strict=True))

    def fake(*args: Any) -> tuple[Tensor, ...]:
        likes = *args[width + 1 : count + 1], *declared.differentiable_of(args[count + 1 :])
        pairs = zip(likes, args[width], strict=True)
        return tuple(
            empty_like(like) if need and like is not None else args[0].new_empty(0) for like, need in pairs
        )

    refuse = _refuse(f"{name} has no third derivative")
    rule = Rule((), count, 0, refuse, refuse)
    return _define(f"{name}_second_backward", parameters, count, run, fake, rule, register)


def _define(
    name: str,
    parameters: dict[str, Any],
    count: int,
    function: Callable[..., Sequence[Tensor | None]],
    fake: Callable[..., Sequence[Tensor]],
    rule: Rule,
    register: Register,
    defaults: Sequence[Any] = (),
) -> Any:
    """Register an operator of these parameters with ``count`` results.

    There are no optional results: an empty tensor stands for None. Unobserved calls take
    ``unrecorded(*args)`` of the operator that ``register`` makes, if it has this method.
    """

    def single_or_all(made: Sequence[Tensor]) -> Any:
        return tuple(made) if count > 1 else made[0]

    size = len(parameters)

    def body(*args: Any) -> Any:
        made = function(*detached(with_defaults(args, size, defaults)))
        return single_or_all([args[0].new_empty(0) if m is None else m for m in made])

    signed(body, parameters, tuple[(Tensor,) * count] if count > 1 else Tensor, defaults)
    operator = register(name, body, lambda *args: single_or_all(fake(*with_defaults(args, size, defaults))))
    operator.parameters, operator.body = parameters, getattr(operator, "unrecorded", body)
    operator.defaults, operator.argument_names, operator.open_numbers = defaults, (*parameters,), ()
    register_ways(name, operator, count, rule)
    return operator


def detached(args: Sequence[Any]) -> Sequence[Any]:
    """Detached tensors, since other libraries refuse tensors that require a gradient."""
    if not any_requires_grad(args):
        return args
    return [a.detach() if isinstance(a, Tensor) and a.requires_grad else a for a in args]


def _refuse(message: str) -> Callable[..., Any]:
    def refuse(*_: Any) -> Any:
        raise NotImplementedError(message)

    refuse.body = refuse
    return refuse


def empty_like(tensor: Tensor) -> Tensor:
    """An empty contiguous tensor of the same shape, dtype and device."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _directions(values: Sequence[Tensor | None], like: Tensor) -> list[Tensor]:
    """Contiguous directions for a second backward."""
    return [like.new_empty(0) if v is None else v.contiguous() for v in values]


def _filled(values: Sequence[Tensor | None], likes: Sequence[Tensor | None]) -> list[Tensor]:
    """Contiguous values; zeros like the other where one is missing, and an empty tensor where both are."""
    return [
        v.contiguous()
        if v is not None
        else torch.zeros(0, device="cpu")
        if like is None
        else empty_like(like).zero_()
        for v, like in zip(values, likes, strict=False)
    ]
