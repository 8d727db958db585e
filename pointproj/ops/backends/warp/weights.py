"""How a distance becomes a weight: one table of kernels, which all sums and gradients are compiled with.

Weights that have no end are exp(-beyond). For a mean, ``base`` is the distance of the query's nearest
neighbour, so that they cannot all vanish; for a sum the weight is the kernel itself, and ``base`` is 0.

    kernel             rate       beyond                          slope       per_sigma
    exponential        1 / sigma  (d - base) rate                 rate        1
    gaussian           1 / sigma  (d^2 - base^2) rate^2 / 2       d rate^2    2
    inverse_distance   power      log(max(d, eps) / base) rate    rate / d    0
    uniform            1          0                               0           0
    compact            1/support  0                               see there   0

``slope`` is minus the derivative of the logarithm of the weight by d; ``beyond rate per_sigma`` is that by
sigma: what is the same for all neighbours of a query is of no account in a mean. Powers of the rate are taken
factor by factor, since they leave the range of numbers where a product with them does not. Of a
:class:`Weighting` a kernel reads ``power``, and one as ``limit``: the distance from which on the inverse
distance decays (eps), or where compact weights end (support).
"""

from typing import NamedTuple

import torch
import warp as wp

from pointproj.ops.backends.warp.common import REALS, once
from pointproj.ops.specification.reference import FINITE_SUPPORT, Weighting

WITHOUT_END = ("exponential", "gaussian", "inverse_distance")
PER_SIGMA = {"exponential": 1.0, "gaussian": 2.0}


class Weights(NamedTuple):
    """The functions of a kernel, for sums in one dtype; ``d`` is a distance."""

    rate: wp.Function  # (sigma, power, limit)
    beyond: wp.Function  # (base, d, rate, limit)
    weight: wp.Function  # likewise
    slope: wp.Function  # likewise


def is_relative(kernel: str, reduce: str) -> bool:
    """Whether weights are relative to the nearest neighbour that counts."""
    return reduce != "sum" and kernel in WITHOUT_END


def limit_of(weighting: Weighting) -> float:
    """The number that kernels read as ``limit``."""
    return weighting.support if weighting.kernel in FINITE_SUPPORT else weighting.eps


@once
def weights_of(kernel: str, reduce: str, sums: torch.dtype) -> Weights:
    """Each function takes the branch of the kernel when it is compiled."""
    real, *_ = REALS[sums]
    largest, relative = torch.finfo(sums).max, is_relative(kernel, reduce)
    most = largest / 2048.0

    @wp.func
    def at_most(x: real, limit: real):
        return wp.where(x > limit, limit, x)  # NaN stays NaN

    @wp.func
    def rest(d: real, rate: real, limit: real):
        """Of a compact weight, its root: exactly 0 from the limit on."""
        part = d * rate
        return wp.where(d < limit, wp.max((real(1.0) - part) * (real(1.0) + part), real(0.0)), real(0.0))

    @wp.func
    def rate(sigma: real, power: real, limit: real):
        if wp.static(kernel == "inverse_distance"):
            return power
        if wp.static(kernel == "uniform"):
            return real(1.0)
        if wp.static(kernel == "compact"):
            return real(1.0) / limit
        return real(1.0) / sigma

    @wp.func
    def beyond(base: real, d: real, rate: real, limit: real):
        if wp.static(kernel == "exponential"):
            return (d - base) * rate
        if wp.static(kernel == "gaussian"):  # a number, also where it is multiplied by 0
            return at_most(real(0.5) * ((d - base) * rate) * ((d + base) * rate), real(largest))
        if wp.static(kernel == "inverse_distance"):
            ratio = wp.max(d, limit)
            if wp.static(relative):
                ratio /= wp.max(base, limit)
            return wp.log(ratio) * rate
        return real(0.0)

    @wp.func
    def weight(base: real, d: real, rate: real, limit: real):
        made = real(1.0)
        if wp.static(kernel in WITHOUT_END):
            made = wp.exp(-beyond(base, d, rate, limit))
        if wp.static(kernel == "compact"):
            left = rest(d, rate, limit)
            made = left * left
        if wp.static(reduce == "weighted"):  # one without a weight may be much nearer than the base
            made = at_most(made, real(most))
        return made

    @wp.func
    def slope(base: real, d: real, rate: real, limit: real):
        if wp.static(kernel == "exponential"):
            return rate
        if wp.static(kernel == "gaussian"):
            return at_most(d * rate * rate, real(largest))
        if wp.static(kernel == "inverse_distance"):
            return wp.where(d > limit, rate / d, real(0.0))
        if wp.static(kernel == "compact"):
            left = rest(d, rate, limit)
            return wp.where(left > real(0.0), real(4.0) * d * rate * rate / left, real(0.0))
        return real(0.0)

    return Weights(rate, beyond, weight, slope)
