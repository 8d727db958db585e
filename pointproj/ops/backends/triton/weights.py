"""The table of the weighting kernels: weights and derivatives, for forward and gradients alike.

Which row is taken is decided when a kernel is compiled: its constants KERNEL and REDUCE. Weights of a mean
are relative to that of the nearest neighbour, so that not all of them can vanish; those of a sum to 1. The
row of one more kernel goes into :func:`weigh`.
"""

import triton
import triton.language as tl
from torch import Tensor

from pointproj.ops.backends.triton.arithmetic import LOG2E, power, quotient, square
from pointproj.ops.specification.reference import FINITE_SUPPORT, KERNELS, Weighting

EXPONENTIAL = tl.constexpr(KERNELS.index("exponential"))
GAUSSIAN = tl.constexpr(KERNELS.index("gaussian"))
INVERSE_DISTANCE = tl.constexpr(KERNELS.index("inverse_distance"))
COMPACT = tl.constexpr(KERNELS.index("compact"))
REDUCTIONS = ("mean", "sum", "weighted")
SUM = tl.constexpr(REDUCTIONS.index("sum"))
WEIGHTED = tl.constexpr(REDUCTIONS.index("weighted"))


def parameters(weighting: Weighting, sigma: Tensor) -> tuple[Tensor, Tensor]:
    """The kernel's shape (sigma, power or support) and eps, as tensors: kernels take numbers as fp32."""
    if weighting.kernel == "inverse_distance":
        return sigma.new_full((), weighting.power), sigma.new_full((), weighting.eps)
    if weighting.kernel in FINITE_SUPPORT:
        return sigma.new_full((), weighting.support), sigma
    return sigma, sigma  # which has no eps


def choices(weighting: Weighting) -> tuple[int, int]:
    """The constants KERNEL and REDUCE."""
    return KERNELS.index(weighting.kernel), REDUCTIONS.index(weighting.reduce)


@triton.jit
def anchor(distance, eps, KERNEL: tl.constexpr):
    """The nearest distance as weights are relative to it, or 0 where they are not."""
    if KERNEL == INVERSE_DISTANCE:
        distance = tl.maximum(distance, eps)
    elif KERNEL == COMPACT:
        distance = tl.zeros_like(distance)
    return distance


@triton.jit
def anchor_of_one(like, KERNEL: tl.constexpr):
    """The anchor whose weight is 1."""
    return tl.full(like.shape, 1.0 if KERNEL == INVERSE_DISTANCE else 0.0, like.dtype)


@triton.jit
def weigh(nearest, distance, shape, eps, KERNEL: tl.constexpr):
    """The weight relative to that at the anchor ``nearest``, and derivatives of its logarithm.

    By distance, divided by the distance and 0 at 0; by sigma, also relative to ``nearest``. The latter goes
    factor by factor: the inverse of a power of a small sigma may overflow. The weight of a neighbour that
    does not count, and may be nearer than the anchor, is a number too.
    """
    inverse = 1.0 / shape
    most: tl.constexpr = 2.0**1013 if distance.dtype == tl.float64 else 2.0**117
    by_sigma = tl.zeros_like(distance)
    if KERNEL == EXPONENTIAL:
        weight = power((nearest - distance) * (inverse * LOG2E))
        per_length = tl.where(distance > 0, -inverse / distance, 0.0)
        by_sigma = (distance - nearest) * inverse * inverse
    elif KERNEL == GAUSSIAN:
        weight = power((nearest - distance) * inverse * ((nearest + distance) * inverse) * (0.5 * LOG2E))
        per_length = tl.where(distance > 0, -inverse * inverse, 0.0)
        by_sigma = (distance - nearest) * inverse * ((distance + nearest) * inverse) * inverse
    elif KERNEL == INVERSE_DISTANCE:
        weight = power(tl.log2(nearest / tl.maximum(distance, eps)) * shape)
        per_length = tl.where(distance > eps, -shape / distance / distance, 0.0)
    elif KERNEL == COMPACT:
        rest = tl.maximum(1.0 - square(quotient(distance, shape)), 0.0)  # exactly 0 at the support
        weight = rest * rest
        per_length = tl.where((distance > 0) & (rest > 0), -4.0 / (shape * shape) / rest, 0.0)
    else:
        weight = tl.full(distance.shape, 1.0, distance.dtype)
        per_length = tl.zeros_like(distance)
    return tl.where(weight > most, most, weight), per_length, by_sigma  # a minimum would drop NaN
