"""How the neighbours that lanes find get to an accumulator: on a GPU through a queue in shared memory.

Before the queue overflows, and at the end, each lane computes the weights of some of the queued neighbours.
Then all lanes together add up the rows of all of them. On a CPU each neighbour is added immediately.
"""

from typing import Any, NamedTuple

import torch
import warp as wp

from pointproj.ops.backends.warp.common import REALS, once
from pointproj.ops.backends.warp.lanes import LANES, Lanes
from pointproj.ops.backends.warp.traversal import AT_ONCE

BLOCK = 128  # threads that share memory
LENGTH = 128  # of a point's queue
ROWS_AT_ONCE = 4  # rows that are being read at the same time, and products that the lanes sum up together


class Accumulator(NamedTuple):
    """What a kernel does with the neighbours of a point, in this order."""

    State: Any  # struct: the sums, and what they are computed with
    Problem: Any  # struct: what there is to read and write
    has_weight: wp.Function  # (problem, row) -> whether weights may be relative to this neighbour's
    rescale: wp.Function | None  # (state, problem, least squared distance that this lane brings) -> state
    weigh: wp.Function  # (state, problem, row, squared distance) -> state, weight; in one lane
    add_row: wp.Function  # (state, problem, exists, row, weight) -> state, the lane's part of a product
    add_pair: wp.Function | None  # (state, problem, row, weight, product) -> state; in one lane


class Queue(NamedTuple):
    """How a kernel hands neighbours to an accumulator."""

    State: Any  # struct of ``size`` and ``sums``, the accumulator's state
    push: wp.Function  # (queue, problem, exists, row, squared distance) -> queue; at most one from each lane
    flush_if_full: wp.Function  # (queue, problem) -> queue, which can take AT_ONCE more pushes
    flush: wp.Function  # (queue, problem) -> queue, after which it is empty


def queue_of(accumulator: Accumulator, lanes: Lanes, sums: torch.dtype) -> Queue:
    """The queue for so many lanes, and sums in this dtype."""
    return _no_queue(accumulator, sums) if lanes.count == 1 else _shared_queue(accumulator, lanes, sums)


def _state_struct(sums_of: Any) -> Any:
    @wp.struct
    class QueueState:
        size: int
        sums: sums_of

    return QueueState


def _no_queue(accumulator: Accumulator, sums: torch.dtype) -> Queue:
    real, *_ = REALS[sums]
    State, Problem, has_weight, rescale, weigh, add_row, add_pair = accumulator
    QueueState = _state_struct(State)

    @wp.func
    def push(queue: QueueState, problem: Problem, exists: bool, row: int, squared: real):
        if exists:
            state = queue.sums
            if wp.static(rescale is not None):
                state = rescale(state, problem, wp.where(has_weight(problem, row), squared, real(wp.inf)))
            state, weight = weigh(state, problem, row, squared)
            state, product = add_row(state, problem, True, row, weight)
            if wp.static(add_pair is not None):
                state = add_pair(state, problem, row, weight, product)
            queue.sums = state
        return queue

    @wp.func
    def nothing(queue: QueueState, problem: Problem):
        return queue

    return Queue(QueueState, push, nothing, nothing)


def _shared_queue(accumulator: Accumulator, lanes: Lanes, sums: torch.dtype) -> Queue:
    real, *_ = REALS[sums]
    Problem, QueueState = accumulator.Problem, _state_struct(accumulator.State)
    weigh_all, add_all = _weigh_all(accumulator, lanes, sums), _add_all(accumulator, lanes, sums)
    address, store, *_ = _shared_memory(sums)
    most = LENGTH - AT_ONCE * lanes.count

    @wp.func
    def push(queue: QueueState, problem: Problem, exists: bool, row: int, squared: real):
        present = lanes.ballot(exists)
        if exists:
            store(address(), queue.size + lanes.bits_before(present), squared, row)
        queue.size += lanes.bit_count(present)
        return queue

    @wp.func
    def flush(queue: QueueState, problem: Problem):
        lanes.sync()
        queue.sums = weigh_all(queue.sums, problem, queue.size)
        lanes.sync()
        queue.sums = add_all(queue.sums, problem, queue.size)
        lanes.sync()
        queue.size = 0
        return queue

    @wp.func
    def flush_if_full(queue: QueueState, problem: Problem):
        if lanes.any(queue.size > most):
            queue = flush(queue, problem)
        return queue

    return Queue(QueueState, push, flush_if_full, flush)


def _weigh_all(accumulator: Accumulator, lanes: Lanes, sums: torch.dtype) -> wp.Function:
    """``weigh_all(state, problem, size) -> state``: weights take the place of squared distances."""
    State, Problem, has_weight, rescale, weigh, *_ = accumulator
    address, store, number_at, row_at = _shared_memory(sums)
    real, count = REALS[sums][0], lanes.count

    @wp.func
    def weigh_all(state: State, problem: Problem, size: int):
        queue = address()
        if wp.static(rescale is not None):
            least = real(wp.inf)
            for i in range(lanes.lane(), size, count):
                if has_weight(problem, row_at(queue, i)):
                    least = wp.min(least, number_at(queue, i))
            state = rescale(state, problem, least)
        for i in range(lanes.lane(), size, count):
            row = row_at(queue, i)
            state, weight = weigh(state, problem, row, number_at(queue, i))
            store(queue, i, weight, row)
        return state

    return weigh_all


def _add_all(accumulator: Accumulator, lanes: Lanes, sums: torch.dtype) -> wp.Function:
    """``add_all(state, problem, size) -> state``: all lanes add each row, then each lane adds one pair."""
    State, Problem, *_, add_row, add_pair = accumulator
    address, _, number_at, row_at = _shared_memory(sums)
    real, count = REALS[sums][0], lanes.count
    Parts = wp.types.vector(length=ROWS_AT_ONCE, dtype=real)

    @wp.func
    def add_all(state: State, problem: Problem, size: int):
        queue = address()
        product = real(0.0)  # of this lane's pair, among the last as many as there are lanes
        at = int(0)
        while lanes.any(at < size or at % count > 0):
            parts = Parts()
            for j in range(ROWS_AT_ONCE):
                exists = at + j < size
                row = wp.where(exists, row_at(queue, at + j), 0)
                state, part = add_row(state, problem, exists, row, number_at(queue, at + j))
                parts[j] = part
            if wp.static(add_pair is not None):
                sum = lanes.totals(parts)
                product = wp.where(lanes.lane() / ROWS_AT_ONCE == at % count / ROWS_AT_ONCE, sum, product)
            at += ROWS_AT_ONCE
            if wp.static(add_pair is not None):
                own = at - count + lanes.lane()
                if at % count == 0 and own < size:
                    row = row_at(queue, own)
                    state = add_pair(state, problem, row, number_at(queue, own), product)
        return state

    return add_all


_ENTRY = "struct Entry {{ {real} number; int row; }};"
# One entry more than the queue needs: so the queues of a block begin in different banks of
_ADDRESS = """
    __shared__ Entry all[{block} / {lanes} * ({length} + 1)];
    return reinterpret_cast<unsigned long long>(all + threadIdx.x / {lanes} * ({length} + 1));
"""


@once
def _shared_memory(sums: torch.dtype) -> tuple[wp.Function, ...]:
    """Functions of a point's queue: a number and a row for each neighbour.

    They are written in CUDA, because a shared array of Warp belongs to a whole block of threads.
    """
    real, *_ = REALS[sums]
    names = {"real": f"wp::{real.__name__}", "block": BLOCK, "lanes": LANES, "length": LENGTH}
    entry = _ENTRY.format(**names)
    queue = entry + "Entry* queue = reinterpret_cast<Entry*>(address);"

    @wp.func_native(entry + _ADDRESS.format(**names))
    def address() -> wp.uint64: ...

    @wp.func_native(queue + "queue[i] = {number, row};")
    def store(address: wp.uint64, i: int, number: real, row: int): ...

    @wp.func_native(queue + "return queue[i].number;")
    def number_at(address: wp.uint64, i: int) -> real: ...

    @wp.func_native(queue + "return queue[i].row;")
    def row_at(address: wp.uint64, i: int) -> int: ...

    return address, store, number_at, row_at
