"""Read files with measured or simulated fields: a sample, which is geometry and values at points or cells.

VTP, VTU and VTK are read by pyvista (:mod:`.vtk`); NPZ, PT and CSV hold named arrays (:mod:`.arrays`); scans
hold values of their points, such as intensity (:mod:`pointproj.geometry.files.points`). A mesh file of the
same stem (STL, OBJ, PLY, OFF) beside a file of arrays is the geometry of its sample.
"""

from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from pointproj.geometry.files import MESH_SUFFIXES, read_mesh
from pointproj.geometry.files.measured import arrays
from pointproj.geometry.files.measured.sample import FieldSample, Place, of_mesh
from pointproj.geometry.files.points import FIELD_SUFFIXES, missing_packages, read_points
from pointproj.geometry.files.text import Content
from pointproj.geometry.meshes import MeshError

VTK_SUFFIXES = (".vtp", ".vtu", ".vtk")
SUFFIXES = (*VTK_SUFFIXES, *arrays.READERS, *FIELD_SUFFIXES)
INSTALL = 'pip install -c constraints.txt -e ".[cfd]"'


def missing_package(paths: Sequence[Path]) -> str | None:
    """Return words that say what to install to read these files, or None if nothing is missing."""
    first = next((path for path in paths if path.suffix.lower() in VTK_SUFFIXES), None)
    if first is None or find_spec("pyvista") is not None:
        return missing_packages(paths)
    return f"{first} is read by pyvista, which is not installed: {INSTALL}"


def geometry_beside(path: Path) -> Path | None:
    """Return the mesh file of the same stem beside a file of arrays, or None; MeshError if there are two."""
    if path.suffix.lower() not in arrays.READERS:
        return None
    spelt = ((path.with_suffix(suffix), path.with_suffix(suffix.upper())) for suffix in MESH_SUFFIXES)
    found = [next(mesh for mesh in pair if mesh.exists()) for pair in spelt if any(map(Path.exists, pair))]
    if len(found) > 1:
        raise MeshError(path, f"has {found[0].name} and {found[1].name} beside it: leave one geometry there")
    return found[0] if found else None


def read_sample(path: Path, fields: Sequence[str]) -> FieldSample:
    """Read the fields of a file, all float64.

    Parameters
    ----------
    path : Path
        A file with a suffix of :data:`SUFFIXES`.
    fields : sequence of str
        Names of the fields. All must lie at the points, or all at the cells.

    Raises
    ------
    MeshError
        If the file cannot be read, lacks a field, or holds no points; if a field has NaN or infinity, or
        another number of rows than points and cells.
    """
    path = Path(path)
    beside = geometry_beside(path)
    geometry = None if beside is None else read_mesh(beside)
    try:
        if path.suffix.lower() in VTK_SUFFIXES:
            from pointproj.geometry.files.measured import vtk

            sample = vtk.read(path, fields)
        elif path.suffix.lower() in FIELD_SUFFIXES:
            sample = _of_points(read_points(path, fields))
        else:
            sample = arrays.read(path, fields, geometry)
    except MeshError:
        raise
    except Exception as error:  # damaged files raise errors of many kinds
        raise MeshError(path, f"cannot be read ({type(error).__name__}: {error})") from error
    _check(path, sample)
    return sample


def read_geometry(path: Path, place: Place) -> FieldSample:
    """Read the points or cells of a file without its fields: of a mesh, a cloud, or a file with fields."""
    path = Path(path)
    if path.suffix.lower() in arrays.READERS and geometry_beside(path) is not None:
        return read_sample(path, [])
    if path.suffix.lower() in (".npz", ".pt"):
        try:
            return arrays.read(path, [], None, place)
        except MeshError:  # an archive with one array is a cloud
            if path.suffix.lower() == ".pt":
                raise
    if path.suffix.lower() in VTK_SUFFIXES:
        from pointproj.geometry.files.measured import vtk

        try:
            return vtk.sample_of(vtk.load(path), [], place)
        except ValueError as error:
            raise MeshError(path, str(error)) from error
    return _of_points(read_points(path), place)


def _of_points(content: Content, place: Place = "points") -> FieldSample:
    """Return the sample of a cloud or a mesh with the values of its vertices."""
    values = {name: column[:, None] for name, column in content.values.items()}
    if len(content.faces):
        sample = of_mesh(content.vertices, content.faces, place)
        return replace(sample, values={name: column[sample.rows] for name, column in values.items()})
    points = np.asarray(content.vertices, dtype=np.float64)
    normals = content.normals
    if normals is not None:
        length = np.linalg.norm(normals, axis=1, keepdims=True)
        normals = normals / np.where(length > 0, length, 1)
    return FieldSample(points, values, normals, rows=np.arange(len(points)))


def _check(path: Path, sample: FieldSample) -> None:
    if not len(sample.points):
        raise MeshError(path, "holds no points or cells with area")
    arrays: dict[str, np.ndarray] = {"its points": sample.points, **sample.values}
    if sample.normals is not None:
        arrays["its normals"] = sample.normals
    for name, values in arrays.items():
        odd = ~np.isfinite(values).all(axis=1)
        if odd.any():
            raise MeshError(
                path,
                f"holds NaN or infinity in {name}: {odd.sum():,} of {len(odd):,} rows, first {odd.argmax()}",
            )
