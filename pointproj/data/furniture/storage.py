"""Dressers and night stands."""

from itertools import pairwise

import numpy as np
from manifold3d import Manifold

from pointproj.data.furniture.cabinets import boarded_cabinet
from pointproj.data.furniture.parts import HANDLE_STYLES, LEG_STYLES, chance, drawer_fronts, four_legs, pick
from pointproj.data.furniture.solids import (
    box,
    rectangle,
    rod,
    rounded_box,
    slab,
    superellipse,
)
from pointproj.data.furniture.supports import support


def dresser(rng: np.random.Generator) -> list[Manifold]:
    """Chest of drawers on feet or a plinth, sometimes with doors or a mirror."""
    wide = chance(rng, 0.6)
    half_x = rng.uniform(0.55, 0.85) if wide else rng.uniform(0.3, 0.5)
    height = rng.uniform(0.7, 0.95) if wide else rng.uniform(0.95, 1.4)
    half_y = rng.uniform(0.2, 0.28)
    bottom = rng.uniform(0.06, 0.18)
    parts = [box((-half_x, half_x), (-half_y, half_y), (bottom, height))]
    parts += _stand(rng, half_x, half_y, bottom)
    if chance(rng, 0.7):
        over = rng.uniform(0.015, 0.04)
        outline = rectangle((-half_x - over, half_x + over), (-half_y - over, half_y + over / 2), over)
        parts.append(slab(outline, (height - 0.01, height + rng.uniform(0.03, 0.05))))
    columns = int(rng.integers(2, 4)) if wide else int(rng.integers(1, 3))
    rows = rng.uniform(0.8, 1.3, int(rng.integers(3, 5) if wide else rng.integers(4, 7)))
    style = pick(rng, *HANDLE_STYLES[:3])
    inner, low, high = half_x - 0.02, bottom + 0.02, height - 0.02
    if wide and chance(rng, 0.25):
        third = inner / 3
        parts += drawer_fronts((-inner, -third), (low, high), -half_y, rows, 1, style)
        parts += drawer_fronts((third, inner), (low, high), -half_y, rows, 1, style)
        parts += drawer_fronts((-third, third), (low, high), -half_y, [1.0], 1, style)
    else:
        parts += drawer_fronts((-inner, inner), (low, high), -half_y, rows, columns, style)
    if chance(rng, 0.3):
        parts += _mirror(rng, half_x, half_y, height)
    return parts


def night_stand(rng: np.random.Generator) -> list[Manifold]:
    """Small cabinet with one to three drawers, an open shelf or a round body."""
    if chance(rng, 0.15):
        return _round_night_stand(rng)
    half_x, half_y = rng.uniform(0.2, 0.3), rng.uniform(0.17, 0.25)
    height = rng.uniform(0.45, 0.7)
    bottom = rng.uniform(0.04, 0.28)
    parts = _stand(rng, half_x, half_y, bottom)
    style = pick(rng, *HANDLE_STYLES)
    inner, board = half_x - 0.015, 0.04
    layout = pick(rng, "drawers", "drawers", "shelf_below", "shelf_above", "open")
    if layout == "drawers":
        parts.append(box((-half_x, half_x), (-half_y, half_y), (bottom, height)))
        rows = rng.uniform(0.8, 1.2, int(rng.integers(1, 4)))
        parts += drawer_fronts((-inner, inner), (bottom + 0.015, height - 0.015), -half_y, rows, 1, style)
    else:
        share = 1.0 if layout == "open" else rng.uniform(0.4, 0.6)
        rise = height - bottom
        niche = (
            (bottom, bottom + share * rise) if layout != "shelf_above" else (height - share * rise, height)
        )
        solid = box((-half_x, half_x), (-half_y, half_y), (bottom, height))
        hollow = box(
            (-half_x + board, half_x - board),
            (-half_y - 1, half_y - board),
            (niche[0] + board, niche[1] - board),
        )
        parts.append(solid - hollow)
        closed = (niche[1], height) if layout == "shelf_below" else (bottom, niche[0])
        if layout == "open":
            level = 0.5 * (bottom + height)
            parts.append(box((-half_x, half_x), (-half_y, half_y), (level - board / 2, level + board / 2)))
        else:
            parts += drawer_fronts(
                (-inner, inner), (closed[0] + 0.01, closed[1] - 0.01), -half_y, [1.0], 1, style
            )
    if chance(rng, 0.6):
        over = rng.uniform(0.01, 0.03)
        outline = rectangle((-half_x - over, half_x + over), (-half_y - over, half_y), over)
        parts.append(slab(outline, (height - 0.01, height + 0.03)))
    return parts


def _round_night_stand(rng: np.random.Generator) -> list[Manifold]:
    half = rng.uniform(0.2, 0.28)
    height, bottom = rng.uniform(0.45, 0.65), rng.uniform(0.05, 0.2)
    parts = [slab(superellipse(half, half, rng.uniform(2.0, 3.0)), (bottom, height))]
    parts += [slab(superellipse(half + 0.02, half + 0.02, 2.2), (height - 0.01, height + 0.035))]
    parts += four_legs(0.6 * half, 0.6 * half, bottom + 0.02, 0.025, pick(rng, *LEG_STYLES[:3]))
    # Grooves around the body tell the drawers apart.
    for level in np.linspace(bottom, height, int(rng.integers(3, 5)))[1:-1]:
        ring = slab(superellipse(half + 0.1, half + 0.1), (level - 0.008, level + 0.008))
        core = slab(superellipse(half - 0.012, half - 0.012), (level - 1, level + 1))
        parts[0] = parts[0] - (ring - core)
    levels = np.linspace(bottom, height, 3)
    for low, high in pairwise(levels):
        middle = 0.5 * (low + high)
        parts.append(
            rounded_box((-0.05, 0.05), (-half - 0.03, -half + 0.04), (middle - 0.012, middle + 0.012), 0.01)
        )
    return parts


def _stand(rng: np.random.Generator, half_x: float, half_y: float, bottom: float) -> list[Manifold]:
    kind = pick(rng, "legs", "legs", "plinth", "bracket")
    if kind == "legs" or bottom > 0.12:
        return four_legs(half_x - 0.045, half_y - 0.045, bottom + 0.02, 0.035, pick(rng, *LEG_STYLES))
    if kind == "plinth":
        return [box((-half_x + 0.03, half_x - 0.03), (-half_y + 0.04, half_y - 0.01), (0.0, bottom + 0.01))]
    solid = box((-half_x, half_x), (-half_y, half_y), (0.0, bottom + 0.01))
    along_x = box((-half_x + 0.1, half_x - 0.1), (-half_y - 1, half_y + 1), (-1.0, bottom - 0.02))
    along_y = box((-half_x - 1, half_x + 1), (-half_y + 0.08, half_y - 0.08), (-1.0, bottom - 0.02))
    return [solid - along_x - along_y]


def _mirror(rng: np.random.Generator, half_x: float, half_y: float, height: float) -> list[Manifold]:
    wide, rise = rng.uniform(0.5, 0.9) * half_x, rng.uniform(0.45, 0.8)
    centre = height + 0.1 + rise / 2
    exponent = 2.2 if chance(rng, 0.4) else 9.0
    upright = [[1, 0, 0, 0], [0, 0, -1, half_y - 0.02], [0, 1, 0, centre]]
    frame = slab(superellipse(wide, rise / 2, exponent), (-0.02, 0.05)).transform(upright)
    glass = slab(superellipse(wide - 0.05, rise / 2 - 0.05, exponent), (0.03, 0.2)).transform(upright)
    posts = [
        rod(
            (side * 0.6 * wide, half_y - 0.03, height - 0.02),
            (side * 0.6 * wide, half_y - 0.03, centre),
            0.025,
            sides=4,
        )
        for side in (-1, 1)
    ]
    return [frame - glass, *[post - glass for post in posts]]


def varied_dresser(rng: np.random.Generator) -> list[Manifold]:
    """Wardrobe, chest, shelf or sideboard of any proportions."""
    half_x, half_y, height = rng.uniform(0.25, 0.9), rng.uniform(0.15, 0.35), rng.uniform(0.6, 2.0)
    make = boarded_cabinet if chance(rng, 0.4) else _cabinet
    parts = make(rng, half_x, half_y, height)
    if chance(rng, 0.2):
        parts += _mirror(rng, half_x, half_y, height)
    if chance(rng, 0.2):  # a narrower cabinet on top
        upper = _cabinet(
            rng, half_x * rng.uniform(0.6, 0.98), half_y * rng.uniform(0.4, 0.9), rng.uniform(0.3, 0.8)
        )
        parts += [part.translate([0.0, 0.02, height - 0.002]) for part in upper]
    return parts


def varied_night_stand(rng: np.random.Generator) -> list[Manifold]:
    """Small cabinet or table of any proportions."""
    half_x, half_y, height = rng.uniform(0.15, 0.35), rng.uniform(0.15, 0.3), rng.uniform(0.35, 0.8)
    if chance(rng, 0.6):
        make = boarded_cabinet if chance(rng, 0.4) else _cabinet
        return make(rng, half_x, half_y, height)
    board = rng.uniform(0.01, 0.04)
    box_low = height - rng.uniform(0.1, 0.6) * height
    parts = [box((-half_x, half_x), (-half_y, half_y), (height - board, height))]
    inner_x, inner_y = 0.9 * half_x, 0.9 * half_y
    parts.append(box((-inner_x, inner_x), (-inner_y, inner_y), (box_low, height - 0.5 * board)))
    if chance(rng, 0.7):
        rows = [1.0] * int(rng.integers(1, 4))
        parts += drawer_fronts(
            (-inner_x, inner_x), (box_low, height - board), -inner_y, rows, 1, pick(rng, *HANDLE_STYLES)
        )
    return [
        *parts,
        *support(rng, inner_x, inner_y, box_low, "legs", "frames", "crossed", "column", "panels", "hairpin"),
    ]


def _cabinet(rng: np.random.Generator, half_x: float, half_y: float, height: float) -> list[Manifold]:
    """Carcass with a grid of closed, open and drawer compartments, on any low support or the floor."""
    clear = rng.uniform(0.03, 0.3) * height if chance(rng, 0.6) else 0.0
    board = rng.uniform(0.008, 0.04)
    columns, rows = int(rng.integers(1, 4)), int(rng.integers(1, 7))
    edges_x = np.linspace(-half_x + board, half_x - board, columns + 1)
    edges_z = np.linspace(clear + board, height - board, rows + 1)
    carcass = box((-half_x, half_x), (-half_y, half_y), (clear, height))
    openness = float(rng.choice([0.0, 0.0, 0.3, 1.0]))
    backless, style, gap = chance(rng, 0.15), pick(rng, *HANDLE_STYLES), rng.uniform(0.003, 0.014)
    rear = half_y + 1.0 if backless else half_y - board
    fronts = []
    for left, right in pairwise(edges_x):
        for low, high in pairwise(edges_z):
            if chance(rng, openness):
                hollow = (
                    (left + board / 2, right - board / 2),
                    (-half_y - 1, rear),
                    (low + board / 2, high - board / 2),
                )
                carcass -= box(*hollow)
            elif chance(rng, 0.8):
                fronts += drawer_fronts((left, right), (low, high), -half_y, [1.0], 1, style, gap=gap)
    parts = [carcass, *fronts]
    if chance(rng, 0.4):
        over, top = rng.uniform(0.005, 0.05), rng.uniform(0.01, 0.05)
        parts.append(
            box((-half_x - over, half_x + over), (-half_y - over, half_y), (height - 0.003, height + top))
        )
    return (
        [*parts, *support(rng, half_x, half_y, clear, "legs", "plinth", "panels", "frames", "crossed")]
        if clear
        else parts
    )
