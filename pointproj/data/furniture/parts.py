"""Parts that several pieces of furniture share: legs, drawer fronts, handles; and how styles are drawn."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from manifold3d import Manifold

from pointproj.data.furniture.solids import (
    CORNERS,
    SIDES,
    Parts,
    Range,
    about,
    bar,
    box,
    ellipsoid,
    revolved,
    rod,
    rounded_box,
)

Rng = np.random.Generator

LEG_STYLES = ("square", "round", "tapered", "turned")
HANDLE_STYLES = ("knob", "bar", "plate", "none")

# Radius and height of a turned leg, as shares of its own.
_TURNED = (
    (0.6, 0.0),
    (0.75, 0.06),
    (0.5, 0.12),
    (0.85, 0.5),
    (1.0, 0.7),
    (0.6, 0.78),
    (1.0, 0.84),
    (1.0, 1.0),
)


def chance(rng: Rng, probability: float) -> bool:
    """Whether an option is taken."""
    return bool(rng.random() < probability)


def either(rng: Rng) -> int:
    """One of the two sides."""
    return 1 if chance(rng, 0.5) else -1


def pick(rng: Rng, *choices: str) -> str:
    """One of several named styles."""
    return choices[int(rng.integers(len(choices)))]


def leg(foot: Sequence[float], top: Sequence[float], radius: float, style: str) -> Manifold:
    """One leg from the floor point to its top point; ``style`` is one of ``LEG_STYLES``."""
    if style == "square":
        return rod(foot, top, radius, sides=4)
    if style == "round":
        return rod(foot, top, radius, sides=16)
    if style == "tapered":
        return rod(foot, top, 0.55 * radius, radius, sides=16)
    height = top[2] - foot[2]
    upright = revolved([(radius * width, height * level) for width, level in _TURNED], segments=16)
    lean = [(top[0] - foot[0]) / height, (top[1] - foot[1]) / height]
    # A shear keeps foot and top level where a rotation would tilt them.
    return upright.transform([[1, 0, lean[0], foot[0]], [0, 1, lean[1], foot[1]], [0, 0, 1, foot[2]]])


def four_legs(x: float, y: float, height: float, radius: float, style: str, splay: float = 0.0) -> Parts:
    """Legs under the corners of a rectangle; ``splay`` moves the feet outwards by that many metres."""
    return [
        leg((sx * (x + splay), sy * (y + splay), 0.0), (sx * x, sy * y, height), radius, style)
        for sx, sy in CORNERS
    ]


def handle(x: float, y: float, z: float, width: float, style: str) -> Parts:
    """Handle on a front that faces -y at depth ``y``, centred at (x, z) and at most ``width`` wide."""
    size = min(0.02, 0.2 * width)
    if style == "knob":
        ball = ellipsoid((x, y - 1.6 * size, z), (1.2 * size, 0.8 * size, 1.2 * size))
        return [bar(x, (y + size, y - 1.2 * size), z, 0.6 * size, 12), ball]
    if style == "bar":
        half, out = 0.25 * width, y - 1.8 * size
        posts = [bar(x + side * half, (y + size, out), z, 0.5 * size, 12) for side in SIDES]
        return [*posts, bar(about(x, 1.2 * half), out, z, 0.6 * size, 12)]
    if style == "plate":
        return [
            rounded_box(about(x, 0.22 * width), (y - 1.5 * size, y + size), about(z, 0.6 * size), 0.4 * size)
        ]
    return []


def drawer_fronts(
    x: Range, z: Range, y: float, rows: Sequence[float], columns: int, style: str, *, gap: float = 0.014
) -> Parts:
    """Drawer fronts that stand out of a carcass front at depth ``y``, with gaps between them.

    Parameters
    ----------
    x, z : tuple of float
        Limits of the area to fill, metres.
    y : float
        Depth of the carcass front, metres.
    rows : sequence of float
        Relative heights from the bottom row to the top one.
    columns : int
        Drawers side by side.
    style : str
        One of ``HANDLE_STYLES``.
    gap : float
        Half the distance between two fronts, metres.
    """
    edges_x = np.linspace(x[0], x[1], columns + 1)
    edges_z = z[0] + (z[1] - z[0]) * np.concatenate([[0.0], np.cumsum(rows) / np.sum(rows)])
    front = y - 0.018
    solids = []
    for left, right in pairwise(edges_x):
        for low, high in pairwise(edges_z):
            solids.append(box((left + gap, right - gap), (front, y + 0.01), (low + gap, high - gap)))
            centre_x, centre_z, width = 0.5 * (left + right), 0.5 * (low + high), right - left
            if style == "knob" and width > 0.6:
                for side in SIDES:
                    solids += handle(centre_x + side * 0.25 * width, front, centre_z, 0.3, style)
            else:
                solids += handle(centre_x, front, centre_z, min(width, 0.5), style)
    return solids
