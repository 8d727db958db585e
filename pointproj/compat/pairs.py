"""What several drop-ins share: points as other libraries take them, and pairs by their squared distance."""

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from pointproj.ops.neighbor_lists import radius_neighbors


def coordinates(name: str, points: Tensor) -> Float[Tensor, "*points 2|3"]:
    """Points in the dtypes and shapes that the operators take, with the same distances.

    Half precision becomes float32 and integers float64, so no distance is rounded more than its points were.
    Points on a line get a second coordinate, which is 0.
    """
    if points.dtype in (torch.float16, torch.bfloat16):
        points = points.float()
    elif not points.is_floating_point():
        points = points.double()
    if points.shape[-1] == 1:
        points = torch.nn.functional.pad(points, (0, 1))
    if points.shape[-1] not in (2, 3):
        raise ValueError(
            f"{name} must have 1 to 3 coordinates; got {points.shape[-1]}, shape {tuple(points.shape)}: "
            "spaces of features need a search that compares all pairs, as the library replaced here has"
        )
    return points


def squared_lengths(displacements: Float[Tensor, "*pairs 2|3"]) -> Float[Tensor, "*pairs"]:
    """dx dx + dy dy (+ dz dz), rounded after every operation in this order, as all these libraries do it."""
    first, *rest = (axis * axis for axis in displacements.unbind(-1))
    return sum(rest, first)


def boundary(radius: float | Tensor, points: Tensor) -> tuple[float | Tensor, float | Tensor]:
    """Radius to search with and its square, for libraries that compare squares.

    They take a pair by comparing its squared distance with radius * radius. Rounded square roots do not
    decide that, but they never change the order: a search up to the root of the rounded square finds every
    pair with a smaller square or the same, and the squares choose among those. A radius of 0 is one: the
    search goes as little beyond as it can.
    """
    least = torch.finfo(points.dtype).tiny
    if isinstance(radius, Tensor):
        squared = radius.to(points).square()
        return squared.sqrt().clamp(min=least), squared
    squared = torch.tensor(radius * radius, dtype=points.dtype)  # of Python's own precision, then rounded
    return max(squared.sqrt().item(), least), squared.item()


def pairs_within(
    query_points: Float[Tensor, "*batch q 2|3"],
    reference_points: Float[Tensor, "*batch n 2|3"],
    radius: float | Float[Tensor, "*batch q"],
    *,
    inclusive: bool,
    **search: object,
) -> tuple[Int[Tensor, " pairs"], Int[Tensor, " pairs"], Float[Tensor, " pairs"]]:
    """All pairs within the radius, by query, then by reference point; waits for the device twice.

    Parameters
    ----------
    query_points, reference_points : (..., 2) or (..., 3) float tensors
        From :func:`coordinates`; one cloud or a dense batch.
    radius : float or tensor, one for each query
    inclusive : bool
        Whether pairs belong to it whose squared distance is exactly radius * radius.
    **search
        Of :func:`pointproj.radius_neighbors`.

    Returns
    -------
    queries : (pairs,) int64 tensor
        Rows of the queries, of dense batches packed.
    indices : (pairs,) int64 tensor
        Rows of the reference points, of dense batches within the cloud.
    squared : (pairs,) float tensor
        Squared distances, differentiable twice in both sets of points.
    """
    reach, squared_radius = boundary(radius, query_points)
    found = radius_neighbors(
        query_points, reference_points, reach, capacity=None, displacements=True, **search
    )
    queries = found.query_indices
    squared = squared_lengths(found.displacements)
    limit = squared_radius.flatten()[queries] if isinstance(squared_radius, Tensor) else squared_radius
    inside = squared <= limit if inclusive else squared < limit
    chosen = inside.nonzero()[:, 0]
    return queries[chosen], found.indices[chosen], squared[chosen]


def first_within(
    query_points: Float[Tensor, "b q 2|3"], reference_points: Float[Tensor, "b n 2|3"], radius: float, k: int
) -> tuple[Float[Tensor, "b q k"], Int[Tensor, "b q k"]]:
    """The first k reference points, by their index, that are nearer than the radius.

    The radius is rounded to the points' dtype before it is squared, as the libraries do that ask for these.

    Returns
    -------
    squared : (B, Q, k) float tensor
        Squared distances, 0 where there are fewer; differentiable twice in both sets of points.
    indices : (B, Q, k) int64 tensor
        Rows of the reference points, within the cloud, ascending; -1 where there are fewer.
    """
    radius = torch.tensor(radius, dtype=query_points.dtype).item()
    queries, found, squared = pairs_within(query_points, reference_points, radius, inclusive=False)
    shape = (*query_points.shape[:2], k)
    rows = shape[0] * shape[1]
    before = torch.searchsorted(queries, torch.arange(rows, device=queries.device))
    rank = torch.arange(len(queries), device=queries.device) - before[queries]
    slots = torch.where(rank < k, queries * k + rank, rows * k)  # the last slot takes what is too many
    indices = found.new_full((rows * k + 1,), -1).scatter(0, slots, found)
    squares = squared.new_zeros(rows * k + 1).scatter(0, slots, squared)
    return squares[:-1].view(shape), indices[:-1].view(shape)


def split(values: Tensor, counts: Int[Tensor, " rows"]) -> np.ndarray:
    """One tensor for each row, in an array of objects."""
    parts = values.split(counts.tolist())
    return np.fromiter(parts, dtype=object, count=len(parts))
