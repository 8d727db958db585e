"""Triangle meshes: read and write OFF files, normalise into the query cube, sample the surface."""

import io
import os
import re
import uuid
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np
import trimesh
from jaxtyping import Float, Int

LONGEST_SIDE = 1.8
"""Longest side of a normalised mesh: the query cube [-1, 1]^3 keeps a margin of 0.1 around every shape."""

SMALLEST_AREA = 1e-12
"""A face counts as surface from this area on, in the units of a normalised mesh."""

_HEADER = re.compile(r"\ufeff?(?:C|N|CN)?OFF", re.IGNORECASE)


class MeshError(ValueError):
    """A mesh that cannot be used: which one, and why.

    Attributes
    ----------
    source : str
        The file, or the name of a mesh that came from no file.
    reason : str
        What was expected and what was found.
    """

    def __init__(self, source: str | Path, reason: str) -> None:
        super().__init__(str(source), reason)
        self.source = str(source)
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.source}: {self.reason}"


@dataclass(frozen=True, eq=False)
class Mesh:
    """A triangle surface, in whatever units its file has until :func:`normalize`.

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
    def surface(self) -> trimesh.Trimesh:
        """The same arrays as trimesh sees them; kept, since areas and normals are cached in it."""
        return trimesh.Trimesh(self.vertices, self.faces, process=False)


def read_mesh(path: str | Path) -> Mesh:
    """Read an OFF file, with the deviations that ModelNet10 and ModelNet40 files have.

    Understood are counts glued to the header (``OFF3514 3546 0``), any line ends, comments, blank lines, a
    stray ``end_header``, the ``COFF``/``NOFF`` variants (colours and normals are dropped), and polygons,
    which become a fan of triangles (exact for convex ones).

    Parameters
    ----------
    path : str or Path

    Returns
    -------
    Mesh
        With finite vertices and at least one face of positive area.

    Raises
    ------
    MeshError
        If the file cannot be read, is no complete OFF file, or holds no finite surface. Counts are checked
        against the lines present before anything is allocated for them.
    """
    path = Path(path)
    try:
        text = path.read_bytes().decode("utf-8", errors="replace")
    except OSError as error:
        raise MeshError(path, f"cannot be read ({error.strerror or error})") from error
    repaired = _repair(text, path)
    try:
        # trimesh would otherwise merge vertices and drop faces, and indices would no longer be the file's
        loaded = trimesh.load_mesh(io.BytesIO(repaired.encode()), file_type="off", process=False)
        mesh = Mesh(loaded.vertices, loaded.faces, path.stem)
    except Exception as error:  # whatever the parser says about foreign bytes, the file is the cause
        raise MeshError(path, f"is not a readable OFF file ({error})") from error
    _check_surface(mesh, path)
    return mesh


def _repair(text: str, path: Path) -> str:
    """Bring an OFF file into the plain form: header, counts, one vertex a line, one triangle a line."""
    lines = [line.split("#", 1)[0].strip() for line in text.splitlines()]
    lines = [line for line in lines if line and line.lower() != "end_header"]
    if not lines:
        raise MeshError(path, "is empty")
    header = _HEADER.match(lines[0])
    if header is None:
        raise MeshError(path, f"is not an OFF file: expected it to begin with OFF, got {lines[0][:20]!r}")
    glued = lines[0][header.end() :].strip()
    body = [glued, *lines[1:]] if glued else lines[1:]
    vertex_count, face_count = _counts(body[0] if body else "", path)
    found = len(body) - 1
    if found < vertex_count + face_count:
        raise MeshError(
            path, f"declares {vertex_count} vertices and {face_count} faces, but only {found} lines follow"
        )
    vertices = body[1 : vertex_count + 1]
    for number, line in enumerate(vertices):
        if len(line.split()) < 3:
            raise MeshError(path, f"vertex {number} must have 3 coordinates, got {line[:40]!r}")
    triangles: list[str] = []
    for number, line in enumerate(body[vertex_count + 1 : vertex_count + 1 + face_count]):
        triangles.extend(_fan(line, number, path))
    if not triangles:
        raise MeshError(path, "has no face with three vertices")
    return "\n".join(["OFF", f"{vertex_count} {len(triangles)} 0", *vertices, *triangles, ""])


def _counts(line: str, path: Path) -> tuple[int, int]:
    """Number of vertices and of faces, from the line that declares them."""
    try:
        vertex_count, face_count = (int(token) for token in line.split()[:2])
    except ValueError:
        raise MeshError(path, f"must declare its vertex and face counts, got {line[:40]!r}") from None
    if vertex_count < 1 or face_count < 1:
        raise MeshError(path, f"is empty: it declares {vertex_count} vertices and {face_count} faces")
    return vertex_count, face_count


def _fan(line: str, number: int, path: Path) -> list[str]:
    """Triangles of the polygon that one face line declares; none for points and edges."""
    size, *tokens = line.split()
    try:
        count = int(size)
    except ValueError:
        count = -1
    if not 0 <= count <= len(tokens):
        raise MeshError(path, f"face {number} must list as many vertices as it declares, got {line[:40]!r}")
    corners = tokens[:count]
    return [f"3 {corners[0]} {b} {c}" for b, c in pairwise(corners[1:])]


def _check_surface(mesh: Mesh, source: str | Path) -> None:
    """Refuse a mesh that holds nothing to sample or to measure distances to."""
    finite = np.isfinite(mesh.vertices).all(axis=1)
    if not finite.all():
        raise MeshError(source, f"is not finite: vertex {int(np.argmin(finite))} holds a NaN or an infinity")
    try:
        unit = normalize(mesh)
    except MeshError as error:
        raise MeshError(source, error.reason) from error
    if not (face_areas(unit) > SMALLEST_AREA).any():
        raise MeshError(source, f"has no face with area among its {len(mesh.faces)} faces")


def write_off(mesh: Mesh, path: str | Path) -> None:
    """Write a mesh as an OFF file that reads back to the same bits.

    The file appears whole or not at all; folders are made as needed.

    Parameters
    ----------
    mesh : Mesh
    path : str or Path

    Raises
    ------
    OSError
        If the folder cannot be written to.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ["OFF", f"{len(mesh.vertices)} {len(mesh.faces)} 0"]
    lines += [f"{x!r} {y!r} {z!r}" for x, y, z in mesh.vertices.tolist()]
    lines += [f"3 {a} {b} {c}" for a, b, c in mesh.faces.tolist()]
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        temporary.write_text("\n".join(lines) + "\n", encoding="ascii")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def normalize(mesh: Mesh) -> Mesh:
    """Move and scale a mesh into the query cube [-1, 1]^3.

    The centre of the bounding box goes to the origin, its longest side becomes :data:`LONGEST_SIDE`. The
    box is that of the surface: vertices that no face uses do not count.

    Parameters
    ----------
    mesh : Mesh
        With finite vertices.

    Returns
    -------
    Mesh
        The same faces and name.

    Raises
    ------
    MeshError
        If the mesh has no face, or all its faces lie in one point.
    """
    if not len(mesh.faces):
        raise MeshError(mesh.name, "has no faces, so there is nothing to normalise")
    used = mesh.vertices[mesh.faces]
    # halves first, so that no sum of two large coordinates overflows
    low, high = used.min(axis=(0, 1)) / 2, used.max(axis=(0, 1)) / 2
    reach = float((high - low).max())
    if not reach > 0:
        raise MeshError(mesh.name, "has no extent: all its faces lie in one point")
    with np.errstate(over="ignore"):  # only vertices that no face uses can be that far away
        vertices = (mesh.vertices - (low + high)) / reach * (LONGEST_SIDE / 2)
    return Mesh(vertices, mesh.faces, mesh.name)


def face_areas(mesh: Mesh) -> Float[np.ndarray, " F"]:
    """Area of every face, in the square of the mesh's units.

    Parameters
    ----------
    mesh : Mesh

    Returns
    -------
    float64 array, shape (F,)
    """
    return mesh.surface.area_faces


def sample_surface(
    mesh: Mesh, count: int, generator: np.random.Generator
) -> tuple[Float[np.ndarray, "n 3"], Float[np.ndarray, "n 3"]]:
    """Draw points on the surface, uniformly by area, with the unit normals of their faces.

    The sign of a normal is that of the face's orientation, which is arbitrary in ModelNet files.

    Parameters
    ----------
    mesh : Mesh
    count : int
        Number of points, at least 1.
    generator : numpy.random.Generator
        Advanced by the draw; the same state gives the same points.

    Returns
    -------
    points : float32 array, shape (count, 3)
    normals : float32 array, shape (count, 3)

    Raises
    ------
    ValueError
        If ``count`` is below 1.
    """
    if count < 1:
        raise ValueError(f"expected at least 1 point to sample, got {count}: raise data.points")
    points, faces = trimesh.sample.sample_surface(mesh.surface, count, seed=generator)
    normals = mesh.surface.face_normals[faces]
    return points.astype(np.float32), normals.astype(np.float32)


def query_grid(side: int) -> Float[np.ndarray, "n 3"]:
    """Nodes of the regular grid on the query cube [-1, 1]^3, corners included.

    Parameters
    ----------
    side : int
        Points along each axis, at least 2.

    Returns
    -------
    float32 array, shape (side**3, 3)
        Ordered with x slowest and z fastest: ``reshape(side, side, side, 3)`` is indexed by x, y, z.

    Raises
    ------
    ValueError
        If ``side`` is below 2.
    """
    if side < 2:
        raise ValueError(f"expected a grid of at least 2 points a side, got {side}: raise data.grid")
    axis = np.linspace(-1.0, 1.0, side, dtype=np.float32)
    return np.stack(np.meshgrid(axis, axis, axis, indexing="ij"), axis=-1).reshape(-1, 3)
