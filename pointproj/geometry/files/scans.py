"""Clouds as scanners and surveys write them: LAS and LAZ (laspy), PCD (pypcd4), E57 (pye57).

The libraries are of the extra ``scans`` and are imported when a file of theirs is read. Counts are compared
with what they read. Points that a scanner marks as invalid are left out, and the notes say how many.
"""

import importlib.util
import io
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pointproj.geometry.files import las_header
from pointproj.geometry.files.arrays import structured
from pointproj.geometry.files.text import Content, FormatError, decode, require_fields

PACKAGES = {".las": ("laspy",), ".laz": ("laspy", "lazrs"), ".pcd": ("pypcd4",), ".e57": ("pye57",)}
"""Packages that read a format."""

LARGEST_POINTS = 1 << 26
"""Most points of a file; they take 24 bytes each."""

_CHUNK = 1 << 20  # points that are read at once
_GEO_KEYS, _MODEL_TYPE, _GEOGRAPHIC = 34735, 1024, 2


def missing_packages(paths: Sequence[str | Path]) -> str | None:
    """Return a sentence with the command that installs what the files need, or None if all is installed."""
    needed = sorted({name for path in paths for name in PACKAGES.get(Path(path).suffix.lower(), ())})
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if not missing:
        return None
    kinds = ", ".join(sorted({Path(path).suffix for path in paths if Path(path).suffix.lower() in PACKAGES}))
    return f'{kinds} needs {", ".join(missing)}: pip install -c constraints.txt -e ".[scans]"'


def las(path: Path, fields: Sequence[str] = ()) -> Content:
    """Return the points of a LAS or LAZ file, without those marked as withheld."""
    declared = las_header.check(path, LARGEST_POINTS)
    try:
        return _las(path, declared, fields)
    except BaseException as error:
        if type(error).__name__ == "PanicException":  # of lazrs, and no Exception
            raise FormatError(f"has compressed points that are damaged ({error})") from None
        raise


def _las(path: Path, declared: int, fields: Sequence[str]) -> Content:
    import laspy

    # One thread: the other decoder of lazrs takes memory for what a damaged file declares.
    how = {"laz_backend": laspy.LazBackend.Lazrs} if path.suffix.lower() == ".laz" else {}
    with laspy.open(path, read_evlrs=False, **how) as reader:
        header = reader.header
        if not (np.isfinite([*header.scales, *header.offsets]).all() and np.all(header.scales)):
            raise FormatError(f"has the scales {header.scales} and the offsets {header.offsets}")
        if _is_geographic(header.vlrs):
            raise FormatError("has degrees for coordinates: project it to a system in metres")
        require_fields(fields, header.point_format.dimension_names)
        for name in fields:
            if (count := header.point_format.dimension_by_name(name).num_elements) > 1:
                raise FormatError(f"has {count} numbers a point in {name}: write each as a dimension")
        parts, found = [np.empty((0, 3 + len(fields)))], 0
        for chunk in reader.chunk_iterator(_CHUNK):
            found += len(chunk)
            kept = np.asarray(chunk.withheld) == 0
            columns = chunk.x, chunk.y, chunk.z, *(chunk[name] for name in fields)
            parts.append(np.stack([np.asarray(column)[kept] for column in columns], axis=1))
    if found != declared:
        raise FormatError(f"declares {declared} points, but holds {found}")
    points, values = _split(parts, fields)
    return Content(points, notes=_left_out(found - len(points), "withheld"), values=values)


def _is_geographic(records: Any) -> bool:
    """Return whether the coordinate system of a LAS file has degrees."""
    for record in records:
        if record.record_id == 2112 and decode(record.record_data_bytes()).lstrip().startswith(
            ("GEOG", "BASEGEOG")
        ):
            return True
        if record.record_id == _GEO_KEYS:
            keys = np.frombuffer(record.record_data_bytes(), "<u2").reshape(-1, 4)[1:]
            if any(key == _MODEL_TYPE and value == _GEOGRAPHIC for key, _, _, value in keys):
                return True
    return False


def _split(parts: Sequence[np.ndarray], fields: Sequence[str]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Join rows of positions and fields, and return both."""
    rows = np.concatenate(parts)
    return rows[:, :3], dict(zip(fields, rows[:, 3:].T, strict=True))


def pcd(path: Path, fields: Sequence[str] = ()) -> Content:
    """Return the points of a PCD file, without rows of NaN, which stand for missing returns."""
    from pypcd4 import PointCloud

    content = path.read_bytes()
    mark = re.search(rb"^DATA[ \t]+(\w+)[ \t\r]*\n", content, re.MULTILINE)
    if mark and mark[1] == b"ascii":
        head, rows = content[: mark.start()], content[mark.end() :].splitlines()
        # The library wants one blank between numbers, and rounds them to the declared type.
        types = re.search(rb"^TYPE\s+(.*)$", head, re.MULTILINE)[1].split()
        sizes = re.search(rb"^SIZE\s+(.*)$", head, re.MULTILINE)
        wide = b" ".join(
            b"8" if kind == b"F" else size for kind, size in zip(types, sizes[1].split(), strict=True)
        )
        head = head[: sizes.start(1)] + wide + head[sizes.end(1) :]
        content = head + b"DATA ascii\n" + b"\n".join(b" ".join(row.split()) for row in rows if row.strip())
    cloud = PointCloud.from_fileobj(io.BytesIO(content))
    rows, declared = np.atleast_1d(cloud.pc_data), cloud.metadata.points
    _check_count(declared)
    if len(rows) != declared or cloud.metadata.width * cloud.metadata.height != declared:
        raise FormatError(f"declares {declared} points, but holds {len(rows)}")
    return _known(structured(rows, fields))


def e57(path: Path, fields: Sequence[str] = ()) -> Content:
    """Return the points of all scans of an E57 file, each placed by its pose, without invalid ones.

    Of the values that are not positions, the library reads intensity alone as it is.
    """
    import pye57

    file = pye57.E57(str(path))
    try:
        parts, declared, normals = [np.empty((0, 3 + len(fields)))], 0, False
        for number in range(file.scan_count):
            header = file.get_header(number)
            declared += header.point_count
            _check_count(declared)
            normals |= "nor:normalX" in header.point_fields
            require_fields(fields, [name for name in header.point_fields if name == "intensity"])
            if fields and "isIntensityInvalid" in header.point_fields:
                raise FormatError("marks intensities as invalid, which is not understood: write it without")
            _check_pose(header)
            if header.point_count:
                scan = file.read_scan(number, intensity=bool(fields), ignore_missing_fields=True)
                names = *(f"cartesian{axis}" for axis in "XYZ"), *fields
                parts.append(np.stack([scan[name] for name in names], axis=1))
    finally:
        file.close()
    points, values = _split(parts, fields)
    notes = _left_out(declared - len(points), "invalid")
    if normals:
        notes += ("normals are not read from E57 files",)
    found = _known(Content(points, values=values))
    return replace(found, notes=notes + found.notes)


def _check_pose(header: Any) -> None:
    """Raise FormatError unless a pose has its numbers in the order that the library supposes."""
    if header.has_pose():
        pose = header["pose"]
        for part, order in (("rotation", "wxyz"), ("translation", "xyz")):
            if not pose.isDefined(part):
                continue
            names = "".join(pose[part].get(place).elementName() for place in range(pose[part].childCount()))
            if names != order:
                raise FormatError(
                    f"has a {part} in the order {names}: write it as {order}, as pye57 reads it"
                )


def _known(content: Content) -> Content:
    """Return content without the points that have a NaN."""
    known = ~np.isnan(content.vertices).any(axis=1)
    normals = None if content.normals is None else content.normals[known]
    return Content(
        content.vertices[known],
        normals=normals,
        notes=_left_out(int((~known).sum()), "without a return (NaN)"),
        values={name: column[known] for name, column in content.values.items()},
    )


def _left_out(count: int, why: str) -> tuple[str, ...]:
    return (f"{count:,} points {why} are left out",) if count else ()


def _check_count(count: int) -> None:
    if count > LARGEST_POINTS:
        raise FormatError(f"holds {count:,} points: expected at most {LARGEST_POINTS:,}; thin it first")
