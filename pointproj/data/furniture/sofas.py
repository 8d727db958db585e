"""Sofas."""

from itertools import pairwise

import numpy as np
from manifold3d import Manifold

from pointproj.data.furniture.parts import LEG_STYLES, Rng, chance, either, four_legs, pick
from pointproj.data.furniture.solids import SIDES, Parts, Range, bar, beside, box, lean, rounded_box
from pointproj.data.furniture.supports import support


def sofa(rng: Rng) -> Parts:
    """Sofa: one to four seats, boxy, rounded or rolled arms, loose cushions, sometimes a chaise."""
    seats = int(rng.choice([1, 2, 3, 4], p=[0.2, 0.35, 0.35, 0.1]))
    seat_width = rng.uniform(0.55, 0.7)
    half_x = 0.5 * seats * seat_width
    depth, floor = rng.uniform(0.8, 1.0), rng.uniform(0.06, 0.14)
    deck, seat = floor + rng.uniform(0.12, 0.18), rng.uniform(0.4, 0.48)
    arm, back = rng.uniform(0.12, 0.24), rng.uniform(0.15, 0.22)
    back_height = rng.uniform(0.7, 0.95)
    front, rear = -depth / 2, depth / 2
    armless = chance(rng, 0.12)
    outer = half_x if armless else half_x + arm
    parts = [box(outer, depth / 2, (floor, deck))]
    parts.append(rounded_box(outer, (rear - back, rear), (floor, back_height), rng.uniform(0.02, 0.08)))
    if not armless:
        style, rise = pick(rng, "box", "rounded", "rolled"), rng.uniform(0.55, 0.68)
        for side in SIDES:
            parts += _arm(style, side, half_x, arm, (front, rear - 0.02), (floor, rise))
    soft, gap = rng.uniform(0.03, 0.07), 0.008
    chaise = int(rng.integers(2)) * (seats - 1) if seats >= 3 and chance(rng, 0.35) else None
    for index in range(seats):
        x = (-half_x + index * seat_width + gap, -half_x + (index + 1) * seat_width - gap)
        extent = front - 0.02
        if index == chaise:
            extent = front - rng.uniform(0.4, 0.6)
            parts.append(box((x[0] - gap, x[1] + gap), (extent, front + 0.05), (floor, deck)))
        parts.append(rounded_box(x, (extent, rear - back + 0.02), (deck - 0.02, seat), soft))
        tall = back_height - seat + rng.uniform(-0.05, 0.08)
        cushion = rounded_box(x, 0.09, (0.0, tall), 1.4 * soft)
        parts.append(lean(cushion, 0.25, rear - back - 0.06, seat - 0.03))
    return parts + four_legs(outer - 0.08, depth / 2 - 0.08, floor + 0.02, 0.03, pick(rng, *LEG_STYLES[:3]))


def _arm(style: str, side: int, half_x: float, arm: float, y: Range, z: Range) -> Parts:
    x = beside(side, half_x, half_x + arm)
    if style == "box":
        return [box(x, y, z)]
    if style == "rounded":
        return [rounded_box(x, y, z, 0.4 * arm)]
    middle, roll = 0.5 * (x[0] + x[1]) + side * 0.03, 0.5 * arm + 0.02
    top = bar(middle, (y[0] - 0.01, y[1]), z[1] - 0.3 * roll, roll)
    return [box((x[0] + 0.02, x[1] - 0.02), y, z), top]


def varied_sofa(rng: Rng) -> Parts:
    """Sofa of another build: bench, corner, curve or slim frame, with cushions or none, on any support."""
    half_x, half_y = rng.uniform(0.4, 1.3), rng.uniform(0.3, 0.55)
    under, seat = rng.uniform(0.02, 0.28), rng.uniform(0.34, 0.5)
    soft = rng.uniform(0.003, 0.09)
    back, rise = rng.uniform(0.05, 0.25), rng.uniform(0.15, 0.6)
    parts = [rounded_box(half_x, half_y, (under, seat), soft)]
    slope = rng.uniform(0.0, 0.3)
    if chance(rng, 0.9):
        extent = half_x * (1.0 if chance(rng, 0.7) else rng.uniform(0.4, 0.8))
        upright = rounded_box(extent, (-back, 0.0), (under - seat + 0.02, rise), soft)
        parts.append(lean(upright, slope, half_y, seat))
    arm, level = rng.uniform(0.03, 0.3), seat + rng.uniform(0.0, 0.3)
    for side in SIDES:
        if chance(rng, 0.7):
            low = under if chance(rng, 0.7) else seat - 0.06
            parts.append(rounded_box(beside(side, 0.99 * half_x, half_x + arm), half_y, (low, level), soft))
    if chance(rng, 0.35):  # round a corner
        side, deep, wide = either(rng), rng.uniform(0.4, 1.2), rng.uniform(0.5, 0.8)
        x = beside(side, half_x, half_x - min(wide, half_x))
        parts.append(rounded_box(x, (-half_y - deep, -half_y + 0.1), (under, seat), soft))
        if chance(rng, 0.6):
            x = beside(side, half_x - 0.01, half_x + back)
            parts.append(rounded_box(x, (-half_y - deep, half_y), (under, seat + rise), soft))
    parts += _loose_cushions(rng, half_x, half_y, seat, back)
    if chance(rng, 0.2):  # bent into a curve
        curve = rng.uniform(0.1, 0.35) / half_x
        parts = [_bent(part, curve) for part in parts]
    return [*parts, *support(rng, half_x, half_y, under, "legs", "plinth", "frames", "panels", "ring")]


def _loose_cushions(rng: Rng, half_x: float, half_y: float, seat: float, back: float) -> Parts:
    count, plump = int(rng.integers(0, 5)), rng.uniform(0.04, 0.1)
    parts = []
    for left, right in pairwise(np.linspace(-half_x, half_x, count + 1)):
        gap = rng.uniform(0.003, 0.02)
        x, y = (left + gap, right - gap), (-half_y - 0.02, half_y - back)
        parts.append(rounded_box(x, y, (seat - 0.02, seat + plump), 0.5 * plump))
        if chance(rng, 0.4):
            size = rng.uniform(0.3, 0.48) * (right - left)
            pillow = rounded_box(size, plump, (0.0, 1.6 * size), 0.8 * plump)
            tilted = pillow.rotate([-rng.uniform(5, 30), 0.0, 0.0])
            parts.append(tilted.translate([0.5 * (left + right), half_y - back - plump, seat + 0.5 * plump]))
    return parts


def _bent(part: Manifold, curve: float) -> Manifold:
    """Bend the ends of a part forwards, by ``curve`` times the square of x."""

    def bend(points: np.ndarray) -> np.ndarray:
        return points - curve * np.column_stack([0 * points[:, 0], points[:, 0] ** 2, 0 * points[:, 0]])

    return part.refine_to_length(0.15).warp_batch(bend)
