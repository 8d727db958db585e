"""Chairs and sofas."""

from itertools import pairwise

import numpy as np

from pointproj.data.furniture.outlines import SIDES, about, beside, circle, limits, superellipse
from pointproj.data.furniture.parts import LEGS, Parts, Rng, four_legs, lean, support
from pointproj.data.furniture.solids import bar, box, ellipsoid, profile, rod, rounded_box, slab, tube, turned


def chair(rng: Rng) -> Parts:
    """Chair: dining, office, lounge or cantilever, with slatted, ladder, solid or curved back."""
    x, y, seat, thickness = rng.uniforms((0.2, 0.27), (0.2, 0.27), (0.42, 0.5), (0.05, 0.09))
    base = rng.pick("legs", "legs", "legs", "star", "disc", "cantilever")
    if base == "star" or rng.chance(0.4):
        yield rounded_box(x, y, (seat - thickness, seat + 0.02), 0.035)
    else:
        yield slab(superellipse(x, y, rng.uniform(3.0, 8.0)), (seat - thickness, seat))
    under = seat - thickness + 0.02
    if base == "legs":
        style, radius = rng.pick(*LEGS), rng.uniform(0.02, 0.03)
        splay = rng.uniform(0.02, 0.06) if rng.chance(0.4) else 0.0
        leg_x, leg_y = x - radius - 0.02, y - radius - 0.02
        yield from four_legs(leg_x, leg_y, under, radius, style, splay)
        if splay == 0.0 and rng.chance(0.5):
            level = rng.uniform(0.25, 0.6) * under
            yield from [bar(side * leg_x, limits(leg_y), level, 0.6 * radius, 12) for side in SIDES]
            yield bar(limits(leg_x), 0, level, 0.6 * radius, 12)
    elif base == "star":
        yield from [bar(0, 0, (0.07, under), 0.035), bar(0, 0, (0.06, 0.14), 0.05)]
        for unit in circle(5, 0.25):
            tip, across = 1.15 * x * unit, 0.022 * np.array([-unit[1], unit[0]])
            yield rod((0, 0, 0.11), (*tip, 0.07), 0.03, 0.02, sides=12)
            yield rod((*(tip - across), 0.032), (*(tip + across), 0.032), 0.032, sides=16)
            yield rod((*tip, 0.03), (*tip, 0.075), 0.015, sides=12)
    elif base == "disc":
        foot = 0.85 * min(x, y)
        yield turned([(foot, 0.0), (foot, 0.025), (0.05, 0.06), (0.04, 0.2), (0.04, under)])
    else:
        for at in (side * (x - 0.03) for side in SIDES):
            path = [(at, y, 0.02), (at, -y, 0.02), (at, -y, under), (at, y - 0.05, under)]
            yield tube(np.array(path), 0.02)
        yield bar(limits(x - 0.03), y, 0.02, 0.02, 12)
    yield from _back(rng, x, y, seat)
    if rng.chance(0.4):
        yield from _armrests(rng, x, y, seat)


def _back(rng: Rng, x: float, y: float, seat: float) -> Parts:
    rise, slope, post = rng.uniform(0.35, 0.6), rng.uniform(0.0, 0.22), 0.022
    wide = x - post - 0.01
    kind = rng.pick("slats", "ladder", "panel", "curved", "cushion")
    upright = []
    if kind in ("slats", "ladder", "panel"):
        upright += [bar(side * wide, 0, (-0.03, rise), post, 4) for side in SIDES]
        upright.append(box(wide + post, post, (rise - 0.07, rise + 0.02)))
    if kind == "slats":
        places = np.linspace(-wide, wide, rng.integers(5, 9))[1:-1]
        upright += [box(about(place, 0.014), 0.014, (-0.03, rise - 0.05)) for place in places]
    elif kind == "ladder":
        levels = np.linspace(0.05, rise - 0.06, rng.integers(3, 6))[:-1]
        upright += [box(wide, 0.014, (level, level + 0.05)) for level in levels]
    elif kind == "panel":
        gap = rng.uniform(0.0, 0.15)
        upright.append(box(wide, 0.018, (gap - 0.03 if gap < 0.05 else gap, rise)))
    elif kind == "cushion":
        gap = rng.uniform(-0.03, 0.12)
        upright.append(rounded_box(x, (-0.035, 0.04), (gap, rise), 0.035))
        upright.append(box(0.05, (0.0, 0.03), (-0.04, gap + 0.1)))
    else:
        angles, depth = np.linspace(np.pi, 0.0, 17), 0.5 * x
        outer = np.stack([x * np.cos(angles), depth * np.sin(angles)], axis=1)
        inner = outer * [1 - 0.04 / x, 1 - 0.04 / depth]
        shell = slab(np.concatenate([inner, outer[::-1]]), (-0.03, rise)).translate([0.0, -depth + 0.03, 0.0])
        # Front ends of the shell are cut lower than its middle.
        front = -depth + 0.01
        front_profile = np.array([[front, 0.35 * rise], [0.02, 1.1 * rise], [front, 1.1 * rise]])
        upright.append(shell - profile(front_profile, 1.0))
    return [lean(part, slope, y - 0.04, seat) for part in upright]


def _armrests(rng: Rng, x: float, y: float, seat: float) -> Parts:
    level = seat + rng.uniform(0.17, 0.24)
    padded = rng.chance(0.5)
    for side in SIDES:
        at = side * (x - 0.005)
        pad = about(at, 0.03), (-0.8 * y, y + 0.01), (level - 0.03, level + 0.01)
        yield rounded_box(*pad, 0.018) if padded else box(*pad)
        x_ends, z_ends = (at - side * 0.01, at), (seat - 0.04, level)
        yield from [bar(x_ends, place, z_ends, 0.017, 12) for place in (-0.6 * y, 0.85 * y)]


def varied_chair(rng: Rng) -> Parts:
    """Chair of another build: a bent shell, an upholstered block, a bucket, or a stool, on any support."""
    x, y, seat = rng.uniforms((0.18, 0.35), (0.18, 0.32), (0.28, 0.8))
    build = rng.pick("shell", "shell", "block", "bucket", "boards", "stool")
    if build in _SEATS:
        body, under = _SEATS[build](rng, x, y, seat)
    else:
        board = rng.uniform(0.012, 0.06)
        under = seat - board
        body = [slab(superellipse(x, y, float(rng.choice([2.0, 4.0, 10.0]))), (under, seat))]
        if build == "boards":
            body += _board_back(rng, x, y, seat, board)
    base = [*support(rng, x, y, under, "legs", "ring", "frames", "sled", "column", "hairpin", "crossed")]
    yield from body
    if build != "bucket" and rng.chance(0.4):  # loops as arms
        radius, level = rng.uniform(0.008, 0.025), rng.uniform(0.12, 0.28)
        front, rear = rng.uniform(-0.9, -0.3) * y, 0.95 * y
        path = np.array([[0, front, 0.0], [0, front, level], [0, rear, level], [0, rear, 0.0]])
        places = [side * (x - 0.4 * radius) for side in SIDES]
        yield from [tube(path, radius).translate([at, 0.0, seat - 0.3 * radius]) for at in places]
    yield from base


def _shell_seat(rng: Rng, x: float, y: float, seat: float) -> tuple[Parts, float]:
    """Thin sheet bent from seat into back, flat or hollowed across, and the height of its underside."""
    thickness, rise, slope, bend = rng.uniforms((0.01, 0.05), (0.25, 0.7), (0.0, 0.35), (0.08, 0.15))
    angle = np.linspace(0.0, np.pi / 2 - slope, 9)
    arc = np.array([y - bend, bend]) + bend * np.stack([np.sin(angle), -np.cos(angle)], axis=1)
    up = np.array([np.sin(slope), np.cos(slope)])
    line = np.concatenate([[[-y, 0.0]], arc, arc[-1:] + rise * up])
    along = np.gradient(line, axis=0)
    normal = np.stack([-along[:, 1], along[:, 0]], axis=1)
    normal /= np.linalg.norm(normal, axis=1, keepdims=True)
    outline = np.concatenate([line - 0.5 * thickness * normal, (line + 0.5 * thickness * normal)[::-1]])
    sheet = profile(outline, x).refine_to_length(0.06)
    hollow, narrow = rng.uniform(0.0, 0.12), rng.uniform(0.0, 0.5)

    def hollowed(points: np.ndarray) -> np.ndarray:
        share = np.square(points[:, 0] / x)
        climb = np.clip(points[:, 2] / (bend + rise), 0.0, 1.0)
        bent = points.copy()
        bent[:, 2] += hollow * share * (1 - climb)
        bent[:, 1] -= hollow * share * climb
        bent[:, 0] *= 1 - narrow * climb**2
        return bent

    return [sheet.warp_batch(hollowed).translate([0.0, 0.0, seat])], seat - 0.5 * thickness


def _block_seat(rng: Rng, x: float, y: float, seat: float) -> tuple[Parts, float]:
    """Upholstered seat and back with or without solid arms, and the height of its underside."""
    deep, soft = rng.uniform(0.3, 0.9) * seat, rng.uniform(0.005, 0.06)
    under = max(seat - deep, 0.03)
    back, rise = rng.uniform(0.06, 0.2), rng.uniform(0.2, 0.6)
    upright = rounded_box(x, (-back, 0.0), (-0.5 * (seat - under), rise), soft)
    parts = [rounded_box(x, y, (under, seat), soft), lean(upright, rng.uniform(0.0, 0.3), y, seat)]
    if rng.chance(0.5):
        arm, level = rng.uniform(0.05, 0.15), seat + rng.uniform(0.08, 0.25)
        parts += [rounded_box(beside(side, x * 0.98, x + arm), y, (under, level), soft) for side in SIDES]
    return parts, under


def _bucket_seat(rng: Rng, x: float, y: float, seat: float) -> tuple[Parts, float]:
    """Egg or tub: a rounded hull with a hollow, cut open to the front, and the height of its underside."""
    thickness, tall = rng.uniform(0.015, 0.06), rng.uniform(0.3, 0.65)
    middle, half = seat + 0.5 * tall, 0.75 * tall
    outer = ellipsoid((0, 0, middle), (x, y, half))
    radii = (x - thickness, y - thickness, half - thickness)
    inner = ellipsoid((0, -0.3 * thickness, middle + thickness), radii)
    extent, steep = -rng.uniform(0.0, 0.8) * y, rng.uniform(-0.2, 1.2)
    start, end = seat + rng.uniform(0.05, 0.3) * tall, seat + 2 * tall
    front = [[-1.0, start], [extent, start], [extent + steep * tall, end], [-1.0, end]]
    cushion = ellipsoid((0, 0, seat + 0.05 * tall), (0.8 * x, 0.8 * y, 0.12 * tall))
    return [(outer - inner) - profile(np.array(front), 1.0), cushion], seat - 0.22 * tall


_SEATS = {"shell": _shell_seat, "block": _block_seat, "bucket": _bucket_seat}


def _board_back(rng: Rng, x: float, y: float, seat: float, board: float) -> Parts:
    """Thin back of boards, bars or one sheet between or without posts."""
    rise, slope = rng.uniform(0.2, 0.7), rng.uniform(0.0, 0.25)
    post, wide, low = rng.uniform(0.008, 0.025), 0.85 * x, -0.5 * board
    parts, thin = [], 0.7 * post
    if rng.chance(0.7):
        parts += [bar(side * wide, 0, (-0.5 * board, rise), post, 4) for side in SIDES]
        low = rng.uniform(0.05, 0.6) * rise
    count = rng.integers(1, 6)
    edges = np.linspace(low, rise, count + 1)
    filled = rng.uniform(0.4, 0.9) if count > 1 else 1.0
    if rng.chance(0.7) or low < 0:
        tall = (1.0 if low < 0 else filled) * (edges[1] - edges[0])
        parts += [box(wide, thin, (z, z + tall)) for z in edges[:-1]]
    else:
        parts += [box(wide, thin, (z, z + 2 * post)) for z in (low, rise - post)]
        places = np.linspace(-wide, wide, count + 2)[1:-1]
        parts += [box(about(place, thin), 0.8 * thin, (low, rise)) for place in places]
    return [lean(part, slope, y - 0.03, seat) for part in parts]


def sofa(rng: Rng) -> Parts:
    """Sofa: one to four seats, boxy, rounded or rolled arms, loose cushions, sometimes a chaise."""
    seats = int(rng.choice([1, 2, 3, 4], p=[0.2, 0.35, 0.35, 0.1]))
    seat_width = rng.uniform(0.55, 0.7)
    half_x = 0.5 * seats * seat_width
    depth, floor = rng.uniform(0.8, 1.0), rng.uniform(0.06, 0.14)
    deck, seat = floor + rng.uniform(0.12, 0.18), rng.uniform(0.4, 0.48)
    arm, back, back_height = rng.uniforms((0.12, 0.24), (0.15, 0.22), (0.7, 0.95))
    front, rear = -depth / 2, depth / 2
    armless = rng.chance(0.12)
    outer = half_x if armless else half_x + arm
    yield box(outer, depth / 2, (floor, deck))
    yield rounded_box(outer, (rear - back, rear), (floor, back_height), rng.uniform(0.02, 0.08))
    if not armless:
        style, rise = rng.pick("box", "rounded", "rolled"), rng.uniform(0.55, 0.68)
        for side in SIDES:
            x, y, z = beside(side, half_x, half_x + arm), (front, rear - 0.02), (floor, rise)
            if style == "box":
                yield box(x, y, z)
            elif style == "rounded":
                yield rounded_box(x, y, z, 0.4 * arm)
            else:
                middle, roll = 0.5 * (x[0] + x[1]) + side * 0.03, 0.5 * arm + 0.02
                top = bar(middle, (y[0] - 0.01, y[1]), z[1] - 0.3 * roll, roll)
                yield box((x[0] + 0.02, x[1] - 0.02), y, z)
                yield top
    soft, gap = rng.uniform(0.03, 0.07), 0.008
    chaise = rng.integers(2) * (seats - 1) if seats >= 3 and rng.chance(0.35) else None
    for index in range(seats):
        x = (-half_x + index * seat_width + gap, -half_x + (index + 1) * seat_width - gap)
        extent = front - 0.02
        if index == chaise:
            extent = front - rng.uniform(0.4, 0.6)
            yield box((x[0] - gap, x[1] + gap), (extent, front + 0.05), (floor, deck))
        yield rounded_box(x, (extent, rear - back + 0.02), (deck - 0.02, seat), soft)
        tall = back_height - seat + rng.uniform(-0.05, 0.08)
        cushion = rounded_box(x, 0.09, (0.0, tall), 1.4 * soft)
        yield lean(cushion, 0.25, rear - back - 0.06, seat - 0.03)
    yield from four_legs(outer - 0.08, depth / 2 - 0.08, floor + 0.02, 0.03, rng.pick(*LEGS[:3]))


def varied_sofa(rng: Rng) -> Parts:
    """Sofa of another build: bench, corner, curve or slim frame, with cushions or none, on any support."""
    half_x, half_y, under, seat = rng.uniforms((0.4, 1.3), (0.3, 0.55), (0.02, 0.28), (0.34, 0.5))
    soft, back, rise = rng.uniforms((0.003, 0.09), (0.05, 0.25), (0.15, 0.6))
    parts = [rounded_box(half_x, half_y, (under, seat), soft)]
    slope = rng.uniform(0.0, 0.3)
    if rng.chance(0.9):
        extent = half_x * (1.0 if rng.chance(0.7) else rng.uniform(0.4, 0.8))
        upright = rounded_box(extent, (-back, 0.0), (under - seat + 0.02, rise), soft)
        parts.append(lean(upright, slope, half_y, seat))
    arm, level = rng.uniform(0.03, 0.3), seat + rng.uniform(0.0, 0.3)
    for side in SIDES:
        if rng.chance(0.7):
            low = under if rng.chance(0.7) else seat - 0.06
            parts.append(rounded_box(beside(side, 0.99 * half_x, half_x + arm), half_y, (low, level), soft))
    if rng.chance(0.35):  # round a corner
        side, deep, wide = rng.side(), rng.uniform(0.4, 1.2), rng.uniform(0.5, 0.8)
        x = beside(side, half_x, half_x - min(wide, half_x))
        parts.append(rounded_box(x, (-half_y - deep, -half_y + 0.1), (under, seat), soft))
        if rng.chance(0.6):
            x = beside(side, half_x - 0.01, half_x + back)
            parts.append(rounded_box(x, (-half_y - deep, half_y), (under, seat + rise), soft))
    count, plump = rng.integers(0, 5), rng.uniform(0.04, 0.1)
    for left, right in pairwise(
        np.linspace(-half_x, half_x, count + 1)
    ):  # loose cushions, and pillows on them
        gap = rng.uniform(0.003, 0.02)
        x, y = (left + gap, right - gap), (-half_y - 0.02, half_y - back)
        parts.append(rounded_box(x, y, (seat - 0.02, seat + plump), 0.5 * plump))
        if rng.chance(0.4):
            size = rng.uniform(0.3, 0.48) * (right - left)
            pillow = rounded_box(size, plump, (0.0, 1.6 * size), 0.8 * plump)
            tilted = pillow.rotate([-rng.uniform(5, 30), 0.0, 0.0])
            place = [0.5 * (left + right), half_y - back - plump, seat + 0.5 * plump]
            parts.append(tilted.translate(place))
    if rng.chance(0.2):  # bent into a curve
        bend = np.array([0.0, rng.uniform(0.1, 0.35) / half_x, 0.0])
        parts = [part.refine_to_length(0.15).warp_batch(lambda p: p - bend * p[:, :1] ** 2) for part in parts]
    return [*parts, *support(rng, half_x, half_y, under, "legs", "plinth", "frames", "panels", "ring")]
