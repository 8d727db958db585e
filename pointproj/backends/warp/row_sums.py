"""Adding weighted rows of a matrix: the lanes of a query stand side by side over the channels."""

import functools
from typing import Any

import torch
import warp as wp

from pointproj.backends.warp.common import REALS
from pointproj.backends.warp.lanes import lanes

MOST_CHANNELS = {1: 32, 32: 4}  # that a lane holds, by the number of lanes; more take further searches


def channels_per_lane(channels: int, lanes: int) -> tuple[int, int]:
    """How many channels a lane holds, and how many searches it takes for all of them."""
    held = MOST_CHANNELS[lanes] if lanes == 1 else min(MOST_CHANNELS[lanes], -(-channels // lanes))
    return held, -(-channels // (lanes * held))


# The lanes with a row line up in shared memory, so that four rows are on their way at a time and little but
# loads and multiply-adds is left in the loop.
_ADD_ROWS = """
    __shared__ int all_rows[32][32];
    __shared__ {real} all_weights[32][32];
    const unsigned lane = threadIdx.x & 31u;
    int* rows = all_rows[threadIdx.x >> 5];
    {real}* weights = all_weights[threadIdx.x >> 5];
    const unsigned present = __ballot_sync(0xffffffffu, exists);
    if (present == 0u) return total;
    if (exists) {{
        const int place = __popc(present & ((1u << lane) - 1u));
        rows[place] = row;
        weights[place] = weight;
    }}
    __syncwarp();
    const int size = __popc(present), width = values.shape[1];
    const char* data = reinterpret_cast<const char*>(values.data);
    for (int first = 0; first < size; first += 4) {{
        #pragma unroll
        for (int i = 0; i < {held}; ++i) {{
            const int channel = (chunk * {held} + i) * 32 + static_cast<int>(lane);
            if (channel < width) {{
                {real} value[4];
                #pragma unroll
                for (int j = 0; j < 4; ++j) {{
                    const int from = first + j < size ? rows[first + j] : rows[first];
                    value[j] = reinterpret_cast<const {real}*>(data + from * values.strides[0])[channel];
                }}
                #pragma unroll
                for (int j = 0; j < 4; ++j) {{
                    if (first + j < size) total[i] += weights[first + j] * value[j];
                }}
            }}
        }}
    }}
    __syncwarp();
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

    @wp.func_native(_ADD_ROWS.format(real="float" if sums == torch.float32 else "double", held=held))
    def add_rows(
        total: Channels, values: wp.array2d(dtype=real), chunk: int, weight: real, row: int, exists: bool
    ) -> Channels: ...

    return Channels, channel_of, add_row if count == 1 else add_rows
