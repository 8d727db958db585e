"""Monitors."""

import numpy as np
from manifold3d import Manifold

from pointproj.data.furniture.outlines import SIDES, about, beside, limits, rectangle, superellipse
from pointproj.data.furniture.parts import Parts, Rng
from pointproj.data.furniture.solids import bar, box, loft, profile, rod, rounded_box, slab, union


def monitor(rng: Rng) -> Parts:
    """Flat or tube monitor: a recessed screen in a bezel, on a stand."""
    half_x = rng.uniform(0.22, 0.34)
    tube = rng.chance(0.2)
    half_z = half_x * (0.75 if tube else rng.choice([0.5, 9 / 16, 10 / 16, 0.78]))
    centre = rng.uniform(0.06, 0.14) + half_z
    thick, bezel = rng.uniform(0.045, 0.08), rng.uniform(0.012, 0.035)
    panel = rounded_box(half_x, (0.0, thick), half_z, rng.uniform(0.004, 0.02))
    screen = box(half_x - bezel, (-1.0, 0.012), (-half_z + bezel * rng.uniform(1, 2), half_z - bezel))
    head = [panel - screen]
    if tube:
        depth = rng.uniform(0.9, 1.3) * half_x
        outlines = [superellipse(half_x * scale, half_z * scale, 6.0) for scale in (0.96, 0.9, 0.68, 0.58)]
        head.append(_laid(outlines, [0.0, 0.3 * depth, 0.7 * depth, depth], thick - 0.03))
    elif rng.chance(0.6):
        rear = thick + rng.uniform(0.02, 0.06)
        head.append(rounded_box(0.6 * half_x, (thick - 0.03, rear), (-0.6 * half_z, 0.5 * half_z), 0.02))
    tilt = rng.uniform(-2.0, 10.0)
    yield from [part.rotate([-tilt, 0.0, 0.0]).translate([0.0, 0.0, centre]) for part in head]
    yield from _stand(rng, half_x, centre, thick, heavy=tube)


def _laid(outlines: list[np.ndarray], levels: list[float], y: float) -> Manifold:
    """Loft along z, then laid down: z becomes y, and y becomes -z."""
    return loft(outlines, levels).transform([[1, 0, 0, 0], [0, 0, 1, y], [0, -1, 0, 0]])


def _stand(rng: Rng, half_x: float, centre: float, thick: float, *, heavy: bool) -> Parts:
    depth = rng.uniform(0.09, 0.14) * (1.5 if heavy else 1.0)
    wide = rng.uniform(0.35, 0.65) * half_x
    middle = thick + (0.25 * half_x if heavy else 0.02)
    y, z = about(middle, depth), (0.0, 0.03)
    kind = rng.pick("disc", "plate", "rounded", "fork")
    if kind == "disc":
        base = slab(superellipse(wide, depth), z).translate([0.0, middle, 0.0])
    elif kind == "plate":
        base = box(wide, y, z)
    elif kind == "rounded":
        base = slab(rectangle(wide, y, 0.06), z)
    else:
        tips = [(side * 0.8 * half_x, middle - 1.3 * depth, 0.02) for side in SIDES]
        tips.append((0, middle + depth, 0.02))
        base = union([rod((0, middle, 0.02), tip, 0.025, 0.018, sides=12) for tip in tips])
    neck_top = 0.5 * centre if heavy else centre
    if heavy or rng.chance(0.5):
        neck = bar(0, middle, (0.01, neck_top), 0.05 if heavy else 0.028, 16)
    else:
        neck = box(rng.uniform(0.035, 0.06), about(middle, 0.02), (0.01, neck_top))
    return [base, neck, box(0.05, (0.5 * thick, middle + 0.02), about(centre, 0.05))]


def varied_monitor(rng: Rng) -> Parts:
    """Monitor of another build: thin, curved or deep, on legs, a column, a wedge or an arm."""
    half_x, share, thick, clear = rng.uniforms((0.15, 0.6), (0.4, 1.1), (0.008, 0.08), (0.02, 0.2))
    half_z = share * half_x
    centre = clear + half_z
    head = [box(half_x, (0.0, thick), half_z)]
    if rng.chance(0.5):
        bezel = rng.uniform(0.005, 0.04)
        head[0] -= box(half_x - bezel, (-1.0, 0.3 * thick), half_z - bezel)
    if rng.chance(0.5):  # a bulge, a box or a tube behind
        scales = np.sort(rng.uniform(0.2, 0.98, 3))[::-1]
        depth = rng.uniform(0.02, 0.2) if rng.chance(0.7) else rng.uniform(0.2, 0.5)
        exponent = float(rng.choice([2.0, 4.0, 12.0]))
        outlines = [superellipse(half_x * scale, half_z * scale, exponent) for scale in scales]
        head.append(_laid(outlines, [0.0, 0.5 * depth, depth], 0.7 * thick))
    if rng.chance(0.2):
        bend = [0, rng.uniform(0.1, 0.5), 0]
        head = [part.refine_to_length(0.06).warp_batch(lambda p: p - bend * p[:, :1] ** 2) for part in head]
    if rng.chance(0.15):  # speakers
        wide = rng.uniform(0.03, 0.1)
        sides = [beside(side, half_x - 0.002, half_x + wide) for side in SIDES]
        head += [box(x, (-0.01, thick), 0.9 * half_z) for x in sides]
    tilt = [-rng.uniform(-5.0, 25.0), 0.0, 0.0]
    yield from [part.rotate(tilt).translate([0.0, 0.0, centre]) for part in head]
    base, depth = rng.uniform(0.006, 0.03), rng.uniform(0.06, 0.2)
    wide, middle = rng.uniform(0.2, 0.9) * half_x, thick + rng.uniform(0.0, 0.05)
    kind = rng.pick("plate", "feet", "wedge", "posts")
    if kind == "feet":
        feet = ((limits(depth), base, base), (0.5 * thick, (base, centre), 0.8 * base))
        yield from [bar(side * wide, y, z, radius, 8) for side in SIDES for y, z, radius in feet]
    elif kind == "wedge":
        outline = [[-0.5 * depth, 0.0], [depth, 0.0], [middle, centre], [0.3 * thick, centre]]
        yield profile(np.array(outline), 0.5 * wide)
    else:
        outline = superellipse(wide, depth, float(rng.choice([2.0, 3.0, 12.0])))
        yield slab(outline, (0.0, base)).translate([0.0, middle, 0.0])
        places = (0.0,) if kind == "plate" else (-0.4 * wide, 0.4 * wide)
        radius, lean = rng.uniform(0.008, 0.03), rng.uniform(0.0, 0.8) * depth
        y, z = (middle + lean, 0.6 * thick), (0.5 * base, centre)
        yield from [bar(x, y, z, radius, 12) for x in places]
