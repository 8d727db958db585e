"""What the formats share: what a file holds, text from bytes, and one error."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from jaxtyping import Float, Int

SHOWN = 40  # characters of a line that an error quotes


class FormatError(ValueError):
    """What a file's content should be and what it is; the caller knows the file's name."""


@dataclass(frozen=True)
class Content:
    """What a file holds: a surface, or points where ``faces`` is empty; normals of points if it has them."""

    vertices: Float[np.ndarray, "V 3"]
    faces: Int[np.ndarray, "F 3"]
    normals: Float[np.ndarray, "V 3"] | None = None


def decode(content: bytes) -> str:
    """Text of a file; what is no UTF-8 becomes a character that no number holds."""
    return content.decode("utf-8", errors="replace")


def are_numbers(words: Iterable[str | bytes]) -> bool:
    """Whether every word is a number."""
    try:
        list(map(float, words))
    except ValueError:
        return False
    return True


def fans(polygons: Iterable[Sequence[int]]) -> Int[np.ndarray, "F 3"]:
    """Cut polygons into fans of triangles; points and edges give none."""
    triangles = [(corners[0], b, c) for corners in polygons for b, c in pairwise(corners[1:])]
    try:
        return np.array(triangles, dtype=np.int64).reshape(-1, 3)
    except OverflowError:
        raise FormatError("has a face with a vertex index that is too large") from None


@dataclass(frozen=True)
class Checked:
    """Content that a library may read, and how much must come of it; None where a file does not say."""

    content: bytes
    triangles: int | None = None
    vertices: int | None = None
