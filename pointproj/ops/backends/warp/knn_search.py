"""The k nearest reference points, exactly, ties by the lower index: a thread for each query."""

from typing import Any

import torch
import warp as wp
from torch import Tensor

from pointproj.ops.backends.warp import common
from pointproj.ops.backends.warp.cell_list import NO_TABLES, CellList, may_be_graded, readable
from pointproj.ops.backends.warp.cell_list_build import new_cell_list
from pointproj.ops.backends.warp.common import OPTIONS, REALS, Batch, Points, once, struct_of
from pointproj.ops.backends.warp.lanes import lanes
from pointproj.ops.backends.warp.top_k import LONGEST_LIST, Found, top_k
from pointproj.ops.backends.warp.traversal import Ball, Visitor, ball_search, shell_search
from pointproj.ops.bridge.flops import count_search
from pointproj.ops.bridge.warp_op import Launch, warp_op
from pointproj.ops.specification.clouds import Clouds
from pointproj.ops.specification.records import Tables, fields_apart

BLOCK = 128
# For many queries with short lists a multiprocessor runs more blocks, although this spills some registers:
# self-kNN of 10^6 uniform points takes 0.67 ms with 8 blocks, and 0.80 ms with 4.
SHORT_LIST = 8
MANY_QUERIES = 2**18


def nearest(
    clouds: Clouds,
    tables: Tables | None,
    k: int,
    index_dtype: torch.dtype,
    max_radius: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Distances and packed rows of the k nearest, as :meth:`pointproj.ops.registry.Backend.nearest`."""
    rows, distances = _search(*clouds, *(tables or NO_TABLES), k, index_dtype == torch.int64)
    return distances, rows


def _specs(query_points: Tensor, k: int, long_rows: bool, **_: Any) -> dict:
    shape = query_points.shape[0], k
    rows = shape, torch.int64 if long_rows else torch.int32
    return {"rows": rows, "distances": (shape, query_points.dtype)}


@warp_op("pointproj::warp_search", outputs=_specs)
@fields_apart
def _search(
    launch: Launch,
    clouds: Clouds,
    cells: CellList,
    k: int,
    long_rows: bool,
    *,
    rows: Tensor,
    distances: Tensor,
) -> None:
    launch_search(launch, *sets_of(clouds), cells, Found(rows, distances))


count_search("warp_search", _search.parameters, "k")


def launch_search(launch: Launch, queries: Points, references: Points, cells: CellList, found: Found) -> None:
    """Fill ``found``; without tables this builds them, to save a call of an operator."""
    cells = new_cell_list(launch, references) if cells.frames is None else readable(cells)
    own = in_order_of(cells, queries, references)
    blocks = 8 if queries.batch.rows > MANY_QUERIES else 4
    compiled = search_kernel(CellList, queries.positions.dtype, *list_of(found), blocks, may_be_graded(cells))
    launch(compiled, queries.batch.rows, own, cells, found, block_dim=BLOCK)


def list_of(found: Found) -> tuple[int | None, torch.dtype]:
    """The length of the lists, None if they are in memory, and the dtype of their rows."""
    k = found.rows.shape[1]
    return k if k <= LONGEST_LIST[found.rows.device.type] else None, found.rows.dtype


def sets_of(clouds: Clouds) -> tuple[Points, Points]:
    """Queries and references as kernels take them."""
    query_points, query_offsets, reference_points, reference_offsets, count = clouds
    return (
        Points(query_points, Batch(query_offsets, query_points.shape[0], count)),
        Points(reference_points, Batch(reference_offsets, reference_points.shape[0], count)),
    )


def in_order_of(cells: CellList, queries: Points, references: Points) -> Points:
    """The queries; in the order of the cells, if they are the points of the cell list.

    Adjacent threads then read the same points.
    """
    one, other = queries.positions, references.positions
    itself = one.data_ptr() == other.data_ptr() and len(one) == len(other)
    return queries._replace(ordered=cells.points) if itself else queries


@once
def search_kernel(
    where: type[CellList | Ball],
    dtype: torch.dtype,
    k: int | None,
    indices: torch.dtype,
    blocks: int,
    graded: bool,
) -> wp.Kernel:
    """The search, everywhere or in a ball, whose points it also counts. If k is None, lists are in memory."""
    real, vec3, vec4 = REALS[dtype]
    WhereStruct, FoundStruct = struct_of(where, dtype), struct_of(Found, dtype, indices)
    PointsStruct = struct_of(Points, dtype)
    ListState, begin, farthest, insert, finish = top_k(dtype, k, indices)
    within = where is Ball

    @wp.struct
    class State:
        list: ListState
        count: int  # of the points within a radius

    @wp.func
    def limit(state: State, found: FoundStruct):
        return farthest(state.list, found)

    @wp.func
    def visit(state: State, found: FoundStruct, q: vec3, point: vec4, squared: real, exists: bool):
        if wp.static(within):
            if exists:
                state.count += 1
            else:
                squared = real(wp.inf)
        if squared <= limit(state, found) and squared < real(wp.inf):
            state.list = insert(state.list, found, squared, common.row_of(point))
        return state

    longest = max(LONGEST_LIST.values())
    visitor = Visitor(State, FoundStruct, visit, None, None if within else limit, k or longest)
    search = (ball_search if within else shell_search)(dtype, lanes(1), visitor, graded)
    short = dtype == torch.float32 and k is not None and k <= SHORT_LIST
    options = {**OPTIONS, "module_options": {**OPTIONS["module_options"], "max_unroll": longest}}

    @wp.kernel(**options, launch_bounds=(BLOCK, blocks if short else 1))
    def search_nearest(queries: PointsStruct, where: WhereStruct, found: FoundStruct):
        """Launched over the queries; fills ``found``."""
        query, q = common.take(queries, wp.tid())
        state = State(begin(query, found), 0)
        state = search(state, query, q, common.cloud_of(query, queries.batch), where, found)
        finish(state.list, query, found, wp.where(wp.isfinite(q), real(wp.inf), real(wp.nan)))
        if wp.static(within):
            found.counts[query] = wp.int64(state.count)

    return search_nearest
