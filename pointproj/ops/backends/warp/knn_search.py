"""The k nearest reference points, exactly, ties by the lower index."""

import functools
from typing import Any, NamedTuple

import torch
import warp as wp
from torch import Tensor

from pointproj.ops.backends.warp.cell_list import new_cell_list
from pointproj.ops.backends.warp.common import (
    MODULE_OPTIONS,
    REALS,
    Batch,
    BatchStruct,
    cloud_of,
    packed_point,
)
from pointproj.ops.backends.warp.grids import CellList, cell_list_struct
from pointproj.ops.backends.warp.lanes import lanes, lowest_bit
from pointproj.ops.backends.warp.scan import dense_cells_before
from pointproj.ops.backends.warp.shells import shell_search
from pointproj.ops.backends.warp.top_k import TopK, across_lanes, in_memory, in_registers, top_k_struct
from pointproj.ops.bridge.warp_op import Launch, warp_op
from pointproj.ops.clouds import Clouds
from pointproj.ops.registry import Tables

LARGEST_LIST = 32  # more neighbours than that wait in a heap in memory
# So few queries leave a GPU idle unless the lanes of a warp share each: self-kNN of 10^4 uniform points takes
# 59 us with a warp a query and 100 with a thread.
FEW_QUERIES = 2**18
SHORT_LIST = 8  # so few neighbours are no burden for a single thread:
VERY_FEW_QUERIES = 2**14  # then threads work alone but for so few
BUDGET = 256  # rows of cells that a thread looks at in and around dense cells before a warp takes over
UNFINISHED = -2  # in place of the first neighbour


def search(clouds: Clouds, cells: Tables | None, k: int) -> Tensor:
    """Packed rows of the k nearest, ``(Q, k)`` int32, nearest first, -1 where there are fewer."""
    return _search(*clouds, list(cells or ()), k, False, False)[0]


def nearest(clouds: Clouds, cells: Tables | None, k: int, index_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Their distances and rows, as :meth:`pointproj.ops.registry.Backend.nearest`."""
    rows, distances = _search(*clouds, list(cells or ()), k, index_dtype == torch.int64, True)
    return distances, rows


def _specs(query_points: Tensor, k: int, long_rows: bool, with_distances: bool, **_: Any) -> dict:
    count = query_points.shape[0]
    needed = with_distances or k > LARGEST_LIST  # long lists wait in there
    return {
        "rows": ((count, k), torch.int64 if long_rows else torch.int32),
        "distances": ((count if needed else 0, k), query_points.dtype),
    }


class Queries(NamedTuple):
    """The points searched for, and how they are taken."""

    points: Tensor
    batch: Batch
    itself: bool  # whether they are the points of the cell list


@warp_op("pointproj::warp_search", outputs=_specs, replayable=True)
def _search(
    launch: Launch,
    query_points: Tensor,
    query_offsets: Tensor | None,
    reference_points: Tensor,
    reference_offsets: Tensor | None,
    clouds: int,
    cells: list[Tensor],
    k: int,
    long_rows: bool,
    with_distances: bool,
    *,
    rows: Tensor,
    distances: Tensor,
) -> None:
    clouds = Clouds(query_points, query_offsets, reference_points, reference_offsets, clouds)
    launch_search(launch, clouds, cells, TopK(rows, distances))


def launch_search(launch: Launch, clouds: Clouds, cells: list[Tensor], found: TopK) -> None:
    """Fill ``found``. Without a cell list it builds its own: that spares the call of another operator."""
    query_points, query_offsets, reference_points, reference_offsets, count = clouds
    cell_list = (
        CellList(*cells) if cells else new_cell_list(launch, reference_points, reference_offsets, count)
    )
    rows, k = found.rows.shape
    # A cloud that searches itself goes in the order of its cells: threads side by side share what they read.
    itself = query_points.data_ptr() == reference_points.data_ptr() and rows == reference_points.shape[0]
    queries = Queries(query_points, Batch(query_offsets, rows, count), itself)
    in_list = k if k <= LARGEST_LIST else None
    for stage in _stages(rows, k, query_points.is_cuda):
        kernel = search_kernel(query_points.dtype, in_list, stage, found.rows.dtype)
        shape = (-(-rows // stage.each), stage.width)
        launch(kernel, shape, queries, cell_list, stage.each, found, block_dim=128)


class Stage(NamedTuple):
    """One kernel over all queries; queries that would take it too long are left to the next stage."""

    width: int  # lanes a query
    each: int  # queries that these lanes take, one after another, far from each other
    into_dense_cells: bool
    budget: int  # rows of cells that a query may look at in and around dense cells; 0 for no limit
    blocks: int  # that fit on a multiprocessor at a time: many need few registers each


def _stages(queries: int, k: int, on_gpu: bool) -> tuple[Stage, ...]:
    """The kernels of a search: without dense cells, which most queries never meet, then into them.

    A thread a query takes 44 us for W1, a warp a query 61. With single threads alone, dense cells of
    clustered clouds take longest; with warps alone surfaces of 10^7 points do (86 ms): so threads begin, and
    warps finish. 64 registers a thread, some of them spilled, search 10^7 uniform points in 5.7 ms, 110 in
    7.6.
    """
    if not on_gpu or k > LARGEST_LIST:
        return Stage(1, 1, False, 0, 1), Stage(1, 1, True, 0, 1)
    if queries <= FEW_QUERIES:
        alone = k <= SHORT_LIST and queries > VERY_FEW_QUERIES
        first = Stage(1, 1, False, BUDGET, 4) if alone else Stage(32, 1, False, 0, 6)
        return first, Stage(32, 16, True, 0, 4)
    # Beside a cluster a few searches are a thousand times as long as the others. With long lists it is better
    # to run few threads than to keep the lists in memory.
    first, second = (8, 3) if k <= SHORT_LIST else (1, 1)
    return (
        Stage(1, 1, False, BUDGET, first),
        Stage(1, 1, True, BUDGET, second),
        Stage(32, 32, True, 0, 4),
    )


@functools.cache
def search_kernel(dtype: torch.dtype, k: int | None, stage: Stage, indices: torch.dtype) -> wp.Kernel:
    """The kernel of a stage. With k None the neighbours wait in memory, else in registers."""
    width, _, into_dense_cells, budget, blocks = stage
    real, vec3 = REALS[dtype]
    CellListStruct, TopKStruct = cell_list_struct(dtype), top_k_struct(dtype, indices)
    if k is None:
        visitor, begin, finish = in_memory(dtype, LARGEST_LIST, indices)
    else:
        visitor, begin, finish = (in_registers if width == 1 else across_lanes)(dtype, k, indices)
    integer = wp.dtype_from_torch(indices)
    load_point, _, row_of = packed_point(dtype)
    search_cells = shell_search(dtype, lanes(width), visitor, into_dense_cells, budget)
    group = lanes(width)
    item, lane, take, ballot = group.item, group.lane, group.take, group.ballot

    @wp.struct
    class QueriesStruct:
        points: wp.array(dtype=vec3)
        batch: BatchStruct
        itself: bool

    @wp.func
    def search_one(query: int, queries: QueriesStruct, cells: CellListStruct, found: TopKStruct):
        q = queries.points[query]
        state = begin(query, found)
        cloud = cloud_of(query, queries.batch)
        if wp.isfinite(q) and cells.frames[cloud, 0] < real(wp.inf):
            state = search_cells(state, q, cells, found, cloud)
        if state.gave_up:
            if lane() == 0:
                found.rows[query, 0] = integer(UNFINISHED)
        else:
            finish(state, query, found, wp.where(wp.isfinite(q), real(wp.inf), real(wp.nan)))

    @wp.kernel(
        module="unique",
        module_options={**MODULE_OPTIONS, "max_unroll": LARGEST_LIST},
        launch_bounds=(128, blocks if dtype == torch.float32 else 1),
    )
    def search_nearest(queries: QueriesStruct, cells: CellListStruct, each: int, found: TopKStruct):
        """Of ``each`` queries search for those that are unfinished, one after another."""
        number, _ = wp.tid()
        if wp.static(into_dense_cells) and dense_cells_before(cells.start[cells.start.shape[0] - 1]) == 0:
            return  # without dense cells no query is unfinished
        count = queries.batch.rows
        items = (count + each - 1) / each
        query = lane() * items + item(number)
        there = query < count and lane() < each
        if there and queries.itself:
            query = row_of(load_point(cells.points, query))
        if wp.static(into_dense_cells):
            waiting = ballot(there and found.rows[query, 0] == integer(UNFINISHED))
            while waiting != 0:
                search_one(take(query, lowest_bit(waiting)), queries, cells, found)
                waiting = waiting & (waiting - 1)
        else:
            search_one(take(query, 0), queries, cells, found)

    return search_nearest
