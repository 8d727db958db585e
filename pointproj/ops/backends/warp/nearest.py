"""The k nearest reference points, exactly, ties by the lower index."""

import functools
from typing import Any, NamedTuple

import torch
import warp as wp
from torch import Tensor

from pointproj.ops.backends.warp.cells import Cells
from pointproj.ops.backends.warp.common import MODULE_OPTIONS, REALS, cloud_of, packed_point
from pointproj.ops.backends.warp.frames import grid_struct
from pointproj.ops.backends.warp.keepers import across_lanes, in_memory, in_registers
from pointproj.ops.backends.warp.lanes import lanes, lowest_bit
from pointproj.ops.backends.warp.rings import ring_search
from pointproj.ops.backends.warp.scan import crowds_before
from pointproj.ops.bridge.warp_op import Launch, warp_op
from pointproj.ops.registry import Clouds

LARGEST_LIST = 32  # more neighbours than that wait in a heap in memory
FEW_QUERIES = 2**18  # so few leave a GPU idle unless the lanes of a warp share each
SHORT_LIST = 8  # so few neighbours are no burden for a single thread:
VERY_FEW_QUERIES = 2**14  # then threads work alone but for so few
PATIENCE = 256  # rows of cells that a thread looks at in and around crowds before a warp takes over
LEFT_TO_DO = -2  # in place of the first neighbour


def search(clouds: Clouds, cells: Cells, k: int) -> Tensor:
    """Packed rows of the k nearest, ``(Q, k)`` int32, nearest first, -1 where there are fewer."""
    points = clouds.query_points, clouds.query_offsets, clouds.reference_points, clouds.count
    return _search(*points, list(cells), k)[0]


def _specs(
    query_points: Tensor,
    query_offsets: Any,
    reference_points: Tensor,
    clouds: int,
    cells: list[Tensor],
    k: int,
) -> dict:
    shape = (query_points.shape[0], k)
    heap = shape if k > LARGEST_LIST else (0, k)
    return {"rows": (shape, torch.int32), "heap": (heap, query_points.dtype)}


@warp_op("pointproj::warp_search", outputs=_specs)
def _search(
    launch: Launch,
    query_points: Tensor,
    query_offsets: Tensor | None,
    reference_points: Tensor,
    clouds: int,
    cells: list[Tensor],
    k: int,
    rows: Tensor,
    heap: Tensor,
) -> None:
    listed = k <= LARGEST_LIST
    queries = rows.shape[0]
    # A cloud that searches itself goes in the order of its cells: threads side by side share what they read.
    itself = query_points.data_ptr() == reference_points.data_ptr() and queries == reference_points.shape[0]
    points = (query_points, query_offsets, itself, clouds, *cells)
    for stage in _stages(queries, k, query_points.is_cuda):
        kernel = search_kernel(query_points.dtype, k if listed else None, stage)
        shape = (-(-queries // stage.each), stage.width)
        launch(kernel, shape, *points, stage.each, rows, heap, block_dim=128)


class Stage(NamedTuple):
    """One kernel over all queries; it leaves to the next what would take it too long."""

    width: int  # lanes a query
    each: int  # queries that these lanes take, one after another, far from each other
    into_crowds: bool
    patience: int  # rows of cells that a query may look at in and around crowds; 0 for no limit
    blocks: int  # that a processor of a GPU has room for: many need few registers each


def _stages(queries: int, k: int, on_gpu: bool) -> tuple[Stage, ...]:
    """The kernels of a search: without crowds, which most queries never meet, then into them."""
    if not on_gpu or k > LARGEST_LIST:
        return Stage(1, 1, False, 0, 1), Stage(1, 1, True, 0, 1)
    if queries <= FEW_QUERIES:
        alone = k <= SHORT_LIST and queries > VERY_FEW_QUERIES
        first = Stage(1, 1, False, PATIENCE, 4) if alone else Stage(32, 1, False, 0, 6)
        return first, Stage(32, 16, True, 0, 4)
    # Beside a cluster a few searches are a thousand times as long as the others. With long lists it is better
    # to run few threads than to keep the lists in memory.
    first, second = (8, 3) if k <= SHORT_LIST else (1, 1)
    return (
        Stage(1, 1, False, PATIENCE, first),
        Stage(1, 1, True, PATIENCE, second),
        Stage(32, 32, True, 0, 4),
    )


@functools.cache
def search_kernel(dtype: torch.dtype, k: int | None, stage: Stage) -> wp.Kernel:
    """The kernel of a stage. With k None the neighbours wait in memory, else in registers."""
    width, _, into_crowds, patience, blocks = stage
    real, vec3 = REALS[dtype]
    _, grid_of = grid_struct(dtype)
    if k is None:
        visitor, begin, finish = in_memory(dtype, LARGEST_LIST)
    else:
        visitor, begin, finish = in_registers(dtype, k) if width == 1 else across_lanes(dtype, k)
    Arrays = visitor.arrays
    load_point, _, row_of = packed_point(dtype)
    search_cells = ring_search(dtype, lanes(width), visitor, into_crowds, patience)
    group = lanes(width)
    item, lane, take, ballot = group.item, group.lane, group.take, group.ballot
    Grid, _ = grid_struct(dtype)

    @wp.func
    def search_one(
        query: int,
        query_points: wp.array(dtype=vec3),
        query_offsets: wp.array(dtype=wp.int32),
        clouds: int,
        grid: Grid,
        arrays: Arrays,
    ):
        q = query_points[query]
        state = begin(query, arrays)
        cloud = cloud_of(query, query_offsets, query_points.shape[0], clouds)
        if wp.isfinite(q) and grid.frames[cloud, 0] < real(wp.inf):
            state = search_cells(state, q, grid, arrays, cloud)
        if state.gave_up:
            if lane() == 0:
                arrays.rows[query, 0] = LEFT_TO_DO
        else:
            finish(state, query, arrays)

    @wp.kernel(
        module="unique",
        module_options={**MODULE_OPTIONS, "max_unroll": LARGEST_LIST},
        launch_bounds=(128, blocks if dtype == torch.float32 else 1),
    )
    def search_nearest(
        query_points: wp.array(dtype=vec3),
        query_offsets: wp.array(dtype=wp.int32),
        itself: bool,
        clouds: int,
        frames: wp.array2d(dtype=real),
        dims: wp.array2d(dtype=wp.int32),
        cut: wp.array(dtype=wp.int32),
        subframes: wp.array2d(dtype=real),
        subdims: wp.array2d(dtype=wp.int32),
        start: wp.array(dtype=wp.int64),
        points: wp.array2d(dtype=real),
        each: int,
        rows: wp.array2d(dtype=wp.int32),
        heap: wp.array2d(dtype=real),
    ):
        """Of ``each`` queries search for those left to do, one after another."""
        number, _ = wp.tid()
        if wp.static(into_crowds) and crowds_before(start[start.shape[0] - 1]) == 0:
            return  # nobody has met a crowd
        grid = grid_of(frames, dims, cut, subframes, subdims, start, points)
        arrays = Arrays()
        arrays.rows = rows
        arrays.heap = heap
        items = (rows.shape[0] + each - 1) / each
        query = lane() * items + item(number)
        there = query < rows.shape[0] and lane() < each
        if there and itself:
            query = row_of(load_point(points, query))
        if wp.static(into_crowds):
            waiting = ballot(there and rows[query, 0] == LEFT_TO_DO)
            while waiting != 0:
                search_one(
                    take(query, lowest_bit(waiting)), query_points, query_offsets, clouds, grid, arrays
                )
                waiting = waiting & (waiting - 1)
        else:
            search_one(take(query, 0), query_points, query_offsets, clouds, grid, arrays)

    return search_nearest
