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
    row = TABLE[kernel]
    return row(REALS[sums][0]) if callable(row) else row


def _without_end(level: wp.Function) -> wp.Function:
    @wp.func
    def weight(base: Any, d: Any, rate: Any, limit: Any):
        return wp.exp((base - level(d, limit)) * rate)

    return weight


@wp.func
def _nothing(x: Any):
    return type(x)(0.0)


@wp.func
def _no_level(d: Any, limit: Any):
    return type(d)(0.0)


@wp.func
def _inverse_sigma(sigma: Any, power: Any, limit: Any):
    return type(sigma)(1.0) / sigma


@wp.func
def _inverse_square(sigma: Any):
    return type(sigma)(1.0) / (sigma * sigma)


@wp.func
def _distance(d: Any, limit: Any):
    return d


@wp.func
def _square(d: Any, limit: Any):
    return d * d


@wp.func
def _rate(d: Any, rate: Any, limit: Any):
    return rate


def _gaussian(real: Any) -> Weights:
    # Where powers of sigma vanish or overflow: a number, so that 0 times it is 0, and inf times it inf.
    limits = torch.finfo(wp.dtype_to_torch(real))
    least, most = limits.tiny, limits.max

    @wp.func
    def rate(sigma: real, power: real, limit: real):
        square = sigma * sigma
        return wp.where(square > real(most), real(least), real(0.5) / square)

    @wp.func
    def pull(d: real, rate: real, limit: real):
        return wp.min(real(most), real(2.0) * rate * d)

    @wp.func
    def per_sigma(sigma: real):
        return real(1.0) / wp.max(real(least), sigma * sigma * sigma)

    return Weights(rate, _square, _without_end(_square), pull, per_sigma)


@wp.func
def _power(sigma: Any, power: Any, limit: Any):
    return power


@wp.func
def _logarithm(d: Any, limit: Any):
    return wp.log(wp.max(d, limit))


@wp.func
def _pull_of_power(d: Any, rate: Any, limit: Any):
    return wp.where(d > limit, rate / d, type(d)(0.0))


@wp.func
def _one(sigma: Any, power: Any, limit: Any):
    return type(sigma)(1.0)


@wp.func
def _always_one(base: Any, d: Any, rate: Any, limit: Any):
    return type(d)(1.0)


@wp.func
def _no_pull(d: Any, rate: Any, limit: Any):
    return type(d)(0.0)


@wp.func
def _inverse_support(sigma: Any, power: Any, limit: Any):
    return type(sigma)(1.0) / limit


@wp.func
def _rest(d: Any, rate: Any, limit: Any):
    """Exactly 0 from the limit on."""
    one = type(d)(1.0)
    part = d * rate
    return wp.where(d < limit, wp.max((one - part) * (one + part), type(d)(0.0)), type(d)(0.0))


@wp.func
def _compact(base: Any, d: Any, rate: Any, limit: Any):
    left = _rest(d, rate, limit)
    return left * left


@wp.func
def _pull_of_compact(d: Any, rate: Any, limit: Any):
    left = _rest(d, rate, limit)
    return wp.where(left > type(d)(0.0), type(d)(4.0) * d * rate * rate / left, type(d)(0.0))


TABLE: dict[str, Weights | Callable[[Any], Weights]] = {
    "exponential": Weights(_inverse_sigma, _distance, _without_end(_distance), _rate, _inverse_square),
    "gaussian": _gaussian,
    "inverse_distance": Weights(_power, _logarithm, _without_end(_logarithm), _pull_of_power, _nothing),
    "uniform": Weights(_one, _no_level, _always_one, _no_pull, _nothing),
    "compact": Weights(_inverse_support, _no_level, _compact, _pull_of_compact, _nothing),
}
