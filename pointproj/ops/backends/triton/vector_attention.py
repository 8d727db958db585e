"""Grouped vector attention of networks of one or two layers, without pairs' tensors in memory.

Between the positions' last layer, ``moved = W a + c``, and the first of the scores, ``S (query - key + moved)
+ d``, there is no activation. So queries and keys are multiplied by ``S`` before they are paired, and a pair
has two products of the same ``a``, which is computed in blocks:

    a = act(V r + b)    u = S W a + (S query + S c + d) - S key    score = T act(u)    moved = W a + c

A forward program's softmax takes neighbours as they come, relative to the largest score so far. It keeps the
logarithm of each query's sum, so that the backward needs no more of a pair. Kernels of narrow layers make
both products themselves. Of other layers ``a`` is stored in chunks of pairs, and torch makes the products; a
kernel puts their gradients in their place. All is bound by gathers and atomics, what is stored, and where
layers are wide by the products. Other networks, and all in deterministic mode, run in plain torch.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from pointproj.ops.backends.torch import vector_attention as plain
from pointproj.ops.backends.triton import pairs
from pointproj.ops.backends.triton.activations import IDENTITY, NUMBER_OF
from pointproj.ops.backends.triton.pairs import OF_LAYER
from pointproj.ops.backends.triton.vector_kernels import attend_gradient_kernel, attend_kernel, inputs_kernel
from pointproj.ops.backends.triton.vector_narrow import narrow_gradient_kernel, narrow_kernel
from pointproj.ops.bridge.torch_op import signed, torch_op
from pointproj.ops.bridge.triton_op import cdiv, launch, runs_kernels
from pointproj.ops.specification.activations import activated
from pointproj.ops.specification.clouds import finite_rows, linear_rows
from pointproj.ops.specification.gradients import first_gradients, recording, second_gradients
from pointproj.ops.specification.records import OptionalTensors, Saved, Tensors

_WEIGHTS = [f"{part}_{name}_{i}" for part in plain.NETWORKS for i in (1, 2) for name in ("weight", "bias")]
_MERGED = ("keys", "values", "queries", *_WEIGHTS)


def vector_attend(*args: Any) -> Tensor:
    """See :meth:`pointproj.ops.registry.Backend.vector_attend`."""
    inputs = plain.inputs_of(*args)
    deterministic = torch.are_deterministic_algorithms_enabled()
    if deterministic or not runs_kernels(inputs["rows"]) or not _is_served(inputs):
        return plain.attended(inputs)
    return _attended(*inputs.values())[0]


def _is_served(inputs: dict[str, Any]) -> bool:
    """Whether both networks have at most two layers, and none too wide."""
    groups, channels = plain.last_width(inputs, "score"), inputs["queries"].shape[1]
    width = pairs.power_of_two(groups) * pairs.power_of_two(channels // groups)
    width = max(pairs.width_of(inputs["score_weight_1"].shape[0]), width)
    fewer = not any(inputs[f"{part}_weight_3"].numel() for part in plain.NETWORKS)
    fits = pairs.fits(inputs["queries"], min(width, pairs.NARROW)) and width <= pairs.MOST_CHANNELS
    return fits and fewer and inputs["query_points"].shape[1] <= 3


def _ends(inputs: dict[str, Any], part: str) -> bool:
    """Whether an activation follows the second of a network's layers."""
    return inputs[f"{part}_at_end"] and inputs[f"{part}_weight_2"].numel() > 0


class _Merged(NamedTuple):
    """The tensors of the formula; layers are (out, in). In brackets: if an activation follows W a + c."""

    keys: Tensor  # S key
    values: Tensor
    queries: Tensor  # S query + S c + d (S query + d)
    first: Tensor  # (5, H): V, rows of zeros, b
    score: Tensor  # S W (S)
    place: Tensor  # W
    shift: Tensor  # c
    last: Tensor  # T
    last_bias: Tensor  # of T: it has influence if an activation follows


def _merged(inputs: dict[str, Any], tensors: dict[str, Any]) -> _Merged:
    """Made of the tensors named in ``_MERGED``. The identity stands for a layer that is missing."""
    first, bias, place, shift, score, offset, last, last_bias = (tensors[name] for name in _WEIGHTS)

    def identity(size: int) -> Tensor:
        return torch.eye(size, dtype=first.dtype, device=first.device)

    if not place.numel() and inputs["position_at_end"]:
        place, shift = identity(len(first)), torch.zeros_like(bias)
    elif not place.numel():
        place, shift, first = first, bias, identity(first.shape[1])
        bias = torch.zeros_like(first[0])
    last = last if last.numel() else identity(len(score))
    unused = first.new_zeros(len(first), OF_LAYER.value - 1 - first.shape[1])
    rows = torch.cat([first, unused, bias[:, None]], dim=1).t()
    ends = _ends(inputs, "position")
    queries = linear_rows(*finite_rows(tensors["queries"]), score)
    queries = queries + (offset if ends else linear(shift, score, offset))
    keys = linear_rows(*finite_rows(tensors["keys"]), score)
    last_bias = last_bias if _ends(inputs, "score") else last_bias.detach()
    score = score if ends else score @ place
    merged = _Merged(keys, tensors["values"], queries, rows, score, place, shift, last, last_bias)
    return _Merged(*(tensor.contiguous() for tensor in merged))


class _Sizes(NamedTuple):
    """Numbers of channels, as kernels take them."""

    inputs: int  # of ``a``
    scores: int  # of ``u``
    groups: int
    depth: int  # of a group
    channels: int  # of values; kernels know what it divides


def _prepared(inputs: dict[str, Any], merged: _Merged, backward: bool) -> tuple:
    """Lists, sizes, constants of the kernels, and whether the layers are narrow."""
    groups, channels = len(merged.last), len(merged.place)
    sizes = _Sizes(merged.first.shape[1], len(merged.score), groups, channels // groups, channels)
    of, columns = pairs.lists(inputs, backward), pairs.power_of_two(groups)
    depth = max(pairs.power_of_two(sizes.depth), 16 // columns)
    constants = {
        "GROUPS": columns,
        "DEPTH": depth,
        "EXACT": (columns, depth) == (groups, sizes.depth),
        "LASTS": max(16, columns),
        "PRECISION": pairs.precision(max(sizes.inputs, sizes.scores, columns * depth)),
    }
    scores, ends = pairs.width_of(sizes.scores), [_ends(inputs, part) for part in plain.NETWORKS]
    narrow = max(scores, columns * depth) <= pairs.NARROW
    if narrow:
        kind = "narrow rows" if backward else "forward"
        constants |= {"SCORES": scores, "POSITION_ENDS": ends[0], "SCORE_ENDS": ends[1]}
        constants |= _activation(inputs, "position", "POSITION_")
        constants |= _activation(inputs, "score", "SCORE_")
    else:
        kind = "rows" if backward else "queries"
        constants |= {"ENDS": ends[1]} | _activation(inputs, "score")
    return of, sizes, constants | pairs.launch_options(kind, of, backward), narrow


def _activation(inputs: dict[str, Any], part: str, prefix: str = "") -> dict[str, Any]:
    """The activation of a network, as constants of a kernel."""
    is_active = inputs[f"{part}_weight_2"].numel() or inputs[f"{part}_at_end"]
    number = NUMBER_OF[inputs[f"{part}_activation"]] if is_active else IDENTITY
    return {f"{prefix}ACT": number, f"{prefix}SLOPE": inputs[f"{part}_slope"]}


def _layer(inputs: dict[str, Any], of: pairs.Lists) -> dict[str, Any]:
    """Options of the kernel of positions."""
    return pairs.launch_options("inputs", of, backward=True) | _activation(inputs, "position")


class _Position:
    """Products of pairs, ``S W a`` and ``W a``; or ``S act(W a + c)``, and what S is multiplied by."""

    def __init__(self, inputs: dict[str, Any], merged: _Merged) -> None:
        self.activation = inputs["position_activation"], inputs["position_slope"]
        self.ends, self.score, self.place = _ends(inputs, "position"), merged.score, merged.place
        self.bias, self.shift = merged.shift, torch.zeros_like(merged.shift) if self.ends else merged.shift
        self.widths = [len(merged.score), len(merged.place)]
        if self.ends:
            self.d_layers = [torch.zeros_like(own) for own in (self.score, self.place, self.bias)]
        else:
            self.both = torch.cat([merged.score, merged.place])
            self.d_both = torch.zeros_like(self.both)

    def put_products(self, a: Tensor, products: Tensor) -> None:
        if not self.ends:
            torch.mm(a, self.both.t(), out=products)
            return
        scores, made = products.split(self.widths, dim=1)
        with torch.enable_grad():
            self.before = torch.addmm(self.bias, a, self.place.t()).detach().requires_grad_()
            self.after = activated(self.before, *self.activation)
        torch.mm(self.after.detach(), self.score.t(), out=scores)
        made.copy_(self.after.detach())

    def add_gradients(self, products: Tensor, a: Tensor, wanted: bool) -> None:
        """Add those of layers from the products' gradients, and put that of ``a`` in its place if wanted."""
        if not self.ends:
            self.d_both.addmm_(products.t(), a)
            if wanted:
                torch.mm(products, self.both, out=a)
            return
        scores, made = products.split(self.widths, dim=1)
        d_score, d_place, d_bias = self.d_layers
        d_score.addmm_(scores.t(), self.after.detach())
        (d_before,) = torch.autograd.grad(self.after, self.before, torch.addmm(made, scores, self.score))
        d_place.addmm_(d_before.t(), a)
        d_bias += d_before.sum(0)
        torch.mm(d_before, self.place, out=a)

    def gradients(self, grad: Tensor, sums: Tensor) -> tuple[Tensor, ...]:
        """Of score, place and shift."""
        if self.ends:
            return tuple(self.d_layers)
        return *self.d_both.split(self.widths), _of_shift(grad, sums)


def _products(
    inputs: dict[str, Any], position: _Position, layer: Tensor, sizes: _Sizes
) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """First and last item of each chunk of pairs, ``a`` and both products, that of the scores first."""
    of, widths = pairs.lists(inputs, backward=True), (sum(position.widths), sizes.inputs)
    options, buffers, kept = _layer(inputs, of), None, 3 * sizes.channels * position.ends
    for first, last in pairs.chunks(of, (sum(widths) + kept) * layer.element_size()):
        slots = (last - first) * of.k
        buffers = buffers or [layer.new_empty(slots, width) for width in widths]
        products, a = (buffer[:slots] for buffer in buffers)
        launch(
            inputs_kernel, pairs.grid_of(of, first, last, options), *of, layer, sizes.inputs, first,
            last, a, a, a, a, 0, BACKWARD=False, PLACES=False, FIRST=False, **options,
        )  # fmt: skip
        position.put_products(a, products)
        yield first, last, a, products


def _outputs(*args: Any) -> tuple:
    """The result, and each query's logarithm of the sum of its weights, -inf without pairs."""
    inputs = dict(zip(plain.ATTENDED.parameters, args, strict=True))
    (shape, dtype), _ = plain.ATTENDED.outputs(*args)
    return (shape, dtype), ((shape[0], plain.last_width(inputs, "score")), dtype)


def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    inputs = dict(zip(plain.ATTENDED.parameters, args, strict=True))
    (shape, dtype), (kept, _) = _outputs(*args)
    result, sums = (inputs["keys"].new_empty(size, dtype=dtype) for size in (shape, kept))
    if not inputs["rows"].numel() or not shape[0]:
        return result.zero_(), sums.fill_(-torch.inf)
    with torch.autocast(result.device.type, enabled=False):
        merged = _merged(inputs, inputs)
        of, sizes, constants, narrow = _prepared(inputs, merged, backward=False)
        if narrow:
            grid = (cdiv(of.items, constants["TILE"]),)
            launch(narrow_kernel, grid, *of, *merged, *sizes, result, sums, **constants)
        else:
            result.zero_(), sums.fill_(-torch.inf)
            _attend(inputs, merged, of, sizes, constants, result, sums)
    return result, sums


def _attend(
    inputs: dict[str, Any], merged: _Merged, of: pairs.Lists, sizes: _Sizes, constants: dict[str, Any],
    result: Tensor, sums: Tensor,
) -> None:  # fmt: skip
    """Add chunk after chunk to the result, and to each query's logarithm of the sum of its weights."""
    position = _Position(inputs, merged)
    for first, last, _, products in _products(inputs, position, merged.first, sizes):
        queries = (first, last) if of.PADDED else (0, of.items)
        launch(
            attend_kernel, (cdiv(queries[1] - queries[0], constants["TILE"]),), *of[:2], *of[5:],
            *merged[:3], position.shift, *merged[-2:], *sizes[1:], *queries, first * of.k, last * of.k,
            products, result, sums, **constants,
        )  # fmt: skip


def _backward(grads: Tensors, needs: dict[str, bool], saved: Saved) -> OptionalTensors:
    """Gradients of all differentiable inputs, None where not needed."""
    inputs, names = saved.inputs, plain.ATTENDED.differentiable
    if torch.are_deterministic_algorithms_enabled():
        tensors = [inputs[name] for name in names]
        return first_gradients(_plainly(inputs, names), tensors, grads[0], [*needs.values()])
    wanted = [name for name in _MERGED if needs[name]]
    with torch.autocast(grads[0].device.type, enabled=False), recording():
        leaves = {name: inputs[name].detach().requires_grad_(needs[name]) for name in _MERGED}
        merged = _merged(inputs, leaves)
        made, upstream = _gradients(inputs, merged, grads[0], needs, saved.outputs)
        ways = [pair for pair in zip(merged, upstream, strict=True) if pair[0].requires_grad]
        if ways:
            tensors, upstream = zip(*ways, strict=True)
            of = [leaves[name] for name in wanted]
            found = torch.autograd.grad(tensors, of, upstream, allow_unused=True)
            made |= dict(zip(wanted, found, strict=True))

    def finished(name: str) -> Tensor | None:
        if not needs[name]:
            return None
        found = made.get(name)
        return torch.zeros_like(inputs[name]) if found is None else found.to(inputs[name].dtype).contiguous()

    return tuple(map(finished, names))


def _gradients(
    inputs: dict[str, Any], merged: _Merged, grad: Tensor, needs: dict[str, bool], outputs: Tensors
) -> tuple[dict[str, Tensor], _Merged]:
    """Gradients of the points that need one, and of the merged tensors."""
    of, sizes, constants, narrow = _prepared(inputs, merged, backward=True)
    result, sums = outputs
    known = _Merged(*(tensor.detach() for tensor in merged))
    makes_places = needs["query_points"] or needs["reference_points"]
    points = [p.new_zeros(p.shape if makes_places else (0,), dtype=grad.dtype) for p in of[2:4]]
    rows = [torch.zeros_like(tensor) for tensor in known[:3]]
    layers = [known.first, known.last, known.last_bias]
    layers += [known.score, known.place, known.shift] * narrow
    shapes = [tuple(tensor.shape) for tensor in layers]
    of_copy, d_layers = pairs.copies_of(shapes, grad)
    shares = (grad * result).view(-1, sizes.groups, sizes.depth).sum(-1)
    flags = {"PLACES": makes_places, "FIRST": merged.first.requires_grad}
    if narrow and of.items and of.k:
        launch(
            narrow_gradient_kernel, pairs.grid_of(of, 0, of.items, constants), *of, *known, *sizes, sums,
            grad, shares, *points, *rows, *d_layers, of_copy, **flags, **constants,
        )  # fmt: skip
    position, layer = None if narrow else _Position(inputs, known), _layer(inputs, of)
    for first, last, a, products in () if narrow else _products(inputs, position, known.first, sizes):
        launch(
            attend_gradient_kernel, pairs.grid_of(of, first, last, constants), *of, *known[:3],
            position.shift, *known[-2:], *sizes[1:], first, last, sums, grad, shares, products, *rows,
            *d_layers[1:], of_copy, **constants,
        )  # fmt: skip
        position.add_gradients(products, a, any(flags.values()))
        if any(flags.values()):
            launch(
                inputs_kernel, pairs.grid_of(of, first, last, layer), *of, known.first, sizes.inputs, first,
                last, a, *points, d_layers[0], of_copy, BACKWARD=True, **flags, **layer,
            )  # fmt: skip
    d_first, d_last, d_last_bias, *d_position = pairs.sums_of_copies(d_layers, shapes)
    if not narrow:
        d_position = position.gradients(grad, sums)
    elif not _ends(inputs, "position"):
        d_position[-1] = _of_shift(grad, sums)
    dims = inputs["query_points"].shape[1]
    found = {}
    if makes_places:
        named = zip(("query_points", "reference_points"), points, strict=True)
        found = {name: own[:, :dims] for name, own in named}
    return found, _Merged(*rows, d_first, *d_position, d_last, d_last_bias)


def _of_shift(grad: Tensor, sums: Tensor) -> Tensor:
    """The gradient of ``shift``, which all queries with pairs have added once."""
    return torch.where(sums[:, :1] != -torch.inf, grad, 0.0).sum(0)


def _second_backward(directions: Tensors, grads: Tensors, saved: Saved) -> Tensors:
    inputs, names = saved.inputs, plain.ATTENDED.differentiable
    return second_gradients(_plainly(inputs, names), [inputs[name] for name in names], grads[0], directions)


def _plainly(inputs: dict[str, Any], names: Sequence[str]) -> Callable[..., Tensor]:
    """The plain form as a function of the inputs of these names."""
    return lambda *tensors: plain.attended(inputs | dict(zip(names, tensors, strict=True)))


_attended = torch_op(
    "pointproj::triton_vector_attend",
    signed(_forward, plain.ATTENDED.parameters, tuple[Tensor, Tensor]),
    _outputs,
    differentiable=plain.ATTENDED.differentiable,
    backward=_backward,
    second_backward=_second_backward,
)
