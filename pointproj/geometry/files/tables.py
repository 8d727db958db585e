"""Clouds as text (XYZ, TXT, CSV, PTS): one point a line, perhaps below a line of names or a count."""

import re
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from pointproj.geometry.files.columns import have_positions, roles, without_names
from pointproj.geometry.files.text import SHOWN, Content, FormatError, are_numbers, lines_of, require_fields

_EXPECTED = "must have x y z, or x y z nx ny nz, on every line"
_COUNT = re.compile(r"\d+$")
_UNIT = re.compile(r"\[[^\]]*\]|\([^)]*\)")
_SPACED_COMMA = re.compile(r",\s|\s,")
_OF_SCANNERS = {4: "x y z intensity", 6: "x y z red green blue", 7: "x y z intensity red green blue"}
_FORTRAN = re.compile(r"([\d.])[dD](?=[+-]?\d+(?:[\s,;]|$))")  # exponents of numbers in double precision
_BLANK_ALONE = re.compile(r"[^,\s]\s+[^,\s]")


def parse(content: bytes, fields: Sequence[str] = ()) -> Content:
    """Read rows of numbers, which are separated by blanks, tabs, commas or semicolons.

    A first line of names, also in a comment (``#`` or ``//``), says what the columns are. A line with the
    number of points may come first, and, in files of several scans, before each. Raises FormatError if the
    rows differ, or if a comma may be a decimal point as well as a separator.
    """
    names, commented, rows = None, None, []
    expected, counted = 0, False
    for line in lines_of(content):
        line = line if rows else line.replace("//", "#", 1)
        text, _, comment = line.partition("#")
        text = text.strip()
        if "d" in text or "D" in text:
            text = _FORTRAN.sub(r"\1e", text)
        if not text:
            words = _names(comment) if not rows else []
            commented = words if have_positions(words) else commented
        elif _COUNT.match(text) and (counted or not rows):
            if len(rows) != expected:
                raise FormatError(f"declares {expected} points, but {len(rows)} lines follow")
            expected, counted = expected + int(text), True
        elif not rows and names is None and not are_numbers([re.split(r"[\s,;]", text)[0].strip('"')]):
            names = _names(text)
            roles(names)
        else:
            rows.append(text)
    if counted and len(rows) != expected:
        raise FormatError(f"declares {expected} points, but {len(rows)} lines follow")
    return _content(names, commented, rows, fields)


def _content(
    names: list[str] | None, commented: list[str] | None, rows: list[str], fields: Sequence[str]
) -> Content:
    """Return the points of rows; names in a comment count if there is one for each column.

    If fields are wanted and there are no names, the columns are those of scanners.
    """
    if not rows:
        return Content(np.empty((0, 3)))
    separator, rows = _separated(rows)
    counts = [len(row.split(separator)) for row in rows]
    odd = next((number for number, count in enumerate(counts) if count != counts[0]), None)
    if odd is not None:
        raise FormatError(
            f"{_EXPECTED}: row {odd + 1} has {counts[odd]} columns, the first {counts[0]}: "
            f"{rows[odd][:SHOWN]!r}"
        )
    if names is None and commented is not None and len(commented) == counts[0]:
        names = commented
    elif names is None and commented is not None and roles(commented).positions != [0, 1, 2]:
        which = ", ".join(commented)[:SHOWN]
        raise FormatError(f"has {len(commented)} names in a comment, {which!r}, and {counts[0]} columns")
    notes: tuple[str, ...] = ()
    if names is None and fields and counts[0] in _OF_SCANNERS:
        names = _OF_SCANNERS[counts[0]].split()
        notes = (f"has no names of columns: they are taken for {_OF_SCANNERS[counts[0]]}",)
    if names is None:
        require_fields(fields, [])
        return without_names(_numbers(rows, separator, range(counts[0])))
    if len(names) != counts[0]:
        raise FormatError(f"names {len(names)} columns, but has {counts[0]}: {', '.join(names)[:SHOWN]!r}")
    positions, normals = roles(names)
    require_fields(fields, names)
    own = [names.index(name) for name in fields]
    found = _numbers(rows, separator, [*positions, *own, *(normals or [])])
    values = dict(zip(fields, found[:, 3 : 3 + len(own)].T, strict=True))
    normals = found[:, 3 + len(own) :] if normals else None
    return Content(found[:, :3], normals=normals, notes=notes, values=values)


def _numbers(
    rows: list[str], separator: str | None, columns: Sequence[int]
) -> Float[np.ndarray, "n columns"]:
    try:
        return np.loadtxt(rows, delimiter=separator, usecols=columns, comments=None, quotechar='"', ndmin=2)
    except ValueError as error:
        raise FormatError(f"{_EXPECTED} ({error})") from None


def _separated(rows: list[str]) -> tuple[str | None, list[str]]:
    """Return what separates the columns, None for blanks, and the rows with decimal points."""
    row = next((row for row in rows if "," in row), rows[0])  # the first may have whole numbers alone
    if "," in row and (";" in row or "\t" in row) and not _SPACED_COMMA.search(row):
        if "." in row:
            raise FormatError(f"has commas, points and other separators in one row: {row[:SHOWN]!r}")
        rows = [row.replace(",", ".") for row in rows]
        row = rows[0]
    if "," in row and ";" not in row and _BLANK_ALONE.search(row):
        raise FormatError(f"has commas and blanks between its columns, or decimal commas: {row[:SHOWN]!r}")
    separator = next((each for each in (";", ",") if each in row), None)
    return separator, rows if separator is None else [row.rstrip(f"{separator} \t") for row in rows]


def _names(text: str) -> list[str]:
    """Return the names of columns in a line, without units."""
    text = _UNIT.sub("", text)
    words = re.split(r"[,;\t]", text) if re.search(r"[,;\t]", text) else text.split()
    return [word.strip().strip("\"'").strip() for word in words]
