"""Read and write mesh files: OFF, OBJ, PLY and STL.

Any file gives a mesh or a :class:`~pointproj.geometry.meshes.MeshError`. That is why the formats are read
here and not by a library: common readers skip words they do not understand, drop polygons, open the files
that a file names, or trust its counts. Here nothing is lost silently, no second file is ever opened, and
memory is allocated for what is there, not for what is declared.
"""

import stat
from collections.abc import Callable
from pathlib import Path

import numpy as np

from pointproj.geometry.files import obj, off, ply, stl
from pointproj.geometry.files.text import FormatError, Surface
from pointproj.geometry.files.writing import replacing
from pointproj.geometry.meshes import SMALLEST_AREA, Mesh, MeshError, face_areas, normalize

LARGEST_FILE_BYTES = 256 << 20
"""A larger file is refused. Text takes about nine times its size in memory while it is read."""

READERS: dict[str, Callable[[bytes], Surface]] = {
    ".off": off.parse,
    ".obj": obj.parse,
    ".ply": ply.parse,
    ".stl": stl.parse,
}

WRITERS: dict[str, Callable[[np.ndarray, np.ndarray], bytes]] = {".off": off.dump, ".ply": ply.dump}

MESH_SUFFIXES = tuple(READERS)


def read_mesh(path: str | Path) -> Mesh:
    """Read a mesh file, with the deviations that real files have.

    Polygons become fans of triangles (exact for convex ones); points, edges, colours, normals and textures
    are dropped. Vertices keep the file's order and are not merged. See the module of each format for what is
    understood.

    Parameters
    ----------
    path : str or Path
        The suffix says what it is: one of :data:`MESH_SUFFIXES`.

    Returns
    -------
    Mesh
        With finite vertices and at least one face of positive area.

    Raises
    ------
    MeshError
        If the file cannot be read, is too large, is not a whole file of its format, or holds no finite
        surface.
    """
    return parse_mesh(read_content(path), path)


def read_content(path: str | Path) -> bytes:
    """Read the bytes of a mesh file: a regular file of at most :data:`LARGEST_FILE_BYTES`.

    Parameters
    ----------
    path : str or Path

    Returns
    -------
    bytes

    Raises
    ------
    MeshError
        If it cannot be read, is a pipe, device or folder, or is too large.
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
    """Make a mesh of the content of a file: see :func:`read_mesh`.

    Parameters
    ----------
    content : bytes
    path : str or Path
        Its suffix says the format, its stem is the name of the mesh.

    Returns
    -------
    Mesh

    Raises
    ------
    MeshError
        If the content is not a whole file of its format, or holds no finite surface.
    """
    path = Path(path)
    parse = READERS.get(path.suffix.lower())
    if parse is None:
        raise MeshError(path, f"is no mesh file: expected {', '.join(READERS)}, got {path.suffix!r}")
    try:
        mesh = Mesh(*parse(content), path.stem)
    except MeshError as error:  # from the arrays themselves; here it is the file that is at fault
        raise MeshError(path, error.reason) from error
    except FormatError as error:
        raise MeshError(path, str(error)) from error
    _check_surface(mesh, path)
    return mesh


def _check_surface(mesh: Mesh, source: Path) -> None:
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


def write_mesh(mesh: Mesh, path: str | Path) -> None:
    """Write a mesh as a file that reads back to the same bits.

    The file is written completely or not at all; folders are made as needed.

    Parameters
    ----------
    mesh : Mesh
    path : str or Path
        The suffix says the format: one of :data:`WRITERS`.

    Raises
    ------
    MeshError
        For another suffix.
    OSError
        If the folder cannot be written to.
    """
    path = Path(path)
    dump = WRITERS.get(path.suffix.lower())
    if dump is None:
        raise MeshError(path, f"cannot be written: expected {', '.join(WRITERS)}, got {path.suffix!r}")
    with replacing(path) as temporary:
        temporary.write_bytes(dump(mesh.vertices, mesh.faces))
