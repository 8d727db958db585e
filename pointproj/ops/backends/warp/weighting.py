"""How a distance becomes a weight: the functions of each kernel, which all sums are compiled with.

Weights that have no end are exp((base - level(d)) rate). For a mean, ``base`` is the level of the query's
nearest neighbour, so that they cannot all vanish; for a sum it is 0, and the weight is the kernel itself.

    kernel              level              rate              pull                sigma_share   sigma_unit
    exponential         d                  1 / sigma         rate                d             sigma^2
    gaussian            d^2                1 / (2 sigma^2)   2 rate d            d^2           sigma^3
    inverse_distance    log max(d, eps)    power             power / d, or 0     0             1

``pull`` is minus the derivative of the logarithm of the weight by d; ``sigma_share / sigma_unit`` is that by
sigma. Of the numbers of a :class:`Weighting` a kernel reads ``power``, and one as ``limit``: the distance
from which on the inverse distance decays (eps), or where compact weights end (support).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import warp as wp

from pointproj.ops.backends.warp.common import REALS
from pointproj.ops.reference import Weighting

WITHOUT_END = ("exponential", "gaussian", "inverse_distance")


class WeightFunctions(NamedTuple):
    """Functions of one kernel, for sums in one dtype; ``d`` is a distance."""

    rate: wp.Function  # (unit, sigma, power, limit); unit is 1, or 1 / log 2 for powers of two
    level: wp.Function  # (d, limit)
    weight: wp.Function  # (base, d, rate, limit)
    pull: wp.Function  # (d, rate, limit)
    sigma_share: wp.Function  # (d)
    sigma_unit: wp.Function  # (sigma)


def is_relative(kernel: str, reduce: str) -> bool:
    """Whether weights are relative to the nearest neighbour."""
    return reduce == "mean" and kernel in WITHOUT_END


def limit_of(weighting: Weighting) -> float:
    """The number that kernels read as ``limit``."""
    return weighting.support if weighting.kernel == "compact" else weighting.eps


@functools.cache
def weight_functions(kernel: str, sums: torch.dtype) -> WeightFunctions:
    """The functions of a kernel."""
    return _FUNCTIONS[kernel](REALS[sums][0])


def _exponential(real: Any) -> WeightFunctions:
    @wp.func
    def rate(unit: real, sigma: real, power: real, limit: real):
        return unit / sigma

    @wp.func
    def level(d: real, limit: real):
        return d

    @wp.func
    def pull(d: real, rate: real, limit: real):
        return rate

    @wp.func
    def sigma_share(d: real):
        return d

    @wp.func
    def sigma_unit(sigma: real):
        return sigma * sigma

    return WeightFunctions(rate, level, _without_end(real, level), pull, sigma_share, sigma_unit)


def _gaussian(real: Any) -> WeightFunctions:
    # Where powers of sigma vanish or overflow: a number, so that 0 times it is 0, and inf times it inf.
    limits = torch.finfo(wp.dtype_to_torch(real))
    least, most = limits.tiny, limits.max

    @wp.func
    def rate(unit: real, sigma: real, power: real, limit: real):
        square = sigma * sigma
        return wp.where(square > real(most), real(least), real(0.5) * unit / square)

    @wp.func
    def level(d: real, limit: real):
        return d * d

    @wp.func
    def pull(d: real, rate: real, limit: real):
        return wp.min(real(most), real(2.0) * rate * d)

    @wp.func
    def sigma_share(d: real):
        return d * d

    @wp.func
    def sigma_unit(sigma: real):
        return wp.max(real(least), sigma * sigma * sigma)

    return WeightFunctions(rate, level, _without_end(real, level), pull, sigma_share, sigma_unit)


def _inverse_distance(real: Any) -> WeightFunctions:
    @wp.func
    def rate(unit: real, sigma: real, power: real, limit: real):
        return unit * power

    @wp.func
    def level(d: real, limit: real):
        return wp.log(wp.max(d, limit))

    @wp.func
    def pull(d: real, rate: real, limit: real):
        return wp.where(d > limit, rate / d, real(0.0))

    return WeightFunctions(rate, level, _without_end(real, level), pull, *_without_sigma(real))


def _without_end(real: Any, level: wp.Function) -> wp.Function:
    @wp.func
    def weight(base: real, d: real, rate: real, limit: real):
        return wp.exp((base - level(d, limit)) * rate)

    return weight


def _uniform(real: Any) -> WeightFunctions:
    @wp.func
    def rate(unit: real, sigma: real, power: real, limit: real):
        return unit

    @wp.func
    def level(d: real, limit: real):
        return real(0.0)

    @wp.func
    def weight(base: real, d: real, rate: real, limit: real):
        return real(1.0)

    @wp.func
    def pull(d: real, rate: real, limit: real):
        return real(0.0)

    return WeightFunctions(rate, level, weight, pull, *_without_sigma(real))


def _compact(real: Any) -> WeightFunctions:
    """(1 - (d / limit)^2)^2, with the pull 4 d / (limit^2 - d^2); exactly 0 from the limit on."""

    @wp.func
    def rate(unit: real, sigma: real, power: real, limit: real):
        return real(1.0) / limit

    @wp.func
    def level(d: real, limit: real):
        return real(0.0)

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

    return WeightFunctions(rate, level, weight, pull, *_without_sigma(real))


def _without_sigma(real: Any) -> tuple[wp.Function, wp.Function]:
    """Share and unit of sigma for a kernel that does not read it."""

    @wp.func
    def sigma_share(d: real):
        return real(0.0)

    @wp.func
    def sigma_unit(sigma: real):
        return real(1.0)

    return sigma_share, sigma_unit


_FUNCTIONS: dict[str, Callable[[Any], WeightFunctions]] = {
    "exponential": _exponential,
    "gaussian": _gaussian,
    "inverse_distance": _inverse_distance,
    "uniform": _uniform,
    "compact": _compact,
}


class TileWeight(NamedTuple):
    """The same in C++ for tiles, all in float32: ``level`` from ``square``, then ``weight[j]``."""

    level: str  # with the roots and logarithms of the functions above, which gradients are computed with
    quick_level: str  # where weights are not far from 1, so that errors of the level remain small
    weight: str  # from ``level``, ``decay`` (the rate, of powers of two) and ``limit``


_ROOT = "const float far = sqrtf(square);"
_QUICK_ROOT = """float far; asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(far) : "f"(square));"""
EXP = """asm("ex2.approx.ftz.f32 %0, %1;" : "=f"({to}) : "f"(power));"""
_DECAYING = "const float power = ({base} - level) * decay;" + EXP.format(to="weight[j]")
_QUICK_LOG = """
            float log2;
            asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(log2) : "f"(fmaxf(far, limit)));
            const float level = 0.69314718f * log2;"""
_COMPACT = """
            const float part = far * decay;
            const float rest = far < limit ? fmaxf((1 - part) * (1 + part), 0.0f) : 0.0f;
            weight[j] = rest * rest;"""

TILE_WEIGHTS = {
    "exponential": TileWeight(
        _ROOT + "const float level = far;", _QUICK_ROOT + "const float level = far;", _DECAYING
    ),
    "gaussian": TileWeight(
        _ROOT + "const float level = far * far;", "const float level = square;", _DECAYING
    ),
    "inverse_distance": TileWeight(
        _ROOT + "const float level = logf(fmaxf(far, limit));", _QUICK_ROOT + _QUICK_LOG, _DECAYING
    ),
    "uniform": TileWeight("", "", "weight[j] = 1;"),
    "compact": TileWeight(_ROOT, _ROOT, _COMPACT),  # its end decides who counts at all
}
