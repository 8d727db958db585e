"""Monitors."""

import numpy as np
from manifold3d import Manifold

from pointproj.data.furniture.parts import chance, pick
from pointproj.data.furniture.solids import (
    box,
    loft,
    profile,
    rectangle,
    rod,
    rounded_box,
    slab,
    stack_rings,
    superellipse,
    union,
)


def monitor(rng: np.random.Generator) -> list[Manifold]:
    """Flat or tube monitor: a recessed screen in a bezel, on a stand."""
    half_x = rng.uniform(0.22, 0.34)
    tube = chance(rng, 0.2)
    half_z = half_x * (0.75 if tube else rng.choice([0.5, 9 / 16, 10 / 16, 0.78]))
    clear = rng.uniform(0.06, 0.14)
    centre = clear + half_z
    thick = rng.uniform(0.045, 0.08)
    bezel = rng.uniform(0.012, 0.035)
    panel = rounded_box((-half_x, half_x), (0.0, thick), (-half_z, half_z), rng.uniform(0.004, 0.02))
    screen = box(
        (-half_x + bezel, half_x - bezel),
        (-1.0, 0.012),
        (-half_z + bezel * rng.uniform(1, 2), half_z - bezel),
    )
    head = [panel - screen]
    if tube:
        head.append(_tube_back(rng, half_x, half_z, thick))
    elif chance(rng, 0.6):
        rear = thick + rng.uniform(0.02, 0.06)
        head.append(
            rounded_box(
                (-0.6 * half_x, 0.6 * half_x), (thick - 0.03, rear), (-0.6 * half_z, 0.5 * half_z), 0.02
            )
        )
    tilt = rng.uniform(-2.0, 10.0)
    parts = [part.rotate([-tilt, 0.0, 0.0]).translate([0.0, 0.0, centre]) for part in head]
    parts += _stand(rng, half_x, centre, thick, heavy=tube)
    return parts


def _tube_back(rng: np.random.Generator, half_x: float, half_z: float, thick: float) -> Manifold:
    depth = rng.uniform(0.9, 1.3) * half_x
    scales, levels = [0.96, 0.9, 0.68, 0.58], [0.0, 0.3 * depth, 0.7 * depth, depth]
    rings = [superellipse(half_x * scale, half_z * scale, 6.0) for scale in scales]
    body = loft(stack_rings(rings, levels))
    # Lofted along z, then laid down: z becomes y, and y becomes -z.
    return body.transform([[1, 0, 0, 0], [0, 0, 1, thick - 0.03], [0, -1, 0, 0]])


def _stand(
    rng: np.random.Generator, half_x: float, centre: float, thick: float, *, heavy: bool
) -> list[Manifold]:
    depth = rng.uniform(0.09, 0.14) * (1.5 if heavy else 1.0)
    wide = rng.uniform(0.35, 0.65) * half_x
    middle = thick + (0.25 * half_x if heavy else 0.02)
    kind = pick(rng, "disc", "plate", "rounded", "fork")
    base_height = 0.03
    if kind == "disc":
        base = slab(superellipse(wide, depth), (0.0, base_height)).translate([0.0, middle, 0.0])
    elif kind == "plate":
        base = box((-wide, wide), (middle - depth, middle + depth), (0.0, base_height))
    elif kind == "rounded":
        base = slab(rectangle((-wide, wide), (middle - depth, middle + depth), 0.06), (0.0, base_height))
    else:
        prongs = [
            rod((0, middle, 0.02), (side * 0.8 * half_x, middle - 1.3 * depth, 0.02), 0.025, 0.018, sides=12)
            for side in (-1, 1)
        ]
        base = union([*prongs, rod((0, middle, 0.02), (0, middle + depth, 0.02), 0.025, 0.018, sides=12)])
    neck_top = centre if not heavy else 0.5 * centre
    if heavy or chance(rng, 0.5):
        neck = rod((0, middle, 0.01), (0, middle, neck_top), 0.05 if heavy else 0.028, sides=16)
    else:
        half = rng.uniform(0.035, 0.06)
        neck = box((-half, half), (middle - 0.02, middle + 0.02), (0.01, neck_top))
    link = box((-0.05, 0.05), (0.5 * thick, middle + 0.02), (centre - 0.05, centre + 0.05))
    return [base, neck, link]


def varied_monitor(rng: np.random.Generator) -> list[Manifold]:
    """Monitor of another build: thin, curved or deep, on legs, a column, a wedge or an arm."""
    half_x = rng.uniform(0.15, 0.6)
    half_z = half_x * rng.uniform(0.4, 1.1)
    thick, clear = rng.uniform(0.008, 0.08), rng.uniform(0.02, 0.2)
    centre = clear + half_z
    panel = box((-half_x, half_x), (0.0, thick), (-half_z, half_z))
    if chance(rng, 0.5):
        bezel = rng.uniform(0.005, 0.04)
        panel -= box(
            (-half_x + bezel, half_x - bezel), (-1.0, 0.3 * thick), (-half_z + bezel, half_z - bezel)
        )
    head = [panel]
    if chance(rng, 0.5):  # a bulge, a box or a tube behind
        scales = np.sort(rng.uniform(0.2, 0.98, 3))[::-1]
        depth = rng.uniform(0.02, 0.2) if chance(rng, 0.7) else rng.uniform(0.2, 0.5)
        exponent = float(rng.choice([2.0, 4.0, 12.0]))
        rings = [superellipse(half_x * scale, half_z * scale, exponent) for scale in scales]
        behind = loft(stack_rings(rings, [0.0, 0.5 * depth, depth]))
        head.append(behind.transform([[1, 0, 0, 0], [0, 0, 1, 0.7 * thick], [0, -1, 0, 0]]))
    if chance(rng, 0.2):
        curve = rng.uniform(0.1, 0.5)
        head = [
            part.refine_to_length(0.06).warp_batch(lambda p: p - [0, curve, 0] * p[:, :1] ** 2)
            for part in head
        ]
    if chance(rng, 0.15):  # speakers
        wide = rng.uniform(0.03, 0.1)
        for side in (-1, 1):
            x = sorted((side * (half_x - 0.002), side * (half_x + wide)))
            head.append(box((x[0], x[1]), (-0.01, thick), (-0.9 * half_z, 0.9 * half_z)))
    tilt = [-rng.uniform(-5.0, 25.0), 0.0, 0.0]
    parts = [part.rotate(tilt).translate([0.0, 0.0, centre]) for part in head]
    return [*parts, *_varied_stand(rng, half_x, centre, thick)]


def _varied_stand(rng: np.random.Generator, half_x: float, centre: float, thick: float) -> list[Manifold]:
    base, depth = rng.uniform(0.006, 0.03), rng.uniform(0.06, 0.2)
    wide = rng.uniform(0.2, 0.9) * half_x
    middle = thick + rng.uniform(0.0, 0.05)
    kind = pick(rng, "plate", "feet", "wedge", "posts")
    if kind == "feet":
        return [
            part
            for side in (-1, 1)
            for part in (
                rod((side * wide, -depth, base), (side * wide, depth, base), base, sides=8),
                rod(
                    (side * wide, 0.5 * thick, base), (side * wide, 0.5 * thick, centre), 0.8 * base, sides=8
                ),
            )
        ]
    if kind == "wedge":
        outline = np.array([[-0.5 * depth, 0.0], [depth, 0.0], [middle, centre], [0.3 * thick, centre]])
        return [profile(outline, (-0.5 * wide, 0.5 * wide))]
    exponent = float(rng.choice([2.0, 3.0, 12.0]))
    plate = slab(superellipse(wide, depth, exponent), (0.0, base)).translate([0.0, middle, 0.0])
    places = (0.0,) if kind == "plate" else (-0.4 * wide, 0.4 * wide)
    radius = rng.uniform(0.008, 0.03)
    lean = rng.uniform(0.0, 0.8) * depth
    necks = [rod((x, middle + lean, 0.5 * base), (x, 0.6 * thick, centre), radius, sides=12) for x in places]
    return [plate, *necks]
