"""Sums of weighted rows of a matrix: the lanes of a point stand side by side over the channels.

On a GPU rows first wait in a queue in shared memory, each with a number (its distance, later its weight),
until there are enough of them: then all lanes go through the queue together, several rows on their way at a
time, and little but loads and multiply-adds is left in that loop. On a CPU a row is added as it comes.
"""

import functools
from typing import Any, NamedTuple

import torch
import warp as wp

from pointproj.ops.backends.warp.common import BLOCK, REALS
from pointproj.ops.backends.warp.lanes import lanes

AT_A_TIME = 4  # rows on their way
ENTRIES_PER_LANE = 4


class Division(NamedTuple):
    """How the channels of one point are divided up."""

    lanes: int
    channels: int  # of each lane
    searches: int  # that it takes to cover all channels


def divide(channels: int, device_type: str, most_lanes: int) -> Division:
    """Few channels leave room for several points in a GPU warp; a CPU's single lane takes many."""
    if device_type == "cpu":
        lane_count, of_lane = 1, 32
    else:
        lane_count = most_lanes if channels <= 4 * most_lanes else 32
        of_lane = min(4, -(-channels // lane_count))
    return Division(lane_count, of_lane, -(-channels // (lane_count * of_lane)))


class RowSum(NamedTuple):
    """Functions to sum rows of ``values``, of which each lane has some channels."""

    Channels: Any
    channel_of: wp.Function  # (chunk, i) -> the i-th channel of this lane
    add_row: wp.Function  # (sums, values, chunk, weight, row) -> sums, for one lane


class Queue(NamedTuple):
    """The queue in shared memory that the lanes of a point fill together."""

    capacity: int
    reserve: wp.Function  # () -> its address
    push: wp.Function  # (address, size, exists, number, row) -> size; every lane may bring one
    number_at: wp.Function  # (address, i)
    row_at: wp.Function  # (address, i)
    set_number: wp.Function  # (address, i, number): a lane's own i only
    flush: wp.Function  # (sums, values, chunk, address, size) -> sums with all rows, numbers being weights


@functools.cache
def row_sum(sums: torch.dtype, count: int, channels: int) -> RowSum:
    """For sums in one dtype, ``count`` lanes a point and ``channels`` a lane."""
    real, _ = REALS[sums]
    Channels = wp.types.vector(length=channels, dtype=real)
    lane = lanes(count).lane

    @wp.func
    def channel_of(chunk: int, i: int):
        return (chunk * channels + i) * count + lane()

    @wp.func
    def add_row(total: Channels, values: wp.array2d(dtype=real), chunk: int, weight: real, row: int):
        for i in range(channels):
            channel = channel_of(chunk, i)
            if channel < values.shape[1]:
                total[i] += weight * values[row, channel]
        return total

    return RowSum(Channels, channel_of, add_row)


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
    const unsigned lane = threadIdx.x & {last}u, base = threadIdx.x & {others}u;
    const unsigned mask = {mask}u << base;
    const unsigned present = (__ballot_sync(mask, exists) & mask) >> base;
    if (exists) queue[size + __popc(present & ((1u << lane) - 1u))] = {{number, static_cast<unsigned>(row)}};
    __syncwarp(mask);
    return size + __popc(present);
"""
# Lanes beyond the last channel read the last one in vain, and the queue ends in rows of weight 0: so no load
# waits for a condition.
_FLUSH = """
    const unsigned lane = threadIdx.x & {last}u, mask = {mask}u << (threadIdx.x & {others}u);
    if (size == 0) return total;
    if (lane < {ahead}) queue[size + lane] = {{0, queue[0].row}};
    __syncwarp(mask);
    const int last = values.shape[1] - 1;
    const unsigned stride = values.strides[0];
    const int channel = chunk * {channels} * {count} + static_cast<int>(lane);
    const char* columns[{channels}];
    #pragma unroll
    for (int i = 0; i < {channels}; ++i) {{
        const int there = channel + i * {count};
        columns[i] = reinterpret_cast<const char*>(values.data + (there < last ? there : last));
    }}
    #pragma unroll 1
    for (int first = 0; first < size; first += {ahead}) {{
        #pragma unroll
        for (int j = 0; j < {ahead}; ++j) {{
            const Entry entry = queue[first + j];
            const unsigned long long row = static_cast<unsigned long long>(entry.row) * stride;
            #pragma unroll
            for (int i = 0; i < {channels}; ++i) {{
                total[i] = fma(entry.number, *reinterpret_cast<const {real}*>(columns[i] + row), total[i]);
            }}
        }}
    }}
    __syncwarp(mask);
    return total;
"""


@functools.cache
def row_queue(sums: torch.dtype, count: int, channels: int) -> Queue:
    """The queue, for several lanes of a GPU warp; all of them call each function together."""
    real, _ = REALS[sums]
    Channels = row_sum(sums, count, channels).Channels
    capacity = ENTRIES_PER_LANE * count
    names = {
        "real": "float" if sums == torch.float32 else "double",
        "channels": channels,
        "count": count,
        "entries": capacity + AT_A_TIME,
        "ahead": AT_A_TIME,
        "last": count - 1,
        "others": 32 - count,
        "mask": 2**count - 1,
        "block": BLOCK,
    }
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

    return Queue(capacity, reserve, push, number_at, row_at, set_number, flush)
