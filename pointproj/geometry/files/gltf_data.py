"""The data of a glTF file: its document, the bytes of its buffers, and the arrays of its accessors.

Specification: glTF 2.0, with KHR_mesh_quantization. No second file is opened.
"""

import base64
import json
import struct
from typing import Any
from urllib.parse import unquote_to_bytes

import numpy as np

from pointproj.geometry.files.text import SHOWN, FormatError, decode

LARGEST_CONTENT = 1 << 28
"""Most values that a scene may declare."""

_LARGEST_EMPTY = 1 << 22  # most values of an accessor without bytes, which are zeros

_MAGIC, _JSON, _BIN = b"glTF", b"JSON", b"BIN\0"
_HEADER_BYTES, _CHUNK_BYTES = 12, 8

_COMPONENTS = {5120: "<i1", 5121: "<u1", 5122: "<i2", 5123: "<u2", 5125: "<u4", 5126: "<f4"}
_WIDTHS = {"SCALAR": 1, "VEC2": 2, "VEC3": 3, "VEC4": 4, "MAT4": 16}


class Document:
    """The JSON of a glTF file, and the arrays that it describes."""

    def __init__(self, text: bytes, binary: bytes | None) -> None:
        self.json: dict[str, Any] = json.loads(decode(text.removeprefix(b"\xef\xbb\xbf")))
        self._binary = binary
        self._buffers: dict[int, bytes] = {}
        accessors = self.entries("accessors")
        declared = sum(abs(int(each["count"])) for each in accessors)
        if declared > LARGEST_CONTENT:
            raise FormatError(f"declares {declared:,} values: expected at most {LARGEST_CONTENT:,}")

    def entries(self, name: str) -> list[dict[str, Any]]:
        """Return a list of the document, empty if it is absent."""
        return self.json.get(name, [])

    def entry(self, name: str, index: int) -> dict[str, Any]:
        """Return an entry of a list of the document, or raise FormatError if there is none."""
        entries = self.entries(name)
        if not 0 <= index < len(entries):
            raise FormatError(f"names entry {index} of {name}, but holds {len(entries)}")
        return entries[index]

    def array(self, index: int, kind: str) -> np.ndarray:
        """Return an accessor's values, one row each; floats in float64, as are normalised whole numbers."""
        accessor = self.entry("accessors", index)
        _refuse_extensions(accessor)
        if accessor["type"] != kind:
            raise FormatError(f"has {accessor['type']} where {kind} must be, in accessor {index}")
        count, dtype = int(accessor["count"]), _dtype(accessor["componentType"])
        if "bufferView" in accessor:
            at = accessor.get("byteOffset", 0)
            values = self._view(accessor["bufferView"], at, count, dtype, _WIDTHS[kind])
        elif count > _LARGEST_EMPTY:
            raise FormatError(f"declares {count:,} values without bytes")
        else:
            values = np.zeros((count, _WIDTHS[kind]), dtype)
        if "sparse" in accessor:
            values = self._with_sparse(values, accessor["sparse"])
        if dtype.kind == "f":
            return values.astype(np.float64)
        return _normalized(values) if accessor.get("normalized") else values.astype(np.int64)

    def _with_sparse(self, values: np.ndarray, sparse: dict[str, Any]) -> np.ndarray:
        """Return values with those of a sparse accessor in place of their rows."""
        count, indices, changed = int(sparse["count"]), sparse["indices"], sparse["values"]
        kind = _dtype(indices["componentType"])
        rows = self._view(indices["bufferView"], indices.get("byteOffset", 0), count, kind, 1)
        width = values.shape[1]
        new = self._view(changed["bufferView"], changed.get("byteOffset", 0), count, values.dtype, width)
        rows, values = rows[:, 0].astype(np.int64), values.copy()
        if len(rows) and not 0 <= rows.min() <= rows.max() < len(values):
            raise FormatError(f"has a sparse accessor that names a value outside 0 to {len(values) - 1}")
        values[rows] = new
        return values

    def _view(self, index: int, at: int, count: int, dtype: np.dtype, width: int) -> np.ndarray:
        """Return rows of numbers in a buffer view, or raise FormatError if they are not in it."""
        view = self.entry("bufferViews", index)
        _refuse_extensions(view)
        buffer, start, length = self._buffer(view["buffer"]), view.get("byteOffset", 0), view["byteLength"]
        row = dtype.itemsize * width
        step = view.get("byteStride") or row
        needed = at + step * (count - 1) + row if count else 0
        if min(at, start, length) < 0 or step < row or needed > length or start + length > len(buffer):
            raise FormatError(f"has values beyond the bytes of its buffer view {index}")
        if not count:
            return np.empty((0, width), dtype)
        return np.ndarray((count, width), dtype, buffer, start + at, (step, dtype.itemsize))

    def _buffer(self, index: int) -> bytes:
        if index not in self._buffers:
            buffer = self.entry("buffers", index)
            uri = buffer.get("uri")
            if uri is None and index == 0 and self._binary is not None:
                found = self._binary
            elif uri is None:
                raise FormatError(f"has no bytes for buffer {index}")
            elif uri.startswith("data:"):
                kind, _, text = uri.partition(",")
                found = base64.b64decode(text) if kind.endswith(";base64") else unquote_to_bytes(text)
            else:
                raise FormatError(
                    f"names another file, {uri[:80]!r}, which is not opened: write it as one file"
                )
            if len(found) < buffer["byteLength"]:
                raise FormatError(
                    f"declares {buffer['byteLength']} bytes of buffer {index}, holds {len(found)}"
                )
            self._buffers[index] = found
        return self._buffers[index]


def _refuse_extensions(entry: dict[str, Any]) -> None:
    if entry.get("extensions"):
        raise FormatError(f"needs {', '.join(entry['extensions'])[:SHOWN]}, which is not understood")


def _dtype(code: int) -> np.dtype:
    if code not in _COMPONENTS:
        raise FormatError(f"has numbers of type {code}: expected {', '.join(map(str, _COMPONENTS))}")
    return np.dtype(_COMPONENTS[code])


def _normalized(values: np.ndarray) -> np.ndarray:
    """Return whole numbers as fractions of the largest of their type, at least -1."""
    return np.maximum(values / float(np.iinfo(values.dtype).max), -1.0)


def read_glb(content: bytes) -> Document:
    """Open a binary glTF file, or raise FormatError."""
    if len(content) < _HEADER_BYTES + _CHUNK_BYTES or content[:4] != _MAGIC:
        raise FormatError(f"is not a GLB file: expected it to begin with glTF, got {decode(content[:20])!r}")
    version, length = struct.unpack_from("<II", content, 4)
    if version != 2:
        raise FormatError(f"is of version {version} of glTF: expected 2")
    if length != len(content):
        raise FormatError(f"declares {length} bytes, but holds {len(content)}")
    chunks: dict[bytes, bytes] = {}
    at = _HEADER_BYTES
    while at + _CHUNK_BYTES <= length:
        size, kind = struct.unpack_from("<I4s", content, at)
        at += _CHUNK_BYTES
        if size > length - at:
            raise FormatError(f"has a chunk of {size} bytes, but only {length - at} follow")
        chunks.setdefault(kind, content[at : at + size])
        at += size
    if _JSON not in chunks:
        raise FormatError("has no JSON chunk")
    return Document(chunks[_JSON], chunks.get(_BIN))


def write_glb(document: dict[str, Any], binary: bytes) -> bytes:
    """Return the content of a binary glTF file."""
    text = json.dumps(document, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 4)
    binary += b"\0" * (-len(binary) % 4)
    chunks = struct.pack("<I4s", len(text), _JSON) + text + struct.pack("<I4s", len(binary), _BIN) + binary
    return struct.pack("<4sII", _MAGIC, 2, _HEADER_BYTES + len(chunks)) + chunks
