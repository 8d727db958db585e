"""OBJ, STL, glTF and 3MF: checks of a file's content before a library reads it.

The library may misread a file without an error: it resolves negative OBJ indices from the last vertex of the
whole file, drops a truncated second STL solid, and expands everything that an archive or a scene repeats. So
these checks count the triangles that the library must find, and refuse content that it would misread, with a
FormatError.
"""

import io
import json
import re
import struct
import zipfile
from collections import Counter
from typing import Any

from pointproj.geometry.files.text import SHOWN, Checked, FormatError, decode

LARGEST_CONTENT = 1 << 28
"""Most bytes that an archive may expand to, and most values that a scene may declare."""

LARGEST_INSTANCES = 10_000
"""Most times that a 3MF file may repeat an object."""

_STL_HEADER_BYTES, _STL_TRIANGLE_BYTES = 84, 50


def obj(content: bytes) -> Checked:
    """Reduce an OBJ file to lines that begin with ``v`` and ``f``, with positive vertex indices only.

    Indices in the file may be negative: they count back from the last vertex before their line. A line that
    ends with a backslash continues in the next line.
    """
    text = decode(content).replace("\\\r\n", " ").replace("\\\n", " ")
    kept: list[str] = []
    vertices = triangles = faces = largest = 0
    for line in text.splitlines():
        kind, *words = line.split("#", 1)[0].split() or [""]
        if kind == "v":
            if len(words) < 3:
                raise FormatError(f"vertex {vertices} must have 3 coordinates, got {line[:SHOWN]!r}")
            kept.append(" ".join([kind, *words[:3]]))
            vertices += 1
        elif kind == "f":
            corners = _obj_corners(words, vertices, faces)
            largest = max(largest, *corners, 0)
            kept.append(" ".join([kind, *map(str, corners)]))
            faces += 1
            triangles += max(len(corners) - 2, 0)
    if not vertices:
        raise FormatError("is not an OBJ file: expected lines that begin with v, got none")
    if largest > vertices:
        raise FormatError(f"has a face that names a vertex outside 0 to {vertices - 1}")
    return Checked("\n".join(kept).encode(), triangles, vertices)


def _obj_corners(words: list[str], vertices_so_far: int, face: int) -> list[int]:
    shown = " ".join(words)[:SHOWN]
    try:
        corners = [int(word.split("/", 1)[0]) for word in words]
    except ValueError:
        raise FormatError(f"face {face} must list whole numbers, got {shown!r}") from None
    corners = [corner if corner >= 0 else vertices_so_far + 1 + corner for corner in corners]
    if min(corners, default=1) < 1:
        raise FormatError(f"face {face} names a vertex before the first, got {shown!r}")
    return corners


def stl(content: bytes) -> Checked:
    """Count the triangles of an STL file, binary or text, which must be complete.

    A file is binary if its length is that of a binary file with the count of triangles at its beginning. How
    it begins does not decide, since many binary files begin with ``solid`` too.
    """
    declared = int.from_bytes(content[80:_STL_HEADER_BYTES], "little")
    expected = _STL_HEADER_BYTES + declared * _STL_TRIANGLE_BYTES
    if len(content) == expected and declared:
        return Checked(content, declared)
    if content.lstrip()[:5].lower() != b"solid":
        raise FormatError(
            f"is not a whole STL file: expected text that begins with solid, or {declared} triangles in "
            f"{expected} bytes; got {len(content)} bytes"
        )
    words = Counter()
    for line in decode(content).lower().splitlines():
        first = line.split(None, 1)[0] if line.strip() else ""
        words[first] += 1
        if first == "endfacet" and words["vertex"] != 3 * words["endfacet"]:
            raise FormatError(f"facet {words['endfacet'] - 1} must have 3 vertices")
    if words["endsolid"] != words["solid"] or words["vertex"] != 3 * words["endfacet"]:
        raise FormatError(f"is cut short: expected endsolid after facet {words['endfacet'] - 1}")
    return Checked(content, words["endfacet"])


def glb(content: bytes) -> Checked:
    """Check the scene of a binary glTF file: see :func:`gltf`."""
    if len(content) < 20 or content[:4] != b"glTF":
        raise FormatError(f"is not a GLB file: expected it to begin with glTF, got {decode(content[:20])!r}")
    length, json_length = struct.unpack_from("<II", content, 8)
    if length != len(content):
        raise FormatError(f"declares {length} bytes, but holds {len(content)}")
    _check_scene(content[20 : 20 + json_length])
    return Checked(content)


def gltf(content: bytes) -> Checked:
    """Check the scene of a glTF file.

    It must not declare more than :data:`LARGEST_CONTENT` values, need a decoder, or contain triangle fans.
    """
    _check_scene(content)
    return Checked(content)


def _check_scene(text: bytes) -> None:
    scene: dict[str, Any] = json.loads(text)
    declared = sum(abs(int(accessor["count"])) for accessor in scene.get("accessors", []))
    if declared > LARGEST_CONTENT:
        raise FormatError(f"declares {declared:,} values: expected at most {LARGEST_CONTENT:,}")
    needed = [str(name) for name in scene.get("extensionsRequired", [])]
    unknown = [name for name in needed if not re.match(r"(KHR|EXT)_(materials|texture|lights)_", name)]
    modes = {part.get("mode", 4) for mesh in scene.get("meshes", []) for part in mesh["primitives"]}
    if unknown or not modes <= {0, 1, 2, 3, 4, 5}:
        what = ", ".join(unknown) or "triangle fans"
        raise FormatError(f"needs {what[:SHOWN]}, which is not understood: write it as plain triangles")


def threemf(content: bytes) -> Checked:
    """Check how much a 3MF file expands to: its archive, and its objects made of other objects.

    The archive may expand to :data:`LARGEST_CONTENT` bytes, and objects to :data:`LARGEST_INSTANCES` objects.
    """
    from lxml import etree

    archive = zipfile.ZipFile(io.BytesIO(content))
    unfolded = sum(member.file_size for member in archive.infolist())
    if unfolded > LARGEST_CONTENT:
        raise FormatError(f"unfolds to {unfolded:,} bytes: expected at most {LARGEST_CONTENT:,}")
    uses: dict[str, int] = {}
    models = [name for name in archive.namelist() if name.lower().endswith(".model")]
    for name in sorted(models, key=lambda name: "3d/3dmodel" in name.lower()):  # after those that it uses
        for _, item in etree.iterparse(archive.open(name), tag="{*}object", resolve_entities=False):
            used = [part.get("objectid") for part in item.iter("{*}component")]
            uses[item.get("id")] = 1 + sum(uses[each] for each in used)  # KeyError if it holds itself
            item.clear()
    if max(uses.values(), default=0) > LARGEST_INSTANCES:
        raise FormatError(f"repeats its objects more than {LARGEST_INSTANCES:,} times")
    return Checked(content)
