"""Dressers and night stands."""

from itertools import pairwise

import numpy as np

from pointproj.data.furniture.parts import (
    HANDLE_STYLES,
    LEG_STYLES,
    Rng,
    chance,
    drawer_fronts,
    four_legs,
    pick,
    support,
)
from pointproj.data.furniture.solids import (
    SIDES,
    Parts,
    Range,
    about,
    bar,
    box,
    limits,
    rectangle,
    rounded_box,
    slab,
    superellipse,
)

_UNDER = ("legs", "plinth", "panels", "frames", "crossed")
_DOOR_OVERLAP = 0.002  # metres by which a door overlaps with the boards around it


def dresser(rng: Rng) -> Parts:
    """Chest of drawers on feet or a plinth, sometimes with doors or a mirror."""
    wide = chance(rng, 0.6)
    half_x = rng.uniform(0.55, 0.85) if wide else rng.uniform(0.3, 0.5)
    height = rng.uniform(0.7, 0.95) if wide else rng.uniform(0.95, 1.4)
    half_y, bottom = rng.uniform(0.2, 0.28), rng.uniform(0.06, 0.18)
    parts = [box(half_x, half_y, (bottom, height)), *_stand(rng, half_x, half_y, bottom)]
    if chance(rng, 0.7):
        over = rng.uniform(0.015, 0.04)
        outline = rectangle(half_x + over, (-half_y - over, half_y + over / 2), over)
        parts.append(slab(outline, (height - 0.01, height + rng.uniform(0.03, 0.05))))
    columns = int(rng.integers(2, 4)) if wide else int(rng.integers(1, 3))
    rows = rng.uniform(0.8, 1.3, int(rng.integers(3, 5) if wide else rng.integers(4, 7)))
    style = pick(rng, *HANDLE_STYLES[:3])
    inner, z = half_x - 0.02, (bottom + 0.02, height - 0.02)
    if wide and chance(rng, 0.25):
        third = inner / 3
        for x, drawers in (((-inner, -third), rows), ((third, inner), rows), ((-third, third), [1.0])):
            parts += drawer_fronts(x, z, -half_y, drawers, 1, style)
    else:
        parts += drawer_fronts(limits(inner), z, -half_y, rows, columns, style)
    return parts + _mirror(rng, half_x, half_y, height) if chance(rng, 0.3) else parts


def night_stand(rng: Rng) -> Parts:
    """Small cabinet with one to three drawers, an open shelf or a round body."""
    if chance(rng, 0.15):
        return _round_night_stand(rng)
    half_x, half_y = rng.uniform(0.2, 0.3), rng.uniform(0.17, 0.25)
    height, bottom = rng.uniform(0.45, 0.7), rng.uniform(0.04, 0.28)
    parts = _stand(rng, half_x, half_y, bottom)
    style, inner, board = pick(rng, *HANDLE_STYLES), limits(half_x - 0.015), 0.04
    layout = pick(rng, "drawers", "drawers", "shelf_below", "shelf_above", "open")
    body = box(half_x, half_y, (bottom, height))
    if layout == "drawers":
        rows = rng.uniform(0.8, 1.2, int(rng.integers(1, 4)))
        fronts = drawer_fronts(inner, (bottom + 0.015, height - 0.015), -half_y, rows, 1, style)
        parts += [body, *fronts]
    else:
        share = (1.0 if layout == "open" else rng.uniform(0.4, 0.6)) * (height - bottom)
        low, high = (height - share, height) if layout == "shelf_above" else (bottom, bottom + share)
        parts.append(body - box(half_x - board, (-half_y - 1, half_y - board), (low + board, high - board)))
        if layout == "open":
            parts.append(box(half_x, half_y, about(0.5 * (bottom + height), board / 2)))
        else:
            shut = (high + 0.01, height - 0.01) if layout == "shelf_below" else (bottom + 0.01, low - 0.01)
            parts += drawer_fronts(inner, shut, -half_y, [1.0], 1, style)
    if chance(rng, 0.6):
        over = rng.uniform(0.01, 0.03)
        outline = rectangle(half_x + over, (-half_y - over, half_y), over)
        parts.append(slab(outline, (height - 0.01, height + 0.03)))
    return parts


def _round_night_stand(rng: Rng) -> Parts:
    half = rng.uniform(0.2, 0.28)
    height, bottom = rng.uniform(0.45, 0.65), rng.uniform(0.05, 0.2)
    body = slab(superellipse(half, half, rng.uniform(2.0, 3.0)), (bottom, height))
    top = slab(superellipse(half + 0.02, half + 0.02, 2.2), (height - 0.01, height + 0.035))
    legs = four_legs(0.6 * half, 0.6 * half, bottom + 0.02, 0.025, pick(rng, *LEG_STYLES[:3]))
    # Grooves around the body tell the drawers apart.
    for level in np.linspace(bottom, height, int(rng.integers(3, 5)))[1:-1]:
        ring = slab(superellipse(half + 0.1, half + 0.1), about(level, 0.008))
        body -= ring - slab(superellipse(half - 0.012, half - 0.012), about(level, 1))
    middles = [0.5 * (low + high) for low, high in pairwise(np.linspace(bottom, height, 3))]
    y = (-half - 0.03, -half + 0.04)
    return [body, top, *legs, *(rounded_box(0.05, y, about(middle, 0.012), 0.01) for middle in middles)]


def _stand(rng: Rng, half_x: float, half_y: float, bottom: float) -> Parts:
    kind = pick(rng, "legs", "legs", "plinth", "bracket")
    if kind == "legs" or bottom > 0.12:
        return four_legs(half_x - 0.045, half_y - 0.045, bottom + 0.02, 0.035, pick(rng, *LEG_STYLES))
    if kind == "plinth":
        return [box(half_x - 0.03, (-half_y + 0.04, half_y - 0.01), (0.0, bottom + 0.01))]
    gap = (-1.0, bottom - 0.02)
    solid = box(half_x, half_y, (0.0, bottom + 0.01))
    return [solid - box(half_x - 0.1, half_y + 1, gap) - box(half_x + 1, half_y - 0.08, gap)]


def _mirror(rng: Rng, half_x: float, half_y: float, height: float) -> Parts:
    wide, rise = rng.uniform(0.5, 0.9) * half_x, rng.uniform(0.45, 0.8)
    centre = height + 0.1 + rise / 2
    exponent = 2.2 if chance(rng, 0.4) else 9.0
    upright = [[1, 0, 0, 0], [0, 0, -1, half_y - 0.02], [0, 1, 0, centre]]
    frame = slab(superellipse(wide, rise / 2, exponent), (-0.02, 0.05)).transform(upright)
    glass = slab(superellipse(wide - 0.05, rise / 2 - 0.05, exponent), (0.03, 0.2)).transform(upright)
    z = (height - 0.02, centre)
    posts = [bar(side * 0.6 * wide, half_y - 0.03, z, 0.025, 4) for side in SIDES]
    return [part - glass for part in (frame, *posts)]


def varied_dresser(rng: Rng) -> Parts:
    """Wardrobe, chest, shelf or sideboard of any proportions."""
    half_x, half_y, height = rng.uniform(0.25, 0.9), rng.uniform(0.15, 0.35), rng.uniform(0.6, 2.0)
    make = _boarded_cabinet if chance(rng, 0.4) else _cabinet
    parts = make(rng, half_x, half_y, height)
    if chance(rng, 0.2):
        parts += _mirror(rng, half_x, half_y, height)
    if chance(rng, 0.2):  # a narrower cabinet on top
        x, y = half_x * rng.uniform(0.6, 0.98), half_y * rng.uniform(0.4, 0.9)
        upper = _cabinet(rng, x, y, rng.uniform(0.3, 0.8))
        parts += [part.translate([0.0, 0.02, height - 0.002]) for part in upper]
    return parts


def varied_night_stand(rng: Rng) -> Parts:
    """Small cabinet or table of any proportions."""
    half_x, half_y, height = rng.uniform(0.15, 0.35), rng.uniform(0.15, 0.3), rng.uniform(0.35, 0.8)
    if chance(rng, 0.6):
        make = _boarded_cabinet if chance(rng, 0.4) else _cabinet
        return make(rng, half_x, half_y, height)
    board = rng.uniform(0.01, 0.04)
    low = height - rng.uniform(0.1, 0.6) * height
    x, y = 0.9 * half_x, 0.9 * half_y
    parts = [box(half_x, half_y, (height - board, height)), box(x, y, (low, height - 0.5 * board))]
    if chance(rng, 0.7):
        rows, style = [1.0] * int(rng.integers(1, 4)), pick(rng, *HANDLE_STYLES)
        parts += drawer_fronts(limits(x), (low, height - board), -y, rows, 1, style)
    return parts + support(rng, x, y, low, "legs", "frames", "crossed", "column", "panels", "hairpin")


def _cabinet(rng: Rng, half_x: float, half_y: float, height: float) -> Parts:
    """Carcass with a grid of closed, open and drawer compartments, on any low support or the floor."""
    clear = rng.uniform(0.03, 0.3) * height if chance(rng, 0.6) else 0.0
    board = rng.uniform(0.008, 0.04)
    columns, rows = int(rng.integers(1, 4)), int(rng.integers(1, 7))
    edges_x = np.linspace(-half_x + board, half_x - board, columns + 1)
    edges_z = np.linspace(clear + board, height - board, rows + 1)
    carcass, fronts = box(half_x, half_y, (clear, height)), []
    openness = float(rng.choice([0.0, 0.0, 0.3, 1.0]))
    backless, style, gap = chance(rng, 0.15), pick(rng, *HANDLE_STYLES), rng.uniform(0.003, 0.014)
    rear, half = half_y + 1.0 if backless else half_y - board, board / 2
    for left, right in pairwise(edges_x):
        for low, high in pairwise(edges_z):
            if chance(rng, openness):
                carcass -= box((left + half, right - half), (-half_y - 1, rear), (low + half, high - half))
            elif chance(rng, 0.8):
                fronts += drawer_fronts((left, right), (low, high), -half_y, [1.0], 1, style, gap=gap)
    parts = [carcass, *fronts]
    if chance(rng, 0.4):
        over, top = rng.uniform(0.005, 0.05), rng.uniform(0.01, 0.05)
        parts.append(box(half_x + over, (-half_y - over, half_y), (height - 0.003, height + top)))
    return parts + support(rng, half_x, half_y, clear, *_UNDER) if clear else parts


def _boarded_cabinet(rng: Rng, half_x: float, half_y: float, height: float) -> Parts:
    """Cabinet of thin boards: its compartments are open, shut by doors, or hold drawers, in or pulled out.

    It is hollow: a shut compartment counts as solid, an open one does not.
    """
    clear = rng.uniform(0.03, 0.3) * height if chance(rng, 0.6) else 0.0
    board = rng.uniform(0.006, 0.03)
    edges_x = np.linspace(-half_x + board / 2, half_x - board / 2, int(rng.integers(2, 5)))
    edges_z = np.linspace(clear + board / 2, height - board / 2, int(rng.integers(2, 7)))
    parts = [box(about(x, board / 2), half_y, (clear, height)) for x in edges_x]
    parts += [box(half_x, half_y, about(z, board / 2)) for z in edges_z]
    if chance(rng, 0.85):
        parts.append(box(half_x, (half_y - board, half_y), (clear, height)))
    usual, other = (pick(rng, "open", "door", "drawer", "pulled") for _ in range(2))
    for x in pairwise(edges_x):
        for z in pairwise(edges_z):
            kind = usual if chance(rng, 0.7) else other
            if kind == "door":
                parts.append(box(x, (-half_y - board, -half_y + _DOOR_OVERLAP), z))
            elif kind != "open":
                out = rng.uniform(0.1, 0.9) * 2 * half_y if kind == "pulled" else 0.0
                parts += [part.translate([0.0, -out, 0.0]) for part in _drawer(x, z, half_y, board)]
    return parts + support(rng, half_x, half_y, clear, *_UNDER) if clear else parts


def _drawer(x: Range, z: Range, half_y: float, board: float) -> Parts:
    """Front that shuts a compartment, and behind it a box that is open above."""
    left, right = x[0] + 1.5 * board, x[1] - 1.5 * board
    low, high = z[0] + board, z[0] + 0.8 * (z[1] - z[0])
    rear = half_y - 3 * board
    return [
        box(x, (-half_y - board, -half_y + _DOOR_OVERLAP), z),
        box((left, right), (-half_y, rear), (low, low + board)),
        box((left, left + board), (-half_y, rear), (low, high)),
        box((right - board, right), (-half_y, rear), (low, high)),
        box((left, right), (rear - board, rear), (low, high)),
    ]
