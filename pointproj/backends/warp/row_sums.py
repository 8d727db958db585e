"""Adding weighted rows of a matrix: the lanes of a query stand side by side over the channels."""

import functools
from typing import Any

import torch
import warp as wp

from pointproj.backends.warp.common import REALS
from pointproj.backends.warp.lanes import lanes, lowest_bit

MOST_CHANNELS = {1: 32, 32: 4}  # that a lane holds, by the number of lanes; more take further searches
ROWS_TOGETHER = 4  # loads on their way at a time


def channels_per_lane(channels: int, lanes: int) -> tuple[int, int]:
    """How many channels a lane holds, and how many searches it takes for all of them."""
    held = MOST_CHANNELS[lanes] if lanes == 1 else min(MOST_CHANNELS[lanes], -(-channels // lanes))
    return held, -(-channels // (lanes * held))


@functools.cache
def row_sum(sums: torch.dtype, count: int, held: int) -> Any:
    """A type for the channels a lane holds, which channel is which, and the sum.

    In ``add_rows`` every lane brings a row of ``values`` and its weight; all lanes take part in each.
    """
    real, _ = REALS[sums]
    Channels = wp.types.vector(length=held, dtype=real)
    together = 1 if count == 1 else ROWS_TOGETHER
    Rows = wp.types.vector(length=together, dtype=wp.int32)
    Weights = wp.types.vector(length=together, dtype=real)
    group = lanes(count)
    lane, take, ballot = group.lane, group.take, group.ballot

    @wp.func
    def channel_of(chunk: int, i: int):
        return (chunk * held + i) * count + lane()

    @wp.func
    def add_rows(
        total: Channels, values: wp.array2d(dtype=real), chunk: int, weight: real, row: int, exists: bool
    ):
        waiting = ballot(exists)
        while waiting != 0:
            rows = Rows()
            weights = Weights()
            for j in range(together):
                if waiting != 0:
                    source = lowest_bit(waiting)
                    waiting = waiting & (waiting - 1)
                    rows[j] = take(row, source)
                    weights[j] = take(weight, source)
                else:
                    rows[j] = rows[0]
            for i in range(held):
                channel = channel_of(chunk, i)
                if channel < values.shape[1]:
                    for j in range(together):
                        total[i] += weights[j] * values[rows[j], channel]
        return total

    return Channels, channel_of, add_rows
