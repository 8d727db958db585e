"""The embedded set of fields: potential flow around ellipsoids, whose pressure is known exactly.

With this set, fields are learned and tested without a download. A body is an NPZ file; ``parameters.csv``
holds the direction of the stream.
"""

import csv
import json
import logging
from pathlib import Path

import numpy as np

from pointproj.data.errors import DataError
from pointproj.geometry.files.writing import replacing
from pointproj.geometry.potential_flow import ellipsoid_surface, pressure_coefficient, surface_velocity
from pointproj.runtime.progress_bar import progress

log = logging.getLogger(__name__)

FIELD = "pressure_coefficient"
STREAM = ("stream_x", "stream_y", "stream_z")  # names of the stream's components in parameters.csv
BODIES = {"train": 200, "validation": 20, "test": 20}
SHORTEST, LONGEST = 0.3, 1.0  # semi-axes
GENERATOR_VERSION = 1  # to be raised whenever a change of the code gives a body another shape or field
MARKER = "flow.json"  # marks a folder as generated


def make_body(split: str, number: int) -> dict[str, np.ndarray]:
    """Return the arrays of a body's file; equal arguments give equal bodies.

    They are ``points`` (2048, 3), ``normals`` (2048, 3), ``areas`` (2048,), ``faces`` (F, 3) and
    ``pressure_coefficient`` (2048,). Semi-axes are drawn from 0.3 to 1, and the stream, of speed 1, has any
    direction.
    """
    semi_axes, stream = _drawn(split, number)
    surface = ellipsoid_surface(semi_axes)
    pressure = pressure_coefficient(surface_velocity(semi_axes, stream, surface.normals), stream)
    return {**surface._asdict(), FIELD: pressure}


def _drawn(split: str, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw semi-axes and stream of a body."""
    generator = np.random.default_rng([GENERATOR_VERSION, list(BODIES).index(split), number])
    semi_axes, stream = generator.uniform(SHORTEST, LONGEST, 3), generator.standard_normal(3)
    return semi_axes, stream / np.linalg.norm(stream)


def write_flow(root: Path | str, limit: int | None = None) -> Path:
    """Write the bodies of all splits, at most ``limit`` of each; files that exist stay. Return the folder.

    The files are ``<split>/body_NNNN.npz``, and ``parameters.csv`` for all of them. Raises DataError if the
    folder holds other NPZ files.
    """
    root = Path(root)
    _claim(root)
    bodies = [(split, number) for split, count in BODIES.items() for number in range(1, 1 + count)]
    paths = {body: root / body[0] / f"body_{body[1]:04d}.npz" for body in bodies}
    missing = [body for body in bodies if body[1] <= (limit or body[1]) and not paths[body].exists()]
    with progress("making bodies", len(missing), unit="bodies") as advance:
        for body in missing:
            with replacing(paths[body]) as temporary, temporary.open("wb") as file:
                np.savez(file, **make_body(*body))
            advance(1)
    table = [["sample", *STREAM]]
    table += [[f"{split}/{paths[split, n].stem}", *_drawn(split, n)[1].tolist()] for split, n in bodies]
    with replacing(root / "parameters.csv") as temporary, temporary.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(table)
    return root


def _claim(root: Path) -> None:
    """Mark the folder as generated, and remove bodies that another generator made."""
    marker, settings = root / MARKER, {"generator": GENERATOR_VERSION}
    found = json.loads(marker.read_text()) if marker.exists() else None
    if found == settings:
        return
    present = [*root.rglob("*.npz")]
    if found is None and present:
        raise DataError(
            f"expected a folder that is empty or holds the bodies of data=flow; {root} holds {len(present)} "
            f"other files, such as {present[0].name}: choose another data.root, or read these by data=fields"
        )
    for path in present:
        path.unlink()
    with replacing(marker) as temporary:
        temporary.write_text(json.dumps(settings) + "\n")
    log.info("making bodies in %s", root)
