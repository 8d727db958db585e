"""A local origin for formats of single precision: coordinates far from zero would lose their last digits.

In UTM coordinates a float32 resolves half a metre. So a mesh far from zero is written relative to a place
near it. GLB has that place in its node; a format without one gets a file beside it, which is read with it.
"""

import hashlib
import json
import logging
from pathlib import Path

import numpy as np
from jaxtyping import Float

from pointproj.geometry.files.text import FormatError
from pointproj.geometry.files.writing import replacing

log = logging.getLogger(__name__)

TOLERANCE = 2e-7
"""Largest rounding error that is accepted without a local origin, as a fraction of the longest side."""


def float32_origin(vertices: Float[np.ndarray, "V 3"]) -> Float[np.ndarray, " 3"]:
    """Return the origin to subtract before vertices are rounded to float32: 0 where rounding loses nothing.

    It is near the middle of the vertices, and a multiple of a power of two, so that the difference is exact.
    """
    if not len(vertices) or not np.isfinite(vertices).all():
        return np.zeros(3)
    low, high = vertices.min(axis=0), vertices.max(axis=0)
    side = float((high - low).max())
    with np.errstate(over="ignore"):
        lost = np.abs(vertices.astype(np.float32) - vertices).max()
    if lost <= TOLERANCE * side or not np.isfinite(side):
        return np.zeros(3)
    step = 2.0 ** np.floor(np.log2(side or float(np.abs(high).max())))
    return np.round((low + high) / 2 / step) * step


def origin_file(path: Path) -> Path:
    """Return the path of the file with the origin of a file's coordinates."""
    return path.with_name(f"{path.name}.origin.json")


def write_origin(path: Path, origin: Float[np.ndarray, " 3"], content: bytes) -> None:
    """Write the origin of coordinates beside a file of this content; without one, remove an earlier one."""
    beside = origin_file(path)
    if not origin.any():
        beside.unlink(missing_ok=True)
        return
    words = "add the origin to each coordinate of the file with this SHA-256"
    text = json.dumps({"origin": origin.tolist(), "sha256": _digest(content), "meaning": words}, indent=1)
    with replacing(beside) as temporary:
        temporary.write_text(text + "\n")
    shown = ", ".join(f"{value:.10g}" for value in origin)
    log.warning(
        "%s has single precision and lies far from zero: its coordinates are relative to (%s), as %s says",
        *(path, shown, beside.name),
    )


def read_origin(path: Path, content: bytes) -> Float[np.ndarray, " 3"]:
    """Return the origin that stands beside a file, or 0.

    Raises FormatError if that file is damaged, or belongs to other content: then it is not known whether the
    coordinates are relative to it.
    """
    beside = origin_file(path)
    if not beside.exists():
        return np.zeros(3)
    try:
        said = json.loads(beside.read_text())
        origin = np.array(said["origin"], np.float64)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise FormatError(f"has an origin in {beside.name} that cannot be read ({error})") from None
    if origin.shape != (3,) or not np.isfinite(origin).all():
        raise FormatError(f"has an origin in {beside.name} that is not three numbers")
    if said.get("sha256", _digest(content)) != _digest(content):
        raise FormatError(
            f"was changed since {beside.name} was written: remove that file if the coordinates are absolute, "
            "or its line sha256 if they are still relative to the origin"
        )
    return origin


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
