"""Checks of a LAS or LAZ file before a library reads it: it may loop or end the process on a damaged one.

Specification: ASPRS LAS 1.4, tables 3 and 6; the record, the chunks and the chunk table of LAZ.
"""

import struct
from pathlib import Path
from typing import BinaryIO

from pointproj.geometry.files.text import FormatError

_HEADER_BYTES, _NEWEST_HEADER_BYTES, _RECORD_BYTES = 227, 375, 54
_DENSEST = 1000  # most points in one byte, if all are equal
_LAYERED = 3  # compressor of the point formats from 6 on
_LAYERS = {10: 9, 11: 1, 12: 2, 13: 1}  # of items: point, RGB, RGB and NIR, wave packet
_EXTRA_BYTES = 14  # an item with a layer for each byte


def check(path: Path, most: int) -> int:
    """Return how many points a LAS or LAZ file declares, or raise FormatError if it cannot hold them.

    Records before the points must lie within the file, and so must the points, or their compressed chunks.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(_NEWEST_HEADER_BYTES)
        if len(head) < _HEADER_BYTES or head[:4] != b"LASF":
            raise FormatError(f"is not a LAS file: expected it to begin with LASF, got {head[:4]!r}")
        (start,) = struct.unpack_from("<I", head, 96)
        kind, record_size, count = struct.unpack_from("<BHI", head, 104)
        if head[25] >= 4 and len(head) == _NEWEST_HEADER_BYTES:
            (count,) = struct.unpack_from("<Q", head, 247)
        compression = _compression(file, head, min(start, size))
        if count > most:
            raise FormatError(f"holds {count:,} points: expected at most {most:,}; thin it first")
        if kind < 128:  # not compressed
            if not record_size or start + count * record_size > size:
                raise FormatError(f"declares {count} points, but holds {max(size - start, 0)} bytes of them")
        elif count:
            _check_chunks(file, compression, start, size, record_size, count)
    return count


def _compression(file: BinaryIO, head: bytes, end: int) -> bytes:
    """Return the record that says how points are compressed, empty if there is none."""
    found, at, records = b"", int.from_bytes(head[94:96], "little"), int.from_bytes(head[100:104], "little")
    for _ in range(records):
        file.seek(at)
        record = file.read(_RECORD_BYTES).ljust(_RECORD_BYTES, b"\0")
        length = int.from_bytes(record[20:22], "little")
        at += _RECORD_BYTES + length
        if at > end:
            raise FormatError(f"declares {records} records in front of its points, which do not fit")
        if record[2:16] == b"laszip encoded":
            found = file.read(length)
    return found


def _check_chunks(file: BinaryIO, compression: bytes, start: int, size: int, record: int, count: int) -> None:
    """Raise FormatError unless the table of compressed chunks, and chunks with layers, are in the file."""
    if count > _DENSEST * size:
        raise FormatError(f"declares {count:,} points in {size:,} bytes")
    if len(compression) < 34:
        raise FormatError("does not say how its points are compressed")
    file.seek(start)
    table = int.from_bytes(file.read(8), "little", signed=True)
    if table == -1:  # written as a stream: the position is at the end
        file.seek(max(size - 8, 0))
        table = int.from_bytes(file.read(8), "little", signed=True)
    if not start < table <= size - 8:
        raise FormatError("has no table of its compressed points: it is cut short")
    file.seek(table + 4)
    if int.from_bytes(file.read(4), "little") > min(count, size):
        raise FormatError("has a table of compressed points that is damaged")
    if int.from_bytes(compression[:2], "little") != _LAYERED:
        return
    pairs = (struct.unpack("<HH", compression[at : at + 4]) for at in range(34, len(compression) - 5, 6))
    layers = sum(width if item == _EXTRA_BYTES else _LAYERS.get(item, 0) for item, width in pairs)
    at = start + 8
    while at < table:  # a chunk: a point, a count, the size of each layer, the layers
        file.seek(at + record + 4)
        sizes = file.read(4 * layers)
        at += (
            record + 4 + len(sizes) + sum(struct.unpack(f"<{len(sizes) // 4}I", sizes[: len(sizes) // 4 * 4]))
        )
    if at != table:
        raise FormatError("has compressed points that are damaged: their layers do not end at their table")
