"""Target fields of a normalised mesh: distance, signed distance, occupancy.

They are evaluated on the query grid or at any points. Distances are exact distances to the triangles, in
units of the query cube.
"""

from collections.abc import Callable

import numpy as np
from jaxtyping import Bool, Float

from pointproj.geometry.distances import unsigned_distance
from pointproj.geometry.interior import inside_at
from pointproj.geometry.meshes import Mesh, MeshError, query_grid

Distance = Callable[[], Float[np.ndarray, " Q"]]
Inside = Callable[[], Bool[np.ndarray, " Q"]]


class NoInterior(MeshError):  # noqa: N818  named by what is true of the mesh; it is an error for some targets only
    """A mesh that encloses no point of the query grid: usable for ``udf`` only."""


def _udf(distance: Distance, inside: Inside) -> Float[np.ndarray, " Q"]:
    """Unsigned distance."""
    return distance()


def _sdf(distance: Distance, inside: Inside) -> Float[np.ndarray, " Q"]:
    """Signed distance, negative inside."""
    enclosed = inside()
    unsigned = distance()
    return np.where(enclosed, -unsigned, unsigned)


def _occupancy(distance: Distance, inside: Inside) -> Float[np.ndarray, " Q"]:
    """1 inside and 0 elsewhere."""
    return inside().astype(np.float32)


FIELDS = {"udf": _udf, "sdf": _sdf, "occupancy": _occupancy}
"""How a target follows from distances and from which points are inside, both computed on demand.

A mesh without interior is left out by the targets that ask what is inside.
"""


def target_field(
    mesh: Mesh,
    side: int,
    kind: str,
    *,
    beside: Float[np.ndarray, "n 3"] | None = None,
    device: str = "cpu",
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

    grid = query_grid(side)
    points = grid if beside is None else np.concatenate([grid, beside])

    def enclosed() -> Bool[np.ndarray, " Q"]:
        found = inside_at(mesh, points, device=device)
        if not found[: len(grid)].any():
            reason = f"encloses no point of the grid of {side} a side, so only target=udf can use it"
            raise NoInterior(mesh.name, reason)
        return found

    return _field(kind)(lambda: unsigned_distance(mesh, points, device=device), enclosed)


def field_at(
    mesh: Mesh, points: Float[np.ndarray, "Q 3"], kind: str, *, device: str = "cpu"
) -> Float[np.ndarray, " Q"]:
    """Evaluate a target at any points of the query cube.

    Parameters
    ----------
    mesh : Mesh
        Normalised.
    points : float32 array, shape (Q, 3)
    kind : str
        A key of :data:`FIELDS`.
    device : str
        Where Warp runs.

    Returns
    -------
    float32 array, shape (Q,)

    Raises
    ------
    ValueError
        If ``kind`` is no target field, or the mesh is not normalised.
    """
    return _field(kind)(
        lambda: unsigned_distance(mesh, points, device=device),
        lambda: inside_at(mesh, points, device=device),
    )


def _field(kind: str) -> Callable[[Distance, Inside], Float[np.ndarray, " Q"]]:
    if kind not in FIELDS:
        *others, last = FIELDS
        raise ValueError(f"expected a target field {', '.join(others)} or {last}, got {kind!r}")
    return FIELDS[kind]
