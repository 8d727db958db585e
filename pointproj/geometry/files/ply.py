"""PLY, text and binary: a header that declares elements and their properties, then the rows of each element.

Surface is in the elements ``face`` and ``tristrips``. Others that may hold surface are refused by name.
"""

import re
import struct
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from pointproj.geometry.files.polygons import strip, triangles_of
from pointproj.geometry.files.text import SHOWN, Content, FormatError, decode, lines_of, require_fields

LARGEST_HEADER_BYTES = 1 << 16

# Codes that struct and numpy share.
_TYPES = {
    **{"char": "b", "uchar": "B", "short": "h", "ushort": "H", "int": "i", "uint": "I"},
    **{"int8": "b", "uint8": "B", "int16": "h", "uint16": "H", "int32": "i", "uint32": "I"},
    **{"float": "f", "float32": "f", "double": "d", "float64": "d"},
}
_BYTE_ORDERS = {"ascii": "", "binary_little_endian": "<", "binary_big_endian": ">"}
_NORMALS = (["nx", "ny", "nz"], ["normal_x", "normal_y", "normal_z"])
_CORNERS = ("vertex_indices", "vertex_index")
_SURFACES = ("face", "tristrips")
_NO_SURFACES = (
    "vertex",
    "edge",
    "range_grid",
    "camera",
    "material",
    "multi_texture_vertex",
    "multi_texture_face",
)

Columns = dict[str, Any]  # values of each property, an array or a list of sequences


class _Property(NamedTuple):
    name: str
    code: str
    count_code: str  # type of a list's length; empty for a single value


class _Element(NamedTuple):
    name: str
    count: int
    properties: list[_Property]


def parse(content: bytes, fields: Sequence[str] = ()) -> Content:
    """Return vertices, triangles and normals of a PLY file, which must be complete; without faces, points.

    Counts are compared with the number of bytes or lines before they are used.
    """
    if not content.startswith(b"ply"):
        raise FormatError(f"is not a PLY file: expected it to begin with ply, got {decode(content[:20])!r}")
    lines, start = _header_lines(content)
    order, elements = _header(lines[1:])
    declared = {element.name: element.properties for element in elements if element.count}
    if "vertex" not in declared or len({element.name for element in elements}) < len(elements):
        raise FormatError("must declare one element vertex with a count of at least 1, and no element twice")
    codes = {each.name: each.code for each in declared["vertex"] if not each.count_code}
    for axis in "xyz":
        if axis not in codes:
            given = ", ".join(codes)[:SHOWN]
            raise FormatError(f"element vertex must have the property {axis}, got {given!r}")
    normal_names = next((axes for axes in _NORMALS if {*axes} <= codes.keys()), None)
    require_fields(fields, codes)
    lists = {name: _corner_list(name, declared[name]) for name in _SURFACES if name in declared}
    for name in declared.keys() - {*_SURFACES, *_NO_SURFACES}:
        if _may_be_surface(declared[name]):
            raise FormatError(f"has the element {name[:SHOWN]}, which may be surface and is not understood")
    lines = [] if order else [line for line in lines_of(content[start:]) if line.strip()]
    found: dict[str, Columns] = {}
    for element in elements:
        if order:
            found[element.name], start = _from_bytes(content, start, order, element)
        else:
            found[element.name], lines = _from_lines(lines, element)
    try:
        rows = {
            name: [[int(corner) for corner in row] for row in found[name][each]]
            for name, each in lists.items()
        }
        places, normals = (
            None if axes is None else np.stack([_numbers(found["vertex"][each]) for each in axes], axis=1)
            for axes in (["x", "y", "z"], normal_names)
        )
        values = {name: _numbers(found["vertex"][name]) for name in fields}
    except ValueError:
        raise FormatError("holds a word where a number must be") from None
    strips = [strip(np.array(part)) for row in rows.get("tristrips", []) for part in _strips(row)]
    faces = np.concatenate([triangles_of(rows.get("face", []), places), *strips])
    lines = "lines" if {"edge", *_SURFACES} & declared.keys() else ""
    return Content(places, faces, normals, other=lines, values=values)


def _header_lines(content: bytes) -> tuple[list[str], int]:
    """Return the lines of the header, without the last, and where the data begin.

    All lines end as the first does. In binary data, what follows CR alone may look like LF.
    """
    first = re.search(rb"\r\n|\r|\n", content[:LARGEST_HEADER_BYTES])
    end = b"\r" if first and first.group() == b"\r" else b"\n"
    lines, start = [], 0
    while (at := content.find(end, start, LARGEST_HEADER_BYTES) + 1) > 0:
        line, start = content[start:at].strip(), at
        if line == b"end_header":
            return lines, start
        lines.append(decode(line))
    raise FormatError(f"has no end_header in its first {LARGEST_HEADER_BYTES:,} bytes")


def _corner_list(element: str, properties: list[_Property]) -> str:
    """Return the name of the property with an element's vertex indices."""
    lists = [each for each in properties if each.name in _CORNERS]
    if len(lists) != 1 or not lists[0].count_code or lists[0].code in "fd":
        raise FormatError(f"must list whole numbers (vertex indices) for each {element}")
    return lists[0].name


def _may_be_surface(properties: list[_Property]) -> bool:
    """Return whether properties may name the corners of polygons: a list of whole numbers, or three."""
    whole = [each for each in properties if each.code not in "fd"]
    return len(whole) > 2 or any(each.count_code for each in whole)


def _strips(row: list[int]) -> list[list[int]]:
    """Split a row at each -1, which begins another strip."""
    ends = [-1, *(at for at, corner in enumerate(row) if corner == -1), len(row)]
    return [row[low + 1 : high] for low, high in pairwise(ends) if high - low > 3]


def _numbers(column: Any) -> Float[np.ndarray, " n"]:
    return np.asarray(column, dtype=np.float64).reshape(-1)


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
