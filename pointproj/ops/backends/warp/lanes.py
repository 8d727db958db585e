"""Lanes: what neighbouring threads of a GPU warp that work on one point can tell each other.

With one lane (on a CPU, or where each thread works for itself) the same functions do nothing, and code that
calls them is a plain loop.
"""

import functools
from typing import Any, NamedTuple

import warp as wp


class Lanes(NamedTuple):
    """What the lanes of a query can tell each other."""

    count: int
    item: wp.Function  # (first of wp.tid()) -> what these lanes work on, in a launch of (items, count)
    lane: wp.Function  # () -> own number
    any_item: wp.Function  # (flag, an item's) -> whether it is set for any item of the GPU warp
    take: wp.Function  # (x, lane) -> that lane's x
    previous: wp.Function  # (x) -> the x of the lane before this one; the first gets its own
    ballot: wp.Function  # (flag) -> one bit for each lane
    sum_before: wp.Function  # (x) -> sum over the lanes before this one
    minimum: wp.Function  # (x) -> smallest over all lanes
    total: wp.Function  # (x) -> sum over all lanes


@functools.cache
def lanes(count: int) -> Lanes:
    """Functions for 1 lane, or for 2 to 32 neighbouring threads of a GPU warp (a power of two).

    All threads of a warp must call them together, also where several items are at work: loops go on until all
    are done.
    """
    return _one_lane() if count == 1 else _several_lanes(count)


def _one_lane() -> Lanes:
    @wp.func
    def item(first: int):
        return first

    @wp.func
    def lane():
        return 0

    @wp.func
    def any_item(flag: bool):
        return flag

    @wp.func
    def take(x: Any, source: int):
        return x

    @wp.func
    def previous(x: Any):
        return x

    @wp.func
    def ballot(flag: bool):
        return wp.where(flag, 1, 0)

    @wp.func
    def sum_before(x: int):
        return 0

    @wp.func
    def minimum(x: Any):
        return x

    @wp.func
    def total(x: Any):
        return x

    return Lanes(1, item, lane, any_item, take, previous, ballot, sum_before, minimum, total)


_LEAST_OF_WARP = """
    #if __CUDA_ARCH__ >= 800
        return __reduce_min_sync(0xffffffffu, x);
    #endif
"""


def _several_lanes(count: int) -> Lanes:
    half = count // 2
    previous_there = f"return __shfl_up_sync(0xffffffffu, x, 1, {count});"
    take_there = f"return __shfl_sync(0xffffffffu, x, source, {count});"
    least = f"""
        for (int step = {half}; step > 0; step >>= 1) {{
            auto other = __shfl_xor_sync(0xffffffffu, x, step);
            x = other < x ? other : x;
        }}
        return x;"""
    sum_up = f"""
        for (int step = {half}; step > 0; step >>= 1) x += __shfl_xor_sync(0xffffffffu, x, step);
        return x;"""

    # What wp.tid() says, without its division by a number that it does not know to be a power of two.
    @wp.func_native(f"return (static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x) / {count};")
    def item(first: int) -> int: ...

    @wp.func_native(f"return threadIdx.x & {count - 1};")
    def lane() -> int: ...

    any_of_warp = "flag" if count == 32 else "__any_sync(0xffffffffu, flag)"

    @wp.func_native(f"return {any_of_warp};")
    def any_item(flag: bool) -> bool: ...

    @wp.func_native(take_there)
    def take(x: wp.int32, source: int) -> wp.int32: ...

    @wp.func_native(take_there)
    def take(x: wp.float32, source: int) -> wp.float32: ...

    @wp.func_native(take_there)
    def take(x: wp.float64, source: int) -> wp.float64: ...

    @wp.func_native(previous_there)
    def previous(x: wp.int32) -> wp.int32: ...

    @wp.func_native(previous_there)
    def previous(x: wp.float32) -> wp.float32: ...

    @wp.func_native(previous_there)
    def previous(x: wp.float64) -> wp.float64: ...

    of_item = f">> (threadIdx.x & {32 - count}u) & {2**count - 1}u"

    @wp.func_native(f"return __ballot_sync(0xffffffffu, flag) {of_item};")
    def ballot(flag: bool) -> int: ...

    @wp.func_native(f"""
        int sum = x;
        for (int step = 1; step < {count}; step <<= 1) {{
            int other = __shfl_up_sync(0xffffffffu, sum, step, {count});
            if ((threadIdx.x & {count - 1}) >= step) sum += other;
        }}
        return sum - x;""")
    def sum_before(x: int) -> int: ...

    @wp.func_native((_LEAST_OF_WARP if count == 32 else "") + least)
    def minimum(x: wp.int32) -> wp.int32: ...

    # By their bits: a whole warp compares integers in one go.
    @wp.func
    def minimum(x: wp.float32):
        return _float_of(minimum(_ordered_bits(x)))

    @wp.func_native(least)
    def minimum(x: wp.float64) -> wp.float64: ...

    @wp.func_native(sum_up)
    def total(x: wp.float32) -> wp.float32: ...

    @wp.func_native(sum_up)
    def total(x: wp.float64) -> wp.float64: ...

    return Lanes(count, item, lane, any_item, take, previous, ballot, sum_before, minimum, total)


# Integers in the order of the floats.
@wp.func_native("const int bits = __float_as_int(x); return bits ^ (bits >> 31 & 0x7fffffff);")
def _ordered_bits(x: wp.float32) -> wp.int32: ...


@wp.func_native("return __int_as_float(bits ^ (bits >> 31 & 0x7fffffff));")
def _float_of(bits: wp.int32) -> wp.float32: ...


_FLOOR_LOG2 = """
#if defined(__CUDA_ARCH__)
    return 31 - __clz(x);
#else
    return 31 - __builtin_clz(x);
#endif
"""


@wp.func_native(_FLOOR_LOG2)
def floor_log2(x: int) -> int:
    """Largest b with 2 ** b <= x, for x >= 1."""
    ...


_LOWEST_BIT = """
#if defined(__CUDA_ARCH__)
    return __ffs(bits) - 1;
#else
    return __builtin_ctz(bits);
#endif
"""


@wp.func_native(_LOWEST_BIT)
def lowest_bit(bits: int) -> int:
    """Number of the lowest bit that is set; there must be one."""
    ...


@wp.func_native("return __popc(bits);")
def bit_count(bits: int) -> int: ...
