"""How a distance becomes a weight: one table of kernels, which all sums and gradients are compiled with.

Weights that have no end are exp((base - level(d)) rate). For a mean, ``base`` is the level of the query's
nearest neighbour, so that they cannot all vanish; for a sum it is 0, and the weight is the kernel itself.

    kernel              level              rate              pull                per_sigma
    exponential         d                  1 / sigma         rate                1 / sigma^2
    gaussian            d^2                1 / (2 sigma^2)   2 rate d            1 / sigma^3
    inverse_distance    log max(d, eps)    power             power / d, or 0     0
    uniform             0                  1                 0                   0
    compact             0                  1 / support       see there           0

``pull`` is minus the derivative of the logarithm of the weight by d; ``(level(d) - base) per_sigma`` is that
by sigma: what is the same for all neighbours of a query is of no account in a mean. Of the numbers of a
:class:`Weighting` a kernel reads ``power``, and one as ``limit``: the distance from which on the inverse
distance decays (eps), or where compact weights end (support).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import warp as wp

from pointproj.ops.backends.warp.common import REALS, once
from pointproj.ops.reference import Weighting


class Weights(NamedTuple):
    """A row of the table, for sums in one dtype; ``d`` is a distance."""

    rate: wp.Function  # (sigma, power, limit)
    level: wp.Function  # (d, limit)
    weight: wp.Function  # (base, d, rate, limit)
    pull: wp.Function  # (d, rate, limit)
    per_sigma: wp.Function  # (sigma)


WITHOUT_END = ("exponential", "gaussian", "inverse_distance")


def is_relative(kernel: str, reduce: str) -> bool:
    """Whether weights are relative to the nearest neighbour."""
    return reduce == "mean" and kernel in WITHOUT_END


def limit_of(weighting: Weighting) -> float:
    """The number that kernels read as ``limit``."""
    return weighting.support if weighting.kernel == "compact" else weighting.eps


@once
def weights_of(kernel: str, sums: torch.dtype) -> Weights:
    """The functions of a kernel."""
    return TABLE[kernel](REALS[sums][0])


def _without_end(
    real: Any, rate: wp.Function, level: wp.Function, pull: wp.Function, per_sigma: wp.Function
) -> Weights:
    @wp.func
    def weight(base: real, d: real, rate: real, limit: real):
        return wp.exp((base - level(d, limit)) * rate)

    return Weights(rate, level, weight, pull, per_sigma)


def _exponential(real: Any) -> Weights:
    @wp.func
    def rate(sigma: real, power: real, limit: real):
        return real(1.0) / sigma

    @wp.func
    def level(d: real, limit: real):
        return d

    @wp.func
    def pull(d: real, rate: real, limit: real):
        return rate

    @wp.func
    def per_sigma(sigma: real):
        return real(1.0) / (sigma * sigma)

    return _without_end(real, rate, level, pull, per_sigma)


def _gaussian(real: Any) -> Weights:
    # Where powers of sigma vanish or overflow: a number, so that 0 times it is 0, and inf times it inf.
    limits = torch.finfo(wp.dtype_to_torch(real))
    least, most = limits.tiny, limits.max

    @wp.func
    def rate(sigma: real, power: real, limit: real):
        square = sigma * sigma
        return wp.where(square > real(most), real(least), real(0.5) / square)

    @wp.func
    def level(d: real, limit: real):
        return d * d

    @wp.func
    def pull(d: real, rate: real, limit: real):
        return wp.min(real(most), real(2.0) * rate * d)

    @wp.func
    def per_sigma(sigma: real):
        return real(1.0) / wp.max(real(least), sigma * sigma * sigma)

    return _without_end(real, rate, level, pull, per_sigma)


def _inverse_distance(real: Any) -> Weights:
    @wp.func
    def rate(sigma: real, power: real, limit: real):
        return power

    @wp.func
    def level(d: real, limit: real):
        return wp.log(wp.max(d, limit))

    @wp.func
    def pull(d: real, rate: real, limit: real):
        return wp.where(d > limit, rate / d, real(0.0))

    return _without_end(real, rate, level, pull, _no_sigma(real))


def _uniform(real: Any) -> Weights:
    @wp.func
    def rate(sigma: real, power: real, limit: real):
        return real(1.0)

    @wp.func
    def weight(base: real, d: real, rate: real, limit: real):
        return real(1.0)

    @wp.func
    def pull(d: real, rate: real, limit: real):
        return real(0.0)

    return Weights(rate, _no_level(real), weight, pull, _no_sigma(real))


def _compact(real: Any) -> Weights:
    """(1 - (d / limit)^2)^2, with the pull 4 d / (limit^2 - d^2); exactly 0 from the limit on."""

    @wp.func
    def rate(sigma: real, power: real, limit: real):
        return real(1.0) / limit

    @wp.func
    def rest(d: real, rate: real, limit: real):
        part = d * rate
        return wp.where(d < limit, wp.max((real(1.0) - part) * (real(1.0) + part), real(0.0)), real(0.0))

    @wp.func
    def weight(base: real, d: real, rate: real, limit: real):
        left = rest(d, rate, limit)
        return left * left

    @wp.func
    def pull(d: real, rate: real, limit: real):
        left = rest(d, rate, limit)
        return wp.where(left > real(0.0), real(4.0) * d * rate * rate / left, real(0.0))

    return Weights(rate, _no_level(real), weight, pull, _no_sigma(real))


def _no_level(real: Any) -> wp.Function:
    @wp.func
    def level(d: real, limit: real):
        return real(0.0)

    return level


def _no_sigma(real: Any) -> wp.Function:
    @wp.func
    def per_sigma(sigma: real):
        return real(0.0)

    return per_sigma


TABLE: dict[str, Callable[[Any], Weights]] = {
    "exponential": _exponential,
    "gaussian": _gaussian,
    "inverse_distance": _inverse_distance,
    "uniform": _uniform,
    "compact": _compact,
}
