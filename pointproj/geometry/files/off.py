"""OFF: a header, counts, one vertex a line, one polygon a line.

The reader accepts the deviations of the files of ModelNet10 and ModelNet40: counts glued to the header
(``OFF3514 3546 0``), any line ends, comments, blank lines, a stray ``end_header``. Colours, normals and
texture coordinates (``COFF``, ``NOFF``, ``STOFF``, ``NCOFF``) follow a vertex's coordinates and are dropped.
Binary files and those of other dimensions are refused by name.
"""

import re

import numpy as np
from jaxtyping import Float, Int

from pointproj.geometry.files.polygons import triangles_of
from pointproj.geometry.files.text import SHOWN, Content, FormatError, lines_of, table

_HEADER = re.compile(r"(?:ST|C|N)*(4?)(n?)OFF( BINARY)?")
_HEADER_OF_ANY_CASE = re.compile(_HEADER.pattern.replace("(n?)", "()"), re.IGNORECASE)


def parse(content: bytes) -> Content:
    """Return vertices and triangles of an OFF file, or raise FormatError if it is not complete.

    Counts are compared with the number of lines before they are used.
    """
    lines = [line.split("#", 1)[0].strip() for line in lines_of(content)]
    lines = [line for line in lines if line and line.lower() != "end_header"]
    if not lines:
        raise FormatError("is empty")
    header = _HEADER.match(lines[0]) or _HEADER_OF_ANY_CASE.match(lines[0])
    if header is None:
        raise FormatError(f"is not an OFF file: expected it to begin with OFF, got {lines[0][:20]!r}")
    homogeneous, dimensions, binary = header.groups()
    if dimensions or binary:
        what = "vertices of any dimension" if dimensions else "binary numbers"
        raise FormatError(f"has {what} ({header.group()}), which are not understood: write it as plain OFF")
    glued = lines[0][header.end() :].strip()
    body = [glued, *lines[1:]] if glued else lines[1:]
    vertex_count, face_count = _counts(body[0] if body else "")
    found = len(body) - 1
    if found < vertex_count + face_count:
        raise FormatError(
            f"declares {vertex_count} vertices and {face_count} faces, but only {found} lines follow"
        )
    faces = body[1 + vertex_count : 1 + vertex_count + face_count]
    corners = (_corners(row, number) for number, row in enumerate(faces))
    rows = [row.split(None, 4)[:4] for row in body[1 : 1 + vertex_count]]
    if homogeneous and {row[3] if len(row) > 3 else "" for row in rows} - {"1", "1.0"}:
        raise FormatError(
            f"has vertices of four coordinates ({header.group()}), the last of them not 1: write plain OFF"
        )
    vertices = table([row[:3] for row in rows], "vertex")
    return Content(vertices, triangles_of(corners, vertices))


def _counts(line: str) -> tuple[int, int]:
    """Return the numbers of vertices and of faces, from the line that declares them."""
    try:
        vertex_count, face_count = (int(word) for word in line.split()[:2])
    except ValueError:
        raise FormatError(f"must declare its vertex and face counts, got {line[:SHOWN]!r}") from None
    if vertex_count < 1 or face_count < 1:
        raise FormatError(f"is empty: it declares {vertex_count} vertices and {face_count} faces")
    return vertex_count, face_count


def _corners(row: str, number: int) -> list[int]:
    """Return the vertex indices of the polygon in one line."""
    size, *words = row.split()
    try:
        count = int(size)
    except ValueError:
        count = -1
    if not 0 <= count <= len(words):
        raise FormatError(f"face {number} must list as many vertices as it declares, got {row[:SHOWN]!r}")
    try:
        return [int(word) for word in words[:count]]
    except ValueError:
        raise FormatError(f"face {number} must list whole numbers, got {row[:SHOWN]!r}") from None


def dump(vertices: Float[np.ndarray, "V 3"], faces: Int[np.ndarray, "F 3"]) -> bytes:
    """Return the content of an OFF file, with enough digits to read back the same numbers."""
    lines = ["OFF", f"{len(vertices)} {len(faces)} 0"]
    lines += [f"{x!r} {y!r} {z!r}" for x, y, z in vertices.tolist()]
    lines += [f"3 {a} {b} {c}" for a, b, c in faces.tolist()]
    return ("\n".join(lines) + "\n").encode("ascii")
