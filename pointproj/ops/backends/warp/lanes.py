"""Lanes: what the threads that work on one point can tell each other.

On a GPU these are the 32 threads of a warp; its groups of 8 stand side by side over the numbers of a row. On
a CPU it is one thread, for which the same functions do nothing, and code that calls them is a plain loop.
"""

import os
from typing import Any, NamedTuple

import warp as wp

from pointproj.ops.backends.warp.common import once

WARP, GROUP = 32, int(os.environ.get("PP_GROUP", "8"))


class Lanes(NamedTuple):
    """What the lanes of a point can tell each other; all of them call each function together."""

    count: int
    group: int  # lanes of a group
    item: wp.Function  # (first of wp.tid()) -> what these lanes work on, in a launch of (items, count)
    lane: wp.Function  # () -> own number
    take: wp.Function  # (x, lane) -> that lane's x
    ballot: wp.Function  # (flag) -> one bit for each lane
    minimum: wp.Function  # (x) -> smallest over all lanes
    total: wp.Function  # (x) -> sum over all lanes
    sum_of_group: wp.Function  # (x) -> sum over the lanes of a group
    sum_over_groups: wp.Function  # (x) -> sum over the lanes that have the same place in their group


@once
def lanes(count: int) -> Lanes:
    """Functions for the 32 lanes of a GPU's warp, or for a single one."""
    return _one_lane() if count == 1 else _lanes_of_warp()


def lanes_on(device_type: str) -> int:
    """How many lanes share a point."""
    return WARP if device_type == "cuda" else 1


def _one_lane() -> Lanes:
    @wp.func
    def item(first: int):
        return first

    @wp.func
    def lane():
        return 0

    @wp.func
    def take(x: Any, source: int):
        return x

    @wp.func
    def ballot(flag: bool):
        return wp.where(flag, 1, 0)

    @wp.func
    def itself(x: Any):
        return x

    return Lanes(1, 1, item, lane, take, ballot, itself, itself, itself, itself)


def _lanes_of_warp() -> Lanes:
    # What wp.tid() says, without its division by a number that it does not know to be a power of two.
    @wp.func_native("return (static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;")
    def item(first: int) -> int: ...

    @wp.func_native("return threadIdx.x & 31;")
    def lane() -> int: ...

    group_bits = GROUP.bit_length() - 1
    take_there = "return __shfl_sync(0xffffffffu, x, source);"
    exchanged = "return __shfl_xor_sync(0xffffffffu, x, mask);"

    @wp.func_native(take_there)
    def take(x: wp.int32, source: int) -> wp.int32: ...

    @wp.func_native(take_there)
    def take(x: wp.float32, source: int) -> wp.float32: ...

    @wp.func_native(take_there)
    def take(x: wp.float64, source: int) -> wp.float64: ...

    @wp.func_native(exchanged)
    def exchange(x: wp.int32, mask: int) -> wp.int32: ...

    @wp.func_native(exchanged)
    def exchange(x: wp.float32, mask: int) -> wp.float32: ...

    @wp.func_native(exchanged)
    def exchange(x: wp.float64, mask: int) -> wp.float64: ...

    @wp.func_native("return __ballot_sync(0xffffffffu, flag);")
    def ballot(flag: bool) -> int: ...

    @wp.func
    def minimum(x: Any):
        for bit in range(5):
            x = wp.min(x, exchange(x, 1 << bit))
        return x

    @wp.func
    def sum_of_group(x: Any):
        for bit in range(group_bits):
            x = x + exchange(x, 1 << bit)
        return x

    @wp.func
    def sum_over_groups(x: Any):
        for bit in range(group_bits, 5):
            x = x + exchange(x, 1 << bit)
        return x

    @wp.func
    def total(x: Any):
        return sum_over_groups(sum_of_group(x))

    return Lanes(WARP, GROUP, item, lane, take, ballot, minimum, total, sum_of_group, sum_over_groups)


_SYNC = """
#if defined(__CUDA_ARCH__)
    __syncwarp();
#endif
"""
_FENCE = """
#if defined(__CUDA_ARCH__)
    __threadfence();
#endif
"""


@wp.func_native(_SYNC)
def sync():
    """After this, the lanes of a warp see what they wrote before it."""
    ...


@wp.func_native(_FENCE)
def fence():
    """What this thread wrote before it is seen before what it writes after."""
    ...


_BITS_BEFORE = """
#if defined(__CUDA_ARCH__)
    return __popc(bits & ((1u << (threadIdx.x & 31u)) - 1u));
#else
    return 0;
#endif
"""
_BIT_COUNT = """
#if defined(__CUDA_ARCH__)
    return __popc(bits);
#else
    return __builtin_popcount(bits);
#endif
"""


@wp.func_native(_BITS_BEFORE)
def bits_before(bits: int) -> int:
    """How many bits are set for the lanes before this one."""
    ...


@wp.func_native(_BIT_COUNT)
def bit_count(bits: int) -> int: ...
