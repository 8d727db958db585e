"""The k nearest reference points, exactly, ties by the lower index."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from pointproj.ops.backends import torch as plain
from pointproj.ops.backends.triton.flops import count_search
from pointproj.ops.backends.triton.operators import kernel_op, runs_kernels
from pointproj.ops.backends.triton.tiles import (
    END,
    FANOUT,
    LEAF,
    box_squares,
    is_finite,
    load_points,
    size_class,
    squared_length,
    tile_box,
    tuned,
)
from pointproj.ops.backends.triton.tree import Tree, key_bits, key_of
from pointproj.ops.registry import Clouds

LARGEST_LIST = 32  # neighbours found in one search; more take several, each beyond the last


def search(clouds: Clouds, queries: Tree, references: Tree | tuple, k: int) -> Tensor:
    """Packed rows of the k nearest, ``(Q, k)`` int32, nearest first, -1 where there are fewer."""
    return _search(*clouds, list(queries), list(references), k)


def _body(
    query_points: Tensor,
    query_offsets: Tensor | None,
    reference_points: Tensor,
    reference_offsets: Tensor | None,
    clouds: int,
    query_tree: list[Tensor],
    reference_tree: list[Tensor],
    k: int,
) -> tuple[Tensor]:
    if not runs_kernels(query_points):
        of_clouds = Clouds(query_points, query_offsets, reference_points, reference_offsets, clouds)
        return (plain.search(of_clouds, (), k).to(torch.int32),)
    queries, references = Tree(*query_tree), Tree(*reference_tree)
    count = query_points.shape[0]
    found = query_points.new_empty(count, k, dtype=torch.int32)
    bits = key_bits(references.keys.dtype, clouds)
    for first in range(0, k, LARGEST_LIST):
        wanted = min(k - first, LARGEST_LIST)
        wrap_triton(search_kernel)[lambda meta: (triton.cdiv(count, meta["TILE"]),)](
            queries.points, queries.rows, queries.clouds, queries.rows.shape[0],
            references.points, references.rows, references.clouds, references.rows.shape[0],
            references.boxes, references.spans, references.keys, references.frame, reference_points,
            found, count, k, size_class(count),
            first, wanted, triton.next_power_of_2(wanted), bits, clouds != 1, LEAF, FANOUT,
        )  # fmt: skip
    return (found,)


@triton.jit
def insert(squared, rows, best, best_rows):
    """Let candidates (LEAF, TILE) take the places of the farthest in the lists (K, TILE)."""
    worst = tl.max(best, 0)
    worst_row = tl.max(tl.where(best == worst[None, :], best_rows, -1), 0)
    closer = (squared < worst[None, :]) | ((squared == worst[None, :]) & (rows < worst_row[None, :]))
    squared = tl.where(closer, squared, float("inf"))
    while tl.min(squared) < float("inf"):
        nearest = tl.min(squared, 0)
        nearest_row = tl.min(tl.where(squared == nearest[None, :], rows, END), 0)
        gives_way = (
            (best == worst[None, :]) & (best_rows == worst_row[None, :]) & (nearest < float("inf"))[None, :]
        )
        best = tl.where(gives_way, nearest[None, :], best)
        best_rows = tl.where(gives_way, nearest_row[None, :], best_rows)
        worst = tl.max(best, 0)
        worst_row = tl.max(tl.where(best == worst[None, :], best_rows, -1), 0)
        closer = (squared < worst[None, :]) | ((squared == worst[None, :]) & (rows < worst_row[None, :]))
        closer &= (squared != nearest[None, :]) | (rows != nearest_row[None, :])
        squared = tl.where(closer, squared, float("inf"))
    return best, best_rows


@triton.jit
def meet(
    leaf, best, best_rows, x, y, z, cloud, active, done, done_row,
    points, row_of, cloud_of, padded, LATER: tl.constexpr, MANY: tl.constexpr, LEAF: tl.constexpr,
):  # fmt: skip
    """Consider the points of a leaf for all queries of the tile."""
    at = leaf * LEAF + tl.arange(0, LEAF)
    px, py, pz = load_points(points, padded, at)
    squared = squared_length(x[None, :] - px[:, None], y[None, :] - py[:, None], z[None, :] - pz[:, None])
    rows = tl.broadcast_to(tl.load(row_of + at)[:, None], squared.shape)
    possible = active[None, :] & (squared < float("inf"))
    if LATER:  # only beyond what earlier searches found
        possible &= (squared > done[None, :]) | ((squared == done[None, :]) & (rows > done_row[None, :]))
    if MANY:
        possible &= tl.load(cloud_of + at)[:, None] == cloud[None, :]
    return insert(tl.where(possible, squared, float("inf")), rows, best, best_rows)


@triton.jit
def home_leaf(keys, leaves, box, frame, BITS: tl.constexpr, MANY: tl.constexpr):
    """The leaf in whose part of the curve the middle of a tile's box lies."""
    KEY: tl.constexpr = keys.dtype.element_ty
    x0, x1, y0, y1, z0, z1, c0, _ = box
    key = key_of(
        (x0 + x1) * 0.5, (y0 + y1) * 0.5, (z0 + z1) * 0.5,
        tl.load(frame), tl.load(frame + 1), tl.load(frame + 2),
        tl.load(frame + 3), tl.load(frame + 4), tl.load(frame + 5), BITS, KEY,
    )  # fmt: skip
    if MANY:
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


@triton.jit
def empty_lists(real: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr, TILE: tl.constexpr):
    """K places that anything may take, rows apart so that each newcomer takes one; the rest are taken."""
    slot = tl.broadcast_to(tl.arange(0, SLOTS)[:, None], [SLOTS, TILE])
    best = tl.where(slot < K, float("inf"), -float("inf")).to(real)
    return best, tl.where(slot < K, END - slot, -1)


CONFIGS = [
    triton.Config({"TILE": tile}, num_warps=warps) for tile, warps in ((4, 1), (8, 1), (16, 1), (32, 1))
]


@tuned(CONFIGS, key=["K", "MANY", "scale"])
@triton.jit
def search_kernel(
    queries, query_rows, query_clouds, queries_padded,
    points, row_of, cloud_of, padded, boxes, spans, keys, frame, points_as_given,
    found, query_count, k, scale,
    FIRST: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr, BITS: tl.constexpr,
    MANY: tl.constexpr, LEAF: tl.constexpr, FANOUT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A tile of queries meets leaf after leaf, near ones first, until the boxes are too far away."""
    real: tl.constexpr = points.dtype.element_ty
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    exists = at < query_count
    x, y, z = load_points(queries, queries_padded, at)
    query = tl.load(query_rows + at, mask=exists, other=0).to(tl.int64)
    active = exists & is_finite(x, y, z)
    cloud = tl.zeros_like(at)
    if MANY:
        cloud = tl.load(query_clouds + at, mask=exists, other=0)
    box = tile_box(x, y, z, cloud, active)

    # What earlier searches found ends at this distance and row.
    done = tl.full([TILE], -float("inf"), real)
    done_row = tl.full([TILE], -1, tl.int32)
    if FIRST > 0:
        done_row = tl.load(found + query * k + FIRST - 1, mask=active, other=-1)
        active &= done_row >= 0
        last = points_as_given + 3 * done_row.to(tl.int64)
        done = squared_length(
            x - tl.load(last, mask=active, other=0.0),
            y - tl.load(last + 1, mask=active, other=0.0),
            z - tl.load(last + 2, mask=active, other=0.0),
        )

    best, best_rows = empty_lists(real, K, SLOTS, TILE)
    leaves = tl.cast(padded // LEAF, tl.int32)  # sizes may come as 64 bits
    groups = leaves // FANOUT
    stride = leaves + groups
    node = tl.arange(0, FANOUT)
    # Where the tile lies on the curve are near neighbours, though not always the nearest: begin with those.
    home = home_leaf(keys, leaves, box, frame, BITS, MANY)
    home_begin = tl.maximum(home - 1, 0)
    home_end = tl.minimum(home + 2, leaves)
    for leaf_of_home in range(home_begin, home_end):
        best, best_rows = meet(
            leaf_of_home, best, best_rows, x, y, z, cloud, active, done, done_row,
            points, row_of, cloud_of, padded, FIRST > 0, MANY, LEAF,
        )  # fmt: skip
    bound = tl.max(tl.where(active, tl.max(best, 0), -float("inf")))
    for begin in range(0, groups, FANOUT):
        group = begin + node
        group_squares = box_squares(boxes, spans, stride, leaves + group, group < groups, box, MANY)
        near_group = tl.min(group_squares)
        while (near_group <= bound) & (near_group < float("inf")):
            chosen = tl.min(tl.where(group_squares == near_group, group, END))
            group_squares = tl.where(group == chosen, float("inf"), group_squares)
            near_group = tl.min(group_squares)
            leaf = chosen * FANOUT + node
            leaf_squares = box_squares(boxes, spans, stride, leaf, node >= 0, box, MANY)
            leaf_squares = tl.where((leaf < home_begin) | (leaf >= home_end), leaf_squares, float("inf"))
            near_leaf = tl.min(leaf_squares)
            while (near_leaf <= bound) & (near_leaf < float("inf")):
                chosen_leaf = tl.min(tl.where(leaf_squares == near_leaf, leaf, END))
                leaf_squares = tl.where(leaf == chosen_leaf, float("inf"), leaf_squares)
                near_leaf = tl.min(leaf_squares)
                best, best_rows = meet(
                    chosen_leaf, best, best_rows, x, y, z, cloud, active, done, done_row,
                    points, row_of, cloud_of, padded, FIRST > 0, MANY, LEAF,
                )  # fmt: skip
                bound = tl.max(tl.where(active, tl.max(best, 0), -float("inf")))

    slot = tl.broadcast_to(tl.arange(0, SLOTS)[:, None], [SLOTS, TILE])
    best = tl.where(slot < K, best, float("inf"))
    for place in range(K):
        nearest = tl.min(best, 0)
        row = tl.min(tl.where(best == nearest[None, :], best_rows, END), 0)
        best = tl.where((best == nearest[None, :]) & (best_rows == row[None, :]), float("inf"), best)
        there = active & (nearest < float("inf"))
        tl.store(found + query * k + FIRST + place, tl.where(there, row, -1), mask=exists)


_search = kernel_op(
    "pointproj::triton_search",
    _body,
    lambda query_points, qo, reference_points, ro, clouds, query_tree, reference_tree, k: (
        ((query_points.shape[0], k), torch.int32),
    ),
)
count_search("triton_search")
