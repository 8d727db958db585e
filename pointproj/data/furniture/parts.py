"""Parts that several pieces share: legs, supports, drawer fronts, handles; and how styles are drawn."""

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import pairwise

import numpy as np
from manifold3d import Manifold

from pointproj.data.furniture.outlines import CORNERS, SIDES, Range, about, circle, limits, superellipse
from pointproj.data.furniture.solids import bar, box, ellipsoid, rod, rounded_box, slab, tube, turned

Parts = Iterable[Manifold]

LEGS = ("square", "round", "tapered", "turned")
HANDLES = ("knob", "bar", "plate", "none")

# Radius and height along a turned leg, as shares of its own.
_TURNED = [(0.6, 0), (0.75, 0.06), (0.5, 0.12), (0.85, 0.5), (1, 0.7), (0.6, 0.78), (1, 0.84), (1, 1)]


class Rng(np.random.Generator):
    """Random numbers, and random choices between builds."""

    def chance(self, probability: float) -> bool:
        """Whether an option is taken."""
        return bool(self.random() < probability)

    def uniforms(self, *ranges: Range) -> list[float]:
        """A measure from each of several ranges."""
        return [self.uniform(*each) for each in ranges]

    def side(self) -> int:
        """One of the two sides."""
        return 1 if self.chance(0.5) else -1

    def pick(self, *choices: str) -> str:
        """One of several named styles."""
        return choices[self.integers(len(choices))]


def lean(part: Manifold, slope: float, y: float = 0.0, z: float = 0.0) -> Manifold:
    """Shear a part by ``slope`` of y along z about its origin, then move it to (y, z)."""
    return part.transform([[1, 0, 0, 0], [0, 1, slope, y], [0, 0, 1, z]])


def leg(foot: Sequence[float], top: Sequence[float], radius: float, style: str) -> Manifold:
    """One leg from the floor point to its top point; ``style`` is one of ``LEGS``."""
    if style != "turned":
        start = 0.55 * radius if style == "tapered" else radius
        return rod(foot, top, start, radius, sides=4 if style == "square" else 16)
    height = top[2] - foot[2]
    upright = turned(np.multiply(_TURNED, [radius, height]), segments=16)
    lean_x, lean_y = (top[0] - foot[0]) / height, (top[1] - foot[1]) / height
    # A shear keeps foot and top level where a rotation would tilt them.
    return upright.transform([[1, 0, lean_x, foot[0]], [0, 1, lean_y, foot[1]], [0, 0, 1, foot[2]]])


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
        depth = (y - 1.5 * size, y + size)
        return [rounded_box(about(x, 0.22 * width), depth, about(z, 0.6 * size), 0.4 * size)]
    return []


def drawer_fronts(
    x: Range, z: Range, y: float, style: str, rows: Sequence[float] = (1.0,), gap: float = 0.014
) -> Parts:
    """Column of drawer fronts that fill the area ``x`` by ``z``, on a carcass whose front is at depth ``y``.

    ``style`` is the style of the handles, ``rows`` are relative heights from bottom to top, and ``gap`` is
    half of the distance between two fronts.
    """
    edges = z[0] + (z[1] - z[0]) * np.concatenate([[0.0], np.cumsum(rows) / np.sum(rows)])
    front = y - 0.018
    middle, width = 0.5 * (x[0] + x[1]), x[1] - x[0]
    two = style == "knob" and width > 0.6
    shifts, size = ((-0.25, 0.25), 0.3) if two else ((0.0,), min(width, 0.5))
    for low, high in pairwise(edges):
        yield box((x[0] + gap, x[1] - gap), (front, y + 0.01), (low + gap, high - gap))
        for shift in shifts:
            yield from handle(middle + shift * width, front, 0.5 * (low + high), size, style)


def _legs(rng: Rng, x: float, y: float, top: float, radius: float) -> Parts:
    splay = rng.uniform(-0.3, 0.6) * min(x, y, top) if rng.chance(0.4) else 0.0
    yield from four_legs(x, y, top, radius, rng.pick(*LEGS), splay)
    if splay:
        return
    if rng.chance(0.35):  # stretchers between the legs, in an H or around
        level, thin = rng.uniform(0.1, 0.8) * top, rng.uniform(0.4, 0.9) * radius
        yield from [bar(side * x, limits(y), level, thin, 4) for side in SIDES]
        places = (0,) if rng.chance(0.5) else (-y, y)
        yield from [bar(limits(x), place, level, thin, 4) for place in places]
    if rng.chance(0.25):  # a board between them
        level, board = rng.uniform(0.1, 0.7) * top, rng.uniform(0.008, 0.03)
        yield box(x, y, (level, level + board))
    if rng.chance(0.3):  # an apron under the top
        apron, board = rng.uniform(0.1, 0.3) * top, rng.uniform(0.5, 1.2) * radius
        yield box(x, y, (top - apron, top)) - box(x - board, y - board, (0.0, 2 * top))


def _ring(rng: Rng, x: float, y: float, top: float, radius: float) -> Parts:
    count, extent = rng.integers(3, 9), rng.uniform(0.8, 1.4)
    style, start = rng.pick(*LEGS), rng.uniform(0.0, np.pi)
    angles = start + 2 * np.pi * np.arange(count) / count
    places = [0.7 * np.array([x * np.cos(angle), y * np.sin(angle)]) for angle in angles]
    return [leg((*(extent * at), 0.0), (*at, top), radius, style) for at in places]


def _hairpins(rng: Rng, x: float, y: float, top: float, radius: float) -> Parts:
    thin, apart = rng.uniform(0.004, 0.01), rng.uniform(0.15, 0.4)
    return [
        rod((sx * x, sy * y, thin), (sx * x * (1 - dx), sy * y * (1 - dy), top), thin, sides=8)
        for sx, sy in CORNERS
        for dx, dy in ((apart, 0.0), (0.0, apart))
    ]


def _frames(rng: Rng, x: float, y: float, top: float, radius: float, *, closed: bool = True) -> Parts:
    """Frames at both sides, standing or lying on the floor; a sled is open at its rear."""
    radius *= 0.8
    square = rng.chance(0.5)
    for side in SIDES:
        corners = [(-y, top), (-y, radius), (y, radius), (y, top)]
        if not closed:
            corners = [(y, top), *corners[:3]] if rng.chance(0.3) else corners[:3]
        path = np.array([(side * x, along, level) for along, level in corners])
        if not square:
            yield tube(path, radius)
            continue
        for one, other in pairwise(path):
            over = 0.9 * radius * ((other - one) / np.linalg.norm(other - one))
            yield rod(one - over, other + over, radius, sides=4)
    level = rng.uniform(0.1, 0.9) * top if rng.chance(0.5) else radius
    along = rng.uniform(-0.8, 0.8) * y
    if not closed:
        along, level = 0.8 * y, radius
        yield from [bar(side * x, (-y, 0.5 * y), top - radius, radius) for side in SIDES]
    yield bar(limits(x), along, level, 0.9 * radius)


def _crossed(rng: Rng, x: float, y: float, top: float, radius: float) -> Parts:
    sides = 4 if rng.chance(0.6) else 12
    if rng.chance(0.3):  # crossed diagonally, once
        return [
            rod((-x, -lean * y, low), (x, lean * y, top - low), radius, sides=sides)
            for lean in SIDES
            for low in (0.0, top)
        ]
    across = [bar(side * x, (-lean * y, lean * y), (0.0, top), radius, sides) for side, lean in CORNERS]
    return [*across, bar(limits(x), 0, top / 2, 0.7 * radius, sides)]


def _panels(rng: Rng, x: float, y: float, top: float, radius: float) -> Parts:
    board = rng.uniform(0.008, 0.06)
    sides = SIDES if rng.chance(0.8) else (-1, 0, 1)
    yield from [box(about(side * x, board / 2), y, (0.0, top)) for side in sides]
    if rng.chance(0.4):  # a back between them
        low, at = rng.uniform(0.0, 0.7) * top, rng.uniform(-0.5, 0.9) * y
        yield box(x, (at, at + board), (low, top))
    if rng.chance(0.35):  # a shelf, or a bottom
        level = rng.uniform(0.0, 0.7) * top
        yield box(x, (-y, 0.95 * y), (level, level + board))


def _column(rng: Rng, x: float, y: float, top: float, radius: float) -> Parts:
    extent = min(x, y)
    radius = rng.uniform(0.05, 0.2) * extent
    yield rod((0, 0, 0.005), (0, 0, top), radius, radius * rng.uniform(0.5, 1.5))
    foot = rng.uniform(0.6, 1.1) * extent
    kind = rng.pick("plate", "cone", "arms")
    if kind == "plate":
        exponent, plate = float(rng.choice([2.0, 12.0])), rng.uniform(0.006, 0.04)
        yield slab(superellipse(foot, foot, exponent), (0.0, plate))
    elif kind == "cone":
        rise = rng.uniform(0.05, 0.25) * top
        yield turned([(foot, 0.0), (foot, 0.008), (0.6 * foot, 0.4 * rise), (radius, rise)])
    else:
        count, rise = rng.integers(3, 7), rng.uniform(0.02, 0.3) * top
        thin = 0.4 * radius + 0.006
        for tip in foot * circle(count):
            yield rod((0, 0, rise + thin), (*tip, thin), thin, 0.7 * thin, sides=8)
    if rng.chance(0.4):  # a plate under the top
        wide, plate = rng.uniform(0.3, 0.8) * extent, rng.uniform(0.008, 0.02)
        yield box(wide, wide, (top - plate, top))


def _drum(rng: Rng, x: float, y: float, top: float, radius: float) -> Parts:
    waist, wide = rng.uniform(0.5, 1.0), min(x, y)
    rings = [(0.75, 0.0), (0.75 * waist, 0.5 * top), (0.75, top)]
    return [turned([(share * wide, level) for share, level in rings]).scale([x / wide, 1.0, 1.0])]


_SUPPORTS = {
    "legs": _legs,
    "ring": _ring,
    "hairpin": _hairpins,
    "frames": _frames,
    "crossed": _crossed,
    "panels": _panels,
    "column": _column,
    "plinth": lambda rng, x, y, top, radius: [box(x, y, (0.0, top))],
    "drum": _drum,
    "sled": partial(_frames, closed=False),
}


def support(rng: Rng, half_x: float, half_y: float, height: float, *kinds: str) -> Parts:
    """Parts under a rectangle with these half sides, from the floor to ``height``, in metres.

    Their kind is one of ``kinds``, by default one of all in ``_SUPPORTS``, with random sizes. They overlap by
    4 mm with the part that they carry.
    """
    make = _SUPPORTS[rng.pick(*(kinds or _SUPPORTS))]
    radius = rng.uniform(0.008, 0.035) * (1.0 if height > 0.25 else 0.8)
    inset = 1.5 * radius + rng.uniform(0.0, 0.15) * min(half_x, half_y)
    return make(rng, half_x - inset, half_y - inset, height + 0.004, radius)
