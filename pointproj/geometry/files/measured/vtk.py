"""Samples in VTK's formats, read by pyvista: surfaces, and volumes with any kind of cells.

Fields are taken by name, never the active one. Polygons and strips become triangles first; then the centre
and area of a polygon are those of its triangles, also if it is concave. Values are those of the file: nothing
is moved between points and cells.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyvista as pv

from pointproj.geometry.files.measured.sample import FieldSample, Place, added, chosen, of_mesh
from pointproj.geometry.meshes import Mesh, MeshError

CELL, POINT = "pointproj_cell", "pointproj_point"  # numbers of the file's cells and points


def read(path: Path, fields: Sequence[str]) -> FieldSample:
    """Read a sample of the file's points or cells; a volume has its outer surface as geometry."""
    try:
        return sample_of(load(path), fields)
    except ValueError as error:
        raise MeshError(path, str(error)) from error


def load(path: Path) -> pv.DataSet:
    """Read the data set of a file; raise ValueError if it holds several."""
    data = pv.read(path)
    if isinstance(data, pv.MultiBlock):
        raise ValueError(f"holds {len(data)} blocks: write each to a file of its own")
    return data


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
    surface, is_volume = _surface(data)
    if not surface.n_cells:
        raise ValueError(f"has no cells with area, only {data.n_points:,} points")
    triangles = surface.regular_faces.astype(np.int64)
    corners = np.asarray(surface.points, dtype=np.float64)
    if is_volume:
        points = np.asarray(data.points, dtype=np.float64)
        points = points if place == "points" else _centres(data)
        geometry = Mesh(corners, triangles, "outer surface")
        sample = FieldSample(points, {}, geometry=geometry, rows=np.arange(len(points)), place=place)
    elif place == "cells":
        cells = np.asarray(surface.cell_data[CELL])
        sample = of_mesh(corners, triangles, place, cells=cells, count=data.n_cells)
    else:
        sample = of_mesh(corners, triangles, place)
        sample = replace(sample, rows=np.asarray(surface.point_data[POINT])[sample.rows])
    values = {name: rows[sample.rows] for name, rows in values.items()}
    return replace(sample, values=values, parameters=_numbers(data))


def _surface(data: pv.DataSet) -> tuple[pv.PolyData, bool]:
    """Return the triangles of a data set, with the numbers of its cells and points; and if it is a volume."""
    bare = data.copy(deep=False)
    bare.clear_data()
    bare.cell_data[CELL], bare.point_data[POINT] = np.arange(data.n_cells), np.arange(data.n_points)
    is_volume = not isinstance(data, pv.PolyData) and bool((np.isin(_dimensions(data), 3)).any())
    if not isinstance(bare, pv.PolyData):
        bare = bare.extract_surface(algorithm="dataset_surface")
    return bare.triangulate(), is_volume


def _dimensions(data: pv.DataSet) -> np.ndarray:
    grid = data.cast_to_unstructured_grid()
    return np.array([_dimension(grid, kind) for kind in np.unique(grid.celltypes)])


def _dimension(grid: pv.UnstructuredGrid, kind: int) -> int:
    return grid.get_cell(int(np.argmax(grid.celltypes == kind))).dimension


def _centres(data: pv.DataSet) -> np.ndarray:
    """Return the mean of each cell's corners, which lies inside of a convex cell of any kind."""
    grid = data.cast_to_unstructured_grid()
    counts = np.diff(grid.cell_offsets)
    owners = np.repeat(np.arange(len(counts)), counts)
    corners = np.asarray(grid.points, dtype=np.float64)[grid.cell_connectivity]
    return added(corners, owners, len(counts)) / np.maximum(counts, 1)[:, None]


def _numbers(data: pv.DataSet) -> dict[str, float]:
    """Return the numbers that the file holds once."""
    held = {name: np.asarray(data.field_data[name]) for name in data.field_data.keys()}  # noqa: SIM118
    return {n: float(v.item()) for n, v in held.items() if v.size == 1 and v.dtype.kind in "fiu"}
