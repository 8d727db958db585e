"""What the formats share: what a file holds, text from bytes, and one error."""

from dataclasses import dataclass

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


@dataclass(frozen=True)
class Checked:
    """Content that a library may read, and how much must come of it; None where a file does not say."""

    content: bytes
    triangles: int | None
    vertices: int | None = None
