"""Target fields at any points of the query cube."""

import numpy as np
import warp as wp
from jaxtyping import Bool, Float

from pointproj.geometry.fields import FLOOD_SIDE, Kind, inside_lattice, unsigned_distance
from pointproj.geometry.meshes import Mesh

# Corners of a cell as bits of their axes, by distance from the first.
_CORNERS = np.array([0b000, 0b001, 0b010, 0b100, 0b011, 0b101, 0b110, 0b111], dtype=np.int32)


def field_at(
    mesh: Mesh, points: Float[np.ndarray, "Q 3"], kind: Kind, *, device: str = "cpu"
) -> Float[np.ndarray, " Q"]:
    """Evaluate a target at any points of the query cube.

    Parameters
    ----------
    mesh : Mesh
        Normalised.
    points : float32 array, shape (Q, 3)
    kind : {"udf", "sdf", "occupancy"}
        As for :func:`pointproj.geometry.fields.target_field`.
    device : str
        Where Warp runs.

    Returns
    -------
    float32 array, shape (Q,)
    """
    if kind == "udf":
        return unsigned_distance(mesh, points, device=device)
    enclosed = inside_at(mesh, points, device=device)
    if kind == "occupancy":
        return enclosed.astype(np.float32)
    distance = unsigned_distance(mesh, points, device=device)
    return np.where(enclosed, -distance, distance)


def inside_at(mesh: Mesh, points: Float[np.ndarray, "Q 3"], *, device: str = "cpu") -> Bool[np.ndarray, " Q"]:
    """Tell which points cannot be reached from outside: see :func:`pointproj.geometry.fields.inside`.

    A point is on the side of the nearest node of the flooded lattice that it sees, among the eight about it.
    One that sees none of them lies between sheets that are closer than the lattice's nodes (2 / 116), and
    is inside.

    Parameters
    ----------
    mesh : Mesh
        Normalised.
    points : float32 array, shape (Q, 3)
        In the query cube.
    device : str
        Where Warp runs.

    Returns
    -------
    bool array, shape (Q,)
    """
    dry = inside_lattice(mesh, FLOOD_SIDE, device=device)
    corners = mesh.vertices[mesh.faces]
    with wp.ScopedDevice(device):
        search_mesh = wp.Mesh(
            points=wp.array(corners.reshape(-1, 3).astype(np.float32), dtype=wp.vec3),
            indices=wp.array(np.arange(corners.shape[0] * 3, dtype=np.int32), dtype=wp.int32),
        )
        enclosed = wp.empty(len(points), dtype=wp.uint8)
        wp.launch(
            _side_kernel,
            dim=len(points),
            inputs=[
                search_mesh.id,
                wp.array(dry.astype(np.uint8), dtype=wp.uint8),
                wp.array(_CORNERS, dtype=wp.int32),
                wp.array(np.ascontiguousarray(points, dtype=np.float32), dtype=wp.vec3),
            ],
            outputs=[enclosed],
        )
        return enclosed.numpy().astype(bool)


@wp.kernel
def _side_kernel(
    search_mesh: wp.uint64,
    dry: wp.array3d(dtype=wp.uint8),
    corners: wp.array(dtype=wp.int32),
    points: wp.array(dtype=wp.vec3),
    enclosed: wp.array(dtype=wp.uint8),
):
    """Ask the corners of the point's cell, the nearest first, until one is in sight."""
    i = wp.tid()
    point = points[i]
    last = dry.shape[0] - 1
    spacing = 2.0 / float(last)
    beyond = 0.01 * spacing  # a node on the surface tells nothing: the ray ends behind it
    place = (point + wp.vec3(1.0, 1.0, 1.0)) / spacing
    low = wp.vec3i(0, 0, 0)
    near = int(0)  # noqa: UP018, RUF046  a variable to Warp, where a literal is a constant
    for axis in range(3):
        low[axis] = wp.clamp(int(wp.floor(place[axis])), 0, last - 1)
        if place[axis] - float(low[axis]) > 0.5:
            near = near | (1 << axis)
    answer = int(2)  # noqa: UP018, RUF046
    for order in range(8):
        if answer == 2:
            corner = near ^ corners[order]
            x = low[0] + (corner & 1)
            y = low[1] + ((corner >> 1) & 1)
            z = low[2] + ((corner >> 2) & 1)
            node = wp.vec3(float(x), float(y), float(z)) * spacing - wp.vec3(1.0, 1.0, 1.0)
            toward = node - point
            reach = wp.length(toward)
            blocked = bool(False)  # noqa: UP018
            if reach > 0.0:
                blocked = wp.mesh_query_ray(search_mesh, point, toward / reach, reach + beyond).result
            if not blocked:
                answer = int(dry[x, y, z])
    enclosed[i] = wp.uint8(wp.min(answer, 1))
