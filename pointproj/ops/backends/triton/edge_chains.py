"""Edge networks with layers between the first and the last: matrix products for each pair, see ``edge_mlp``.

A program has all channels of some pairs. The first layer's results are computed in blocks of channels, as the
first product needs them; further layers stay in registers. Narrow layers are bound by gathers and atomics,
wide ones by the products.
"""

import itertools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pointproj.ops.backends.torch import edge_mlp as plain
from pointproj.ops.backends.triton import pairs
from pointproj.ops.backends.triton.activations import NUMBER_OF, activated
from pointproj.ops.backends.triton.pairs import (
    OF_LAYER,
    add_bias,
    add_layer_of_places,
    add_places,
    add_product,
    first_layer_of,
    largest_of,
    lists_of,
    moved_by,
    per_pair,
    places_of_pairs,
    rows_of_places,
    steps_at,
    sums_of_queries,
    tile_of_pairs,
    times,
    weight_of_places,
)
from pointproj.ops.bridge.torch_op import signed, torch_op
from pointproj.ops.bridge.triton_op import cdiv, launch, runs_kernels
from pointproj.ops.specification.records import OptionalTensors, Saved, Tensors

MOST_PRODUCTS = 2  # more take longer than chunks of torch, as an H200 says
WIDE = 128  # channels of a tile; beyond, twice as many threads have it, and only the last layer in TF32 fits
ROWS = ("reference_points", "hidden", "query_points", "of_queries", "weights", "factors")
CHAIN = plain.LAYERS[1 : 1 + MOST_PRODUCTS]


def edge_mlp(*args: Any) -> Tensor:
    """See :meth:`pointproj.ops.registry.Backend.edge_mlp`."""
    inputs = dict(zip(plain.EDGE_MLP.parameters, args, strict=True))
    runs = runs_kernels(inputs["rows"]) and not torch.are_deterministic_algorithms_enabled()
    return _edge_chains(*args)[0] if runs and _is_served(inputs) else plain.edge_mlp(*args)


def _is_served(inputs: dict[str, Any]) -> bool:
    """Whether there are a few products for pairs, and none too wide."""
    counts = [len(inputs[weight]) for weight, _ in plain.LAYERS[1:] if inputs[weight].numel()]
    if not 0 < len(counts) <= MOST_PRODUCTS:
        return False
    widths = [pairs.width_of(count) for count in counts]
    if max(widths[:-1], default=0) > WIDE or (widths[-1] > WIDE and pairs.precision(widths[-1]) != "tf32"):
        return False
    sizes = [inner * outer for inner, outer in itertools.pairwise(widths)]
    fits = pairs.fits(inputs["weight_2"], max(widths), sum(sizes))
    return fits and inputs["query_points"].shape[1] <= 3


def _prepared(inputs: dict[str, Any], backward: bool) -> tuple:
    """Lists, tensors and numbers of channels for both kernels, and their constants."""
    places = inputs["weight_1"]
    channels = places.shape[0]
    if inputs["bias_1"].numel():
        places = rows_of_places(inputs)
    weights = [inputs[weight] for weight, _ in CHAIN]
    counts = [len(weight) for weight in weights if weight.numel()]
    widths = [pairs.width_of(count) for count in counts]
    constants = {
        "HIDDEN": inputs["hidden"].numel() > 0,
        "OF_QUERIES": inputs["of_queries"].numel() > 0,
        "WEIGHTED": inputs["weights"].numel() > 0,
        "FACTORS": inputs["factors"].numel() > 0,
        "PLACES": inputs["bias_1"].numel() > 0,
        "DISTANCE": inputs["with_distance"],
        "ACTIVATION": NUMBER_OF[inputs["activation"]],
        "SLOPE": inputs["slope"],
        "ENDS": inputs["active_at_end"],
        "LARGEST": inputs["largest"],
        "PRODUCTS": len(counts),
        "PRECISION": pairs.precision(max(widths)),
        "N2": widths[0],
        "LAST": widths[-1],
    }
    of = pairs.lists(inputs, backward)
    names = ("hidden", "of_queries", "weights", "factors")
    layers = [inputs[name] for layer in CHAIN for name in layer]
    tensors = [*(inputs[name] for name in names), places, *layers]
    kind = "backward" if backward else "forward"
    if max(widths) > WIDE:
        kind = "wide chain"
    elif backward and max(widths) <= pairs.NARROW:
        kind = "narrow chain"
    options = pairs.launch_options(kind, of, backward)
    return of, [*tensors, channels, counts[0], counts[-1]], constants | options


def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    inputs = dict(zip(plain.EDGE_MLP.parameters, args, strict=True))
    (shape, dtype), (slots, _) = plain.EDGE_MLP.outputs(*args)
    result = inputs["rows"].new_empty(shape, dtype=dtype)
    winners = inputs["rows"].new_empty(slots, dtype=torch.int32)
    if not inputs["rows"].numel() or not shape[0]:
        return result.zero_(), winners.fill_(-1)
    of, shared, constants = _prepared(inputs, backward=False)
    launch(chain_kernel, (cdiv(of.items, constants["TILE"]),), *of, *shared, result, winners, **constants)
    return result, winners


def _backward(grads: Tensors, needs: dict[str, bool], saved: Saved) -> OptionalTensors:
    """Gradients of all differentiable inputs, None where not needed."""
    inputs = saved.inputs
    if torch.are_deterministic_algorithms_enabled():
        return plain.EDGE_MLP.backward(grads, needs, saved)
    of, shared, constants = _prepared(inputs, backward=True)
    real, dims = inputs["weight_1"], inputs["query_points"].shape[1]
    made = dict.fromkeys(ROWS, real.new_empty(0))
    for name in ROWS:
        shape = (len(inputs[name]), 3) if name.endswith("points") else inputs[name].shape
        if needs[name] and inputs[name].numel():
            made[name] = real.new_zeros(shape)
    places = inputs["bias_1"].numel() > 0
    flags = [made[name].numel() > 0 for name in ROWS]
    flags += [places and (needs["weight_1"] or needs["bias_1"])]
    names = [name for layer in CHAIN for name in layer]
    shapes = [(OF_LAYER.value * places, len(real)), *(tuple(inputs[name].shape) for name in names)]
    of_copy, layers = pairs.copies_of(shapes, real)
    if of.items and of.k:
        launch(
            chain_gradient_kernel, pairs.grid_of(of, 0, of.items, constants), *of, *shared, grads[0],
            saved.outputs[1], *made.values(), *layers, of_copy,
            FLAGS=sum(1 << place for place, flag in enumerate(flags) if flag), **constants,
        )  # fmt: skip
    columns, *layers = pairs.sums_of_copies(layers, shapes)
    made |= {"weight_1": weight_of_places(columns, inputs), "bias_1": columns[-1:].flatten()}
    made |= dict(zip(names, layers, strict=True))

    def finished(name: str) -> Tensor | None:
        given = inputs[name]
        if not needs[name]:
            return None
        if not given.numel():
            return torch.zeros_like(given)
        own = made[name][:, :dims] if name.endswith("points") else made[name]
        return own.to(given.dtype).contiguous()

    return tuple(finished(name) for name in plain.EDGE_MLP.differentiable)


@triton.jit
def next_layer(
    values, weight, bias, n_in, n_out, N_OUT: tl.constexpr, ACTIVATION: tl.constexpr, SLOPE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A layer behind the activation of the one before."""
    values, _ = activated(values, ACTIVATION, SLOPE)
    i, o = tl.arange(0, values.shape[1]), tl.arange(0, N_OUT)
    start = tl.load(bias + o, mask=o < n_out, other=0.0)[None, :]
    start = tl.broadcast_to(start, [values.shape[0], N_OUT])
    return times(values, weight, i, n_in, 1, o, n_out, n_in, start, PRECISION)


@triton.jit
def chain_of(
    hidden, of_queries, layer, weight_2, bias_2, weight_3, bias_3, channels, n2, outputs,
    row, query, hit, x, y, z, distance,
    HIDDEN: tl.constexpr, OF_QUERIES: tl.constexpr, PLACES: tl.constexpr, DISTANCE: tl.constexpr,
    ACTIVATION: tl.constexpr, SLOPE: tl.constexpr, PRODUCTS: tl.constexpr, N2: tl.constexpr,
    LAST: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Results of both layers of pairs; those of a missing layer are the other's."""
    o = tl.arange(0, N2)
    second = tl.broadcast_to(tl.load(bias_2 + o, mask=o < n2, other=0.0)[None, :], [row.shape[0], N2])
    for start in range(0, channels, BLOCK):
        channel = start + tl.arange(0, BLOCK)
        values = first_layer_of(
            hidden, of_queries, layer, row, query, hit, channel, channels, x, y, z, distance,
            HIDDEN, OF_QUERIES, PLACES, DISTANCE,
        )  # fmt: skip
        values, _ = activated(values, ACTIVATION, SLOPE)
        second = times(values, weight_2, channel, channels, 1, o, n2, channels, second, PRECISION)
    third = second
    if PRODUCTS > 1:
        third = next_layer(second, weight_3, bias_3, n2, outputs, LAST, ACTIVATION, SLOPE, PRECISION)
    return second, third


@triton.jit
def chain_kernel(
    rows, row_splits, query_points, reference_points, items, references, k, PADDED: tl.constexpr,
    hidden, of_queries, weights, factors, layer, weight_2, bias_2, weight_3, bias_3,
    channels: tl.constexpr, n2: tl.constexpr, outputs: tl.constexpr, result, winners,
    HIDDEN: tl.constexpr, OF_QUERIES: tl.constexpr, WEIGHTED: tl.constexpr, FACTORS: tl.constexpr,
    PLACES: tl.constexpr, DISTANCE: tl.constexpr, ACTIVATION: tl.constexpr, SLOPE: tl.constexpr,
    ENDS: tl.constexpr,
    LARGEST: tl.constexpr, PRODUCTS: tl.constexpr, PRECISION: tl.constexpr, N2: tl.constexpr,
    LAST: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Sums or the largest for a tile of queries."""
    real: tl.constexpr = layer.dtype.element_ty
    query = (tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)
    exists = query < items
    begin, end = lists_of(query, exists, row_splits, k, PADDED)
    own, o = per_pair(query, TILE, STEP), tl.arange(0, LAST)
    x = tl.zeros([TILE * STEP], real)
    y, z, distance = x, x, x
    total, winner = tl.zeros([TILE, LAST], real), tl.full([TILE, LAST], -1, tl.int32)
    for step in range(0, tl.max(end - begin), STEP):
        at, row, hit = steps_at(rows, begin, end, step, references, TILE, STEP)
        if PLACES:
            x, y, z, distance = places_of_pairs(reference_points, query_points, row, own, hit, real, DISTANCE)
        _, values = chain_of(
            hidden, of_queries, layer, weight_2, bias_2, weight_3, bias_3, channels, n2, outputs, row, own,
            hit, x, y, z, distance, HIDDEN, OF_QUERIES, PLACES, DISTANCE, ACTIVATION, SLOPE, PRODUCTS,
            N2, LAST, PRECISION, BLOCK,
        )  # fmt: skip
        if ENDS:
            values, _ = activated(values, ACTIVATION, SLOPE)
        there = hit[:, None] & (o < outputs)[None, :]
        if FACTORS:
            more = tl.load(factors + row[:, None] * outputs + o[None, :], mask=there, other=0.0)
            values *= more.to(real)
        if WEIGHTED:
            values *= tl.load(weights + at, mask=hit, other=0.0)[:, None]
        if LARGEST:
            place = (at - per_pair(begin, TILE, STEP) if PADDED else at).to(tl.int32)
            total, winner = largest_of(values, place, hit, total, winner, TILE, STEP)
        else:
            total += sums_of_queries(tl.where(there, values, 0.0), TILE, STEP)
    target = query[:, None] * outputs + o[None, :]
    there = exists[:, None] & (o < outputs)[None, :]
    tl.store(result + target, total, mask=there)
    if LARGEST:
        tl.store(winners + target, winner, mask=there)


@triton.jit
def previous_layer(
    d_out, values, weight, d_weight, d_bias, n_in, n_out, of_copy, ACTIVATION: tl.constexpr,
    SLOPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of a layer's results, from that of the next layer's, whose own gradients are added."""
    active, slope = activated(values, ACTIVATION, SLOPE)
    i, o = tl.arange(0, values.shape[1]), tl.arange(0, d_out.shape[1])
    add_product(d_weight, d_out, active, i, n_in, o, n_out, of_copy, PRECISION)
    add_bias(d_bias, d_out, o, n_out, of_copy)
    empty = tl.zeros([values.shape[0], values.shape[1]], values.dtype)
    return times(d_out, weight, o, n_out, n_in, i, n_in, 1, empty, PRECISION) * slope


@triton.jit
def chain_gradient_kernel(
    rows, query_of, query_points, reference_points, items, references, k, PADDED: tl.constexpr,
    hidden, of_queries, weights, factors, layer, weight_2, bias_2, weight_3, bias_3,
    channels: tl.constexpr, n2: tl.constexpr, outputs: tl.constexpr, grad, winners,
    d_reference, d_hidden, d_query, d_of_queries, d_weights, d_factors, d_layer,
    d_weight_2, d_bias_2, d_weight_3, d_bias_3, of_copy, FLAGS: tl.constexpr,
    HIDDEN: tl.constexpr, OF_QUERIES: tl.constexpr, WEIGHTED: tl.constexpr, FACTORS: tl.constexpr,
    PLACES: tl.constexpr, DISTANCE: tl.constexpr, ACTIVATION: tl.constexpr, SLOPE: tl.constexpr,
    ENDS: tl.constexpr,
    LARGEST: tl.constexpr, PRODUCTS: tl.constexpr, PRECISION: tl.constexpr, N2: tl.constexpr,
    LAST: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Gradients of what :func:`chain_kernel` reads, as far as ``FLAGS`` says, from a tile of pairs."""
    real: tl.constexpr = layer.dtype.element_ty
    P: tl.constexpr = TILE * STEP
    query, exists, at, row, hit, _ = tile_of_pairs(
        rows, query_of, 0, items, references, k, PADDED, TILE, STEP
    )
    own, o = per_pair(query, TILE, STEP), tl.arange(0, LAST)
    x = tl.zeros([P], real)
    y, z, distance = x, x, x
    if PLACES:
        x, y, z, distance = places_of_pairs(reference_points, query_points, row, own, hit, real, DISTANCE)
    second, values = chain_of(
        hidden, of_queries, layer, weight_2, bias_2, weight_3, bias_3, channels, n2, outputs, row, own, hit,
        x, y, z, distance, HIDDEN, OF_QUERIES, PLACES, DISTANCE, ACTIVATION, SLOPE, PRODUCTS, N2, LAST,
        PRECISION, BLOCK,
    )  # fmt: skip
    there = hit[:, None] & (o < outputs)[None, :]
    if LARGEST:
        place = (at - own * k if PADDED else at).to(tl.int32)
        chosen = tl.load(winners + own[:, None] * outputs + o[None, :], mask=there, other=-1)
        there &= chosen == place[:, None]
    d_values = tl.load(grad + own[:, None] * outputs + o[None, :], mask=there, other=0.0)
    slope = tl.full([P, LAST], 1.0, real)
    if ENDS:
        values, slope = activated(values, ACTIVATION, SLOPE)
    values = tl.where(there, values, 0.0)
    weight = tl.full([P], 1.0, real)
    if WEIGHTED:
        weight = tl.load(weights + at, mask=hit, other=0.0)
    factor = tl.full([P, LAST], 1.0, real)
    at_row = row[:, None] * outputs + o[None, :]
    if FACTORS:
        factor = tl.load(factors + at_row, mask=there, other=0.0).to(real)
    if FLAGS & 16:
        tl.store(d_weights + at, tl.sum(d_values * values * factor, 1), mask=hit)
    if FLAGS & 32:
        tl.atomic_add(d_factors + at_row, d_values * values * weight[:, None], mask=there, sem="relaxed")
    d_values = tl.where(there, d_values * factor * weight[:, None] * slope, 0.0)
    if PRODUCTS > 1:
        d_values = previous_layer(
            d_values, second, weight_3, d_weight_3, d_bias_3, n2, outputs, of_copy, ACTIVATION, SLOPE,
            PRECISION,
        )  # fmt: skip
    d_values = tl.where(hit[:, None], d_values, 0.0)
    o = tl.arange(0, N2)
    add_bias(d_bias_2, d_values, o, n2, of_copy)
    rx, ry, rz = tl.zeros([P], real), tl.zeros([P], real), tl.zeros([P], real)
    for start in range(0, channels, BLOCK):
        channel = start + tl.arange(0, BLOCK)
        own_values = first_layer_of(
            hidden, of_queries, layer, row, own, hit, channel, channels, x, y, z, distance,
            HIDDEN, OF_QUERIES, PLACES, DISTANCE,
        )  # fmt: skip
        active, slope_1 = activated(own_values, ACTIVATION, SLOPE)
        d_first = tl.zeros([P, BLOCK], real)
        d_first = (
            times(d_values, weight_2, o, n2, channels, channel, channels, 1, d_first, PRECISION) * slope_1
        )
        d_first = tl.where(hit[:, None], d_first, 0.0)
        add_product(d_weight_2, d_values, active, channel, channels, o, n2, of_copy, PRECISION)
        inner = (channel < channels)[None, :]
        if FLAGS & 2:
            of_hidden = d_hidden + row[:, None] * channels + channel[None, :]
            tl.atomic_add(of_hidden, d_first, mask=hit[:, None] & inner, sem="relaxed")
        if FLAGS & 8:
            of_query = d_of_queries + query[:, None] * channels + channel[None, :]
            own_sums = sums_of_queries(d_first, TILE, STEP)
            tl.atomic_add(of_query, own_sums, mask=exists[:, None] & inner, sem="relaxed")
        if PLACES and FLAGS & 64:
            add_layer_of_places(d_layer, d_first, channel, channels, x, y, z, distance, of_copy, DISTANCE)
        if PLACES and FLAGS & 5:
            rx, ry, rz = moved_by(d_first, layer, channel, channels, x, y, z, distance, rx, ry, rz, DISTANCE)
    if PLACES and FLAGS & 5:
        add_places(d_reference, d_query, row, own, hit, rx, ry, rz, (FLAGS & 1) > 0, (FLAGS & 4) > 0)


_edge_chains = torch_op(
    "pointproj::triton_edge_chains",
    signed(_forward, plain.EDGE_MLP.parameters, tuple[Tensor, Tensor]),
    plain.EDGE_MLP.outputs,
    differentiable=plain.EDGE_MLP.differentiable,
    backward=_backward,
    second_backward=plain.EDGE_MLP.second_backward,
)
