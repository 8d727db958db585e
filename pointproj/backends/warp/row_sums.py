"""Adding weighted rows of a matrix: the lanes of a query stand side by side over the channels."""

import functools
from typing import Any, NamedTuple

import torch
import warp as wp

from pointproj.backends.warp.common import REALS
from pointproj.backends.warp.lanes import lanes


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


# The lanes with a row line up in shared memory, so that four rows are on their way at a time and little but
# loads and multiply-adds is left in the loop.
_ADD_ROWS = """
    __shared__ int all_rows[1024];
    __shared__ {real} all_weights[1024];
    const unsigned lane = threadIdx.x & {last}u, base = threadIdx.x & {others}u;
    const unsigned mask = {mask}u << base;
    int* rows = all_rows + (threadIdx.x - lane);
    {real}* weights = all_weights + (threadIdx.x - lane);
    const unsigned present = (__ballot_sync(mask, exists) & mask) >> base;
    if (present == 0u) return total;
    if (exists) {{
        const int place = __popc(present & ((1u << lane) - 1u));
        rows[place] = row;
        weights[place] = weight;
    }}
    __syncwarp(mask);
    const int size = __popc(present), width = values.shape[1];
    const int channel = chunk * {held} * {count} + static_cast<int>(lane);
    const char* data = reinterpret_cast<const char*>(values.data + channel);
    for (int first = 0; first < size; first += 4) {{
        #pragma unroll
        for (int j = 0; j < 4; ++j) {{
            const bool more = j == 0 || first + j < size;
            const {real} scale = more ? weights[first + j] : {real}{{0}};
            const int row_there = rows[more ? first + j : first];
            const {real}* from = reinterpret_cast<const {real}*>(data + row_there * values.strides[0]);
            #pragma unroll
            for (int i = 0; i < {held}; ++i) {{
                if (channel + i * {count} < width && more) total[i] += scale * from[i * {count}];
            }}
        }}
    }}
    __syncwarp(mask);
    return total;
"""


@functools.cache
def row_sum(sums: torch.dtype, count: int, held: int) -> Any:
    """A type for the channels a lane holds, which channel is which, and the sum.

    In ``add_rows`` every lane brings a row of ``values`` and its weight; all lanes take part in each.
    """
    real, _ = REALS[sums]
    Channels = wp.types.vector(length=held, dtype=real)
    lane = lanes(count).lane

    @wp.func
    def channel_of(chunk: int, i: int):
        return (chunk * held + i) * count + lane()

    @wp.func
    def add_row(
        total: Channels, values: wp.array2d(dtype=real), chunk: int, weight: real, row: int, exists: bool
    ):
        if exists:
            for i in range(held):
                channel = channel_of(chunk, i)
                if channel < values.shape[1]:
                    total[i] += weight * values[row, channel]
        return total

    names = {"real": "float" if sums == torch.float32 else "double", "held": held, "count": count}
    bits = {"last": count - 1, "others": 32 - count, "mask": 2**count - 1}

    @wp.func_native(_ADD_ROWS.format(**names, **bits))
    def add_rows(
        total: Channels, values: wp.array2d(dtype=real), chunk: int, weight: real, row: int, exists: bool
    ) -> Channels: ...

    return Channels, channel_of, add_row if count == 1 else add_rows
