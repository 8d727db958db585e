"""What the formats share: the content of a file, text from bytes, and one error."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from jaxtyping import Float, Int

SHOWN = 40  # characters of a line that an error quotes


class FormatError(ValueError):
    """The content of a file is not as expected; the caller adds the file's name."""


@dataclass(frozen=True)
class Content:
    """The content of a file: a surface, or points if ``faces`` is empty, perhaps with normals."""

    vertices: Float[np.ndarray, "V 3"]
    faces: Int[np.ndarray, "F 3"]
    normals: Float[np.ndarray, "V 3"] | None = None


def decode(content: bytes) -> str:
    """Return the text of a file; bytes that are not UTF-8 become a character that no number contains."""
    return content.decode("utf-8", errors="replace")


def are_numbers(words: Iterable[str | bytes]) -> bool:
    """Return whether every word is a number."""
    try:
        list(map(float, words))
    except ValueError:
        return False
    return True


def fans(polygons: Iterable[Sequence[int]]) -> Int[np.ndarray, "F 3"]:
    """Split polygons into fans of triangles; points and edges give none."""
    triangles = [(corners[0], b, c) for corners in polygons for b, c in pairwise(corners[1:])]
    try:
        return np.array(triangles, dtype=np.int64).reshape(-1, 3)
    except OverflowError:
        raise FormatError("has a face with a vertex index that is too large") from None


@dataclass(frozen=True)
class Checked:
    """Content that a library may read, and the counts that it must find; None if a file declares none."""

    content: bytes
    triangles: int | None = None
    vertices: int | None = None
