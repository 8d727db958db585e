"""How a search within a radius keeps the k nearest of the points that it meets, and counts all of them.

Each maker returns a :class:`~pointproj.ops.backends.warp.traversal.Visitor`, ``begin(query, data, limit) ->
state``, where ``limit`` is the largest squared distance that counts as within the radius, and ``finish(state,
query, data, missing)``, which writes the neighbours' rows, nearest first, and their distances, ``missing``
where there are fewer. ``state.count`` is how many points were within the radius, of each lane's.

The lanes of a warp put candidates into a queue. When 32 wait they are sorted and merged with the list: that
takes about as long as putting two or three in their places one after another.
"""

from typing import Any

import torch
import warp as wp

from pointproj.ops.backends.warp.common import REALS, packed_point
from pointproj.ops.backends.warp.lane_sort import pair_sort
from pointproj.ops.backends.warp.lanes import lanes
from pointproj.ops.backends.warp.queue import Division, row_queue
from pointproj.ops.backends.warp.top_k import NO_ROW, in_memory, squared_distance_function, top_k_struct
from pointproj.ops.backends.warp.traversal import Visitor

LANES = 32


def in_heap(dtype: torch.dtype) -> tuple:
    """Any number of neighbours, for one lane: the heap of a search for the nearest."""
    real, vec3 = REALS[dtype]
    sorted_points = wp.array2d(dtype=real)
    Data = top_k_struct(dtype, torch.int64)
    squared_distance = squared_distance_function(dtype)
    load_point, _, _ = packed_point(dtype)
    heap, begin_heap, finish_heap = in_memory(dtype, 1, torch.int64)
    visit_nearest = heap.visit

    @wp.struct
    class State:
        nearest: heap.State
        limit: real
        count: int

    @wp.func
    def begin(query: int, data: Data, limit: real):
        state = State()
        state.nearest = begin_heap(query, data)
        state.limit = limit
        return state

    @wp.func
    def visit(state: State, q: vec3, data: Data, points: sorted_points, at: int, exists: bool):
        if squared_distance(q, load_point(points, at)) <= state.limit:
            state.count += 1
            state.nearest = visit_nearest(state.nearest, q, data, points, at, exists)
        return state

    @wp.func
    def finish(state: State, query: int, data: Data, missing: real):
        finish_heap(state.nearest, query, data, missing)

    return Visitor(State, Data, visit), begin, finish


def in_lanes(dtype: torch.dtype) -> tuple:
    """Up to 32 neighbours: lane i of a warp keeps the i-th nearest."""
    real, _ = REALS[dtype]
    Data = top_k_struct(dtype, torch.int64)
    pairs = pair_sort(dtype)
    row_of, comes_before = pairs.row_of, pairs.comes_before
    sort_descending, merge = pairs.sort_descending, pairs.merge
    lane, take = lanes(LANES).lane, lanes(LANES).take

    @wp.struct
    class State:
        query: int
        limit: real
        worst: real  # squared distance beyond which none matters; finite
        count: int
        waiting: int  # in the queue
        nearest: pairs.Pair

    @wp.func
    def add(state: State, data: Data, batch: pairs.Pair, size: int):
        batch = sort_descending(batch, size)
        if comes_before(batch, state.nearest):
            state.nearest = batch
        state.nearest = merge(state.nearest, True)
        state.worst = wp.min(state.worst, take(state.nearest[0], data.rows.shape[1] - 1))
        return state

    @wp.func
    def write(state: State, data: Data, missing: real):
        row = row_of(state.nearest)
        if lane() < data.rows.shape[1]:
            data.rows[state.query, lane()] = wp.int64(wp.where(row == NO_ROW, -1, row))
            distance = wp.where(row == NO_ROW, missing, wp.sqrt(state.nearest[0]))
            data.distances[state.query, lane()] = distance

    return _queued(dtype, State, add, write)


def in_blocks(dtype: torch.dtype) -> tuple:
    """Any number of neighbours: a list in memory, of which a warp merges 32 at a time, from its end."""
    real, _ = REALS[dtype]
    Data = top_k_struct(dtype, torch.int64)
    pairs = pair_sort(dtype)
    pair_of, row_of, comes_before = pairs.pair, pairs.row_of, pairs.comes_before
    sort_descending, merge = pairs.sort_descending, pairs.merge
    group = lanes(LANES)
    lane, take, ballot = group.lane, group.take, group.ballot

    @wp.struct
    class State:
        query: int
        limit: real
        worst: real
        count: int
        waiting: int
        nearest: pairs.Pair  # none
        size: int  # of the list

    @wp.func
    def put(data: Data, query: int, size: int, at: int, pair: pairs.Pair):
        if at < size:
            data.distances[query, at] = pair[0]
            data.rows[query, at] = wp.int64(row_of(pair))

    @wp.func
    def add(state: State, data: Data, batch: pairs.Pair, size: int):
        k = data.rows.shape[1]
        larger_size = wp.min(state.size + size, k)
        larger = sort_descending(batch, size)  # what goes on to the blocks before
        block = wp.min((state.size + LANES - 1) / LANES, (k - 1) / LANES)
        while block >= 0:
            at = block * LANES + lane()
            own = state.nearest
            if at < state.size:
                own = pair_of(data.distances[state.query, at], int(data.rows[state.query, at]))
            smaller = own
            behind = larger
            moves = comes_before(larger, own)
            if moves:
                smaller = larger
                behind = own
            put(data, state.query, larger_size, at + LANES, merge(behind, True))
            if ballot(moves) == 0:
                block = 0  # the list is in order
            elif block == 0:
                put(data, state.query, larger_size, at, merge(smaller, True))
            larger = merge(smaller, False)
            block -= 1
        state.size = larger_size
        if state.size == k:
            farthest = real(0.0)
            if lane() == (k - 1) % LANES:  # which wrote it
                farthest = data.distances[state.query, k - 1]
            state.worst = wp.min(state.worst, take(farthest, (k - 1) % LANES))
        return state

    @wp.func
    def write(state: State, data: Data, missing: real):
        for at in range(lane(), data.rows.shape[1], LANES):  # each lane has written these itself
            if at < state.size:
                data.distances[state.query, at] = wp.sqrt(data.distances[state.query, at])
            else:
                data.rows[state.query, at] = wp.int64(-1)
                data.distances[state.query, at] = missing

    return _queued(dtype, State, add, write)


def _queued(dtype: torch.dtype, State: Any, add: wp.Function, write: wp.Function) -> tuple:  # noqa: N803
    """Visitor, begin and finish for a list that takes up to 32 sorted neighbours at a time."""
    real, vec3 = REALS[dtype]
    sorted_points = wp.array2d(dtype=real)
    Data = top_k_struct(dtype, torch.int64)
    squared_distance = squared_distance_function(dtype)
    load_point, _, row_of = packed_point(dtype)
    pair_of = pair_sort(dtype).pair
    queue = row_queue(dtype, Division(LANES, 1, 1))
    reserve, push, number_at, queued_row_at = queue.reserve, queue.push, queue.number_at, queue.row_at
    lane = lanes(LANES).lane
    most = torch.finfo(dtype).max

    @wp.func
    def begin(query: int, data: Data, limit: real):
        state = State()
        state.query = query
        state.limit = limit
        state.worst = wp.min(limit, real(most))
        state.nearest = pair_of(real(wp.inf), NO_ROW)
        return state

    @wp.func
    def add_last(state: State, data: Data, size: int):
        """Those that came last into the queue, one for each of the last lanes."""
        state.waiting -= size
        batch = pair_of(real(wp.inf), NO_ROW)
        at = state.waiting + lane() - (LANES - size)
        if at >= state.waiting:
            batch = pair_of(number_at(reserve(), at), queued_row_at(reserve(), at))
        return add(state, data, batch, size)

    @wp.func
    def visit(state: State, q: vec3, data: Data, points: sorted_points, at: int, exists: bool):
        squared = real(wp.inf)
        row = int(NO_ROW)
        if exists:
            point = load_point(points, at)
            squared = squared_distance(q, point)
            row = row_of(point)
            if squared <= state.limit:
                state.count += 1
        state.waiting = push(reserve(), state.waiting, squared <= state.worst, squared, row)
        if state.waiting >= LANES:
            state = add_last(state, data, LANES)
        return state

    @wp.func
    def finish(state: State, query: int, data: Data, missing: real):
        if state.waiting > 0:
            state = add_last(state, data, state.waiting)
        write(state, data, missing)

    return Visitor(State, Data, visit), begin, finish
