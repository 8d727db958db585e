"""Clouds from files of any kind: sampled from a mesh, or read as points.

Meshes have the formats of :mod:`pointproj.geometry.files`. Points are in PLY, OBJ and glTF files without
faces; in XYZ, TXT, CSV and PTS files (text, one point a line); in NPY and NPZ files (arrays); or in LAS, LAZ,
PCD and E57 files (scans).
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int

from pointproj import notebook
from pointproj.geometry.files import (
    MESH_SUFFIXES,
    arrays,
    parse,
    ply,
    read_content,
    require_file,
    scans,
    surface,
    tables,
    understood,
)
from pointproj.geometry.files.scans import missing_packages
from pointproj.geometry.files.text import Content
from pointproj.geometry.meshes import LONGEST_SIDE, Mesh, MeshError
from pointproj.geometry.sampling import SurfaceSampler, random_subset

log = logging.getLogger(__name__)

Sample = Callable[
    [SurfaceSampler, int, np.random.Generator], tuple[Float[np.ndarray, "n 3"], Float[np.ndarray, "n 3"]]
]

Thin = Callable[[Float[np.ndarray, "n 3"], int, np.random.Generator], Int[np.ndarray, " count"]]

LARGEST_SCAN_BYTES = 1 << 32
"""Larger files of scans are refused."""

FLATTEST = 1e-3
"""A cloud whose thinnest direction is below this share of its longest is planar."""


@dataclass(frozen=True)
class Placement:
    """How coordinates of the query cube become those of a file: ``file = cube * scale + centre``."""

    centre: Float[np.ndarray, " 3"]
    scale: float

    def to_cube(self, points: Float[np.ndarray, "n 3"]) -> Float[np.ndarray, "n 3"]:
        """Move points from the file's coordinates into the query cube."""
        return (points - self.centre) / self.scale

    def to_file(self, mesh: Mesh) -> Mesh:
        """Move a mesh from the query cube back to the file's coordinates."""
        return Mesh(mesh.vertices * self.scale + self.centre, mesh.faces, mesh.name)


@dataclass(frozen=True)
class Cloud:
    """A cloud in the query cube.

    ``name`` is the stem of its file, and ``placement`` leads back to the coordinates of the file. Normals
    have unit length; those of a mesh's faces have arbitrary sign. Sensors are unit vectors from the points to
    the sensors that saw them. Arrays are float32.
    """

    name: str
    points: Float[np.ndarray, "n 3"]
    normals: Float[np.ndarray, "n 3"] | None
    placement: Placement
    sensors: Float[np.ndarray, "n 3"] | None = None

    def _repr_html_(self) -> str:
        """A table and a picture for notebooks."""
        known = {"normals": self.normals is not None, "sensors": self.sensors is not None}
        facts = {"points": len(self.points), **known, "scale": float(self.placement.scale)}
        return notebook.table(self.name, facts, notebook.drawing(self.points))


def read_cloud(
    path: str | Path,
    count: int,
    *,
    most: int | None = None,
    seed: int = 0,
    sample: Sample = SurfaceSampler.draw,
    thin: Thin = random_subset,
    sensors: str | Path | None = None,
    content: Content | None = None,
) -> Cloud:
    """Read a file as a cloud, moved and scaled into the query cube like the training shapes.

    Parameters
    ----------
    path : str or Path
        The suffix tells the format: one of :data:`SUFFIXES`.
    count : int
        Points to sample from a mesh.
    most : int, optional
        Most points of a cloud; of a larger cloud so many are chosen. By default ``count``.
    seed : int
        Seed of sampling and choice.
    sample : callable
        Samples a mesh, given its sampler, the number of points and a random generator; uniformly by default.
    thin : callable
        Chooses rows of a larger cloud, given its points in the query cube, the number of rows, and a
        generator.
    sensors : path, optional
        File with the positions of the sensors that saw the points, in the coordinates of the cloud: one row
        for each point, or one row for all.
    content : Content, optional
        What the file holds, if it is read already; then any suffix is good.

    Raises
    ------
    MeshError
        If the file cannot be read, has no known suffix or is damaged; if it has no points, or points that are
        not finite; or if all points lie in one place, on a line or in a plane, since such clouds have no
        inside.
    """
    path = Path(path)
    if content is None and path.suffix.lower() not in SUFFIXES:
        raise MeshError(path, f"is of an unknown kind: expected {', '.join(SUFFIXES)}, got {path.suffix!r}")
    generator = np.random.default_rng(seed)
    content = _read(path) if content is None else content
    if len(content.faces) or path.suffix.lower() not in POINT_SUFFIXES:
        if sensors is not None:
            raise MeshError(path, "is a mesh, which no sensor has seen: leave the sensors out")
        mesh = surface(content, path)
        used = mesh.vertices[mesh.faces].reshape(-1, 3)
        placement = _checked_placement(used, path)
        sampler = SurfaceSampler(placement.to_cube(mesh.vertices), mesh.faces)
        return Cloud(path.stem, *sample(sampler, count, generator), placement)
    if content.other:
        raise MeshError(path, f"holds {content.other}: expected a surface, or points")
    points, normals = content.vertices, content.normals
    placement = _checked_placement(points, path)
    ways = None if sensors is None else _towards(points, Path(sensors))
    if normals is not None:
        length = np.linalg.norm(normals, axis=1, keepdims=True)
        if not (np.isfinite(length) & (length > 0)).all():
            raise MeshError(path, "has normals without a direction: leave them out")
        normals = (normals / length).astype(np.float32)
    most = most or count
    if len(points) > most:
        log.info("%s: %d of its %d points are used, as in training", path, most, len(points))
        chosen = thin(placement.to_cube(points).astype(np.float32), most, generator)
        points, normals, ways = (None if each is None else each[chosen] for each in (points, normals, ways))
    elif len(points) < count / 2:
        log.warning("%s has %d points; the model was trained with %d", path, len(points), count)
    return Cloud(path.stem, placement.to_cube(points).astype(np.float32), normals, placement, ways)


def _towards(points: Float[np.ndarray, "n 3"], path: Path) -> Float[np.ndarray, "n 3"]:
    """Return unit vectors from points to the sensors of a file; 0 for a sensor that is not finite."""
    if path.suffix.lower() not in POINT_SUFFIXES:
        raise MeshError(path, f"is of an unknown kind of points: expected {', '.join(POINT_SUFFIXES)}")
    content = _read(path)
    if len(content.faces) or len(content.vertices) not in (1, len(points)):
        given = "a mesh" if len(content.faces) else f"{len(content.vertices)} points"
        raise MeshError(
            path, f"holds {given}: expected the sensor of each of {len(points)} points, or one of all"
        )
    away = content.vertices - points
    length = np.linalg.norm(away, axis=1, keepdims=True)
    known = np.isfinite(length) & (length > 0)
    return np.where(known, away / np.where(known, length, 1), 0).astype(np.float32)


def _read(path: Path, fields: Sequence[str] = ()) -> Content:
    """Read the content of a file in the format that its suffix tells; fields are of its points."""
    suffix, own = path.suffix.lower(), {"fields": fields} if fields else {}
    if suffix in _SCAN_READERS:
        missing = missing_packages([path])
        if missing is not None:
            raise MeshError(path, missing)
        require_file(path, LARGEST_SCAN_BYTES)
        return understood(partial(_SCAN_READERS[suffix], **own), path, path)
    readers = _POINT_READERS | {".ply": ply.parse} if fields else _POINT_READERS
    if suffix in readers:
        return understood(partial(readers[suffix], **own), read_content(path), path)
    return parse(read_content(path), path)


def read_points(path: str | Path, fields: Sequence[str] = ()) -> Content:
    """Read points or a mesh in the coordinates of their file, with values of each point by name.

    Raises MeshError if the file cannot be read or lacks a field. With fields, its suffix is one of
    :data:`FIELD_SUFFIXES`.
    """
    return _read(Path(path), fields)


def _checked_placement(points: Float[np.ndarray, "n 3"], path: Path) -> Placement:
    """Return the placement of points; raise MeshError if they cannot enclose anything."""
    if not len(points):
        raise MeshError(path, "is empty: expected points, got none")
    finite = np.isfinite(points).all(axis=1)
    if not finite.all():
        raise MeshError(path, f"is not finite: point {int(np.argmin(finite))} holds a NaN or an infinity")
    low, high = points.min(axis=0) / 2, points.max(axis=0) / 2  # halves, so that no sum overflows
    scale = float((high - low).max()) * 2 / LONGEST_SIDE
    if not scale > 0:
        raise MeshError(path, f"has no extent: all {len(points)} points lie in one place")
    placement = Placement(low + high, scale)
    inside = placement.to_cube(points)
    inside -= inside.mean(axis=0)
    extents = np.sqrt(np.linalg.eigvalsh(inside.T @ inside).clip(0))[::-1]
    if extents[2] < FLATTEST * extents[0]:
        shape = "on a line" if extents[1] < FLATTEST * extents[0] else "in a plane"
        raise MeshError(path, f"has no inside: its points lie {shape}; expected points all around a solid")
    return placement


_POINT_READERS: dict[str, Callable[..., Content]] = {
    **dict.fromkeys((".xyz", ".txt", ".csv", ".pts"), tables.parse),
    **dict.fromkeys((".npy", ".npz"), arrays.parse),
}

_SCAN_READERS: dict[str, Callable[..., Content]] = {
    **dict.fromkeys((".las", ".laz"), scans.las),
    ".pcd": scans.pcd,
    ".e57": scans.e57,
}

POINT_SUFFIXES = (".ply", ".obj", ".glb", ".gltf", *_POINT_READERS, *_SCAN_READERS)

FIELD_SUFFIXES = (*_SCAN_READERS, ".pts", ".xyz", ".ply")
"""Formats whose points have further values, such as intensity."""

SUFFIXES = (*MESH_SUFFIXES, *_POINT_READERS, *_SCAN_READERS)
