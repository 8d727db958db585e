"""The table of the weighting kernels: weights and derivatives, for forward and gradients alike.

The names are those of ``docs/contribute/kernels.md``. The constants KERNEL and REDUCE select a branch when a
Triton kernel is compiled. A new weighting kernel is one more branch of :func:`weigh`.
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
    """``parameter`` (sigma, power or support) and ``eps`` as tensors: Triton passes numbers as fp32."""
    if weighting.kernel == "inverse_distance":
        return sigma.new_full((), weighting.power), sigma.new_full((), weighting.eps)
    if weighting.kernel in FINITE_SUPPORT:
        return sigma.new_full((), weighting.support), sigma
    return sigma, sigma  # eps is not used


def choices(weighting: Weighting) -> tuple[int, int]:
    """The constants KERNEL and REDUCE."""
    return KERNELS.index(weighting.kernel), REDUCTIONS.index(weighting.reduce)


@triton.jit
def base_of(distance, eps, KERNEL: tl.constexpr):
    """The base, given the distance of the nearest neighbour."""
    if KERNEL == INVERSE_DISTANCE:
        distance = tl.maximum(distance, eps)
    elif KERNEL == COMPACT:
        distance = tl.zeros_like(distance)
    return distance


@triton.jit
def base_of_sum(like, KERNEL: tl.constexpr):
    """The base with which the weight is the kernel itself."""
    return tl.full(like.shape, 1.0 if KERNEL == INVERSE_DISTANCE else 0.0, like.dtype)


@triton.jit
def weigh(base, distance, parameter, eps, KERNEL: tl.constexpr, REDUCE: tl.constexpr):
    """``weight``, ``decay_per_distance`` and ``by_sigma``.

    by_sigma multiplies by the inverse of sigma once for each power of it: the power itself may overflow. The
    weight is finite also for neighbours without a reference weight, which may be nearer than the base.
    """
    inverse = 1.0 / parameter
    most: tl.constexpr = 2.0**1013 if distance.dtype == tl.float64 else 2.0**117
    by_sigma = tl.zeros_like(distance)
    if KERNEL == EXPONENTIAL:
        weight = power((base - distance) * (inverse * LOG2E))
        decay_per_distance = tl.where(distance > 0, inverse / distance, 0.0)
        by_sigma = (distance - base) * inverse * inverse
    elif KERNEL == GAUSSIAN:
        weight = power((base - distance) * inverse * ((base + distance) * inverse) * (0.5 * LOG2E))
        decay_per_distance = tl.where(distance > 0, inverse * inverse, 0.0)
        by_sigma = (distance - base) * inverse * ((distance + base) * inverse) * inverse
    elif KERNEL == INVERSE_DISTANCE:
        weight = power(tl.log2(base / tl.maximum(distance, eps)) * parameter)
        decay_per_distance = tl.where(distance >= eps, parameter / distance / distance, 0.0)
    elif KERNEL == COMPACT:
        rest = tl.maximum(1.0 - square(quotient(distance, parameter)), 0.0)  # exactly 0 at the support
        weight = rest * rest
        decay_per_distance = tl.where((distance > 0) & (rest > 0), 4.0 / (parameter * parameter) / rest, 0.0)
    else:
        weight = tl.full(distance.shape, 1.0, distance.dtype)
        decay_per_distance = tl.zeros_like(distance)
    if REDUCE == WEIGHTED:
        weight = tl.where(weight > most, most, weight)  # tl.minimum would drop NaN
    return weight, decay_per_distance, by_sigma
