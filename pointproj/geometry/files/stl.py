"""STL, binary and text: triangles with corners of their own, whose normals are dropped."""

import numpy as np
from jaxtyping import Float

from pointproj.geometry.files.text import SHOWN, FormatError, Surface, coordinates, decode

_HEADER_BYTES = 84  # 80 of anything, and the number of triangles
_TRIANGLE = np.dtype([("normal", "<f4", 3), ("corners", "<f4", (3, 3)), ("attribute", "<u2")])


def parse(content: bytes) -> Surface:
    """Vertices and triangles of an STL file.

    A file as long as a binary one of its count is binary, whatever it begins with: many of those begin with
    ``solid`` as well.

    Raises
    ------
    FormatError
        If it is neither whole binary nor whole text, or has no triangle.
    """
    declared = int.from_bytes(content[80:_HEADER_BYTES], "little")
    if len(content) == _HEADER_BYTES + declared * _TRIANGLE.itemsize and declared:
        blob = np.frombuffer(content, dtype=_TRIANGLE, offset=_HEADER_BYTES)
        vertices = blob["corners"].astype(np.float64).reshape(-1, 3)
    elif content.lstrip()[:5].lower() == b"solid":
        vertices = _text_corners(decode(content))
    else:
        raise FormatError(
            f"is not a whole STL file: expected text that begins with solid, or {declared} triangles in "
            f"{_HEADER_BYTES + declared * _TRIANGLE.itemsize} bytes; got {len(content)} bytes"
        )
    return vertices, np.arange(len(vertices)).reshape(-1, 3)


def _text_corners(text: str) -> Float[np.ndarray, "V 3"]:
    """Corners in their order, three a facet."""
    corners: list[str] = []
    facet, last = 0, ""
    for line in text.splitlines():
        last, _, rest = line.strip().partition(" ")
        last = last.lower()
        if last == "vertex":
            corners.append(rest)
        elif last == "endfacet":
            facet += 1
            if len(corners) != 3 * facet:
                raise FormatError(
                    f"facet {facet - 1} must have 3 vertices, got {len(corners) - 3 * facet + 3}"
                )
    if last != "endsolid" or len(corners) != 3 * facet:
        raise FormatError(f"is cut short: expected endsolid after facet {facet - 1}, got {last[:SHOWN]!r}")
    if not corners:
        raise FormatError("has no face with three vertices")
    return coordinates(corners)
