"""Sums of weighted rows of a matrix: the lanes of a point stand side by side over the channels.

On a GPU rows first wait in a queue in shared memory, each with a number (its distance, later its weight),
until there are enough of them: then all lanes go through the queue together, several rows on their way at a
time, and little but loads and multiply-adds is left in that loop. On a CPU a row is added as it comes.
"""

import functools
from typing import Any, NamedTuple

import torch
import warp as wp
from torch import Tensor

from pointproj.ops.backends.warp.common import BLOCK, REALS
from pointproj.ops.backends.warp.lanes import lanes

AT_A_TIME = 4  # rows on their way
FEW_LANES = 8
SMALL_BLOCK = 64  # threads: these balance points of which some have much to do
WAITING = 8  # of large clouds most points have all their neighbours in the queue then: 32.4 ms, with 6 34.5


class Division(NamedTuple):
    """How the channels of one point are divided up."""

    lanes: int
    channels: int  # of each lane
    searches: int  # that it takes to cover all channels
    together: int = 1  # channels that a lane reads and writes at once
    block: int = BLOCK  # threads
    waiting: int = 4  # rows for each lane that the queue holds


def divide(channels: int, device_type: str, most_lanes: int) -> Division:
    """Few channels leave room for several points in a GPU warp; a CPU's single lane takes many."""
    if device_type == "cpu":
        lane_count, of_lane = 1, 32
    else:
        lane_count = most_lanes if channels <= 4 * most_lanes else 32
        of_lane = min(4, -(-channels // lane_count))
    return Division(lane_count, of_lane, -(-channels // (lane_count * of_lane)))


def few_lanes(*values: Tensor) -> Division:
    """How the channels of the rows of some matrices are divided up among few lanes."""
    channels, wide = values[0].shape[1], 16 // values[0].element_size()
    of_lane = min(4, -(-channels // FEW_LANES))
    aligned = channels % wide == 0 and all(t.data_ptr() % 16 == 0 for t in values)
    together = wide if aligned and of_lane > 1 else 1
    of_lane = -(-of_lane // together) * together
    searches = -(-channels // (FEW_LANES * of_lane))
    return Division(FEW_LANES, of_lane, searches, together, SMALL_BLOCK, WAITING)


class RowSum(NamedTuple):
    """Functions to sum rows of ``values``, of which each lane has some channels."""

    Channels: Any
    add_row: wp.Function  # (sums, values, chunk, weight, row) -> sums, for one lane
    write_row: wp.Function  # (sums, chunk, factor, output, row)


class Queue(NamedTuple):
    """The queue in shared memory that the lanes of a point fill together."""

    capacity: int
    reserve: wp.Function  # () -> its address
    push: wp.Function  # (address, size, exists, number, row) -> size; every lane may bring one
    number_at: wp.Function  # (address, i)
    row_at: wp.Function  # (address, i)
    set_number: wp.Function  # (address, i, number): a lane's own i only
    flush: wp.Function  # (sums, values, chunk, address, size) -> sums with all rows, numbers being weights


# Rows begin at multiples of what is written at once.
_WRITE = """
    const int columns = output.shape[1], lane = threadIdx.x & {last}u;
    struct alignas({together} * sizeof({real})) Some {{ {real} x[{together}]; }};
    #pragma unroll
    for (int i = 0; i < {channels}; i += {together}) {{
        const int channel = (chunk * {channels} + i) * {count} + lane * {together};
        if (channel >= columns) continue;
        Some some;
        #pragma unroll
        for (int j = 0; j < {together}; ++j) some.x[j] = total[i + j] * factor;
        *reinterpret_cast<Some*>(output.data + static_cast<size_t>(row) * columns + channel) = some;
    }}
"""


@functools.cache
def row_sum(sums: torch.dtype, division: Division) -> RowSum:
    """For sums in one dtype."""
    real, _ = REALS[sums]
    count, channels, *_ = division
    Channels = wp.types.vector(length=channels, dtype=real)
    matrix = wp.array2d(dtype=real)
    lane = lanes(count).lane

    @wp.func
    def channel_of(chunk: int, i: int):
        return (chunk * channels + i) * count + lane()

    @wp.func
    def add_row(total: Channels, values: matrix, chunk: int, weight: real, row: int):
        for i in range(channels):
            channel = channel_of(chunk, i)
            if channel < values.shape[1]:
                total[i] += weight * values[row, channel]
        return total

    @wp.func
    def write_row(total: Channels, chunk: int, factor: real, output: matrix, row: int):
        for i in range(channels):
            channel = channel_of(chunk, i)
            if channel < output.shape[1]:
                output[row, channel] = total[i] * factor

    @wp.func_native(_WRITE.format(**names_of(sums, division)))
    def write_row_together(total: Channels, chunk: int, factor: real, output: matrix, row: int): ...

    return RowSum(Channels, add_row, write_row if division.together == 1 else write_row_together)


def names_of(sums: torch.dtype, division: Division) -> dict[str, Any]:
    """What snippets write down of a division."""
    count = division.lanes
    return {
        "real": "float" if sums == torch.float32 else "double",
        "channels": division.channels,
        "together": division.together,
        "block": division.block,
        "count": count,
        "last": count - 1,
        "others": 32 - count,
        "mask": 2**count - 1,
        "entries": division.waiting * count + AT_A_TIME,
        "ahead": AT_A_TIME,
    }


_TYPE = "struct Entry {{ {real} number; unsigned row; }};"
_ENTRIES = _TYPE + "Entry* queue = reinterpret_cast<Entry*>(address);"
_RESERVE = (
    _TYPE
    + """
    __shared__ Entry all[{block} / {count} * {entries}];
    return reinterpret_cast<unsigned long long>(all + threadIdx.x / {count} * {entries});
"""
)
_PUSH = """
    const unsigned lane = threadIdx.x & {last}u;
    const unsigned present = __ballot_sync(0xffffffffu, exists) >> (threadIdx.x & {others}u) & {mask}u;
    if (exists) queue[size + __popc(present & ((1u << lane) - 1u))] = {{number, static_cast<unsigned>(row)}};
    __syncwarp();
    return size + __popc(present);
"""
# Lanes beyond the last channel read the last ones in vain, and the queue ends in rows of weight 0: so no load
# waits for a condition.
_FLUSH = """
    struct alignas({together} * sizeof({real})) Some {{ {real} x[{together}]; }};
    const unsigned lane = threadIdx.x & {last}u;
    if (size > 0 && lane < {ahead}) queue[size + lane] = {{0, queue[0].row}};
    __syncwarp();
    const int last = values.shape[1] - {together};
    const unsigned stride = values.strides[0];
    const int channel = chunk * {channels} * {count} + static_cast<int>(lane) * {together};
    const char* columns[{channels} / {together}];
    #pragma unroll
    for (int i = 0; i < {channels} / {together}; ++i) {{
        const int there = channel + i * {together} * {count};
        columns[i] = reinterpret_cast<const char*>(values.data + (there < last ? there : last));
    }}
    #pragma unroll 1
    for (int first = 0; first < size; first += {ahead}) {{
        #pragma unroll
        for (int j = 0; j < {ahead}; ++j) {{
            const Entry entry = queue[first + j];
            const unsigned long long row = static_cast<unsigned long long>(entry.row) * stride;
            #pragma unroll
            for (int i = 0; i < {channels} / {together}; ++i) {{
                const Some some = *reinterpret_cast<const Some*>(columns[i] + row);
                #pragma unroll
                for (int at = 0; at < {together}; ++at) {{
                    total[i * {together} + at] = fma(entry.number, some.x[at], total[i * {together} + at]);
                }}
            }}
        }}
    }}
    __syncwarp();
    return total;
"""


@functools.cache
def row_queue(sums: torch.dtype, division: Division) -> Queue:
    """The queue, for several lanes of a GPU warp; all threads of the warp call each function together."""
    real, _ = REALS[sums]
    Channels = row_sum(sums, division).Channels
    names = names_of(sums, division)
    entries = _ENTRIES.format(**names)

    @wp.func_native(_RESERVE.format(**names))
    def reserve() -> wp.uint64: ...

    @wp.func_native(entries + _PUSH.format(**names))
    def push(address: wp.uint64, size: int, exists: bool, number: real, row: int) -> int: ...

    @wp.func_native(entries + "return queue[i].number;")
    def number_at(address: wp.uint64, i: int) -> real: ...

    @wp.func_native(entries + "return queue[i].row;")
    def row_at(address: wp.uint64, i: int) -> int: ...

    @wp.func_native(entries + "queue[i].number = number;")
    def set_number(address: wp.uint64, i: int, number: real): ...

    @wp.func_native(entries + _FLUSH.format(**names))
    def flush(
        total: Channels, values: wp.array2d(dtype=real), chunk: int, address: wp.uint64, size: int
    ) -> Channels: ...

    capacity = division.waiting * division.lanes
    return Queue(capacity, reserve, push, number_at, row_at, set_number, flush)
