"""Tables and desks."""

import numpy as np

from pointproj.data.furniture.parts import (
    HANDLE_STYLES,
    LEG_STYLES,
    Rng,
    chance,
    drawer_fronts,
    either,
    four_legs,
    pick,
    support,
)
from pointproj.data.furniture.solids import (
    SIDES,
    Parts,
    about,
    bar,
    beside,
    box,
    limits,
    rectangle,
    revolved,
    rod,
    slab,
    superellipse,
)


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


def desk(rng: Rng) -> Parts:
    """Desk: a top on drawer pedestals, panels or legs, with hutch, side return or modesty panel."""
    height = rng.uniform(0.68, 0.8)
    half_x, half_y = rng.uniform(0.55, 0.9), rng.uniform(0.28, 0.42)
    under = height - rng.uniform(0.05, 0.075)
    parts = [box(half_x, half_y, (under, height))]
    inner_x, inner_y = half_x - 0.03, half_y - 0.03
    left, right = pick(rng, "drawers", "drawers", "panel", "legs"), pick(rng, "drawers", "panel", "legs")
    if left == right == "legs" and chance(rng, 0.5):
        left = "drawers"
    for kind, side in ((left, -1), (right, 1)):
        parts += _desk_end(rng, kind, side, inner_x, inner_y, under)
    panel = rng.uniform(0.25, 0.9) * under
    parts.append(box(inner_x, (inner_y - 0.04, inner_y), (under - panel, under + 0.01)))
    if chance(rng, 0.35):
        parts += _hutch(rng, half_x, half_y, height)
    if chance(rng, 0.3):  # a return, at a right angle
        x, front = beside(either(rng), half_x, half_x - 0.45), -half_y - rng.uniform(0.4, 0.8)
        parts.append(box(x, (front, -half_y + 0.01), (under, height)))
        parts.append(box((x[0] + 0.03, x[1] - 0.03), (front + 0.03, front + 0.08), (0.0, under + 0.01)))
    elif chance(rng, 0.3):
        tray = under - 0.12
        parts.append(box(0.3, (-half_y - 0.05, 0.0), (tray, tray + 0.04)))
        parts += [box(about(side * 0.29, 0.02), (-0.1, 0.0), (tray, under + 0.01)) for side in SIDES]
    return parts


def _desk_end(rng: Rng, kind: str, side: int, x: float, y: float, under: float) -> Parts:
    if kind == "panel":
        return [box(beside(side, x, x - 0.06), y, (0.0, under + 0.01))]
    if kind == "legs":
        return [bar(side * (x - 0.03), end * (y - 0.03), (0.0, under + 0.01), 0.03, 4) for end in SIDES]
    across = beside(side, x, x - rng.uniform(0.32, 0.45))
    bottom = rng.uniform(0.04, 0.3) if chance(rng, 0.4) else 0.0
    parts = [box(across, y, (bottom, under + 0.01))]
    if bottom:
        places = [(at, end * (y - 0.03)) for at in (across[0] + 0.03, across[1] - 0.03) for end in SIDES]
        parts += [bar(*place, (0.0, bottom + 0.01), 0.025, 4) for place in places]
    rows, style = rng.uniform(0.7, 1.3, int(rng.integers(2, 5))), pick(rng, *HANDLE_STYLES)
    return parts + drawer_fronts(across, (bottom + 0.02, under - 0.01), -y, rows, 1, style)


def _hutch(rng: Rng, half_x: float, half_y: float, height: float) -> Parts:
    rise, depth, board = rng.uniform(0.3, 0.6), rng.uniform(0.2, 0.3), 0.045
    y, z = (half_y - depth, half_y), (height - 0.01, height + rise)
    parts = [box(half_x, (half_y - board, half_y), z), box(half_x, y, (z[1] - board, z[1]))]
    walls = np.linspace(-half_x + board / 2, half_x - board / 2, int(rng.integers(2, 5)))
    parts += [box(about(wall, board / 2), y, z) for wall in walls]
    if chance(rng, 0.5):
        level = height + 0.5 * rise
        parts.append(box(half_x, y, (level, level + board)))
    return parts


def varied_desk(rng: Rng) -> Parts:
    """Desk of any proportions: thin top on any support, pedestals, returns, tiers of shelves, a tray."""
    half_x, half_y = rng.uniform(0.45, 1.0), rng.uniform(0.25, 0.5)
    height, board = rng.uniform(0.6, 0.95), rng.uniform(0.01, 0.05)
    under = height - board
    parts = [box(half_x, half_y, (under, height))]
    parts += support(rng, half_x, half_y, under, "legs", "panels", "panels", "frames", "hairpin", "crossed")
    for side in SIDES:
        if chance(rng, 0.4):
            width = rng.uniform(0.3, 0.6) * half_x
            x, front = beside(side, half_x - 0.02, half_x - 0.02 - width), half_y - 0.02
            low = rng.uniform(0.0, 0.7) * under
            parts.append(box(x, front, (low, under + 0.004)))
            if chance(rng, 0.6):
                rows, style = rng.uniform(0.7, 1.3, int(rng.integers(1, 4))), pick(rng, *HANDLE_STYLES)
                parts += drawer_fronts(x, (low, under), -front, rows, 1, style)
    if chance(rng, 0.35):  # a return, at a right angle, with its own support
        side, deep, wide = either(rng), rng.uniform(0.4, 1.0), rng.uniform(0.3, 0.5)
        x = beside(side, half_x, half_x - wide)
        parts.append(box(x, (-half_y - deep, -half_y + 0.02), (under, height)))
        base = support(rng, wide / 2, deep / 2, under, "legs", "panels", "plinth")
        parts += [part.translate([sum(x) / 2, -half_y - deep / 2, 0.0]) for part in base]
    if chance(rng, 0.4):
        parts += _tiers(rng, half_x, half_y, height, board)
    if chance(rng, 0.3):  # a keyboard tray on hangers
        tray, wide = under - rng.uniform(0.06, 0.15), 0.5 * half_x
        parts.append(box(wide, (-half_y - 0.1, 0.0), (tray, tray + 0.012)))
        hangers = [about(side * 0.9 * wide, 0.01) for side in SIDES]
        parts += [box(x, (-0.2 * half_y, 0.0), (tray, under + 0.004)) for x in hangers]
    return parts


def _tiers(rng: Rng, half_x: float, half_y: float, height: float, board: float) -> Parts:
    """Shelves above the top, on uprights."""
    tiers, rise, depth = int(rng.integers(1, 4)), rng.uniform(0.15, 0.35), rng.uniform(0.3, 1.0) * half_y
    extent, y = half_x * rng.uniform(0.4, 1.0), (half_y - depth, half_y)
    levels = [height + tier * rise for tier in range(1, tiers + 1)]
    parts = [box(extent, y, (level - board, level)) for level in levels]
    z = (height - 0.004, levels[-1])
    parts += [box(about(side * (extent - board), board / 2), y, z) for side in SIDES]
    return [*parts, box(extent, (half_y - board, half_y), z)] if chance(rng, 0.5) else parts
