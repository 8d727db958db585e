"""What the formats share: the content of a file, text from bytes, and one error."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float, Int

SHOWN = 40  # characters of a line that an error quotes


class FormatError(ValueError):
    """The content of a file is not as expected; the caller adds the file's name."""


@dataclass(frozen=True)
class Content:
    """The content of a file: a surface, or points if ``faces`` is empty, perhaps with normals.

    ``values`` are further numbers of each vertex, by name, if the reader was asked for them. ``notes`` are
    sentences on what was left out, for the log. ``other`` names what the vertices belong to if they are no
    points of a cloud although there are no faces, such as lines.
    """

    vertices: Float[np.ndarray, "V 3"]
    faces: Int[np.ndarray, "F 3"] = field(default_factory=lambda: np.empty((0, 3), np.int64))
    normals: Float[np.ndarray, "V 3"] | None = None
    notes: tuple[str, ...] = ()
    other: str = ""
    values: Mapping[str, Float[np.ndarray, " V"]] = field(default_factory=dict)


def require_fields(fields: Sequence[str], names: Iterable[str]) -> None:
    """Raise FormatError if a field is not among the names of what a file holds for each point."""
    names = [*names]
    if missing := [name for name in fields if name not in names]:
        raise FormatError(f"has no field {', '.join(missing)}: its points have {', '.join(names) or 'none'}")
    if twice := [name for name in fields if names.count(name) > 1]:
        raise FormatError(f"has the field {twice[0]} twice: name its columns differently")


def decode(content: bytes) -> str:
    """Return the text of a file; bytes that are not UTF-8 become a character that no number contains."""
    return content.decode("utf-8", errors="replace")


def lines_of(content: bytes) -> list[str]:
    """Return the lines of a text, without a byte-order mark. They end with LF, CR or both.

    The other separators that ``str.splitlines`` knows, such as form feeds, are characters of a line.
    """
    return decode(b"\n".join(content.removeprefix(b"\xef\xbb\xbf").splitlines())).split("\n")


def are_numbers(words: Iterable[str | bytes]) -> bool:
    """Return whether every word is a number."""
    try:
        list(map(float, words))
    except ValueError:
        return False
    return True


def table(rows: Sequence[Sequence[str]], what: str) -> Float[np.ndarray, "n 3"]:
    """Return the numbers of rows of three words; ``what`` names a row in the FormatError of another row."""
    try:
        numbers = np.array(rows, dtype=np.float64)
    except ValueError:
        numbers = np.empty(0)
    if numbers.shape != (len(rows), 3):
        if not rows:
            return np.empty((0, 3))
        number = next(n for n, row in enumerate(rows) if len(row) != 3 or not are_numbers(row))
        raise FormatError(f"{what} {number} must have 3 coordinates, got {' '.join(rows[number])[:SHOWN]!r}")
    return numbers


Part = tuple[Float[np.ndarray, "V 3"], Int[np.ndarray, "F 3"]]


def joined(parts: Sequence[Part]) -> Part:
    """Put the parts of a scene into one list of vertices and one of faces, or raise FormatError."""
    for vertices, faces in parts:  # checked first: once joined, an index could name another part's vertex
        if len(faces) and not 0 <= faces.min() <= faces.max() < len(vertices):
            raise FormatError(f"has a face that names a vertex outside 0 to {len(vertices) - 1}")
    starts = np.cumsum([0, *(len(vertices) for vertices, _ in parts)])
    vertices = np.concatenate([np.empty((0, 3)), *(vertices for vertices, _ in parts)])
    shifted = (faces + start for (_, faces), start in zip(parts, starts, strict=False))
    return vertices, np.concatenate([np.empty((0, 3), np.int64), *shifted])


def placed(
    vertices: Float[np.ndarray, "V 3"], faces: Int[np.ndarray, "F 3"], matrix: Float[np.ndarray, "4 4"]
) -> Part:
    """Move a part by an affine matrix; faces of a mirrored part are turned, so that its outside stays so."""
    mirrored = np.linalg.det(matrix[:3, :3]) < 0
    return vertices @ matrix[:3, :3].T + matrix[:3, 3], faces[:, ::-1] if mirrored else faces
