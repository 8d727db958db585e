"""The k nearest reference points, exactly, ties by the lower index."""

import functools
from typing import Any, NamedTuple

import torch
import warp as wp
from torch import Tensor

from pointproj.backends import Clouds
from pointproj.backends.warp.cells import Cells
from pointproj.backends.warp.common import MODULE_OPTIONS, REALS, cloud_of, packed_point
from pointproj.backends.warp.lanes import bit_count, lanes, lowest_bit
from pointproj.backends.warp.rings import Visitor, grid_struct, ring_search
from pointproj.warp_op import Launch, warp_op

LARGEST_LIST = 32  # more neighbours than that wait in a heap in memory
FEW_QUERIES = 2**18  # so few leave a GPU idle unless the lanes of a warp share each
PATIENCE = 4096  # rows of cells that a thread looks at before a warp takes over
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
    for width, each, into_crowds, patience in _stages(queries, query_points.is_cuda and listed):
        kernel = search_kernel(query_points.dtype, k if listed else None, width, into_crowds, patience)
        launch(kernel, (-(-queries // each), width), *points, each, rows, heap, block_dim=128)


class Stage(NamedTuple):
    """One kernel over all queries; it leaves to the next what would take it too long."""

    width: int  # lanes a query
    each: int  # queries that these lanes take, one after another
    into_crowds: bool
    patience: int  # rows of cells that a query may look at; 0 for no limit


def _stages(queries: int, together: bool) -> tuple[Stage, ...]:
    """The kernels of a search: without crowds, which most queries never meet, then into them."""
    if not together:
        return Stage(1, 1, False, 0), Stage(1, 1, True, 0)
    if queries <= FEW_QUERIES:
        return Stage(32, 1, False, 0), Stage(32, 8, True, 0)
    # Beside a cluster a few searches are a thousand times as long as the others.
    return Stage(1, 1, False, 0), Stage(1, 1, True, PATIENCE), Stage(32, 32, True, 0)


@functools.cache
def search_kernel(
    dtype: torch.dtype, k: int | None, width: int, into_crowds: bool, patience: int
) -> wp.Kernel:
    """The kernel of a stage. With k None the neighbours wait in memory, else in registers."""
    real, vec3 = REALS[dtype]
    _, grid_of = grid_struct(dtype)
    if k is None:
        visitor, begin, finish = _in_memory(dtype)
    else:
        visitor, begin, finish = _in_registers(dtype, k) if width == 1 else _across_lanes(dtype, k)
    Arrays = visitor.arrays
    load_point, _, row_of = packed_point(dtype)
    search_cells = ring_search(dtype, lanes(width), visitor, into_crowds, patience)
    group = lanes(width)
    item, lane, take, ballot = group.item, group.lane, group.take, group.ballot
    Grid, _ = grid_struct(dtype)
    bounds = {1: None, 32: (128, 6)}[width]

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
        module="unique", module_options={**MODULE_OPTIONS, "max_unroll": LARGEST_LIST}, launch_bounds=bounds
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
        subdims: wp.array(dtype=wp.int32),
        shift: wp.array(dtype=wp.int32),
        start: wp.array(dtype=wp.int32),
        points: wp.array2d(dtype=real),
        each: int,
        rows: wp.array2d(dtype=wp.int32),
        heap: wp.array2d(dtype=real),
    ):
        """Of ``each`` queries search for those left to do, one after another."""
        number, _ = wp.tid()
        grid = grid_of(frames, dims, cut, subframes, subdims, shift, start, points)
        arrays = Arrays()
        arrays.rows = rows
        arrays.heap = heap
        query = item(number) * each + lane()
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
    real, vec3 = REALS[dtype]
    vec4 = wp.types.vector(length=4, dtype=real)

    @wp.func
    def squared_distance(p: vec3, q: vec4):
        """Rounded in the order of :func:`pointproj.reference.squared_distances`."""
        dx = p[0] - q[0]
        dy = p[1] - q[1]
        dz = p[2] - q[2]
        return dx * dx + dy * dy + dz * dz

    return squared_distance


def _in_registers(dtype: torch.dtype, k: int) -> tuple:
    """Up to a few dozen neighbours: a thread keeps them sorted."""
    real, vec3 = REALS[dtype]
    Grid, _ = grid_struct(dtype)
    Arrays = _arrays(dtype)
    squared_distance = _squared_distance(dtype)
    load_point, _, row_of = packed_point(dtype)
    Distances, Rows = wp.types.vector(length=k, dtype=real), wp.types.vector(length=k, dtype=wp.int32)

    @wp.struct
    class State:
        squared: Distances  # ascending
        rows: Rows
        effort: int
        gave_up: bool

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
        point = load_point(grid.points, at)
        squared = squared_distance(q, point)
        if squared <= state.squared[k - 1] and squared < real(wp.inf):
            row = row_of(point)
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

    return Visitor(State, Arrays, consider, bound, k), begin, finish


def _across_lanes(dtype: torch.dtype, k: int) -> tuple:
    """The same for the 32 lanes of a warp: lane i keeps the i-th nearest."""
    real, vec3 = REALS[dtype]
    Grid, _ = grid_struct(dtype)
    Arrays = _arrays(dtype)
    squared_distance = _squared_distance(dtype)
    load_point, _, row_of = packed_point(dtype)
    group = lanes(32)
    lane, take, previous, ballot, minimum = (
        group.lane,
        group.take,
        group.previous,
        group.ballot,
        group.minimum,
    )
    last_row = 2**31 - 1

    @wp.struct
    class State:
        squared: real
        row: int
        worst: real  # squared distance of the k-th
        effort: int
        gave_up: bool

    @wp.func
    def begin(query: int, arrays: Arrays):
        state = State()
        state.squared = real(wp.inf)
        state.row = last_row
        state.worst = real(wp.inf)
        return state

    @wp.func
    def bound(state: State, arrays: Arrays):
        return state.worst

    @wp.func
    def consider(state: State, q: vec3, grid: Grid, arrays: Arrays, at: int, exists: bool):
        squared = real(wp.inf)
        row = int(last_row)
        if exists:
            point = load_point(grid.points, at)
            squared = squared_distance(q, point)
            row = row_of(point)
        while ballot(squared <= state.worst and squared < real(wp.inf)) != 0:
            least = minimum(squared)
            first = minimum(wp.where(squared == least, row, last_row))
            if squared == least and row == first:
                squared = real(wp.inf)
            before = state.squared < least or (state.squared == least and state.row < first)
            place = bit_count(ballot(before))
            squared_before = previous(state.squared)
            row_before = previous(state.row)
            if lane() == place:
                state.squared = least
                state.row = first
            elif lane() > place:  # makes room
                state.squared = squared_before
                state.row = row_before
            state.worst = take(state.squared, k - 1)
        return state

    @wp.func
    def finish(state: State, query: int, arrays: Arrays):
        if lane() < k:
            arrays.rows[query, lane()] = wp.where(state.row == last_row, -1, state.row)

    return Visitor(State, Arrays, consider, bound, k), begin, finish


def _in_memory(dtype: torch.dtype) -> tuple:
    """Any number of neighbours: a heap in the output rows, its farthest neighbour on top."""
    real, vec3 = REALS[dtype]
    Grid, _ = grid_struct(dtype)
    Arrays = _arrays(dtype)
    squared_distance = _squared_distance(dtype)
    load_point, _, row_of = packed_point(dtype)

    @wp.struct
    class State:
        query: int
        effort: int
        gave_up: bool

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
        point = load_point(grid.points, at)
        squared = squared_distance(q, point)
        if squared <= arrays.heap[query, 0] and squared < real(wp.inf):
            row = row_of(point)
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

    return Visitor(State, Arrays, consider, bound, LARGEST_LIST), begin, finish
