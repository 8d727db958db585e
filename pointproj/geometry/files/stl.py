"""STL, binary (in single precision) and text: triangles with corners of their own."""

import numpy as np
from jaxtyping import Float, Int

from pointproj.geometry.files.text import SHOWN, Content, FormatError, lines_of, table

_HEADER_BYTES = 84
_ROW = np.dtype([("normal", "<f4", 3), ("corners", "<f4", (3, 3)), ("attribute", "<u2")])

_WORDS = ("solid", "facet", "outer", "vertex", "endloop", "endfacet", "endsolid")


def parse(content: bytes) -> Content:
    """Return the triangles of an STL file, which must be complete; all solids of a text file count.

    A file is binary if its length is that of a binary file with the count of triangles at its beginning. How
    it begins does not decide, since many binary files begin with ``solid`` too.
    """
    declared = int.from_bytes(content[80:_HEADER_BYTES], "little")
    expected = _HEADER_BYTES + declared * _ROW.itemsize
    if len(content) == expected:
        corners = np.frombuffer(content, _ROW, declared, _HEADER_BYTES)["corners"].reshape(-1, 3)
        return _triangles(corners.astype(np.float64))
    if content.removeprefix(b"\xef\xbb\xbf").lstrip()[:5].lower() != b"solid":
        raise FormatError(
            f"is not a whole STL file: expected text that begins with solid, or {declared} triangles in "
            f"{expected} bytes; got {len(content)} bytes"
        )
    return _triangles(_text_corners(lines_of(content)))


def _text_corners(lines: list[str]) -> Float[np.ndarray, "V 3"]:
    """Return the corners of all facets. A solid's name may hold any word."""
    rows: list[list[str]] = []
    facets, inside, open_solid = 0, False, False
    for line in lines:
        word, *rest = line.split() or [""]
        match word.lower():
            case "solid" if not open_solid:
                open_solid = True
            case "facet" if open_solid and not inside:
                inside = True
            case "vertex" if inside:
                rows.append(rest)
            case "endfacet" if inside:
                facets, inside = facets + 1, False
                if len(rows) != 3 * facets:
                    raise FormatError(
                        f"facet {facets - 1} must have 3 vertices, got {len(rows) - 3 * facets + 3}"
                    )
            case "endsolid" if open_solid and not inside:
                open_solid = False
            case "outer" | "endloop":
                pass
            case known if known in _WORDS:
                raise FormatError(f"has a line out of its place in facet {facets}: {line.strip()[:SHOWN]!r}")
    if inside or open_solid:
        raise FormatError(f"is cut short: expected endsolid after {facets} facets")
    return table(rows, "vertex")


def _triangles(corners: Float[np.ndarray, "V 3"]) -> Content:
    return Content(corners, np.arange(len(corners)).reshape(-1, 3))


def dump(vertices: Float[np.ndarray, "V 3"], faces: Int[np.ndarray, "F 3"]) -> bytes:
    """Return the content of a binary STL file."""
    rows = np.zeros(len(faces), _ROW)
    rows["corners"] = vertices[faces]
    a, b, c = np.moveaxis(vertices[faces], 1, 0)
    normals = np.cross(b - a, c - a)
    length = np.linalg.norm(normals, axis=1, keepdims=True)
    rows["normal"] = normals / np.where(length > 0, length, 1)
    return bytes(_HEADER_BYTES - 4) + len(faces).to_bytes(4, "little") + rows.tobytes()
