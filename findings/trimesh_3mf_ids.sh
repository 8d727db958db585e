#!/usr/bin/env bash
# 3MF (production extension): an id is that of an object in one model file, so two files may use the same id.
# Expected: two objects of the id 1, in two files and with one tetrahedron each, give 8 faces.
# Seen: trimesh keeps objects by id alone, and gives 16, each part twice.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q trimesh==5.2.0 lxml==6.1.3 networkx==3.6.1
"$work/venv/bin/python" - <<'PYTHON'
import io
import sys
import zipfile

import trimesh

CORE = "http://schemas.microsoft.com/3dmanufacturing/core/2015/02"
PRODUCTION = "http://schemas.microsoft.com/3dmanufacturing/production/2015/06"


def model(objects, build=""):
    spaces = f'xmlns="{CORE}" xmlns:p="{PRODUCTION}"'
    return f"<model unit='millimeter' {spaces}><resources>{objects}</resources><build>{build}</build></model>"


places = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
vertices = "".join(f'<vertex x="{x}" y="{y}" z="{z}"/>' for x, y, z in places)
corners = [(0, 2, 1), (0, 1, 3), (0, 3, 2), (1, 2, 3)]
triangles = "".join(f'<triangle v1="{a}" v2="{b}" v3="{c}"/>' for a, b, c in corners)
mesh = f"<mesh><vertices>{vertices}</vertices><triangles>{triangles}</triangles></mesh>"
part = model(f'<object id="1" type="model">{mesh}</object>')
users = "".join(
    f'<object id="{number}" type="model"><components><component p:path="/3D/{name}.model" objectid="1"/>'
    "</components></object>"
    for number, name in ((10, "a"), (11, "b"))
)
away = 'transform="1 0 0 0 1 0 0 0 1 5 0 0"'
content = io.BytesIO()
with zipfile.ZipFile(content, "w") as archive:
    archive.writestr("3D/3dmodel.model", model(users, f'<item objectid="10"/><item objectid="11" {away}/>'))
    archive.writestr("3D/a.model", part)
    archive.writestr("3D/b.model", part)
content.seek(0)
faces = len(trimesh.load_scene(content, file_type="3mf").to_mesh().faces)
print(f"trimesh {trimesh.__version__}: seen {faces} faces (as described: 16), expected 8")
sys.exit(faces != 16)
PYTHON
