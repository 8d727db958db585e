"""Aggregation over all points within a radius, none left out: rows W2 and W2-wide of the benchmark.

A tile of points of one side meets the points of the other side that lie near its box, some at a time: a
matrix of weights, times the matrix of their values. One kernel sums features for queries, and upstream
gradients for reference points (the feature gradient), so nothing is ever added to one place by two programs:
results are the same, bit for bit, in every run.

Weights of a mean are relative to that at a distance nearest_i: exp((nearest_i - d_ij) / sigma) by default.
Where no weight can vanish so, it is the distance at which the kernel is 1, by default 0; else that of the
query's nearest neighbour, which takes a pass of its own.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pointproj.ops.backends import torch as plain
from pointproj.ops.backends.triton.flops import count_aggregation
from pointproj.ops.backends.triton.launch import launch
from pointproj.ops.backends.triton.matrix_products import add_product, channel_block, load_rows
from pointproj.ops.backends.triton.operators import runs_kernels
from pointproj.ops.backends.triton.over_trees import input_names, tree_op
from pointproj.ops.backends.triton.radius_gradients import position_gradients
from pointproj.ops.backends.triton.tiles import (
    cdiv,
    is_finite,
    load_points,
    quotient,
    squared_length,
    tile_box,
)
from pointproj.ops.backends.triton.traversal import (
    AT_ROWS,
    FANOUT,
    GROUPS,
    LEAF,
    LEAVES,
    LISTS,
    N_GROUPS,
    N_LEAVES,
    N_POINTS,
    POINTS,
    QUEUE,
    list_groups,
    list_leaves,
    pad,
    queue_points,
)
from pointproj.ops.backends.triton.tree import Tree
from pointproj.ops.backends.triton.weights import (
    as_anchor,
    can_vanish,
    choices,
    distance_of_one,
    length,
    parameters,
    relative_weights,
    slope_of,
)
from pointproj.ops.bridge.torch_op import Saved
from pointproj.ops.clouds import Clouds
from pointproj.ops.gradients import DIFFERENTIABLE, aggregate_backward, second_backward_over
from pointproj.ops.pairs import chunks_within, largest_square_within, weighting_of
from pointproj.ops.reference import Weighting
from pointproj.ops.registry import Tables

TILE = 16  # points of a side of its own that a program has at a time
STEP = 64  # of the points near them it takes at a time. Both decide the order of sums, so they are not tuned
WARPS = 2
MOST_PROGRAMS = 1024  # each takes tile after tile

# What a program goes through the points for. A product spreads what is not finite to all rows: where sums are
# not finite, the rows with such a neighbour are marked, and the other values added up once more.
NEAREST = tl.constexpr(0)
SUMS = tl.constexpr(1)
MARKS = tl.constexpr(2)
SUMS_OF_FINITE = tl.constexpr(3)
DONE = tl.constexpr(4)


def radius_aggregate(
    clouds: Clouds,
    tables: Tables | None,
    features: Tensor,
    sigma: Tensor,
    radius: float,
    weighting: Weighting,
) -> Tensor:
    """Weighted mean or sum of the features within ``radius``: ``(Q, C)`` in their dtype."""
    return _aggregate(clouds, tables, features, sigma, radius, *weighting)[0]


def _by_kernels(
    clouds: Clouds,
    queries: Tree,
    references: Tree,
    features: Tensor,
    sigma: Tensor,
    radius: float,
    kernel: str,
    reduce: str,
    power: float,
    eps: float,
    support: float,
) -> tuple[Tensor, Tensor]:
    """Aggregated features, and of each query the nearest distance and 1 / total weight relative to it."""
    count = clouds.query_points.shape[0]
    aggregated = features.new_empty(count, features.shape[1])
    softmax = features.new_empty(count, 2)
    limit, weighting = _limit(radius, clouds.query_points), Weighting(kernel, reduce, power, eps, support)
    _sum(queries, references, features, sigma, limit, softmax, aggregated, clouds.count, False, weighting)
    return aggregated, softmax


def _by_torch(
    clouds: Clouds, features: Tensor, sigma: Tensor, radius: float, *weighting: str | float
) -> tuple[Tensor, Tensor]:
    aggregated = plain.radius_aggregate(clouds, None, features, sigma, radius, Weighting(*weighting))
    return aggregated, features.new_empty(0, 2)


def _backward(grads: tuple[Tensor, ...], needs: dict[str, bool], saved: Saved) -> tuple[Tensor | None, ...]:
    inputs, grad, softmax, made = saved.inputs, grads[0], saved.outputs[1], {}
    if not runs_kernels(inputs["query_points"]):
        return aggregate_backward(grad, needs, inputs, chunks_within)
    features, sigma, clouds = inputs["features"], inputs["sigma"], inputs["clouds"]
    queries, references = Tree(*inputs["query_tree"]), Tree(*inputs["reference_tree"])
    limit, weighting = _limit(inputs["radius"], inputs["query_points"]), weighting_of(inputs)
    if needs["features"]:
        made["features"] = torch.empty_like(features)
        _sum(references, queries, grad, sigma, limit, softmax, made["features"], clouds, True, weighting)
    if needs["query_points"] or needs["reference_points"] or needs["sigma"]:
        values = features, *saved.outputs, grad, sigma, limit
        made |= position_gradients(
            queries, references, inputs["query_points"], inputs["reference_points"], values, clouds,
            needs["reference_points"], weighting,
        )  # fmt: skip
    return tuple(made[n].to(inputs[n].dtype) if needs[n] else None for n in DIFFERENTIABLE)


def _limit(radius: float, points: Tensor) -> Tensor:
    """The largest squared distance within the radius; a tensor, because kernels take numbers as fp32."""
    return points.new_full((), largest_square_within(radius, points.dtype))


def _sum(
    own: Tree,
    others: Tree,
    values: Tensor,
    sigma: Tensor,
    limit: Tensor,
    softmax: Tensor,
    summed: Tensor,
    clouds: int,
    for_references: bool,
    weighting: Weighting,
) -> None:
    """Into ``summed``, for each point of a side of its own, what there is near it of the other's values."""
    count, channels = summed.shape
    block = channel_block(channels)
    grid = programs(count), cdiv(channels, block)
    lists = own.rows.new_empty(grid[0] * grid[1], LISTS.value)
    queues = own.points.new_empty(grid[0] * grid[1], 3 * QUEUE.value)
    launch(
        sums_kernel, grid,
        *own.side(), count, *others.side(), others.boxes, others.spans, values,
        *parameters(weighting, sigma), limit, softmax, summed, lists, queues, channels,
        for_references, clouds != 1, *choices(weighting), block, TILE, STEP, num_warps=WARPS,
    )  # fmt: skip


def programs(rows: int) -> int:
    """How many programs share the tiles of some rows; a number that a compiler keeps open may be any."""
    return min(cdiv(rows, TILE), MOST_PROGRAMS) if isinstance(rows, int) else MOST_PROGRAMS


@triton.jit
def pair_with_queue(
    x, y, z, cloud, lists, queue, at, limit,
    real: tl.constexpr, BATCHED: tl.constexpr, KERNEL: tl.constexpr,
):  # fmt: skip
    """Which pairs are within the radius, and their distances, for points in the queue."""
    px, py, pz = load_points(queue, QUEUE, at)
    squared = squared_length(x[:, None] - px[None, :], y[:, None] - py[None, :], z[:, None] - pz[None, :])
    hit = squared <= limit
    if BATCHED:
        hit &= cloud[:, None] == tl.load(lists + AT_ROWS + QUEUE + at)[None, :]
    return hit, length(squared, KERNEL).to(real)


@triton.jit
def weigh(
    nearest, distance, hit, slope, eps, softmax, row, FOR_REFERENCES: tl.constexpr, KERNEL: tl.constexpr
):
    """Weights of pairs: for reference points those of the queries' softmax, else relative to ``nearest``."""
    if FOR_REFERENCES:
        at = softmax + 2 * row.to(tl.int64)
        weights = relative_weights(tl.load(at)[None, :], distance, slope, eps, KERNEL)
        weights *= tl.load(at + 1)[None, :]
    else:
        weights = relative_weights(nearest[:, None], distance, slope, eps, KERNEL)
    return tl.where(hit, weights, 0.0)


@triton.jit
def add(
    sums, totals, weights, hit, row, exists, values, begin, channels, step,
    TOTALS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add weights times values, and the weights for a mean; see ``MARKS`` for values that are not finite."""
    real: tl.constexpr = values.dtype.element_ty
    some = load_rows(values, row, exists, begin, channels, BLOCK)
    if step > SUMS:
        finite = tl.abs(some) < float("inf")
        some = tl.where(finite, some, 0.0)
        if step == MARKS:
            some, weights = (~finite).to(real), hit.to(real)
    sums = add_product(sums, weights, some)
    if TOTALS:
        totals = add_product(totals, weights, tl.full([weights.shape[1], 16], 1.0, real), SHORT=True)
    return sums, totals


@triton.jit
def next_step(step, sums, totals):
    """What to do after going through the points once, and what sums begin with then."""
    whole = tl.min((tl.abs(sums) < float("inf")).to(tl.int32)) == 1
    finished = (step == SUMS_OF_FINITE) | ((step == SUMS) & whole)
    if not finished:
        sums = tl.where((step == MARKS) & (sums > 0), float("nan"), 0.0).to(sums.dtype)
        totals = tl.zeros_like(totals)
    return tl.where(finished, DONE, step + 1), sums, totals


@triton.jit
def store_means(sums, totals, nearest, active, row, exists, softmax, MEAN: tl.constexpr):
    """Divide sums by totals; keep what the gradient needs: the weights' reference, and 1 / total."""
    if MEAN:
        total = tl.max(totals, 1)
        has_neighbor = total > 0
        inverse = tl.where(has_neighbor, 1.0 / total, 0.0)
        sums = quotient(sums, tl.where(has_neighbor, total, 1.0)[:, None])
    else:
        inverse = tl.full(nearest.shape, 1.0, nearest.dtype)
    if tl.program_id(1) == 0:
        tl.store(softmax + 2 * row, nearest, mask=exists)
        tl.store(softmax + 2 * row + 1, inverse, mask=exists)
    return tl.where(active[:, None], sums, float("nan"))


@triton.jit
def sums_kernel(
    own, own_rows, own_clouds, own_padded, own_count,
    points, row_of, clouds, padded, boxes, spans,
    values, shape, eps, limit, softmax, summed, lists_of_all, queues, channels,
    FOR_REFERENCES: tl.constexpr, BATCHED: tl.constexpr, KERNEL: tl.constexpr, MEAN: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Weighted means or sums of values near queries, or sums of upstream gradients near reference points."""
    real: tl.constexpr = values.dtype.element_ty
    side = (points, row_of, clouds, padded)
    program = (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)).to(tl.int64)
    lists = lists_of_all + LISTS * program
    queue = queues + 3 * QUEUE * program
    begin = tl.program_id(1) * BLOCK
    slope, eps = slope_of(tl.load(shape), KERNEL), tl.load(eps)
    farthest = tl.load(limit)
    TOTALS: tl.constexpr = MEAN and not FOR_REFERENCES
    vanishing = can_vanish(farthest, slope, eps, KERNEL) & TOTALS
    leaves = tl.cast(padded // LEAF, tl.int32)  # sizes may come as 64 bits
    groups = leaves // FANOUT
    for tile in range(tl.program_id(0), tl.cast(tl.cdiv(own_count, TILE), tl.int32), tl.num_programs(0)):
        own_at = tile * TILE + tl.arange(0, TILE)  # as load_tile, for a tracer: see the traversal
        x, y = tl.load(own + own_at), tl.load(own + own_padded + own_at)
        z = tl.load(own + 2 * own_padded + own_at)
        cloud = tl.zeros_like(own_at)
        if BATCHED:
            cloud = tl.load(own_clouds + own_at)
        exists = own_at < own_count
        active = exists & is_finite(x, y, z)
        box = tile_box(x, y, z, cloud, active)
        x = tl.where(active, x, float("nan"))  # compares as farther than anything
        nearest = tl.where(vanishing, float("inf"), distance_of_one(tl.zeros([TILE], real), KERNEL))
        totals = tl.zeros([TILE, 16], real)  # every column is the sum of the weights
        sums = tl.zeros([TILE, BLOCK], real)
        step = tl.where(vanishing, NEAREST, SUMS)
        while step < DONE:
            taken = 0
            end = 0
            for first in range(0, groups, GROUPS):
                list_groups(lists, first, boxes, spans, leaves, box, farthest, BATCHED)
                of_groups = tl.load(lists + N_GROUPS)
                ends = first + GROUPS >= groups  # at last, what is left is taken, also if nothing came to it
                for group in range(0, tl.maximum(of_groups, ends.to(tl.int32)), LEAVES // FANOUT):
                    list_leaves(lists, group, boxes, spans, leaves, box, farthest, BATCHED)
                    of_leaves = tl.load(lists + N_LEAVES)
                    ends_here = ends & (group + LEAVES // FANOUT >= of_groups)
                    for leaf in range(0, tl.maximum(of_leaves, ends_here.to(tl.int32)), POINTS // LEAF):
                        queue_points(lists, queue, leaf, end, side, box, farthest, BATCHED)
                        end = tl.load(lists + N_POINTS)
                        last = ends_here & (leaf + POINTS // LEAF >= of_leaves)
                        if last:
                            pad(lists, queue, end, BATCHED, STEP)
                        while (end - taken >= STEP) | (last & (end > taken)):
                            at = (taken & (QUEUE - 1)) + tl.arange(0, STEP)
                            taken += STEP
                            hit, distance = pair_with_queue(
                                x, y, z, cloud, lists, queue, at, farthest, real, BATCHED, KERNEL
                            )
                            if step == NEAREST:
                                nearer = tl.min(tl.where(hit, distance, float("inf")), 1)
                                nearest = tl.minimum(nearest, as_anchor(nearer, eps, KERNEL))
                            else:
                                row = tl.load(lists + AT_ROWS + at)
                                weights = weigh(
                                    nearest, distance, hit, slope, eps, softmax, row, FOR_REFERENCES, KERNEL
                                )
                                sums, totals = add(
                                    sums, totals, weights, hit, row, at >= 0, values, begin, channels, step,
                                    TOTALS, BLOCK,
                                )  # fmt: skip
            step, sums, totals = next_step(step, sums, totals)
        row = tl.load(own_rows + own_at, mask=exists, other=0).to(tl.int64)
        if not FOR_REFERENCES:
            sums = store_means(sums, totals, nearest, active, row, exists, softmax, MEAN)
        channel = begin + tl.arange(0, BLOCK)
        out = exists[:, None] & (channel < channels)[None, :]
        tl.store(summed + row[:, None] * channels + channel[None, :], sums, mask=out)


_aggregate = tree_op(
    "pointproj::triton_radius_aggregate",
    _by_kernels,
    _by_torch,
    lambda clouds, features, *others: (
        ((clouds.query_points.shape[0], features.shape[1]), features.dtype),
        ((clouds.query_points.shape[0] if runs_kernels(clouds.query_points) else 0, 2), features.dtype),
    ),
    differentiable=DIFFERENTIABLE,
    backward=_backward,
    second_backward=second_backward_over(chunks_within),
)
count_aggregation("triton_radius_aggregate", input_names(_by_kernels))
