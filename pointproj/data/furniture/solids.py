"""Solid building blocks: boxes, rods, lofts and their unions, watertight by construction.

Lengths are metres, z points up, the floor is z = 0 and the front of a piece looks towards -y. An extent is
two limits, or a number: half of a width about 0. Every block is a ``manifold3d.Manifold``; unions of them
stay watertight however the blocks overlap.
"""

from collections.abc import Sequence
from itertools import pairwise, product

import numpy as np
from jaxtyping import Float
from manifold3d import CrossSection, Manifold, Mesh, OpType
from numpy import ndarray

Range = tuple[float, float]
Extent = Range | float
Point = Sequence[float]
Outline = Float[ndarray, "n 2"]
Parts = list[Manifold]

ROUND_SEGMENTS = 24  # sides of a full circle
SIDES = (-1, 1)
CORNERS = tuple((x, y) for x in SIDES for y in SIDES)


def limits(extent: Extent) -> Range:
    """Both limits of an extent."""
    return (-extent, extent) if isinstance(extent, int | float) else extent


def about(middle: float, half: float) -> Range:
    """Limits around a middle."""
    return middle - half, middle + half


def beside(side: int, inner: float, outer: float) -> Range:
    """Limits between two distances from 0 on one side of it."""
    low, high = sorted((side * inner, side * outer))
    return low, high


def union(parts: Sequence[Manifold]) -> Manifold:
    """Merge solids into one."""
    return Manifold.batch_boolean(list(parts), OpType.Add)


def box(x: Extent, y: Extent, z: Extent) -> Manifold:
    """Axis-aligned box between the given limits."""
    x, y, z = limits(x), limits(y), limits(z)
    size = [x[1] - x[0], y[1] - y[0], z[1] - z[0]]
    return Manifold.cube(size).translate([x[0], y[0], z[0]])


def rounded_box(x: Extent, y: Extent, z: Extent, radius: float) -> Manifold:
    """Box with all edges rounded; the radius is cut to what the shortest side allows."""
    bounds = np.array([limits(x), limits(y), limits(z)], dtype=np.float64)
    radius = min(radius, 0.49 * float(np.diff(bounds, axis=1).min()))
    low, high = bounds[:, 0] + radius, bounds[:, 1] - radius
    corner = Manifold.sphere(radius, 16)
    return Manifold.batch_hull(
        [corner.translate(list(place)) for place in product(*zip(low, high, strict=True))]
    )


def ellipsoid(centre: Point, radii: Point) -> Manifold:
    """Axis-aligned ellipsoid."""
    return Manifold.sphere(1.0, ROUND_SEGMENTS).scale(list(radii)).translate(list(centre))


def rod(
    start: Point, end: Point, radius: float, end_radius: float | None = None, sides: int = ROUND_SEGMENTS
) -> Manifold:
    """Straight rod between two points, tapering to ``end_radius``; ``sides=4`` makes it square.

    A square rod is ``2 * radius`` wide, with faces along x and y where it stands upright.
    """
    start, end = np.asarray(start, dtype=np.float64), np.asarray(end, dtype=np.float64)
    end_radius = radius if end_radius is None else end_radius
    axis = (end - start) / np.linalg.norm(end - start)
    # The helper axis only has to differ from the rod's; y keeps upright square rods axis-aligned.
    helper = np.array([0.0, 0.0, 1.0]) if abs(axis[1]) > 0.9 else np.array([0.0, 1.0, 0.0])
    across = np.cross(helper, axis)
    across /= np.linalg.norm(across)
    along = np.cross(axis, across)
    angles = 2 * np.pi * (np.arange(sides) + 0.5) / sides
    scale = np.sqrt(2.0) if sides == 4 else 1.0
    ring = scale * (np.cos(angles)[:, None] * across + np.sin(angles)[:, None] * along)
    return Manifold.hull_points(np.concatenate([start + radius * ring, end + end_radius * ring]))


def bar(
    x: Extent, y: Extent, z: Extent, radius: float, sides: int = ROUND_SEGMENTS, end: float | None = None
) -> Manifold:
    """Rod along axes: from the first to the second limit where there are two, a number being a place here."""
    start, stop = zip(
        *(place if isinstance(place, tuple) else (place, place) for place in (x, y, z)), strict=True
    )
    return rod(start, stop, radius, end, sides)


def lean(part: Manifold, slope: float, y: float = 0.0, z: float = 0.0) -> Manifold:
    """Shear a part by ``slope`` of y along z about its origin, then move it to (y, z)."""
    return part.transform([[1, 0, 0, 0], [0, 1, slope, y], [0, 0, 1, z]])


def tube(path: Float[ndarray, "n 3"], radius: float) -> Manifold:
    """Round bar that follows a polyline, with rounded bends and ends."""
    ball = Manifold.sphere(radius, 12)
    balls = [ball.translate(list(point)) for point in path]
    return union([Manifold.batch_hull([one, other]) for one, other in pairwise(balls)])


def rectangle(x: Extent, y: Extent, radius: float = 0.0, steps: int = 6) -> Outline:
    """Rectangle outline, counter-clockwise, with corners rounded by ``radius``."""
    x, y = limits(x), limits(y)
    if radius <= 0:
        return np.array([[x[0], y[0]], [x[1], y[0]], [x[1], y[1]], [x[0], y[1]]])
    radius = min(radius, 0.49 * min(x[1] - x[0], y[1] - y[0]))
    (left, right), (front, rear) = (x[0] + radius, x[1] - radius), (y[0] + radius, y[1] - radius)
    centres = [(right, rear), (left, rear), (left, front), (right, front)]
    quarter = np.linspace(0.0, np.pi / 2, steps + 1)
    arcs = [
        np.array(centre) + radius * np.stack([np.cos(start + quarter), np.sin(start + quarter)], axis=1)
        for centre, start in zip(centres, np.arange(4) * np.pi / 2, strict=True)
    ]
    return np.concatenate(arcs)


def superellipse(half_x: float, half_y: float, exponent: float = 2.0, segments: int = 48) -> Outline:
    """Outline of |x/a|^e + |y/b|^e = 1: an ellipse at 2, towards a rectangle as the exponent grows."""
    angles = 2 * np.pi * np.arange(segments) / segments
    cosine, sine = np.cos(angles), np.sin(angles)
    x = half_x * np.sign(cosine) * np.abs(cosine) ** (2 / exponent)
    y = half_y * np.sign(sine) * np.abs(sine) ** (2 / exponent)
    return np.stack([x, y], axis=1)


def slab(outline: Outline, z: Range) -> Manifold:
    """Upright prism over a simple outline."""
    section = CrossSection([outline])
    return Manifold.extrude(section, z[1] - z[0]).translate([0.0, 0.0, z[0]])


def profile(outline: Outline, x: Extent) -> Manifold:
    """Prism along x whose section is an outline in (y, z)."""
    x = limits(x)
    section = CrossSection([outline])
    # Extrusion runs along z; permuting the axes (x, y, z) -> (z, x, y) keeps the orientation.
    along_x = Manifold.extrude(section, x[1] - x[0]).transform([[0, 0, 1, 0], [1, 0, 0, 0], [0, 1, 0, 0]])
    return along_x.translate([x[0], 0.0, 0.0])


def revolved(points: Sequence[tuple[float, float]], segments: int = ROUND_SEGMENTS) -> Manifold:
    """Solid of revolution about the z axis from (radius, z) points, listed from bottom to top."""
    outline = [(0.0, points[0][1]), *points, (0.0, points[-1][1])]
    return Manifold.revolve(CrossSection([np.array(outline)]), segments)


def loft(rings: Float[ndarray, "m n 3"]) -> Manifold:
    """Solid through stacked rings of equal length, counter-clockwise seen from above, bottom ring first.

    Both ends are closed by a fan around the ring's mean, so end rings must be star-shaped about it.
    """
    count, length, _ = rings.shape
    points = np.concatenate([rings.reshape(-1, 3), rings[:1].mean(axis=1), rings[-1:].mean(axis=1)])
    here = np.arange(length)
    after = (here + 1) % length
    bottom, top = count * length, count * length + 1
    faces = [np.stack([np.full(length, bottom), after, here], axis=1)]
    for level in range(count - 1):
        low, high = level * length, (level + 1) * length
        faces.append(np.stack([low + here, low + after, high + after], axis=1))
        faces.append(np.stack([low + here, high + after, high + here], axis=1))
    last = (count - 1) * length
    faces.append(np.stack([np.full(length, top), last + here, last + after], axis=1))
    return Manifold(Mesh(points.astype(np.float32), np.concatenate(faces).astype(np.uint32)))


def stack_rings(outlines: Sequence[Outline], heights: Sequence[float]) -> Float[ndarray, "m n 3"]:
    """Lift flat outlines to heights, for :func:`loft`."""
    lifted = zip(outlines, heights, strict=True)
    return np.stack([np.column_stack([outline, np.full(len(outline), height)]) for outline, height in lifted])
