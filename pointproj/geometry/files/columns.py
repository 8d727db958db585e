"""Which columns of a table are positions and normals: by their names, or without names by their values."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from pointproj.geometry.files.text import Content, FormatError

_POSITIONS = (
    *("x y z", "px py pz", "posx posy posz", "positionx positiony positionz", "pointx pointy pointz"),
    *(
        "points0 points1 points2",
        "coordx coordy coordz",
        "xcoord ycoord zcoord",
        "coordinatex coordinatey coordinatez",
    ),
    *("xcoordinate ycoordinate zcoordinate", "easting northing elevation", "easting northing height"),
)
_NORMALS = ("nx ny nz", "normalx normaly normalz", "normals0 normals1 normals2", "normal0 normal1 normal2")

UNIT_LENGTH = 0.02
"""Largest deviation from length 1 of vectors that are taken for normals without a name."""


class Roles(NamedTuple):
    """Numbers of the columns that are used."""

    positions: list[int]
    normals: list[int] | None


def roles(names: Sequence[str]) -> Roles:
    """Find positions and normals by their names, such as ``x``, ``nx``, ``normal_x`` or ``Points:0``.

    Raises FormatError if there are no positions, or names of both that stand twice or not for each axis.
    """
    plain = [re.sub(r"[^a-z0-9]", "", name.lower()) for name in names]
    positions = _triple(plain, _POSITIONS)
    if positions is None:
        raise FormatError(f"has the columns {', '.join(names)[:80]}: expected x, y, z among them")
    return Roles(positions, _triple(plain, _NORMALS))


def have_positions(names: Sequence[str]) -> bool:
    """Return whether words name columns, positions among them."""
    try:
        roles(names)
    except FormatError:
        return False
    return True


def _triple(names: Sequence[str], choices: Sequence[str]) -> list[int] | None:
    counts = Counter(names)
    for choice in choices:
        axes = choice.split()
        found = [axis for axis in axes if counts[axis]]
        if found and (len(found) < 3 or max(counts[axis] for axis in axes) > 1):
            raise FormatError(
                f"must have the columns {', '.join(axes)} once each, got {', '.join(names)[:80]}"
            )
        if found:
            return [names.index(axis) for axis in axes]
    return None


def without_names(numbers: Float[np.ndarray, "n columns"]) -> Content:
    """Take the first three columns for positions, and look for normals among the rest.

    Vectors of unit length are normals. Other vectors are colours if none of their numbers is negative. What
    is left out is said in the notes.
    """
    if numbers.dtype.kind not in "fiu":
        raise FormatError(f"must hold real numbers, got an array of {numbers.dtype.str}")
    if numbers.ndim != 2 or numbers.shape[1] not in (3, 4, 6, 7, 9, 10):
        raise FormatError(
            f"must have shape (n, 3), or (n, 6) with normals; got {numbers.shape}: a first line of names, "
            "such as x y z intensity r g b, says what other columns are"
        )
    numbers = numbers.astype(np.float64)
    count = numbers.shape[1]
    starts = [start for start in range(3, count - 2) if _are_unit(numbers[:, start : start + 3])]
    if count == 6 and not starts and ((numbers[:, 3:] < 0).any() or not numbers[:, 3:].any()):
        starts = [3]  # of any length
    if len(starts) > 1:
        raise FormatError("may have normals in several columns: say which in a first line of names")
    normals = numbers[:, starts[0] : starts[0] + 3] if starts and len(numbers) else None
    left = [column + 1 for column in range(3, count) if not starts or not 0 <= column - starts[0] < 3]
    return Content(numbers[:, :3], normals=normals, notes=_left_out(left, normals is None))


def _are_unit(vectors: Float[np.ndarray, "n 3"]) -> bool:
    with np.errstate(over="ignore", invalid="ignore"):
        return bool((np.abs(np.linalg.norm(vectors, axis=1) - 1) < UNIT_LENGTH).all()) and len(vectors) > 0


def _left_out(columns: list[int], without_normals: bool) -> tuple[str, ...]:
    if not columns:
        return ()
    which = f"column {columns[0]} is" if len(columns) == 1 else f"columns {', '.join(map(str, columns))} are"
    what = "taken for colours and other values" if len(columns) > 1 and without_normals else "without a name"
    return (f"{which} {what} and left out; a first line of names says what columns are",)
