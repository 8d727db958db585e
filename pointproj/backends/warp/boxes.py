"""The boxes around clouds: every cell list begins with one."""

import functools

import torch
import warp as wp
from torch import Tensor

from pointproj.backends.warp.common import OPTIONS, REALS, cloud_of


def bound_threads(points: Tensor) -> int:
    """So many that a GPU warp, or a thread of a CPU, sees 512 points or more; few atomics meet then."""
    groups = max(1, min(points.shape[0] // 512, 2**11))
    return 32 * groups if points.is_cuda else groups


_WARP_MINIMUM = """
#if defined(__CUDA_ARCH__)
    for (int step = 16; step > 0; step >>= 1) {
        auto other = __shfl_xor_sync(0xffffffffu, x, step);
        x = other < x ? other : x;
    }
#endif
    return x;
"""


@wp.func_native(_WARP_MINIMUM)
def warp_minimum(x: wp.float32) -> wp.float32:
    """Smallest x of the 32 threads of a GPU warp; on a CPU, x."""
    ...


@wp.func_native(_WARP_MINIMUM)
def warp_minimum(x: wp.float64) -> wp.float64: ...


@wp.func_native("""
#if defined(__CUDA_ARCH__)
    return thread % 32 == 0;
#else
    return true;
#endif
""")
def is_leader(thread: int) -> bool:
    """Whether this thread speaks for those that :func:`warp_minimum` took together."""
    ...


# Floats of one sign are ordered as their bits are: one atomic, where Warp's own compares and swaps in a loop.
_LOWER = """
    char* first = reinterpret_cast<char*>(table.data) + row * table.strides[0];
    {real}* at = reinterpret_cast<{real}*>(first) + column;
#if defined(__CUDA_ARCH__)
    if (value >= 0) atomicMin(reinterpret_cast<{signed}*>(at), {bits}(value));
    else atomicMax(reinterpret_cast<unsigned {signed}*>(at), static_cast<unsigned {signed}>({bits}(value)));
#else
    if (value < *at) *at = value;
#endif
"""
_LOWER_NAMES = {
    torch.float32: {"real": "float", "signed": "int", "bits": "__float_as_int"},
    torch.float64: {"real": "double", "signed": "long long", "bits": "__double_as_longlong"},
}


@functools.cache
def atomic_lower(dtype: torch.dtype) -> wp.Function:
    """``lower(table, row, column, value)``: lower an entry of a table to a value."""
    real, _ = REALS[dtype]

    @wp.func_native(_LOWER.format(**_LOWER_NAMES[dtype]))
    def lower(table: wp.array2d(dtype=real), row: int, column: int, value: real): ...

    return lower


@functools.cache
def bound_kernel(dtype: torch.dtype) -> wp.Kernel:
    """Lowest corner and negated highest corner of each cloud's finite points.

    Of a single cloud also the mean corners of groups of 512: a box that holds most of it, but no outliers.
    """
    real, vec3 = REALS[dtype]
    lower = atomic_lower(dtype)
    boxes = wp.array2d(dtype=real)
    Batch = wp.types.matrix(shape=(8, 3), dtype=real)

    @wp.func
    def keep(box: boxes, cloud: int, low: vec3, high: vec3):
        for axis in range(3):
            if low[axis] < box[cloud, axis]:
                lower(box, cloud, axis, low[axis])
            if high[axis] < box[cloud, axis + 3]:
                lower(box, cloud, axis + 3, high[axis])

    @wp.kernel(**OPTIONS)
    def bound(
        points: wp.array(dtype=vec3), offsets: wp.array(dtype=wp.int32), clouds: int, threads: int, box: boxes
    ):
        thread = wp.tid()
        rows = points.shape[0]
        low = vec3(real(wp.inf))
        high = vec3(real(wp.inf))
        cloud = int(0)
        row = int(thread)
        while clouds == 1 and row < rows:
            batch = Batch()
            for i in range(8):  # all on their way before the first is looked at
                batch[i] = points[wp.min(row + i * threads, rows - 1)]
            for i in range(8):
                p = batch[i]
                finite = wp.dot(p - p, vec3(real(1.0))) == real(0.0)
                low = wp.where(finite, wp.min(low, p), low)
                high = wp.where(finite, wp.min(high, -p), high)
            row += 8 * threads
        while row < rows:
            p = points[row]
            if wp.isfinite(p):
                now = cloud_of(row, offsets, rows, clouds)
                if now != cloud:
                    keep(box, cloud, low, high)
                    low = vec3(real(wp.inf))
                    high = vec3(real(wp.inf))
                    cloud = now
                low = wp.min(low, p)
                high = wp.min(high, -p)
            row += threads
        if clouds == 1:
            for axis in range(3):
                low[axis] = warp_minimum(low[axis])
                high[axis] = warp_minimum(high[axis])
        if clouds > 1:
            keep(box, cloud, low, high)
        elif is_leader(thread) and low[0] < real(wp.inf):
            for axis in range(3):
                lower(box, 0, axis, low[axis])
                lower(box, 0, axis + 3, high[axis])
                wp.atomic_add(box, 0, axis + 6, low[axis])
                wp.atomic_add(box, 0, axis + 9, high[axis])
            wp.atomic_add(box, 0, 12, real(1.0))

    return bound
