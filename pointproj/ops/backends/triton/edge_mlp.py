"""Edge networks of one activation: a gather, an addition, the activation and a sum for each pair.

The products of the first layer with features are made before, and those of the last layer after, see
:mod:`pointproj.ops.edge_mlp`. A program has a tile of queries and a block of channels. The backward computes
the pairs once more. It adds to the gradients of reference points by atomics, and to those of the layer in
several copies. Other networks, and all in deterministic mode, run in chunks of plain torch.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pointproj.ops.backends.torch import edge_mlp as plain
from pointproj.ops.backends.torch.edge_mlp import edge_mlp  # noqa: F401
from pointproj.ops.backends.torch.pair_lists import PairLists
from pointproj.ops.backends.triton.arithmetic import load_points, rounded_root
from pointproj.ops.backends.triton.pairs import (
    COPIES,
    IDENTITY,
    NUMBER_OF,
    OF_LAYER,
    activated,
    in_space,
    lists_of,
    precision,
    rows_of_places,
    weight_of_places,
)
from pointproj.ops.bridge.torch_op import signed
from pointproj.ops.bridge.triton_op import cdiv, launch, runs_kernels, triton_op
from pointproj.ops.specification.records import OptionalTensors, Saved, Tensors

# A thread has four numbers of a tile, which it reads at once; of narrow ones, where none are added up by
# atomics, eight.
LAUNCH = {"sum_kernel": {"num_warps": 4}, "gradient_kernel": {"num_warps": 4}}
OF_THREAD, OF_THREAD_NARROW, MOST_BLOCK = 4, 8, 32
SLOTS = tl.constexpr(16)  # that are counted at once
OPTIONS = {"mean": bool, "dtype": torch.dtype}
PARAMETERS = {name: kind for name, kind in plain.EDGE_MLP.parameters.items() if name != "largest"} | OPTIONS


def edge_sums(*args: Any) -> tuple[Tensor, Tensor]:
    """See :attr:`pointproj.ops.registry.Backend.edge_sums`."""
    return _edge_sums(*args)


def _runs(inputs: dict[str, Any]) -> bool:
    return runs_kernels(inputs["rows"]) and inputs["query_points"].shape[1] <= 3


def _outputs(*args: Any) -> tuple:
    """Sums or means, and how many pairs each query has."""
    inputs = dict(zip(PARAMETERS, args, strict=True))
    (shape, real), _ = plain.EDGE_MLP.outputs(*args[: -len(OPTIONS)], False)
    return (shape, inputs["dtype"]), (shape[:1], real)


def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    inputs = dict(zip(PARAMETERS, args, strict=True))
    if not _runs(inputs):
        sums, _ = plain.EDGE_MLP.forward(*args[: -len(OPTIONS)], False)
        lists = PairLists(inputs["rows"], inputs["row_splits"], len(inputs["reference_points"]))
        counts = lists.counts.to(sums.dtype)
        return _divided(sums, counts, inputs).to(inputs["dtype"]), counts
    sums, counts = (inputs["rows"].new_empty(shape, dtype=dtype) for shape, dtype in _outputs(*args))
    _launch(sum_kernel, inputs, counts, sums)
    return sums, counts


def _divided(values: Tensor, counts: Tensor, inputs: dict[str, Any]) -> Tensor:
    """By the number of pairs, for means."""
    return values / counts.clamp(min=1.0)[:, None] if inputs["mean"] else values


def _of_sums(grads: Tensors, saved: Saved) -> tuple[Tensors, Saved]:
    """Upstream gradients and what was saved, as plain torch has them of sums."""
    grad = grads[0].to(saved.inputs["weight_1"].dtype)
    return (_divided(grad, saved.outputs[1], saved.inputs),), Saved(
        saved.inputs | {"largest": False}, saved.outputs
    )


def _second_backward(directions: Tensors, grads: Tensors, saved: Saved) -> Tensors:
    d_grad, *others = plain.EDGE_MLP.second_backward(directions, *_of_sums(grads, saved))
    return _divided(d_grad, saved.outputs[1], saved.inputs).to(grads[0].dtype), *others


def _backward(grads: Tensors, needs: dict[str, bool], saved: Saved) -> OptionalTensors:
    """Gradients of all differentiable inputs, None where not needed."""
    inputs = saved.inputs
    if not _runs(inputs) or torch.are_deterministic_algorithms_enabled():
        grads, saved = _of_sums(grads, saved)
        return plain.EDGE_MLP.backward(grads, needs, saved)
    layer = inputs["weight_1"]
    channels, dims = layer.shape[0], inputs["query_points"].shape[1]

    def zeros(name: str, *shape: int) -> Tensor:
        return layer.new_zeros(shape if needs[name] else (0,))

    queries, references = grads[0].shape[0], inputs["reference_points"].shape[0]
    made = {
        "reference_points": zeros("reference_points", references, 3),
        "hidden": zeros("hidden", references, channels),
        "query_points": zeros("query_points", queries, 3),
        "of_queries": zeros("of_queries", queries, channels),
        "weights": zeros("weights", *inputs["weights"].shape),
    }
    of_layer = layer.new_zeros(COPIES.value, OF_LAYER.value, channels)
    flags = [needs[name] for name in made] + [needs["weight_1"] or needs["bias_1"]]
    if not inputs["bias_1"].numel():  # points and layer are in hidden and of_queries
        flags[0] = flags[2] = flags[5] = False
    _launch(gradient_kernel, inputs, saved.outputs[1], grads[0], *made.values(), of_layer, FLAGS=_packed(flags))
    columns = of_layer.sum(0)
    made |= {"weight_1": weight_of_places(columns, inputs), "bias_1": columns[-1]}
    made |= {name: made[name][:, :dims] for name in ("reference_points", "query_points") if needs[name]}

    def finished(name: str) -> Tensor | None:
        given = inputs[name]
        if not needs[name]:
            return None
        if not given.numel() or name not in made:
            return torch.zeros_like(given)
        return made[name].to(given.dtype).contiguous()

    return tuple(finished(name) for name in plain.EDGE_MLP.differentiable)


def _is_rough(inputs: dict[str, Any]) -> bool:
    """Whether the first layer's products are no more exact than TF32."""
    narrow = inputs["hidden"].dtype in (torch.float16, torch.bfloat16)
    return narrow or (inputs["weight_1"].dtype == torch.float32 and precision() == "tf32")


def _packed(flags: list[bool]) -> int:
    """A bit for each flag, from the lowest."""
    return sum(1 << place for place, flag in enumerate(flags) if flag)


class _Network(NamedTuple):
    """The first arguments of both kernels."""

    rows: Tensor
    row_splits: Tensor
    query_points: Tensor  # (Q, 3)
    reference_points: Tensor  # (N, 3)
    hidden: Tensor
    of_queries: Tensor
    weights: Tensor
    layer: Tensor  # (OF_LAYER, H)
    queries: int
    references: int
    k: int
    channels: int


def _launch(kernel: Any, inputs: dict[str, Any], *args: Any, **options: Any) -> None:
    """Launch a kernel over tiles of queries, and blocks of channels."""
    rows, splits, layer = inputs["rows"], inputs["row_splits"], inputs["weight_1"]
    channels = layer.shape[0]
    points = [inputs["query_points"], inputs["reference_points"]]
    if inputs["bias_1"].numel():
        points = [in_space(given) for given in points]
        layer = rows_of_places(inputs)
    queries = rows.shape[0] if splits is None else splits.shape[0] - 1
    network = _Network(
        rows, rows if splits is None else splits, *points, inputs["hidden"], inputs["of_queries"],
        inputs["weights"], layer, queries, inputs["reference_points"].shape[0],
        rows.shape[1] if splits is None else 1, channels,
    )  # fmt: skip
    block = min(MOST_BLOCK, max(16, triton.next_power_of_2(channels)))
    options |= LAUNCH[kernel.__name__]
    of_thread = OF_THREAD_NARROW if kernel is sum_kernel and inputs["hidden"].itemsize == 2 else OF_THREAD
    tile = of_thread * 32 * options["num_warps"] // block
    launch(
        kernel, (cdiv(queries, tile), cdiv(channels, block)), *network, *args,
        PADDED=splits is None, HIDDEN=inputs["hidden"].numel() > 0,
        OF_QUERIES=inputs["of_queries"].numel() > 0,
        WEIGHTED=inputs["weights"].numel() > 0,
        PLACES=inputs["bias_1"].numel() > 0, DISTANCE=inputs["with_distance"], MEAN=inputs["mean"],
        ACTIVATION=NUMBER_OF[inputs["activation"]] if inputs["active_at_end"] else IDENTITY,
        SLOPE=inputs["slope"], ROUGH=_is_rough(inputs), BLOCK=block, TILE=tile, **options,
    )  # fmt: skip


@triton.jit
def lists_from(query, exists, row_splits, k, PADDED: tl.constexpr):
    """Where the pairs of queries begin, and how many slots there are for them."""
    begin, end = lists_of(query, exists, row_splits, k, PADDED)
    return begin, (end - begin).to(tl.int32)


@triton.jit
def row_at(rows, begin, length, step, references):
    """The row in a slot of each query, and whether it is one; of 32 bits, for short arithmetic of addresses."""
    row = tl.load(rows + begin + step, mask=step < length, other=-1)
    return row.to(tl.uint32), (row >= 0) & (row < references)


@triton.jit
def begin_of(row, channels):
    """Where rows of a matrix begin: a product of 32 bits each."""
    return (row.to(tl.int64) * tl.cast(channels, tl.uint32).to(tl.int64))[:, None]


@triton.jit
def places_of(
    reference_points, row, hit, px, py, pz, real: tl.constexpr, PLACES: tl.constexpr, DISTANCE: tl.constexpr
):
    """Reference minus query point of pairs, and the distance; zeros unless asked for."""
    x = tl.zeros([row.shape[0]], real)
    y, z, distance = x, x, x
    if PLACES:
        x, y, z = load_points(reference_points, row, hit, 0.0)
        x, y, z = (x - px).to(real), (y - py).to(real), (z - pz).to(real)
    if DISTANCE:
        distance = rounded_root(x * x + y * y + z * z)
    return x, y, z, distance


@triton.jit
def of_tile(
    query_points, of_queries, layer, query, exists, channel, channels,
    OF_QUERIES: tl.constexpr, PLACES: tl.constexpr, DISTANCE: tl.constexpr,
):  # fmt: skip
    """What the pairs of a tile share: query points, what queries add (TILE, BLOCK), the layer of places."""
    real: tl.constexpr = layer.dtype.element_ty
    inside = channel < channels
    px, py, pz = (
        tl.zeros([query.shape[0]], real),
        tl.zeros([query.shape[0]], real),
        tl.zeros([query.shape[0]], real),
    )
    constant = tl.zeros([query.shape[0], channel.shape[0]], real)
    wx = tl.zeros([channel.shape[0]], real)
    wy, wz, wd = wx, wx, wx
    if PLACES:
        px, py, pz = load_points(query_points, query, exists, 0.0)
        wx = tl.load(layer + channel, mask=inside, other=0.0)
        wy = tl.load(layer + channels + channel, mask=inside, other=0.0)
        wz = tl.load(layer + 2 * channels + channel, mask=inside, other=0.0)
        constant += tl.load(layer + 4 * channels + channel, mask=inside, other=0.0)[None, :]
    if DISTANCE:
        wd = tl.load(layer + 3 * channels + channel, mask=inside, other=0.0)
    if OF_QUERIES:
        at = query[:, None] * channels + channel[None, :]
        there = exists[:, None] & inside[None, :]
        constant += tl.load(of_queries + at, mask=there, other=0.0).to(real)
    return px, py, pz, constant, wx, wy, wz, wd


@triton.jit
def first_layer(
    hidden, row, there, channel, channels, constant, x, y, z, distance, wx, wy, wz, wd,
    HIDDEN: tl.constexpr, PLACES: tl.constexpr, DISTANCE: tl.constexpr,
):  # fmt: skip
    """Results of the first layer for one pair of each query: (TILE, BLOCK)."""
    values = constant
    if HIDDEN:
        at = begin_of(row, channels) + channel[None, :]
        values += tl.load(hidden + at, mask=there, other=0.0).to(values.dtype)
    if PLACES:
        values += x[:, None] * wx[None, :]
        values += y[:, None] * wy[None, :]
        values += z[:, None] * wz[None, :]
    if DISTANCE:
        values += distance[:, None] * wd[None, :]
    return values


@triton.jit
def sum_kernel(
    rows, row_splits, query_points, reference_points, hidden, of_queries, weights, layer,
    queries, references, k, channels, counts, sums,
    PADDED: tl.constexpr, HIDDEN: tl.constexpr, OF_QUERIES: tl.constexpr, WEIGHTED: tl.constexpr,
    PLACES: tl.constexpr, DISTANCE: tl.constexpr, MEAN: tl.constexpr, ACTIVATION: tl.constexpr,
    SLOPE: tl.constexpr, ROUGH: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Sums or means of some channels for a tile of queries, and the number of pairs of each."""
    real: tl.constexpr = layer.dtype.element_ty
    query = (tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)
    exists = query < queries
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    px, py, pz, constant, wx, wy, wz, wd = of_tile(
        query_points, of_queries, layer, query, exists, channel, channels, OF_QUERIES, PLACES, DISTANCE
    )
    begin, length = lists_from(query, exists, row_splits, k, PADDED)
    total = tl.zeros([TILE, BLOCK], real)
    for step in range(0, tl.max(length)):
        row, hit = row_at(rows, begin, length, step, references)
        x, y, z, distance = places_of(reference_points, row, hit, px, py, pz, real, PLACES, DISTANCE)
        there = hit[:, None] & (channel < channels)[None, :]
        values = first_layer(
            hidden, row, there, channel, channels, constant, x, y, z, distance, wx, wy, wz, wd,
            HIDDEN, PLACES, DISTANCE,
        )  # fmt: skip
        values, _ = activated(tl.where(there, values, 0.0), ACTIVATION, SLOPE, ROUGH)  # 0 stays 0
        if WEIGHTED:
            values *= tl.load(weights + begin + step, mask=hit, other=0.0)[:, None]
        total += values
    count = tl.zeros([TILE], tl.int32)
    for step in range(0, tl.max(length), SLOTS):
        _, hit = row_at(rows, begin[:, None], length[:, None], step + tl.arange(0, SLOTS)[None, :], references)
        count += tl.sum(hit.to(tl.int32), 1)
    if MEAN:
        total /= tl.maximum(count, 1).to(real)[:, None]
    if tl.program_id(1) == 0:
        tl.store(counts + query, count, mask=exists)
    out = exists[:, None] & (channel < channels)[None, :]
    tl.store(sums + query[:, None] * channels + channel[None, :], total, mask=out)


@triton.jit
def gradient_kernel(
    rows, row_splits, query_points, reference_points, hidden, of_queries, weights, layer,
    queries, references, k, channels, counts,
    grad, d_reference, d_hidden, d_query, d_of_queries, d_weights, d_layer,
    PADDED: tl.constexpr, HIDDEN: tl.constexpr, OF_QUERIES: tl.constexpr, WEIGHTED: tl.constexpr,
    PLACES: tl.constexpr, DISTANCE: tl.constexpr, MEAN: tl.constexpr, ACTIVATION: tl.constexpr,
    SLOPE: tl.constexpr, ROUGH: tl.constexpr, BLOCK: tl.constexpr, FLAGS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Gradients of what :func:`sum_kernel` reads, as far as ``FLAGS`` says, in the order of the arguments."""
    real: tl.constexpr = layer.dtype.element_ty
    query = (tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)
    exists = query < queries
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    px, py, pz, constant, wx, wy, wz, wd = of_tile(
        query_points, of_queries, layer, query, exists, channel, channels, OF_QUERIES, PLACES, DISTANCE
    )
    out = query[:, None] * channels + channel[None, :]
    upstream = tl.load(grad + out, mask=exists[:, None] & inside[None, :], other=0.0).to(real)
    if MEAN:
        upstream /= tl.maximum(tl.load(counts + query, mask=exists, other=1.0), 1.0)[:, None]
    begin, length = lists_from(query, exists, row_splits, k, PADDED)
    d_constant = tl.zeros([TILE, BLOCK], real)
    dx, dy, dz, dd = d_constant, d_constant, d_constant, d_constant
    qx, qy, qz = tl.zeros([TILE], real), tl.zeros([TILE], real), tl.zeros([TILE], real)
    for step in range(0, tl.max(length)):
        row, hit = row_at(rows, begin, length, step, references)
        x, y, z, distance = places_of(reference_points, row, hit, px, py, pz, real, PLACES, DISTANCE)
        x, y, z = tl.where(hit, x, 0.0), tl.where(hit, y, 0.0), tl.where(hit, z, 0.0)
        distance = tl.where(hit, distance, 0.0)
        there = hit[:, None] & inside[None, :]
        values = first_layer(
            hidden, row, there, channel, channels, constant, x, y, z, distance, wx, wy, wz, wd,
            HIDDEN, PLACES, DISTANCE,
        )  # fmt: skip
        values, slope = activated(values, ACTIVATION, SLOPE, ROUGH)
        d_values = tl.where(there, upstream * slope, 0.0)
        if FLAGS & 16:
            own = tl.sum(tl.where(there, upstream * values, 0.0), 1)
            tl.atomic_add(d_weights + begin + step, own, mask=hit, sem="relaxed")
        if WEIGHTED:
            d_values *= tl.load(weights + begin + step, mask=hit, other=0.0)[:, None]
        if FLAGS & 2:
            target = d_hidden + begin_of(row, channels) + channel[None, :]
            tl.atomic_add(target, d_values, mask=there, sem="relaxed")
        d_constant += d_values
        if FLAGS & 32:
            dx += d_values * x[:, None]
            dy += d_values * y[:, None]
            dz += d_values * z[:, None]
            if DISTANCE:
                dd += d_values * distance[:, None]
        if FLAGS & 5:
            rx = tl.sum(d_values * wx[None, :], 1)
            ry = tl.sum(d_values * wy[None, :], 1)
            rz = tl.sum(d_values * wz[None, :], 1)
            if DISTANCE:
                along = tl.sum(d_values * wd[None, :], 1) / tl.where(distance > 0, distance, 1.0)
                rx += along * x
                ry += along * y
                rz += along * z
            if FLAGS & 1:
                target = d_reference + 3 * row.to(tl.int64)
                tl.atomic_add(target, rx, mask=hit, sem="relaxed")
                tl.atomic_add(target + 1, ry, mask=hit, sem="relaxed")
                tl.atomic_add(target + 2, rz, mask=hit, sem="relaxed")
            qx += rx
            qy += ry
            qz += rz
    if FLAGS & 4:
        target = d_query + 3 * query
        tl.atomic_add(target, -qx, mask=exists, sem="relaxed")
        tl.atomic_add(target + 1, -qy, mask=exists, sem="relaxed")
        tl.atomic_add(target + 2, -qz, mask=exists, sem="relaxed")
    if FLAGS & 8:
        tl.store(d_of_queries + out, d_constant, mask=exists[:, None] & inside[None, :])
    if FLAGS & 32:
        target = d_layer + (tl.program_id(0) % COPIES) * OF_LAYER * channels + channel
        tl.atomic_add(target, tl.sum(dx, 0), mask=inside, sem="relaxed")
        tl.atomic_add(target + channels, tl.sum(dy, 0), mask=inside, sem="relaxed")
        tl.atomic_add(target + 2 * channels, tl.sum(dz, 0), mask=inside, sem="relaxed")
        tl.atomic_add(target + 3 * channels, tl.sum(dd, 0), mask=inside, sem="relaxed")
        tl.atomic_add(target + 4 * channels, tl.sum(d_constant, 0), mask=inside, sem="relaxed")


_edge_sums = triton_op(
    "pointproj::triton_edge_sums",
    signed(_forward, PARAMETERS, tuple[Tensor, Tensor]),
    _outputs,
    differentiable=plain.EDGE_MLP.differentiable,
    backward=_backward,
    second_backward=_second_backward,
)
