"""The truth as in the literature on reconstruction from scans: the interior of a watertight copy of a mesh.

Sulzer et al. (2022) make such copies with ManifoldPlus. Here, alpha wrapping (Portaneri et al., SIGGRAPH
2022) makes them, from CGAL through PyMeshLab: a closed surface around all faces, which enters holes wider
than ``ALPHA``.
"""

import numpy as np

from pointproj.geometry.baselines import BaselineUnavailable, baselines, winds_around
from pointproj.geometry.fields import NoInterior
from pointproj.geometry.meshes import Mesh, query_grid
from pointproj.geometry.metrics import SAMPLES, Truth
from pointproj.geometry.sampling import sample_surface

ALPHA, OFFSET = 1.0, 0.1
"""Width of the smallest hole that is entered, and distance of the surface from the faces, both in percent of
the diagonal of the mesh's bounding box."""


def require_alpha_wrap() -> None:
    """Raise :class:`BaselineUnavailable` if PyMeshLab cannot be imported."""
    reason = baselines()["poisson"]
    if reason is not None:
        raise BaselineUnavailable(f"watertight meshes: {reason}")


def alpha_wrap(mesh: Mesh) -> Mesh:
    """Return a closed surface around a mesh, oriented outwards."""
    import pymeshlab

    workspace = pymeshlab.MeshSet(verbose=False)
    workspace.add_mesh(pymeshlab.Mesh(vertex_matrix=mesh.vertices, face_matrix=mesh.faces.astype(np.int32)))
    alpha, offset = (pymeshlab.PercentageValue(share) for share in (ALPHA, OFFSET))
    workspace.generate_alpha_wrap(alpha=alpha, offset=offset)
    made = workspace.current_mesh()
    return Mesh(made.vertex_matrix(), made.face_matrix(), mesh.name)


def watertight_truth(mesh: Mesh, grid: int, *, device: str = "cpu") -> Truth:
    """Return the truth of :func:`pointproj.geometry.metrics.truth_of` about the watertight copy of a mesh."""
    solid = alpha_wrap(mesh)
    grid_inside = winds_around(solid, device, query_grid(grid))
    if not grid_inside.any():
        raise NoInterior(mesh.name, f"its watertight copy encloses no point of the grid of {grid} a side")
    generator = np.random.default_rng(0)
    points = generator.uniform(-1, 1, (SAMPLES, 3)).astype(np.float32)
    surface = sample_surface(solid, SAMPLES, generator)
    return Truth(solid, grid_inside, points, winds_around(solid, device, points), surface)
