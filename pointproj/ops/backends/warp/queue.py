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
    push: (
        wp.Function
    )  # (queue, problem, exists, row, squared distance) -> queue; one neighbour a lane, or none
    make_room: wp.Function  # (queue, problem) -> queue with room for AT_ONCE more pushes
    flush: wp.Function  # (queue, problem) -> queue, after which it is empty


class Memory(NamedTuple):
    """A point's queue in shared memory: a number and a row for each neighbour."""

    address: wp.Function  # ()
    store: wp.Function  # (address, i, number, row)
    number_at: wp.Function  # (address, i)
    row_at: wp.Function  # (address, i)


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
    Problem, memory = accumulator.Problem, _shared_memory(sums)
    QueueState = _state_struct(accumulator.State)
    weigh_all, add_all = (
        _weigh_all(accumulator, lanes, memory, real),
        _add_all(accumulator, lanes, memory, real),
    )
    most = LENGTH - AT_ONCE * lanes.count

    @wp.func
    def push(queue: QueueState, problem: Problem, exists: bool, row: int, squared: real):
        present = lanes.ballot(exists)
        if exists:
            memory.store(memory.address(), queue.size + lanes.bits_before(present), squared, row)
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
    def make_room(queue: QueueState, problem: Problem):
        if lanes.any(queue.size > most):
            queue = flush(queue, problem)
        return queue

    return Queue(QueueState, push, make_room, flush)


def _weigh_all(accumulator: Accumulator, lanes: Lanes, memory: Memory, real: Any) -> wp.Function:
    """``weigh_all(state, problem, size) -> state``: weights take the place of squared distances."""
    State, Problem, has_weight, rescale, weigh, *_ = accumulator
    count = lanes.count

    @wp.func
    def weigh_all(state: State, problem: Problem, size: int):
        queue = memory.address()
        if wp.static(rescale is not None):
            least = real(wp.inf)
            for i in range(lanes.lane(), size, count):
                if has_weight(problem, memory.row_at(queue, i)):
                    least = wp.min(least, memory.number_at(queue, i))
            state = rescale(state, problem, least)
        for i in range(lanes.lane(), size, count):
            row = memory.row_at(queue, i)
            state, weight = weigh(state, problem, row, memory.number_at(queue, i))
            memory.store(queue, i, weight, row)
        return state

    return weigh_all


def _add_all(accumulator: Accumulator, lanes: Lanes, memory: Memory, real: Any) -> wp.Function:
    """``add_all(state, problem, size) -> state``: all lanes add each row, then each lane adds one pair."""
    State, Problem, *_, add_row, add_pair = accumulator
    count, Parts = lanes.count, wp.types.vector(length=ROWS_AT_ONCE, dtype=real)

    @wp.func
    def add_all(state: State, problem: Problem, size: int):
        queue = memory.address()
        product = real(0.0)  # of this lane's pair, among the last as many as there are lanes
        at = int(0)
        while lanes.any(at < size or at % count > 0):
            parts = Parts()
            for j in range(ROWS_AT_ONCE):
                exists = at + j < size
                row = wp.where(exists, memory.row_at(queue, at + j), 0)
                state, part = add_row(state, problem, exists, row, memory.number_at(queue, at + j))
                parts[j] = part
            if wp.static(add_pair is not None):
                sum = lanes.totals(parts)
                product = wp.where(lanes.lane() / ROWS_AT_ONCE == at % count / ROWS_AT_ONCE, sum, product)
            at += ROWS_AT_ONCE
            if wp.static(add_pair is not None):
                own = at - count + lanes.lane()
                if at % count == 0 and own < size:
                    row = memory.row_at(queue, own)
                    state = add_pair(state, problem, row, memory.number_at(queue, own), product)
        return state

    return add_all


_ENTRY = "struct Entry {{ {real} number; int row; }};"
# One entry more than the queue needs: so the queues of a block begin in different banks of memory.
_ADDRESS = """
    __shared__ Entry all[{block} / {lanes} * ({length} + 1)];
    return reinterpret_cast<unsigned long long>(all + threadIdx.x / {lanes} * ({length} + 1));
"""


@once
def _shared_memory(sums: torch.dtype) -> Memory:
    """Written in CUDA, because Warp's shared arrays belong to a whole block, not to the lanes of a point."""
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

    return Memory(address, store, number_at, row_at)
