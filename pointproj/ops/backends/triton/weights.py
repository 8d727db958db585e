"""Weights of pairs and the derivatives of their logits, for every kernel and reduction.

Which of them is decided when a kernel is compiled: its constants KERNEL and MEAN. Weights of a mean are
relative to that at some distance, as a rule the nearest; those of a sum to that where the kernel is 1.
"""

import triton
import triton.language as tl
from torch import Tensor

from pointproj.ops.backends.triton.tiles import LOG2E, power, quotient, root, rounded_root, square
from pointproj.ops.reference import KERNELS, Weighting

EXPONENTIAL = tl.constexpr(KERNELS.index("exponential"))
GAUSSIAN = tl.constexpr(KERNELS.index("gaussian"))
INVERSE_DISTANCE = tl.constexpr(KERNELS.index("inverse_distance"))
COMPACT = tl.constexpr(KERNELS.index("compact"))
VANISHING = tl.constexpr(48.0)  # weights below 2 to this power, negative, are too small for tiny values
OVERFLOWING = tl.constexpr(64.0)  # weights above 2 to this power are too large for large ones


def parameters(weighting: Weighting, sigma: Tensor) -> tuple[Tensor, Tensor]:
    """The kernel's shape (sigma, power or support) and eps, as tensors: kernels take numbers as fp32."""
    match weighting.kernel:
        case "inverse_distance":
            return sigma.new_full((), weighting.power), sigma.new_full((), weighting.eps)
        case "compact":
            return sigma.new_full((), weighting.support), sigma
    return sigma, sigma  # which has no eps


def choices(weighting: Weighting) -> tuple[int, bool]:
    """The constants KERNEL and MEAN."""
    return KERNELS.index(weighting.kernel), weighting.reduce == "mean"


@triton.jit
def slope_of(shape, KERNEL: tl.constexpr):
    """What distances, their squares or logarithms are multiplied with in :func:`relative_weights`, or the
    support.
    """
    if KERNEL == EXPONENTIAL:
        slope = 1.0 / shape * LOG2E
    elif KERNEL == GAUSSIAN:
        slope = 0.5 / (shape * shape) * LOG2E
    else:
        slope = shape
    return slope


@triton.jit
def length(squared, KERNEL: tl.constexpr):
    """Distances; rounded where their being equal to the support decides whether there is a weight at all."""
    return rounded_root(squared) if KERNEL == COMPACT else root(squared)


@triton.jit
def rest_of_support(distance, support):
    """1 - (d / support)^2, exactly 0 at the support."""
    ratio = quotient(distance, support)
    return 1.0 - square(ratio)


@triton.jit
def relative_weights(nearest, distance, slope, eps, KERNEL: tl.constexpr):
    """Weights at distances, relative to that at ``nearest``; those of finite support are not relative."""
    if KERNEL == EXPONENTIAL:
        weights = power((nearest - distance) * slope)
    elif KERNEL == GAUSSIAN:
        weights = power((nearest - distance) * (nearest + distance) * slope)
    elif KERNEL == INVERSE_DISTANCE:
        weights = power(tl.log2(nearest / tl.maximum(distance, eps)) * slope)
    elif KERNEL == COMPACT:
        rest = tl.maximum(rest_of_support(distance, slope), 0.0)
        weights = rest * rest
    else:
        weights = tl.full(distance.shape, 1.0, distance.dtype)
    return weights


@triton.jit
def as_anchor(nearest, eps, KERNEL: tl.constexpr):
    """A nearest distance as :func:`relative_weights` takes it; :func:`distance_of_one` is taken as it is."""
    if KERNEL == INVERSE_DISTANCE:
        nearest = tl.maximum(nearest, eps)
    return nearest


@triton.jit
def distance_of_one(like, KERNEL: tl.constexpr):
    """Where a kernel of infinite support is 1."""
    return tl.full(like.shape, 1.0 if KERNEL == INVERSE_DISTANCE else 0.0, like.dtype)


@triton.jit
def can_vanish(farthest, slope, eps, KERNEL: tl.constexpr):
    """Whether weights relative to :func:`distance_of_one` may be too small or too large for a mean.

    ``farthest`` is the largest squared distance.
    """
    if KERNEL == EXPONENTIAL:
        vanishes = tl.sqrt(farthest) * slope > VANISHING
    elif KERNEL == GAUSSIAN:
        vanishes = farthest * slope > VANISHING
    elif KERNEL == INVERSE_DISTANCE:
        vanishes = (tl.log2(farthest) * 0.5 * slope > VANISHING) | (-tl.log2(eps) * slope > OVERFLOWING)
    else:
        vanishes = farthest < 0
    return vanishes


@triton.jit
def by_distance_per_length(distance, shape, eps, KERNEL: tl.constexpr):
    """Derivative of the logits by distance, divided by the distance; 0 at 0."""
    if KERNEL == EXPONENTIAL:
        derivative = tl.where(distance > 0, -1.0 / shape / distance, 0.0)
    elif KERNEL == GAUSSIAN:
        derivative = tl.where(distance > 0, -1.0 / (shape * shape), 0.0)
    elif KERNEL == INVERSE_DISTANCE:
        derivative = tl.where(distance > eps, -shape / distance / distance, 0.0)
    elif KERNEL == COMPACT:
        rest = rest_of_support(distance, shape)
        derivative = tl.where((distance > 0) & (rest > 0), -4.0 / (shape * shape) / rest, 0.0)
    else:
        derivative = tl.zeros_like(distance)
    return derivative


@triton.jit
def sigma_shares(of_logit, nearest, distance, shape, KERNEL: tl.constexpr):
    """Gradients of the logits, which are relative to ``nearest``, times their derivatives by sigma.

    Factor by factor: the inverse of a power of a small sigma may overflow, and 0 times that is 0 here.
    """
    inverse = 1.0 / shape
    if KERNEL == EXPONENTIAL:
        shares = of_logit * (distance - nearest) * inverse * inverse
    elif KERNEL == GAUSSIAN:
        shares = of_logit * (distance - nearest) * inverse * (distance + nearest) * inverse * inverse
    else:
        shares = tl.zeros_like(distance)
    return shares
