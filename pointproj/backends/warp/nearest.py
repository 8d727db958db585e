"""The k nearest reference points, exactly, ties by the lower index."""

import functools
from typing import Any

import torch
import warp as wp
from torch import Tensor

from pointproj.backends.warp.cells import Cells
from pointproj.backends.warp.common import MODULE_OPTIONS, REALS, cloud_of
from pointproj.backends.warp.lanes import LANES, lanes, lowest_bit
from pointproj.backends.warp.rings import Visitor, grid_struct, ring_search
from pointproj.warp_op import Launch, warp_op

LARGEST_LIST = 32  # more neighbours than that wait in a heap in memory


def search(query_points: Tensor, query_offsets: Tensor | None, clouds: int, cells: Cells, k: int) -> Tensor:
    """Packed rows of the k nearest, ``(Q, k)`` int32, nearest first, -1 where there are fewer."""
    return _search(query_points, query_offsets, clouds, list(cells), k)[0]


def _specs(query_points: Tensor, query_offsets: Any, clouds: int, cells: list[Tensor], k: int) -> dict:
    shape = (query_points.shape[0], k)
    heap = shape if k > LARGEST_LIST else (0, k)
    return {"rows": (shape, torch.int32), "heap": (heap, query_points.dtype)}


@warp_op("pointproj::warp_search", outputs=_specs)
def _search(
    launch: Launch,
    query_points: Tensor,
    query_offsets: Tensor | None,
    clouds: int,
    cells: list[Tensor],
    k: int,
    rows: Tensor,
    heap: Tensor,
) -> None:
    listed = k <= LARGEST_LIST
    width = LANES[query_points.device.type] if listed else 1
    kernel = search_kernel(query_points.dtype, k if listed else None, width)
    threads = rows.shape[0] * width
    launch(kernel, threads, query_points, query_offsets, clouds, *cells, rows, heap, block_dim=128)


@functools.cache
def search_kernel(dtype: torch.dtype, k: int | None, width: int) -> wp.Kernel:
    """``width`` lanes a query. With k None the neighbours wait in memory, else in registers."""
    real, vec3 = REALS[dtype]
    _, grid_of = grid_struct(dtype)
    if k is None:
        visitor, begin, finish = _in_memory(dtype)
    elif width == 1:
        visitor, begin, finish = _in_registers(dtype, k)
    else:
        visitor, begin, finish = _across_lanes(dtype, k)
    Arrays = visitor.arrays
    search_cells = ring_search(dtype, lanes(width), visitor)

    @wp.kernel(module="unique", module_options={**MODULE_OPTIONS, "max_unroll": LARGEST_LIST})
    def search_nearest(
        query_points: wp.array(dtype=vec3),
        query_offsets: wp.array(dtype=wp.int32),
        clouds: int,
        frames: wp.array2d(dtype=real),
        dims: wp.array2d(dtype=wp.int32),
        cut: wp.array(dtype=wp.int32),
        subframes: wp.array2d(dtype=real),
        subdims: wp.array(dtype=wp.int32),
        shift: wp.array(dtype=wp.int32),
        start: wp.array(dtype=wp.int32),
        points: wp.array(dtype=vec3),
        order: wp.array(dtype=wp.int32),
        rows: wp.array2d(dtype=wp.int32),
        heap: wp.array2d(dtype=real),
    ):
        query = wp.tid() / width
        grid = grid_of(frames, dims, cut, subframes, subdims, shift, start, points, order)
        arrays = Arrays()
        arrays.rows = rows
        arrays.heap = heap
        q = query_points[query]
        state = begin(query, arrays)
        cloud = cloud_of(query, query_offsets, query_points.shape[0], clouds)
        if wp.isfinite(q) and frames[cloud, 0] < real(wp.inf):
            state = search_cells(state, q, grid, arrays, cloud)
        finish(state, query, arrays)

    return search_nearest


@functools.cache
def _arrays(dtype: torch.dtype) -> Any:
    real, _ = REALS[dtype]

    @wp.struct
    class Arrays:
        rows: wp.array2d(dtype=wp.int32)
        heap: wp.array2d(dtype=real)

    return Arrays


@functools.cache
def _squared_distance(dtype: torch.dtype) -> wp.Function:
    _, vec3 = REALS[dtype]

    @wp.func
    def squared_distance(p: vec3, q: vec3):
        """Rounded in the order of :func:`pointproj.reference.squared_distances`."""
        dx = p[0] - q[0]
        dy = p[1] - q[1]
        dz = p[2] - q[2]
        return dx * dx + dy * dy + dz * dz

    return squared_distance


def _across_lanes(dtype: torch.dtype, k: int) -> tuple:
    """Up to 32 neighbours of one query: a sorted list, one neighbour a lane."""
    real, vec3 = REALS[dtype]
    Grid, _ = grid_struct(dtype)
    Arrays = _arrays(dtype)
    squared_distance = _squared_distance(dtype)
    group = lanes(32)
    lane, take, ballot = group.lane, group.take, group.ballot

    @wp.struct
    class State:
        squared: real  # of this lane's neighbour
        row: int
        worst: real  # of the k-th neighbour, the same in all lanes

    @wp.func
    def begin(query: int, arrays: Arrays):
        state = State()
        state.squared = real(wp.inf)
        state.row = -1
        state.worst = real(wp.inf)
        return state

    @wp.func
    def bound(state: State, arrays: Arrays):
        return state.worst

    @wp.func
    def consider(state: State, q: vec3, grid: Grid, arrays: Arrays, at: int, exists: bool):
        squared = real(wp.inf)
        row = int(-1)
        if exists:
            squared = squared_distance(q, grid.points[at])
            if squared <= state.worst:
                row = grid.order[at]
        waiting = ballot(squared <= state.worst and squared < real(wp.inf))
        while waiting != 0:
            source = lowest_bit(waiting)
            newcomer = take(squared, source)
            newcomer_row = take(row, source)
            stays = state.squared < newcomer or (state.squared == newcomer and state.row < newcomer_row)
            place = wp.bit_count(ballot(stays))
            before = wp.max(lane() - 1, 0)
            squared_before = take(state.squared, before)
            row_before = take(state.row, before)
            if lane() == place:
                state.squared = newcomer
                state.row = newcomer_row
            if lane() > place:
                state.squared = squared_before
                state.row = row_before
            state.worst = take(state.squared, k - 1)
            rest = waiting & (waiting - 1)
            waiting = rest & ballot(squared <= state.worst)
        return state

    @wp.func
    def finish(state: State, query: int, arrays: Arrays):
        if lane() < k:
            arrays.rows[query, lane()] = state.row

    return Visitor(State, Arrays, consider, bound), begin, finish


def _in_registers(dtype: torch.dtype, k: int) -> tuple:
    """Up to a few dozen neighbours: a sorted list in registers."""
    real, vec3 = REALS[dtype]
    Grid, _ = grid_struct(dtype)
    Arrays = _arrays(dtype)
    squared_distance = _squared_distance(dtype)
    Distances, Rows = wp.types.vector(length=k, dtype=real), wp.types.vector(length=k, dtype=wp.int32)

    @wp.struct
    class State:
        squared: Distances  # ascending
        rows: Rows

    @wp.func
    def begin(query: int, arrays: Arrays):
        state = State()
        for i in range(k):
            state.squared[i] = real(wp.inf)
            state.rows[i] = -1
        return state

    @wp.func
    def bound(state: State, arrays: Arrays):
        return state.squared[k - 1]

    @wp.func
    def consider(state: State, q: vec3, grid: Grid, arrays: Arrays, at: int, exists: bool):
        squared = squared_distance(q, grid.points[at])
        if squared <= state.squared[k - 1] and squared < real(wp.inf):
            row = grid.order[at]
            for i in range(k):  # the newcomer sinks to its place, each one behind it moves up
                there = state.squared[i]
                row_there = state.rows[i]
                if squared < there or (squared == there and row < row_there):
                    state.squared[i] = squared
                    state.rows[i] = row
                    squared = there
                    row = row_there
        return state

    @wp.func
    def finish(state: State, query: int, arrays: Arrays):
        for i in range(k):
            arrays.rows[query, i] = state.rows[i]

    return Visitor(State, Arrays, consider, bound), begin, finish


def _in_memory(dtype: torch.dtype) -> tuple:
    """Any number of neighbours: a heap in the output rows, its farthest neighbour on top."""
    real, vec3 = REALS[dtype]
    Grid, _ = grid_struct(dtype)
    Arrays = _arrays(dtype)
    squared_distance = _squared_distance(dtype)

    @wp.struct
    class State:
        query: int

    @wp.func
    def begin(query: int, arrays: Arrays):
        for i in range(arrays.rows.shape[1]):
            arrays.rows[query, i] = -1
            arrays.heap[query, i] = real(wp.inf)
        state = State()
        state.query = query
        return state

    @wp.func
    def bound(state: State, arrays: Arrays):
        return arrays.heap[state.query, 0]

    @wp.func
    def is_after(squared: real, row: int, other: real, other_row: int):
        """Whether a neighbour comes later than another in the result; places still empty come last."""
        later = wp.uint32(row) > wp.uint32(other_row)
        return squared > other or (squared == other and later)

    @wp.func
    def sink(arrays: Arrays, query: int, size: int, squared: real, row: int):
        """Put a neighbour on top of the first ``size`` places and restore the heap."""
        at = int(0)
        child = int(1)
        while child < size:
            if child + 1 < size and is_after(
                arrays.heap[query, child + 1],
                arrays.rows[query, child + 1],
                arrays.heap[query, child],
                arrays.rows[query, child],
            ):
                child += 1
            if is_after(arrays.heap[query, child], arrays.rows[query, child], squared, row):
                arrays.heap[query, at] = arrays.heap[query, child]
                arrays.rows[query, at] = arrays.rows[query, child]
                at = child
                child = 2 * at + 1
            else:
                child = size
        arrays.heap[query, at] = squared
        arrays.rows[query, at] = row

    @wp.func
    def consider(state: State, q: vec3, grid: Grid, arrays: Arrays, at: int, exists: bool):
        query = state.query
        squared = squared_distance(q, grid.points[at])
        if squared <= arrays.heap[query, 0] and squared < real(wp.inf):
            row = grid.order[at]
            if is_after(arrays.heap[query, 0], arrays.rows[query, 0], squared, row):
                sink(arrays, query, arrays.rows.shape[1], squared, row)
        return state

    @wp.func
    def finish(state: State, query: int, arrays: Arrays):
        """Heap sort: take the farthest off the top, fill the rows from behind."""
        last = arrays.rows.shape[1] - 1
        while last > 0:
            squared = arrays.heap[query, 0]
            row = arrays.rows[query, 0]
            sink(arrays, query, last, arrays.heap[query, last], arrays.rows[query, last])
            arrays.heap[query, last] = squared
            arrays.rows[query, last] = row
            last -= 1

    return Visitor(State, Arrays, consider, bound), begin, finish
