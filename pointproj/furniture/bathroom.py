"""Bathtubs and toilets."""

import numpy as np
from jaxtyping import Float
from manifold3d import Manifold
from numpy import ndarray

from pointproj.furniture.parts import chance, pick
from pointproj.furniture.solids import (
    box,
    ellipsoid,
    loft,
    rectangle,
    rod,
    rounded_box,
    slab,
    stack_rings,
    superellipse,
    tube,
    union,
)


def bathtub(rng: np.random.Generator) -> Manifold:
    """Open tub: built into a block, free-standing, or on claw feet; taps are an option."""
    half_x, half_y = rng.uniform(0.7, 0.95), rng.uniform(0.34, 0.46)
    height = rng.uniform(0.45, 0.62)
    kind = pick(rng, "built_in", "built_in", "free", "claw")
    wall = rng.uniform(0.06, 0.09)
    parts = []
    if kind == "built_in":
        tub = _built_in_tub(rng, half_x, half_y, height, wall)
    else:
        lift = rng.uniform(0.1, 0.16) if kind == "claw" else 0.0
        tub = _free_tub(rng, half_x, half_y, height, wall, slipper=chance(rng, 0.5)).translate([0, 0, lift])
        if kind == "claw":
            parts += _claw_feet(half_x, half_y, lift)
        height += lift
    if chance(rng, 0.5):
        parts += _tap(-half_x + 0.5 * wall, height)
    return union([tub, *parts])


def _built_in_tub(
    rng: np.random.Generator, half_x: float, half_y: float, height: float, wall: float
) -> Manifold:
    rounding = rng.uniform(0.0, 0.3) if chance(rng, 0.6) else 0.0
    block = slab(rectangle((-half_x, half_x), (-half_y, half_y), rounding), (0.0, height))
    if chance(rng, 0.5):
        lip = slab(
            rectangle((-half_x - 0.03, half_x + 0.03), (-half_y - 0.03, half_y + 0.03), rounding + 0.03),
            (height - 0.05, height),
        )
        block = block + lip
    exponent = rng.uniform(2.4, 5.0)
    scales, levels = (
        [0.72, 0.86, 0.93, 1.0, 1.03],
        [wall, wall + 0.05, 0.5 * height, height - 0.02, height + 0.02],
    )
    end = rng.uniform(0.0, 0.08)
    rings = [
        superellipse(scale * (half_x - wall - end), scale * (half_y - wall), exponent) for scale in scales
    ]
    # A basin set off centre leaves a deck for the taps.
    return block - loft(stack_rings(rings, levels)).translate([end, 0.0, 0.0])


def _free_tub(
    rng: np.random.Generator, half_x: float, half_y: float, height: float, wall: float, *, slipper: bool
) -> Manifold:
    exponent = rng.uniform(2.1, 3.2)
    base = rng.uniform(0.62, 0.8)
    rise = rng.uniform(0.12, 0.25) if slipper else rng.uniform(0.0, 0.05)
    steps = np.linspace(0.0, 1.0, 8)
    widths = base + (1 - base) * np.sin(0.5 * np.pi * steps) ** 0.8
    outer = _flared(half_x, half_y, exponent, widths, height * steps, rise)
    basin_steps = np.linspace(wall / height, 1.15, 8)
    basin = base + (1 - base) * np.sin(0.5 * np.pi * np.minimum(basin_steps, 1.0)) ** 0.8
    basin[0] *= 0.82
    inner = _flared(half_x - wall, half_y - wall, exponent, basin, height * basin_steps, rise)
    rim = superellipse(half_x + 0.012, half_y + 0.012, exponent)
    ring = tube(
        np.column_stack([rim, height - 0.02 + rise * (rim[:, 0] / half_x) ** 2])[np.r_[0:48, 0]], 0.024
    )
    return (loft(outer) - loft(inner)) + ring


def _flared(
    half_x: float,
    half_y: float,
    exponent: float,
    widths: Float[ndarray, " m"],
    heights: Float[ndarray, " m"],
    rise: float,
) -> Float[ndarray, "m n 3"]:
    """Rings that widen upwards; the ends of the tub are ``rise`` metres higher than its middle."""
    rings = stack_rings(
        [superellipse(half_x * width, half_y * width, exponent) for width in widths], list(heights)
    )
    share = heights / heights.max()
    rings[..., 2] += (share**2)[:, None] * rise * (rings[..., 0] / half_x) ** 2
    return rings


def _claw_feet(half_x: float, half_y: float, lift: float) -> list[Manifold]:
    feet = []
    for sx in (-1, 1):
        for sy in (-1, 1):
            x, y = sx * 0.5 * half_x, sy * 0.45 * half_y
            feet.append(rod((1.12 * x, 1.2 * y, 0.04), (x, y, lift + 0.07), 0.035, 0.06, sides=12))
            feet.append(ellipsoid((1.12 * x, 1.2 * y, 0.04), (0.055, 0.055, 0.04)))
    return feet


def _tap(x: float, height: float) -> list[Manifold]:
    spout = np.array(
        [
            [x, 0, height - 0.05],
            [x, 0, height + 0.16],
            [x + 0.05, 0, height + 0.2],
            [x + 0.15, 0, height + 0.17],
        ]
    )
    parts = [tube(spout, 0.022)]
    for side in (-1, 1):
        parts.append(rod((x, side * 0.1, height - 0.05), (x, side * 0.1, height + 0.07), 0.018, sides=12))
        parts.append(ellipsoid((x, side * 0.1, height + 0.07), (0.035, 0.035, 0.022)))
    return parts


def toilet(rng: np.random.Generator) -> Manifold:
    """Toilet: egg-shaped bowl with seat and lid, on a foot or a skirt, with a tank behind."""
    length, half_x = rng.uniform(0.46, 0.56), rng.uniform(0.17, 0.2)
    height = rng.uniform(0.38, 0.44)
    skirted = chance(rng, 0.35)
    steps = np.linspace(0.0, 1.0, 9)
    if skirted:
        widths = 0.86 + 0.14 * steps
        shift = 0.02 * (1 - steps)
    else:
        waist = rng.uniform(0.5, 0.62)
        widths = waist + 0.08 * (1 - steps) ** 4 + (1 - waist) * np.clip((steps - 0.35) / 0.65, 0, 1) ** 0.7
        shift = 0.3 * length * (1 - widths)
    outlines = [_egg(half_x * w, length * w) + np.array([0.0, s]) for w, s in zip(widths, shift, strict=True)]
    bowl = loft(stack_rings(outlines, list(height * steps)))
    open_lid = chance(rng, 0.6)
    if open_lid:  # under a closed lid the bowl stays solid: a hidden cavity would be no part of the shape
        drain = [0.35, 0.55, 0.75, 0.82, 0.83]
        levels = np.array([0.4, 0.5, 0.75, 0.97, 1.1]) * height
        bowl -= loft(stack_rings([_egg(half_x * w, length * w) for w in drain], list(levels)))
    parts = [bowl]
    rear = 0.5 * length - 0.04
    deck_rear = rear + rng.uniform(0.14, 0.2)
    if skirted:
        parts.append(box((-0.8 * half_x, 0.8 * half_x), (0.2 * length, deck_rear), (0.0, height)))
    else:
        parts.append(
            rounded_box((-0.6 * half_x, 0.6 * half_x), (0.1 * length, deck_rear), (0.0, 0.3 * height), 0.03)
        )
        parts.append(
            rounded_box(
                (-0.75 * half_x, 0.75 * half_x), (0.25 * length, deck_rear), (0.55 * height, height), 0.03
            )
        )
        parts.append(
            box(
                (-0.4 * half_x, 0.4 * half_x), (0.15 * length, deck_rear - 0.02), (0.1 * height, 0.7 * height)
            )
        )
    parts += _seat_and_lid(rng, half_x, length, height, open_lid=open_lid)
    parts += _tank(rng, half_x, (rear, deck_rear), height)
    return union(parts)


def _egg(half_x: float, length: float) -> Float[ndarray, "n 2"]:
    """Egg outline along y, blunt end at the back (+y), centred on the origin."""
    outline = superellipse(half_x, length / 2, 2.2)
    outline[:, 0] *= 1.0 + 0.16 * outline[:, 1] / (length / 2)
    return outline


def _seat_and_lid(
    rng: np.random.Generator, half_x: float, length: float, height: float, *, open_lid: bool
) -> list[Manifold]:
    seat = slab(_egg(1.04 * half_x, 1.03 * length), (height - 0.005, height + 0.03))
    lid = slab(_egg(1.0 * half_x, 0.98 * length), (0.0, 0.028))
    if not open_lid:
        return [seat, lid.translate([0.0, 0.0, height + 0.025])]
    hole = slab(_egg(0.66 * half_x, 0.66 * length) - [0.0, 0.02], (height - 1, height + 1))
    hinge = 0.46 * length
    # Turning about x lifts the front of the lid; its rear edge is the hinge, just before the tank.
    raised = lid.translate([0.0, -hinge, 0.0]).rotate([-rng.uniform(84.0, 90.0), 0.0, 0.0])
    return [seat - hole, raised.translate([0.0, 0.5 * length - 0.075, height + 0.02])]


def _tank(rng: np.random.Generator, half_x: float, y: tuple[float, float], height: float) -> list[Manifold]:
    wide, rise = rng.uniform(0.95, 1.2) * half_x, rng.uniform(0.3, 0.42)
    front = y[0] - 0.005
    body = rounded_box((-wide, wide), (front, y[1]), (height - 0.03, height + rise), rng.uniform(0.01, 0.04))
    lid = rounded_box(
        (-wide - 0.015, wide + 0.015),
        (front - 0.015, y[1] + 0.01),
        (height + rise - 0.02, height + rise + 0.03),
        0.012,
    )
    if chance(rng, 0.5):
        button = rod(
            (0, 0.5 * (y[0] + y[1]), height + rise), (0, 0.5 * (y[0] + y[1]), height + rise + 0.045), 0.03
        )
        return [body, lid, button]
    x, z = -0.7 * wide, height + rise - 0.07
    lever = [
        rod((x, front + 0.02, z), (x, front - 0.035, z), 0.014, sides=12),
        rod((x, front - 0.03, z), (x + 0.09, front - 0.03, z - 0.01), 0.013, sides=12),
    ]
    return [body, lid, *lever]
