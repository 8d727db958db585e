"""Chairs and sofas."""

import numpy as np
from manifold3d import Manifold

from pointproj.furniture.parts import LEG_STYLES, chance, four_legs, pick
from pointproj.furniture.solids import (
    box,
    profile,
    rod,
    rounded_box,
    slab,
    superellipse,
    tube,
    turned,
    union,
)


def chair(rng: np.random.Generator) -> Manifold:
    """Chair: dining, office, lounge or cantilever, with slatted, ladder, solid or curved back."""
    half_x, half_y = rng.uniform(0.2, 0.27), rng.uniform(0.2, 0.27)
    seat = rng.uniform(0.42, 0.5)
    thickness = rng.uniform(0.05, 0.09)
    base = pick(rng, "legs", "legs", "legs", "star", "disc", "cantilever")
    cushioned = base == "star" or chance(rng, 0.4)
    parts = []
    if cushioned:
        parts.append(
            rounded_box((-half_x, half_x), (-half_y, half_y), (seat - thickness, seat + 0.02), 0.035)
        )
    else:
        outline = superellipse(half_x, half_y, rng.uniform(3.0, 8.0))
        parts.append(slab(outline, (seat - thickness, seat)))
    under = seat - thickness + 0.02
    if base == "legs":
        parts += _chair_legs(rng, half_x, half_y, under)
    elif base == "star":
        parts += _star_base(half_x, under, arms=5)
    elif base == "disc":
        foot = 0.85 * min(half_x, half_y)
        parts.append(turned([(foot, 0.0), (foot, 0.025), (0.05, 0.06), (0.04, 0.2), (0.04, under)]))
    else:
        parts += _cantilever(half_x, half_y, under)
    parts += _chair_back(rng, half_x, half_y, seat)
    if chance(rng, 0.4):
        parts += _armrests(rng, half_x, half_y, seat)
    return union(parts)


def _chair_legs(rng: np.random.Generator, half_x: float, half_y: float, under: float) -> list[Manifold]:
    style = pick(rng, *LEG_STYLES)
    radius = rng.uniform(0.02, 0.03)
    splay = rng.uniform(0.02, 0.06) if chance(rng, 0.4) else 0.0
    leg_x, leg_y = half_x - radius - 0.02, half_y - radius - 0.02
    parts = four_legs(leg_x, leg_y, under, radius, style, splay)
    if splay == 0.0 and chance(rng, 0.5):
        level = rng.uniform(0.25, 0.6) * under
        for side in (-1, 1):
            x = side * leg_x
            parts.append(rod((x, -leg_y, level), (x, leg_y, level), 0.6 * radius, sides=12))
        parts.append(rod((-leg_x, 0, level), (leg_x, 0, level), 0.6 * radius, sides=12))
    return parts


def _star_base(half_x: float, under: float, arms: int) -> list[Manifold]:
    parts = [rod((0, 0, 0.07), (0, 0, under), 0.035), rod((0, 0, 0.06), (0, 0, 0.14), 0.05)]
    for angle in 2 * np.pi * (np.arange(arms) + 0.25) / arms:
        tip = 1.15 * half_x * np.array([np.cos(angle), np.sin(angle)])
        parts.append(rod((0, 0, 0.11), (*tip, 0.07), 0.03, 0.02, sides=12))
        across = 0.022 * np.array([-np.sin(angle), np.cos(angle)])
        parts.append(rod((*(tip - across), 0.032), (*(tip + across), 0.032), 0.032, sides=16))
        parts.append(rod((*tip, 0.03), (*tip, 0.075), 0.015, sides=12))
    return parts


def _cantilever(half_x: float, half_y: float, under: float) -> list[Manifold]:
    parts, radius = [], 0.02
    for side in (-1, 1):
        x = side * (half_x - 0.03)
        path = [(x, half_y, radius), (x, -half_y, radius), (x, -half_y, under), (x, half_y - 0.05, under)]
        parts.append(tube(np.array(path), radius))
    back = half_y
    parts.append(rod((-half_x + 0.03, back, radius), (half_x - 0.03, back, radius), radius, sides=12))
    return parts


def _chair_back(rng: np.random.Generator, half_x: float, half_y: float, seat: float) -> list[Manifold]:
    rise = rng.uniform(0.35, 0.6)
    lean = rng.uniform(0.0, 0.22)
    post = 0.022
    wide = half_x - post - 0.01
    kind = pick(rng, "slats", "ladder", "panel", "curved", "cushion")
    upright = []
    if kind in ("slats", "ladder", "panel"):
        upright += [rod((s * wide, 0, -0.03), (s * wide, 0, rise), post, sides=4) for s in (-1, 1)]
        upright.append(box((-wide - post, wide + post), (-post, post), (rise - 0.07, rise + 0.02)))
    if kind == "slats":
        for x in np.linspace(-wide, wide, int(rng.integers(5, 9)))[1:-1]:
            upright.append(box((x - 0.014, x + 0.014), (-0.014, 0.014), (-0.03, rise - 0.05)))
    elif kind == "ladder":
        for z in np.linspace(0.05, rise - 0.06, int(rng.integers(3, 6)))[:-1]:
            upright.append(box((-wide, wide), (-0.014, 0.014), (z, z + 0.05)))
    elif kind == "panel":
        gap = rng.uniform(0.0, 0.15)
        upright.append(box((-wide, wide), (-0.018, 0.018), (gap - 0.03 if gap < 0.05 else gap, rise)))
    elif kind == "cushion":
        gap = rng.uniform(-0.03, 0.12)
        upright.append(rounded_box((-half_x, half_x), (-0.035, 0.04), (gap, rise), 0.035))
        upright.append(box((-0.05, 0.05), (0.0, 0.03), (-0.04, gap + 0.1)))
    else:
        upright.append(_curved_shell(half_x, rise))
    # The back leans backwards: a shear of y along z about the seat's rear edge.
    rear = half_y - 0.04
    return [part.transform([[1, 0, 0, 0], [0, 1, lean, rear], [0, 0, 1, seat]]) for part in upright]


def _curved_shell(half_x: float, rise: float) -> Manifold:
    angles = np.linspace(np.pi, 0.0, 17)
    depth = 0.5 * half_x
    outer = np.stack([half_x * np.cos(angles), depth * np.sin(angles)], axis=1)
    inner = outer * [1 - 0.04 / half_x, 1 - 0.04 / depth]
    shell = slab(np.concatenate([inner, outer[::-1]]), (-0.03, rise)).translate([0.0, -depth + 0.03, 0.0])
    # Front ends of the shell are cut lower than its middle.
    front = -depth + 0.01
    cut = profile(np.array([[front, 0.35 * rise], [0.02, 1.1 * rise], [front, 1.1 * rise]]), (-1.0, 1.0))
    return shell - cut


def _armrests(rng: np.random.Generator, half_x: float, half_y: float, seat: float) -> list[Manifold]:
    level = seat + rng.uniform(0.17, 0.24)
    padded = chance(rng, 0.5)
    parts = []
    for side in (-1, 1):
        x = side * (half_x - 0.005)
        limits = (x - 0.03, x + 0.03), (-0.8 * half_y, half_y + 0.01), (level - 0.03, level + 0.01)
        parts.append(rounded_box(*limits, 0.018) if padded else box(*limits))
        parts.append(
            rod((x - side * 0.01, -0.6 * half_y, seat - 0.04), (x, -0.6 * half_y, level), 0.017, sides=12)
        )
        parts.append(
            rod((x - side * 0.01, 0.85 * half_y, seat - 0.04), (x, 0.85 * half_y, level), 0.017, sides=12)
        )
    return parts


def sofa(rng: np.random.Generator) -> Manifold:
    """Sofa: one to four seats, boxy, rounded or rolled arms, loose cushions, sometimes a chaise."""
    seats = int(rng.choice([1, 2, 3, 4], p=[0.2, 0.35, 0.35, 0.1]))
    seat_width = rng.uniform(0.55, 0.7)
    half_x = 0.5 * seats * seat_width
    depth = rng.uniform(0.8, 1.0)
    floor = rng.uniform(0.06, 0.14)
    deck, seat = floor + rng.uniform(0.12, 0.18), rng.uniform(0.4, 0.48)
    arm, back = rng.uniform(0.12, 0.24), rng.uniform(0.15, 0.22)
    back_height = rng.uniform(0.7, 0.95)
    front, rear = -depth / 2, depth / 2
    armless = chance(rng, 0.12)
    outer = half_x if armless else half_x + arm
    parts = [box((-outer, outer), (front, rear), (floor, deck))]
    parts.append(
        rounded_box((-outer, outer), (rear - back, rear), (floor, back_height), rng.uniform(0.02, 0.08))
    )
    if not armless:
        style, rise = pick(rng, "box", "rounded", "rolled"), rng.uniform(0.55, 0.68)
        for side in (-1, 1):
            parts += _sofa_arm(style, side, half_x, arm, (front, rear - 0.02), (floor, rise))
    soft = rng.uniform(0.03, 0.07)
    chaise = int(rng.integers(2)) * (seats - 1) if seats >= 3 and chance(rng, 0.35) else None
    gap = 0.008
    for index in range(seats):
        x = (-half_x + index * seat_width + gap, -half_x + (index + 1) * seat_width - gap)
        reach = front - 0.02
        if index == chaise:
            reach = front - rng.uniform(0.4, 0.6)
            parts.append(box((x[0] - gap, x[1] + gap), (reach, front + 0.05), (floor, deck)))
        parts.append(rounded_box(x, (reach, rear - back + 0.02), (deck - 0.02, seat), soft))
        cushion = rounded_box(
            x, (-0.09, 0.09), (0.0, back_height - seat + rng.uniform(-0.05, 0.08)), 1.4 * soft
        )
        lean = [[1, 0, 0, 0], [0, 1, 0.25, rear - back - 0.06], [0, 0, 1, seat - 0.03]]
        parts.append(cushion.transform(lean))
    parts += four_legs(outer - 0.08, depth / 2 - 0.08, floor + 0.02, 0.03, pick(rng, *LEG_STYLES[:3]))
    return union(parts)


def _sofa_arm(
    style: str, side: int, half_x: float, arm: float, y: tuple[float, float], z: tuple[float, float]
) -> list[Manifold]:
    inner, outer = side * half_x, side * (half_x + arm)
    x = (min(inner, outer), max(inner, outer))
    if style == "box":
        return [box(x, y, z)]
    if style == "rounded":
        return [rounded_box(x, y, z, 0.4 * arm)]
    middle = 0.5 * (x[0] + x[1]) + side * 0.03
    roll = 0.5 * arm + 0.02
    return [
        box((x[0] + 0.02, x[1] - 0.02), y, z),
        rod((middle, y[0] - 0.01, z[1] - 0.3 * roll), (middle, y[1], z[1] - 0.3 * roll), roll),
    ]
