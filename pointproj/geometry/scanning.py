"""Scans of a mesh: points that cameras see from outside.

As in Sulzer et al., Deep surface reconstruction from point clouds with visibility information, 2022, ten
cameras stand around a shape at random places, and all have equally many rays. A ray goes to a random point of
the surface, chosen by area, and ends at the first face that it hits. So surface that no camera sees has no
points, and the orientation of a face makes no difference. Scanners know their position, so each point comes
with the direction to its camera.
"""

import numpy as np
import warp as wp
from jaxtyping import Float

from pointproj.geometry.meshes import Mesh
from pointproj.geometry.sampling import SurfaceSampler
from pointproj.geometry.warp_meshes import on_device, search_mesh

wp.set_module_options({"enable_backward": False, "fuse_fp": False})

CAMERAS = 10

CAMERA_DISTANCE = 3.0
"""Distance of cameras from the centre of the query cube, whose corners are at 1.73."""


@wp.struct
class Seen:
    """The point that a ray hits."""

    point: wp.vec3f
    normal: wp.vec3f
    sensor: wp.vec3f  # direction to the camera


@wp.func
def first_seen(mesh: wp.uint64, camera: wp.vec3f, target: wp.vec3f, normal: wp.vec3f) -> Seen:
    """Return the first point of a mesh from a camera to a target on it; ``normal`` is the target's."""
    seen = Seen()
    seen.point = target
    seen.normal = normal
    seen.sensor = wp.normalize(camera - target)
    hit = wp.mesh_query_ray(mesh, camera, -seen.sensor, wp.length(target - camera))
    if hit.result:  # if not, the ray ended before the target, due to rounding
        seen.point = wp.mesh_eval_position(mesh, hit.face, hit.u, hit.v)
        seen.normal = hit.normal
    return seen


@wp.kernel
def _scan_kernel(
    mesh: wp.uint64,
    cameras: wp.array(dtype=wp.vec3f),
    targets: wp.array(dtype=wp.vec3f),
    target_normals: wp.array(dtype=wp.vec3f),
    points: wp.array(dtype=wp.vec3f),
    normals: wp.array(dtype=wp.vec3f),
    sensors: wp.array(dtype=wp.vec3f),
):
    i = wp.tid()
    seen = first_seen(mesh, cameras[i % cameras.shape[0]], targets[i], target_normals[i])
    points[i] = seen.point
    normals[i] = seen.normal
    sensors[i] = seen.sensor


def scan(
    sampler: SurfaceSampler, count: int, generator: np.random.Generator
) -> tuple[Float[np.ndarray, "n 3"], Float[np.ndarray, "n 3"], Float[np.ndarray, "n 3"]]:
    """Scan a normalised mesh from cameras around it.

    The same state of the generator gives the same points.

    Returns
    -------
    points, normals, sensors : float32 arrays, shape (count, 3)
        Points; unit normals of their faces, with the sign of the orientation; unit vectors to the cameras.
    """
    directions = generator.standard_normal((CAMERAS, 3))
    cameras = CAMERA_DISTANCE * directions / np.linalg.norm(directions, axis=1, keepdims=True)
    targets, normals = sampler.draw(count, generator)
    with on_device("cpu"):
        mesh = search_mesh(Mesh(sampler.vertices, sampler.faces, "scanned"))
        arrays = [
            wp.array(values.astype(np.float32), dtype=wp.vec3f) for values in (cameras, targets, normals)
        ]
        made = [wp.empty(count, dtype=wp.vec3f) for _ in range(3)]
        wp.launch(_scan_kernel, count, inputs=[mesh.id, *arrays], outputs=made)
        points, normals, sensors = (array.numpy() for array in made)
    return points, normals, sensors
