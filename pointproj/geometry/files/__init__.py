"""Read and write mesh files: OFF and PLY by readers of this package, other formats by trimesh, with checks.

Any file gives a mesh or a :class:`~pointproj.geometry.meshes.MeshError`. Common readers skip words that they
do not understand, drop polygons, open further files that a file names, or trust the counts in a file. Here
nothing is lost silently, no second file is opened, and memory is allocated for the content that is present,
not for the content that is declared.
"""

import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from pointproj.geometry.files import library, off, ply
from pointproj.geometry.files.text import Content, FormatError
from pointproj.geometry.files.writing import replacing
from pointproj.geometry.meshes import SMALLEST_AREA, Mesh, MeshError, face_areas, normalize

LARGEST_FILE_BYTES = 256 << 20
"""Larger files are refused. While text is read, it takes about nine times its size in memory."""

READERS: dict[str, Callable[[bytes], Content]] = {
    ".off": off.parse,
    ".ply": ply.parse,
    **{suffix: partial(library.parse, suffix=suffix) for suffix in library.CHECKS},
}

WRITERS: dict[str, Callable[[np.ndarray, np.ndarray], bytes]] = {
    ".off": off.dump,
    ".ply": ply.dump,
    **{suffix: partial(library.dump, suffix=suffix) for suffix in (".obj", ".stl", ".glb")},
}

MESH_SUFFIXES = tuple(READERS)


def read_mesh(path: str | Path) -> Mesh:
    """Read a mesh file, also with the usual deviations of real files; its suffix is in :data:`MESH_SUFFIXES`.

    Polygons become fans of triangles, which is exact for convex polygons. Points, edges, colours, normals and
    textures are dropped. Vertices are not merged. All parts of a scene become one mesh; each part is placed
    where the scene places it. The mesh has finite vertices and at least one face of positive area.

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
    try:
        facts = path.stat()
        if not stat.S_ISREG(facts.st_mode):  # reading a pipe or a device might never end
            raise MeshError(path, "cannot be read (expected a file)")
        if facts.st_size > LARGEST_FILE_BYTES:
            limit = f"expected at most {LARGEST_FILE_BYTES:,} bytes, got {facts.st_size:,}"
            raise MeshError(path, f"is too large: {limit}; write it with fewer faces")
        with path.open("rb") as file:
            return file.read(facts.st_size)
    except OSError as error:
        raise MeshError(path, f"cannot be read ({error.strerror or error})") from error


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
    try:
        return read(content)
    except FormatError as error:
        raise MeshError(path, str(error)) from error


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

    OFF and PLY are read back bit by bit; OBJ has 12 digits, STL and GLB about 7. The file is written
    completely or not at all; missing folders are made. Raises MeshError if the suffix is not in
    :data:`WRITERS`, and OSError if the folder cannot be written to.
    """
    path = Path(path)
    dump = WRITERS.get(path.suffix.lower())
    if dump is None:
        raise MeshError(path, f"cannot be written: expected {', '.join(WRITERS)}, got {path.suffix!r}")
    with replacing(path) as temporary:
        temporary.write_bytes(dump(mesh.vertices, mesh.faces))
