"""Beds."""

from itertools import pairwise

import numpy as np

from pointproj.data.furniture.outlines import CORNERS, SIDES, about, beside, limits, rectangle, superellipse
from pointproj.data.furniture.parts import LEGS, Parts, Rng, four_legs, lean, support
from pointproj.data.furniture.solids import bar, box, ellipsoid, profile, rounded_box, slab


def bed(rng: Rng) -> Parts:
    """Bed: frame, mattress, pillows, and a head board; foot board, cover and posts are options."""
    half_x = rng.choice([0.45, 0.6, 0.7, 0.8, 0.95]) * rng.uniform(0.95, 1.05)
    half_y, clear = rng.uniforms((0.98, 1.08), (0.1, 0.25))
    rail = clear + rng.uniform(0.12, 0.2)
    top = rail + rng.uniform(0.15, 0.26)
    rim = rng.uniform(0.03, 0.06)
    outer_x, outer_y = half_x + rim, half_y + rim
    yield box(outer_x, outer_y, (clear, rail))
    if rng.chance(0.25):
        yield box(half_x - 0.1, (-half_y + 0.1, half_y - 0.05), (0.0, clear + 0.01))
    else:
        yield from four_legs(half_x - 0.03, half_y - 0.03, clear + 0.02, 0.05, rng.pick(*LEGS[:3]))
    yield rounded_box(half_x, half_y, (rail - 0.05, top), rng.uniform(0.04, 0.08))
    yield from _pillows(rng, half_x, half_y, top)
    if rng.chance(0.5):
        yield from _cover(rng, half_x, half_y, rail, top)
    yield from _board(rng, outer_x, outer_y, clear, rng.uniform(0.3, 0.65) + top)
    if rng.chance(0.45):
        foot = _board(rng, outer_x, outer_y, clear, top + rng.uniform(-0.05, 0.2))
        yield from [part.mirror([0, 1, 0]) for part in foot]
    if rng.chance(0.12):  # four posts that carry a frame
        height, radius = rng.uniform(1.7, 2.1), 0.045
        yield from [bar(sx * outer_x, sy * outer_y, (0.0, height), radius, 4) for sx, sy in CORNERS]
        frame = slab(rectangle(outer_x + radius, outer_y + radius), (height - 0.08, height))
        yield frame - profile(rectangle(outer_y - radius, (0.0, 3.0)), outer_x - radius)


def _pillows(rng: Rng, half_x: float, half_y: float, top: float) -> Parts:
    count = 1 if half_x < 0.55 else 2
    width = half_x / count
    plump, deep = rng.uniform(0.07, 0.1), rng.uniform(0.17, 0.24)
    places, y = [-half_x + (2 * index + 1) * width for index in range(count)], half_y - deep - 0.06
    if rng.chance(0.5):
        z = (top - 0.04, top + plump)
        return [rounded_box(about(x, 0.85 * width), about(y, deep), z, 0.06) for x in places]
    return [ellipsoid((x, y, top + 0.3 * plump), (0.88 * width, deep, plump)) for x in places]


def _cover(rng: Rng, half_x: float, half_y: float, rail: float, top: float) -> Parts:
    extent, hang = rng.uniform(0.0, 0.55) * half_y, rng.uniform(0.3, 0.9) * (top - rail)
    sheet = rounded_box(half_x + 0.025, (-half_y - 0.02, extent), (top - hang, top + 0.03), 0.03)
    return [sheet, bar(limits(half_x + 0.02), extent - 0.02, top + 0.01, 0.035, 12)]


def _board(rng: Rng, half_x: float, rear: float, clear: float, height: float) -> Parts:
    """Board across the end at +y: flat, arched, padded, slatted or panelled between posts."""
    kind, thick = rng.pick("flat", "arched", "padded", "slats", "posts"), rng.uniform(0.06, 0.09)
    y, low, inner = (rear - 0.02, rear + thick), 0.5 * clear, half_x - 0.04
    if kind == "flat":
        yield box(half_x, y, (low, height))
    elif kind == "padded":
        edges = pairwise(np.linspace(-half_x, half_x, rng.integers(1, 5) + 1))
        pad = (y[0] - 0.03, y[1]), (low + 0.15, height), 0.045
        pads = [rounded_box((left + 0.005, right - 0.005), *pad) for left, right in edges]
        yield box(half_x, (y[0], y[1] - 0.03), (low, height - 0.04))
        yield from pads
    elif kind == "arched":
        rise = min(0.35, height - low - 0.05)
        arch = superellipse(half_x, rise, rng.uniform(2.0, 3.0))
        arch = arch[arch[:, 1] >= -1e-9] + [0.0, height - rise]
        outline = np.concatenate([[[half_x, low]], arch, [[-half_x, low]]])
        # The prism is drawn in (x, z) and stood up along y.
        yield slab(outline, (-y[1], -y[0])).transform([[1, 0, 0, 0], [0, 0, -1, 0], [0, 1, 0, 0]])
    else:
        middle, sides = rear + thick / 2, 16 if kind == "slats" else 4
        yield from [bar(side * inner, middle, (0.0, height + 0.05), 0.045, sides) for side in SIDES]
        rails = (height - 0.09, height), (clear, clear + 0.2)
        yield from [box(inner, (rear, rear + thick), rail) for rail in rails]
        if kind == "posts":
            yield box(inner, (rear + 0.015, rear + thick - 0.015), (clear, height - 0.03))
        else:
            places = np.linspace(-inner, inner, rng.integers(6, 12))[1:-1]
            yield from [bar(x, middle, (clear, height - 0.03), 0.02, 12) for x in places]


def varied_bed(rng: Rng) -> Parts:
    """Bed of another build: a block, a thin platform, bunks, a sleigh, with thin boards or none."""
    half_x, half_y, clear, rail = rng.uniforms((0.4, 1.05), (0.9, 1.1), (0.03, 0.4), (0.03, 0.25))
    deck, over = clear + rail, rng.uniform(0.0, 0.12)
    wide, rear = half_x + over, half_y + over
    yield box(wide, rear, (clear, deck))
    if rng.chance(0.85):
        mattress, soft = rng.uniform(0.06, 0.3), rng.uniform(0.002, 0.08)
        yield rounded_box(half_x, half_y, (deck - 0.01, deck + mattress), soft)
        deck += mattress
    if rng.chance(0.6):
        yield from _pillows(rng, half_x, half_y, deck)
    if rng.chance(0.3):
        yield from _cover(rng, half_x, half_y, clear + 0.5 * rail, deck)
    if rng.chance(0.2):  # a second bunk on posts
        rise, post = rng.uniform(0.8, 1.2), rng.uniform(0.02, 0.05)
        upper = deck + rise
        yield box(wide, rear, (upper, upper + rng.uniform(0.03, 0.2)))
        yield from [bar(sx * wide, sy * rear, (0.0, upper + 0.3), post, 4) for sx, sy in CORNERS]
        yield from [bar(side * wide, limits(rear), upper + 0.25, 0.6 * post, 4) for side in SIDES]
    elif rng.chance(0.85):
        yield from _thin_board(rng, wide, rear, clear, deck + rng.uniform(0.1, 0.9))
        if rng.chance(0.5):
            foot = _thin_board(rng, wide, rear, clear, deck + rng.uniform(-0.05, 0.5))
            yield from [part.mirror([0, 1, 0]) for part in foot]
    if rng.chance(0.2):  # night stands beside it
        for side in SIDES:
            x = beside(side, wide + 0.02, wide + rng.uniform(0.3, 0.5))
            yield box(x, (rear - 0.4, rear), (0.0, rng.uniform(0.3, 0.7)))
    yield from support(rng, wide, rear, clear, "legs", "plinth", "panels", "frames")


def _thin_board(rng: Rng, half_x: float, rear: float, low: float, height: float) -> Parts:
    """Board across the end at +y, thin, leaning, curved backwards or of bars."""
    thick = rng.uniform(0.01, 0.06)
    y = (rear - 0.005, rear + thick)
    kind = rng.pick("sheet", "rolled", "bars", "frame")
    extent = half_x + rng.uniform(-0.1, 0.3)
    if kind == "sheet":
        yield lean(box(extent, y, (low, height)), rng.uniform(0, 0.25))
    elif kind == "rolled":
        levels = np.linspace(low, height, 12)
        bow = rng.uniform(0.05, 0.3) * ((levels - low) / (height - low)) ** 2
        front, back = (np.stack([face + bow, levels], axis=1) for face in y)
        yield profile(np.concatenate([front, back[::-1]])[::-1], extent)
    elif kind == "frame":
        hole = rng.uniform(0.03, 0.1)
        inner = box(extent - hole, about(rear, 1), (low + hole, height - hole))
        yield box(extent, y, (low - 0.02, height)) - inner
    else:
        middle = 0.5 * (y[0] + y[1])
        yield from [bar(side * extent, middle, (0.0, height), thick, 8) for side in SIDES]
        yield from [bar(limits(extent), middle, z, 0.7 * thick, 8) for z in (low + thick, height - thick)]
        places = np.linspace(-extent, extent, rng.integers(3, 14))[1:-1]
        yield from [bar(x, middle, (low, height - thick), 0.4 * thick, 6) for x in places]
