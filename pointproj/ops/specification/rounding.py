"""What "distance <= radius" means to the last bit, and the roots that distances are.

A distance is the correctly rounded root of a squared distance, and a point is within a radius if its distance
is no larger. No backend takes the root to find that out: a point is within the radius if its squared distance
is at most the largest number whose rounded root is at most the radius. On a CPU, torch takes roots from a
vector library that is wrong in the last bit, and would lose points at exactly the radius.
"""

import functools

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

SCALE = 2.0**240  # squares beyond SCALE and 1 / SCALE are scaled by its square: their roots are floats then


def rounded_root(squared: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """The square root of fp32 or fp64 numbers, correctly rounded on every device; it has no gradient."""
    if squared.dtype == torch.float32:
        # No such root is so near the middle of two floats that a double could be on the wrong side of it.
        return squared.double().sqrt().float()
    scale = torch.ones_like(squared)
    for limit in (SCALE, SCALE**3):
        scale = torch.where(squared > limit, scale / SCALE, scale)
        scale = torch.where(squared < 1 / limit, scale * SCALE, scale)
    scaled = squared * scale * scale
    root = scaled.sqrt()
    # The root is off by one unit at most: the rest says to which side. The high part has 24 bits and the low
    # one 29, so all but the last product are exact, whether or not a compiler fuses them with differences.
    high = root.float().double()
    low = root - high
    rest = ((scaled - high * high) - 2 * high * low) - low * low
    up = torch.nextafter(root, torch.full_like(root, torch.inf)) - root
    down = root - torch.nextafter(root, torch.zeros_like(root))
    nudge = torch.where(rest > root * up, up, torch.where(rest <= -root * down, -down, 0.0))
    return (root + nudge) / scale


def radius_in_range(radius: float, dtype: torch.dtype) -> float:
    """A positive, finite radius among the normal numbers of the points' dtype, which changes no neighbour.

    Two points whose distance overflows are no neighbours. Distances are roots of squares: none is between 0
    and the root of the least number.
    """
    limits = torch.finfo(dtype)
    return float(min(max(radius, limits.tiny), limits.max))


def largest_square_within(radius: float, dtype: torch.dtype) -> float:
    """The largest squared distance within a radius: the largest number whose rounded root is at most that.

    ``dtype`` is that of the points, torch.float32 or torch.float64; the radius is rounded to it.
    """
    return _largest_square_within(radius, dtype)


# As torch.compiler.assume_constant_result marks it: torch.compile need not look into numpy.
largest_square_within._dynamo_marked_constant = True


@functools.cache
def _largest_square_within(radius: float, dtype: torch.dtype) -> float:
    real = np.float32 if dtype == torch.float32 else np.float64
    with np.errstate(over="ignore"):
        limit = real(radius_in_range(radius, dtype))
        square = min(limit * limit, np.finfo(real).max)
        while np.sqrt(square) > limit:
            square = np.nextafter(square, real(0))
        while np.sqrt(following := np.nextafter(square, real(np.inf))) <= limit:
            square = following
    return float(square)


def largest_squares_within(radii: Float[Tensor, " q"]) -> Float[Tensor, " q"]:
    """:func:`largest_square_within` of each radius; -1, which nothing is within, of a negative one or NaN."""
    limits = torch.zeros_like(radii), torch.full_like(radii, torch.inf)
    square = (radii * radii).clamp(max=torch.finfo(radii.dtype).max)
    # The root of a rounded square is the number itself, unless that underflows; two more may have this root.
    square = torch.where(rounded_root(square) > radii, torch.nextafter(square, limits[0]), square)
    for _ in range(2):
        following = torch.nextafter(square, limits[1])
        square = torch.where(rounded_root(following) <= radii, following, square)
    return torch.where(radii >= 0, square, -1.0)
