"""The interior of a mesh: the points from which (nearly) no direction leads out without meeting a face.

So neither the orientation of faces nor how often a face is listed has any influence, and slits, cracks and
missing faces open a shape only as far as one sees out through them.

Of 256 fixed directions, spread evenly, 6 may escape, and faces are widened a little to close cracks. On 60
training meshes of ModelNet10 labels off the surface have a mean IoU of 0.997 with those by another set of
directions, and of 0.9997 with those of meshes whose faces were torn apart (corners moved by 5e-4); 0.975
and 0.63 if none may escape and faces keep their size. Labels that allow fewer are less stable, those that
allow more call more of a deep cavity inside.
"""

from functools import cache

import numpy as np
from jaxtyping import Bool, Float, Int

from pointproj.geometry.meshes import SMALLEST_AREA, Mesh, along_curve, face_areas, query_grid
from pointproj.geometry.visibility import count_escapes
from pointproj.geometry.visibility_cells import count_escapes_by_cells

DIRECTIONS = 256
ESCAPES = 6
"""A point is inside if of all directions at most this many escape."""

FIRST = 64
"""So many directions, spread evenly too, decide alone where they are nearly of one mind."""

FIRST_ESCAPES = 4
"""A point is inside if none of the first directions escapes, and outside if more than this many do.

On the query grids of training meshes of ModelNet10, that changes 76 labels in a million."""

MARGIN = 3e-3
"""Faces are widened by this on all sides, so that nothing escapes through cracks of up to twice the width."""

LONGEST_CORNER = 4 * MARGIN
"""Corners move outwards by no more than this, however sharp."""

FACES_A_POINT = 2
"""Where faces are more than this times the points, rays take less time than lists of faces."""

_DIRECTION_STEPS = 4096  # directions are fractions of this, so that every machine has the same


def inside(mesh: Mesh, side: int, *, device: str = "cpu") -> Bool[np.ndarray, " Q"]:
    """Tell which points of the query grid of ``side`` points a side are inside: see :func:`inside_at`."""
    return inside_at(mesh, query_grid(side), device=device)


def inside_at(mesh: Mesh, points: Float[np.ndarray, "Q 3"], *, device: str = "cpu") -> Bool[np.ndarray, " Q"]:
    """Tell from which points at most 6 of 256 directions lead out of the mesh without meeting a face.

    It follows that

    - orientation, duplicate, overlapping and non-manifold faces make no difference: overlapping parts give
      their union, and an enclosed cavity is inside, since faces of arbitrary orientation cannot tell it
      from solid;
    - a single sheet has no interior;
    - a point on the surface is inside only if it would be without the faces that it lies on, as where two
      solids touch;
    - cracks make no difference, nor does a wider slit to points that see little through it. So a deep
      cavity behind a narrow opening is inside.

    Parameters
    ----------
    mesh : Mesh
        Normalised; a ValueError says that it reaches the boundary of the query cube.
    points : float32 array, shape (Q, 3)
    device : str
        Where Warp runs. Labels are the same on all devices.

    Returns
    -------
    bool array, shape (Q,)
    """
    areas = face_areas(mesh)
    by_area = np.argsort(areas)
    corners = mesh.vertices[mesh.faces[by_area[np.searchsorted(areas[by_area], SMALLEST_AREA, "right") :]]]
    largest = float(np.abs(corners).max(initial=0))
    if not largest < 1:
        raise ValueError(
            f"{mesh.name}: expected a normalised mesh within the query cube, got coordinates up to "
            f"{largest:.3g}: call pointproj.geometry.meshes.normalize first"
        )
    enclosed = np.zeros(len(points), dtype=bool)
    low, high = corners.min(axis=(0, 1), initial=1), corners.max(axis=(0, 1), initial=-1)
    within = np.flatnonzero(((points >= low) & (points <= high)).all(axis=1))
    within = within[along_curve(points[within])]
    if len(within):
        near = np.ascontiguousarray(points[within], dtype=np.float32)
        enclosed[within] = _enclosed(widened(corners), near, device)
    return enclosed


@cache
def directions() -> Float[np.ndarray, "256 3"]:
    """Return the directions in which a point looks for a way out: a spiral over the sphere.

    Their order is such that those up to any of them are spread evenly too: the next is always the one that is
    farthest from all before. They have unit length but for rounding, and none is along an axis.
    """
    number = np.arange(DIRECTIONS) + 0.5
    height = 1 - 2 * number / DIRECTIONS
    angle = np.pi * (1 + 5**0.5) * number
    radius = np.sqrt(1 - height**2)
    unit = np.stack([radius * np.cos(angle), radius * np.sin(angle), height], axis=1)
    spiral = np.round(_DIRECTION_STEPS * unit).astype(np.int64)
    chosen = [0]
    nearest = spiral @ spiral[0]
    for _ in range(DIRECTIONS - 1):
        nearest[chosen[-1]] = np.iinfo(np.int64).max
        chosen.append(int(np.argmin(nearest)))
        nearest = np.maximum(nearest, spiral @ spiral[chosen[-1]])
    return spiral[chosen] / _DIRECTION_STEPS


def widened(corners: Float[np.ndarray, "F 3 3"]) -> Float[np.ndarray, "F 3 3"]:
    """Move the edges of faces with area outwards in their planes by :data:`MARGIN`.

    Where an angle is below about 29 degrees, its corner moves less far than its edges would.
    """
    along = np.roll(corners, -1, axis=1) - corners
    along /= np.maximum(np.linalg.norm(along, axis=-1, keepdims=True), np.finfo(float).tiny)
    before = np.roll(along, 1, axis=1)
    sine = np.linalg.norm(np.cross(before, along), axis=-1, keepdims=True)
    moved = MARGIN * (before - along) / np.maximum(sine, np.finfo(float).tiny)
    length = np.linalg.norm(moved, axis=-1, keepdims=True)
    return corners + moved * np.minimum(1, LONGEST_CORNER / np.maximum(length, np.finfo(float).tiny))


def _enclosed(
    corners: Float[np.ndarray, "F 3 3"], points: Float[np.ndarray, "Q 3"], device: str
) -> Bool[np.ndarray, " Q"]:
    """See :func:`inside_at`; the points are near those before them."""
    chosen, none = directions(), np.zeros(len(points), dtype=np.int32)
    escaped = _escaped(corners, points, chosen[:FIRST], none, FIRST_ESCAPES, device)
    enclosed = escaped == 0
    unsure = np.flatnonzero((escaped > 0) & (escaped <= FIRST_ESCAPES))
    if len(unsure):
        every = _escaped(corners, points[unsure], chosen[FIRST:], escaped[unsure], ESCAPES, device)
        enclosed[unsure] = every <= ESCAPES
    return enclosed


def _escaped(
    corners: Float[np.ndarray, "F 3 3"],
    points: Float[np.ndarray, "Q 3"],
    chosen: Float[np.ndarray, "D 3"],
    before: Int[np.ndarray, " Q"],
    most: int,
    device: str,
) -> Int[np.ndarray, " Q"]:
    """Count the directions that escape, in the way that takes the least time."""
    counts = None
    if device == "cpu" and len(corners) < FACES_A_POINT * len(points):
        counts = count_escapes_by_cells(corners, points, chosen, before, most)
    if counts is None:
        counts = count_escapes(corners, points, chosen, before, most, device=device)
    return counts
