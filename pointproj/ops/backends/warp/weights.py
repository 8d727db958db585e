"""How a distance becomes a weight: one table of kernels, which all sums and gradients are compiled with.

Weights that have no end are exp(-beyond). For a mean, ``base`` is the level of the query's nearest neighbour,
so that they cannot all vanish; for a sum it is ``absolute``, and the weight is the kernel itself.

    kernel             level        absolute  rate       beyond                     pull          per_sigma
    exponential        d            0         1 / sigma  (d - base) rate            rate          rate
    gaussian           d            0         1 / sigma  (d^2 - base^2) rate^2 / 2  d rate^2      2 rate
    inverse_distance   max(d, eps)  1         power      log(level / base) rate     rate / d      0
    uniform            0            0         1          0                          0             0
    compact            0            0         1/support  0                          see there     0

``pull`` is minus the derivative of the logarithm of the weight by d; ``beyond per_sigma`` is that by sigma:
what is the same for all neighbours of a query is of no account in a mean. Powers of the rate are taken factor
by factor, since they leave the range of numbers where a product with them does not. Of the numbers of a
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

    absolute: float
    rate: wp.Function  # (sigma, power, limit)
    level: wp.Function  # (d, limit)
    beyond: wp.Function  # (base, d, rate, limit)
    weight: wp.Function  # (base, d, rate, limit)
    pull: wp.Function  # (d, rate, limit)
    per_sigma: wp.Function  # (rate)


WITHOUT_END = ("exponential", "gaussian", "inverse_distance")


def is_relative(kernel: str, reduce: str) -> bool:
    """Whether weights are relative to the nearest neighbour that counts."""
    return reduce != "sum" and kernel in WITHOUT_END


def limit_of(weighting: Weighting) -> float:
    """The number that kernels read as ``limit``."""
    return weighting.support if weighting.kernel == "compact" else weighting.eps


@once
def weights_of(kernel: str, reduce: str, sums: torch.dtype) -> Weights:
    """The functions of a kernel."""
    real, *_ = REALS[sums]
    row = TABLE[kernel](real)
    if reduce != "relative":
        return row
    most, weight_of = torch.finfo(sums).max / 2048.0, row.weight

    @wp.func
    def weight(base: real, d: real, rate: real, limit: real):
        """A number also for a neighbour that does not count, and may be much nearer than the base."""
        made = weight_of(base, d, rate, limit)
        return wp.where(made > real(most), real(most), made)

    return row._replace(weight=weight)


def _without_end(beyond: wp.Function, real: Any) -> wp.Function:
    @wp.func
    def weight(base: real, d: real, rate: real, limit: real):
        return wp.exp(-beyond(base, d, rate, limit))

    return weight


def _exponential(real: Any) -> Weights:
    @wp.func
    def rate(sigma: real, power: real, limit: real):
        return real(1.0) / sigma

    @wp.func
    def level(d: real, limit: real):
        return d

    @wp.func
    def beyond(base: real, d: real, rate: real, limit: real):
        return (d - base) * rate

    @wp.func
    def pull(d: real, rate: real, limit: real):
        return rate

    @wp.func
    def per_sigma(rate: real):
        return rate

    return Weights(0.0, rate, level, beyond, _without_end(beyond, real), pull, per_sigma)


def _gaussian(real: Any) -> Weights:
    most = torch.finfo(wp.dtype_to_torch(real)).max  # a slope must be a number: 0 times it is 0

    @wp.func
    def beyond(base: real, d: real, rate: real, limit: real):
        return wp.min(real(most), real(0.5) * ((d - base) * rate) * ((d + base) * rate))

    @wp.func
    def pull(d: real, rate: real, limit: real):
        return wp.min(real(most), d * rate * rate)

    @wp.func
    def per_sigma(rate: real):
        return real(2.0) * rate

    weight = _without_end(beyond, real)
    return _exponential(real)._replace(beyond=beyond, weight=weight, pull=pull, per_sigma=per_sigma)


def _inverse_distance(real: Any) -> Weights:
    @wp.func
    def rate(sigma: real, power: real, limit: real):
        return power

    @wp.func
    def level(d: real, limit: real):
        return wp.max(d, limit)

    @wp.func
    def beyond(base: real, d: real, rate: real, limit: real):
        return wp.log(wp.max(d, limit) / base) * rate

    @wp.func
    def pull(d: real, rate: real, limit: real):
        return wp.where(d > limit, rate / d, real(0.0))

    return Weights(1.0, rate, level, beyond, _without_end(beyond, real), pull, _uniform(real).per_sigma)


def _uniform(real: Any) -> Weights:
    @wp.func
    def rate(sigma: real, power: real, limit: real):
        return real(1.0)

    @wp.func
    def level(d: real, limit: real):
        return real(0.0)

    @wp.func
    def beyond(base: real, d: real, rate: real, limit: real):
        return real(0.0)

    @wp.func
    def weight(base: real, d: real, rate: real, limit: real):
        return real(1.0)

    @wp.func
    def pull(d: real, rate: real, limit: real):
        return real(0.0)

    @wp.func
    def per_sigma(rate: real):
        return real(0.0)

    return Weights(0.0, rate, level, beyond, weight, pull, per_sigma)


def _compact(real: Any) -> Weights:
    @wp.func
    def rate(sigma: real, power: real, limit: real):
        return real(1.0) / limit

    @wp.func
    def rest(d: real, rate: real, limit: real):
        """Exactly 0 from the limit on."""
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

    return _uniform(real)._replace(rate=rate, weight=weight, pull=pull)


TABLE: dict[str, Callable[[Any], Weights]] = {
    "exponential": _exponential,
    "gaussian": _gaussian,
    "inverse_distance": _inverse_distance,
    "uniform": _uniform,
    "compact": _compact,
}
