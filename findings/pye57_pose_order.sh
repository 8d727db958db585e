#!/usr/bin/env bash
# E57 (ASTM E2807): a pose is a structure, whose elements have names and no order: w, x, y, z of its rotation.
# Expected: the same points whichever element of the rotation stands first in the file.
# Seen: pye57 takes the elements as they stand for w, x, y, z, and turns the scan by another rotation.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q pye57==0.4.19 numpy==2.2.6
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import sys
from importlib.metadata import version

import numpy as np
import pye57
from pye57 import libe57


class LastFirst(libe57.StructureNode):
    """Sets w of a rotation after x, y and z."""

    def set(self, name, node):
        if name == "w":
            self.w = node
            return
        super().set(name, node)
        if name == "z" and hasattr(self, "w"):
            super().set("w", self.w)


plain, found = libe57.StructureNode, {}
points = {f"cartesian{axis}": np.array(column, float) for axis, column in zip("XYZ", ([1, 2], [0, 0], [0, 0]))}
for order, kind in {"wxyz": plain, "xyzw": LastFirst}.items():
    libe57.StructureNode = kind
    file = pye57.E57(f"{order}.e57", mode="w")
    file.write_scan_raw(points, rotation=np.array([0.5**0.5, 0, 0, 0.5**0.5]), translation=np.zeros(3))
    file.close()
    libe57.StructureNode = plain
    file = pye57.E57(f"{order}.e57")
    rotation = file.get_header(0)["pose"]["rotation"]
    values = {name: round(rotation[name].value(), 3) for name in "wxyz"}  # the same in both files
    scan = file.read_scan(0, ignore_missing_fields=True)
    found[order] = [float(scan[f"cartesian{axis}"][0].round(3)) for axis in "XYZ"]
    print(f"{order}: rotation {values}, first point {found[order]}, expected [0.0, 1.0, 0.0]")
    file.close()
print("pye57", version("pye57"))
sys.exit(found["wxyz"] != [0, 1, 0] or found["xyzw"] == [0, 1, 0])
PYTHON
