"""How a distance becomes a weight: one table of kernels, which all sums and gradients are compiled with.

The names are those of ``docs/contribute/kernels.md``. A weight is exp(logit). For a mean, logits are relative
to ``base``, so that the weights of a query cannot all vanish; a sum has a base whose weight is 1.

    kernel             logit                                  decay                 by_sigma
    exponential        (base - distance) / sigma              1 / sigma             -logit / sigma
    gaussian           (base^2 - distance^2) / (2 sigma^2)    distance / sigma^2    -2 logit / sigma
    inverse_distance   -power log(max(distance, eps) / base)  power / distance      0
    uniform            0                                      0                     0
    compact            weight is rest^2                       see below             0

``by_sigma`` leaves out what is the same for all neighbours of a query: it has no effect on a mean. Functions
multiply by 1 / sigma once for each power of it: the power itself may leave the range of numbers.
"""

from typing import Any, NamedTuple

import torch
import warp as wp

from pointproj.ops.backends.warp.common import REALS, once
from pointproj.ops.specification.reference import RELATIVE

POWER_OF_SIGMA = {"exponential": -1.0, "gaussian": -2.0}  # that the logit is proportional to


class Weights(NamedTuple):
    """The functions of a kernel, for sums in one dtype; ``problem`` has power, eps and support."""

    first_base: float  # before any neighbour is known
    base: wp.Function  # (nearest, problem)
    logit: wp.Function  # (base, distance, inverse_sigma, problem), of all kernels but the compact one
    weight: wp.Function  # likewise
    decay: wp.Function  # (distance, inverse_sigma, problem)
    by_sigma: wp.Function  # (logit or a sum of logits, inverse_sigma), of kernels with a POWER_OF_SIGMA


def is_relative(kernel: str, reduce: str) -> bool:
    """Whether weights are relative to that of the nearest neighbour with a weight."""
    return reduce != "sum" and kernel in RELATIVE


@wp.func
def at_most(x: Any, most: Any):
    return wp.where(x > most, most, x)  # NaN stays NaN


@once
def weights_of(kernel: str, reduce: str, sums: torch.dtype) -> Weights:
    """Each function takes the branch of the kernel when it is compiled."""
    real, *_ = REALS[sums]
    largest, power_of_sigma = torch.finfo(sums).max, POWER_OF_SIGMA.get(kernel, 0.0)
    most = largest / 2048.0
    relative = is_relative(kernel, reduce)
    first_base = float("inf") if relative else float(kernel == "inverse_distance")

    @wp.func
    def base(nearest: real, problem: Any):
        if wp.static(kernel == "inverse_distance"):
            return wp.max(nearest, problem.eps)
        return nearest

    @wp.func
    def logit(base: real, distance: real, inverse_sigma: real, problem: Any):
        if wp.static(kernel == "exponential"):
            return (base - distance) * inverse_sigma
        if wp.static(kernel == "gaussian"):  # a number, also where it is multiplied by 0
            difference = (distance - base) * inverse_sigma
            return -at_most(real(0.5) * difference * ((distance + base) * inverse_sigma), real(largest))
        if wp.static(kernel == "inverse_distance"):
            ratio = wp.max(distance, problem.eps)
            if wp.static(relative):
                ratio /= base
            return -wp.log(ratio) * problem.power
        return real(0.0)

    @wp.func
    def rest(distance: real, problem: Any):
        """The root of a compact weight, exactly 0 from the support on."""
        part = distance * (real(1.0) / problem.support)
        inside = wp.max((real(1.0) - part) * (real(1.0) + part), real(0.0))
        return wp.where(distance < problem.support, inside, real(0.0))

    @wp.func
    def weight(base: real, distance: real, inverse_sigma: real, problem: Any):
        if wp.static(kernel == "compact"):
            root = rest(distance, problem)
            return root * root
        made = wp.exp(logit(base, distance, inverse_sigma, problem))
        if wp.static(reduce == "weighted"):  # a neighbour without a weight may be much nearer than the base
            made = at_most(made, real(most))
        return made

    @wp.func
    def decay(distance: real, inverse_sigma: real, problem: Any):
        if wp.static(kernel == "exponential"):
            return inverse_sigma
        if wp.static(kernel == "gaussian"):
            return at_most(distance * inverse_sigma * inverse_sigma, real(largest))
        if wp.static(kernel == "inverse_distance"):
            return wp.where(distance >= problem.eps, problem.power / distance, real(0.0))
        if wp.static(kernel == "compact"):
            root = rest(distance, problem)
            inverse = real(1.0) / problem.support
            return wp.where(root > real(0.0), real(4.0) * distance * inverse * inverse / root, real(0.0))
        return real(0.0)

    @wp.func
    def by_sigma(logits: real, inverse_sigma: real):
        return logits * inverse_sigma * real(power_of_sigma)

    return Weights(first_base, base, logit, weight, decay, by_sigma)
