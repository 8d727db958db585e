"""Lists of the points within a radius: the nearest of each query, or all, which has lists of any length.

The nearest are found as for kNN, with radii. For all of them, a first launch counts, so that it is known
where each list begins; a second one writes them there in the order of the tree. Each is then put where
it belongs in its list, which is as many places from the beginning as there are lower rows in it. Every place
is written by one program alone: lists are the same, bit for bit, in every run.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pointproj.ops.backends import torch as plain
from pointproj.ops.backends.triton.flops import count_list, count_search
from pointproj.ops.backends.triton.knn_search import find, largest_square_within, radii_mode
from pointproj.ops.backends.triton.launch import launch
from pointproj.ops.backends.triton.over_trees import tree_op
from pointproj.ops.backends.triton.tiles import (
    cdiv,
    is_finite,
    load_rows_of_3,
    rounded_root,
    squared_length,
    tile_box,
)
from pointproj.ops.backends.triton.traversal import (
    AT_LEAVES,
    FANOUT,
    GROUPS,
    LEAF,
    LEAVES,
    LISTS,
    N_GROUPS,
    N_LEAVES,
    list_groups,
    list_leaves,
)
from pointproj.ops.backends.triton.tree import Tree
from pointproj.ops.clouds import Clouds
from pointproj.ops.pairs import radii_of
from pointproj.ops.registry import Tables

LAUNCH = {"TILE": 16, "STEP": 64, "num_warps": 2}  # queries, and points that they meet at a time
MOST_PROGRAMS = 2048  # each takes tile after tile
SORT = {
    "BLOCK": 64,
    "STEP": 64,
    "num_warps": 2,
}  # neighbours, and others that they are compared with at a time
FARTHEST_KEY = tl.constexpr(2**63 - 1)


def radius_search(
    clouds: Clouds, tables: Tables | None, radius: float | Tensor, k: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Distances and packed rows ``(Q, k)``, nearest first, and counts ``(Q,)``."""
    radii = radii_of(radius, clouds.query_points)
    return _search(clouds, tables, radii, k)


def radius_list(
    clouds: Clouds, tables: Tables | None, radius: float | Tensor, capacity: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Where lists begin ``(Q + 1,)``, the packed rows in them, and their distances ``(capacity,)``."""
    radii = radii_of(radius, clouds.query_points)
    return _list(clouds, tables, radii, capacity)


def _nearest_by_kernels(
    clouds: Clouds, queries: Tree, references: Tree, radii: Tensor, k: int
) -> tuple[Tensor, Tensor, Tensor]:
    distances = clouds.query_points.new_empty(clouds.query_points.shape[0], k)
    found = torch.empty_like(distances, dtype=torch.int64)
    counts = found.new_empty(found.shape[0])
    find(clouds, queries, references, found, distances, (radii, counts))
    return distances, found, counts


def _nearest_by_torch(clouds: Clouds, radii: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    return plain.radius_search(clouds, None, radii, k)


def _list_by_kernels(
    clouds: Clouds, queries: Tree, references: Tree, radii: Tensor, capacity: int
) -> tuple[Tensor, Tensor, Tensor]:
    count = clouds.query_points.shape[0]
    counts = queries.rows.new_zeros(count + 1)
    _visit(clouds, queries, references, radii, counts)
    row_splits = counts.cumsum(0, dtype=torch.int64)
    # The list that the capacity cuts is whole as long as it is not sorted.
    unsorted = row_splits.new_empty(capacity + clouds.reference_points.shape[0])
    _visit(clouds, queries, references, radii, unsorted, row_splits)
    rows, distances = row_splits.new_empty(capacity), clouds.query_points.new_empty(capacity)
    launch(
        sort_kernel, (cdiv(unsorted.shape[0], SORT["BLOCK"]),),
        unsorted, row_splits, clouds.query_points, clouds.reference_points, rows, distances,
        count, capacity, unsorted.shape[0], **SORT,
    )  # fmt: skip
    return row_splits, rows, distances


def _list_by_torch(clouds: Clouds, radii: Tensor, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    return plain.radius_list(clouds, None, radii, capacity)


def _visit(
    clouds: Clouds,
    queries: Tree,
    references: Tree,
    radii: Tensor,
    made: Tensor,
    row_splits: Tensor | None = None,
) -> None:
    """Count the neighbours of query i into ``made[i + 1]``, or list them there from ``row_splits[i]`` on."""
    count = clouds.query_points.shape[0]
    tiles = cdiv(count, LAUNCH["TILE"]) if isinstance(count, int) else MOST_PROGRAMS
    programs = min(tiles, MOST_PROGRAMS)
    lists = queries.rows.new_empty(programs, LISTS.value)
    begins = queries.rows if row_splits is None else row_splits  # kernels take a tensor
    launch(
        list_kernel, (programs,),
        *queries.side(), count, *references.side(), references.boxes, references.spans,
        radii, begins, made, made.shape[0], lists,
        row_splits is not None, clouds.count != 1, radii_mode(radii), **LAUNCH,
    )  # fmt: skip


@triton.jit
def list_kernel(
    own, own_rows, own_clouds, own_padded, own_count,
    points, row_of, clouds, padded, boxes, spans,
    radii, row_splits, made, room, lists_of_all,
    FILLS: tl.constexpr, BATCHED: tl.constexpr, RADII: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Count the points near queries, or write (query, row) of each, in the order of the tree."""
    lists = lists_of_all + LISTS * tl.program_id(0).to(tl.int64)
    leaves = tl.cast(padded // LEAF, tl.int32)  # sizes may come as 64 bits
    groups = leaves // FANOUT
    lane = tl.arange(0, STEP)
    for tile in range(tl.program_id(0), tl.cast(tl.cdiv(own_count, TILE), tl.int32), tl.num_programs(0)):
        own_at = tile * TILE + tl.arange(0, TILE)  # all loads are here, for a tracer: see the traversal
        x, y = tl.load(own + own_at), tl.load(own + own_padded + own_at)
        z = tl.load(own + 2 * own_padded + own_at)
        cloud = tl.zeros_like(own_at)
        if BATCHED:
            cloud = tl.load(own_clouds + own_at)
        exists = own_at < own_count
        active = exists & is_finite(x, y, z)
        query = tl.load(own_rows + own_at, mask=exists, other=0).to(tl.int64)
        box = tile_box(x, y, z, cloud, active)
        limit = largest_square_within(tl.load(radii + query * (RADII - 1), mask=active, other=-1.0))
        farthest = tl.max(limit)
        begin = tl.zeros([TILE], tl.int64)
        if FILLS:
            begin = tl.load(row_splits + query, mask=exists, other=0)
        found = tl.zeros([TILE], tl.int32)
        for first in range(0, groups, GROUPS):
            list_groups(lists, first, boxes, spans, leaves, box, farthest, BATCHED)
            for group in range(0, tl.load(lists + N_GROUPS), LEAVES // FANOUT):
                list_leaves(lists, group, boxes, spans, leaves, box, farthest, BATCHED)
                of_leaves = tl.load(lists + N_LEAVES)
                for leaf in range(0, of_leaves, STEP // LEAF):
                    place = leaf + lane // LEAF
                    near = place < of_leaves
                    at = tl.load(lists + AT_LEAVES + place, mask=near, other=0) * LEAF + lane % LEAF
                    px = tl.load(points + at, mask=near, other=float("inf"))
                    py = tl.load(points + padded + at, mask=near, other=float("inf"))
                    pz = tl.load(points + 2 * padded + at, mask=near, other=float("inf"))
                    squared = squared_length(
                        x[:, None] - px[None, :], y[:, None] - py[None, :], z[:, None] - pz[None, :]
                    )
                    hit = active[:, None] & (squared <= limit[:, None]) & (squared < float("inf"))
                    if BATCHED:
                        hit &= cloud[:, None] == tl.load(clouds + at, mask=near, other=-1)[None, :]
                    if FILLS:
                        row = tl.load(row_of + at, mask=near, other=0).to(tl.int64)
                        slot = begin[:, None] + (found[:, None] + tl.cumsum(hit.to(tl.int32), 1) - 1)
                        key = (query << 32)[:, None] | row[None, :]
                        tl.store(made + slot, key, mask=hit & (slot < room))
                    found += tl.sum(hit.to(tl.int32), 1)
        if not FILLS:
            tl.store(made + 1 + query, found, mask=exists)


@triton.jit
def sort_kernel(
    unsorted, row_splits, query_points, points, listed, distances, queries, capacity, room,
    BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Put some neighbours where they belong in the lists of their queries; -1 where there are no more."""
    total = tl.load(row_splits + queries)
    count = tl.minimum(total, room)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_left = (at >= total) & (at < capacity)
    tl.store(listed + at, tl.full([BLOCK], -1, tl.int64), mask=is_left)
    tl.store(distances + at, tl.full([BLOCK], float("inf"), distances.dtype.element_ty), mask=is_left)
    exists = at < count
    key = tl.load(unsorted + at, mask=exists, other=FARTHEST_KEY)
    first = tl.min(key) >> 32
    last = tl.max(tl.where(exists, key, 0)) >> 32
    if tl.min(at) < count:
        begin = tl.load(row_splits + first)
        end = tl.minimum(tl.load(row_splits + last + 1), count)
        place = begin + tl.zeros([BLOCK], tl.int64)
        for other_at in range(begin, end, STEP):
            other_at = other_at + tl.arange(0, STEP)
            other = tl.load(unsorted + other_at, mask=other_at < end, other=FARTHEST_KEY)
            place += tl.sum((other[None, :] < key[:, None]).to(tl.int32), 1)
        row = key & 0xFFFFFFFF
        exists &= place < capacity
        x, y, z = load_rows_of_3(query_points, key >> 32, exists, 0.0)
        px, py, pz = load_rows_of_3(points, row, exists, 0.0)
        tl.store(listed + place, row, mask=exists)
        tl.store(distances + place, rounded_root(squared_length(x - px, y - py, z - pz)), mask=exists)


_search = tree_op(
    "pointproj::triton_radius_search",
    _nearest_by_kernels,
    _nearest_by_torch,
    lambda clouds, radii, k: (
        ((clouds.query_points.shape[0], k), clouds.query_points.dtype),
        ((clouds.query_points.shape[0], k), torch.int64),
        ((clouds.query_points.shape[0],), torch.int64),
    ),
)
count_search("triton_radius_search")
_list = tree_op(
    "pointproj::triton_radius_list",
    _list_by_kernels,
    _list_by_torch,
    lambda clouds, radii, capacity: (
        ((clouds.query_points.shape[0] + 1,), torch.int64),
        ((capacity,), torch.int64),
        ((capacity,), clouds.query_points.dtype),
    ),
)
count_list("triton_radius_list")
