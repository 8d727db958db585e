"""Wavefront OBJ: the lines that begin with ``v`` and ``f``; all others are passed over.

Material files that a ``mtllib`` line names are not opened. Indices count from 1, or back from the last vertex
if they are negative; a line that ends in a backslash goes on in the next.
"""

from pointproj.geometry.files.text import (
    SHOWN,
    FormatError,
    Points,
    Surface,
    coordinates,
    decode,
    fans,
    indices,
)


def parse(content: bytes) -> Surface:
    """Vertices and triangles of an OBJ file.

    Raises
    ------
    FormatError
        If it has no vertices or faces, or a line of them cannot be read.
    """
    vertices, polygons = _rows(content)
    return coordinates(vertices), fans(polygons)


def parse_points(content: bytes) -> Points | None:
    """Vertices of an OBJ file without faces; None if it has faces.

    Raises
    ------
    FormatError
        As :func:`parse`.
    """
    vertices, polygons = _rows(content)
    return None if polygons else (coordinates(vertices), None)


def _rows(content: bytes) -> tuple[list[str], list[list[int]]]:
    vertices: list[str] = []
    polygons: list[list[int]] = []
    text = decode(content).replace("\\\r\n", " ").replace("\\\n", " ")
    for line in text.splitlines():
        kind, *rest = line.split("#", 1)[0].split(None, 1) or [""]
        if kind == "v":
            vertices.append(*rest or [""])
        elif kind == "f":
            polygons.append(_corners(*rest or [""], len(polygons), len(vertices)))
    if not vertices:
        raise FormatError("is not an OBJ file: expected lines that begin with v, got none")
    return vertices, polygons


def _corners(row: str, number: int, vertices_so_far: int) -> list[int]:
    """Vertex indices, from 0, of the face in one line: ``1``, ``1/2``, ``1//3`` or ``1/2/3`` a corner."""
    given = indices([word.split("/", 1)[0] for word in row.split()], number, row)
    corners = [index - 1 if index > 0 else vertices_so_far + index for index in given]
    if 0 in given or min(corners, default=0) < 0:
        raise FormatError(f"face {number} names a vertex before the first, got {row[:SHOWN]!r}")
    return corners
