"""Lanes: the threads that work on one point, and how they exchange values.

On a GPU eight threads of a warp share a point: they search for its neighbours together, and divide the
channels of a row among them. All threads of a warp call these functions together, although they work on
several points: loops go on until all are done. On a CPU a point has one thread, and the functions do nothing.
"""

from typing import Any, NamedTuple

import warp as wp

from pointproj.ops.backends.warp.common import once

WARP = 32
LANES = 8  # of a point on a GPU


class Lanes(NamedTuple):
    """Functions of the lanes of a point."""

    count: int
    item: wp.Function  # (first of wp.tid()) -> the item of these lanes, in a launch of (items, count)
    lane: wp.Function  # () -> own number
    any: wp.Function  # (flag) -> whether it is set for any lane of the GPU's warp
    ballot: wp.Function  # (flag) -> one bit for each lane
    minimum: wp.Function  # (x) -> smallest over all lanes
    total: wp.Function  # (x) -> sum over all lanes
    totals: wp.Function  # (four numbers) -> sum over all lanes of number lane % 4
    bits_before: wp.Function  # (bits) -> how many are set for the lanes before this one
    bit_count: wp.Function  # (bits)
    sync: wp.Function  # (): after this, lanes see what others in the GPU's warp have written


def lanes_on(device_type: str) -> int:
    """How many lanes share a point."""
    return LANES if device_type == "cuda" else 1


@once
def lanes(count: int) -> Lanes:
    """Functions for several lanes of a GPU, or for a single one."""

    def code(several: str, one: str) -> str:
        return one if count == 1 else several

    # As wp.tid(), whose division is slower, because it does not know that the divisor is a power of two.
    number = f"(static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x) / {count}"

    @wp.func_native(code(f"return {number};", "return first;"))
    def item(first: int) -> int: ...

    @wp.func_native(code(f"return threadIdx.x & {count - 1};", "return 0;"))
    def lane() -> int: ...

    @wp.func_native(code("return __any_sync(0xffffffffu, flag);", "return flag;"))
    def any_of_warp(flag: bool) -> bool: ...

    of_point = f">> (threadIdx.x & {32 - count}u) & {2**count - 1}u"

    @wp.func_native(code(f"return __ballot_sync(0xffffffffu, flag) {of_point};", "return flag;"))
    def ballot(flag: bool) -> int: ...

    for real in (wp.float32, wp.float64):

        @wp.func_native(code("return __shfl_xor_sync(0xffffffffu, x, mask);", "return x;"))
        def exchange(x: real, mask: int) -> real: ...

    bits = count.bit_length() - 1

    @wp.func
    def minimum(x: Any):
        for bit in range(bits):
            x = wp.min(x, exchange(x, 1 << bit))
        return x

    @wp.func
    def total(x: Any):
        for bit in range(bits):
            x = x + exchange(x, 1 << bit)
        return x

    @wp.func
    def totals(numbers: Any):
        odd = (lane() & 1) != 0
        upper = (lane() & 2) != 0
        low = wp.where(odd, numbers[1], numbers[0]) + exchange(wp.where(odd, numbers[0], numbers[1]), 1)
        high = wp.where(odd, numbers[3], numbers[2]) + exchange(wp.where(odd, numbers[2], numbers[3]), 1)
        x = wp.where(upper, high, low) + exchange(wp.where(upper, low, high), 2)
        for bit in range(2, bits):
            x = x + exchange(x, 1 << bit)
        return x

    @wp.func_native(code(f"return __popc(bits & ((1u << (threadIdx.x & {count - 1})) - 1u));", "return 0;"))
    def bits_before(bits: int) -> int: ...

    @wp.func_native(code("return __popc(bits);", "return bits;"))
    def bit_count(bits: int) -> int: ...

    @wp.func_native(code("__syncwarp();", ""))
    def sync(): ...

    return Lanes(count, item, lane, any_of_warp, ballot, minimum, total, totals, bits_before, bit_count, sync)
