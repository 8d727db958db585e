"""Solid building blocks: boxes, rods, lofts and their unions, watertight by construction.

Lengths are in metres, z points up, the floor is z = 0, and the front of a piece faces -y. Unions of blocks
stay watertight however the blocks overlap.
"""

from collections.abc import Sequence
from itertools import pairwise, product

import numpy as np
from jaxtyping import Float
from manifold3d import CrossSection, Manifold, Mesh, OpType
from numpy import ndarray

from pointproj.data.furniture.outlines import Extent, Outline, Range, limits

Point = Sequence[float]

SEGMENTS = 24  # sides of a full circle


def union(parts: Sequence[Manifold]) -> Manifold:
    """Merge solids into one."""
    return Manifold.batch_boolean(list(parts), OpType.Add)


def box(x: Extent, y: Extent, z: Extent) -> Manifold:
    """Axis-aligned box between the given limits."""
    (x, right), (y, rear), (z, top) = limits(x), limits(y), limits(z)
    return Manifold.cube([right - x, rear - y, top - z]).translate([x, y, z])


def rounded_box(x: Extent, y: Extent, z: Extent, radius: float) -> Manifold:
    """Box with all edges rounded; the radius is reduced to fit the shortest side."""
    bounds = np.array([limits(x), limits(y), limits(z)], dtype=np.float64)
    radius = min(radius, 0.49 * float(np.diff(bounds, axis=1).min()))
    low, high = bounds[:, 0] + radius, bounds[:, 1] - radius
    corner, places = Manifold.sphere(radius, 16), product(*zip(low, high, strict=True))
    return Manifold.batch_hull([corner.translate(list(place)) for place in places])


def ellipsoid(centre: Point, radii: Point) -> Manifold:
    """Axis-aligned ellipsoid."""
    return Manifold.sphere(1.0, SEGMENTS).scale(list(radii)).translate(list(centre))


def rod(start: Point, end: Point, radius: float, tip: float | None = None, sides: int = SEGMENTS) -> Manifold:
    """Straight rod between two points, with radius ``tip`` at its end; ``sides=4`` makes it square.

    A square rod is ``2 * radius`` wide. If it stands upright, its faces are parallel to the x and y axes.
    """
    start, end = np.asarray(start, dtype=np.float64), np.asarray(end, dtype=np.float64)
    axis = (end - start) / np.linalg.norm(end - start)
    # Any helper axis will do that is not parallel to the rod; y aligns upright square rods with the axes.
    helper = np.array([0.0, 0.0, 1.0]) if abs(axis[1]) > 0.9 else np.array([0.0, 1.0, 0.0])
    across = np.cross(helper, axis)
    across /= np.linalg.norm(across)
    along = np.cross(axis, across)
    angles = 2 * np.pi * (np.arange(sides) + 0.5) / sides
    scale = np.sqrt(2.0) if sides == 4 else 1.0
    ring = scale * (np.cos(angles)[:, None] * across + np.sin(angles)[:, None] * along)
    tip = radius if tip is None else tip
    return Manifold.hull_points(np.concatenate([start + radius * ring, end + tip * ring]))


def bar(x: Extent, y: Extent, z: Extent, radius: float, sides: int = SEGMENTS) -> Manifold:
    """Rod between two points: a pair holds the coordinates of start and end, a number is that of both."""
    ends = [place if isinstance(place, tuple) else (place, place) for place in (x, y, z)]
    return rod(*zip(*ends, strict=True), radius, sides=sides)


def tube(path: Float[ndarray, "n 3"], radius: float) -> Manifold:
    """Round bar that follows a polyline, with rounded bends and ends."""
    ball = Manifold.sphere(radius, 12)
    balls = [ball.translate(list(point)) for point in path]
    return union([Manifold.batch_hull([one, other]) for one, other in pairwise(balls)])


def slab(outline: Outline, z: Range) -> Manifold:
    """Upright prism over a simple outline."""
    return Manifold.extrude(CrossSection([outline]), z[1] - z[0]).translate([0.0, 0.0, z[0]])


def profile(outline: Outline, x: Extent) -> Manifold:
    """Prism along x whose section is an outline in (y, z)."""
    # Permuting the axes (x, y, z) -> (z, x, y) keeps the orientation.
    return slab(outline, limits(x)).transform([[0, 0, 1, 0], [1, 0, 0, 0], [0, 1, 0, 0]])


def turned(points: Sequence[tuple[float, float]], segments: int = SEGMENTS) -> Manifold:
    """Solid of revolution about the z axis from (radius, z) points, listed from bottom to top."""
    outline = [(0.0, points[0][1]), *points, (0.0, points[-1][1])]
    return Manifold.revolve(CrossSection([np.array(outline)]), segments)


def loft(outlines: Sequence[Outline], heights: Sequence[float | Float[ndarray, " n"]]) -> Manifold:
    """Solid through outlines with equally many points, from bottom to top.

    Each height is one number for all points of its outline, or one number a point. Both ends are closed by a
    fan around the mean of their outline, so these two outlines must be star-shaped about their means.
    """
    heights = [np.broadcast_to(height, len(outlines[0])) for height in heights]
    rings = np.concatenate([outlines, np.stack(heights)[..., None]], axis=-1)
    count, length, _ = rings.shape
    points = np.concatenate([rings.reshape(-1, 3), rings[:1].mean(axis=1), rings[-1:].mean(axis=1)])
    here = np.arange(count * length).reshape(count, length)
    after = np.roll(here, -1, axis=1)
    faces = [(len(points) - 2, after[0], here[0])]
    for (a, b), (d, c) in pairwise(zip(here, after, strict=True)):
        faces += [(a, b, c), (a, c, d)]
    faces.append((len(points) - 1, here[-1], after[-1]))
    corners = np.concatenate([np.stack(np.broadcast_arrays(*face), axis=1) for face in faces])
    return Manifold(Mesh(points.astype(np.float32), corners.astype(np.uint32)))
