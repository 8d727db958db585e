"""The k nearest of the points that a search visits, ties by the lower index.

Short lists are sorted in a thread's registers, long ones are a heap in memory.
"""

from typing import Any, NamedTuple

import torch
import warp as wp

from pointproj.ops.backends.warp.common import REALS, CoordinateRows, Longs, NumberRows, once, struct_of

# Longer lists are heaps. On a CPU both take as long for k = 24: 93 ms for 20,000 queries.
LONGEST_LIST = {"cuda": 64, "cpu": 16}


class Found(NamedTuple):
    """Where the neighbours of each query are written, and where the heaps are, with squared distances."""

    rows: NumberRows  # (Q, k) int32 or int64
    distances: CoordinateRows  # (Q, k); None or (0, k) if not wanted
    counts: Longs = None  # (Q,), of all within a radius


class TopK(NamedTuple):
    """The functions of a list."""

    State: Any
    begin: wp.Function  # (query, found) -> state
    limit: wp.Function  # (state, found) -> squared distance of the k-th, infinite if there are fewer
    insert: wp.Function  # (state, found, squared distance, row) -> state
    finish: wp.Function  # (state, query, found, missing): write the results, ``missing`` for no distance


def top_k(dtype: torch.dtype, k: int | None, indices: torch.dtype) -> TopK:
    """A list of k; if k is None, of any length in memory."""
    return _in_memory(dtype, indices) if k is None else _in_registers(dtype, k, indices)


@wp.func
def comes_before(squared: Any, row: int, other: Any, other_row: int):
    """Whether a neighbour comes before another in the result; empty places, with row -1, come last."""
    lower = wp.uint32(row) < wp.uint32(other_row)
    return squared < other or (squared == other and lower)


@wp.func
def distance_of(squared: Any, row: int, missing: Any):
    return wp.where(row < 0, missing, wp.sqrt(squared))


@once
def _in_registers(dtype: torch.dtype, k: int, indices: torch.dtype) -> TopK:
    real, *_ = REALS[dtype]
    FoundStruct, integer = struct_of(Found, dtype, indices), wp.dtype_from_torch(indices)
    Distances, Rows = wp.types.vector(length=k, dtype=real), wp.types.vector(length=k, dtype=wp.int32)
    last = k - 1

    @wp.struct
    class State:
        squared: Distances  # ascending
        rows: Rows

    @wp.func
    def begin(query: int, found: FoundStruct):
        state = State()
        for i in range(k):
            state.squared[i] = real(wp.inf)
            state.rows[i] = -1
        return state

    @wp.func
    def limit(state: State, found: FoundStruct):
        return state.squared[last]

    @wp.func
    def insert(state: State, found: FoundStruct, squared: real, row: int):
        # Those behind the new one move. All comparisons are with the old list, so none depends on another.
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
    def finish(state: State, query: int, found: FoundStruct, missing: real):
        for i in range(k):
            found.rows[query, i] = integer(state.rows[i])
        if found.distances.shape[0] > 0:
            for i in range(k):
                found.distances[query, i] = distance_of(state.squared[i], state.rows[i], missing)

    return TopK(State, begin, limit, insert, finish)


@once
def _heap(dtype: torch.dtype, indices: torch.dtype) -> tuple[wp.Function, wp.Function]:
    """Functions of a heap in the output rows, its farthest neighbour on top."""
    real, *_ = REALS[dtype]
    FoundStruct, integer = struct_of(Found, dtype, indices), wp.dtype_from_torch(indices)

    @wp.func
    def place(found: FoundStruct, query: int, at: int):
        return found.distances[query, at], int(found.rows[query, at])

    @wp.func
    def sink(found: FoundStruct, query: int, size: int, squared: real, row: int):
        """Replace the top of the first ``size`` places by a neighbour, and restore the heap."""
        at = int(0)
        child = int(1)
        while child < size:
            far, far_row = place(found, query, child)
            if child + 1 < size:
                other, other_row = place(found, query, child + 1)
                if comes_before(far, far_row, other, other_row):
                    child += 1
                    far = other
                    far_row = other_row
            if comes_before(squared, row, far, far_row):
                found.distances[query, at] = far
                found.rows[query, at] = integer(far_row)
                at = child
                child = 2 * at + 1
            else:
                child = size
        found.distances[query, at] = squared
        found.rows[query, at] = integer(row)

    return place, sink


@once
def _in_memory(dtype: torch.dtype, indices: torch.dtype) -> TopK:
    real, *_ = REALS[dtype]
    FoundStruct, integer = struct_of(Found, dtype, indices), wp.dtype_from_torch(indices)
    place, sink = _heap(dtype, indices)

    @wp.struct
    class State:
        query: int

    @wp.func
    def begin(query: int, found: FoundStruct):
        for i in range(found.rows.shape[1]):
            found.rows[query, i] = integer(-1)
            found.distances[query, i] = real(wp.inf)
        return State(query)

    @wp.func
    def limit(state: State, found: FoundStruct):
        return found.distances[state.query, 0]

    @wp.func
    def insert(state: State, found: FoundStruct, squared: real, row: int):
        top, top_row = place(found, state.query, 0)
        if comes_before(squared, row, top, top_row):
            sink(found, state.query, found.rows.shape[1], squared, row)
        return state

    @wp.func
    def finish(state: State, query: int, found: FoundStruct, missing: real):
        """Heap sort: remove the farthest from the top, and fill the rows from the end."""
        last = found.rows.shape[1] - 1
        while last >= 0:
            squared, row = place(found, query, 0)
            moved, moved_row = place(found, query, last)
            sink(found, query, last, moved, moved_row)
            found.distances[query, last] = distance_of(squared, row, missing)
            found.rows[query, last] = integer(row)
            last -= 1

    return TopK(State, begin, limit, insert, finish)
