"""The interior of a mesh: the points from which (nearly) no direction leads out without meeting a face.

So neither the orientation of faces nor how often a face is listed has any influence, and slits, cracks and
missing faces open a shape only as far as one sees out through them.

Of 256 fixed directions, spread evenly, 8 may escape. On training meshes of ModelNet10 labels by 0 to 16 were
compared with those by other directions, and with those of meshes whose faces were torn apart by 5e-4: 8
agree best (mean IoU 0.997 and 0.993; 0.975 and 0.63 if none may escape).
"""

import numpy as np
import warp as wp
from jaxtyping import Bool, Float

from pointproj.geometry.meshes import SMALLEST_AREA, Mesh, face_areas, query_grid
from pointproj.geometry.warp_meshes import box_tree, on_device

wp.set_module_options({"enable_backward": False, "fuse_fp": False})  # so CPU and CUDA round alike

DIRECTIONS = 256
ESCAPES = wp.constant(8)
"""A point is inside if of all directions at most this many escape."""

FIRST = wp.constant(64)
"""So many directions, spread evenly too, decide alone where they are nearly of one mind."""

FIRST_ESCAPES = wp.constant(4)
"""A point is inside if none of the first directions escapes, and outside if more than this many do.

On the query grids of training meshes of ModelNet10, that changes 14 labels in a million."""

SURFACE_TOLERANCE = wp.constant(wp.float64(1e-6))
"""A face this close along a direction is where the point lies, and hides nothing (query cube units)."""

MARGIN = 3e-3
"""Faces are widened by this on all sides, so that nothing escapes through cracks of up to twice the width."""

LONGEST_CORNER = 4 * MARGIN
"""Corners move outwards by no more than this, however sharp."""

_MARGIN = wp.constant(
    wp.float64(1e-9)
)  # faces are wider by this, so that none escapes where two of them meet
_DIRECTION_STEPS = 4096  # directions are fractions of this, so that every machine has the same
_ZERO = wp.constant(wp.float64(0.0))


def inside(mesh: Mesh, side: int, *, device: str = "cpu") -> Bool[np.ndarray, " Q"]:
    """Tell which points of the query grid are inside: see :func:`inside_at`.

    Parameters
    ----------
    mesh : Mesh
        Normalised.
    side : int
        Points a side of the query grid.
    device : str
        Where Warp runs.

    Returns
    -------
    bool array, shape (side**3,)
        In the order of :func:`pointproj.geometry.meshes.query_grid`.

    Raises
    ------
    ValueError
        If the surface reaches the boundary of the query cube, or ``side`` is below 2.
    """
    return inside_at(mesh, query_grid(side), device=device)


def inside_at(mesh: Mesh, points: Float[np.ndarray, "Q 3"], *, device: str = "cpu") -> Bool[np.ndarray, " Q"]:
    """Tell from which points at most 8 of 256 directions lead out of the mesh without meeting a face.

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
        Normalised.
    points : float32 array, shape (Q, 3)
    device : str
        Where Warp runs. Labels are the same on all devices.

    Returns
    -------
    bool array, shape (Q,)

    Raises
    ------
    ValueError
        If the surface reaches the boundary of the query cube.
    """
    corners = mesh.vertices[mesh.faces[face_areas(mesh) > SMALLEST_AREA]]
    largest = float(np.abs(corners).max(initial=0))
    if not largest < 1:
        raise ValueError(
            f"{mesh.name}: expected a normalised mesh within the query cube, got coordinates up to "
            f"{largest:.3g}: call pointproj.geometry.meshes.normalize first"
        )
    enclosed = np.zeros(len(points), dtype=bool)
    low, high = corners.min(axis=(0, 1), initial=1), corners.max(axis=(0, 1), initial=-1)
    within = np.flatnonzero(((points >= low) & (points <= high)).all(axis=1))
    within = within[_along_curve(points[within])]
    if len(within):
        enclosed[within] = _enclosed(_widened(corners), points[within], device)
    return enclosed


def directions() -> Float[np.ndarray, "256 3"]:
    """Return the directions in which a point looks for a way out: a spiral over the sphere.

    Their order is such that those up to any of them are spread evenly too: the next is always the one that is
    farthest from all before.

    Returns
    -------
    float64 array, shape (256, 3)
        Of unit length but for rounding, and along no axis.
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


def _widened(corners: Float[np.ndarray, "F 3 3"]) -> Float[np.ndarray, "F 3 3"]:
    """Move the edges of faces outwards in their planes."""
    along = np.roll(corners, -1, axis=1) - corners
    along /= np.maximum(np.linalg.norm(along, axis=-1, keepdims=True), np.finfo(float).tiny)
    before = np.roll(along, 1, axis=1)
    sine = np.linalg.norm(np.cross(before, along), axis=-1, keepdims=True)
    moved = MARGIN * (before - along) / np.maximum(sine, np.finfo(float).tiny)
    length = np.linalg.norm(moved, axis=-1, keepdims=True)
    return corners + moved * np.minimum(1, LONGEST_CORNER / np.maximum(length, np.finfo(float).tiny))


def _along_curve(points: Float[np.ndarray, "Q 3"]) -> np.ndarray:
    """Order in which points that follow each other are near each other: by cells of 1/16, in Morton order."""
    number = np.arange(32)
    spaced = sum(((number >> bit) & 1) << (3 * bit) for bit in range(5)).astype(np.uint16)
    x, y, z = ((points + 1) * 16).astype(np.int32).clip(0, 31).T
    return np.argsort(spaced[x] | spaced[y] << 1 | spaced[z] << 2, kind="stable")


def _enclosed(
    corners: Float[np.ndarray, "F 3 3"], points: Float[np.ndarray, "Q 3"], device: str
) -> Bool[np.ndarray, " Q"]:
    """See :func:`inside_at`; the points are near those before them."""
    with on_device(device):
        boxes = box_tree(corners)
        enclosed = wp.empty(len(points), dtype=wp.uint8)
        # on the CPU, points follow each other: what hid one will hide the next
        recent = wp.zeros(DIRECTIONS if wp.get_device().is_cpu else 0, dtype=wp.int32)
        wp.launch(
            _enclosed_kernel,
            dim=len(points),
            inputs=[
                boxes.id,
                wp.array(corners, dtype=wp.vec3d),
                wp.array(directions(), dtype=wp.vec3d),
                wp.array(np.ascontiguousarray(points, dtype=np.float32), dtype=wp.vec3),
                recent,
            ],
            outputs=[enclosed],
        )
        return enclosed.numpy().astype(bool)


@wp.func
def _dot(a: wp.vec3d, b: wp.vec3d) -> wp.float64:
    return a[0] * b[0] + a[1] * b[1] + a[2] * b[2]


@wp.func
def _beyond(start: wp.vec3d, end: wp.vec3d, direction: wp.vec3d, point: wp.vec3d) -> bool:
    """Whether a point lies outside of an edge of a face, seen along a direction."""
    inwards = wp.cross(direction, end - start)
    margin = _MARGIN * (wp.abs(inwards[0]) + wp.abs(inwards[1]) + wp.abs(inwards[2]))
    return _dot(inwards, point - start) < -margin


@wp.func
def _hides(corners: wp.array2d(dtype=wp.vec3d), face: int, direction: wp.vec3d, point: wp.vec3d) -> bool:
    """Whether a point sees a face in a direction."""
    a = corners[face, 0]
    b = corners[face, 1]
    c = corners[face, 2]
    normal = wp.cross(b - a, c - a)
    facing = _dot(normal, direction)
    depth = _dot(normal, a - point)
    if facing < _ZERO:
        facing = -facing
        depth = -depth
        b = corners[face, 2]
        c = corners[face, 1]
    if facing == _ZERO or depth <= SURFACE_TOLERANCE * facing:
        return False
    if _beyond(a, b, direction, point) or _beyond(b, c, direction, point):
        return False
    return not _beyond(c, a, direction, point)


@wp.func
def _hidden(
    boxes: wp.uint64,
    corners: wp.array2d(dtype=wp.vec3d),
    direction: wp.vec3d,
    number: int,
    point: wp.vec3,
    recent: wp.array(dtype=wp.int32),
) -> bool:
    """Whether a point sees any face in a direction: first the one that hid the last point is tried."""
    place = wp.vec3d(point)
    face = int(0)  # noqa: UP018, RUF046  a variable to Warp, where a literal is a constant
    if number < recent.shape[0]:
        face = recent[number]
        if _hides(corners, face, direction, place):
            return True
    candidates = wp.bvh_query_ray(boxes, point, wp.vec3(direction))
    while wp.bvh_query_next(candidates, face):
        if _hides(corners, face, direction, place):
            if number < recent.shape[0]:
                recent[number] = face
            return True
    return False


@wp.kernel
def _enclosed_kernel(
    boxes: wp.uint64,
    corners: wp.array2d(dtype=wp.vec3d),
    directions: wp.array(dtype=wp.vec3d),
    points: wp.array(dtype=wp.vec3),
    recent: wp.array(dtype=wp.int32),
    enclosed: wp.array(dtype=wp.uint8),
):
    """Count the directions that escape, until the point's side is known."""
    i = wp.tid()
    escaped = int(0)  # noqa: UP018, RUF046
    allowed = FIRST_ESCAPES
    for number in range(directions.shape[0]):
        if number == FIRST:
            allowed = ESCAPES
            if escaped == 0:
                break
        if not _hidden(boxes, corners, directions[number], number, points[i], recent):
            escaped += 1
            if escaped > allowed:
                break
    enclosed[i] = wp.uint8(escaped <= allowed)
