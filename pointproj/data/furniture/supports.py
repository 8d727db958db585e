"""Supports of furniture in many styles: legs, frames, columns, panels.

Used by the varied designs. Members may be a few millimetres thin, as in files made for looks alone.
"""

from itertools import pairwise

import numpy as np
from manifold3d import Manifold

from pointproj.data.furniture.parts import LEG_STYLES, chance, four_legs, leg, pick
from pointproj.data.furniture.solids import box, revolved, rod, slab, superellipse, tube

OVERLAP = 0.004  # metres by which supports overlap with what they carry

KINDS = ("legs", "ring", "hairpin", "frames", "crossed", "panels", "column", "plinth", "drum", "sled")


def support(
    rng: np.random.Generator, half_x: float, half_y: float, height: float, *kinds: str
) -> list[Manifold]:
    """Return the parts under a rectangle of half sides ``half_x``, ``half_y``, from the floor to ``height``.

    Parameters
    ----------
    rng : numpy.random.Generator
        Chooses the kind and its measures.
    half_x, half_y, height : float
        Metres; the parts end ``OVERLAP`` above ``height``.
    kinds : str
        Of :data:`KINDS`; all by default.
    """
    kind = pick(rng, *(kinds or KINDS))
    radius = rng.uniform(0.008, 0.035) * (1.0 if height > 0.25 else 0.8)
    inset = 1.5 * radius + rng.uniform(0.0, 0.15) * min(half_x, half_y)
    x, y, top = half_x - inset, half_y - inset, height + OVERLAP
    if kind == "legs":
        return _legs(rng, x, y, top, radius)
    if kind == "ring":
        return _ring(rng, x, y, top, radius)
    if kind == "hairpin":
        return _hairpins(rng, x, y, top)
    if kind in ("frames", "sled"):
        return _frames(rng, x, y, top, 0.8 * radius, closed=kind == "frames")
    if kind == "crossed":
        return _crossed(rng, x, y, top, radius)
    if kind == "panels":
        return _panels(rng, x, y, top)
    if kind == "column":
        return _column(rng, min(x, y), top)
    if kind == "plinth":
        return [box((-x, x), (-y, y), (0.0, top))]
    waist = rng.uniform(0.5, 1.0)
    rings = [(0.75, 0.0), (0.75 * waist, 0.5 * top), (0.75, top)]
    return [revolved([(wide * min(x, y), level) for wide, level in rings]).scale([x / min(x, y), 1.0, 1.0])]


def _legs(rng: np.random.Generator, x: float, y: float, top: float, radius: float) -> list[Manifold]:
    splay = rng.uniform(-0.3, 0.6) * min(x, y, top) if chance(rng, 0.4) else 0.0
    parts = four_legs(x, y, top, radius, pick(rng, *LEG_STYLES), splay)
    if splay:
        return parts
    if chance(rng, 0.35):  # stretchers between the legs, in an H or around
        level, thin = rng.uniform(0.1, 0.8) * top, rng.uniform(0.4, 0.9) * radius
        parts += [rod((side * x, -y, level), (side * x, y, level), thin, sides=4) for side in (-1, 1)]
        if chance(rng, 0.5):
            parts.append(rod((-x, 0, level), (x, 0, level), thin, sides=4))
        else:
            parts += [rod((-x, side * y, level), (x, side * y, level), thin, sides=4) for side in (-1, 1)]
    if chance(rng, 0.25):  # a board between them
        level, board = rng.uniform(0.1, 0.7) * top, rng.uniform(0.008, 0.03)
        parts.append(box((-x, x), (-y, y), (level, level + board)))
    if chance(rng, 0.3):  # an apron under the top
        apron, board = rng.uniform(0.1, 0.3) * top, rng.uniform(0.5, 1.2) * radius
        inner = box((-x + board, x - board), (-y + board, y - board), (0.0, 2 * top))
        parts.append(box((-x, x), (-y, y), (top - apron, top)) - inner)
    return parts


def _ring(rng: np.random.Generator, x: float, y: float, top: float, radius: float) -> list[Manifold]:
    count, extent = int(rng.integers(3, 9)), rng.uniform(0.8, 1.4)
    style, start = pick(rng, *LEG_STYLES), rng.uniform(0.0, np.pi)
    angles = start + 2 * np.pi * np.arange(count) / count
    parts = []
    for angle in angles:
        at = 0.7 * np.array([x * np.cos(angle), y * np.sin(angle)])
        parts.append(leg((*(extent * at), 0.0), (*at, top), radius, style))
    return parts


def _hairpins(rng: np.random.Generator, x: float, y: float, top: float) -> list[Manifold]:
    thin, apart = rng.uniform(0.004, 0.01), rng.uniform(0.15, 0.4)
    parts = []
    for sx in (-1, 1):
        for sy in (-1, 1):
            foot = (sx * x, sy * y, thin)
            parts.append(rod(foot, (sx * x * (1 - apart), sy * y, top), thin, sides=8))
            parts.append(rod(foot, (sx * x, sy * y * (1 - apart), top), thin, sides=8))
    return parts


def _frames(
    rng: np.random.Generator, x: float, y: float, top: float, radius: float, *, closed: bool
) -> list[Manifold]:
    """Frames at both sides, standing or lying on the floor; a sled is open at its rear."""
    parts = []
    square = chance(rng, 0.5)
    for side in (-1, 1):
        corners = [(-y, top), (-y, radius), (y, radius), (y, top)]
        if not closed:
            corners = [(y, top), (-y, top), (-y, radius), (y, radius)] if chance(rng, 0.3) else corners[:3]
        path = [np.array([side * x, along, level]) for along, level in corners]
        if square:
            parts += [
                rod(
                    one - 0.9 * radius * _toward(one, other),
                    other + 0.9 * radius * _toward(one, other),
                    radius,
                    sides=4,
                )
                for one, other in pairwise(path)
            ]
        else:
            parts.append(tube(np.array(path), radius))
    level = rng.uniform(0.1, 0.9) * top if chance(rng, 0.5) else radius
    along = rng.uniform(-0.8, 0.8) * y
    if not closed:
        along, level = 0.8 * y, radius
        parts += [
            rod((side * x, -y, top - radius), (side * x, 0.5 * y, top - radius), radius) for side in (-1, 1)
        ]
    parts.append(rod((-x, along, level), (x, along, level), 0.9 * radius))
    return parts


def _toward(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    return (end - start) / np.linalg.norm(end - start)


def _crossed(rng: np.random.Generator, x: float, y: float, top: float, radius: float) -> list[Manifold]:
    parts = []
    sides = 4 if chance(rng, 0.6) else 12
    if chance(rng, 0.3):  # crossed diagonally, once
        for lean in (-1, 1):
            parts.append(rod((-x, -lean * y, 0.0), (x, lean * y, top), radius, sides=sides))
            parts.append(rod((-x, -lean * y, top), (x, lean * y, 0.0), radius, sides=sides))
        return parts
    for side in (-1, 1):
        parts += [
            rod((side * x, -lean * y, 0.0), (side * x, lean * y, top), radius, sides=sides)
            for lean in (-1, 1)
        ]
    parts.append(rod((-x, 0, top / 2), (x, 0, top / 2), 0.7 * radius, sides=sides))
    return parts


def _panels(rng: np.random.Generator, x: float, y: float, top: float) -> list[Manifold]:
    board = rng.uniform(0.008, 0.06)
    parts = [
        box((side * x - board / 2, side * x + board / 2), (-y, y), (0.0, top))
        for side in ((-1, 1) if chance(rng, 0.8) else (-1, 0, 1))
    ]
    if chance(rng, 0.4):  # a back between them
        low, at = rng.uniform(0.0, 0.7) * top, rng.uniform(-0.5, 0.9) * y
        parts.append(box((-x, x), (at, at + board), (low, top)))
    if chance(rng, 0.35):  # a shelf, or a bottom
        level = rng.uniform(0.0, 0.7) * top
        parts.append(box((-x, x), (-y, 0.95 * y), (level, level + board)))
    return parts


def _column(rng: np.random.Generator, extent: float, top: float) -> list[Manifold]:
    radius = rng.uniform(0.05, 0.2) * extent
    parts = [rod((0, 0, 0.005), (0, 0, top), radius, radius * rng.uniform(0.5, 1.5))]
    foot = rng.uniform(0.6, 1.1) * extent
    kind = pick(rng, "plate", "cone", "arms")
    if kind == "plate":
        exponent, plate = float(rng.choice([2.0, 12.0])), rng.uniform(0.006, 0.04)
        parts.append(slab(superellipse(foot, foot, exponent), (0.0, plate)))
    elif kind == "cone":
        rise = rng.uniform(0.05, 0.25) * top
        parts.append(revolved([(foot, 0.0), (foot, 0.008), (0.6 * foot, 0.4 * rise), (radius, rise)]))
    else:
        count, rise = int(rng.integers(3, 7)), rng.uniform(0.02, 0.3) * top
        for angle in 2 * np.pi * np.arange(count) / count:
            tip = foot * np.array([np.cos(angle), np.sin(angle)])
            thin = 0.4 * radius + 0.006
            parts.append(rod((0, 0, rise + thin), (*tip, thin), thin, 0.7 * thin, sides=8))
    if chance(rng, 0.4):  # a plate under the top
        wide, plate = rng.uniform(0.3, 0.8) * extent, rng.uniform(0.008, 0.02)
        parts.append(box((-wide, wide), (-wide, wide), (top - plate, top)))
    return parts
