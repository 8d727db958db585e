"""Reconstructions that need no training, to compare trained models with.

``flood``: the distance to the nearest sample, with a sign by flood fill. ``poisson``: screened Poisson
surface reconstruction (Kazhdan and Hoppe, 2013), from PyMeshLab, the extra "baselines".
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import warp as wp
from jaxtyping import Bool, Float
from scipy import ndimage
from scipy.spatial import cKDTree

from pointproj.geometry.grids import evaluate, grid_field, hole_radius
from pointproj.geometry.isosurfaces import Reconstruction, reconstruct
from pointproj.geometry.meshes import Mesh
from pointproj.geometry.warp_meshes import on_device

Points = Float[np.ndarray, "n 3"]
Baseline = Callable[[Points], Reconstruction]

FLOOD_SIDE = 96
"""Nodes along each side of the flooded lattice."""

NORMAL_NEIGHBORS = 12
POISSON_DEPTH = 7
"""Depth of the octree: cells of 1/128 of the cloud's extent."""


class BaselineUnavailable(RuntimeError):  # noqa: N818 - named as BackendUnavailable
    """A baseline's package is missing; the message holds the command that installs it."""


def baselines() -> dict[str, str | None]:
    """Return all baselines by name, each with None if it can run here, else with a sentence that says why."""
    reason = None
    try:
        import pymeshlab  # noqa: F401
    except (ImportError, OSError) as error:
        reason = f'pymeshlab cannot be imported ({error}); pip install -e ".[baselines]"'
    return {"flood": None, "poisson": reason}


def baseline(name: str, device: str = "cpu") -> Baseline:
    """Return a baseline: a callable from points (n, 3) in the query cube to their reconstruction.

    ``name`` is a key of :func:`baselines`; Warp extracts surfaces and evaluates winding numbers on
    ``device``.

    Raises
    ------
    ValueError
        For an unknown name.
    BaselineUnavailable
        If its package is missing.
    """
    known = baselines()
    if name not in known:
        raise ValueError(f"expected a baseline of {', '.join(known)}; got {name!r}")
    if known[name] is not None:
        raise BaselineUnavailable(f"baseline {name}: {known[name]}")
    method = {"flood": flood_reconstruction, "poisson": poisson_reconstruction}[name]
    return partial(method, device=device)


def flood_reconstruction(points: Points, *, device: str = "cpu") -> Reconstruction:
    """Reconstruct from the distance to the nearest sample, with a sign from a flood fill."""
    values = flooded_distance(points)
    return reconstruct(grid_field(values), "flood", FLOOD_SIDE, linear=True, device=device)


def flooded_distance(points: Points, side: int = FLOOD_SIDE) -> Float[np.ndarray, "side side side"]:
    """Return the distance to the nearest sample, negative where a flood fill from outside does not come.

    The fill of a lattice stops at walls around the samples, which are thick enough to close the holes between
    the samples (:func:`pointproj.geometry.grids.hole_radius`). Then the flooded part grows by the thickness
    of the walls, so that the surface passes through the samples. Float32, in units of the query cube, on the
    regular grid over the query cube.
    """
    axis = np.linspace(-1.0, 1.0, side)
    nodes = np.stack(np.meshgrid(axis, axis, axis, indexing="ij"), axis=-1).reshape(-1, 3)
    cell = axis[1] - axis[0]
    wall = max(hole_radius(points), cell)
    distance = cKDTree(points).query(nodes)[0].reshape(side, side, side)
    labels, _ = ndimage.label(np.pad(distance > wall, 1, constant_values=True))
    flooded = (labels == labels[0, 0, 0])[1:-1, 1:-1, 1:-1]
    outside = ndimage.distance_transform_edt(~flooded, sampling=cell) < wall
    return np.where(outside, distance, -distance).astype(np.float32)


def oriented_normals(points: Points) -> Points:
    """Return normals of planes fitted to each point's neighbours; they point to the flooded side."""
    _, rows = cKDTree(points).query(points, k=min(NORMAL_NEIGHBORS, len(points)))
    around = points[rows] - points[rows].mean(axis=1, keepdims=True)
    _, axes = np.linalg.eigh(np.einsum("nki,nkj->nij", around, around))
    normals = axes[:, :, 0]
    field = grid_field(flooded_distance(points))
    step = 4.0 / FLOOD_SIDE
    ahead, behind = (evaluate(field, np.clip(points + sign * step * normals, -1, 1)) for sign in (1, -1))
    return np.where((ahead < behind)[:, None], -normals, normals)


def poisson_reconstruction(points: Points, *, device: str = "cpu") -> Reconstruction:
    """Reconstruct by screened Poisson, from normals oriented by the flood fill."""
    import pymeshlab

    cloud = pymeshlab.Mesh(
        vertex_matrix=np.asarray(points, np.float64), v_normals_matrix=oriented_normals(points)
    )
    workspace = pymeshlab.MeshSet(verbose=False)
    workspace.add_mesh(cloud)
    workspace.generate_surface_reconstruction_screened_poisson(depth=POISSON_DEPTH, threads=1)
    made = workspace.current_mesh()
    mesh = Mesh(made.vertex_matrix(), made.face_matrix(), "poisson")
    return Reconstruction(mesh, partial(winds_around, mesh, device))


def winds_around(mesh: Mesh, device: str, points: Points) -> Bool[np.ndarray, " n"]:
    """Return whether the surface winds around each point; the surface may be open at the solver's box."""
    if not len(mesh.faces):
        return np.zeros(len(points), dtype=bool)
    with on_device(device):
        triangles = wp.Mesh(
            points=wp.array(mesh.vertices, dtype=wp.vec3),
            indices=wp.array(mesh.faces.reshape(-1), dtype=wp.int32),
            support_winding_number=True,
        )
        inside = wp.empty(len(points), dtype=wp.uint8)
        queries = wp.array(np.ascontiguousarray(points, dtype=np.float32), dtype=wp.vec3)
        wp.launch(_winding_kernel, len(points), inputs=[triangles.id, queries], outputs=[inside])
        return inside.numpy().astype(bool)


@wp.kernel
def _winding_kernel(triangles: wp.uint64, points: wp.array(dtype=wp.vec3), inside: wp.array(dtype=wp.uint8)):
    i = wp.tid()
    query = wp.mesh_query_point_sign_winding_number(triangles, points[i], 10.0)
    inside[i] = wp.uint8(query.result and query.sign < 0.0)
