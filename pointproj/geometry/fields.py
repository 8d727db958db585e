"""Target fields of a normalised mesh: distance, signed distance, occupancy.

They are evaluated on the query grid or at any points. Distances are exact distances to the triangles, in
units of the query cube.
"""

import numpy as np
from jaxtyping import Bool, Float

from pointproj.geometry.distances import unsigned_distance
from pointproj.geometry.interior import inside_at
from pointproj.geometry.meshes import Mesh, MeshError, query_grid


class NoInterior(MeshError):  # noqa: N818 - says what is true of the mesh, an error for some targets only
    """A mesh that encloses no point of the query grid; only ``udf`` can use it."""


FIELDS = {
    "udf": lambda distance, inside: distance(),
    "sdf": lambda distance, inside: np.where(inside(), np.float32(-1), np.float32(1)) * distance(),
    "occupancy": lambda distance, inside: inside().astype(np.float32),
}
"""Each target, computed from two functions: one returns the distances, one which points are inside.

Targets that call ``inside`` leave out meshes without interior.
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
        Points along each side of :func:`pointproj.geometry.meshes.query_grid`; ``Q = side**3 + n``.
    kind : str
        A key of :data:`FIELDS`.
    beside : float32 array, shape (n, 3), optional
        Further points. Evaluating them together with the grid takes less time than separately.
    device : str
        Where Warp runs: ``"cpu"``, ``"cuda"``, ``"cuda:1"``.

    Returns
    -------
    float32 array, shape (side**3 + n,)
        The target at the points of the query grid, in their order, then at the further points.

    Raises
    ------
    NoInterior
        If ``kind`` needs an interior and no grid point is inside.
    ValueError
        If ``kind`` is not a key of :data:`FIELDS`, or the mesh is not normalised.
    """
    points = query_grid(side)
    if beside is not None:
        points = np.concatenate([points, beside])
    return field_at(mesh, points, kind, side, device=device)


def field_at(
    mesh: Mesh, points: Float[np.ndarray, "Q 3"], kind: str, grid: int = 0, *, device: str = "cpu"
) -> Float[np.ndarray, " Q"]:
    """Evaluate a target at any points; the first ``grid**3`` points must be a query grid.

    The other arguments and the errors are those of :func:`target_field`. With ``grid=0``, no query grid is
    expected, and NoInterior is not raised.
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
