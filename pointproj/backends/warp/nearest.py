"""The k nearest reference points, exactly, ties by the lower index."""

import functools
from typing import Any

import torch
import warp as wp
from torch import Tensor

from pointproj.backends.warp.cells import MODULE_OPTIONS, REALS, Cells, cloud_of
from pointproj.backends.warp.traversal import Visitor, grid_maker, grid_struct, ring_search
from pointproj.warp_op import warp_op

LARGEST_IN_REGISTERS = 32  # more neighbours than that wait in a heap in memory


def search(query_points: Tensor, query_offsets: Tensor | None, clouds: int, cells: Cells, k: int) -> Tensor:
    """Packed rows of the k nearest, ``(Q, k)`` int64, nearest first, -1 where there are fewer."""
    return _search(query_points, query_offsets, clouds, list(cells), k)[0]


def _specs(
    query_points: Tensor,
    query_offsets: Any,
    clouds: int,
    cells: list[Tensor],
    k: int,
) -> dict:
    shape = (query_points.shape[0], k)
    heap = shape if k > LARGEST_IN_REGISTERS else (0, k)
    return {"rows": (shape, torch.int64), "heap": (heap, query_points.dtype)}


@warp_op("pointproj::warp_search", outputs=_specs)
def _search(
    launch: Any,
    query_points: Tensor,
    query_offsets: Tensor | None,
    clouds: int,
    cells: list[Tensor],
    k: int,
    rows: Tensor,
    heap: Tensor,
) -> None:
    kernel = search_kernel(query_points.dtype, k if k <= LARGEST_IN_REGISTERS else None)
    launch(kernel, rows.shape[0], query_points, query_offsets, clouds, *cells, rows, heap, block_dim=128)


@functools.cache
def search_kernel(dtype: torch.dtype, k: int | None) -> wp.Kernel:
    """One thread a query. The neighbours found so far are in registers, or in memory for k None."""
    real, vec3 = REALS[dtype]
    grid_of = grid_maker(dtype)
    found = _in_registers(dtype, k) if k is not None else _in_memory(dtype)
    visitor, begin, finish = found
    Arrays = visitor.arrays
    search_cells = ring_search(dtype, visitor)

    @wp.kernel(module="unique", module_options={**MODULE_OPTIONS, "max_unroll": LARGEST_IN_REGISTERS})
    def search_nearest(
        query_points: wp.array(dtype=vec3),
        query_offsets: wp.array(dtype=wp.int32),
        clouds: int,
        frames: wp.array2d(dtype=real),
        dims: wp.array2d(dtype=wp.int32),
        subframes: wp.array2d(dtype=real),
        subdims: wp.array(dtype=wp.int32),
        first: wp.array(dtype=wp.int32),
        start: wp.array(dtype=wp.int32),
        points: wp.array(dtype=vec3),
        order: wp.array(dtype=wp.int32),
        rows: wp.array2d(dtype=wp.int64),
        heap: wp.array2d(dtype=real),
    ):
        query = wp.tid()
        grid = grid_of(frames, dims, subframes, subdims, first, start, points, order)
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


def _arrays(dtype: torch.dtype) -> Any:
    real, _ = REALS[dtype]

    @wp.struct
    class Arrays:
        rows: wp.array2d(dtype=wp.int64)
        heap: wp.array2d(dtype=real)

    return Arrays


def _in_registers(dtype: torch.dtype, k: int) -> tuple:
    """Up to a few dozen neighbours: a sorted list in registers."""
    real, vec3 = REALS[dtype]
    Grid, Arrays = grid_struct(dtype), _arrays(dtype)
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
    def scan(state: State, q: vec3, grid: Grid, arrays: Arrays, begin: int, end: int):
        for at in range(begin, end):
            p = grid.points[at]
            dx = q[0] - p[0]
            dy = q[1] - p[1]
            dz = q[2] - p[2]
            squared = dx * dx + dy * dy + dz * dz
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
            arrays.rows[query, i] = wp.int64(state.rows[i])

    return Visitor(State, Arrays, scan, bound), begin, finish


def _in_memory(dtype: torch.dtype) -> tuple:
    """Any number of neighbours: a heap in the output rows, its farthest neighbour on top."""
    real, vec3 = REALS[dtype]
    Grid, Arrays = grid_struct(dtype), _arrays(dtype)

    @wp.struct
    class State:
        query: int

    @wp.func
    def begin(query: int, arrays: Arrays):
        for i in range(arrays.rows.shape[1]):
            arrays.rows[query, i] = wp.int64(-1)
            arrays.heap[query, i] = real(wp.inf)
        state = State()
        state.query = query
        return state

    @wp.func
    def bound(state: State, arrays: Arrays):
        return arrays.heap[state.query, 0]

    @wp.func
    def is_after(squared: real, row: wp.int64, other: real, other_row: wp.int64):
        """Whether a neighbour comes later than another in the result; places still empty come last."""
        later = wp.uint64(row) > wp.uint64(other_row)
        return squared > other or (squared == other and later)

    @wp.func
    def sink(arrays: Arrays, query: int, size: int, squared: real, row: wp.int64):
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
    def scan(state: State, q: vec3, grid: Grid, arrays: Arrays, begin: int, end: int):
        query = state.query
        for at in range(begin, end):
            p = grid.points[at]
            dx = q[0] - p[0]
            dy = q[1] - p[1]
            dz = q[2] - p[2]
            squared = dx * dx + dy * dy + dz * dz
            if squared <= arrays.heap[query, 0] and squared < real(wp.inf):
                row = wp.int64(grid.order[at])
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

    return Visitor(State, Arrays, scan, bound), begin, finish
