"""Read and write mesh files, each format by a module of its own.

Any file gives a mesh or a :class:`~pointproj.geometry.meshes.MeshError`. Common readers skip words that they
do not understand, drop polygons, open further files that a file names, or trust the counts in a file. Here
nothing is lost silently, no second file is opened, and memory is allocated for the content that is present,
not for the content that is declared.
"""

import logging
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from pointproj.geometry.files import gltf, obj, off, ply, stl, threemf
from pointproj.geometry.files.origin import float32_origin, read_origin, write_origin
from pointproj.geometry.files.text import Content, FormatError
from pointproj.geometry.files.writing import replacing
from pointproj.geometry.meshes import SMALLEST_AREA, Mesh, MeshError, face_areas, normalize

log = logging.getLogger(__name__)

T = TypeVar("T")

LARGEST_FILE_BYTES = 256 << 20
"""Larger files are refused. While text is read, it takes about nine times its size in memory."""

READERS: dict[str, Callable[[bytes], Content]] = {
    ".off": off.parse,
    ".ply": ply.parse,
    ".obj": obj.parse,
    ".stl": stl.parse,
    ".glb": gltf.parse_glb,
    ".gltf": gltf.parse,
    ".3mf": threemf.parse,
}

WRITERS: dict[str, Callable[[np.ndarray, np.ndarray], bytes]] = {
    ".off": off.dump,
    ".ply": ply.dump,
    ".obj": obj.dump,
    ".stl": stl.dump,
    ".glb": gltf.dump,
}

SINGLE_PRECISION = (".stl", ".glb")
"""Formats that round coordinates."""

ORIGIN_BESIDE = (".stl",)
"""Formats whose coordinates, far from zero, are relative to an origin in a file beside."""

MESH_SUFFIXES = tuple(READERS)


def read_mesh(path: str | Path) -> Mesh:
    """Read a mesh file, also with the usual deviations of real files; its suffix is in :data:`MESH_SUFFIXES`.

    Polygons become fans of triangles, which is exact for convex polygons. Points, edges, colours, normals and
    textures are dropped. Vertices are not merged. All parts of a scene become one mesh; each part is placed
    where the scene places it, and mirrored parts keep their outside. The mesh has finite vertices and at
    least one face of positive area. If an origin of the coordinates stands beside the file, see
    :mod:`~pointproj.geometry.files.origin`, it is added.

    Raises
    ------
    MeshError
        If the file cannot be read, is too large, is damaged, or holds no finite surface.
    """
    return parse_mesh(read_content(path), path)


def read_content(path: str | Path) -> bytes:
    """Read the bytes of a mesh file.

    Raises MeshError unless it is a regular file (no pipe, device or folder) of at most
    :data:`LARGEST_FILE_BYTES` that can be read.
    """
    path = Path(path)
    require_file(path, LARGEST_FILE_BYTES)
    try:
        return path.read_bytes()
    except OSError as error:
        raise MeshError(path, f"cannot be read ({error.strerror or error})") from error


def require_file(path: Path, most: int) -> None:
    """Raise MeshError unless a path is a regular file of at most so many bytes."""
    try:
        facts = path.stat()
    except OSError as error:
        raise MeshError(path, f"cannot be read ({error.strerror or error})") from error
    if not stat.S_ISREG(facts.st_mode):  # reading a pipe or a device might never end
        raise MeshError(path, "cannot be read (expected a file)")
    if facts.st_size > most:
        limit = f"expected at most {most:,} bytes, got {facts.st_size:,}"
        raise MeshError(path, f"is too large: {limit}; write it with fewer faces or points")


def parse_mesh(content: bytes, path: str | Path) -> Mesh:
    """Make a mesh from the content of a file, as :func:`read_mesh` does, or raise MeshError.

    The suffix of ``path`` tells the format; its stem becomes the name of the mesh.
    """
    return surface(parse(content, path), path)


def parse(content: bytes, path: str | Path) -> Content:
    """Read a surface or points from the content of a file, or raise MeshError."""
    path = Path(path)
    read = READERS.get(path.suffix.lower())
    if read is None:
        raise MeshError(path, f"is not a mesh file: expected {', '.join(READERS)}, got {path.suffix!r}")

    def read_with_origin(content: bytes) -> Content:
        found = read(content)
        if path.suffix.lower() not in ORIGIN_BESIDE:
            return found
        return replace(found, vertices=found.vertices + read_origin(path, content))

    return understood(read_with_origin, content, path)


def understood(read: Callable[[T], Content], given: T, path: Path) -> Content:
    """Call a reader and log its notes; any error of a damaged file becomes a MeshError with its name."""
    try:
        found = read(given)
    except FormatError as error:
        raise MeshError(path, str(error)) from error
    except Exception as error:
        what = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        raise MeshError(path, f"is not a complete {path.suffix[1:].upper()} file ({what})") from error
    for note in found.notes:
        log.warning("%s: %s", path, note)
    return found


def surface(content: Content, path: str | Path) -> Mesh:
    """Make a mesh from the content of a file, or raise MeshError if the content is no finite surface."""
    path = Path(path)
    if not len(content.faces):
        raise MeshError(path, "has no face with three vertices")
    try:
        mesh = Mesh(content.vertices, content.faces, path.stem)
        finite = np.isfinite(mesh.vertices).all(axis=1)
        if not finite.all():
            raise MeshError(path, f"is not finite: vertex {np.argmin(finite)} holds a NaN or an infinity")
        if not (face_areas(normalize(mesh)) > SMALLEST_AREA).any():
            raise MeshError(path, f"has no face with area among its {len(mesh.faces)} faces")
    except MeshError as error:  # name the file instead of the mesh
        raise MeshError(path, error.reason) from error
    return mesh


def write_mesh(mesh: Mesh, path: str | Path) -> None:
    """Write a mesh to a file.

    OFF, PLY and OBJ are read back bit by bit. STL and GLB have single precision; a mesh far from zero is
    written relative to an origin near it, which GLB holds in its node, and a file ``NAME.stl.origin.json``
    beside an STL file. The file is written completely or not at all; missing folders are made. Raises
    MeshError if the suffix is not in :data:`WRITERS`, and OSError if the folder cannot be written to.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    dump = WRITERS.get(suffix)
    if dump is None:
        raise MeshError(path, f"cannot be written: expected {', '.join(WRITERS)}, got {path.suffix!r}")
    if suffix not in ORIGIN_BESIDE:
        content = dump(mesh.vertices, mesh.faces)
    else:
        origin = float32_origin(mesh.vertices)
        content = dump(mesh.vertices - origin, mesh.faces)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_origin(path, origin, content)  # first: without it, the file's coordinates would be wrong
    with replacing(path) as temporary:
        temporary.write_bytes(content)
