"""Samples in VTK's formats, read by pyvista: surfaces, and volumes with any kind of cells.

Fields are taken by name, never the active one. Polygons and strips become triangles first; then the centre
and area of a polygon are those of its triangles, also if it is concave. Values are those of the file: nothing
is moved between points and cells.
"""

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyvista as pv

from pointproj.geometry.files.measured.sample import FieldSample, Place, added, chosen, of_mesh
from pointproj.geometry.meshes import Mesh, MeshError

CELL, POINT = "pointproj_cell", "pointproj_point"  # numbers of the file's cells and points
GHOSTS = "vtkGhostType"
GHOST_CELL, GHOST_POINT = 1 | 8 | 32, 2  # bits of duplicate, refined or hidden cells; of hidden points

_TYPE = rb"(?:(?:unsigned_)?(?:char|short|int|long|float|double)|vtk\w+)"
_ARRAY = re.compile(  # of the older format, with its components, kind, and columns and rows of a field
    rb"^[ \t]*(?:SCALARS\s+\S+\s+\S+[ \t]*(\d*)|(VECTORS|NORMALS|TENSORS)\s+\S+\s+\S+"
    rb"|\S+\s+(\d+)\s+(\d+)\s+" + _TYPE + rb")[ \t\r]*$",
    re.MULTILINE,
)


def read(path: Path, fields: Sequence[str]) -> FieldSample:
    """Read a sample of the file's points or cells; a volume has its outer surface as geometry."""
    try:
        return sample_of(load(path), fields)
    except ValueError as error:
        raise MeshError(path, str(error)) from error


def load(path: Path) -> pv.DataSet:
    """Read the data set of a file; raise ValueError if it holds several, or less than it declares.

    The same if its pieces have different arrays: VTK takes them by their places, whatever they are called.
    """
    quiet = warnings.catch_warnings(action="ignore"), pv.vtk_verbosity("off")
    with quiet[0], quiet[1], pv.VtkErrorCatcher(send_to_logging=False) as caught:
        try:
            reader = pv.get_reader(path)
            data = reader.read()
        except RuntimeError as error:
            raise ValueError(f"is no complete {path.suffix[1:].upper()} file ({error})") from None
    said = [str(event).splitlines()[-1] for event in caught.events if "rror" in str(event)]
    if said or (path.suffix.lower() == ".vtk" and _is_cut(path)):  # VTK gives what it has read
        why = said[0] if said else "its last array"
        raise ValueError(f"is no complete {path.suffix[1:].upper()} file ({why:.100})")
    if isinstance(data, pv.MultiBlock):
        raise ValueError(f"holds {len(data)} blocks: write each to a file of its own")
    if isinstance(reader, pv.XMLPolyDataReader | pv.XMLUnstructuredGridReader):
        _check_pieces(_children(reader.reader.GetXMLParser().GetRootElement().GetNestedElement(0)))
    return data


def _check_pieces(elements: Sequence[Any]) -> None:
    pieces = [element for element in elements if element.GetName() == "Piece"]
    for section in ("PointData", "CellData", "Points"):
        held = [
            ", ".join(_arrays(piece, section)) or "none"
            for i, piece in enumerate(pieces)
            if i == 0 or piece.GetAttribute("NumberOfPoints") != "0"
        ]
        other = next((arrays for arrays in held if arrays != held[0]), None)
        if other is not None:
            raise ValueError(
                f"has {len(pieces)} pieces with different arrays in {section} ({held[0]}; {other}), which "
                "VTK takes for one another: write the same in each, in one order, or a file for each piece"
            )


def _arrays(piece: Any, section: str) -> list[str]:
    """Return name, type and components of each array."""
    element = piece.FindNestedElementWithName(section)
    keys = ("Name", "type", "NumberOfComponents")[section == "Points" :]
    arrays = _children(element) if element else []
    return [" ".join(array.GetAttribute(key) or "1" for key in keys) for array in arrays]


def _children(element: Any) -> list[Any]:
    return [element.GetNestedElement(i) for i in range(element.GetNumberOfNestedElements())]


def _is_cut(path: Path) -> bool:
    """Return whether a text file of VTK's older format ends within its last array, which VTK does not say."""
    with path.open("rb") as file:
        is_text = [file.readline(1024).strip() for _ in range(3)][2] == b"ASCII"
        content = file.read() if is_text else b""
    if not (arrays := [*_ARRAY.finditer(content)]):
        return False
    scalars, vectors, columns, count = arrays[-1].groups()
    rows = [int(each) for each in re.findall(rb"^(?:POINT|CELL)_DATA\s+(\d+)", content, re.MULTILINE)]
    wanted = int(columns) * int(count) if columns else (rows or [0])[-1] * int(scalars or 1)
    wanted *= {b"VECTORS": 3, b"NORMALS": 3, b"TENSORS": 9}.get(vectors, 1)
    after = re.sub(rb"^\s*LOOKUP_TABLE\s+\S+", b"", content[arrays[-1].end() :]).split()
    return len(after) < wanted


def sample_of(data: pv.DataSet, fields: Sequence[str], place: Place = "points") -> FieldSample:
    """Return the sample of a data set; without fields that of ``place``.

    Raises ValueError if the data set lacks a field.
    """
    found: Mapping[Place, Mapping[str, np.ndarray]] = {
        "points": {name: np.asarray(data.point_data[name]) for name in data.point_data.keys()},  # noqa: SIM118
        "cells": {name: np.asarray(data.cell_data[name]) for name in data.cell_data.keys()},  # noqa: SIM118
    }
    values = {}
    if fields:
        place, values = chosen(found, fields)
    kept, is_volume = _kept(data)
    surface = kept if isinstance(kept, pv.PolyData) else kept.extract_surface(algorithm="dataset_surface")
    surface = surface.triangulate()
    if not surface.n_cells:
        raise ValueError(f"has no cells with area, only {data.n_points:,} points")
    triangles = surface.regular_faces.astype(np.int64)
    corners = np.asarray(surface.points, dtype=np.float64)
    if is_volume:
        rows, points = _places(kept, place)
        geometry = Mesh(corners, triangles, "outer surface")
        sample = FieldSample(points, {}, geometry=geometry, rows=rows, place=place)
    elif place == "cells":
        cells = np.asarray(surface.cell_data[CELL])
        sample = of_mesh(corners, triangles, place, cells=cells, count=data.n_cells)
    else:
        sample = of_mesh(corners, triangles, place)
        sample = replace(sample, rows=np.asarray(surface.point_data[POINT])[sample.rows])
    values = {name: rows[sample.rows] for name, rows in values.items()}
    return replace(sample, values=values, parameters=_numbers(data))


def _kept(data: pv.DataSet) -> tuple[pv.DataSet, bool]:
    """Return the cells with area or volume, with the numbers of the file's cells and points; and if volumes.

    Cells that are hidden, or belong to another part of a divided data set, are left out. Vertices and lines
    are too: beside them, vtkTriangleFilter gives triangles the numbers of other cells.
    """
    bare = data.copy(deep=False)
    bare.clear_data()
    bare.cell_data[CELL], bare.point_data[POINT] = np.arange(data.n_cells), np.arange(data.n_points)
    dimensions = _dimensions(bare)
    kept = dimensions > 1
    if GHOSTS in data.cell_data:
        kept &= (np.asarray(data.cell_data[GHOSTS]) & GHOST_CELL) == 0
    if GHOSTS in data.point_data:
        grid = bare.cast_to_unstructured_grid()
        hidden = np.asarray(data.point_data[GHOSTS]) & GHOST_POINT > 0
        kept &= added(hidden[grid.cell_connectivity].astype(float), *_owners(grid)) == 0
    return bare if kept.all() else bare.extract_cells(kept), bool((dimensions[kept] > 2).any())


def _dimensions(data: pv.DataSet) -> np.ndarray:
    """Return the dimension of each cell: 0 of a vertex, 3 of a volume."""
    if isinstance(data, pv.PolyData):
        return np.where(np.arange(data.n_cells) < data.n_verts + data.n_lines, 1, 2)
    grid = data.cast_to_unstructured_grid()
    kinds, first, which = np.unique(grid.celltypes, return_index=True, return_inverse=True)
    return np.array([grid.get_cell(int(at)).dimension for at in first] if len(kinds) else [], int)[which]


def _owners(grid: pv.UnstructuredGrid) -> tuple[np.ndarray, int]:
    """Return the cell of each entry of the connectivity, and how many cells there are."""
    counts = np.diff(grid.cell_offsets)
    return np.repeat(np.arange(len(counts)), counts), len(counts)


def _places(kept: pv.DataSet, place: Place) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers and coordinates of a volume's points that cells use, or of its cells.

    A cell lies at the mean of its corners, which is inside of a convex cell of any kind.
    """
    grid = kept.cast_to_unstructured_grid()
    points, corners = np.asarray(grid.points, dtype=np.float64), grid.cell_connectivity
    if place == "points":
        used = np.bincount(corners, minlength=len(points)) > 0
        return np.asarray(kept.point_data[POINT])[used], points[used]
    owners, count = _owners(grid)
    means = added(points[corners], owners, count) / np.bincount(owners)[:, None]
    return np.asarray(kept.cell_data[CELL]), means


def _numbers(data: pv.DataSet) -> dict[str, float]:
    """Return the numbers that the file holds once."""
    held = {name: np.asarray(data.field_data[name]) for name in data.field_data.keys()}  # noqa: SIM118
    return {n: float(v.item()) for n, v in held.items() if v.size == 1 and v.dtype.kind in "fiu"}
