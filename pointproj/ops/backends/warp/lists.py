"""Lists of the reference points within a radius of each query: the nearest of them, or all.

For the nearest, one thread searches for each query, and counts all within the radius. A list of all takes two
searches by all lanes of a query: the first counts, the second writes at the prefix sums of the counts. Each
query's part is sorted in place, so the result does not depend on the order in which points are visited.
"""

from typing import Any, NamedTuple

import torch
import warp as wp
from torch import Tensor

from pointproj.ops.backends.warp import common
from pointproj.ops.backends.warp.cell_list import NO_TABLES, CellList, may_be_graded, readable
from pointproj.ops.backends.warp.cell_list_build import new_cell_list
from pointproj.ops.backends.warp.common import OPTIONS, REALS, Longs, Points, once, struct_of
from pointproj.ops.backends.warp.knn_search import BLOCK, in_order_of, list_of, search_kernel, sets_of
from pointproj.ops.backends.warp.lanes import lanes, lanes_on
from pointproj.ops.backends.warp.top_k import Found
from pointproj.ops.backends.warp.traversal import Ball, Visitor, ball_search, new_ball
from pointproj.ops.bridge.flops import count_search
from pointproj.ops.bridge.warp_op import Launch, warp_op
from pointproj.ops.specification.clouds import Clouds
from pointproj.ops.specification.records import Tables, fields_apart

BLOCKS = 6  # that a multiprocessor runs at the same time, for short lists


def radius_search(
    clouds: Clouds, tables: Tables | None, radius: float | Tensor, k: int, knn_tables: Tables | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Distances and rows of the k nearest within the radius, ``(Q, k)``, and counts, ``(Q,)``."""
    distances, rows, counts = _nearest_within(*_arguments(clouds, tables, radius), k)
    return distances, rows, counts.clamp(max=k + 1)


def radius_list(
    clouds: Clouds, tables: Tables | None, radius: float | Tensor, capacity: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Where each query's neighbours begin, ``(Q + 1,)``, their rows and distances, ``(capacity,)``."""
    return _all_within(*_arguments(clouds, tables, radius), capacity)


def _arguments(clouds: Clouds, tables: Tables | None, radius: float | Tensor) -> tuple:
    radii = (0.0, radius) if isinstance(radius, Tensor) else (float(radius), None)
    return *clouds.detached(), *(tables or NO_TABLES), *radii


def _queries_and_ball(
    launch: Launch, clouds: Clouds, cells: CellList, radius: float, radii: Tensor | None
) -> tuple[Points, Ball]:
    """The queries, and what they search; without tables this builds them, to save a call of an operator."""
    queries, references = sets_of(clouds)
    if cells.frames is None:
        largest = radii.amax().view(1) if radii is not None and queries.batch.rows else None
        cells = new_cell_list(launch, references, radius, largest)
    cells = readable(cells)
    return in_order_of(cells, queries, references), new_ball(cells, radius, radii)


def _nearest_specs(query_points: Tensor, k: int, **_: Any) -> dict:
    count = query_points.shape[0]
    return {
        "distances": ((count, k), query_points.dtype),
        "rows": ((count, k), torch.int64),
        "counts": ((count,), torch.int64),
    }


@warp_op("pointproj::warp_nearest_within", outputs=_nearest_specs)
@fields_apart
def _nearest_within(
    launch: Launch,
    clouds: Clouds,
    cells: CellList,
    radius: float,
    radii: Tensor | None,
    k: int,
    *,
    distances: Tensor,
    rows: Tensor,
    counts: Tensor,
) -> None:
    searched, found = _queries_and_ball(launch, clouds, cells, radius, radii), Found(rows, distances, counts)
    graded = may_be_graded(searched[1].cells)
    kernel = search_kernel(Ball, distances.dtype, *list_of(found), BLOCKS, graded)
    launch(kernel, rows.shape[0], *searched, found, block_dim=BLOCK)


count_search("warp_nearest_within", _nearest_within.parameters, "k")


def _all_specs(query_points: Tensor, capacity: int, **_: Any) -> dict:
    return {
        "row_splits": ((query_points.shape[0] + 1,), torch.int64),
        "rows": ((capacity,), torch.int64),
        "distances": ((capacity,), query_points.dtype),
    }


@warp_op("pointproj::warp_all_within", outputs=_all_specs)
@fields_apart
def _all_within(
    launch: Launch,
    clouds: Clouds,
    cells: CellList,
    radius: float,
    radii: Tensor | None,
    capacity: int,
    *,
    row_splits: Tensor,
    rows: Tensor,
    distances: Tensor,
) -> None:
    searched = _queries_and_ball(launch, clouds, cells, radius, radii)
    count = lanes_on(rows.device.type)
    shape = searched[0].batch.rows, count
    for filled, value in ((row_splits[:1], 0), (rows, -1), (distances, torch.inf)):
        filled.fill_(value)
    count_within, fill = list_kernels(distances.dtype, count, may_be_graded(searched[1].cells))
    points = clouds.reference_points
    scratch = rows.new_empty(len(points))
    parts = Parts(points, row_splits, rows[:1], distances[:1], capacity, scratch)
    launch(count_within, shape, *searched, parts, block_dim=BLOCK)
    row_splits.cumsum_(0)
    if capacity:
        launch(fill, shape, *searched, parts, block_dim=BLOCK)


class Parts(NamedTuple):
    """Where all neighbours are written."""

    points: common.Vectors  # (N, 3), those that are searched
    row_splits: Longs  # (Q + 1,)
    rows: Longs  # (1,) the first of (capacity,), which may be longer than an array of Warp
    distances: common.Coordinates  # likewise
    capacity: common.Long
    scratch: Longs  # (N,): rows of the query whose list the capacity truncates


# Places in lists are numbers of 64 bits, with which Warp's arrays cannot be indexed.
@wp.func_native("return reinterpret_cast<unsigned long long>(rows.data + place);")
def address_of(rows: wp.array(dtype=wp.int64), place: wp.int64) -> wp.uint64: ...


@wp.func_native("return static_cast<int>(reinterpret_cast<const long long*>(address)[i]);")
def row_at(address: wp.uint64, i: int) -> int: ...


@wp.func_native("reinterpret_cast<long long*>(address)[i] = row;")
def store_row(address: wp.uint64, i: int, row: int): ...


@once
def sort_function(count: int) -> wp.Function:
    group = lanes(count)

    @wp.func
    def sort_rows(address: wp.uint64, size: int):
        """Sort ``size`` rows in ascending order: all lanes together, by a bitonic network in memory.

        Every exchange writes the smaller row in front. That holds also for the first step of a merge, which
        compares the first row with the last, the second with the last but one, and so on. So places behind
        the end need no memory: they would contain the largest rows, and never move.
        """
        length = int(2)
        while group.any(length / 2 < size):
            bit = length / 2
            while bit > 0:
                mask = wp.where(bit == length / 2, length - 1, bit)
                group.sync()
                i = int(group.lane())
                at = 2 * i - i % bit
                while at < size:
                    other = at ^ mask
                    if other < size:
                        low = row_at(address, at)
                        high = row_at(address, other)
                        if high < low:
                            store_row(address, at, high)
                            store_row(address, other, low)
                    i += count
                    at = 2 * i - i % bit
                bit = bit / 2
            length *= 2
        group.sync()

    return sort_rows


@once
def _list_search(dtype: torch.dtype, count: int, graded: bool) -> tuple[Any, wp.Function]:
    """State and function of a search that counts neighbours, and writes their rows if it has an address."""
    real, vec3, vec4 = REALS[dtype]
    PartsStruct, group = struct_of(Parts, dtype), lanes(count)

    @wp.struct
    class State:
        size: int
        address: wp.uint64  # of the rows; 0 if they are only counted

    @wp.func
    def visit(state: State, parts: PartsStruct, q: vec3, point: vec4, squared: real, exists: bool):
        present = group.ballot(exists)
        if exists and state.address != wp.uint64(0):
            store_row(state.address, state.size + group.bits_before(present), common.row_of(point))
        state.size += group.bit_count(present)
        return state

    return State, ball_search(dtype, group, Visitor(State, PartsStruct, visit), graded)


@once
def list_kernels(dtype: torch.dtype, count: int, graded: bool) -> tuple[wp.Kernel, wp.Kernel]:
    """The first counts the neighbours of each query, the second writes them up to the capacity."""
    real, vec3, _ = REALS[dtype]
    PointsStruct, BallStruct, PartsStruct = (struct_of(record, dtype) for record in (Points, Ball, Parts))
    group, (State, search), sort_rows = lanes(count), _list_search(dtype, count, graded), sort_function(count)

    @wp.func_native("distances.data[place] = distance;")
    def store_distance(distances: wp.array(dtype=real), place: wp.int64, distance: real): ...

    @wp.kernel(**OPTIONS)
    def count_within(queries: PointsStruct, ball: BallStruct, parts: PartsStruct):
        """Launched over queries and lanes; writes the counts to ``row_splits[1:]``."""
        number, _ = wp.tid()
        query, q = common.take(queries, group.item(number))
        state = State(0, wp.uint64(0))
        state = search(state, query, q, common.cloud_of(query, queries.batch), ball, parts)
        if group.lane() == 0:
            parts.row_splits[query + 1] = wp.int64(state.size)

    @wp.kernel(**OPTIONS)
    def fill(queries: PointsStruct, ball: BallStruct, parts: PartsStruct):
        """Launched over queries and lanes; fills ``rows``, in ascending order, and ``distances``."""
        number, _ = wp.tid()
        query, q = common.take(queries, group.item(number))
        begin = parts.row_splits[query]
        size = int(parts.row_splits[query + 1] - begin)
        if begin >= parts.capacity:
            size = 0
        if size == 0:
            q = vec3(real(wp.nan))  # such a point has no neighbours
        address = address_of(parts.rows, begin)
        kept = int(wp.min(parts.capacity - begin, wp.int64(size)))
        if kept < size:
            address = address_of(parts.scratch, wp.int64(0))
        state = State(0, address)
        search(state, query, q, common.cloud_of(query, queries.batch), ball, parts)
        sort_rows(address, size)
        for i in range(group.lane(), kept, count):
            row = row_at(address, i)
            if kept < size:
                store_row(address_of(parts.rows, begin), i, row)
            squared = common.squared_distance(q, parts.points[row], q[0])
            store_distance(parts.distances, begin + wp.int64(i), wp.sqrt(squared))

    return count_within, fill
