"""Tables."""

import numpy as np
from manifold3d import Manifold

from pointproj.data.furniture.parts import LEG_STYLES, chance, four_legs, pick
from pointproj.data.furniture.solids import (
    box,
    rectangle,
    revolved,
    rod,
    slab,
    superellipse,
)
from pointproj.data.furniture.supports import support


def table(rng: np.random.Generator) -> list[Manifold]:
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
        outline = rectangle((-half_x, half_x), (-half_y, half_y), 0.15 if shape == "rounded" else 0.0)
    under = height - thickness
    parts = [slab(outline, (under, height))]
    inset = 0.6 if shape in ("round", "oval") else 0.86
    leg_x, leg_y = inset * half_x, inset * half_y
    support = pick(rng, "legs", "legs", "legs", "pedestal", "trestle", "panels")
    if support == "legs":
        parts += _legs_with_options(rng, leg_x, leg_y, under, radius, half_y)
    elif support == "pedestal":
        parts += _pedestal(rng, min(half_x, half_y), under)
    elif support == "trestle":
        parts += _trestles(rng, leg_x, leg_y, under, radius)
    else:
        for side in (-1, 1):
            parts.append(
                box((side * leg_x - radius, side * leg_x + radius), (-leg_y, leg_y), (0.0, under + 0.01))
            )
        shelf = rng.uniform(0.2, 0.5) * height
        parts.append(box((-leg_x, leg_x), (-0.9 * leg_y, 0.9 * leg_y), (shelf, shelf + 1.5 * radius)))
    return parts


def _legs_with_options(
    rng: np.random.Generator, leg_x: float, leg_y: float, under: float, radius: float, half_y: float
) -> list[Manifold]:
    style = pick(rng, *LEG_STYLES)
    splay = rng.uniform(0.0, 0.15) * half_y if chance(rng, 0.4) else 0.0
    parts = four_legs(leg_x, leg_y, under + 0.01, radius, style, splay)
    if chance(rng, 0.5):
        apron = rng.uniform(0.06, 0.12)
        outer = box((-leg_x, leg_x), (-leg_y, leg_y), (under - apron, under + 0.01))
        inner = box(
            (-leg_x + radius, leg_x - radius),
            (-leg_y + radius, leg_y - radius),
            (under - apron - 1, under + 1),
        )
        parts.append(outer - inner)
    if chance(rng, 0.35) and splay == 0.0:
        level = rng.uniform(0.15, 0.4) * under
        if chance(rng, 0.5):
            parts.append(box((-leg_x, leg_x), (-leg_y, leg_y), (level, level + radius)))
        else:
            for side in (-1, 1):
                parts.append(
                    rod((side * leg_x, -leg_y, level), (side * leg_x, leg_y, level), 0.6 * radius, sides=4)
                )
            parts.append(rod((-leg_x, 0, level), (leg_x, 0, level), 0.6 * radius, sides=4))
    return parts


def _pedestal(rng: np.random.Generator, extent: float, under: float) -> list[Manifold]:
    column = rng.uniform(0.05, 0.09)
    if chance(rng, 0.5):
        foot = rng.uniform(0.5, 0.75) * extent
        rings = [(foot, 0.0), (foot, 0.03), (1.6 * column, 0.07), (column, 0.2)]
        rings += [(column, 0.8), (2.2 * column, 1.0)]
        heights = [0.0, 0.035, 0.08, 0.3 * under, 0.8 * under, under + 0.01]
        return [revolved([(width, level) for (width, _), level in zip(rings, heights, strict=True)])]
    arms = int(rng.integers(3, 5))
    parts = [rod((0, 0, 0.08), (0, 0, under + 0.01), column)]
    for angle in 2 * np.pi * (np.arange(arms) + 0.5) / arms:
        tip = 0.8 * extent * np.array([np.cos(angle), np.sin(angle)])
        parts.append(rod((0, 0, 0.16), (*tip, 0.035), 0.045, 0.035, sides=12))
        parts.append(rod((0, 0, under - 0.1), (*(0.7 * tip), under + 0.01), 0.04, 0.03, sides=12))
    return parts


def _trestles(
    rng: np.random.Generator, leg_x: float, leg_y: float, under: float, radius: float
) -> list[Manifold]:
    parts = []
    crossed = chance(rng, 0.5)
    for side in (-1, 1):
        x = side * leg_x
        parts.append(box((x - radius, x + radius), (-leg_y, leg_y), (under - 2 * radius, under + 0.01)))
        if crossed:
            parts += [
                rod((x, lean * leg_y, 0.0), (x, -0.8 * lean * leg_y, under), radius, sides=4)
                for lean in (-1, 1)
            ]
        else:
            parts.append(box((x - radius, x + radius), (-leg_y, leg_y), (0.0, 2 * radius)))
            parts.append(rod((x, 0, 0.01), (x, 0, under), 1.6 * radius, sides=4))
    parts.append(rod((-leg_x, 0, 0.45 * under), (leg_x, 0, 0.45 * under), 1.2 * radius, sides=4))
    return parts


def varied_table(rng: np.random.Generator) -> list[Manifold]:
    """Table of any proportions: thin or thick top of any outline, on any support, with shelves or tiers."""
    half_x = rng.uniform(0.25, 1.0)
    half_y = rng.uniform(0.4, 1.0) * half_x
    height, thickness = rng.uniform(0.3, 1.1), rng.uniform(0.008, 0.06)
    exponent = float(rng.choice([2.0, 3.0, 6.0]))
    outline = {
        "rectangle": lambda: rectangle((-half_x, half_x), (-half_y, half_y)),
        "rounded": lambda: rectangle((-half_x, half_x), (-half_y, half_y), rng.uniform(0.02, 0.2)),
        "oval": lambda: superellipse(half_x, half_y, exponent),
        "polygon": lambda: superellipse(half_x, half_y, 2.0, int(rng.integers(5, 9))),
    }[pick(rng, "rectangle", "rectangle", "rounded", "oval", "polygon")]()
    under = height - thickness
    extent = 0.75 if len(outline) > 30 or len(outline) in range(5, 9) else 1.0
    parts = [slab(outline, (under, height)), *support(rng, extent * half_x, extent * half_y, under)]
    if chance(rng, 0.15):  # a second, lower top of the same outline
        level, size = rng.uniform(0.2, 0.7) * height, rng.uniform(0.6, 1.0)
        parts.append(slab(size * outline, (level, level + thickness)))
    if chance(rng, 0.12):  # benches along it, as for a picnic
        bench = rng.uniform(0.4, 0.6) * height
        for side in (-1, 1):
            y = side * (half_y + 0.25)
            parts.append(box((-half_x, half_x), (y - 0.1, y + 0.1), (bench - 0.03, bench)))
            for end in (-1, 1):
                x = 0.7 * end * half_x
                parts.append(rod((x, y, 0.0), (x, y, bench - 0.02), 0.02, sides=4))
                parts.append(rod((x, y, 0.05), (x, 0, 0.05), 0.02, sides=4))
    return parts
