"""Adding weighted rows of a matrix: the lanes of a point stand side by side over the channels.

On a GPU rows first wait in shared memory, each with a number (its distance, later its weight), until there
are enough of them: then all lanes go through the list together, several rows on their way at a time, and
little but loads and multiply-adds is left in that loop. On a CPU a row is added as it comes.
"""

import functools
from typing import Any, NamedTuple

import torch
import warp as wp

from pointproj.ops.backends.warp.common import BLOCK, REALS
from pointproj.ops.backends.warp.lanes import lanes

AT_A_TIME = 4  # rows on their way
PLACES_PER_LANE = 4  # in the list


class Division(NamedTuple):
    """How the channels of one point are divided up."""

    lanes: int
    held: int  # channels a lane holds
    searches: int  # that it takes to hold all channels


def divide(channels: int, device_type: str, most_lanes: int) -> Division:
    """Few channels leave room for several points in a GPU warp; a CPU's single lane holds many."""
    if device_type == "cpu":
        lanes, held = 1, 32
    else:
        lanes = most_lanes if channels <= 4 * most_lanes else 32
        held = min(4, -(-channels // lanes))
    return Division(lanes, held, -(-channels // (lanes * held)))


class RowSum(NamedTuple):
    """Functions to sum rows of ``values``, of which each lane holds some channels."""

    Channels: Any
    channel_of: wp.Function  # (chunk, i) -> the channel that a lane holds i-th
    add_row: wp.Function  # (sums, values, chunk, weight, row) -> sums, for one lane


class WaitingRows(NamedTuple):
    """The list in shared memory that the lanes of a point fill together."""

    capacity: int
    room: wp.Function  # () -> where it is
    put: wp.Function  # (room, size, exists, number, row) -> size; every lane may bring one
    number_at: wp.Function  # (room, i)
    row_at: wp.Function  # (room, i)
    renumber: wp.Function  # (room, i, number): a lane's own i only
    add_all: wp.Function  # (sums, values, chunk, room, size) -> sums, numbers being weights


@functools.cache
def row_sum(sums: torch.dtype, count: int, held: int) -> RowSum:
    """For sums in one dtype, ``count`` lanes a point and ``held`` channels a lane."""
    real, _ = REALS[sums]
    Channels = wp.types.vector(length=held, dtype=real)
    lane = lanes(count).lane

    @wp.func
    def channel_of(chunk: int, i: int):
        return (chunk * held + i) * count + lane()

    @wp.func
    def add_row(total: Channels, values: wp.array2d(dtype=real), chunk: int, weight: real, row: int):
        for i in range(held):
            channel = channel_of(chunk, i)
            if channel < values.shape[1]:
                total[i] += weight * values[row, channel]
        return total

    return RowSum(Channels, channel_of, add_row)


_ENTRY = "struct Entry {{ {real} number; unsigned row; }}; Entry* list = reinterpret_cast<Entry*>(room);"
_ROOM = """
    struct Entry {{ {real} number; unsigned row; }};
    __shared__ Entry all[{block} / {count} * {places}];
    return reinterpret_cast<unsigned long long>(all + threadIdx.x / {count} * {places});
"""
_PUT = """
    const unsigned lane = threadIdx.x & {last}u, base = threadIdx.x & {others}u;
    const unsigned mask = {mask}u << base;
    const unsigned present = (__ballot_sync(mask, exists) & mask) >> base;
    if (exists) list[size + __popc(present & ((1u << lane) - 1u))] = {{number, static_cast<unsigned>(row)}};
    __syncwarp(mask);
    return size + __popc(present);
"""
# Lanes beyond the last channel read the last one in vain, and the list ends in rows of weight 0: so no load
# waits for a condition.
_ADD_ALL = """
    const unsigned lane = threadIdx.x & {last}u, mask = {mask}u << (threadIdx.x & {others}u);
    if (size == 0) return total;
    if (lane < {ahead}) list[size + lane] = {{0, list[0].row}};
    __syncwarp(mask);
    const int last = values.shape[1] - 1;
    const unsigned stride = values.strides[0];
    const int channel = chunk * {held} * {count} + static_cast<int>(lane);
    const char* columns[{held}];
    #pragma unroll
    for (int i = 0; i < {held}; ++i) {{
        const int there = channel + i * {count};
        columns[i] = reinterpret_cast<const char*>(values.data + (there < last ? there : last));
    }}
    #pragma unroll 1
    for (int first = 0; first < size; first += {ahead}) {{
        #pragma unroll
        for (int j = 0; j < {ahead}; ++j) {{
            const Entry entry = list[first + j];
            const unsigned long long row = static_cast<unsigned long long>(entry.row) * stride;
            #pragma unroll
            for (int i = 0; i < {held}; ++i) {{
                total[i] = fma(entry.number, *reinterpret_cast<const {real}*>(columns[i] + row), total[i]);
            }}
        }}
    }}
    __syncwarp(mask);
    return total;
"""


@functools.cache
def waiting_rows(sums: torch.dtype, count: int, held: int) -> WaitingRows:
    """The list, for several lanes of a GPU warp; all of them call each function together."""
    real, _ = REALS[sums]
    Channels = row_sum(sums, count, held).Channels
    capacity = PLACES_PER_LANE * count
    names = {
        "real": "float" if sums == torch.float32 else "double",
        "held": held,
        "count": count,
        "places": capacity + AT_A_TIME,
        "ahead": AT_A_TIME,
        "last": count - 1,
        "others": 32 - count,
        "mask": 2**count - 1,
        "block": BLOCK,
    }

    @wp.func_native(_ROOM.format(**names))
    def room() -> wp.uint64: ...

    @wp.func_native((_ENTRY + _PUT).format(**names))
    def put(room: wp.uint64, size: int, exists: bool, number: real, row: int) -> int: ...

    @wp.func_native(_ENTRY.format(**names) + "return list[i].number;")
    def number_at(room: wp.uint64, i: int) -> real: ...

    @wp.func_native(_ENTRY.format(**names) + "return list[i].row;")
    def row_at(room: wp.uint64, i: int) -> int: ...

    @wp.func_native(_ENTRY.format(**names) + "list[i].number = number;")
    def renumber(room: wp.uint64, i: int, number: real): ...

    @wp.func_native((_ENTRY + _ADD_ALL).format(**names))
    def add_all(
        total: Channels, values: wp.array2d(dtype=real), chunk: int, room: wp.uint64, size: int
    ) -> Channels: ...

    return WaitingRows(capacity, room, put, number_at, row_at, renumber, add_all)
