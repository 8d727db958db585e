"""PLY, text and binary of either byte order: its vertices and faces; all other elements are passed over."""

import struct
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float, Int

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
NORMAL_NAMES = ("nx", "ny", "nz")
_FACE_LISTS = ("vertex_indices", "vertex_index")


@dataclass(frozen=True)
class _Property:
    name: str
    code: str
    count_code: str | None = None  # of a list: what its length is written in


@dataclass(frozen=True)
class _Element:
    name: str
    count: int
    properties: list[_Property] = field(default_factory=list)

    @property
    def least_bytes(self) -> int:
        """Size of the shortest row: that of empty lists."""
        return sum(struct.calcsize("=" + (prop.count_code or prop.code)) for prop in self.properties)

    def place(self, *names: str) -> int:
        """Place of the first property with one of these names."""
        for place, prop in enumerate(self.properties):
            if prop.name in names:
                return place
        given = ", ".join(prop.name for prop in self.properties)[:SHOWN]
        raise FormatError(f"element {self.name} must have the property {names[0]}, got {given!r}")


def parse(content: bytes) -> Surface:
    """Vertices and triangles of a PLY file.

    Raises
    ------
    FormatError
        If it is no complete PLY file with vertices and faces. Counts are checked against the bytes or lines
        present before they are used.
    """
    lines, body = _split(content)
    byte_order, elements = _header(lines)
    vertex, face = (_declared(elements, name) for name in ("vertex", "face"))
    axes, corners = [vertex.place(axis) for axis in "xyz"], face.place(*_FACE_LISTS)
    listed = face.properties[corners]
    if any(prop.count_code for prop in vertex.properties) or not listed.count_code or listed.code in "fd":
        raise FormatError(
            "must list whole numbers (vertex indices) for each face, and must not have lists for vertices"
        )
    if not byte_order:
        rows = _text_rows(elements, body)
        vertices = coordinates([" ".join(_words(row, axes)) for row in rows["vertex"]])
        return vertices, fans(_text_corners(row, i, face, corners) for i, row in enumerate(rows["face"]))
    columns = _binary_columns(elements, body, byte_order)
    vertices = np.stack([np.asarray(columns["vertex"][axis], dtype=np.float64) for axis in axes], axis=-1)
    polygons = columns["face"][corners]
    return vertices, _array_fans(polygons) if isinstance(polygons, np.ndarray) else fans(polygons)


def parse_points(content: bytes) -> Points | None:
    """Vertices of a PLY file without faces, and their normals if it has them; None if it has faces.

    Raises
    ------
    FormatError
        If it is no complete PLY file.
    """
    lines, body = _split(content)
    byte_order, elements = _header(lines)
    if any(element.name == "face" and element.count for element in elements):
        return None
    vertex = _declared(elements, "vertex")
    names = [prop.name for prop in vertex.properties]
    places = [vertex.place(axis) for axis in "xyz"]
    places += [names.index(name) for name in NORMAL_NAMES if set(NORMAL_NAMES) <= set(names)]
    if byte_order:
        columns = _binary_columns(elements, body, byte_order)["vertex"]
        numbers = np.stack([np.asarray(columns[place], dtype=np.float64) for place in places], axis=-1)
        return numbers[:, :3], numbers[:, 3:] if len(places) == 6 else None
    rows = _text_rows(elements, body)["vertex"]
    parts = [
        coordinates([" ".join(_words(row, axes)) for row in rows])
        for axes in (places[:3], places[3:])
        if axes
    ]
    return parts[0], parts[1] if len(parts) == 2 else None


def _split(content: bytes) -> tuple[list[str], bytes]:
    """Lines of the header, and what follows it."""
    if not content.startswith(b"ply"):
        raise FormatError(f"is not a PLY file: expected it to begin with ply, got {decode(content[:20])!r}")
    line_end = b"\r\n" if content[3:5] == b"\r\n" else content[3:4]
    end = content.find(b"end_header" + line_end, 0, LARGEST_HEADER_BYTES)
    if line_end not in (b"\n", b"\r", b"\r\n") or end < 0:
        raise FormatError(f"has no end_header in its first {LARGEST_HEADER_BYTES:,} bytes")
    return decode(content[:end]).splitlines()[1:], content[end + len(b"end_header" + line_end) :]


def _header(lines: list[str]) -> tuple[str, list[_Element]]:
    """Byte order (none for text), and what is declared."""
    byte_order, elements = None, []
    for line in lines:
        match line.split():
            case [] | ["comment" | "obj_info", *_]:
                pass
            case ["format", name, _] if name in _BYTE_ORDERS:
                byte_order = _BYTE_ORDERS[name]
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
    if byte_order is None:
        raise FormatError(f"must say its format, one of {', '.join(_BYTE_ORDERS)}")
    return byte_order, elements


def _declared(elements: list[_Element], name: str) -> _Element:
    found = [element for element in elements if element.name == name]
    if len(found) != 1 or found[0].count < 1:
        raise FormatError(f"must declare one element {name} with a count of at least 1")
    return found[0]


def _text_rows(elements: list[_Element], body: bytes) -> dict[str, list[str]]:
    """Lines of each element."""
    lines = [line for line in decode(body).splitlines() if line.strip()]
    rows, start = {}, 0
    for element in elements:
        count = element.count if element.properties else 0
        _require(count <= len(lines) - start, element, f"{len(lines) - start} lines follow")
        rows[element.name] = lines[start : start + count]
        start += count
    return rows


def _words(row: str, places: list[int]) -> list[str]:
    words = row.split()
    return [words[place] for place in places if place < len(words)]


def _text_corners(row: str, number: int, face: _Element, wanted: int) -> list[int]:
    """Vertex indices of the polygon in one line."""
    words, start = row.split(), 0
    for place, prop in enumerate(face.properties):
        length = 1
        if prop.count_code:
            (length,) = indices(words[start : start + 1], number, row) or (-1,)
            start += 1
        if not 0 <= length <= len(words) - start:
            break
        if place == wanted:
            return indices(words[start : start + length], number, row)
        start += length
    raise FormatError(f"face {number} must list as many values as it declares, got {row[:SHOWN]!r}")


def _binary_columns(elements: list[_Element], body: bytes, byte_order: str) -> dict[str, list]:
    """Values of each element by property: arrays where all rows are equally long, else lists of tuples."""
    columns, start = {}, 0
    for element in elements:
        left = len(body) - start
        _require(element.count * element.least_bytes <= left, element, f"{left} bytes follow")
        if not element.least_bytes or not element.count:
            continue
        equal = _equal_rows(element, body, start, byte_order)
        columns[element.name], start = equal or _unequal_rows(element, body, start, byte_order)
    return columns


def _equal_rows(
    element: _Element, body: bytes, start: int, byte_order: str
) -> tuple[list[np.ndarray], int] | None:
    """Columns and where they end, if the lists of all rows are as long as those of the first; else None."""
    lengths = [len(values) for values in _row(element, body, start, byte_order)[0]]
    fields = []
    for place, (prop, length) in enumerate(zip(element.properties, lengths, strict=True)):
        if prop.count_code:
            fields.append((f"length_{place}", byte_order + prop.count_code))
        shape = (length,) if prop.count_code else ()
        fields.append((f"values_{place}", byte_order + prop.code, shape))
    row = np.dtype(fields)
    end = start + element.count * row.itemsize
    if end > len(body):
        return None
    rows = np.frombuffer(body, row, element.count, start)
    for place, (prop, length) in enumerate(zip(element.properties, lengths, strict=True)):
        if prop.count_code and (rows[f"length_{place}"] != length).any():
            return None
    return [rows[f"values_{place}"] for place in range(len(lengths))], end


def _unequal_rows(
    element: _Element, body: bytes, start: int, byte_order: str
) -> tuple[list[list[tuple]], int]:
    """Columns and where they end, row by row."""
    columns: list[list[tuple]] = [[] for _ in element.properties]
    for _ in range(element.count):
        values, start = _row(element, body, start, byte_order)
        for column, value in zip(columns, values, strict=True):
            column.append(value)
    return columns, start


def _row(element: _Element, body: bytes, start: int, byte_order: str) -> tuple[list[tuple], int]:
    """Values of one row by property, and where it ends."""
    values = []
    for prop in element.properties:
        length = 1
        if prop.count_code:
            ((length,), start) = _unpack(element, body, start, byte_order, prop.count_code, 1)
        value, start = _unpack(element, body, start, byte_order, prop.code, length)
        values.append(value)
    return values, start


def _unpack(
    element: _Element, body: bytes, start: int, byte_order: str, code: str, length: int
) -> tuple[tuple, int]:
    end = start + length * struct.calcsize("=" + code)
    _require(start <= end <= len(body), element, "a part of them follows")
    return struct.unpack_from(f"{byte_order}{length}{code}", body, start), end


def _array_fans(corners: Int[np.ndarray, "n k"]) -> Int[np.ndarray, "F 3"]:
    """Fans of polygons with equally many corners."""
    if corners.shape[1] < 3:
        return fans([])
    later = np.arange(2, corners.shape[1])
    triangles = np.stack(
        np.broadcast_arrays(corners[:, :1], corners[:, later - 1], corners[:, later]), axis=-1
    )
    return triangles.reshape(-1, 3).astype(np.int64)


def _require(condition: bool, element: _Element, present: str) -> None:
    if not condition:
        raise FormatError(f"declares {element.count} of element {element.name}, but only {present}")


def dump(vertices: Float[np.ndarray, "V 3"], faces: Int[np.ndarray, "F 3"]) -> bytes:
    """Content of a binary PLY file: coordinates in double precision, faces as lists of three."""
    header = [
        "ply",
        "format binary_little_endian 1.0",
        f"element vertex {len(vertices)}",
        *(f"property double {axis}" for axis in "xyz"),
        f"element face {len(faces)}",
        "property list uchar int vertex_indices",
        "end_header",
    ]
    rows = np.empty(len(faces), dtype=[("length", "u1"), ("corners", "<i4", 3)])
    rows["length"], rows["corners"] = 3, faces
    text = "\n".join(header) + "\n"
    return text.encode("ascii") + np.ascontiguousarray(vertices, "<f8").tobytes() + rows.tobytes()
