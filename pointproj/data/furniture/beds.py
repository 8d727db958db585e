"""Beds."""

from itertools import pairwise

import numpy as np
from manifold3d import Manifold

from pointproj.data.furniture.parts import LEG_STYLES, chance, four_legs, pick
from pointproj.data.furniture.solids import (
    box,
    ellipsoid,
    profile,
    rectangle,
    rod,
    rounded_box,
    slab,
    superellipse,
)
from pointproj.data.furniture.supports import support


def bed(rng: np.random.Generator) -> list[Manifold]:
    """Bed: frame, mattress, pillows, and a head board; foot board, cover and posts are options."""
    half_x = rng.choice([0.45, 0.6, 0.7, 0.8, 0.95]) * rng.uniform(0.95, 1.05)
    half_y = rng.uniform(0.98, 1.08)
    clear = rng.uniform(0.1, 0.25)
    rail = clear + rng.uniform(0.12, 0.2)
    top = rail + rng.uniform(0.15, 0.26)
    rim = rng.uniform(0.03, 0.06)
    parts = [box((-half_x - rim, half_x + rim), (-half_y - rim, half_y + rim), (clear, rail))]
    if chance(rng, 0.25):
        parts.append(box((-half_x + 0.1, half_x - 0.1), (-half_y + 0.1, half_y - 0.05), (0.0, clear + 0.01)))
    else:
        parts += four_legs(half_x - 0.03, half_y - 0.03, clear + 0.02, 0.05, pick(rng, *LEG_STYLES[:3]))
    parts.append(
        rounded_box((-half_x, half_x), (-half_y, half_y), (rail - 0.05, top), rng.uniform(0.04, 0.08))
    )
    parts += _pillows(rng, half_x, half_y, top)
    if chance(rng, 0.5):
        parts += _cover(rng, half_x, half_y, rail, top)
    head = rng.uniform(0.3, 0.65) + top
    parts += _board(rng, half_x + rim, half_y + rim, clear, head)
    if chance(rng, 0.45):
        foot = top + rng.uniform(-0.05, 0.2)
        parts += [part.mirror([0, 1, 0]) for part in _board(rng, half_x + rim, half_y + rim, clear, foot)]
    if chance(rng, 0.12):
        parts += _posts(rng, half_x + rim, half_y + rim)
    return parts


def _pillows(rng: np.random.Generator, half_x: float, half_y: float, top: float) -> list[Manifold]:
    count = 1 if half_x < 0.55 else 2
    width = half_x / count
    plump, deep = rng.uniform(0.07, 0.1), rng.uniform(0.17, 0.24)
    boxy = chance(rng, 0.5)
    pillows = []
    for index in range(count):
        x = -half_x + (2 * index + 1) * width
        y = half_y - deep - 0.06
        if boxy:
            extent = 0.85 * width
            pillow = rounded_box(
                (x - extent, x + extent), (y - deep, y + deep), (top - 0.04, top + plump), 0.06
            )
        else:
            pillow = ellipsoid((x, y, top + 0.3 * plump), (0.88 * width, deep, plump))
        pillows.append(pillow)
    return pillows


def _cover(rng: np.random.Generator, half_x: float, half_y: float, rail: float, top: float) -> list[Manifold]:
    extent = rng.uniform(0.0, 0.55) * half_y
    hang = rng.uniform(0.3, 0.9) * (top - rail)
    sheet = rounded_box(
        (-half_x - 0.025, half_x + 0.025), (-half_y - 0.02, extent), (top - hang, top + 0.03), 0.03
    )
    fold = rod(
        (-half_x - 0.02, extent - 0.02, top + 0.01),
        (half_x + 0.02, extent - 0.02, top + 0.01),
        0.035,
        sides=12,
    )
    return [sheet, fold]


def _board(
    rng: np.random.Generator, half_x: float, rear: float, clear: float, height: float
) -> list[Manifold]:
    """Board across the end at +y: flat, arched, padded, slatted or panelled between posts."""
    kind = pick(rng, "flat", "arched", "padded", "slats", "posts")
    thick = rng.uniform(0.06, 0.09)
    y = (rear - 0.02, rear + thick)
    low = 0.5 * clear
    if kind == "flat":
        return [box((-half_x, half_x), y, (low, height))]
    if kind == "padded":
        cells = int(rng.integers(1, 5))
        edges = np.linspace(-half_x, half_x, cells + 1)
        pads = [
            rounded_box((left + 0.005, right - 0.005), (y[0] - 0.03, y[1]), (low + 0.15, height), 0.045)
            for left, right in pairwise(edges)
        ]
        return [box((-half_x, half_x), (y[0], y[1] - 0.03), (low, height - 0.04)), *pads]
    if kind == "arched":
        arch = superellipse(half_x, min(0.35, height - low - 0.05), rng.uniform(2.0, 3.0))
        arch = arch[arch[:, 1] >= -1e-9] + [0.0, height - min(0.35, height - low - 0.05)]
        outline = np.concatenate([[[half_x, low]], arch, [[-half_x, low]]])
        # The prism is drawn in (x, z) and stood up along y.
        return [slab(outline, (-y[1], -y[0])).transform([[1, 0, 0, 0], [0, 0, -1, 0], [0, 1, 0, 0]])]
    posts = [
        rod(
            (side * (half_x - 0.04), rear + thick / 2, 0.0),
            (side * (half_x - 0.04), rear + thick / 2, height + 0.05),
            0.045,
            sides=16 if kind == "slats" else 4,
        )
        for side in (-1, 1)
    ]
    rails = [
        box((-half_x + 0.04, half_x - 0.04), (rear, rear + thick), limits)
        for limits in ((height - 0.09, height), (clear, clear + 0.2))
    ]
    if kind == "posts":
        return [
            *posts,
            *rails,
            box(
                (-half_x + 0.04, half_x - 0.04), (rear + 0.015, rear + thick - 0.015), (clear, height - 0.03)
            ),
        ]
    slats = [
        rod((x, rear + thick / 2, clear), (x, rear + thick / 2, height - 0.03), 0.02, sides=12)
        for x in np.linspace(-half_x + 0.04, half_x - 0.04, int(rng.integers(6, 12)))[1:-1]
    ]
    return [*posts, *rails, *slats]


def _posts(rng: np.random.Generator, half_x: float, half_y: float) -> list[Manifold]:
    height, radius = rng.uniform(1.7, 2.1), 0.045
    posts = [
        rod((sx * half_x, sy * half_y, 0.0), (sx * half_x, sy * half_y, height), radius, sides=4)
        for sx in (-1, 1)
        for sy in (-1, 1)
    ]
    outer = slab(
        rectangle((-half_x - radius, half_x + radius), (-half_y - radius, half_y + radius)),
        (height - 0.08, height),
    )
    inner = profile(
        rectangle((-half_y + radius, half_y - radius), (0.0, 3.0)), (-half_x + radius, half_x - radius)
    )
    return [*posts, outer - inner]


def varied_bed(rng: np.random.Generator) -> list[Manifold]:
    """Bed of another build: a block, a thin platform, bunks, a sleigh, with thin boards or none."""
    half_x, half_y = rng.uniform(0.4, 1.05), rng.uniform(0.9, 1.1)
    clear, rail = rng.uniform(0.03, 0.4), rng.uniform(0.03, 0.25)
    deck = clear + rail
    over = rng.uniform(0.0, 0.12)
    parts = [box((-half_x - over, half_x + over), (-half_y - over, half_y + over), (clear, deck))]
    if chance(rng, 0.85):
        mattress = rng.uniform(0.06, 0.3)
        soft = rng.uniform(0.002, 0.08)
        parts.append(rounded_box((-half_x, half_x), (-half_y, half_y), (deck - 0.01, deck + mattress), soft))
        deck += mattress
    if chance(rng, 0.6):
        parts += _pillows(rng, half_x, half_y, deck)
    if chance(rng, 0.3):
        parts += _cover(rng, half_x, half_y, clear + 0.5 * rail, deck)
    wide, rear = half_x + over, half_y + over
    if chance(rng, 0.2):  # a second bunk on posts
        rise, post = rng.uniform(0.8, 1.2), rng.uniform(0.02, 0.05)
        upper = deck + rise
        parts.append(box((-wide, wide), (-rear, rear), (upper, upper + rng.uniform(0.03, 0.2))))
        parts += [
            rod((sx * wide, sy * rear, 0.0), (sx * wide, sy * rear, upper + 0.3), post, sides=4)
            for sx in (-1, 1)
            for sy in (-1, 1)
        ]
        for side in (-1, 1):
            parts.append(
                rod(
                    (side * wide, -rear, upper + 0.25), (side * wide, rear, upper + 0.25), 0.6 * post, sides=4
                )
            )
    elif chance(rng, 0.85):
        parts += _thin_board(rng, wide, rear, clear, deck + rng.uniform(0.1, 0.9))
        if chance(rng, 0.5):
            foot = _thin_board(rng, wide, rear, clear, deck + rng.uniform(-0.05, 0.5))
            parts += [part.mirror([0, 1, 0]) for part in foot]
    if chance(rng, 0.2):  # night stands beside it
        for side in (-1, 1):
            x = sorted((side * (wide + 0.02), side * (wide + rng.uniform(0.3, 0.5))))
            parts.append(box((x[0], x[1]), (rear - 0.4, rear), (0.0, rng.uniform(0.3, 0.7))))
    return [*parts, *support(rng, wide, rear, clear, "legs", "plinth", "panels", "frames")]


def _thin_board(
    rng: np.random.Generator, half_x: float, rear: float, low: float, height: float
) -> list[Manifold]:
    """Board across the end at +y, thin, leaning, curved backwards or of bars."""
    thick = rng.uniform(0.01, 0.06)
    y = (rear - 0.005, rear + thick)
    kind = pick(rng, "sheet", "rolled", "bars", "frame")
    extent = half_x + rng.uniform(-0.1, 0.3)
    if kind == "sheet":
        board = box((-extent, extent), y, (low, height))
        return [board.transform([[1, 0, 0, 0], [0, 1, rng.uniform(0, 0.25), 0], [0, 0, 1, 0]])]
    if kind == "rolled":
        levels = np.linspace(low, height, 12)
        bow = rng.uniform(0.05, 0.3) * ((levels - low) / (height - low)) ** 2
        outline = np.concatenate(
            [np.stack([y[0] + bow, levels], axis=1), np.stack([y[1] + bow, levels], axis=1)[::-1]]
        )
        return [profile(outline[::-1], (-extent, extent))]
    if kind == "frame":
        hole = rng.uniform(0.03, 0.1)
        inner = box((-extent + hole, extent - hole), (rear - 1, rear + 1), (low + hole, height - hole))
        return [box((-extent, extent), y, (low - 0.02, height)) - inner]
    middle = 0.5 * (y[0] + y[1])
    parts = [rod((s * extent, middle, 0.0), (s * extent, middle, height), thick, sides=8) for s in (-1, 1)]
    parts += [
        rod((-extent, middle, z), (extent, middle, z), 0.7 * thick, sides=8)
        for z in (low + thick, height - thick)
    ]
    places = np.linspace(-extent, extent, int(rng.integers(3, 14)))[1:-1]
    parts += [rod((x, middle, low), (x, middle, height - thick), 0.4 * thick, sides=6) for x in places]
    return parts
