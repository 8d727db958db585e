"""A sample: where values are, what they are, and the geometry that they belong to."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from jaxtyping import Float, Int

from pointproj.geometry.meshes import Mesh

Place = Literal["points", "cells"]


@dataclass(frozen=True, eq=False)
class FieldSample:
    """The content of one file, in its own units; all arrays are float64.

    Attributes
    ----------
    points : array, shape (P, 3)
        Points of the file, or centres of its cells.
    values : mapping of str to array, shape (P, C)
        Each field; C is 1 for a scalar and 3 for a vector.
    normals : array, shape (P, 3), optional
        Unit vectors, on surfaces.
    areas : array, shape (P,), optional
        Area of a cell; of a point, a third of the triangles around it.
    geometry : Mesh, optional
        The surface, where it is not given by ``points`` and ``normals``.
    parameters : mapping of str to float
        Numbers that the file holds once, such as the speed at an inlet.
    rows : array of int, shape (P,)
        Which point or cell of the file each row is; those without area are left out.
    place : "points" or "cells"
        Where the values lie.
    mesh : Mesh, optional
        All points of the file with the triangles between them, if it has such.
    """

    points: Float[np.ndarray, "p 3"]
    values: Mapping[str, Float[np.ndarray, "p c"]]
    normals: Float[np.ndarray, "p 3"] | None = None
    areas: Float[np.ndarray, " p"] | None = None
    geometry: Mesh | None = None
    parameters: Mapping[str, float] = field(default_factory=dict)
    rows: Int[np.ndarray, " p"] | None = None
    place: Place = "points"
    mesh: Mesh | None = None


def of_mesh(
    vertices: Float[np.ndarray, "v 3"],
    triangles: Int[np.ndarray, "f 3"],
    place: Place,
    *,
    cells: Int[np.ndarray, " f"] | None = None,
    count: int | None = None,
) -> FieldSample:
    """Return the points or cells of a surface with their normals and areas, without values.

    ``cells`` says which of ``count`` polygons each triangle is a part of; by default each is one cell. The
    centre of a polygon is that of its area. Normals follow the order of the corners.
    """
    corners = vertices[triangles]
    vectors = np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0]) / 2
    sizes = np.linalg.norm(vectors, axis=1)
    if place == "cells":
        owners = np.arange(len(triangles)) if cells is None else cells
        count = len(triangles) if count is None else count
        areas, normals, centres = (
            added(values, owners, count) for values in (sizes, vectors, corners.mean(1) * sizes[:, None])
        )
        known = areas > 0
        points = centres[known] / areas[known, None]
    else:
        owners, count = triangles.ravel(), len(vertices)
        areas, normals = (added(np.repeat(part / 3, 3, axis=0), owners, count) for part in (sizes, vectors))
        known = areas > 0
        points = vertices[known]
    length = np.linalg.norm(normals[known], axis=1, keepdims=True)
    normals = normals[known] / np.where(length > 0, length, 1)
    mesh = Mesh(vertices, triangles, "surface") if cells is None else None
    rows = np.flatnonzero(known)
    return FieldSample(points, {}, normals, areas[known], rows=rows, place=place, mesh=mesh)


def added(values: np.ndarray, rows: Int[np.ndarray, " n"], count: int) -> np.ndarray:
    """Return the sums of the values of each row number."""
    if values.ndim == 1:
        return np.bincount(rows, values, count)
    return np.stack([np.bincount(rows, column, count) for column in values.T], axis=1)


def chosen(
    arrays: Mapping[Place, Mapping[str, np.ndarray]], fields: Sequence[str]
) -> tuple[Place, dict[str, Float[np.ndarray, "n c"]]]:
    """Return where all the fields lie, and their values as columns; cells come first if both have them.

    Raises ValueError, with what there is, if neither points nor cells have all fields.
    """
    for place in ("cells", "points"):
        if fields and all(name in arrays[place] for name in fields):
            return place, {name: columns(arrays[place][name], name) for name in fields}
    missing = [name for name in fields if all(name not in found for found in arrays.values())]
    there = "; ".join(f"its {place} have {_listed(found)}" for place, found in arrays.items())
    if missing:
        raise ValueError(f"has no field {', '.join(missing)}: {there}")
    raise ValueError(
        f"has {', '.join(fields)} partly at points and partly at cells, and one network takes fields of one "
        f"of them: {there}"
    )


def columns(values: np.ndarray, name: str) -> Float[np.ndarray, "n c"]:
    """Return real numbers as float64 columns; raise ValueError for anything else."""
    if values.dtype.kind not in "fiu" or values.ndim not in (1, 2):
        raise ValueError(
            f"has {name} as {values.dtype} of shape {values.shape}: expected real numbers (n, c)"
        )
    values = np.asarray(values, dtype=np.float64)
    return values[:, None] if values.ndim == 1 else values


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"
