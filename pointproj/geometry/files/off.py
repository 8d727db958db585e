"""OFF: a header, counts, one vertex a line, one polygon a line.

The reader accepts the deviations of the files of ModelNet10 and ModelNet40: counts glued to the header
(``OFF3514 3546 0``), any line ends, comments, blank lines, a stray ``end_header``, and the variants ``COFF``
and ``NOFF``.
"""

import re
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from pointproj.geometry.files.text import SHOWN, Content, FormatError, are_numbers, decode, fans

_HEADER = re.compile(r"\ufeff?(?:C|N|CN)?OFF", re.IGNORECASE)


def parse(content: bytes) -> Content:
    """Return vertices and triangles of an OFF file, or raise FormatError if it is not complete.

    Counts are compared with the number of lines before they are used.
    """
    lines = [line.split("#", 1)[0].strip() for line in decode(content).splitlines()]
    lines = [line for line in lines if line and line.lower() != "end_header"]
    if not lines:
        raise FormatError("is empty")
    header = _HEADER.match(lines[0])
    if header is None:
        raise FormatError(f"is not an OFF file: expected it to begin with OFF, got {lines[0][:20]!r}")
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
    return Content(_coordinates(body[1 : 1 + vertex_count]), fans(corners))


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


def _coordinates(rows: Sequence[str]) -> Float[np.ndarray, "V 3"]:
    """Return the first three numbers of each row; the rest of a row is dropped."""
    words = [row.split(None, 3)[:3] for row in rows]
    try:
        vertices = np.array(words, dtype=np.float64)
    except ValueError:
        vertices = np.empty(0)
    if vertices.shape != (len(rows), 3):
        number = next(n for n, three in enumerate(words) if len(three) < 3 or not are_numbers(three))
        raise FormatError(f"vertex {number} must have 3 coordinates, got {rows[number][:SHOWN]!r}")
    return vertices


def dump(vertices: Float[np.ndarray, "V 3"], faces: Int[np.ndarray, "F 3"]) -> bytes:
    """Return the content of an OFF file, with enough digits to read back the same numbers."""
    lines = ["OFF", f"{len(vertices)} {len(faces)} 0"]
    lines += [f"{x!r} {y!r} {z!r}" for x, y, z in vertices.tolist()]
    lines += [f"3 {a} {b} {c}" for a, b, c in faces.tolist()]
    return ("\n".join(lines) + "\n").encode("ascii")
