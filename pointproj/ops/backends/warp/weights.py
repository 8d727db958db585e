"""How a distance becomes a weight: one table of kernels, which all sums and gradients are compiled with.

Weights that have no end are exp(-beyond). For a mean, ``base`` is the distance of the query's nearest
neighbour, so that they cannot all vanish; for a sum the weight is the kernel itself, and ``base`` is 0.

    kernel             rate       beyond                          pull        per_sigma
    exponential        1 / sigma  (d - base) rate                 rate        1
    gaussian           1 / sigma  (d^2 - base^2) rate^2 / 2       d rate^2    2
    inverse_distance   power      log(max(d, eps) / base) rate    rate / d    0
    uniform            1          0                               0           0
    compact            1/support  0                               see there   0

``pull`` is minus the derivative of the logarithm of the weight by d; ``beyond rate per_sigma`` is that by
sigma: what is the same for all neighbours of a query is of no account in a mean. Powers of the rate are taken
factor by factor, since they leave the range of numbers where a product with them does not. Of a
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
    beyond: wp.Function  # (base, d, rate, limit)
    weight: wp.Function  # likewise
    pull: wp.Function  # likewise
    per_sigma: float


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
    row = TABLE[kernel](real, reduce)
    most, weight_of = torch.finfo(sums).max / 2048.0, row.weight

    @wp.func
    def weight(base: real, d: real, rate: real, limit: real):
        """A number also for a neighbour that does not count, and may be much nearer than the base."""
        made = weight_of(base, d, rate, limit)
        return wp.where(made > real(most), real(most), made)

    return row._replace(weight=weight) if reduce == "counted" else row


def _without_end(beyond: wp.Function) -> wp.Function:
    @wp.func
    def weight(base: Any, d: Any, rate: Any, limit: Any):
        return wp.exp(-beyond(base, d, rate, limit))

    return weight


@wp.func
def _zero(base: Any, d: Any, rate: Any, limit: Any):
    return type(d)(0.0)


@wp.func
def _one(base: Any, d: Any, rate: Any, limit: Any):
    return type(d)(1.0)


def _exponential(real: Any, reduce: str) -> Weights:
    @wp.func
    def rate(sigma: real, power: real, limit: real):
        return real(1.0) / sigma

    @wp.func
    def beyond(base: real, d: real, rate: real, limit: real):
        return (d - base) * rate

    @wp.func
    def pull(base: real, d: real, rate: real, limit: real):
        return rate

    return Weights(rate, beyond, _without_end(beyond), pull, 1.0)


def _gaussian(real: Any, reduce: str) -> Weights:
    most = torch.finfo(wp.dtype_to_torch(real)).max  # a slope must be a number: 0 times it is 0

    @wp.func
    def beyond(base: real, d: real, rate: real, limit: real):
        made = real(0.5) * ((d - base) * rate) * ((d + base) * rate)
        return wp.where(made > real(most), real(most), made)

    @wp.func
    def pull(base: real, d: real, rate: real, limit: real):
        made = d * rate * rate
        return wp.where(made > real(most), real(most), made)

    return Weights(_exponential(real, reduce).rate, beyond, _without_end(beyond), pull, 2.0)


def _inverse_distance(real: Any, reduce: str) -> Weights:
    relative = is_relative("inverse_distance", reduce)

    @wp.func
    def rate(sigma: real, power: real, limit: real):
        return power

    @wp.func
    def beyond(base: real, d: real, rate: real, limit: real):
        ratio = wp.max(d, limit)
        if wp.static(relative):
            ratio /= wp.max(base, limit)
        return wp.log(ratio) * rate

    @wp.func
    def pull(base: real, d: real, rate: real, limit: real):
        return wp.where(d > limit, rate / d, real(0.0))

    return Weights(rate, beyond, _without_end(beyond), pull, 0.0)


def _uniform(real: Any, reduce: str) -> Weights:
    @wp.func
    def rate(sigma: real, power: real, limit: real):
        return real(1.0)

    return Weights(rate, _zero, _one, _zero, 0.0)


def _compact(real: Any, reduce: str) -> Weights:
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
    def pull(base: real, d: real, rate: real, limit: real):
        left = rest(d, rate, limit)
        return wp.where(left > real(0.0), real(4.0) * d * rate * rate / left, real(0.0))

    return Weights(rate, _zero, weight, pull, 0.0)


TABLE: dict[str, Callable[[Any, str], Weights]] = {
    "exponential": _exponential,
    "gaussian": _gaussian,
    "inverse_distance": _inverse_distance,
    "uniform": _uniform,
    "compact": _compact,
}
