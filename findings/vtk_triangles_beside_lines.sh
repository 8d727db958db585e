#!/usr/bin/env bash
# vtkTriangleFilter (pyvista: PolyData.triangulate()) leaves vertices and lines out unless it is told to pass them.
# Expected: one row of cell data for each triangle that is left, that of its polygon: [2] of the triangle's cell.
# Seen: if all polygons are triangles already, the cell data have other rows, and more of them than there are
# cells; with a quadrilateral among the polygons they are right.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q vtk==9.7.2 pyvista==0.49.1
"$work/venv/bin/python" - <<'PYTHON'
import sys

import numpy as np
import pyvista as pv
from vtkmodules.util.numpy_support import vtk_to_numpy
from vtkmodules.vtkFiltersCore import vtkTriangleFilter

points = np.array([[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0], [5, 5, 5], [6, 5, 5]], float)
found = {}
for name, faces in {"triangle": [3, 0, 1, 2], "quadrilateral": [4, 0, 1, 2, 3]}.items():
    surface = pv.PolyData(points, verts=[1, 4], lines=[2, 4, 5], faces=faces)
    surface.cell_data["number"] = np.arange(3)  # of the vertex, the line and the polygon
    filtered = vtkTriangleFilter()
    filtered.SetInputData(surface)
    filtered.PassVertsOff()
    filtered.PassLinesOff()
    filtered.Update()
    result = filtered.GetOutput()
    found[name] = result.GetNumberOfCells(), vtk_to_numpy(result.GetCellData().GetArray("number")).tolist()
print(f"vtk {pv.vtk_version_info}: cells and their numbers {found}, expected (1, [2]) and (2, [2, 2])")
as_described = found["triangle"] != (1, [2]) and found["quadrilateral"] == (2, [2, 2])
sys.exit(not as_described)
PYTHON
