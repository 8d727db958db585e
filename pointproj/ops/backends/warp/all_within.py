"""All reference points within a radius of each query, one query's after the other's.

A search of the hash grid counts them, and keeps the rows of each query for which there is room; when the sums
of the counts say where each query's part begins, it is filled with those, or by a second search if they were
more. A part is sorted in place, in registers up to 128 neighbours, so that nothing depends on the order in
which points are met.
"""

import functools
from typing import Any, NamedTuple

import torch
import warp as wp
from torch import Tensor

from pointproj.ops.backends.warp.common import OPTIONS, REALS, packed_point
from pointproj.ops.backends.warp.hash_grid import searched_struct
from pointproj.ops.backends.warp.lane_sort import sort_rows
from pointproj.ops.backends.warp.lanes import lanes
from pointproj.ops.backends.warp.neighbor_lists import BLOCK, arguments, ball_of, balls_struct, problem_of
from pointproj.ops.backends.warp.top_k import squared_distance_function
from pointproj.ops.backends.warp.top_k_within import LANES
from pointproj.ops.backends.warp.traversal import Visitor
from pointproj.ops.bridge.warp_op import Launch, warp_op
from pointproj.ops.clouds import Clouds
from pointproj.ops.registry import Tables

BLOCKS = 8  # of a processor at a time: few queries need the registers of a second search


def all_within(
    clouds: Clouds, grid: Tables | None, radius: float | Tensor, capacity: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Where each query's neighbours begin, ``(Q + 1,)``, their rows and distances, ``(capacity,)``."""
    return _all_within(*arguments(clouds, grid, radius), capacity)


class Found(NamedTuple):
    """Where all neighbours go; in kernels :func:`found_struct`."""

    points: Tensor | None  # those that are searched, (N, 3)
    row_splits: Tensor  # (Q + 1,) int64: the count of each query, then their running sums
    rows: Tensor | None  # int64: where they begin in memory; Warp's arrays end at 2^31
    distances: Tensor | None  # likewise
    capacity: int
    scratch: Tensor | None  # for the rows of the query that are cut off by the capacity
    kept: Tensor | None  # int32, where they begin in memory: ``room`` rows of each query
    room: int


@functools.cache
def found_struct(dtype: torch.dtype) -> Any:
    """:class:`Found` inside a kernel."""
    real, vec3 = REALS[dtype]

    @wp.struct
    class FoundStruct:
        points: wp.array(dtype=vec3)
        row_splits: wp.array(dtype=wp.int64)
        rows: wp.array(dtype=wp.int64)
        distances: wp.array(dtype=real)
        capacity: wp.int64
        scratch: wp.array(dtype=wp.int64)
        kept: wp.array(dtype=wp.int32)
        room: int

    return FoundStruct


def _all_specs(query_points: Tensor, capacity: int, **_: Any) -> dict:
    return {
        "row_splits": ((query_points.shape[0] + 1,), torch.int64),
        "rows": ((capacity,), torch.int64),
        "distances": ((capacity,), query_points.dtype),
    }


@warp_op("pointproj::warp_all_within", outputs=_all_specs, replayable=True)
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
    distances: Tensor,
) -> None:
    problem = problem_of(
        launch, query_points, query_offsets, reference_points, reference_offsets, clouds, grid, radius, radii
    )
    width = LANES if query_points.is_cuda else 1
    shape = query_points.shape[0], width
    if not shape[0]:
        for filled, value in ((row_splits, 0), (rows, -1), (distances, torch.inf)):
            filled.fill_(value)
        return
    # Most queries have little more than the mean.
    room = min(5 * capacity // (4 * shape[0]), reference_points.shape[0])
    kept = torch.empty(shape[0] * room, dtype=torch.int32, device=rows.device) if room else None
    keeps = None if kept is None else kept[:1], room
    counts = Found(None, row_splits, None, None, 0, None, *keeps)
    launch(count_kernel(query_points.dtype, width), shape, *problem, counts, block_dim=BLOCK)
    row_splits.cumsum_(0)
    if capacity == 0:
        return
    scratch = rows.new_empty(reference_points.shape[0])
    found = Found(reference_points, row_splits, rows[:1], distances[:1], capacity, scratch, *keeps)
    launch(fill_kernel(query_points.dtype, width), shape, *problem, found, block_dim=BLOCK)


@functools.cache
def count_kernel(dtype: torch.dtype, width: int) -> wp.Kernel:
    """How many points are within the radius of query i, into ``row_splits[i + 1]``; their rows are kept."""
    real, vec3 = REALS[dtype]
    sorted_points = wp.array2d(dtype=real)
    SearchedStruct, BallsStruct, FoundStruct = (
        searched_struct(dtype),
        balls_struct(dtype),
        found_struct(dtype),
    )
    squared_distance = squared_distance_function(dtype)
    load_point, _, row_of = packed_point(dtype)

    @wp.struct
    class State:
        limit: real
        count: int
        address: wp.uint64

    @wp.func
    def visit(state: State, q: vec3, found: FoundStruct, points: sorted_points, at: int, exists: bool):
        row = int(0)
        within = bool(False)
        if exists:
            point = load_point(points, at)
            row = row_of(point)
            within = squared_distance(q, point) <= state.limit
        state.count = keep_row(state.address, state.count, found.room, within, row)
        return state

    group = lanes(width)
    query_of, search, largest_square_of, _ = ball_of(dtype, group, Visitor(State, FoundStruct, visit))
    lane, item = group.lane, group.item

    @wp.kernel(**OPTIONS)
    def count_within(balls: BallsStruct, searched: SearchedStruct, found: FoundStruct):
        number, _ = wp.tid()
        query, q = query_of(number, balls, searched)
        state = State(largest_square_of(query, balls), 0, kept_of(found.kept, found.room, item(number)))
        state = search(state, query, q, balls, searched, found)
        if lane() == 0:
            found.row_splits[query + 1] = wp.int64(state.count)
            if number == 0:
                found.row_splits[0] = wp.int64(0)

    return count_within


@wp.func_native("return reinterpret_cast<unsigned long long>(rows.data + slot);")
def address_of(rows: wp.array(dtype=wp.int64), slot: wp.int64) -> wp.uint64: ...


@wp.func_native("return static_cast<int>(reinterpret_cast<const long long*>(address)[i]);")
def row_at(address: wp.uint64, i: int) -> int: ...


@functools.cache
def write_function(dtype: torch.dtype) -> wp.Function:
    """Write to a slot of an array whose beginning alone Warp knows."""
    Number = wp.dtype_from_torch(dtype)

    @wp.func_native("numbers.data[slot] = number;")
    def write_at(numbers: wp.array(dtype=Number), slot: wp.int64, number: Number): ...

    return write_at


_PUSH_ROW = """
    {integer}* rows = reinterpret_cast<{integer}*>(address);
#if defined(__CUDA_ARCH__)
    const unsigned present = __ballot_sync(0xffffffffu, exists);
    const int at = size + __popc(present & ((1u << (threadIdx.x & 31u)) - 1u)), found = __popc(present);
#else
    const int at = size, found = exists;
#endif
    if (exists{condition}) rows[at] = row;
    return size + found;
"""


@wp.func_native(_PUSH_ROW.format(integer="long long", condition=""))
def push_row(address: wp.uint64, size: int, exists: bool, row: int) -> int:
    """Append to ``size`` rows, every lane one or none; returns how many there are then."""
    ...


@wp.func_native(_PUSH_ROW.format(integer="int", condition=" && at < room"))
def keep_row(address: wp.uint64, size: int, room: int, exists: bool, row: int) -> int:
    """The same as far as there is room for int32."""
    ...


@wp.func_native(
    "return reinterpret_cast<unsigned long long>(kept.data + static_cast<long long>(number) * room);"
)
def kept_of(kept: wp.array(dtype=wp.int32), room: int, number: int) -> wp.uint64: ...


_COPY_KEPT = """
    const int* rows = reinterpret_cast<const int*>(kept);
    long long* to = reinterpret_cast<long long*>(address);
#if defined(__CUDA_ARCH__)
    for (int i = threadIdx.x & 31; i < count; i += 32) to[i] = rows[i];
#else
    for (int i = 0; i < count; ++i) to[i] = rows[i];
#endif
"""


@wp.func_native(_COPY_KEPT)
def copy_kept(kept: wp.uint64, address: wp.uint64, count: int): ...


@functools.cache
def fill_kernel(dtype: torch.dtype, width: int) -> wp.Kernel:
    """The rows of each query in ascending order and their distances, as far as there is room.

    Behind the last of them stands what there is where there is no neighbour.
    """
    real, vec3 = REALS[dtype]
    sorted_points = wp.array2d(dtype=real)
    SearchedStruct, BallsStruct, FoundStruct = (
        searched_struct(dtype),
        balls_struct(dtype),
        found_struct(dtype),
    )
    squared_distance = squared_distance_function(dtype)
    load_point, _, row_of = packed_point(dtype)
    write_row, write_distance = write_function(torch.int64), write_function(dtype)
    vec4 = wp.types.vector(length=4, dtype=real)

    @wp.struct
    class State:
        limit: real
        size: int
        address: wp.uint64

    @wp.func
    def visit(state: State, q: vec3, found: FoundStruct, points: sorted_points, at: int, exists: bool):
        row = int(0)
        within = bool(False)
        if exists:
            point = load_point(points, at)
            row = row_of(point)
            within = squared_distance(q, point) <= state.limit
        state.size = push_row(state.address, state.size, within, row)
        return state

    group = lanes(width)
    query_of, search, largest_square_of, _ = ball_of(dtype, group, Visitor(State, FoundStruct, visit))
    lane, item = group.lane, group.item

    @wp.func
    def fill_rest(number: int, found: FoundStruct):
        queries = found.row_splits.shape[0] - 1
        slot = found.row_splits[queries] + wp.int64(number) * wp.int64(width) + wp.int64(lane())
        while slot < found.capacity:
            write_row(found.rows, slot, wp.int64(-1))
            write_distance(found.distances, slot, real(wp.inf))
            slot += wp.int64(queries) * wp.int64(width)

    @wp.kernel(**OPTIONS, launch_bounds=(BLOCK, BLOCKS))
    def fill(balls: BallsStruct, searched: SearchedStruct, found: FoundStruct):
        number, _ = wp.tid()
        fill_rest(item(number), found)
        query, q = query_of(number, balls, searched)
        begin = found.row_splits[query]
        count = found.row_splits[query + 1] - begin
        if count == wp.int64(0) or begin >= found.capacity:
            return
        address = address_of(found.rows, begin)
        is_cut = begin + count > found.capacity
        if is_cut:
            address = address_of(found.scratch, wp.int64(0))
        if count <= wp.int64(found.room):
            copy_kept(kept_of(found.kept, found.room, item(number)), address, int(count))
        else:
            state = State(largest_square_of(query, balls), 0, address)
            state = search(state, query, q, balls, searched, found)
        sort_rows(address, int(count))
        for i in range(lane(), int(wp.min(count, found.capacity - begin)), width):
            row = row_at(address, i)
            point = found.points[row]
            slot = begin + wp.int64(i)
            squared = squared_distance(q, vec4(point[0], point[1], point[2], real(0.0)))
            write_distance(found.distances, slot, wp.sqrt(squared))
            if is_cut:
                write_row(found.rows, slot, wp.int64(row))

    return fill
