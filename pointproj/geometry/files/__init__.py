"""Read and write mesh files: OFF and PLY by our own readers, all else by trimesh between checks of ours.

Any file gives a mesh or a :class:`~pointproj.geometry.meshes.MeshError`. Common readers skip words they do
not understand, drop polygons, open the files that a file names, or trust its counts. Here nothing is lost
silently, no second file is ever opened, and memory is allocated for what is there, not for what is declared.
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
"""A larger file is refused. Text takes about nine times its size in memory while it is read."""

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
    """Read a mesh file, with the deviations that real files have; its suffix is one of :data:`MESH_SUFFIXES`.

    Polygons become fans of triangles (exact for convex ones); points, edges, colours, normals and textures
    are dropped. Vertices are not merged. The parts of a scene are one mesh, each where the scene has it.
    The mesh has finite vertices and at least one face of positive area.

    Raises
    ------
    MeshError
        If the file cannot be read, is too large, is not a whole file of its format, or holds no finite
        surface.
    """
    return parse_mesh(read_content(path), path)


def read_content(path: str | Path) -> bytes:
    """Read the bytes of a mesh file, or raise a MeshError.

    It must be a regular file, no pipe, device or folder, of at most :data:`LARGEST_FILE_BYTES`.
    """
    path = Path(path)
    try:
        facts = path.stat()
        if not stat.S_ISREG(facts.st_mode):  # a pipe could be waited for, and a device read, for ever
            raise MeshError(path, "cannot be read (expected a file)")
        if facts.st_size > LARGEST_FILE_BYTES:
            limit = f"expected at most {LARGEST_FILE_BYTES:,} bytes, got {facts.st_size:,}"
            raise MeshError(path, f"is too large: {limit}; write it with fewer faces")
        with path.open("rb") as file:
            return file.read(facts.st_size)
    except OSError as error:
        raise MeshError(path, f"cannot be read ({error.strerror or error})") from error


def parse_mesh(content: bytes, path: str | Path) -> Mesh:
    """Make a mesh of the content of a file, as :func:`read_mesh` does, or raise a MeshError.

    The suffix of ``path`` says the format, its stem is the name of the mesh.
    """
    return surface(parse(content, path), path)


def parse(content: bytes, path: str | Path) -> Content:
    """Read the content of a file, a surface or points, or raise a MeshError."""
    path = Path(path)
    read = READERS.get(path.suffix.lower())
    if read is None:
        raise MeshError(path, f"is no mesh file: expected {', '.join(READERS)}, got {path.suffix!r}")
    try:
        return read(content)
    except FormatError as error:
        raise MeshError(path, str(error)) from error


def surface(content: Content, path: str | Path) -> Mesh:
    """Make a mesh of what a file holds, or raise a MeshError if that is no finite surface."""
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
    except MeshError as error:  # of the arrays too it is the file that is at fault
        raise MeshError(path, error.reason) from error
    return mesh


def write_mesh(mesh: Mesh, path: str | Path) -> None:
    """Write a mesh as a file: OFF and PLY read back to the same bits, OBJ has 12 digits, STL and GLB about 7.

    The file is written completely or not at all; folders are made as needed. A MeshError says that the suffix
    is not in :data:`WRITERS`, an OSError that the folder cannot be written to.
    """
    path = Path(path)
    dump = WRITERS.get(path.suffix.lower())
    if dump is None:
        raise MeshError(path, f"cannot be written: expected {', '.join(WRITERS)}, got {path.suffix!r}")
    with replacing(path) as temporary:
        temporary.write_bytes(dump(mesh.vertices, mesh.faces))
