"""PLY: what a file declares, compared with its bytes before a library reads it, and the writer.

The library takes the lengths of lists from the first row and drops what is cut short; the rows are counted
here. It writes coordinates in single precision; here they keep all their digits.
"""

import struct
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float, Int

from pointproj.geometry.files.text import SHOWN, Checked, FormatError, decode

LARGEST_HEADER_BYTES = 1 << 16

# Codes that struct and numpy share.
_TYPES = {
    **dict.fromkeys(("char", "int8"), "b"),
    **dict.fromkeys(("uchar", "uint8"), "B"),
    **dict.fromkeys(("short", "int16"), "h"),
    **dict.fromkeys(("ushort", "uint16"), "H"),
    **dict.fromkeys(("int", "int32"), "i"),
    **dict.fromkeys(("uint", "uint32"), "I"),
    **dict.fromkeys(("float", "float32"), "f"),
    **dict.fromkeys(("double", "float64"), "d"),
}
_BYTE_ORDERS = {"ascii": "", "binary_little_endian": "<", "binary_big_endian": ">"}
_CORNERS = ("vertex_indices", "vertex_index")


@dataclass(frozen=True)
class _Property:
    name: str
    code: str
    count_code: str = ""  # of a list: what its length is written in


@dataclass(frozen=True)
class _Element:
    name: str
    count: int
    properties: list[_Property] = field(default_factory=list)

    @property
    def least_bytes(self) -> int:
        """Size of the shortest row: that of empty lists."""
        return sum(struct.calcsize("=" + (prop.count_code or prop.code)) for prop in self.properties)


def check(content: bytes) -> Checked:
    """Count what a PLY file declares.

    Binary faces of different lengths, which the library cannot read, are cut into triangles.

    Raises
    ------
    FormatError
        If it is no complete PLY file with vertices. Counts are checked against the bytes or lines present
        before they are used.
    """
    if not content.startswith(b"ply"):
        raise FormatError(f"is not a PLY file: expected it to begin with ply, got {decode(content[:20])!r}")
    end = content.find(b"end_header", 0, LARGEST_HEADER_BYTES)
    start = content.find(b"\n", end) + 1
    if end < 0 or not start:
        raise FormatError(f"has no end_header in its first {LARGEST_HEADER_BYTES:,} bytes")
    order, elements = _header(decode(content[:end]).splitlines()[1:])
    counts = Counter({element.name: element.count for element in elements})
    if len(counts) < len(elements) or counts["vertex"] < 1:
        raise FormatError("must declare one element vertex with a count of at least 1, and no element twice")
    names = {element.name: [prop.name for prop in element.properties] for element in elements}
    for axis in "xyz":
        if axis not in names["vertex"]:
            given = ", ".join(names["vertex"])[:SHOWN]
            raise FormatError(f"element vertex must have the property {axis}, got {given!r}")
    face = next((element for element in elements if element.name == "face"), _Element("face", 0))
    corners = [prop for prop in face.properties if prop.name in _CORNERS]
    if face.count and (len(corners) != 1 or not corners[0].count_code or corners[0].code in "fd"):
        raise FormatError("must list whole numbers (vertex indices) for each face")
    if not order:
        content, triangles = _text_in_order(content, start, elements)
    elif (sizes := _list_sizes(content, start, order, elements)) is None:
        content, triangles = _in_triangles(content, start, order, elements)
    else:
        triangles = face.count and face.count * max(sizes[corners[0].name] - 2, 0)
    return Checked(content, triangles, counts["vertex"])


def _header(lines: list[str]) -> tuple[str, list[_Element]]:
    """Byte order (none for text), and what is declared."""
    order, elements = None, []
    for line in lines:
        match line.split():
            case [] | ["comment" | "obj_info", *_]:
                pass
            case ["format", name, _] if name in _BYTE_ORDERS:
                order = _BYTE_ORDERS[name]
            case ["element", name, count] if count.isdecimal() and len(count) < 19:
                elements.append(_Element(name, int(count)))
            case ["property", code, name] if code in _TYPES and elements:
                elements[-1].properties.append(_Property(name, _TYPES[code]))
            case ["property", "list", count_code, code, name] if (
                elements and _TYPES.get(count_code, "f") not in "fd" and code in _TYPES
            ):
                elements[-1].properties.append(_Property(name, _TYPES[code], _TYPES[count_code]))
            case _:
                raise FormatError(f"has a header line that is not of the PLY format: {line[:SHOWN]!r}")
    if order is None:
        raise FormatError(f"must say its format, one of {', '.join(_BYTE_ORDERS)}")
    return order, elements


def _text_in_order(content: bytes, start: int, elements: list[_Element]) -> tuple[bytes, int]:
    """Text file whose rows are as long as they say, one list a face, and how many triangles these make."""
    lines, at, triangles = decode(content[start:]).splitlines(), 0, 0
    for element in elements:
        rows = lines[at : at + element.count]
        _require(len(rows) == element.count, element, f"{len(rows)} lines follow")
        lists = [_text_corners(row, number, element) for number, row in enumerate(rows)]
        at += element.count
        if element.name == "face":
            triangles = sum(max(len(corners) - 2, 0) for corners in lists)
            if sum(bool(prop.count_code) for prop in element.properties) > 1:
                kept = [*lines[: at - element.count], *(" ".join([str(len(c)), *c]) for c in lists)]
                head = content[: content.find(b"element face")] + _face_header(element.count)
                return head + "\n".join(kept).encode(), triangles
    return content, triangles


def _text_corners(row: str, number: int, element: _Element) -> list[str]:
    """Words of the list of corners in a row, which must hold all values that it declares."""
    words, at, corners = row.split(), 0, []
    for prop in element.properties:
        size = 1
        if prop.count_code:
            size = int(words[at]) if at < len(words) and words[at].isdecimal() else len(words)
            at += 1
        if prop.name in _CORNERS:
            corners = words[at : at + size]
        at += size
    if at > len(words):
        raise FormatError(
            f"{element.name} {number} must list as many values as it declares, got {row[:SHOWN]!r}"
        )
    return corners


def _list_sizes(content: bytes, start: int, order: str, elements: list[_Element]) -> dict[str, int] | None:
    """Length of each list by name, if it is the same in all rows and nothing follows the last row."""
    sizes = {}
    for element in elements:
        left = len(content) - start
        _require(element.count * element.least_bytes <= left, element, f"{left} bytes follow")
        if not element.count:
            continue
        fields = []
        for prop in element.properties:
            if prop.count_code:
                at = start + np.dtype(fields).itemsize
                (sizes[prop.name],) = _unpacked(content, at, order + prop.count_code, element)
                fields.append((f"{prop.name} count", order + prop.count_code))
            shape = (sizes[prop.name],) if prop.count_code else ()
            fields.append((prop.name, order + prop.code, shape))
        row = np.dtype(fields)
        if element.count * row.itemsize > left:
            return None
        rows = np.frombuffer(content, row, element.count, start)
        lists = (prop.name for prop in element.properties if prop.count_code)
        if any((rows[f"{name} count"] != sizes[name]).any() for name in lists):
            return None
        start += rows.nbytes
    return sizes if start == len(content) else None


def _in_triangles(content: bytes, start: int, order: str, elements: list[_Element]) -> tuple[bytes, int]:
    """File of the same vertices whose faces are triangles, and how many these are."""
    names = [element.name for element in elements]
    place = names.index("face") if "face" in names else len(names)
    before, face = elements[:place], next(iter(elements[place:]), _Element("face", 0))
    if any(prop.count_code for element in before for prop in element.properties):
        raise FormatError(
            "has lists before its faces: expected them to be equally long, and nothing after all"
        )
    at = start + sum(element.count * element.least_bytes for element in before)
    kept, triangles = content[start:at], []
    for _ in range(face.count):
        for prop in face.properties:
            size = 1
            if prop.count_code:
                (size,) = _unpacked(content, at, order + prop.count_code, face)
                at += struct.calcsize("=" + prop.count_code)
            values = _unpacked(content, at, f"{order}{size}{prop.code}", face)
            at += struct.calcsize(f"={size}{prop.code}")
            if prop.name in _CORNERS:
                triangles += [(values[0], *values[i : i + 2]) for i in range(1, size - 1)]
    head = content[: content.find(b"element face")] if face.count else content[: content.find(b"end_header")]
    rows = _rows(np.array(triangles, np.int64).reshape(-1, 3), order)
    return head + _face_header(len(triangles)) + kept + rows.tobytes(), len(triangles)


def _unpacked(content: bytes, at: int, layout: str, element: _Element) -> tuple:
    try:
        return struct.unpack_from(layout, content, at)
    except struct.error:
        raise FormatError(
            f"declares {element.count} of element {element.name}, but only a part of them follows"
        ) from None


def _require(condition: bool, element: _Element, present: str) -> None:
    if not condition:
        raise FormatError(f"declares {element.count} of element {element.name}, but only {present}")


def _face_header(count: int) -> bytes:
    return f"element face {count}\nproperty list uchar int vertex_indices\nend_header\n".encode()


def _rows(faces: Int[np.ndarray, "F 3"], order: str) -> np.ndarray:
    rows = np.empty(len(faces), dtype=[("length", "u1"), ("corners", f"{order}i4", 3)])
    rows["length"], rows["corners"] = 3, faces
    return rows


def dump(vertices: Float[np.ndarray, "V 3"], faces: Int[np.ndarray, "F 3"]) -> bytes:
    """Content of a binary PLY file: coordinates in double precision, faces as lists of three."""
    header = "ply\nformat binary_little_endian 1.0\n" + f"element vertex {len(vertices)}\n"
    header += "".join(f"property double {axis}\n" for axis in "xyz")
    numbers = np.ascontiguousarray(vertices, "<f8").tobytes()
    return header.encode() + _face_header(len(faces)) + numbers + _rows(faces, "<").tobytes()
