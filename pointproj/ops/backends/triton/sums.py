"""The kernel of sums within a radius: of features for queries, of upstream gradients for reference points.

A tile of points of one side meets the points of the other side that lie near its box, some at a time: a
matrix of weights, times the matrix of their values. Weights are exp((nearest_i - d_ij) / sigma), with
nearest_i = 0 where no weight can vanish so, else the distance of the query's nearest neighbour, which takes
a pass of its own.
"""

import triton
import triton.language as tl

from pointproj.ops.backends.triton.nearby import (
    AT_ROWS,
    GROUPS,
    LEAVES,
    LISTS,
    N_GROUPS,
    N_LEAVES,
    N_POINTS,
    POINTS,
    RING,
    list_groups,
    list_leaves,
    list_points,
    pad,
)
from pointproj.ops.backends.triton.products import add_product, load_rows
from pointproj.ops.backends.triton.tiles import (
    LOG2E,
    is_finite,
    load_points,
    power,
    root,
    squared_length,
    tile_box,
)

TILE = 16  # points of a side of its own that a program has at a time
SOME = 64  # of the points near them it meets at a time. Both decide the order of sums, so they are not tuned
WARPS = 2
MOST_PROGRAMS = 1024  # each takes tile after tile
VANISHING = tl.constexpr(48.0)  # weights below 2 to this power, negative, are too small for tiny values


# What a program goes through the points for. A product spreads what is not finite to all rows: where sums are
# not finite, those that such values reach are marked, and the others added up once more.
NEAREST = tl.constexpr(0)
SUMS = tl.constexpr(1)
MARKS = tl.constexpr(2)
SUMS_OF_FINITE = tl.constexpr(3)
DONE = tl.constexpr(4)


def programs(rows: int) -> int:
    """How many programs share the tiles of some rows; a number that a compiler keeps open may be any."""
    return min(triton.cdiv(rows, TILE), MOST_PROGRAMS) if isinstance(rows, int) else MOST_PROGRAMS


@triton.jit
def quotient(x, y):
    """x / y, rounded."""
    x, y = tl.broadcast(x, y)
    return x / y if x.dtype == tl.float64 else tl.div_rn(x, y)


@triton.jit
def meet(x, y, z, cloud, lists, ring, at, reach, real: tl.constexpr, MANY: tl.constexpr):
    """Which pairs are within the radius, and their distances, for points in a ring."""
    px, py, pz = load_points(ring, RING, at)
    squared = squared_length(x[:, None] - px[None, :], y[:, None] - py[None, :], z[:, None] - pz[None, :])
    hit = squared <= reach
    if MANY:
        hit &= cloud[:, None] == tl.load(lists + AT_ROWS + RING + at)[None, :]
    return hit, root(squared).to(real)


@triton.jit
def weigh(nearest, far, hit, slope, softmax, row, GATHER: tl.constexpr):
    """Weights of pairs; where queries are gathered, theirs, and else relative to ``nearest``."""
    if GATHER:
        at = softmax + 2 * row.to(tl.int64)
        weights = power((tl.load(at)[None, :] - far) * slope) * tl.load(at + 1)[None, :]
    else:
        weights = power((nearest[:, None] - far) * slope)
    return tl.where(hit, weights, 0.0)


@triton.jit
def add(
    sums, totals, weights, hit, row, exists, values, begin, channels, step,
    GATHER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add weights times values, and weights; see ``MARKS`` for values that are not finite."""
    real: tl.constexpr = values.dtype.element_ty
    some = load_rows(values, row, exists, begin, channels, BLOCK)
    if step > SUMS:
        finite = tl.abs(some) < float("inf")
        some = tl.where(finite, some, 0.0)
        if step == MARKS:
            some, weights = (~finite).to(real), hit.to(real)
    sums = add_product(sums, weights, some)
    if not GATHER:
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
def store_means(sums, totals, nearest, active, row, exists, softmax):
    """Divide sums by totals; keep what the gradient needs: the weights' reference, and 1 / total."""
    total = tl.max(totals, 1)
    has_neighbor = total > 0
    if tl.program_id(1) == 0:
        tl.store(softmax + 2 * row, nearest, mask=exists)
        tl.store(softmax + 2 * row + 1, tl.where(has_neighbor, 1.0 / total, 0.0), mask=exists)
    means = quotient(sums, tl.where(has_neighbor, total, 1.0)[:, None])
    return tl.where(active[:, None], means, float("nan"))


@triton.jit
def sums_kernel(
    own, own_rows, own_clouds, own_padded, own_count,
    points, row_of, clouds, padded, boxes, spans,
    values, sigma, reach, softmax, summed, lists_of_all, rings, channels,
    GATHER: tl.constexpr, MANY: tl.constexpr, LEAF: tl.constexpr, FANOUT: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, SOME: tl.constexpr,
):  # fmt: skip
    """Weighted means of values near queries, or with GATHER weighted sums near reference points."""
    real: tl.constexpr = values.dtype.element_ty
    program = (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)).to(tl.int64)
    lists = lists_of_all + LISTS * program
    ring = rings + 3 * RING * program
    begin = tl.program_id(1) * BLOCK
    slope = 1.0 / tl.load(sigma) * LOG2E
    limit = tl.load(reach)
    vanishing = (tl.sqrt(limit) * slope > VANISHING) & (not GATHER)
    leaves = tl.cast(padded // LEAF, tl.int32)  # sizes may come as 64 bits
    groups = leaves // FANOUT
    for tile in range(tl.program_id(0), tl.cast(tl.cdiv(own_count, TILE), tl.int32), tl.num_programs(0)):
        own_at = tile * TILE + tl.arange(0, TILE)
        x, y = tl.load(own + own_at), tl.load(own + own_padded + own_at)
        z = tl.load(own + 2 * own_padded + own_at)
        cloud = tl.zeros_like(own_at)
        if MANY:
            cloud = tl.load(own_clouds + own_at)
        exists = own_at < own_count
        active = exists & is_finite(x, y, z)
        box = tile_box(x, y, z, cloud, active)
        x = tl.where(active, x, float("nan"))  # compares as farther than anything
        nearest = tl.where(vanishing, float("inf"), tl.zeros([TILE], real))
        totals = tl.zeros([TILE, 16], real)  # every column is the sum of the weights
        sums = tl.zeros([TILE, BLOCK], real)
        step = tl.where(vanishing, NEAREST, SUMS)
        while step < DONE:
            taken = 0
            end = 0
            for first in range(0, groups, GROUPS):
                list_groups(lists, first, boxes, spans, leaves, box, limit, MANY, FANOUT)
                of_groups = tl.load(lists + N_GROUPS)
                ends = first + GROUPS >= groups  # at last, what is left is taken, also if nothing came to it
                for group in range(0, tl.maximum(of_groups, ends.to(tl.int32)), LEAVES // FANOUT):
                    list_leaves(lists, group, boxes, spans, leaves, box, limit, MANY, FANOUT)
                    of_leaves = tl.load(lists + N_LEAVES)
                    ends_here = ends & (group + LEAVES // FANOUT >= of_groups)
                    for leaf in range(0, tl.maximum(of_leaves, ends_here.to(tl.int32)), POINTS // LEAF):
                        list_points(
                            lists, ring, leaf, end, points, row_of, clouds, padded, box, limit, MANY, LEAF
                        )
                        end = tl.load(lists + N_POINTS)
                        last = ends_here & (leaf + POINTS // LEAF >= of_leaves)
                        if last:
                            pad(lists, ring, end, MANY, SOME)
                        while (end - taken >= SOME) | (last & (end > taken)):
                            at = (taken & (RING - 1)) + tl.arange(0, SOME)
                            taken += SOME
                            hit, far = meet(x, y, z, cloud, lists, ring, at, limit, real, MANY)
                            if step == NEAREST:
                                nearest = tl.minimum(nearest, tl.min(tl.where(hit, far, float("inf")), 1))
                            else:
                                row = tl.load(lists + AT_ROWS + at)
                                weights = weigh(nearest, far, hit, slope, softmax, row, GATHER)
                                sums, totals = add(
                                    sums, totals, weights, hit, row, at >= 0, values, begin, channels, step,
                                    GATHER, BLOCK,
                                )  # fmt: skip
            step, sums, totals = next_step(step, sums, totals)
        row = tl.load(own_rows + own_at, mask=exists, other=0).to(tl.int64)
        if not GATHER:
            sums = store_means(sums, totals, nearest, active, row, exists, softmax)
        channel = begin + tl.arange(0, BLOCK)
        out = exists[:, None] & (channel < channels)[None, :]
        tl.store(summed + row[:, None] * channels + channel[None, :], sums, mask=out)
