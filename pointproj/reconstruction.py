"""From a field to a solid: ask it on a dense grid, in parts, and extract the surface.

A field is anything that tells for points of the query cube a number below 0 inside and above 0 outside.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import warp as wp
from jaxtyping import Bool, Float
from scipy.interpolate import RegularGridInterpolator
from warp.geometry import IsoSurfaceMarchingCubes

from pointproj.meshes import Mesh

wp.config.log_level = max(wp.config.log_level, wp.LOG_WARNING)  # standard output is for results

Field = Callable[[Float[np.ndarray, "Q 3"]], Float[np.ndarray, " Q"]]
Inside = Callable[[Float[np.ndarray, "Q 3"]], Bool[np.ndarray, " Q"]]

CHUNK = 1 << 16
"""Points asked at once: what a dense grid needs beside its result does not grow with its side."""

DEFAULT_SIDE = 64


@dataclass(frozen=True)
class Reconstruction:
    """A solid made from a cloud.

    Attributes
    ----------
    mesh : Mesh
        Its surface in the query cube, closed, faces oriented outwards; without faces if it is empty.
    inside : callable
        Points (Q, 3) of the query cube to bool (Q,).
    """

    mesh: Mesh
    inside: Inside


def reconstruct(field: Field, name: str, side: int = DEFAULT_SIDE, *, device: str = "cpu") -> Reconstruction:
    """Make the solid where a field is below 0.

    Parameters
    ----------
    field : callable
        Float32 points (Q, 3) of the query cube to values (Q,), in an order of magnitude that allows linear
        interpolation near 0.
    name : str
        Of the mesh.
    side : int
        Points a side of the grid that the surface is extracted from. The side of a point is asked of the
        field itself.
    device : str
        Where Warp extracts the surface.

    Returns
    -------
    Reconstruction
    """
    mesh = extract_surface(dense_values(field, side), name, device=device)
    return Reconstruction(mesh, lambda points: in_parts(field, points) < 0)


def in_parts(field: Field, points: Float[np.ndarray, "Q 3"], chunk: int = CHUNK) -> Float[np.ndarray, " Q"]:
    """Evaluate a field at any number of points, ``chunk`` at a time."""
    values = np.empty(len(points), dtype=np.float32)
    for start in range(0, len(points), chunk):
        values[start : start + chunk] = field(np.ascontiguousarray(points[start : start + chunk], np.float32))
    return values


def dense_values(field: Field, side: int, chunk: int = CHUNK) -> Float[np.ndarray, "side side side"]:
    """Evaluate a field on the regular grid on the query cube, corners included.

    Points are made and asked ``chunk`` at a time, so that memory is bounded by the result and one part.

    Parameters
    ----------
    field : callable
    side : int
        Points along each axis, at least 2.
    chunk : int

    Returns
    -------
    float32 array, shape (side, side, side)
        Indexed by x, y, z.

    Raises
    ------
    ValueError
        If ``side`` is below 2.
    """
    if side < 2:
        raise ValueError(f"expected a grid of at least 2 points a side, got {side}")
    axis = np.linspace(-1.0, 1.0, side, dtype=np.float32)
    values = np.empty(side**3, dtype=np.float32)
    for start in range(0, len(values), chunk):
        places = np.arange(start, min(start + chunk, len(values)))
        points = np.stack([axis[index] for index in np.unravel_index(places, (side,) * 3)], axis=-1)
        values[start : start + chunk] = field(points)
    return values.reshape(side, side, side)


def extract_surface(values: Float[np.ndarray, "nx ny nz"], name: str, *, device: str = "cpu") -> Mesh:
    """Extract the surface where a field on the query cube passes through 0, by marching cubes.

    Parameters
    ----------
    values : float32 array, shape (nx, ny, nz)
        On a regular grid on the cube, corners included; below 0 inside. What is inside on the boundary is
        closed there.
    name : str
        Of the mesh.
    device : str
        Where Warp runs.

    Returns
    -------
    Mesh
        Closed, oriented outwards; without faces if nothing is inside.
    """
    closed = np.array(values, dtype=np.float32)
    outside = np.float32(max(np.abs(closed).max(), 1e-6))
    for axis in range(3):
        ends = np.moveaxis(closed, axis, 0)
        ends[0] = np.where(ends[0] < 0, outside, ends[0])
        ends[-1] = np.where(ends[-1] < 0, outside, ends[-1])
    corner = wp.vec3(1.0, 1.0, 1.0)
    with wp.ScopedDevice(device):
        lattice = wp.array(closed, dtype=wp.float32)
        vertices, indices = IsoSurfaceMarchingCubes.extract(lattice, 0.0, lower=-corner, upper=corner)
        faces = indices.numpy().reshape(-1, 3)
        return Mesh(vertices.numpy().reshape(-1, 3), faces, name)


def grid_field(values: Float[np.ndarray, "side side side"]) -> Field:
    """Return the field that interpolates linearly between values on a grid over the query cube."""
    axes = [np.linspace(-1.0, 1.0, length) for length in values.shape]
    return RegularGridInterpolator(axes, values)
