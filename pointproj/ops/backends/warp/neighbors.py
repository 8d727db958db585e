"""Where sums get their neighbours from: a search within a radius, lists of them, or those lists inverted.

On a GPU neighbours wait in a queue in shared memory until every lane of a point has one: then all lanes add
them up together. On a CPU each is added as it comes.
"""

import os
from typing import Any, NamedTuple

import torch
import warp as wp
from torch import Tensor

from pointproj.ops.backends.warp.cell_list_build import finish_counting
from pointproj.ops.backends.warp.common import OPTIONS, REALS, once, packed_point, squared_distance
from pointproj.ops.backends.warp.lanes import WARP, Lanes
from pointproj.ops.backends.warp.traversal import Ball, Visitor, ball_search, ball_struct, square_function
from pointproj.ops.bridge.warp_op import Launch

BLOCK = int(os.environ.get("PP_BLOCK", "256"))  # threads that share memory


class Lists(NamedTuple):
    """The neighbours of each point: a row of the table, or a part of its only row."""

    others: Tensor  # (n, 3) positions of the neighbours
    rows: Tensor  # (points, k) or (1, pairs) int32: theirs, -1 for none
    start: Tensor | None  # (points + 2,) int32: where each point's part begins


Source = Ball | Lists


def invert(launch: Launch, query_points: Tensor, neighbor_indices: Tensor, references: int) -> Lists:
    """The queries that each reference point is a neighbour of, from lists (Q, k)."""
    rows = neighbor_indices.view(-1)
    if len(rows) >= 2**31:
        raise ValueError(f"gradients over lists are for less than 2^31 pairs of points; got {len(rows)}")
    start = torch.zeros(references + 2, dtype=torch.int32, device=rows.device)
    placed, queries = rows.new_empty(len(rows), 2), rows.new_empty(1, len(rows))
    count, scatter = _inverting_kernels()
    launch(count, len(rows), rows, start, placed)
    finish_counting(placed, start)
    launch(scatter, len(rows), placed, start, neighbor_indices.shape[1], queries)
    return Lists(query_points, queries, start)


@once
def _inverting_kernels() -> tuple[wp.Kernel, wp.Kernel]:
    integers, table = wp.array(dtype=wp.int32), wp.array2d(dtype=wp.int32)

    @wp.kernel(**OPTIONS)
    def count(rows: integers, start: integers, placed: table):
        """Launched over the pairs of points; fills ``placed``, counts in ``start`` behind each reference."""
        pair = wp.tid()
        row = rows[pair]
        if row < 0:
            row = start.shape[0] - 2
        placed[pair, 0] = row
        placed[pair, 1] = wp.atomic_add(start, row + 1, 1)

    @wp.kernel(**OPTIONS)
    def scatter(placed: table, start: integers, k: int, queries: table):
        """Launched over the pairs of points; fills ``queries``."""
        pair = wp.tid()
        queries[0, start[placed[pair, 0]] + placed[pair, 1]] = pair / k

    return count, scatter


class Queue(NamedTuple):
    """Neighbours that wait in shared memory, of which Warp has arrays for whole blocks alone."""

    reserve: wp.Function  # () -> address of this warp's queue, which holds two for each lane
    push: wp.Function  # (address, size, exists, number, row) -> size; every lane may bring one
    number_at: wp.Function  # (address, i)
    row_at: wp.Function  # (address, i)


_ENTRY = "struct Entry {{ {real} number; int row; }};"
_RESERVE = """
    __shared__ Entry all[{block} * 2];
    return reinterpret_cast<unsigned long long>(all + threadIdx.x / 32 * 64);
"""
_PUSH = """
    const unsigned present = __ballot_sync(0xffffffffu, exists);
    __syncwarp();
    if (exists) queue[size + __popc(present & ((1u << (threadIdx.x & 31u)) - 1u))] = {{number, row}};
    __syncwarp();
    return size + __popc(present);
"""


@once
def _queue(sums: torch.dtype) -> Queue:
    real, _ = REALS[sums]
    names = {"real": "float" if sums == torch.float32 else "double", "block": BLOCK}
    entry = _ENTRY.format(**names)
    queue = entry + "Entry* queue = reinterpret_cast<Entry*>(address);"

    @wp.func_native(entry + _RESERVE.format(**names))
    def reserve() -> wp.uint64: ...

    @wp.func_native(queue + _PUSH.format(**names))
    def push(address: wp.uint64, size: int, exists: bool, number: real, row: int) -> int: ...

    @wp.func_native(queue + "return queue[i].number;")
    def number_at(address: wp.uint64, i: int) -> real: ...

    @wp.func_native(queue + "return queue[i].row;")
    def row_at(address: wp.uint64, i: int) -> int: ...

    return Queue(reserve, push, number_at, row_at)


class Adder(NamedTuple):
    """What a kernel does with the neighbours of a point."""

    State: Any  # struct with ``waiting`` (int) and ``square`` (real of positions), which are the source's
    Problem: Any  # struct
    add: (
        wp.Function
    )  # (state, problem, row, squared) -> state; the first lanes bring one each, row -1 is none


class Meeting(NamedTuple):
    """How a kernel goes through the neighbours of its points."""

    struct: Any  # of the source
    each_neighbor: wp.Function  # (state, own row, q, cloud, source, problem) -> state, with all of them added


def meeting(
    source: type[Source], positions: torch.dtype, sums: torch.dtype, group: Lanes, adder: Adder
) -> Meeting:
    """For a kind of source."""
    make = _meet_ball if source is Ball else _meet_lists
    return make(positions, sums, group, adder, *_waiting(sums, group, adder))


def _waiting(sums: torch.dtype, group: Lanes, adder: Adder) -> tuple[wp.Function, wp.Function]:
    """``meet(state, problem, exists, row, squared)`` and ``finish(state, problem)``, which add what is met."""
    real, _ = REALS[sums]
    State, Problem, add = adder
    lane = group.lane

    @wp.func
    def meet_one(state: State, problem: Problem, exists: bool, row: int, squared: real):
        if exists:
            state = add(state, problem, row, squared)
        return state

    @wp.func
    def nothing_waits(state: State, problem: Problem):
        return state

    if group.count == 1:
        return meet_one, nothing_waits
    reserve, push, number_at, row_at = _queue(sums)

    @wp.func
    def add_last(state: State, problem: Problem, size: int):
        """Those that came last, one for each of the first lanes."""
        state.waiting -= size
        row = int(-1)
        squared = real(0.0)
        if lane() < size:
            row = row_at(reserve(), state.waiting + lane())
            squared = number_at(reserve(), state.waiting + lane())
        return add(state, problem, row, squared)

    @wp.func
    def meet(state: State, problem: Problem, exists: bool, row: int, squared: real):
        state.waiting = push(reserve(), state.waiting, exists, squared, row)
        if state.waiting >= WARP:
            state = add_last(state, problem, WARP)
        return state

    @wp.func
    def finish(state: State, problem: Problem):
        if state.waiting > 0:
            state = add_last(state, problem, state.waiting)
        return state

    return meet, finish


def _meet_ball(
    positions: torch.dtype,
    sums: torch.dtype,
    group: Lanes,
    adder: Adder,
    meet: wp.Function,
    finish: wp.Function,
) -> Meeting:
    place, vec3 = REALS[positions]
    vec4 = wp.types.vector(length=4, dtype=place)
    State, Problem, _ = adder
    BallStruct, square_of = ball_struct(positions), square_function(positions)
    squared_of = squared_distance(positions, sums)
    _, _, row_of = packed_point(positions)

    @wp.func
    def visit(state: State, problem: Problem, q: vec3, point: vec4, squared: place, exists: bool):
        wide = squared_of(q, vec3(point[0], point[1], point[2]))
        return meet(state, problem, exists and squared <= state.square, row_of(point), wide)

    search = ball_search(positions, group, Visitor(State, Problem, visit))

    @wp.func
    def each_neighbor(state: State, own: int, q: vec3, cloud: int, ball: BallStruct, problem: Problem):
        state.square = square_of(ball, own)
        state = search(state, own, q, cloud, ball, problem)
        return finish(state, problem)

    return Meeting(BallStruct, each_neighbor)


def _meet_lists(
    positions: torch.dtype,
    sums: torch.dtype,
    group: Lanes,
    adder: Adder,
    meet: wp.Function,
    finish: wp.Function,
) -> Meeting:
    _, vec3 = REALS[positions]
    real, _ = REALS[sums]
    State, Problem, _ = adder
    squared_of = squared_distance(positions, sums)
    count, lane = group.count, group.lane

    @wp.struct
    class ListsStruct:
        others: wp.array(dtype=vec3)
        rows: wp.array2d(dtype=wp.int32)
        start: wp.array(dtype=wp.int32)

    @wp.func
    def each_neighbor(state: State, own: int, q: vec3, cloud: int, lists: ListsStruct, problem: Problem):
        line = int(own)
        begin = int(0)
        end = int(lists.rows.shape[1])
        if lists.start:
            line = 0
            begin = lists.start[own]
            end = lists.start[own + 1]
        for first in range(begin, end, count):
            row = int(-1)
            squared = real(0.0)
            if first + lane() < end:
                row = lists.rows[line, first + lane()]
            if row >= 0:
                squared = squared_of(q, lists.others[row])
            state = meet(state, problem, row >= 0, row, squared)
        return finish(state, problem)

    return Meeting(ListsStruct, each_neighbor)
