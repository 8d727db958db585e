"""Lists of the reference points within a radius of each query: the nearest of them, or all in a row.

Both search the hash grid. Lists of the nearest are made, and all are counted, in one launch. A list of all
takes two searches: one counts, and when the sums of the counts say where each query's part begins, the
other fills it. A part is sorted in place, in registers up to 128 neighbours, so that nothing depends on the
order in which points are met.
"""

import functools
from typing import Any, NamedTuple

import torch
import warp as wp
from torch import Tensor

from pointproj.ops.backends.warp.common import OPTIONS, REALS, Batch, BatchStruct, cloud_of, packed_point
from pointproj.ops.backends.warp.hash_grid import (
    SearchedGrid,
    ball_search,
    new_hash_grid,
    searched_struct,
)
from pointproj.ops.backends.warp.lane_sort import sort_rows
from pointproj.ops.backends.warp.lanes import Lanes, lanes
from pointproj.ops.backends.warp.top_k import TopK, squared_distance_function, top_k_struct
from pointproj.ops.backends.warp.top_k_within import LANES, in_blocks, in_heap, in_lanes
from pointproj.ops.backends.warp.traversal import Visitor
from pointproj.ops.bridge.warp_op import Launch, warp_op
from pointproj.ops.clouds import Clouds
from pointproj.ops.pairs import largest_square_within, largest_squares_within
from pointproj.ops.registry import Tables

BLOCK = 128


def nearest_within(
    clouds: Clouds, grid: Tables | None, radius: float | Tensor, k: int
) -> tuple[Tensor, Tensor]:
    """Rows of the k nearest within the radius, ``(Q, k)`` int32, and counts of all, ``(Q,)`` int32."""
    rows, counts, _ = _nearest_within(*_arguments(clouds, grid, radius), k)
    return rows, counts


def all_within(
    clouds: Clouds, grid: Tables | None, radius: float | Tensor, capacity: int
) -> tuple[Tensor, Tensor]:
    """Where each query's neighbours begin, ``(Q + 1,)`` int64, and their rows, ``(capacity,)`` int32."""
    return _all_within(*_arguments(clouds, grid, radius), capacity)


def _arguments(clouds: Clouds, grid: Tables | None, radius: float | Tensor) -> tuple:
    """The first arguments of both operators: without a grid they build their own, which spares a call."""
    radii = (0.0, radius) if isinstance(radius, Tensor) else (float(radius), None)
    return *clouds.detached(), [] if grid is None else list(grid), *radii


class Balls(NamedTuple):
    """The queries and their radii; in kernels :func:`balls_struct`."""

    points: Tensor
    batch: Batch
    itself: bool  # whether they are the points of the hash grid
    radius: float
    largest_square: float  # largest squared distance that counts as within the radius
    radii: Tensor | None  # of each query, in place of one for all
    largest_squares: Tensor | None


@functools.cache
def balls_struct(dtype: torch.dtype) -> Any:
    """:class:`Balls` inside a kernel."""
    real, vec3 = REALS[dtype]

    @wp.struct
    class BallsStruct:
        points: wp.array(dtype=vec3)
        batch: BatchStruct
        itself: bool
        radius: real
        largest_square: real
        radii: wp.array(dtype=real)
        largest_squares: wp.array(dtype=real)

    return BallsStruct


def _problem(
    launch: Launch,
    query_points: Tensor,
    query_offsets: Tensor | None,
    reference_points: Tensor,
    reference_offsets: Tensor | None,
    clouds: int,
    grid: list[Tensor],
    radius: float,
    radii: Tensor | None,
) -> tuple[Balls, SearchedGrid]:
    """What is searched for, and in which grid."""
    count, references = query_points.shape[0], reference_points.shape[0]
    # A cloud that searches itself goes in the order of its cells: warps side by side share what they read.
    itself = query_points.data_ptr() == reference_points.data_ptr() and count == references
    if not grid:
        largest = radii.amax().view(1) if radii is not None and count else None
        grid = new_hash_grid(launch, reference_points, reference_offsets, clouds, radius, largest)
    if radii is None:
        radius_and_limits = radius, largest_square_within(radius, query_points.dtype), None, None
    else:
        radius_and_limits = 0.0, 0.0, radii, largest_squares_within(radii, query_points)
    balls = Balls(query_points, Batch(query_offsets, count, clouds), itself, *radius_and_limits)
    return balls, SearchedGrid(*grid, 0, Batch(reference_offsets, references, clouds))


def _nearest_specs(query_points: Tensor, k: int, **_: Any) -> dict:
    count = query_points.shape[0]
    in_registers = query_points.is_cuda and k <= LANES
    return {
        "rows": ((count, k), torch.int32),
        "counts": ((count,), torch.int32),
        "heap": ((0 if in_registers else count, k), query_points.dtype),
    }


@warp_op("pointproj::warp_nearest_within", outputs=_nearest_specs)
def _nearest_within(
    launch: Launch,
    query_points: Tensor,
    query_offsets: Tensor | None,
    reference_points: Tensor,
    reference_offsets: Tensor | None,
    clouds: int,
    grid: list[Tensor],
    radius: float,
    radii: Tensor | None,
    k: int,
    *,
    rows: Tensor,
    counts: Tensor,
    heap: Tensor,
) -> None:
    problem = _problem(
        launch, query_points, query_offsets, reference_points, reference_offsets, clouds, grid, radius, radii
    )
    width = LANES if query_points.is_cuda else 1
    kernel = nearest_kernel(query_points.dtype, width, k <= LANES)
    launch(kernel, (rows.shape[0], width), *problem, TopK(rows, heap), counts, block_dim=BLOCK)


class Rows(NamedTuple):
    """Where all neighbours go; in kernels :class:`RowsStruct`."""

    row_splits: Tensor  # (Q + 1,) int64: the count of each query, then their running sums
    rows: Tensor | None  # where they begin in memory; Warp's arrays end at 2^31
    capacity: int
    scratch: Tensor | None  # for the row that is cut off by the capacity


@wp.struct
class RowsStruct:
    """:class:`Rows` inside a kernel."""

    row_splits: wp.array(dtype=wp.int64)
    rows: wp.array(dtype=wp.int32)
    capacity: wp.int64
    scratch: wp.array(dtype=wp.int32)


def _all_specs(query_points: Tensor, capacity: int, **_: Any) -> dict:
    return {
        "row_splits": ((query_points.shape[0] + 1,), torch.int64),
        "rows": ((capacity,), torch.int32),
    }


@warp_op("pointproj::warp_all_within", outputs=_all_specs)
def _all_within(
    launch: Launch,
    query_points: Tensor,
    query_offsets: Tensor | None,
    reference_points: Tensor,
    reference_offsets: Tensor | None,
    clouds: int,
    grid: list[Tensor],
    radius: float,
    radii: Tensor | None,
    capacity: int,
    *,
    row_splits: Tensor,
    rows: Tensor,
) -> None:
    problem = _problem(
        launch, query_points, query_offsets, reference_points, reference_offsets, clouds, grid, radius, radii
    )
    width = LANES if query_points.is_cuda else 1
    shape = query_points.shape[0], width
    row_splits[:1].zero_()
    counts = Rows(row_splits, None, 0, None)
    launch(count_kernel(query_points.dtype, width), shape, *problem, counts, block_dim=BLOCK)
    row_splits.cumsum_(0)
    if capacity == 0:
        return
    rows.fill_(-1)
    found = Rows(row_splits, rows[:1], capacity, rows.new_empty(reference_points.shape[0]))
    launch(fill_kernel(query_points.dtype, width), shape, *problem, found, block_dim=BLOCK)


class Ball(NamedTuple):
    """Functions that say which query a thread has, and search its ball."""

    query_of: wp.Function  # (number, balls, searched) -> the query of these lanes: its packed row and point
    search: wp.Function  # (state, query, q, balls, searched, data) -> state
    largest_square_of: wp.Function  # (query, balls)
    sum_of: wp.Function  # (x) -> sum over all lanes of a query, of int32


def _ball(dtype: torch.dtype, group: Lanes, visitor: Visitor) -> Ball:
    _, vec3 = REALS[dtype]
    SearchedStruct, BallsStruct = searched_struct(dtype), balls_struct(dtype)
    State, Data = visitor.State, visitor.Data
    search_ball = ball_search(dtype, group, visitor)
    load_point, _, row_of = packed_point(dtype)
    item, take, sum_before, last = group.item, group.take, group.sum_before, group.count - 1

    @wp.func
    def query_of(number: int, balls: BallsStruct, searched: SearchedStruct):
        query = item(number)
        if balls.itself:
            point = load_point(searched.points, query)
            return row_of(point), vec3(point[0], point[1], point[2])
        return query, balls.points[query]

    @wp.func
    def search(state: State, query: int, q: vec3, balls: BallsStruct, searched: SearchedStruct, data: Data):
        radius = balls.radius
        if balls.radii:
            radius = balls.radii[query]
        if wp.isfinite(q):
            state = search_ball(state, q, searched, data, cloud_of(query, balls.batch), radius)
        return state

    @wp.func
    def largest_square_of(query: int, balls: BallsStruct):
        if balls.largest_squares:
            return balls.largest_squares[query]
        return balls.largest_square

    @wp.func
    def sum_of(x: int):
        return take(sum_before(x) + x, last)

    return Ball(query_of, search, largest_square_of, sum_of)


@functools.cache
def nearest_kernel(dtype: torch.dtype, width: int, few: bool) -> wp.Kernel:
    """The nearest within the radius, by ``width`` lanes a query; ``few``: not more than lanes of a warp."""
    SearchedStruct, BallsStruct = searched_struct(dtype), balls_struct(dtype)
    TopKStruct = top_k_struct(dtype, torch.int32)
    maker = in_heap if width == 1 else in_lanes if few else in_blocks
    visitor, begin, finish = maker(dtype)
    group = lanes(width)
    query_of, search, largest_square_of, sum_of = _ball(dtype, group, visitor)
    lane = group.lane

    @wp.kernel(**OPTIONS)
    def nearest(
        balls: BallsStruct, searched: SearchedStruct, found: TopKStruct, counts: wp.array(dtype=wp.int32)
    ):
        number, _ = wp.tid()
        query, q = query_of(number, balls, searched)
        state = begin(query, found, largest_square_of(query, balls))
        state = search(state, query, q, balls, searched, found)
        finish(state, query, found)
        count = sum_of(state.count)
        if lane() == 0:
            counts[query] = count

    return nearest


@functools.cache
def count_kernel(dtype: torch.dtype, width: int) -> wp.Kernel:
    """How many points are within the radius of query i, into ``row_splits[i + 1]``."""
    real, vec3 = REALS[dtype]
    sorted_points = wp.array2d(dtype=real)
    SearchedStruct, BallsStruct = searched_struct(dtype), balls_struct(dtype)
    squared_distance = squared_distance_function(dtype)
    load_point, _, _ = packed_point(dtype)

    @wp.struct
    class State:
        limit: real
        count: int

    @wp.func
    def visit(state: State, q: vec3, found: RowsStruct, points: sorted_points, at: int, exists: bool):
        if exists:
            within = squared_distance(q, load_point(points, at)) <= state.limit
            state.count += wp.where(within, 1, 0)
        return state

    group = lanes(width)
    query_of, search, largest_square_of, sum_of = _ball(dtype, group, Visitor(State, RowsStruct, visit))
    lane = group.lane

    @wp.kernel(**OPTIONS)
    def count_within(balls: BallsStruct, searched: SearchedStruct, found: RowsStruct):
        number, _ = wp.tid()
        query, q = query_of(number, balls, searched)
        state = search(State(largest_square_of(query, balls), 0), query, q, balls, searched, found)
        count = sum_of(state.count)
        if lane() == 0:
            found.row_splits[query + 1] = wp.int64(count)

    return count_within


@wp.func_native("return reinterpret_cast<unsigned long long>(rows.data + slot);")
def address_of(rows: wp.array(dtype=wp.int32), slot: wp.int64) -> wp.uint64: ...


@wp.func_native("reinterpret_cast<int*>(address)[i] = row;")
def write_row(address: wp.uint64, i: int, row: int): ...


_PUSH_ROW = """
    int* rows = reinterpret_cast<int*>(address);
#if defined(__CUDA_ARCH__)
    const unsigned present = __ballot_sync(0xffffffffu, exists);
    if (exists) rows[size + __popc(present & ((1u << (threadIdx.x & 31u)) - 1u))] = row;
    return size + __popc(present);
#else
    if (exists) rows[size] = row;
    return size + exists;
#endif
"""


@wp.func_native(_PUSH_ROW)
def push_row(address: wp.uint64, size: int, exists: bool, row: int) -> int:
    """Append to ``size`` rows, every lane one or none; returns how many there are then."""
    ...


@functools.cache
def fill_kernel(dtype: torch.dtype, width: int) -> wp.Kernel:
    """The rows of each query in ascending order, as far as there is room."""
    real, vec3 = REALS[dtype]
    sorted_points = wp.array2d(dtype=real)
    SearchedStruct, BallsStruct = searched_struct(dtype), balls_struct(dtype)
    squared_distance = squared_distance_function(dtype)
    load_point, _, row_of = packed_point(dtype)

    @wp.struct
    class State:
        limit: real
        size: int
        address: wp.uint64

    @wp.func
    def visit(state: State, q: vec3, found: RowsStruct, points: sorted_points, at: int, exists: bool):
        row = int(0)
        within = bool(False)
        if exists:
            point = load_point(points, at)
            row = row_of(point)
            within = squared_distance(q, point) <= state.limit
        state.size = push_row(state.address, state.size, within, row)
        return state

    group = lanes(width)
    query_of, search, largest_square_of, _ = _ball(dtype, group, Visitor(State, RowsStruct, visit))
    lane = group.lane

    @wp.kernel(**OPTIONS)
    def fill(balls: BallsStruct, searched: SearchedStruct, found: RowsStruct):
        number, _ = wp.tid()
        query, q = query_of(number, balls, searched)
        begin = found.row_splits[query]
        count = found.row_splits[query + 1] - begin
        if count == wp.int64(0) or begin >= found.capacity:
            return
        address = address_of(found.rows, begin)
        is_cut = begin + count > found.capacity
        if is_cut:
            address = address_of(found.scratch, wp.int64(0))
        state = search(State(largest_square_of(query, balls), 0, address), query, q, balls, searched, found)
        sort_rows(address, state.size)
        if is_cut:
            for i in range(lane(), int(found.capacity - begin), width):
                write_row(address_of(found.rows, begin), i, found.scratch[i])

    return fill
