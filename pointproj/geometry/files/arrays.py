"""Clouds as arrays: NPY and NPZ."""

import io
import zipfile
from collections.abc import Sequence

import numpy as np

from pointproj.geometry.files.columns import roles, without_names
from pointproj.geometry.files.text import Content, FormatError, require_fields

LARGEST_CONTENT = 1 << 28
"""Most bytes that an archive may expand to."""

_POINTS = ("points", "xyz", "positions", "vertices", "coordinates", "arr_0")
_OTHERS = {"normals", "colors", "colours", "rgb", "intensity", "sensors"}
_FACES = ("faces", "triangles", "cells")


def parse(content: bytes) -> Content:
    """Read an array of points, or an archive with ``points`` and perhaps ``normals``, or with one array.

    Columns of a structured array have names, see :func:`pointproj.geometry.files.columns.roles`.
    """
    file = io.BytesIO(content)
    try:
        if zipfile.is_zipfile(file):
            unfolded = sum(member.file_size for member in zipfile.ZipFile(file).infolist())
            if unfolded > LARGEST_CONTENT:
                raise FormatError(f"unfolds to {unfolded:,} bytes: expected at most {LARGEST_CONTENT:,}")
        file.seek(0)
        loaded = np.load(file, allow_pickle=False)
        is_archive = isinstance(loaded, np.lib.npyio.NpzFile)
        arrays = dict(loaded) if is_archive else {"points": loaded}
        if not is_archive and file.read(1):
            raise FormatError("holds more than the array that it declares")
    except FormatError:
        raise
    except Exception as error:  # damaged files raise errors of many kinds
        raise FormatError(
            f"is not a complete NPY or NPZ file of real numbers ({type(error).__name__}: {error})"
        ) from None
    faces = [name for name in _FACES if name in arrays]
    if faces:
        raise FormatError(f"holds {faces[0]}, which are not read from NPZ: write the mesh as PLY or OFF")
    name = "points" if "points" in arrays else next((name for name in _POINTS if name in arrays), None)
    if name is None and len(arrays) == 1 and not _OTHERS & arrays.keys():
        (name,) = arrays
    if name is None:
        raise FormatError(
            f"must hold the array points, and normals if it has them; got {', '.join(arrays)[:80]}"
        )
    found = _columns(arrays[name])
    if "normals" not in arrays:
        return found
    normals = _columns(arrays["normals"]).vertices
    if len(normals) != len(found.vertices):
        raise FormatError(f"must hold a normal of each of {len(found.vertices)} points, got {len(normals)}")
    return Content(found.vertices, normals=normals, notes=found.notes)


def _columns(array: np.ndarray) -> Content:
    if array.dtype.names is None:
        return without_names(array)
    return structured(array)


def structured(array: np.ndarray, fields: Sequence[str] = ()) -> Content:
    """Return the points of an array whose columns have names, with the values of some."""
    require_fields(fields, array.dtype.names)
    if packed := {"rgb", "rgba"}.intersection(fields):
        raise FormatError(f"packs three colours into each number of {min(packed)}: write each as a column")
    positions, normals = (
        None if columns is None else np.stack([_field(array, column) for column in columns], axis=1)
        for columns in roles(array.dtype.names)
    )
    values = {name: _field(array, array.dtype.names.index(name)) for name in fields}
    return Content(positions, normals=normals, values=values)


def _field(array: np.ndarray, column: int) -> np.ndarray:
    values = array[array.dtype.names[column]]
    if values.dtype.kind not in "fiu" or values.ndim != 1:
        raise FormatError(f"must hold a real number of each point in {array.dtype.names[column]!r}")
    return values.astype(np.float64)
