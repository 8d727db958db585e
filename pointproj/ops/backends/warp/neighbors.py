"""Where sums get their neighbours from: a search within a radius, or lists of them.

On a GPU the neighbours of a point wait in a queue in shared memory until there are enough of them. Then each
lane finds the weights of some, and all lanes together add up all rows. On a CPU each is added as it comes.
"""

from typing import Any, NamedTuple

import torch
import warp as wp

from pointproj.ops.backends.warp import common
from pointproj.ops.backends.warp.common import REALS, IntRows, Vectors, once, struct_of
from pointproj.ops.backends.warp.lanes import LANES, lanes
from pointproj.ops.backends.warp.traversal import AT_ONCE, Ball, Visitor, ball_search

BLOCK = 128  # threads that share memory
WAITING = 128  # neighbours of a point that the queue holds
ROWS_AT_ONCE = 4  # on their way to all lanes of a point, and products that they sum up at a time


class Lists(NamedTuple):
    """The neighbours of each query."""

    others: Vectors  # (N, 3) positions of the references
    rows: IntRows  # (Q, k), nearest first, -1 where there are fewer


Source = Ball | Lists


class Form(NamedTuple):
    """What a kernel of sums is compiled for."""

    source: type[Source]
    positions: torch.dtype
    sums: torch.dtype
    lanes: int  # of a point
    channels: int  # of each lane
    vector: int  # of those, side by side in one word
    single: bool  # whether those are all
    kernel: str
    reduce: str


_ENTRY = "struct Entry {{ {real} number; int row; }};"
# One more, so that queues side by side begin in different banks of memory.
_RESERVE = """
    __shared__ Entry all[{block} / {lanes} * ({waiting} + 1)];
    return reinterpret_cast<unsigned long long>(all + threadIdx.x / {lanes} * ({waiting} + 1));
"""


@once
def _queue(sums: torch.dtype) -> tuple[wp.Function, ...]:
    """Neighbours that wait in shared memory, of which Warp has arrays for whole blocks alone."""
    real, *_ = REALS[sums]
    names = {"real": f"wp::{real.__name__}", "block": BLOCK, "lanes": LANES, "waiting": WAITING}
    entry = _ENTRY.format(**names)
    queue = entry + "Entry* queue = reinterpret_cast<Entry*>(address);"

    @wp.func_native(entry + _RESERVE.format(**names))
    def reserve() -> wp.uint64: ...

    @wp.func_native(queue + "queue[i] = {number, row};")
    def put(address: wp.uint64, i: int, number: real, row: int): ...

    @wp.func_native(queue + "return queue[i].number;")
    def number_at(address: wp.uint64, i: int) -> real: ...

    @wp.func_native(queue + "return queue[i].row;")
    def row_at(address: wp.uint64, i: int) -> int: ...

    return reserve, put, number_at, row_at


class Adder(NamedTuple):
    """What a kernel does with the neighbours of a point, in this order."""

    State: Any  # struct with ``waiting`` (int) and ``square`` (real of positions), which are the source's
    Problem: Any  # struct
    counts: wp.Function | None  # (problem, row) -> whether weights may be relative to that of a neighbour
    approach: wp.Function | None  # (state, problem, least squared distance of the lane's new ones) -> state
    weigh: wp.Function  # (state, problem, row, squared distance) -> state, weight; each lane some
    gather: wp.Function  # (state, problem, exists, row, weight) -> state, lane's part of a product; all lanes
    settle: wp.Function | None  # (state, problem, row, weight, product) -> state; each lane some


def _waiting(form: Form, adder: Adder) -> tuple[wp.Function, wp.Function, wp.Function]:
    """How neighbours are added, one from each lane at a time.

    ``meet(state, problem, exists, row, squared)`` takes them, ``pause(state, problem)`` adds them up if there
    may be no room for what AT_ONCE more meetings bring, ``finish(state, problem)`` in any case.
    """
    group = lanes(form.lanes)
    real, *_ = REALS[form.sums]
    State, Problem, counts, approach, weigh, gather, settle = adder
    count = group.count

    @wp.func
    def meet_one(state: State, problem: Problem, exists: bool, row: int, squared: real):
        if exists:
            if wp.static(approach is not None):
                state = approach(state, problem, wp.where(counts(problem, row), squared, real(wp.inf)))
            state, weight = weigh(state, problem, row, squared)
            state, product = gather(state, problem, True, row, weight)
            if wp.static(settle is not None):
                state = settle(state, problem, row, weight, product)
        return state

    @wp.func
    def nothing_waits(state: State, problem: Problem):
        return state

    if group.count == 1:
        return meet_one, nothing_waits, nothing_waits
    reserve, put, number_at, row_at = _queue(form.sums)
    most = WAITING - AT_ONCE * group.count
    Parts = wp.types.vector(length=ROWS_AT_ONCE, dtype=real)

    @wp.func
    def weigh_all(state: State, problem: Problem):
        """Weights of all that wait, in place of their squared distances."""
        queue = reserve()
        if wp.static(approach is not None):
            least = real(wp.inf)
            for i in range(group.lane(), state.waiting, count):
                if counts(problem, row_at(queue, i)):
                    least = wp.min(least, number_at(queue, i))
            state = approach(state, problem, least)
        for i in range(group.lane(), state.waiting, count):
            row = row_at(queue, i)
            state, weight = weigh(state, problem, row, number_at(queue, i))
            put(queue, i, weight, row)
        return state

    @wp.func
    def finish(state: State, problem: Problem):
        group.sync()
        state = weigh_all(state, problem)
        group.sync()
        queue = reserve()
        product = real(0.0)  # of this lane's neighbour among the last
        at = int(0)
        while group.any(at < state.waiting or at % count > 0):
            parts = Parts()
            for j in range(ROWS_AT_ONCE):
                exists = at + j < state.waiting
                row = wp.where(exists, row_at(queue, at + j), 0)
                state, part = gather(state, problem, exists, row, number_at(queue, at + j))
                parts[j] = part
            if wp.static(settle is not None):
                sum = group.totals(parts)
                product = wp.where(group.lane() / ROWS_AT_ONCE == at % count / ROWS_AT_ONCE, sum, product)
            at += ROWS_AT_ONCE
            if wp.static(settle is not None):
                own = at - count + group.lane()
                if at % count == 0 and own < state.waiting:
                    state = settle(state, problem, row_at(queue, own), number_at(queue, own), product)
        group.sync()
        state.waiting = 0
        return state

    @wp.func
    def meet(state: State, problem: Problem, exists: bool, row: int, squared: real):
        present = group.ballot(exists)
        if exists:
            put(reserve(), state.waiting + group.bits_before(present), squared, row)
        state.waiting += group.bit_count(present)
        return state

    @wp.func
    def pause(state: State, problem: Problem):
        if group.any(state.waiting > most):
            state = finish(state, problem)
        return state

    return meet, pause, finish


def meeting(form: Form, adder: Adder) -> tuple[Any, wp.Function]:
    """The struct of a source, and how a kernel meets all neighbours of a point there.

    That is ``each_neighbor(state, own row, q, cloud, source, problem) -> state``, with all of them added.
    """
    place, vec3, vec4 = REALS[form.positions]
    real, *_ = REALS[form.sums]
    State, Problem, *_ = adder
    SourceStruct, group = struct_of(form.source, form.positions), lanes(form.lanes)
    meet, pause, finish = _waiting(form, adder)

    @wp.func
    def visit(state: State, problem: Problem, q: vec3, point: vec4, squared: place, exists: bool):
        wide = common.squared_distance(q, common.position_of(point), real(0.0))
        return meet(state, problem, exists and squared <= state.square, common.row_of(point), wide)

    search = ball_search(form.positions, group, Visitor(State, Problem, visit, pause))

    @wp.func
    def in_ball(state: State, own: int, q: vec3, cloud: int, ball: SourceStruct, problem: Problem):
        state = search(state, own, q, cloud, ball, problem)
        return finish(state, problem)

    @wp.func
    def in_lists(state: State, own: int, q: vec3, cloud: int, lists: SourceStruct, problem: Problem):
        k = lists.rows.shape[1]
        for first in range(0, k, group.count):
            row = int(-1)
            squared = real(0.0)
            if first + group.lane() < k:
                row = lists.rows[own, first + group.lane()]
            if row >= 0:
                squared = common.squared_distance(q, lists.others[row], squared)
            state = meet(state, problem, row >= 0, row, squared)
            state = pause(state, problem)
        return finish(state, problem)

    return SourceStruct, in_ball if form.source is Ball else in_lists
