"""PLY, text and binary: a header that declares elements and their properties, then the rows of each element.

Trimesh, which reads other formats, cannot read binary faces of different lengths, does not report a truncated
text file, and writes coordinates in single precision.
"""

import struct
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from pointproj.geometry.files.text import SHOWN, Content, FormatError, decode, fans

LARGEST_HEADER_BYTES = 1 << 16

# Codes that struct and numpy share.
_TYPES = {
    **{"char": "b", "uchar": "B", "short": "h", "ushort": "H", "int": "i", "uint": "I"},
    **{"int8": "b", "uint8": "B", "int16": "h", "uint16": "H", "int32": "i", "uint32": "I"},
    **{"float": "f", "float32": "f", "double": "d", "float64": "d"},
}
_BYTE_ORDERS = {"ascii": "", "binary_little_endian": "<", "binary_big_endian": ">"}
_CORNERS = ("vertex_indices", "vertex_index")

Columns = dict[str, Any]  # values of each property, an array or a list of sequences


class _Property(NamedTuple):
    name: str
    code: str
    count_code: str  # type of a list's length; empty for a single value


class _Element(NamedTuple):
    name: str
    count: int
    properties: list[_Property]


def parse(content: bytes) -> Content:
    """Return vertices, triangles and normals of a PLY file, which must be complete; without faces, points.

    Counts are compared with the number of bytes or lines before they are used.
    """
    if not content.startswith(b"ply"):
        raise FormatError(f"is not a PLY file: expected it to begin with ply, got {decode(content[:20])!r}")
    end = content.find(b"end_header", 0, LARGEST_HEADER_BYTES)
    start = content.find(b"\n", end) + 1
    if end < 0 or not start:
        raise FormatError(f"has no end_header in its first {LARGEST_HEADER_BYTES:,} bytes")
    order, elements = _header(decode(content[:end]).splitlines()[1:])
    declared = {element.name: element.properties for element in elements if element.count}
    if "vertex" not in declared or len({element.name for element in elements}) < len(elements):
        raise FormatError("must declare one element vertex with a count of at least 1, and no element twice")
    codes = {each.name: each.code for each in declared["vertex"] if not each.count_code}
    for axis in "xyz":
        if axis not in codes:
            given = ", ".join(codes)[:SHOWN]
            raise FormatError(f"element vertex must have the property {axis}, got {given!r}")
    lists = [each for each in declared.get("face", []) if each.name in _CORNERS]
    whole = all(each.count_code and each.code not in "fd" for each in lists)
    if not whole or len(lists) != ("face" in declared):
        raise FormatError("must list whole numbers (vertex indices) for each face")
    lines = [] if order else [line for line in decode(content[start:]).splitlines() if line.strip()]
    found: dict[str, Columns] = {}
    for element in elements:
        if order:
            found[element.name], start = _from_bytes(content, start, order, element)
        else:
            found[element.name], lines = _from_lines(lines, element)
    try:
        faces = fans([int(corner) for corner in row] for each in lists for row in found["face"][each.name])
        places, normals = (
            np.stack([_numbers(found["vertex"][axis], codes[axis]) for axis in axes], axis=1)
            if set(axes) <= codes.keys()
            else None
            for axes in (("x", "y", "z"), ("nx", "ny", "nz"))
        )
    except ValueError:
        raise FormatError("holds a word where a number must be") from None
    return Content(places, faces, normals)


def _numbers(column: Any, code: str) -> Float[np.ndarray, " n"]:
    values = np.asarray(column, dtype=np.float64).reshape(-1)
    with np.errstate(over="ignore"):  # a number that is too large for its type becomes an infinity
        return values.astype(np.float32).astype(np.float64) if code == "f" else values


def _header(lines: list[str]) -> tuple[str, list[_Element]]:
    """Return the byte order (empty for text) and the declared elements."""
    order, elements = None, []
    for line in lines:
        match line.split():
            case [] | ["comment" | "obj_info", *_]:
                pass
            case ["format", name, _] if name in _BYTE_ORDERS:
                order = _BYTE_ORDERS[name]
            case ["element", name, count] if count.isdecimal() and len(count) < 19:
                elements.append(_Element(name, int(count), []))
            case ["property", code, name] if code in _TYPES and elements:
                elements[-1].properties.append(_Property(name, _TYPES[code], ""))
            case ["property", "list", count_code, code, name] if (
                elements and _TYPES.get(count_code, "f") not in "fd" and code in _TYPES
            ):
                elements[-1].properties.append(_Property(name, _TYPES[code], _TYPES[count_code]))
            case _:
                raise FormatError(f"has a header line that is not of the PLY format: {line[:SHOWN]!r}")
    if order is None:
        raise FormatError(f"must say its format, one of {', '.join(_BYTE_ORDERS)}")
    return order, elements


def _from_lines(lines: list[str], element: _Element) -> tuple[Columns, list[str]]:
    """Return the columns of an element, which has one row a line, and the lines after it."""
    if len(lines) < element.count:
        raise _missing(element, f"{len(lines)} lines follow")
    rows, after = lines[: element.count], lines[element.count :]
    if rows and not any(each.count_code for each in element.properties):
        try:
            table = np.loadtxt(rows, comments=None, usecols=range(len(element.properties)), ndmin=2)
        except ValueError as error:
            raise FormatError(
                f"holds a word where a number must be, or too few in a line ({error})"
            ) from None
        return {each.name: values for each, values in zip(element.properties, table.T, strict=True)}, after
    columns: Columns = {each.name: [] for each in element.properties}
    for number, line in enumerate(rows):
        words, at = line.split(), 0
        for each in element.properties:
            size = 1
            if each.count_code:
                size = int(words[at]) if at < len(words) and words[at].isdecimal() else len(words)
                at += 1
            columns[each.name].append(words[at : at + size])
            at += size
        if at > len(words):
            raise FormatError(
                f"{element.name} {number} must list as many values as it declares, got {line[:SHOWN]!r}"
            )
    return columns, after


def _from_bytes(content: bytes, at: int, order: str, element: _Element) -> tuple[Columns, int]:
    """Return the columns of an element, and the offset of the next element."""
    least = sum(struct.calcsize("=" + (each.count_code or each.code)) for each in element.properties)
    if element.count * least > len(content) - at:
        raise _missing(element, f"{len(content) - at} bytes follow")
    if not any(each.count_code for each in element.properties):
        row = np.dtype([(each.name, order + each.code) for each in element.properties])
        rows = np.frombuffer(content, row, element.count if least else 0, at)
        return {each.name: rows[each.name] for each in element.properties}, at + rows.nbytes
    columns: Columns = {each.name: [] for each in element.properties}
    try:
        for _ in range(element.count):
            for each in element.properties:
                size = 1
                if each.count_code:
                    (size,) = struct.unpack_from(order + each.count_code, content, at)
                    at += struct.calcsize("=" + each.count_code)
                columns[each.name].append(struct.unpack_from(f"{order}{size}{each.code}", content, at))
                at += struct.calcsize(f"={size}{each.code}")
    except struct.error:
        raise _missing(element, "a part of them follows") from None
    return columns, at


def _missing(element: _Element, present: str) -> FormatError:
    return FormatError(f"declares {element.count} of element {element.name}, but only {present}")


def dump(vertices: Float[np.ndarray, "V 3"], faces: Int[np.ndarray, "F 3"]) -> bytes:
    """Return the content of a binary PLY file, with coordinates in double precision."""
    header = f"ply\nformat binary_little_endian 1.0\nelement vertex {len(vertices)}\n"
    header += "".join(f"property double {axis}\n" for axis in "xyz")
    header += f"element face {len(faces)}\nproperty list uchar int vertex_indices\nend_header\n"
    rows = np.empty(len(faces), dtype=[("length", "u1"), ("corners", "<i4", 3)])
    rows["length"], rows["corners"] = 3, faces
    return header.encode() + np.ascontiguousarray(vertices, "<f8").tobytes() + rows.tobytes()
