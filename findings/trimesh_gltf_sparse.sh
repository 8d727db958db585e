#!/usr/bin/env bash
# glTF 2.0, 3.6.2.3: a sparse accessor replaces some of its values; it is part of the core, no extension.
# Expected: the fourth corner of the tetrahedron at z = 5, as its sparse accessor says.
# Seen: trimesh reads the values without the replacement, z = 1, and says nothing.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q trimesh==5.2.0 numpy==2.2.6
"$work/venv/bin/python" - <<'PYTHON'
import base64
import io
import json
import sys

import numpy as np
import trimesh

positions = np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]], "<f4").tobytes()
corners = np.array([0, 2, 1, 0, 1, 3, 0, 3, 2, 1, 2, 3], "<u2").tobytes()
rows = np.array([3, 0], "<u2").tobytes()
values = np.array([0, 0, 5], "<f4").tobytes()
parts = [positions, corners, rows, values]
starts = np.cumsum([0, *map(len, parts)]).tolist()
views = [{"buffer": 0, "byteOffset": at, "byteLength": len(part)} for at, part in zip(starts, parts)]
sparse = {"count": 1, "indices": {"bufferView": 2, "componentType": 5123}, "values": {"bufferView": 3}}
bounds = {"min": [0, 0, 0], "max": [1, 1, 5]}
document = {
    "asset": {"version": "2.0"}, "scene": 0, "scenes": [{"nodes": [0]}], "nodes": [{"mesh": 0}],
    "meshes": [{"primitives": [{"attributes": {"POSITION": 0}, "indices": 1}]}], "bufferViews": views,
    "accessors": [
        {"bufferView": 0, "componentType": 5126, "count": 4, "type": "VEC3", "sparse": sparse, **bounds},
        {"bufferView": 1, "componentType": 5123, "count": 12, "type": "SCALAR"},
    ],
    "buffers": [{
        "byteLength": starts[-1],
        "uri": "data:application/octet-stream;base64," + base64.b64encode(b"".join(parts)).decode(),
    }],
}
scene = trimesh.load_scene(io.BytesIO(json.dumps(document).encode()), file_type="gltf")
highest = float(scene.bounds[1, 2])
print(f"trimesh {trimesh.__version__}: seen z = {highest:g} (as described: 1), expected 5")
sys.exit(highest != 1)
PYTHON
