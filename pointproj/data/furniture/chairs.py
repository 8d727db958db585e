"""Chairs."""

import numpy as np
from manifold3d import Manifold

from pointproj.data.furniture.parts import LEG_STYLES, chance, four_legs, pick
from pointproj.data.furniture.solids import (
    box,
    ellipsoid,
    profile,
    revolved,
    rod,
    rounded_box,
    slab,
    superellipse,
    tube,
)
from pointproj.data.furniture.supports import support


def chair(rng: np.random.Generator) -> list[Manifold]:
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
        parts.append(revolved([(foot, 0.0), (foot, 0.025), (0.05, 0.06), (0.04, 0.2), (0.04, under)]))
    else:
        parts += _cantilever(half_x, half_y, under)
    parts += _chair_back(rng, half_x, half_y, seat)
    if chance(rng, 0.4):
        parts += _armrests(rng, half_x, half_y, seat)
    return parts


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


def varied_chair(rng: np.random.Generator) -> list[Manifold]:
    """Chair of another build: a bent shell, an upholstered block, a bucket, or a stool, on any support."""
    half_x, half_y = rng.uniform(0.18, 0.35), rng.uniform(0.18, 0.32)
    seat = rng.uniform(0.28, 0.8)
    build = pick(rng, "shell", "shell", "block", "bucket", "boards", "stool")
    if build == "shell":
        body, under = _shell_seat(rng, half_x, half_y, seat)
    elif build == "block":
        body, under = _block_seat(rng, half_x, half_y, seat)
    elif build == "bucket":
        body, under = _bucket_seat(rng, half_x, half_y, seat)
    else:
        board = rng.uniform(0.012, 0.06)
        under = seat - board
        exponent = float(rng.choice([2.0, 4.0, 10.0]))
        body = [slab(superellipse(half_x, half_y, exponent), (under, seat))]
        if build == "boards":
            body += _board_back(rng, half_x, half_y, seat, board)
    base = support(
        rng, half_x, half_y, under, "legs", "ring", "frames", "sled", "column", "hairpin", "crossed"
    )
    if build != "bucket" and chance(rng, 0.4):
        body += _loop_arms(rng, half_x, half_y, seat)
    return [*body, *base]


def _shell_seat(
    rng: np.random.Generator, half_x: float, half_y: float, seat: float
) -> tuple[list[Manifold], float]:
    """Thin sheet bent from seat into back, flat or hollowed across, and the height of its underside."""
    thickness, rise = rng.uniform(0.01, 0.05), rng.uniform(0.25, 0.7)
    lean, bend = rng.uniform(0.0, 0.35), rng.uniform(0.08, 0.15)
    angle = np.linspace(0.0, np.pi / 2 - lean, 9)
    corner = np.array([half_y - bend, bend])
    arc = corner + bend * np.stack([np.sin(angle), -np.cos(angle)], axis=1)
    up = np.array([np.sin(lean), np.cos(lean)])
    line = np.concatenate([[[-half_y, 0.0]], arc, arc[-1:] + rise * up])
    along = np.gradient(line, axis=0)
    normal = np.stack([-along[:, 1], along[:, 0]], axis=1)
    normal /= np.linalg.norm(normal, axis=1, keepdims=True)
    outline = np.concatenate([line - 0.5 * thickness * normal, (line + 0.5 * thickness * normal)[::-1]])
    sheet = profile(outline, (-half_x, half_x)).refine_to_length(0.06)
    hollow, narrow = rng.uniform(0.0, 0.12), rng.uniform(0.0, 0.5)

    def hollowed(points: np.ndarray) -> np.ndarray:
        share = np.square(points[:, 0] / half_x)
        climb = np.clip(points[:, 2] / (bend + rise), 0.0, 1.0)
        bent = points.copy()
        bent[:, 2] += hollow * share * (1 - climb)
        bent[:, 1] -= hollow * share * climb
        bent[:, 0] *= 1 - narrow * climb**2
        return bent

    under = seat - 0.5 * thickness
    return [sheet.warp_batch(hollowed).translate([0.0, 0.0, seat])], under


def _block_seat(
    rng: np.random.Generator, half_x: float, half_y: float, seat: float
) -> tuple[list[Manifold], float]:
    """Upholstered seat and back with or without solid arms, and the height of its underside."""
    deep, soft = rng.uniform(0.3, 0.9) * seat, rng.uniform(0.005, 0.06)
    under = max(seat - deep, 0.03)
    back, rise = rng.uniform(0.06, 0.2), rng.uniform(0.2, 0.6)
    parts = [rounded_box((-half_x, half_x), (-half_y, half_y), (under, seat), soft)]
    lean = rng.uniform(0.0, 0.3)
    upright = rounded_box((-half_x, half_x), (-back, 0.0), (-0.5 * (seat - under), rise), soft)
    parts.append(upright.transform([[1, 0, 0, 0], [0, 1, lean, half_y], [0, 0, 1, seat]]))
    if chance(rng, 0.5):
        arm, level = rng.uniform(0.05, 0.15), seat + rng.uniform(0.08, 0.25)
        for side in (-1, 1):
            x = sorted((side * half_x * 0.98, side * (half_x + arm)))
            parts.append(rounded_box((x[0], x[1]), (-half_y, half_y), (under, level), soft))
    return parts, under


def _bucket_seat(
    rng: np.random.Generator, half_x: float, half_y: float, seat: float
) -> tuple[list[Manifold], float]:
    """Egg or tub: a rounded hull with a hollow, cut open to the front, and the height of its underside."""
    thickness, tall = rng.uniform(0.015, 0.06), rng.uniform(0.3, 0.65)
    outer = ellipsoid((0, 0, seat + 0.5 * tall), (half_x, half_y, 0.75 * tall))
    inner = ellipsoid(
        (0, -0.3 * thickness, seat + 0.5 * tall + thickness),
        (half_x - thickness, half_y - thickness, 0.75 * tall - thickness),
    )
    extent, steep = -rng.uniform(0.0, 0.8) * half_y, rng.uniform(-0.2, 1.2)
    start = seat + rng.uniform(0.05, 0.3) * tall
    front = np.array(
        [[-1.0, start], [extent, start], [extent + steep * tall, seat + 2 * tall], [-1.0, seat + 2 * tall]]
    )
    shell = (outer - inner) - profile(front, (-1.0, 1.0))
    cushion = ellipsoid((0, 0, seat + 0.05 * tall), (0.8 * half_x, 0.8 * half_y, 0.12 * tall))
    return [shell, cushion], seat - 0.22 * tall


def _board_back(
    rng: np.random.Generator, half_x: float, half_y: float, seat: float, board: float
) -> list[Manifold]:
    """Thin back of boards, bars or one sheet between or without posts."""
    rise, lean = rng.uniform(0.2, 0.7), rng.uniform(0.0, 0.25)
    post, wide = rng.uniform(0.008, 0.025), 0.85 * half_x
    parts = []
    if chance(rng, 0.7):
        parts += [rod((s * wide, 0, -0.5 * board), (s * wide, 0, rise), post, sides=4) for s in (-1, 1)]
        low = rng.uniform(0.05, 0.6) * rise
    else:
        low = -0.5 * board
    count = int(rng.integers(1, 6))
    edges = np.linspace(low, rise, count + 1)
    filled = rng.uniform(0.4, 0.9) if count > 1 else 1.0
    thin = 0.7 * post
    if chance(rng, 0.7) or low < 0:
        step = edges[1] - edges[0]
        filled = 1.0 if low < 0 else filled
        parts += [box((-wide, wide), (-thin, thin), (z, z + filled * step)) for z in edges[:-1]]
    else:
        parts += [box((-wide, wide), (-thin, thin), (z, z + 2 * post)) for z in (low, rise - post)]
        places = np.linspace(-wide, wide, count + 2)[1:-1]
        parts += [box((x - thin, x + thin), (-0.8 * thin, 0.8 * thin), (low, rise)) for x in places]
    return [part.transform([[1, 0, 0, 0], [0, 1, lean, half_y - 0.03], [0, 0, 1, seat]]) for part in parts]


def _loop_arms(rng: np.random.Generator, half_x: float, half_y: float, seat: float) -> list[Manifold]:
    radius, level = rng.uniform(0.008, 0.025), rng.uniform(0.12, 0.28)
    front = rng.uniform(-0.9, -0.3) * half_y
    path = np.array([[0, front, 0.0], [0, front, level], [0, 0.95 * half_y, level], [0, 0.95 * half_y, 0.0]])
    return [
        tube(path, radius).translate([side * (half_x - 0.4 * radius), 0.0, seat - 0.3 * radius])
        for side in (-1, 1)
    ]
