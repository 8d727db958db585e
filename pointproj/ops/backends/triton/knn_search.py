"""The k nearest reference points, exactly, ties by the lower index: rows W1 and self-kNN of the benchmark.

With radii, the k nearest within them, and how many are within them in all.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pointproj.ops.backends import torch as plain
from pointproj.ops.backends.triton.flops import count_search
from pointproj.ops.backends.triton.launch import launch
from pointproj.ops.backends.triton.over_trees import tree_op
from pointproj.ops.backends.triton.tiles import (
    END,
    FANOUT,
    LEAF,
    box_squares,
    cdiv,
    load_points,
    load_rows_of_3,
    load_tile,
    rounded_root,
    size_class,
    square,
    squared_length,
    tile_box,
    tuned,
)
from pointproj.ops.backends.triton.top_k import empty_lists, insert, precedes, store_lists
from pointproj.ops.backends.triton.tree import Tree, key_bits, key_of
from pointproj.ops.clouds import Clouds
from pointproj.ops.distances import distances_of
from pointproj.ops.registry import Tables

LARGEST_LIST = 32  # neighbours found in one search; more take several, each beyond the last

# How far a search goes, its constant RADII. One less is how far apart the radii of two queries lie.
EVERYWHERE = tl.constexpr(0)
TO_ONE_RADIUS = tl.constexpr(1)
TO_OWN_RADII = tl.constexpr(2)


def nearest(clouds: Clouds, tables: Tables | None, k: int, index_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Distances and packed rows, ``(Q, k)``, nearest first, inf and -1 where there are fewer."""
    return _search(clouds, tables, index_dtype, k)


def search(
    clouds: Clouds, queries: Tree, references: Tree, index_dtype: torch.dtype, k: int
) -> tuple[Tensor, Tensor]:
    """The same by kernels, with the points sorted, whoever looks on."""
    distances = clouds.query_points.new_empty(clouds.query_points.shape[0], k)
    found = torch.empty_like(distances, dtype=index_dtype)
    find(clouds, queries, references, found, distances)
    return distances, found


def _by_torch(clouds: Clouds, index_dtype: torch.dtype, k: int) -> tuple[Tensor, Tensor]:
    rows = plain.search(clouds, (), k)
    return distances_of(clouds, rows), rows.to(index_dtype)


def find(
    clouds: Clouds,
    queries: Tree,
    references: Tree,
    found: Tensor,
    distances: Tensor,
    within: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Rows of the nearest into ``found``, and their ``distances``, both (Q, k).

    ``within`` are radii, (1,) or (Q,), and counts to fill.
    """
    count, k = found.shape
    bits = key_bits(references.keys.dtype, clouds.count)
    points = clouds.reference_points
    radii, counts = within or (points, queries.rows)  # kernels take a tensor
    mode = radii_mode(radii) if within else EVERYWHERE.value
    for first in range(0, k, LARGEST_LIST):
        wanted = min(k - first, LARGEST_LIST)
        launch(
            search_kernel, lambda meta: (cdiv(count, meta["TILE"]),),
            *queries.side(), *references.side(), references.boxes, references.spans, references.keys,
            references.frame, points, found, distances,
            counts, radii, count, k, size_class(count), first, wanted, 1 << (wanted - 1).bit_length(), bits,
            clouds.count != 1, mode,
        )  # fmt: skip


def radii_mode(radii: Tensor) -> int:
    """Whether there is one radius for all queries, or one for each."""
    return TO_OWN_RADII.value if radii.shape[0] > 1 else TO_ONE_RADIUS.value


@triton.jit
def neighboring(x, step):
    """The number after (1) or before (-1) a finite one that is not negative; that before 0 is 0."""
    Bits: tl.constexpr = tl.int64 if x.dtype == tl.float64 else tl.int32
    return tl.maximum(x.to(Bits, bitcast=True) + step, 0).to(x.dtype, bitcast=True)


@triton.jit
def largest_square_within(radius):
    """The largest numbers whose roots are at most the radii, as :mod:`pointproj.ops.pairs` finds them."""
    limit = square(radius)
    for _ in tl.static_range(2):
        limit = tl.where(rounded_root(limit) > radius, neighboring(limit, -1), limit)
    for _ in tl.static_range(3):
        limit = tl.where(rounded_root(neighboring(limit, 1)) <= radius, neighboring(limit, 1), limit)
    return tl.where(radius >= 0, limit, -1.0)


@triton.jit
def visit_leaf(
    leaf, best, best_rows, within, x, y, z, cloud, active, limit, done, done_row, side,
    CONTINUES: tl.constexpr, BATCHED: tl.constexpr, RADII: tl.constexpr,
):  # fmt: skip
    """Consider the points of a leaf for all queries of the tile; ``within`` counts those within the limit."""
    points, row_of, cloud_of, padded = side
    at = leaf * LEAF + tl.arange(0, LEAF)
    px, py, pz = load_points(points, padded, at)
    squared = squared_length(x[None, :] - px[:, None], y[None, :] - py[:, None], z[None, :] - pz[:, None])
    rows = tl.broadcast_to(tl.load(row_of + at)[:, None], squared.shape)
    possible = active[None, :] & (squared < float("inf"))
    if BATCHED:
        possible &= tl.load(cloud_of + at)[:, None] == cloud[None, :]
    if RADII != EVERYWHERE:
        possible &= squared <= limit[None, :]
        within += tl.sum(possible.to(tl.int32), 0)
    if CONTINUES:  # only beyond what earlier searches found
        possible &= precedes(done[None, :], done_row[None, :], squared, rows)
    best, best_rows = insert(tl.where(possible, squared, float("inf")), rows, best, best_rows)
    return best, best_rows, within


@triton.jit
def search_bound(best, active, farthest, COUNTS: tl.constexpr):
    """The squared distance from which on a tile looks for nothing."""
    if COUNTS:
        return farthest
    return tl.minimum(tl.max(tl.where(active, tl.max(best, 0), -float("inf"))), farthest)


@triton.jit
def leaf_on_curve(keys, leaves, box, frame, BITS: tl.constexpr, BATCHED: tl.constexpr):
    """The leaf in whose part of the curve the middle of a tile's box lies."""
    KEY: tl.constexpr = keys.dtype.element_ty
    x0, x1, y0, y1, z0, z1, c0, _ = box
    key = key_of(
        (x0 + x1) * 0.5, (y0 + y1) * 0.5, (z0 + z1) * 0.5,
        tl.load(frame), tl.load(frame + 1), tl.load(frame + 2),
        tl.load(frame + 3), tl.load(frame + 4), tl.load(frame + 5), BITS, KEY,
    )  # fmt: skip
    if BATCHED:
        key |= (c0.to(KEY) & (2 ** (KEY.primitive_bitwidth - 1 - 3 * BITS) - 1)) << (3 * BITS)
    # All leaves of the reference points have one sign: without it their keys ascend as well.
    low = tl.full([], 0, tl.int32)
    high = low + leaves
    while high - low > 1:
        middle = (low + high) // 2
        begins_before = (tl.load(keys + middle) & (2 ** (KEY.primitive_bitwidth - 1) - 1)) <= key
        low = tl.where(begins_before, middle, low)
        high = tl.where(begins_before, high, middle)
    return low


CONFIGS = [triton.Config({"TILE": tile}, num_warps=1) for tile in (4, 8, 16, 32)]


@tuned(CONFIGS, key=["K", "BATCHED", "RADII", "scale"])
@triton.jit
def search_kernel(
    queries, query_rows, query_clouds, queries_padded,
    points, row_of, cloud_of, padded, boxes, spans, keys, frame, points_as_given,
    found, distances, counts, radii, query_count, k, scale,
    FIRST: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr, BITS: tl.constexpr,
    BATCHED: tl.constexpr, RADII: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A tile of queries visits leaf after leaf, near ones first, until the boxes are too far away."""
    real: tl.constexpr = points.dtype.element_ty
    side = (points, row_of, cloud_of, padded)
    own = (queries, query_rows, query_clouds, queries_padded)
    at, x, y, z, cloud, active = load_tile(own, query_count, tl.program_id(0), TILE, BATCHED)
    exists = at < query_count
    query = tl.load(query_rows + at, mask=exists, other=0).to(tl.int64)
    box = tile_box(x, y, z, cloud, active)

    missing = tl.where(active, float("inf"), float("nan")).to(real)
    # What earlier searches found ends at this distance and row.
    done = tl.full([TILE], -float("inf"), real)
    done_row = tl.full([TILE], -1, tl.int32)
    if FIRST > 0:
        done_row = tl.load(found + query * k + FIRST - 1, mask=active, other=-1).to(tl.int32)
        active = done_row >= 0
        # Not masked by what is active: Triton 3.6 does not compile that for fp64 and some tiles.
        last_x, last_y, last_z = load_rows_of_3(points_as_given, tl.maximum(done_row, 0), exists, 0.0)
        done = squared_length(x - last_x, y - last_y, z - last_z)

    COUNTS: tl.constexpr = RADII != EVERYWHERE and FIRST == 0  # then nothing within the radii is passed by
    limit = tl.full([TILE], float("inf"), real)
    farthest = tl.full([], float("inf"), real)
    if RADII != EVERYWHERE:
        limit = largest_square_within(tl.load(radii + query * (RADII - 1), mask=active, other=-1.0))
        farthest = tl.max(limit)
    within = tl.zeros([TILE], tl.int32)
    best, best_rows = empty_lists(real, K, SLOTS, TILE)
    leaves = tl.cast(padded // LEAF, tl.int32)  # sizes may come as 64 bits
    groups = leaves // FANOUT
    stride = leaves + groups
    node = tl.arange(0, FANOUT)
    # Where the tile lies on the curve are near neighbours, though not always the nearest: begin with those.
    here = leaf_on_curve(keys, leaves, box, frame, BITS, BATCHED)
    here_begin = tl.maximum(here - 1, 0)
    here_end = tl.minimum(here + 2, leaves)
    for leaf_here in range(here_begin, here_end):
        best, best_rows, within = visit_leaf(
            leaf_here, best, best_rows, within, x, y, z, cloud, active, limit, done, done_row, side,
            FIRST > 0, BATCHED, RADII,
        )  # fmt: skip
    bound = search_bound(best, active, farthest, COUNTS)
    for begin in range(0, groups, FANOUT):
        group = begin + node
        group_squares = box_squares(boxes, spans, stride, leaves + group, group < groups, box, BATCHED)
        near_group = tl.min(group_squares)
        while (near_group <= bound) & (near_group < float("inf")):
            chosen = tl.min(tl.where(group_squares == near_group, group, END))
            group_squares = tl.where(group == chosen, float("inf"), group_squares)
            near_group = tl.min(group_squares)
            leaf = chosen * FANOUT + node
            leaf_squares = box_squares(boxes, spans, stride, leaf, node >= 0, box, BATCHED)
            leaf_squares = tl.where((leaf < here_begin) | (leaf >= here_end), leaf_squares, float("inf"))
            near_leaf = tl.min(leaf_squares)
            while (near_leaf <= bound) & (near_leaf < float("inf")):
                chosen_leaf = tl.min(tl.where(leaf_squares == near_leaf, leaf, END))
                leaf_squares = tl.where(leaf == chosen_leaf, float("inf"), leaf_squares)
                near_leaf = tl.min(leaf_squares)
                best, best_rows, within = visit_leaf(
                    chosen_leaf, best, best_rows, within, x, y, z, cloud, active, limit, done, done_row, side,
                    FIRST > 0, BATCHED, RADII,
                )  # fmt: skip
                bound = search_bound(best, active, farthest, COUNTS)
    if COUNTS:
        tl.store(counts + query, within, mask=exists)
    store_lists(best, best_rows, found, distances, missing, query, k, active, exists, FIRST, K, SLOTS, TILE)


_search = tree_op(
    "pointproj::triton_search",
    search,
    _by_torch,
    lambda clouds, index_dtype, k: (
        ((clouds.query_points.shape[0], k), clouds.query_points.dtype),
        ((clouds.query_points.shape[0], k), index_dtype),
    ),
)
count_search("triton_search")
