"""The k nearest reference points, exactly, ties by the lower index: a thread for each query."""

from typing import Any

import torch
import warp as wp
from torch import Tensor

from pointproj.ops.backends.warp.cell_list import CellList, cell_list_of, cell_list_struct
from pointproj.ops.backends.warp.cell_list_build import new_cell_list
from pointproj.ops.backends.warp.common import (
    OPTIONS,
    REALS,
    Batch,
    Points,
    cloud_of,
    once,
    packed_point,
    points_of,
)
from pointproj.ops.backends.warp.lanes import lanes
from pointproj.ops.backends.warp.top_k import LONGEST_LIST, Found, found_struct, top_k
from pointproj.ops.backends.warp.traversal import Visitor, shell_search
from pointproj.ops.bridge.warp_op import Launch, warp_op
from pointproj.ops.clouds import Clouds
from pointproj.ops.registry import Tables

BLOCK = 128
# Of many queries with short lists a multiprocessor holds more blocks, though some registers are spilled then:
# self-kNN of 10^6 uniform points takes 0.67 ms with 8 blocks, 0.80 with 4.
SHORT_LIST = 8
MANY_QUERIES = 2**18


def search(clouds: Clouds, tables: Tables | None, k: int) -> Tensor:
    """Packed rows of the k nearest, ``(Q, k)`` int32, nearest first, -1 where there are fewer."""
    return _search(*clouds, list(tables or ()), k, False)[0]


def nearest(clouds: Clouds, tables: Tables | None, k: int, index_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Their distances and rows, as :meth:`pointproj.ops.registry.Backend.nearest`."""
    rows, distances = _search(*clouds, list(tables or ()), k, index_dtype == torch.int64)
    return distances, rows


def _specs(query_points: Tensor, k: int, long_rows: bool, **_: Any) -> dict:
    shape = query_points.shape[0], k
    rows = shape, torch.int64 if long_rows else torch.int32
    return {"rows": rows, "distances": (shape, query_points.dtype)}


@warp_op("pointproj::warp_search", outputs=_specs)
def _search(
    launch: Launch,
    query_points: Tensor,
    query_offsets: Tensor | None,
    reference_points: Tensor,
    reference_offsets: Tensor | None,
    clouds: int,
    tables: list[Tensor],
    k: int,
    long_rows: bool,
    *,
    rows: Tensor,
    distances: Tensor,
) -> None:
    sets = sets_of(Clouds(query_points, query_offsets, reference_points, reference_offsets, clouds))
    launch_search(launch, *sets, tables, Found(rows, distances))


def launch_search(
    launch: Launch, queries: Points, references: Points, tables: list[Tensor], found: Found
) -> None:
    """Fill ``found``. Without tables it builds its own: that spares the call of another operator."""
    cells = cell_list_of(tables) if tables else new_cell_list(launch, references, for_radius=False)
    k = found.rows.shape[1]
    own = in_order_of(cells, queries, references)
    in_list = k if k <= LONGEST_LIST else None
    blocks = 8 if queries.batch.rows > MANY_QUERIES else 4
    compiled = search_kernel(queries.positions.dtype, in_list, found.rows.dtype, blocks)
    launch(compiled, queries.batch.rows, own, cells, found, block_dim=BLOCK)


def sets_of(clouds: Clouds) -> tuple[Points, Points]:
    """Queries and references as kernels take them."""
    query_points, query_offsets, reference_points, reference_offsets, count = clouds
    return (
        Points(query_points, Batch(query_offsets, query_points.shape[0], count)),
        Points(reference_points, Batch(reference_offsets, reference_points.shape[0], count)),
    )


def in_order_of(cells: CellList, queries: Points, references: Points) -> Points:
    """The queries, in the order of the cells where they are the points of the cell list.

    Threads side by side then share what they read.
    """
    one, other = queries.positions, references.positions
    itself = one.data_ptr() == other.data_ptr() and len(one) == len(other)
    return queries._replace(ordered=cells.points) if itself else queries


@once
def search_kernel(dtype: torch.dtype, k: int | None, indices: torch.dtype, blocks: int) -> wp.Kernel:
    """The search. With k None the neighbours wait in memory, else in registers."""
    real, vec3, vec4 = REALS[dtype]
    CellListStruct, FoundStruct = cell_list_struct(dtype), found_struct(dtype, indices)
    PointsStruct, take = points_of(dtype)
    State, begin, limit, insert, finish = top_k(dtype, k, indices)
    _, _, row_of = packed_point(dtype)

    @wp.func
    def visit(state: State, found: FoundStruct, q: vec3, point: vec4, squared: real, exists: bool):
        if squared <= limit(state, found) and squared < real(wp.inf):
            state = insert(state, found, squared, row_of(point))
        return state

    find = shell_search(dtype, lanes(1), Visitor(State, FoundStruct, visit, None, limit, k or LONGEST_LIST))
    single = dtype == torch.float32 and k is not None and k <= SHORT_LIST
    options = {**OPTIONS, "module_options": {**OPTIONS["module_options"], "max_unroll": LONGEST_LIST}}

    @wp.kernel(**options, launch_bounds=(BLOCK, blocks if single else 1))
    def search_nearest(queries: PointsStruct, cells: CellListStruct, found: FoundStruct):
        """Launched over the queries; fills ``found``."""
        query, q = take(queries, wp.tid())
        state = begin(query, found)
        state = find(state, q, cells, found, cloud_of(query, queries.batch))
        finish(state, query, found, wp.where(wp.isfinite(q), real(wp.inf), real(wp.nan)))

    return search_nearest
