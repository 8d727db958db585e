#!/usr/bin/env bash
# vtkXMLPolyDataReader and vtkXMLUnstructuredGridReader (pyvista.read of VTP and VTU) join the pieces of a file.
# Expected: arrays of one name are joined, in whatever order a piece has them; an array that one piece lacks is an error.
# Seen: the arrays of later pieces are taken by their places. If a piece has them in another order, its pressures are
# temperatures, without a word. Of an array that a piece lacks, there are as many values as points: the piece's are
# whatever was in memory.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q vtk==9.7.2 pyvista==0.49.1
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import sys
from pathlib import Path

import pyvista as pv


def array(name, values, kind="Float64", components=1):
    about = f'type="{kind}" Name="{name}" NumberOfComponents="{components}" format="ascii"'
    return f"<DataArray {about}>{' '.join(map(str, values))}</DataArray>"


def piece(x, **fields):
    data = "".join(array(name, values) for name, values in fields.items())
    points = array("Points", [x, 0, 0, x + 1, 0, 0, x, 1, 0], components=3)
    cells = array("connectivity", [0, 1, 2], "Int64") + array("offsets", [3], "Int64")
    counts = 'NumberOfPoints="3" NumberOfPolys="1"'
    return f"<Piece {counts}><PointData>{data}</PointData><Points>{points}</Points><Polys>{cells}</Polys></Piece>"


def read(*pieces):
    head = '<VTKFile type="PolyData" version="1.0" byte_order="LittleEndian" header_type="UInt64"><PolyData>'
    Path("pieces.vtp").write_text(head + "".join(pieces) + "</PolyData></VTKFile>")
    return pv.read("pieces.vtp").point_data


first = {"pressure": [1.0, 2.0, 3.0], "temperature": [300.0, 301.0, 302.0]}
order = read(piece(0, **first), piece(5, temperature=[303.0, 304.0, 305.0], pressure=[4.0, 5.0, 6.0]))
missing = read(piece(0, **first), piece(5, pressure=[4.0, 5.0, 6.0]))
print(f"vtk {pv.vtk_version_info}")
print(f"pressure, in another order in piece 2: {order['pressure'].tolist()}, expected the numbers from 1 to 6")
print(f"temperatures, which piece 2 lacks: {len(missing['temperature'])}, expected an error")
as_described = order["pressure"][3:].tolist() == [303, 304, 305] and len(missing["temperature"]) == 6
sys.exit(not as_described)
PYTHON
