"""Exact distances to the triangles of a mesh."""

import numpy as np
import warp as wp
from jaxtyping import Float

from pointproj.geometry.meshes import Mesh, along_curve
from pointproj.geometry.warp_meshes import box_tree, on_device, search_mesh

wp.set_module_options({"enable_backward": False, "fuse_fp": False})  # so that CPU and CUDA round alike


def unsigned_distance(
    mesh: Mesh, points: Float[np.ndarray, "Q 3"], *, device: str = "cpu"
) -> Float[np.ndarray, " Q"]:
    """Return the exact distance from each float32 point to the nearest triangle, in the mesh's units.

    ``device`` is a Warp device. Coordinates must be of about unit size, as those of normalised meshes. Warp's
    mesh query finds a near face in single precision; it skips slivers and is inexact close to them. So the
    distances to all faces whose boxes are as near as that face are computed in double precision. The result
    is exact up to its rounding to float32.
    """
    corners = mesh.vertices[mesh.faces]
    order = along_curve(points)  # points that are near each other visit the same faces
    with on_device(device):
        triangles = search_mesh(mesh)
        boxes = box_tree(corners)
        distances = wp.empty(len(points), dtype=wp.float32)
        wp.launch(
            _distance_kernel,
            dim=len(points),
            inputs=[
                triangles.id,
                boxes.id,
                wp.array(corners, dtype=wp.vec3d),
                wp.array(np.ascontiguousarray(points[order], dtype=np.float32), dtype=wp.vec3),
            ],
            outputs=[distances],
        )
        found = np.empty(len(points), dtype=np.float32)
        found[order] = distances.numpy()
        return found


@wp.func
def _segment_squared(start: wp.vec3d, end: wp.vec3d, point: wp.vec3d) -> wp.float64:
    along = end - start
    squared = wp.dot(along, along)
    share = wp.float64(0.0)
    if squared != share:
        share = wp.clamp(wp.dot(point - start, along) / squared, wp.float64(0.0), wp.float64(1.0))
    return wp.length_sq(start + share * along - point)


@wp.func
def _triangle_squared(a: wp.vec3d, b: wp.vec3d, c: wp.vec3d, point: wp.vec3d) -> wp.float64:
    """Squared distance to a triangle: to its plane if the point projects into it, else to its edges."""
    nearest = wp.min(
        _segment_squared(a, b, point), wp.min(_segment_squared(b, c, point), _segment_squared(c, a, point))
    )
    zero = wp.float64(0.0)
    normal = wp.cross(b - a, c - a)
    squared = wp.length_sq(normal)
    toward_c = wp.dot(wp.cross(b - a, point - a), normal)
    toward_b = wp.dot(wp.cross(point - a, c - a), normal)
    if squared > zero and toward_b >= zero and toward_c >= zero and toward_b + toward_c <= squared:
        height = wp.dot(point - a, normal)
        nearest = wp.min(nearest, height * height / squared)
    return nearest


@wp.kernel
def _distance_kernel(
    triangles: wp.uint64,
    boxes: wp.uint64,
    corners: wp.array2d(dtype=wp.vec3d),
    points: wp.array(dtype=wp.vec3),
    distances: wp.array(dtype=wp.float32),
):
    i = wp.tid()
    point = wp.vec3d(points[i])
    face = int(0)  # noqa: UP018, RUF046  a variable to Warp, where a literal is a constant
    query = wp.mesh_query_point_no_sign(triangles, points[i], 1.0e6)
    if query.result:
        face = query.face
    nearest = _triangle_squared(corners[face, 0], corners[face, 1], corners[face, 2], point)
    # The radius is enlarged by more than the rounding errors of the radius and of the boxes.
    candidates = wp.bvh_query_sphere(boxes, points[i], wp.float32(wp.sqrt(nearest)) * 1.00001 + 1.0e-6)
    while wp.bvh_query_next(candidates, face):
        nearest = wp.min(
            nearest, _triangle_squared(corners[face, 0], corners[face, 1], corners[face, 2], point)
        )
    distances[i] = wp.float32(wp.sqrt(nearest))
