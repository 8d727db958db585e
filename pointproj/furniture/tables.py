"""Tables and desks."""

import numpy as np
from manifold3d import Manifold

from pointproj.furniture.parts import HANDLE_STYLES, LEG_STYLES, chance, drawer_fronts, four_legs, pick
from pointproj.furniture.solids import box, rectangle, rod, slab, superellipse, turned, union


def table(rng: np.random.Generator) -> Manifold:
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
    return union(parts)


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


def _pedestal(rng: np.random.Generator, reach: float, under: float) -> list[Manifold]:
    column = rng.uniform(0.05, 0.09)
    if chance(rng, 0.5):
        foot = rng.uniform(0.5, 0.75) * reach
        rings = [(foot, 0.0), (foot, 0.03), (1.6 * column, 0.07), (column, 0.2)]
        rings += [(column, 0.8), (2.2 * column, 1.0)]
        heights = [0.0, 0.035, 0.08, 0.3 * under, 0.8 * under, under + 0.01]
        return [turned([(width, level) for (width, _), level in zip(rings, heights, strict=True)])]
    arms = int(rng.integers(3, 5))
    parts = [rod((0, 0, 0.08), (0, 0, under + 0.01), column)]
    for angle in 2 * np.pi * (np.arange(arms) + 0.5) / arms:
        tip = 0.8 * reach * np.array([np.cos(angle), np.sin(angle)])
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


def desk(rng: np.random.Generator) -> Manifold:
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
        reach = rng.uniform(0.4, 0.8)
        outer, inner = side * half_x, side * (half_x - 0.45)
        x = (min(outer, inner), max(outer, inner))
        parts.append(box(x, (-half_y - reach, -half_y + 0.01), (under, height)))
        parts.append(
            box(
                (x[0] + 0.03, x[1] - 0.03),
                (-half_y - reach + 0.03, -half_y - reach + 0.08),
                (0.0, under + 0.01),
            )
        )
    elif chance(rng, 0.3):
        tray = under - 0.12
        parts.append(box((-0.3, 0.3), (-half_y - 0.05, 0.0), (tray, tray + 0.04)))
        for side in (-1, 1):
            parts.append(box((side * 0.29 - 0.02, side * 0.29 + 0.02), (-0.1, 0.0), (tray, under + 0.01)))
    return union(parts)


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
