"""OBJ: lines that begin with a keyword. Polygons are read; other surfaces are refused by name."""

import re
from collections.abc import Iterator

import numpy as np
from jaxtyping import Float, Int

from pointproj.geometry.files.polygons import triangles_of
from pointproj.geometry.files.text import SHOWN, Content, FormatError, lines_of, table

_POLYGONS = ("f", "fo")  # fo is the older name
_SURFACES = ("surf", "bsp", "bzp", "cdp")  # free-form surfaces, and their older names
_LINES = ("l", "curv", "curv2", "cdc")
_FILES = ("call", "csh")  # their content comes from elsewhere
_WHOLE_NUMBERS = re.compile(r"\s*\d+(/\d*)*(\s+\d+(/\d*)*){2,}\s*")
_HARMLESS = (
    *(
        "v",
        "vt",
        "vn",
        "vp",
        "vc",
        "p",
        "g",
        "o",
        "s",
        "mg",
        "usemtl",
        "mtllib",
        "usemap",
        "maplib",
        "bevel",
        "lod",
    ),
    *("c_interp", "d_interp", "shadow_obj", "trace_obj", "ctech", "stech", "cstype", "deg", "bmat", "step"),
    *("parm", "trim", "hole", "scrv", "sp", "end", "con", "res"),
)


def parse(content: bytes) -> Content:
    """Return the vertices and triangles of an OBJ file; without faces and lines, points.

    Vertex indices may be negative: they count back from the last vertex before their line. A line that
    ends with a backslash continues in the next line; a comment does not.
    """
    vertices: list[list[str]] = []
    polygons: list[list[int]] = []
    others: set[str] = set()
    for line in _statements(content):
        kind, *words = line.split() or [""]
        if kind == "v":
            if len(words) == 4 and words[3].rstrip("0") not in ("1", "1."):
                raise FormatError(f"has a fourth coordinate that is not 1: {line[:SHOWN]!r}; write x y z")
            vertices.append(words[:3])
        elif kind in _POLYGONS:
            polygons.append(_corners(words, len(vertices), len(polygons)))
        elif kind in _SURFACES:
            raise FormatError(f"has free-form surfaces ({kind}), which are not understood: write polygons")
        elif kind in _FILES:
            raise FormatError(f"needs another file or program ({line[:SHOWN]!r}), which is not opened")
        elif kind in _LINES:
            others.add(kind)
        elif kind not in _HARMLESS and _WHOLE_NUMBERS.fullmatch(line[len(kind) :]):
            raise FormatError(f"has lines of an unknown kind that may hold surface: {line[:SHOWN]!r}")
    if not vertices:
        raise FormatError("is not an OBJ file: expected lines that begin with v, got none")
    if polygons:
        others.add("f")
    lines = f"lines ({', '.join(sorted(others))})" if others else ""
    places = table(vertices, "vertex")
    faces = triangles_of(([corner - 1 for corner in each] for each in polygons), places)
    return Content(places, faces, other=lines)


def _statements(content: bytes) -> Iterator[str]:
    """Yield statements without comments, each in one line."""
    begun = ""
    for line in lines_of(content):
        text, mark, _ = line.partition("#")
        if not mark and text.endswith("\\"):
            begun += text[:-1] + " "
            continue
        yield (begun + text).strip()
        begun = ""
    yield begun.strip()


def _corners(words: list[str], vertices_so_far: int, face: int) -> list[int]:
    shown = " ".join(words)[:SHOWN]
    try:
        corners = [int(word.split("/", 1)[0]) for word in words]
    except ValueError:
        raise FormatError(f"face {face} must list whole numbers, got {shown!r}") from None
    corners = [corner if corner >= 0 else vertices_so_far + 1 + corner for corner in corners]
    if min(corners, default=1) < 1:
        raise FormatError(f"face {face} names a vertex before the first, got {shown!r}")
    return corners


def dump(vertices: Float[np.ndarray, "V 3"], faces: Int[np.ndarray, "F 3"]) -> bytes:
    """Return the content of an OBJ file, with enough digits to read back the same numbers."""
    lines = [f"v {x!r} {y!r} {z!r}" for x, y, z in vertices.tolist()]
    lines += [f"f {a} {b} {c}" for a, b, c in (faces + 1).tolist()]
    return ("\n".join(lines) + "\n").encode("ascii")
