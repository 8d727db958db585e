"""Bathtubs and toilets."""

import numpy as np
from manifold3d import Manifold
from numpy.typing import ArrayLike

from pointproj.data.furniture.outlines import CORNERS, SIDES, Outline, beside, rectangle, superellipse
from pointproj.data.furniture.parts import Parts, Rng, support
from pointproj.data.furniture.solids import bar, box, ellipsoid, loft, rod, rounded_box, slab, tube


def bathtub(rng: Rng) -> Parts:
    """Open tub: built into a block, free-standing, or on claw feet; taps are an option."""
    half_x, half_y, height = rng.uniforms((0.7, 0.95), (0.34, 0.46), (0.45, 0.62))
    kind = rng.pick("built_in", "built_in", "free", "claw")
    wall = rng.uniform(0.06, 0.09)
    lift = rng.uniform(0.1, 0.16) if kind == "claw" else 0.0
    if kind == "built_in":
        yield _built_in_tub(rng, half_x, half_y, height, wall)
    else:
        yield _free_tub(rng, half_x, half_y, height, wall).translate([0, 0, lift])
    if lift:
        for x, y in ((sx * 0.5 * half_x, sy * 0.45 * half_y) for sx, sy in CORNERS):
            foot = (1.12 * x, 1.2 * y, 0.04)
            yield rod(foot, (x, y, lift + 0.07), 0.035, 0.06, sides=12)
            yield ellipsoid(foot, (0.055, 0.055, 0.04))
    if rng.chance(0.5):
        yield from _tap(-half_x + 0.5 * wall, height + lift)


def _built_in_tub(rng: Rng, half_x: float, half_y: float, height: float, wall: float) -> Manifold:
    rounding = rng.uniform(0.0, 0.3) if rng.chance(0.6) else 0.0
    block = slab(rectangle(half_x, half_y, rounding), (0.0, height))
    if rng.chance(0.5):
        lip = rectangle(half_x + 0.03, half_y + 0.03, rounding + 0.03)
        block = block + slab(lip, (height - 0.05, height))
    exponent, end = rng.uniform(2.4, 5.0), rng.uniform(0.0, 0.08)
    x, y = half_x - wall - end, half_y - wall
    levels = [wall, wall + 0.05, 0.5 * height, height - 0.02, height + 0.02]
    basin = _flared(x, y, exponent, [0.72, 0.86, 0.93, 1.0, 1.03], levels)
    return block - basin.translate([end, 0.0, 0.0])  # set off centre, it leaves a deck for the taps


def _free_tub(rng: Rng, half_x: float, half_y: float, height: float, wall: float) -> Manifold:
    slipper = rng.chance(0.5)
    exponent, base = rng.uniform(2.1, 3.2), rng.uniform(0.62, 0.8)
    rise = rng.uniform(0.12, 0.25) if slipper else rng.uniform(0.0, 0.05)
    steps, basin_steps = np.linspace(0.0, 1.0, 8), np.linspace(wall / height, 1.15, 8)
    climbs = (np.sin(0.5 * np.pi * np.minimum(each, 1.0)) ** 0.8 for each in (steps, basin_steps))
    widths, basin = (base + (1 - base) * climb for climb in climbs)
    basin[0] *= 0.82
    outer = _flared(half_x, half_y, exponent, widths, height * steps, rise)
    inner = _flared(half_x - wall, half_y - wall, exponent, basin, height * basin_steps, rise)
    rim = superellipse(half_x + 0.012, half_y + 0.012, exponent)
    line = np.column_stack([rim, height - 0.02 + rise * (rim[:, 0] / half_x) ** 2])
    return (outer - inner) + tube(line[np.r_[0:48, 0]], 0.024)


def _flared(
    x: float, y: float, exponent: float, widths: ArrayLike, heights: ArrayLike, rise: float = 0.0
) -> Manifold:
    """Loft that widens upwards; the ends of the tub are ``rise`` metres higher than its middle."""
    outlines = np.stack([superellipse(x * width, y * width, exponent) for width in widths])
    heights = np.reshape(heights, (-1, 1))
    return loft(outlines, heights + rise * (heights / heights.max()) ** 2 * (outlines[..., 0] / x) ** 2)


def _tap(x: float, height: float) -> Parts:
    spout = np.array([[x, 0, -0.05], [x, 0, 0.16], [x + 0.05, 0, 0.2], [x + 0.15, 0, 0.17]])
    yield tube(spout + np.array([0, 0, height]), 0.022)
    for y in (side * 0.1 for side in SIDES):
        yield bar(x, y, (height - 0.05, height + 0.07), 0.018, 12)
        yield ellipsoid((x, y, height + 0.07), (0.035, 0.035, 0.022))


def varied_bathtub(rng: Rng) -> Parts:
    """Tub of another build: thin shell, round, corner or box, with surround, bench or feet."""
    half_x, share, height, wall = rng.uniforms((0.5, 1.0), (0.35, 1.0), (0.3, 0.8), (0.012, 0.09))
    half_y = share * half_x
    exponent, taper = float(rng.choice([2.0, 2.5, 4.0, 12.0])), rng.uniform(0.55, 1.0)
    lift = rng.uniform(0.05, 0.2) if rng.chance(0.3) else 0.0
    steps, basin_steps = np.linspace(0.0, 1.0, 7), np.linspace(wall / height, 1.2, 7)
    widths = taper + (1 - taper) * steps ** rng.uniform(0.3, 1.5)
    rise = rng.uniform(0.0, 0.3) * half_x if rng.chance(0.4) else 0.0
    block = _flared(half_x, half_y, exponent, widths, height * steps, rise)
    basin = taper + (1 - taper) * np.minimum(basin_steps, 1.0)
    basin[0] *= rng.uniform(0.7, 0.95)
    hollow = float(rng.choice([exponent, 2.2]))
    inner = _flared(half_x - wall, half_y - wall, hollow, basin, height * basin_steps, 1.2 * rise)
    if rng.chance(0.3):  # set into a box
        size = rng.uniform(0.0, 0.25)
        block = box(half_x + size, half_y + size, (0.0, height))
    yield (block - inner).translate([0.0, 0.0, lift])
    if lift:
        yield from support(rng, 0.7 * half_x, 0.7 * half_y, lift + 0.05, "legs", "plinth", "ring", "panels")
    if rng.chance(0.25):  # walls around it
        tall, board = height + rng.uniform(0.3, 1.2), rng.uniform(0.01, 0.06)
        yield box(half_x, (half_y - 0.01, half_y + board), (0.0, tall))
        if rng.chance(0.6):
            x = beside(rng.side(), half_x - 0.01, half_x + board)
            yield box(x, (-half_y, half_y + board), (0.0, tall))
    if rng.chance(0.3):  # a step in front
        yield box(0.8 * half_x, (-half_y - 0.3, -0.9 * half_y), (0.0, 0.4 * height))
    if rng.chance(0.3):
        yield from _tap(-half_x + 0.5 * wall, height + lift)


def toilet(rng: Rng) -> Parts:
    """Toilet: egg-shaped bowl with seat and lid, on a foot or a skirt, with a tank behind."""
    length, half_x, height = rng.uniforms((0.46, 0.56), (0.17, 0.2), (0.38, 0.44))
    skirted, steps = rng.chance(0.35), np.linspace(0.0, 1.0, 9)
    if skirted:
        widths, shift = 0.86 + 0.14 * steps, 0.02 * (1 - steps)
    else:
        waist = rng.uniform(0.5, 0.62)
        widths = waist + 0.08 * (1 - steps) ** 4 + (1 - waist) * np.clip((steps - 0.35) / 0.65, 0, 1) ** 0.7
        shift = 0.3 * length * (1 - widths)
    outlines = [_egg(half_x * w, length * w) + np.array([0.0, s]) for w, s in zip(widths, shift, strict=True)]
    bowl = loft(outlines, height * steps)
    open_lid = rng.chance(0.6)
    if open_lid:  # under a closed lid the bowl stays solid: a hidden cavity would be no part of the shape
        drain = [_egg(half_x * w, length * w) for w in (0.35, 0.55, 0.75, 0.82, 0.83)]
        bowl -= loft(drain, np.array([0.4, 0.5, 0.75, 0.97, 1.1]) * height)
    yield bowl
    rear = 0.5 * length - 0.04
    deck = rear + rng.uniform(0.14, 0.2)
    if skirted:
        yield box(0.8 * half_x, (0.2 * length, deck), (0.0, height))
    else:
        yield rounded_box(0.6 * half_x, (0.1 * length, deck), (0.0, 0.3 * height), 0.03)
        yield rounded_box(0.75 * half_x, (0.25 * length, deck), (0.55 * height, height), 0.03)
        yield box(0.4 * half_x, (0.15 * length, deck - 0.02), (0.1 * height, 0.7 * height))
    seat = slab(_egg(1.04 * half_x, 1.03 * length), (height - 0.005, height + 0.03))
    lid = slab(_egg(1.0 * half_x, 0.98 * length), (0.0, 0.028))
    if open_lid:
        hole = slab(_egg(0.66 * half_x, 0.66 * length) - [0.0, 0.02], (height - 1, height + 1))
        yield seat - hole
        # Turning about x lifts the front of the lid; its rear edge is the hinge, just before the tank.
        raised = lid.translate([0.0, -(0.46 * length), 0.0]).rotate([-rng.uniform(84.0, 90.0), 0.0, 0.0])
        yield raised.translate([0.0, 0.5 * length - 0.075, height + 0.02])
    else:
        yield seat
        yield lid.translate([0.0, 0.0, height + 0.025])
    wide, top = rng.uniform(0.95, 1.2) * half_x, height + rng.uniform(0.3, 0.42)
    front = rear - 0.005
    yield rounded_box(wide, (front, deck), (height - 0.03, top), rng.uniform(0.01, 0.04))  # the tank
    yield rounded_box(wide + 0.015, (front - 0.015, deck + 0.01), (top - 0.02, top + 0.03), 0.012)
    if rng.chance(0.5):
        yield bar(0, 0.5 * (rear + deck), (top, top + 0.045), 0.03)
    else:
        x, z = -0.7 * wide, top - 0.07
        lever = bar((x, x + 0.09), front - 0.03, (z, z - 0.01), 0.013, 12)
        yield bar(x, (front + 0.02, front - 0.035), z, 0.014, 12)
        yield lever


def _egg(half_x: float, length: float) -> Outline:
    """Egg outline along y, blunt end at the back (+y), centred on the origin."""
    outline = superellipse(half_x, length / 2, 2.2)
    outline[:, 0] *= 1.0 + 0.16 * outline[:, 1] / (length / 2)
    return outline


def varied_toilet(rng: Rng) -> Parts:
    """Toilet of another build: box, cone or column under a bowl of any outline, tank of any kind or none."""
    length, half_x, height, exponent = rng.uniforms((0.4, 0.65), (0.15, 0.26), (0.32, 0.5), (1.9, 5.0))
    foot, waist = rng.uniform(0.4, 1.0), rng.uniform(0.3, 1.0)
    lift = rng.uniform(0.1, 0.5) * height if rng.chance(0.2) else 0.0  # hung on the wall
    levels, share = np.linspace(lift, height, 8), np.linspace(0.0, 1.0, 8)
    widths = foot * (1 - share) ** 2 + 2 * waist * share * (1 - share) + share**2
    back, half_y = rng.uniform(0.0, 0.4) * length, length / 2
    outlines = [np.add(superellipse(half_x * w, half_y * w, exponent), [0, back * (1 - w)]) for w in widths]
    bowl = loft(outlines, levels)
    wall, is_open = rng.uniform(0.015, 0.06), rng.chance(0.6)
    if is_open:
        depth = rng.uniform(0.3, 0.8) * (height - lift)
        x, y = half_x - wall, half_y - wall
        levels = [height - depth, height - 0.6 * depth, height - 0.1 * depth, height + 0.1]
        bowl -= _flared(x, y, exponent, [0.4, 0.8, 1.0, 1.0], levels)
    yield bowl
    lid = slab(superellipse(1.02 * half_x, half_y, exponent), (0.0, rng.uniform(0.01, 0.03)))
    if not is_open:
        yield lid.translate([0.0, 0.0, height - 0.002])
    elif rng.chance(0.6):
        raised = lid.translate([0.0, -0.5 * length, 0.0]).rotate([-rng.uniform(75.0, 88.0), 0.0, 0.0])
        yield raised.translate([0.0, 0.45 * length, height - 0.01])
    rear = 0.42 * length
    end = rear + rng.uniform(0.1, 0.25)
    bottom = lift if lift else (0.0 if rng.chance(0.5) else rng.uniform(0.2, 0.8) * height)
    if rng.chance(0.8):
        block = 0.8 * half_x, (0.2 * length, end), (bottom, height)
        yield rounded_box(*block, rng.uniform(0.002, 0.05))
    if rng.chance(0.75):
        wide, rise = rng.uniform(0.8, 1.4) * half_x, rng.uniform(0.2, 0.6)
        low = height - 0.02 if rng.chance(0.7) else 0.0
        yield rounded_box(wide, (rear, end), (low, height + rise), rng.uniform(0.002, 0.05))
    if lift or rng.chance(0.1):  # the wall behind it
        wide = rng.uniform(1.0, 2.0) * half_x
        yield box(wide, (end - 0.01, end + 0.05), (0.0, height + rng.uniform(0.1, 0.7)))
