"""Extents along an axis and outlines in a plane, in metres."""

import numpy as np
from jaxtyping import Float

Range = tuple[float, float]
Extent = Range | float  # two limits, or half the width of an extent around 0
Outline = Float[np.ndarray, "n 2"]

SIDES = (-1, 1)
CORNERS = tuple((x, y) for x in SIDES for y in SIDES)


def limits(extent: Extent) -> Range:
    """Return both limits of an extent."""
    return (-extent, extent) if isinstance(extent, int | float) else extent


def about(middle: float, half: float) -> Range:
    """Return the limits ``half`` below and above a middle."""
    return middle - half, middle + half


def beside(side: int, inner: float, outer: float) -> Range:
    """Return the limits between two distances from 0, on the side -1 or 1 of it."""
    low, high = sorted((side * inner, side * outer))
    return low, high


def rectangle(x: Extent, y: Extent, radius: float = 0.0) -> Outline:
    """Rectangle outline, counter-clockwise, with corners rounded by ``radius``."""
    x, y = limits(x), limits(y)
    if radius <= 0:
        return np.array([[x[0], y[0]], [x[1], y[0]], [x[1], y[1]], [x[0], y[1]]])
    radius = min(radius, 0.49 * min(x[1] - x[0], y[1] - y[0]))
    (left, right), (front, rear) = (x[0] + radius, x[1] - radius), (y[0] + radius, y[1] - radius)
    centres = np.array([(right, rear), (left, rear), (left, front), (right, front)])
    angles = np.arange(4)[:, None] * np.pi / 2 + np.linspace(0.0, np.pi / 2, 7)
    arcs = centres[:, None] + radius * np.stack([np.cos(angles), np.sin(angles)], axis=-1)
    return arcs.reshape(-1, 2)


def circle(count: int, shift: float = 0.0) -> Outline:
    """Evenly spaced points on the circle of radius 1; the first is ``shift`` steps past the x axis."""
    angles = 2 * np.pi * (np.arange(count) + shift) / count
    return np.stack([np.cos(angles), np.sin(angles)], axis=1)


def superellipse(half_x: float, half_y: float, exponent: float = 2.0, segments: int = 48) -> Outline:
    """Outline of |x/a|^e + |y/b|^e = 1: an ellipse for e = 2; for a larger e, closer to a rectangle."""
    unit = circle(segments)
    return [half_x, half_y] * np.sign(unit) * np.abs(unit) ** (2 / exponent)
