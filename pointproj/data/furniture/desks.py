"""Desks."""

import numpy as np

from pointproj.data.furniture.parts import HANDLE_STYLES, Rng, chance, drawer_fronts, either, pick
from pointproj.data.furniture.solids import SIDES, Parts, about, bar, beside, box
from pointproj.data.furniture.supports import support


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
        parts += _pedestal(rng, kind, side, inner_x, inner_y, under)
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


def _pedestal(rng: Rng, kind: str, side: int, x: float, y: float, under: float) -> Parts:
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
