"""How a search keeps the k nearest of the points that it meets, ties by the lower index.

Each maker returns a :class:`~pointproj.ops.backends.warp.traversal.Visitor`, ``begin(query, data) -> state``
and ``finish(state, query, data, missing)``, which writes the neighbours' rows and distances, nearest first;
``missing`` is the distance where there is none.
"""

import functools
from typing import Any, NamedTuple

import torch
import warp as wp
from torch import Tensor

from pointproj.ops.backends.warp.common import REALS, packed_point
from pointproj.ops.backends.warp.lanes import bit_count, lanes
from pointproj.ops.backends.warp.traversal import Visitor

NO_ROW = 2**31 - 1  # after every row there can be


class TopK(NamedTuple):
    """Where the neighbours of each query go; in kernels :func:`top_k_struct`."""

    rows: Tensor  # (Q, k) int32 or int64
    distances: Tensor  # (Q, k), or (0, k): not wanted. While :func:`in_memory` searches, a heap of squares


@functools.cache
def top_k_struct(dtype: torch.dtype, indices: torch.dtype) -> Any:
    """:class:`TopK` inside a kernel."""
    real, _ = REALS[dtype]
    integer = wp.dtype_from_torch(indices)

    @wp.struct
    class TopKStruct:
        rows: wp.array2d(dtype=integer)
        distances: wp.array2d(dtype=real)

    return TopKStruct


@functools.cache
def _distance_of(dtype: torch.dtype) -> wp.Function:
    real, _ = REALS[dtype]

    @wp.func
    def distance_of(squared: real, row: int, missing: real):
        return wp.where(row < 0, missing, wp.sqrt(squared))

    return distance_of


@functools.cache
def squared_distance_function(dtype: torch.dtype) -> wp.Function:
    real, vec3 = REALS[dtype]
    vec4 = wp.types.vector(length=4, dtype=real)

    @wp.func
    def squared_distance(p: vec3, q: vec4):
        """Rounded in the order of :func:`pointproj.ops.reference.squared_distances`."""
        dx = p[0] - q[0]
        dy = p[1] - q[1]
        dz = p[2] - q[2]
        return dx * dx + dy * dy + dz * dz

    return squared_distance


@functools.cache
def _comes_before(dtype: torch.dtype) -> wp.Function:
    real, _ = REALS[dtype]

    @wp.func
    def comes_before(squared: real, row: int, other: real, other_row: int):
        """Whether a neighbour comes before another in the result."""
        return squared < other or (squared == other and row < other_row)

    return comes_before


def in_registers(dtype: torch.dtype, k: int, indices: torch.dtype) -> tuple:
    """Up to a few dozen neighbours: a thread keeps them sorted."""
    real, vec3 = REALS[dtype]
    vec4 = wp.types.vector(length=4, dtype=real)
    Data, integer, distance_of = (
        top_k_struct(dtype, indices),
        wp.dtype_from_torch(indices),
        _distance_of(dtype),
    )
    squared_distance = squared_distance_function(dtype)
    comes_before = _comes_before(dtype)
    _, _, row_of = packed_point(dtype)
    Distances, Rows = wp.types.vector(length=k, dtype=real), wp.types.vector(length=k, dtype=wp.int32)
    last = k - 1

    @wp.struct
    class State:
        squared: Distances  # ascending
        rows: Rows
        effort: int
        gave_up: bool

    @wp.func
    def begin(query: int, data: Data):
        state = State()
        for i in range(k):
            state.squared[i] = real(wp.inf)
            state.rows[i] = -1
        return state

    @wp.func
    def bound(state: State, data: Data):
        return state.squared[last]

    @wp.func
    def visit(state: State, q: vec3, data: Data, point: vec4):
        squared = squared_distance(q, point)
        if squared <= state.squared[last] and squared < real(wp.inf):
            row = row_of(point)
            # Those behind the newcomer move up. No comparison waits for another: all are with the old list.
            moves = comes_before(squared, row, state.squared[last], state.rows[last])
            for i in range(last, 0, -1):
                next_moves = comes_before(squared, row, state.squared[i - 1], state.rows[i - 1])
                if moves:
                    state.squared[i] = wp.where(next_moves, state.squared[i - 1], squared)
                    state.rows[i] = wp.where(next_moves, state.rows[i - 1], row)
                moves = next_moves
            if moves:
                state.squared[0] = squared
                state.rows[0] = row
        return state

    @wp.func
    def finish(state: State, query: int, data: Data, missing: real):
        for i in range(k):
            data.rows[query, i] = integer(state.rows[i])
        if data.distances.shape[0] > 0:
            for i in range(k):
                data.distances[query, i] = distance_of(state.squared[i], state.rows[i], missing)

    return Visitor(State, Data, visit, bound, k, ahead=True), begin, finish


def across_lanes(dtype: torch.dtype, k: int, indices: torch.dtype) -> tuple:
    """The same for the 32 lanes of a warp: lane i keeps the i-th nearest."""
    real, vec3 = REALS[dtype]
    sorted_points = wp.array2d(dtype=real)
    Data, integer, distance_of = (
        top_k_struct(dtype, indices),
        wp.dtype_from_torch(indices),
        _distance_of(dtype),
    )
    squared_distance = squared_distance_function(dtype)
    load_point, _, row_of = packed_point(dtype)
    group = lanes(32)
    lane, take, previous = group.lane, group.take, group.previous
    ballot, minimum = group.ballot, group.minimum

    @wp.struct
    class State:
        squared: real
        row: int
        worst: real  # squared distance of the k-th
        effort: int
        gave_up: bool

    @wp.func
    def begin(query: int, data: Data):
        state = State()
        state.squared = real(wp.inf)
        state.row = NO_ROW
        state.worst = real(wp.inf)
        return state

    @wp.func
    def bound(state: State, data: Data):
        return state.worst

    @wp.func
    def visit(state: State, q: vec3, data: Data, points: sorted_points, at: int, exists: bool):
        squared = real(wp.inf)
        row = int(NO_ROW)
        if exists:
            point = load_point(points, at)
            squared = squared_distance(q, point)
            row = row_of(point)
        while ballot(squared <= state.worst and squared < real(wp.inf)) != 0:
            least = minimum(squared)
            first = minimum(wp.where(squared == least, row, NO_ROW))
            if squared == least and row == first:
                squared = real(wp.inf)
            before = state.squared < least or (state.squared == least and state.row < first)
            place = bit_count(ballot(before))
            squared_before = previous(state.squared)
            row_before = previous(state.row)
            if lane() == place:
                state.squared = least
                state.row = first
            elif lane() > place:  # moves up by one
                state.squared = squared_before
                state.row = row_before
            state.worst = take(state.squared, k - 1)
        return state

    @wp.func
    def finish(state: State, query: int, data: Data, missing: real):
        if lane() < k:
            row = wp.where(state.row == NO_ROW, -1, state.row)
            data.rows[query, lane()] = integer(row)
            if data.distances.shape[0] > 0:
                data.distances[query, lane()] = distance_of(state.squared, row, missing)

    return Visitor(State, Data, visit, bound, k), begin, finish


def in_memory(dtype: torch.dtype, wanted: int, indices: torch.dtype) -> tuple:
    """Any number of neighbours: a heap in the output rows, its farthest neighbour on top."""
    real, vec3 = REALS[dtype]
    sorted_points = wp.array2d(dtype=real)
    Data, integer, distance_of = (
        top_k_struct(dtype, indices),
        wp.dtype_from_torch(indices),
        _distance_of(dtype),
    )
    squared_distance = squared_distance_function(dtype)
    load_point, _, row_of = packed_point(dtype)

    @wp.struct
    class State:
        query: int
        effort: int
        gave_up: bool

    @wp.func
    def begin(query: int, data: Data):
        for i in range(data.rows.shape[1]):
            data.rows[query, i] = integer(-1)
            data.distances[query, i] = real(wp.inf)
        state = State()
        state.query = query
        return state

    @wp.func
    def bound(state: State, data: Data):
        return data.distances[state.query, 0]

    @wp.func
    def is_after(squared: real, row: int, other: real, other_row: int):
        """Whether a neighbour comes later than another in the result; places still empty come last."""
        later = wp.uint32(row) > wp.uint32(other_row)
        return squared > other or (squared == other and later)

    @wp.func
    def sink(data: Data, query: int, size: int, squared: real, row: int):
        """Put a neighbour on top of the first ``size`` places and restore the heap."""
        at = int(0)
        child = int(1)
        while child < size:
            if child + 1 < size and is_after(
                data.distances[query, child + 1],
                int(data.rows[query, child + 1]),
                data.distances[query, child],
                int(data.rows[query, child]),
            ):
                child += 1
            if is_after(data.distances[query, child], int(data.rows[query, child]), squared, row):
                data.distances[query, at] = data.distances[query, child]
                data.rows[query, at] = data.rows[query, child]
                at = child
                child = 2 * at + 1
            else:
                child = size
        data.distances[query, at] = squared
        data.rows[query, at] = integer(row)

    @wp.func
    def visit(state: State, q: vec3, data: Data, points: sorted_points, at: int, exists: bool):
        query = state.query
        point = load_point(points, at)
        squared = squared_distance(q, point)
        if squared <= data.distances[query, 0] and squared < real(wp.inf):
            row = row_of(point)
            if is_after(data.distances[query, 0], int(data.rows[query, 0]), squared, row):
                sink(data, query, data.rows.shape[1], squared, row)
        return state

    @wp.func
    def finish(state: State, query: int, data: Data, missing: real):
        """Heap sort: take the farthest off the top, fill the rows from behind."""
        last = data.rows.shape[1] - 1
        while last >= 0:
            squared = data.distances[query, 0]
            row = int(data.rows[query, 0])
            sink(data, query, last, data.distances[query, last], int(data.rows[query, last]))
            data.distances[query, last] = distance_of(squared, row, missing)
            data.rows[query, last] = integer(row)
            last -= 1

    return Visitor(State, Data, visit, bound, wanted), begin, finish
