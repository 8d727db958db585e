"""Arithmetic that all kernels share, and how they load points.

Distances are rounded after each operation, as in the reference: which points are neighbours must not depend
on whether a compiler fuses products and sums.
"""

import triton
import triton.language as tl

from pointproj.ops.bridge.triton_op import INTERPRETED

LOG2E = tl.constexpr(1.4426950408889634)  # exp(x) is 2 to the power of LOG2E x
_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def square(x):
    """x * x, rounded: not fused with the addition that follows."""
    if _INTERPRETED:
        squared = x * x
    elif x.dtype == tl.float64:
        squared = tl.inline_asm_elementwise("mul.rn.f64 $0, $1, $1;", "=d,d", [x], tl.float64, True, 1)
    else:
        squared = tl.inline_asm_elementwise("mul.rn.f32 $0, $1, $1;", "=f,f", [x], tl.float32, True, 1)
    return squared


@triton.jit
def squared_length(dx, dy, dz):
    """Rounded in the order of :func:`pointproj.ops.specification.reference.squared_distances`."""
    return square(dx) + square(dy) + square(dz)


@triton.jit
def rounded_root(x):
    """Square root, rounded."""
    return tl.sqrt(x) if x.dtype == tl.float64 else tl.sqrt_rn(x)


@triton.jit
def quotient(x, y):
    """x / y, rounded."""
    x, y = tl.broadcast(x, y)
    return x / y if x.dtype == tl.float64 else tl.div_rn(x, y)


@triton.jit
def power(x):
    """2 to the power of x, by the approximation of the hardware."""
    if _INTERPRETED or x.dtype == tl.float64:
        result = tl.exp2(x)
    else:
        result = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    return result


@triton.jit
def reciprocal(x):
    """1 / x, by the approximation of the hardware."""
    if _INTERPRETED or x.dtype == tl.float64:
        result = 1.0 / x
    else:
        result = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    return result


@triton.jit
def is_finite(x, y, z):
    """Which points are finite."""
    return (tl.abs(x) < float("inf")) & (tl.abs(y) < float("inf")) & (tl.abs(z) < float("inf"))


@triton.jit
def load_points(points, row, mask, other):
    """Coordinates of rows of a tensor (N, 3)."""
    at = points + 3 * row.to(tl.int64)
    x, y = tl.load(at, mask=mask, other=other), tl.load(at + 1, mask=mask, other=other)
    return x, y, tl.load(at + 2, mask=mask, other=other)
