"""Tables."""

import numpy as np

from pointproj.data.furniture.parts import LEG_STYLES, Rng, chance, four_legs, pick
from pointproj.data.furniture.solids import (
    SIDES,
    Parts,
    about,
    bar,
    box,
    limits,
    rectangle,
    revolved,
    rod,
    slab,
    superellipse,
)
from pointproj.data.furniture.supports import support


def table(rng: Rng) -> Parts:
    """Table: round, oval or rectangular top on legs, a pedestal, trestles or panels."""
    height = rng.uniform(0.4, 0.8)
    shape = pick(rng, "rectangle", "rectangle", "rounded", "round", "oval")
    half_x = rng.uniform(0.45, 0.95)
    half_y = half_x if shape == "round" else rng.uniform(0.35, min(0.6, half_x))
    thickness = rng.uniform(0.045, 0.07) * 2 * half_x
    radius = rng.uniform(0.03, 0.05)
    if shape in ("round", "oval"):
        outline = superellipse(half_x, half_y, rng.uniform(2.0, 2.6))
    else:
        outline = rectangle(half_x, half_y, 0.15 if shape == "rounded" else 0.0)
    under = height - thickness
    parts = [slab(outline, (under, height))]
    inset = 0.6 if shape in ("round", "oval") else 0.86
    x, y = inset * half_x, inset * half_y
    kind = pick(rng, "legs", "legs", "legs", "pedestal", "trestle", "panels")
    if kind == "legs":
        return parts + _legs(rng, x, y, under, radius, half_y)
    if kind == "pedestal":
        return parts + _pedestal(rng, min(half_x, half_y), under)
    if kind == "trestle":
        return parts + _trestles(rng, x, y, under, radius)
    parts += [box(about(side * x, radius), y, (0.0, under + 0.01)) for side in SIDES]
    shelf = rng.uniform(0.2, 0.5) * height
    return [*parts, box(x, 0.9 * y, (shelf, shelf + 1.5 * radius))]


def _legs(rng: Rng, x: float, y: float, under: float, radius: float, half_y: float) -> Parts:
    style = pick(rng, *LEG_STYLES)
    splay = rng.uniform(0.0, 0.15) * half_y if chance(rng, 0.4) else 0.0
    parts = four_legs(x, y, under + 0.01, radius, style, splay)
    if chance(rng, 0.5):
        low = under - rng.uniform(0.06, 0.12)
        parts.append(box(x, y, (low, under + 0.01)) - box(x - radius, y - radius, (low - 1, under + 1)))
    if chance(rng, 0.35) and splay == 0.0:
        level = rng.uniform(0.15, 0.4) * under
        if chance(rng, 0.5):
            parts.append(box(x, y, (level, level + radius)))
        else:
            parts += [bar(side * x, limits(y), level, 0.6 * radius, 4) for side in SIDES]
            parts.append(bar(limits(x), 0, level, 0.6 * radius, 4))
    return parts


def _pedestal(rng: Rng, extent: float, under: float) -> Parts:
    column = rng.uniform(0.05, 0.09)
    if chance(rng, 0.5):
        foot = rng.uniform(0.5, 0.75) * extent
        radii = [foot, foot, 1.6 * column, column, column, 2.2 * column]
        heights = [0.0, 0.035, 0.08, 0.3 * under, 0.8 * under, under + 0.01]
        return [revolved(list(zip(radii, heights, strict=True)))]
    arms = int(rng.integers(3, 5))
    parts = [bar(0, 0, (0.08, under + 0.01), column)]
    for angle in 2 * np.pi * (np.arange(arms) + 0.5) / arms:
        tip = 0.8 * extent * np.array([np.cos(angle), np.sin(angle)])
        parts.append(rod((0, 0, 0.16), (*tip, 0.035), 0.045, 0.035, sides=12))
        parts.append(rod((0, 0, under - 0.1), (*(0.7 * tip), under + 0.01), 0.04, 0.03, sides=12))
    return parts


def _trestles(rng: Rng, x: float, y: float, under: float, radius: float) -> Parts:
    parts, crossed = [], chance(rng, 0.5)
    for at in (-x, x):
        parts.append(box(about(at, radius), y, (under - 2 * radius, under + 0.01)))
        if crossed:
            ends = [(lean * y, -0.8 * lean * y) for lean in SIDES]
            parts += [bar(at, end, (0.0, under), radius, 4) for end in ends]
        else:
            parts.append(box(about(at, radius), y, (0.0, 2 * radius)))
            parts.append(bar(at, 0, (0.01, under), 1.6 * radius, 4))
    return [*parts, bar(limits(x), 0, 0.45 * under, 1.2 * radius, 4)]


def varied_table(rng: Rng) -> Parts:
    """Table of any proportions: thin or thick top of any outline, on any support, with a tier or benches."""
    half_x = rng.uniform(0.25, 1.0)
    half_y = rng.uniform(0.4, 1.0) * half_x
    height, thickness = rng.uniform(0.3, 1.1), rng.uniform(0.008, 0.06)
    exponent = float(rng.choice([2.0, 3.0, 6.0]))
    kind = pick(rng, "rectangle", "rectangle", "rounded", "oval", "polygon")
    if kind == "oval":
        outline = superellipse(half_x, half_y, exponent)
    elif kind == "polygon":
        outline = superellipse(half_x, half_y, 2.0, int(rng.integers(5, 9)))
    else:
        outline = rectangle(half_x, half_y, rng.uniform(0.02, 0.2) if kind == "rounded" else 0.0)
    under = height - thickness
    extent = 0.75 if len(outline) > 30 or len(outline) in range(5, 9) else 1.0
    parts = [slab(outline, (under, height)), *support(rng, extent * half_x, extent * half_y, under)]
    if chance(rng, 0.15):  # a second, lower top of the same outline
        level, size = rng.uniform(0.2, 0.7) * height, rng.uniform(0.6, 1.0)
        parts.append(slab(size * outline, (level, level + thickness)))
    if chance(rng, 0.12):  # benches along it, as for a picnic
        bench = rng.uniform(0.4, 0.6) * height
        for y in (side * (half_y + 0.25) for side in SIDES):
            parts.append(box(half_x, about(y, 0.1), (bench - 0.03, bench)))
            for x in (0.7 * end * half_x for end in SIDES):
                parts.append(bar(x, y, (0.0, bench - 0.02), 0.02, 4))
                parts.append(bar(x, (y, 0), 0.05, 0.02, 4))
    return parts
