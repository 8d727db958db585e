"""Which directions lead out of a mesh from a point, computed in double precision.

CPU and CUDA test a face with the same operations and the same rounding, so they agree on every ray.
"""

import numpy as np
import warp as wp
from jaxtyping import Float, Int

from pointproj.geometry.warp_meshes import box_tree, on_device

wp.set_module_options({"enable_backward": False, "fuse_fp": False})

SURFACE_TOLERANCE = wp.constant(wp.float64(1e-6))
"""A point this close to a face along a direction lies on it, and the face hides nothing (cube units)."""

_MARGIN = wp.constant(wp.float64(1e-9))  # so that no ray passes between two faces that share an edge
_ZERO = wp.constant(wp.float64(0.0))
_ONE = wp.constant(wp.float64(1.0))


def count_escapes(
    corners: Float[np.ndarray, "F 3 3"],
    points: Float[np.ndarray, "Q 3"],
    directions: Float[np.ndarray, "D 3"],
    escaped: Int[np.ndarray, " Q"],
    most: int,
    *,
    device: str,
) -> Int[np.ndarray, " Q"]:
    """Count for each point the directions without a face.

    Parameters
    ----------
    corners : float64 array, shape (F, 3, 3)
        Corners of faces with area.
    points : float32 array, shape (Q, 3)
        It is faster if successive points are near each other.
    directions : float64 array, shape (D, 3)
        Directions to test.
    escaped : int32 array, shape (Q,)
        Earlier counts, to which these are added.
    most : int
        Once the count of a point exceeds this, its other directions are not tested.
    device : str
        Where Warp runs.

    Returns
    -------
    int32 array, shape (Q,)
        At most ``most + 1``.
    """
    with on_device(device):
        boxes = box_tree(corners)
        counts = wp.array(escaped, dtype=wp.int32)
        faces, along = (wp.array(values, dtype=wp.vec3d) for values in (corners, directions))
        inputs = [boxes.id, faces, along, wp.array(points, dtype=wp.vec3), most]
        wp.launch(_count_kernel, dim=len(points), inputs=inputs, outputs=[counts])
        return counts.numpy()


@wp.func
def _inwards(start: wp.vec3d, end: wp.vec3d, direction: wp.vec3d) -> wp.vec4d:
    """Return the plane through an edge along a direction: normal and offset, positive on the face's side."""
    normal = wp.cross(direction, end - start)
    margin = _MARGIN * (wp.abs(normal[0]) + wp.abs(normal[1]) + wp.abs(normal[2]))
    return wp.vec4d(normal[0], normal[1], normal[2], margin - wp.dot(normal, start))


@wp.func
def hidden_space(a: wp.vec3d, b: wp.vec3d, c: wp.vec3d, direction: wp.vec3d) -> wp.mat44d:
    """Return four planes, one a row, that bound the points from which a face is seen in a direction.

    The orientation of the face makes no difference. See :func:`is_hidden`.
    """
    normal = wp.cross(b - a, c - a)
    facing = wp.dot(normal, direction)
    side = wp.where(facing < _ZERO, -_ONE, _ONE)
    normal = side * normal
    along = side * direction
    offset = wp.dot(normal, a) - SURFACE_TOLERANCE * wp.abs(facing)
    before = wp.vec4d(-normal[0], -normal[1], -normal[2], offset)
    if facing == _ZERO:
        before = wp.vec4d(_ZERO, _ZERO, _ZERO, -_ONE)  # a face seen edge-on hides nothing
    return wp.matrix_from_rows(before, _inwards(a, b, along), _inwards(b, c, along), _inwards(c, a, along))


@wp.func
def is_hidden(space: wp.mat44d, point: wp.vec3d) -> bool:
    """Return whether a point is on the inner side of all four planes."""
    for row in range(4):
        offset = space[row, 0] * point[0] + space[row, 1] * point[1] + space[row, 2] * point[2]
        if offset + space[row, 3] < _ZERO:
            return False
    return True


@wp.kernel
def _count_kernel(
    boxes: wp.uint64,
    corners: wp.array2d(dtype=wp.vec3d),
    directions: wp.array(dtype=wp.vec3d),
    points: wp.array(dtype=wp.vec3),
    most: int,
    escaped: wp.array(dtype=wp.int32),
):
    """One thread a point: follow its rays until too many have escaped."""
    i = wp.tid()
    point = wp.vec3d(points[i])
    count = escaped[i]
    for number in range(directions.shape[0]):
        if count > most:
            break
        direction = directions[number]
        hidden = bool(False)  # noqa: UP018  a variable to Warp, where a literal is a constant
        face = int(0)  # noqa: UP018, RUF046
        candidates = wp.bvh_query_ray(boxes, points[i], wp.vec3(direction))
        while wp.bvh_query_next(candidates, face):
            space = hidden_space(corners[face, 0], corners[face, 1], corners[face, 2], direction)
            if is_hidden(space, point):
                hidden = True
                break
        if not hidden:
            count += 1
    escaped[i] = count
