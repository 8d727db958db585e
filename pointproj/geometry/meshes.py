"""Triangle meshes, and the query cube that they are normalised into."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

DEFAULT_SIDE, GPU_SIDE = 64, 160
"""Points a side of the grid that surfaces are extracted from, on a CPU and on a GPU.

With 128 points, a thin board can lie between two nodes and be lost. With 160 points, that happened to none of
the shapes of ModelNet10 that were checked."""

LONGEST_SIDE = 1.8
"""Longest side of a normalised mesh: the query cube [-1, 1]^3 keeps a margin of 0.1 around every shape."""

SMALLEST_AREA = 1e-12
"""Smallest area of a face that counts as surface, in the units of a normalised mesh."""


class MeshError(ValueError):
    """A mesh cannot be used; names its file, or the mesh if it has no file, and the reason."""

    def __init__(self, source: str | Path, reason: str) -> None:
        super().__init__(str(source), reason)
        self.source = str(source)
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.source}: {self.reason}"


@dataclass(frozen=True, eq=False)
class Mesh:
    """A triangle surface, in the units of its file, or those of the query cube after :func:`normalize`.

    Attributes
    ----------
    vertices : float64 array, shape (V, 3)
    faces : int64 array, shape (F, 3)
        Vertex indices. Orientation, duplicates and degenerate faces are as the file has them.
    name : str
        Stem of the file, used in reports.

    Raises
    ------
    MeshError
        If an array has another shape, or a face names a vertex that does not exist.
    """

    vertices: Float[np.ndarray, "V 3"]
    faces: Int[np.ndarray, "F 3"]
    name: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "vertices", np.ascontiguousarray(self.vertices, dtype=np.float64))
        object.__setattr__(self, "faces", np.ascontiguousarray(self.faces, dtype=np.int64))
        for label, array in (("vertices", self.vertices), ("faces", self.faces)):
            if array.ndim != 2 or array.shape[1] != 3:
                raise MeshError(self.name, f"{label} must have shape (n, 3), got {array.shape}")
        if self.faces.size and not 0 <= self.faces.min() <= self.faces.max() < len(self.vertices):
            raise MeshError(self.name, f"a face names a vertex outside 0 to {len(self.vertices) - 1}")

    @cached_property
    def _normalized(self) -> "Mesh":
        if not len(self.faces):
            raise MeshError(self.name, "has no faces, so there is nothing to normalise")
        used = self.vertices[self.faces]
        # Coordinates are halved first, so that no sum of two large ones overflows.
        low, high = used.min(axis=(0, 1)) / 2, used.max(axis=(0, 1)) / 2
        half_side = float((high - low).max())
        if not half_side > 0:
            raise MeshError(self.name, "has no extent: all its faces lie in one point")
        with np.errstate(over="ignore"):  # only vertices that no face uses can overflow
            vertices = (self.vertices - (low + high)) / half_side * (LONGEST_SIDE / 2)
        return Mesh(vertices, self.faces, self.name)


def normalize(mesh: Mesh) -> Mesh:
    """Move and scale a mesh into the query cube [-1, 1]^3.

    The centre of the bounding box moves to the origin, and its longest side becomes :data:`LONGEST_SIDE`. The
    bounding box is that of the surface: vertices that no face uses are ignored. The result is stored with the
    mesh, so that it is computed once.

    Raises
    ------
    MeshError
        If the mesh has no face, or all its faces lie in one point.
    """
    return mesh._normalized


def face_areas(mesh: Mesh) -> Float[np.ndarray, " F"]:
    """Return the area of each face, float64, in squares of the mesh's units."""
    a, b, c = np.moveaxis(mesh.vertices[mesh.faces], 1, 0)
    return np.sqrt((np.cross(b - a, c - b) ** 2).sum(axis=1)) / 2


def piece_volumes(mesh: Mesh) -> Float[np.ndarray, " pieces"]:
    """Return the volume of each connected surface of a mesh, largest first; that of a cavity is negative."""
    corners, faces = mesh.vertices[mesh.faces].astype(np.float64), mesh.faces
    volumes = np.einsum("fi,fi->f", corners[:, 0], np.cross(corners[:, 1], corners[:, 2])) / 6
    ends = faces[:, :2].T.ravel(), faces[:, 1:].T.ravel()
    edges = coo_array((np.ones(len(ends[0])), ends), shape=[len(mesh.vertices)] * 2)
    _, labels = connected_components(edges, directed=False)
    _, pieces = np.unique(labels[faces[:, 0]], return_inverse=True)
    return np.sort(np.bincount(pieces, volumes))[::-1]


def query_grid(side: int) -> Float[np.ndarray, "n 3"]:
    """Return the nodes of the regular grid over the query cube [-1, 1]^3, corners included, float32.

    Among them x changes slowest and z fastest: ``reshape(side, side, side, 3)`` is indexed by x, y, z. Raises
    ValueError if ``side`` is below 2.
    """
    if side < 2:
        raise ValueError(f"expected a grid of at least 2 points a side, got {side}: raise data.grid")
    axis = np.linspace(-1.0, 1.0, side, dtype=np.float32)
    return np.stack(np.meshgrid(axis, axis, axis, indexing="ij"), axis=-1).reshape(-1, 3)


def along_curve(points: Float[np.ndarray, "Q 3"]) -> Int[np.ndarray, " Q"]:
    """Return an order in which successive points are near each other: Morton order of cells of width 1/16.

    Points outside of the query cube belong to its outermost cells.
    """
    number = np.arange(32)
    spaced = sum(((number >> bit) & 1) << (3 * bit) for bit in range(5)).astype(np.uint16)
    x, y, z = ((points.clip(-1, 1) + 1) * 16).astype(np.int32).clip(0, 31).T
    return np.argsort(spaced[x] | spaced[y] << 1 | spaced[z] << 2, kind="stable")
