"""Desks."""

import numpy as np
from manifold3d import Manifold

from pointproj.data.furniture.parts import HANDLE_STYLES, chance, drawer_fronts, pick
from pointproj.data.furniture.solids import (
    box,
    rod,
)
from pointproj.data.furniture.supports import support


def desk(rng: np.random.Generator) -> list[Manifold]:
    """Desk: a top on drawer pedestals, panels or legs, with hutch, side return or modesty panel."""
    height = rng.uniform(0.68, 0.8)
    half_x, half_y = rng.uniform(0.55, 0.9), rng.uniform(0.28, 0.42)
    thickness = rng.uniform(0.05, 0.075)
    under = height - thickness
    parts = [box((-half_x, half_x), (-half_y, half_y), (under, height))]
    inner_x, inner_y = half_x - 0.03, half_y - 0.03
    kinds = {
        "left": pick(rng, "drawers", "drawers", "panel", "legs"),
        "right": pick(rng, "drawers", "panel", "legs"),
    }
    if kinds == {"left": "legs", "right": "legs"} and chance(rng, 0.5):
        kinds["left"] = "drawers"
    for name, side in (("left", -1), ("right", 1)):
        parts += _desk_support(rng, kinds[name], side, inner_x, inner_y, under)
    panel = rng.uniform(0.25, 0.9) * under
    parts.append(box((-inner_x, inner_x), (inner_y - 0.04, inner_y), (under - panel, under + 0.01)))
    if chance(rng, 0.35):
        parts += _hutch(rng, half_x, half_y, height)
    if chance(rng, 0.3):
        side = 1 if chance(rng, 0.5) else -1
        extent = rng.uniform(0.4, 0.8)
        outer, inner = side * half_x, side * (half_x - 0.45)
        x = (min(outer, inner), max(outer, inner))
        parts.append(box(x, (-half_y - extent, -half_y + 0.01), (under, height)))
        parts.append(
            box(
                (x[0] + 0.03, x[1] - 0.03),
                (-half_y - extent + 0.03, -half_y - extent + 0.08),
                (0.0, under + 0.01),
            )
        )
    elif chance(rng, 0.3):
        tray = under - 0.12
        parts.append(box((-0.3, 0.3), (-half_y - 0.05, 0.0), (tray, tray + 0.04)))
        for side in (-1, 1):
            parts.append(box((side * 0.29 - 0.02, side * 0.29 + 0.02), (-0.1, 0.0), (tray, under + 0.01)))
    return parts


def _desk_support(
    rng: np.random.Generator, kind: str, side: int, inner_x: float, inner_y: float, under: float
) -> list[Manifold]:
    if kind == "panel":
        x = sorted((side * inner_x, side * (inner_x - 0.06)))
        return [box((x[0], x[1]), (-inner_y, inner_y), (0.0, under + 0.01))]
    if kind == "legs":
        return [
            rod(
                (side * (inner_x - 0.03), end * (inner_y - 0.03), 0.0),
                (side * (inner_x - 0.03), end * (inner_y - 0.03), under + 0.01),
                0.03,
                sides=4,
            )
            for end in (-1, 1)
        ]
    width = rng.uniform(0.32, 0.45)
    x = sorted((side * inner_x, side * (inner_x - width)))
    bottom = rng.uniform(0.04, 0.3) if chance(rng, 0.4) else 0.0
    parts = [box((x[0], x[1]), (-inner_y, inner_y), (bottom, under + 0.01))]
    if bottom:
        for corner in x:
            inward = 0.03 if corner == x[0] else -0.03
            parts += [
                rod(
                    (corner + inward, end * (inner_y - 0.03), 0.0),
                    (corner + inward, end * (inner_y - 0.03), bottom + 0.01),
                    0.025,
                    sides=4,
                )
                for end in (-1, 1)
            ]
    rows = rng.uniform(0.7, 1.3, int(rng.integers(2, 5)))
    parts += drawer_fronts(
        (x[0], x[1]), (bottom + 0.02, under - 0.01), -inner_y, rows, 1, pick(rng, *HANDLE_STYLES)
    )
    return parts


def _hutch(rng: np.random.Generator, half_x: float, half_y: float, height: float) -> list[Manifold]:
    rise, depth, board = rng.uniform(0.3, 0.6), rng.uniform(0.2, 0.3), 0.045
    y = (half_y - depth, half_y)
    parts = [box((-half_x, half_x), (half_y - board, half_y), (height - 0.01, height + rise))]
    parts.append(box((-half_x, half_x), y, (height + rise - board, height + rise)))
    walls = np.linspace(-half_x + board / 2, half_x - board / 2, int(rng.integers(2, 5)))
    parts += [box((x - board / 2, x + board / 2), y, (height - 0.01, height + rise)) for x in walls]
    if chance(rng, 0.5):
        level = height + 0.5 * rise
        parts.append(box((-half_x, half_x), y, (level, level + board)))
    return parts


def varied_desk(rng: np.random.Generator) -> list[Manifold]:
    """Desk of any proportions: thin top on any support, pedestals, returns, tiers of shelves, a tray."""
    half_x, half_y = rng.uniform(0.45, 1.0), rng.uniform(0.25, 0.5)
    height, board = rng.uniform(0.6, 0.95), rng.uniform(0.01, 0.05)
    under = height - board
    parts = [box((-half_x, half_x), (-half_y, half_y), (under, height))]
    parts += support(rng, half_x, half_y, under, "legs", "panels", "panels", "frames", "hairpin", "crossed")
    for side in (-1, 1):
        if chance(rng, 0.4):
            width = rng.uniform(0.3, 0.6) * half_x
            x = sorted((side * (half_x - 0.02), side * (half_x - 0.02 - width)))
            low = rng.uniform(0.0, 0.7) * under
            parts.append(box((x[0], x[1]), (-half_y + 0.02, half_y - 0.02), (low, under + 0.004)))
            if chance(rng, 0.6):
                rows = rng.uniform(0.7, 1.3, int(rng.integers(1, 4)))
                style = pick(rng, *HANDLE_STYLES)
                parts += drawer_fronts((x[0], x[1]), (low, under), -half_y + 0.02, rows, 1, style)
    if chance(rng, 0.35):  # a return, at a right angle, with its own support
        side = 1 if chance(rng, 0.5) else -1
        deep, wide = rng.uniform(0.4, 1.0), rng.uniform(0.3, 0.5)
        x = sorted((side * half_x, side * (half_x - wide)))
        parts.append(box((x[0], x[1]), (-half_y - deep, -half_y + 0.02), (under, height)))
        base = support(rng, wide / 2, deep / 2, under, "legs", "panels", "plinth")
        parts += [part.translate([sum(x) / 2, -half_y - deep / 2, 0.0]) for part in base]
    if chance(rng, 0.4):  # tiers above the top, on uprights
        tiers, rise, depth = int(rng.integers(1, 4)), rng.uniform(0.15, 0.35), rng.uniform(0.3, 1.0) * half_y
        extent = half_x * rng.uniform(0.4, 1.0)
        for tier in range(1, tiers + 1):
            level = height + tier * rise
            parts.append(box((-extent, extent), (half_y - depth, half_y), (level - board, level)))
        for side in (-1, 1):
            x = side * (extent - board)
            parts.append(
                box((x - board / 2, x + board / 2), (half_y - depth, half_y), (height - 0.004, level))
            )
        if chance(rng, 0.5):
            parts.append(box((-extent, extent), (half_y - board, half_y), (height - 0.004, level)))
    if chance(rng, 0.3):  # a keyboard tray on hangers
        tray, wide = under - rng.uniform(0.06, 0.15), 0.5 * half_x
        parts.append(box((-wide, wide), (-half_y - 0.1, 0.0), (tray, tray + 0.012)))
        for side in (-1, 1):
            x = side * 0.9 * wide
            parts.append(box((x - 0.01, x + 0.01), (-0.2 * half_y, 0.0), (tray, under + 0.004)))
    return parts
