#!/usr/bin/env bash
# PCD, binary_compressed: PCL stores a field after the other, and a field of COUNT 2 with both values of a point
# together: a0 b0 a1 b1 ...
# Expected: the values (0, 10), (1, 11), (2, 12) of three points.
# Seen: pypcd4 takes the field for two columns one after the other, and mixes values of different points.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q pypcd4==1.5.1 numpy==2.2.6
"$work/venv/bin/python" - <<'PYTHON'
import io
import struct
import sys
from importlib.metadata import version

import lzf
import numpy as np
from pypcd4 import PointCloud

values = np.array([[0, 10], [1, 11], [2, 12]], "<f4")
padding = np.zeros(200, "<f4")  # so that the data can be compressed
points = np.zeros((3, 3), "<f4")
header = "\n".join([
    "VERSION 0.7", "FIELDS x y z v rest", "SIZE 4 4 4 4 4", "TYPE F F F F F", "COUNT 1 1 1 2 200", "WIDTH 3",
    "HEIGHT 1", "VIEWPOINT 0 0 0 1 0 0 0", "POINTS 3", "DATA binary_compressed", "",
])
raw = points.T.tobytes() + values.tobytes() + np.tile(padding, 3).tobytes()
packed = lzf.compress(raw)
content = header.encode() + struct.pack("<II", len(packed), len(raw)) + packed
data = PointCloud.from_fileobj(io.BytesIO(content)).pc_data
seen = [[float(data[f"v__{column:04d}"][point]) for column in (0, 1)] for point in range(3)]
print(f"pypcd4 {version('pypcd4')}: seen {seen}, expected {values.tolist()}")
sys.exit(seen != [[0, 11], [10, 2], [1, 12]])
PYTHON
