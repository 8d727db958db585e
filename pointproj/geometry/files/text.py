"""What the readers of all formats share: numbers from words, triangles from polygons, and one error."""

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
from jaxtyping import Float, Int

Surface = tuple[Float[np.ndarray, "V 3"], Int[np.ndarray, "F 3"]]

Points = tuple[Float[np.ndarray, "n 3"], Float[np.ndarray, "n 3"] | None]  # with normals, or without

SHOWN = 40  # characters of a line that an error quotes


class FormatError(ValueError):
    """What a file's content should be and what it is; the caller knows the file's name."""


def decode(content: bytes) -> str:
    """Text of a file; what is no UTF-8 becomes a character that no number holds."""
    return content.decode("utf-8", errors="replace")


def coordinates(rows: Sequence[str]) -> Float[np.ndarray, "V 3"]:
    """Read three numbers from the beginning of each row.

    Parameters
    ----------
    rows : sequence of str
        At least one; what follows the third number is dropped.

    Returns
    -------
    float64 array, shape (V, 3)

    Raises
    ------
    FormatError
        Naming the first row without three numbers.
    """
    try:
        vertices = np.array([row.split(None, 3)[:3] for row in rows], dtype=np.float64)
    except ValueError:
        vertices = np.empty(0)
    if vertices.shape != (len(rows), 3):
        number = next(number for number, row in enumerate(rows) if not _holds_three_numbers(row))
        raise FormatError(f"vertex {number} must have 3 coordinates, got {rows[number][:SHOWN]!r}")
    return vertices


def indices(words: Sequence[str], number: int, row: str) -> list[int]:
    """Read vertex indices of face ``number``, which stands in ``row``.

    Raises
    ------
    FormatError
        If a word is no whole number.
    """
    try:
        return [int(word) for word in words]
    except ValueError:
        raise FormatError(f"face {number} must list whole numbers, got {row[:SHOWN]!r}") from None


def fans(polygons: Iterable[Sequence[int]]) -> Int[np.ndarray, "F 3"]:
    """Cut polygons into fans of triangles; points and edges give none.

    Returns
    -------
    int64 array, shape (F, 3)

    Raises
    ------
    FormatError
        If there is no polygon with three corners, or an index is out of all bounds.
    """
    triangles = [(corners[0], b, c) for corners in polygons for b, c in pairwise(corners[1:])]
    if not triangles:
        raise FormatError("has no face with three vertices")
    try:
        return np.array(triangles, dtype=np.int64)
    except OverflowError:
        raise FormatError("has a face with a vertex index that is too large") from None


def _holds_three_numbers(row: str) -> bool:
    try:
        return len([float(word) for word in row.split(None, 3)[:3]]) == 3
    except ValueError:
        return False
