"""From a field to a solid: evaluate it on a grid, extract the surface, move vertices to the field's zero."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import warp as wp
from jaxtyping import Bool, Float
from scipy.spatial import cKDTree
from warp.geometry import IsoSurfaceMarchingCubes

from pointproj.geometry.grids import Field, dense_values, evaluate, values_near
from pointproj.geometry.meshes import DEFAULT_SIDE, Mesh, MeshError
from pointproj.geometry.warp_meshes import on_device

Inside = Callable[[Float[np.ndarray, "Q 3"]], Bool[np.ndarray, " Q"]]

MOST_CHOSEN = 160  # points a side, by :func:`side_for`: a user may name more
CELLS_A_SPACING = 2  # of the grid: solids may be as thin as the distance between samples

HALVINGS = 5  # of a vertex's edge: the field's zero is found to 1/64 of a cell


@dataclass(frozen=True)
class Reconstruction:
    """A solid reconstructed from a cloud.

    ``mesh`` is its surface in the query cube: closed, with faces oriented outwards, or without faces if the
    solid is empty. ``inside`` maps points (Q, 3) of the query cube to bool (Q,).
    """

    mesh: Mesh
    inside: Inside


def side_for(cloud: Float[np.ndarray, "n 3"], least: int = DEFAULT_SIDE) -> int:
    """Return how many points a side a grid needs for what the cloud's points show, at least ``least``.

    A cell is at most half of the points' spacing, up to :data:`MOST_CHOSEN` points a side. The spacing is the
    side of the square that each point has for itself: if n points lie evenly or at random on an area A, a
    circle of radius r holds n pi r^2 / A of them.
    """
    neighbors = min(6, len(cloud) - 1)
    if neighbors < 1:
        return least
    radius = np.median(cKDTree(cloud).query(cloud, k=[neighbors + 1])[0])
    spacing = radius * np.sqrt(np.pi / neighbors)
    if not spacing > 0:  # most points coincide
        return least
    return max(least, min(MOST_CHOSEN, 1 + int(np.ceil(2 * CELLS_A_SPACING / spacing))))


def reconstruct(
    field: Field,
    name: str,
    side: int = DEFAULT_SIDE,
    *,
    cloud: Float[np.ndarray, "n 3"] | None = None,
    linear: bool = False,
    device: str = "cpu",
) -> Reconstruction:
    """Reconstruct the solid where a field is below 0.

    Parameters
    ----------
    field : callable
        Maps float32 points (Q, 3) of the query cube to values (Q,).
    name : str
        Name of the mesh.
    side : int
        Points a side of the grid that the surface is extracted from.
    cloud : float array, shape (n, 3), optional
        Samples that the field was made from. With these, the field is evaluated near them and near surfaces
        that a coarser grid finds (:func:`pointproj.geometry.grids.values_near`), otherwise on the whole grid.
    linear : bool
        Whether the field is linear along the edges of the grid, so that the extracted vertices are exact. If
        not, the field is evaluated further to find where the surface crosses the edges.
    device : str
        Where Warp extracts the surface.

    Raises
    ------
    MeshError
        If the field is not finite everywhere on the grid.
    """
    values = dense_values(field, side) if cloud is None else values_near(field, side, cloud)
    wrong = np.count_nonzero(~np.isfinite(values))
    if wrong:
        raise MeshError(
            name,
            f"the field is NaN or infinite at {wrong:,} of {values.size:,} points of the grid: no surface "
            "follows from it; look for points far away or normals that are not finite, or take another model",
        )
    mesh = extract_surface(values, name, device=device)
    if not linear and len(mesh.faces):
        mesh = Mesh(refine_vertices(field, mesh.vertices, values), mesh.faces, name)
    return Reconstruction(mesh, lambda points: evaluate(field, points) < 0)


def extract_surface(values: Float[np.ndarray, "nx ny nz"], name: str, *, device: str = "cpu") -> Mesh:
    """Extract the surface where a field on the query cube passes through 0, by marching cubes.

    ``values`` are those at the nodes of a regular grid over the cube, corners included, and below 0 inside.
    Nodes on the boundary of the cube count as outside, so the mesh is always closed. It is oriented outwards,
    and has no faces if nothing is inside.
    """
    closed = np.array(values, dtype=np.float32)
    boundary = np.ones(closed.shape, dtype=bool)
    boundary[1:-1, 1:-1, 1:-1] = False
    closed[boundary & (closed < 0)] = max(np.abs(closed).max(), 1e-6)
    corner = wp.vec3(1.0, 1.0, 1.0)
    with on_device(device):
        grid = wp.array(closed, dtype=wp.float32)
        vertices, indices = IsoSurfaceMarchingCubes.extract(grid, 0.0, lower=-corner, upper=corner)
        faces = indices.numpy().reshape(-1, 3)
        return Mesh(vertices.numpy().reshape(-1, 3), faces, name)


def refine_vertices(
    field: Field, vertices: Float[np.ndarray, "V 3"], values: Float[np.ndarray, "side side side"]
) -> Float[np.ndarray, "V 3"]:
    """Move vertices of :func:`extract_surface` along their edges to where the field itself passes through 0.

    Predictions of a network are far from linear across a cell, so linear interpolation leaves steps.
    ``values`` are the field on the grid. Vertices between nodes of equal sign stay; there are such at the
    cube's boundary.
    """
    half = (len(values) - 1) / 2
    place = (vertices + 1) * half
    low = np.rint(place).astype(int)
    rows, along = np.arange(len(place)), np.abs(place - low).argmax(axis=1)
    low[rows, along] = np.floor(place[rows, along]).clip(0, len(values) - 2)
    high = low.copy()
    high[rows, along] += 1
    low_inside, high_inside = (values[tuple(ends.T)] < 0 for ends in (low, high))
    inside = np.where(low_inside[:, None], low, high) / half - 1
    outside = np.where(low_inside[:, None], high, low) / half - 1
    for _ in range(HALVINGS):
        middle = (inside + outside) / 2
        is_inside = (evaluate(field, middle) < 0)[:, None]
        inside, outside = np.where(is_inside, middle, inside), np.where(is_inside, outside, middle)
    crosses = (low_inside != high_inside)[:, None]
    return np.where(crosses, (inside + outside) / 2, vertices).astype(np.float32)
