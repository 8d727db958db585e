"""Activations and their derivatives, in kernels."""

import triton
import triton.language as tl

from pointproj.ops.backends.triton.arithmetic import power, reciprocal
from pointproj.ops.specification.activations import ACTIVATIONS

NUMBER_OF = {name: number for number, name in enumerate(ACTIVATIONS)}
IDENTITY = len(ACTIVATIONS)


@triton.jit
def activated(x, ACTIVATION: tl.constexpr, SLOPE: tl.constexpr, ROUGH: tl.constexpr = False):
    """The activation and its derivative, in the order of ``ACTIVATIONS``, then the identity.

    ``ROUGH``, for results of products in TF32 or less: GELU to 4e-5, its derivative to 1e-4.
    """
    zero = tl.zeros_like(x)
    if ACTIVATION == 0 and ROUGH:
        # The logit of the normal distribution over x is a polynomial of x * x, fitted to values and
        # derivatives; here it is negative, for powers of 2.
        square = tl.minimum(x * x, 25.0)
        logit = (0.00098290 * square - 0.10661915) * square - 2.30125030
        part = reciprocal(1.0 + power(x * logit))
        value = x * part
        steepness = (0.2217082947 - 0.003406471735 * square) * square + 1.59510525
        slope = part + (value - value * part) * steepness
    elif ACTIVATION == 0 and x.dtype == tl.float32:
        # Abramowitz and Stegun, Handbook of mathematical functions, 26.2.17, to 7.5e-8: half of erf's work.
        density = power(-0.7213475204444817 * x * x)
        near = reciprocal(1.0 + 0.2316419 * tl.abs(x))
        part = ((0.53070271 * near - 0.72657601) * near + 0.71070687) * near - 0.14224837
        part = (part * near + 0.1274148) * near * density
        part = tl.where(x < 0, part, 1.0 - part)
        value, slope = x * part, part + x * density * 0.3989422804014327
    elif ACTIVATION == 0:
        part = 0.5 + 0.5 * tl.math.erf(x * 0.7071067811865476)
        value, slope = x * part, part + x * tl.exp(-0.5 * x * x) * 0.3989422804014327
    elif ACTIVATION == 1:
        inner = 1.5957691216057308 * (x + 0.044715 * x * x * x)  # twice that of the tanh
        part = 1.0 / (1.0 + tl.exp(-inner))
        value = x * part
        slope = part + x * part * (1.0 - part) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    elif ACTIVATION == 2:
        value, slope = (
            tl.maximum(x, zero, propagate_nan=tl.PropagateNan.ALL),
            tl.where(x > 0, zero + 1.0, zero),
        )
    elif ACTIVATION == 3:
        value, slope = tl.where(x > 0, x, x * SLOPE), tl.where(x > 0, zero + 1.0, zero + SLOPE)
    elif ACTIVATION == 4:
        part = 1.0 / (1.0 + tl.exp(-x))
        value, slope = x * part, part * (1.0 + x * (1.0 - part))
    elif ACTIVATION == 5:
        value = 2.0 / (1.0 + tl.exp(-2.0 * x)) - 1.0
        slope = 1.0 - value * value
    else:
        value, slope = x, zero + 1.0
    return value, slope
