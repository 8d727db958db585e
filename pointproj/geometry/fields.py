"""Target fields of a normalised mesh: distance, signed distance, occupancy.

They are evaluated on the query grid or at any points. Distances are exact distances to the triangles, in
units of the query cube.
"""

import numpy as np
from jaxtyping import Bool, Float

from pointproj.geometry.distances import unsigned_distance
from pointproj.geometry.interior import inside_at
from pointproj.geometry.meshes import Mesh, MeshError, query_grid


class NoInterior(MeshError):  # noqa: N818  named by what is true of the mesh; it is an error for some targets only
    """A mesh that encloses no point of the query grid: usable for ``udf`` only."""


FIELDS = {
    "udf": lambda distance, inside: distance(),
    "sdf": lambda distance, inside: np.where(inside(), np.float32(-1), np.float32(1)) * distance(),
    "occupancy": lambda distance, inside: inside().astype(np.float32),
}
"""How a target follows from distances and from which points are inside, both computed on demand.

A mesh without interior is left out by the targets that ask what is inside.
"""


def target_field(
    mesh: Mesh, side: int, kind: str, *, beside: Float[np.ndarray, "n 3"] | None = None, device: str = "cpu"
) -> Float[np.ndarray, " Q"]:
    """Evaluate a target on the query grid.

    Parameters
    ----------
    mesh : Mesh
        Normalised.
    side : int
        Points a side of the grid of :func:`pointproj.geometry.meshes.query_grid`; ``Q = side**3``.
    kind : str
        A key of :data:`FIELDS`.
    beside : float32 array, shape (n, 3), optional
        Other points, which take less time together with the grid than later.
    device : str
        Where Warp runs: ``"cpu"``, ``"cuda"``, ``"cuda:1"``.

    Returns
    -------
    float32 array, shape (side**3 + n,)
        In the order of the query grid, then at the other points.

    Raises
    ------
    NoInterior
        If ``kind`` needs an interior and no grid point is inside.
    ValueError
        If ``kind`` is no target field, or the mesh is not normalised.
    """
    points = query_grid(side)
    if beside is not None:
        points = np.concatenate([points, beside])
    return field_at(mesh, points, kind, side, device=device)


def field_at(
    mesh: Mesh, points: Float[np.ndarray, "Q 3"], kind: str, grid: int = 0, *, device: str = "cpu"
) -> Float[np.ndarray, " Q"]:
    """Evaluate a target at any points, of which the first are a query grid of ``grid`` points a side.

    Arguments, result and errors are those of :func:`target_field`.
    """
    if kind not in FIELDS:
        *others, last = FIELDS
        raise ValueError(f"expected a target field {', '.join(others)} or {last}, got {kind!r}")

    def inside() -> Bool[np.ndarray, " Q"]:
        found = inside_at(mesh, points, device=device)
        if grid and not found[: grid**3].any():
            reason = f"encloses no point of the grid of {grid} a side, so only target=udf can use it"
            raise NoInterior(mesh.name, reason)
        return found

    return FIELDS[kind](lambda: unsigned_distance(mesh, points, device=device), inside)
