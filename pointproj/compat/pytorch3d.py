"""Searches of PyTorch3D: ``pytorch3d.ops`` by its names and signatures.

Written against its documentation (0.7). Clouds are (B, P, D) float tensors, padded to one size. ``lengths``
are (B,) int64 tensors: how many points of each cloud are not padding; None: all. With D above 3 all pairs are
compared, in chunks, and the host waits for the device. ValueError for clouds that do not fit together.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pointproj.compat.pairs import coordinates, first_within, narrowed, nearest, random_rows
from pointproj.ops.farthest_points import farthest_points
from pointproj.ops.specification.reference import squared_lengths

__all__ = ["ball_query", "knn_gather", "knn_points", "sample_farthest_points"]

CloudBatch = Float[Tensor, "b n d"]
Lengths = Int[Tensor, " b"]


class KNN(NamedTuple):
    """Squared distances, int64 rows of ``p2`` within the cloud, and if wanted the points there."""

    dists: Float[Tensor, "b p k"]
    idx: Int[Tensor, "b p k"]
    knn: Float[Tensor, "b p k d"] | None


def knn_points(
    p1: CloudBatch,
    p2: CloudBatch,
    lengths1: Lengths | None = None,
    lengths2: Lengths | None = None,
    norm: int = 2,
    K: int = 1,  # noqa: N803 - its name there
    version: int = -1,
    return_nn: bool = False,
    return_sorted: bool = True,
) -> KNN:
    """The K nearest points of ``p2`` of each point of ``p1``; nothing waits for the device.

    ``norm`` is 2; the distance of norm 1 is not supported. ``version`` and ``return_sorted`` are not read:
    neighbours are always sorted, nearest first, ties by the lower index.

    Returns
    -------
    KNN
        ``dists`` are differentiable twice in both clouds, in their own dtype; PyTorch3D has first derivatives
        in float32. Where a cloud of ``p2`` has fewer than K points, and for rows of ``p1`` beyond
        ``lengths1``, ``dists`` and ``idx`` are 0. ``knn`` only with ``return_nn``.
    """
    _check_pair(p1, p2)
    if norm != 2:
        raise ValueError(f"norm must be 2; PyTorch3D has norm 1 as well, pointproj does not; got {norm}")
    query_points, reference_points = coordinates(p1=p1, p2=p2)
    _, idx = nearest(query_points.detach(), _without_padding(reference_points.detach(), lengths2), K)
    idx = idx.masked_fill(_beyond(p1, lengths1), -1)
    # Not the squares of the distances found: these have no second derivative at 0. Differences are set to 0,
    # not their squares: a row that is not finite must get the gradient 0.
    delta = query_points[:, :, None] - _gathered(reference_points, idx)
    dists = narrowed(squared_lengths(delta.masked_fill(idx[..., None] < 0, 0.0)), p1, p2)
    idx = idx.clamp(min=0)
    return KNN(dists, idx, knn_gather(p2, idx, lengths2) if return_nn else None)


def knn_gather(
    x: Float[Tensor, "b m u"], idx: Int[Tensor, "b l k"], lengths: Lengths | None = None
) -> Float[Tensor, "b l k u"]:
    """Rows of ``x`` (B, M, U) by the indices of :func:`knn_points`: 0 for the index -1.

    Also 0 in column k of clouds with at most k rows. Nothing waits for the device.
    """
    if x.shape[0] != idx.shape[0]:
        raise ValueError(
            f"x and idx must have same batch dimension; got {x.shape[0]} and {idx.shape[0]} clouds"
        )
    gathered = _gathered(x, idx)
    if lengths is None:
        lengths = idx.new_full((len(idx),), x.shape[1])
    absent = torch.arange(idx.shape[2], device=x.device) >= lengths[:, None]
    return gathered.masked_fill(absent[:, None, :, None], 0.0)


def ball_query(
    p1: CloudBatch,
    p2: CloudBatch,
    lengths1: Lengths | None = None,
    lengths2: Lengths | None = None,
    K: int = 500,  # noqa: N803 - its name there
    radius: float = 0.2,
    return_nn: bool = True,
    skip_points_outside_cube: bool = False,
) -> KNN:
    """The first K points of ``p2``, by their index, that are nearer than ``radius`` to each point of ``p1``.

    A point at exactly the radius is outside. :func:`pointproj.radius_neighbors` finds the nearest K instead.
    ``skip_points_outside_cube`` is not read: it makes PyTorch3D's search faster.

    Returns
    -------
    KNN
        As by :func:`knn_points`, but where there are fewer than K, ``idx`` is -1 and ``dists`` and ``knn``
        are 0. All pairs within the radius are listed first: the host waits for the device to know their
        number, and memory grows with it.
    """
    _check_pair(p1, p2)
    query_points, reference_points = coordinates(p1=p1, p2=p2)
    dists, idx = first_within(query_points, _without_padding(reference_points, lengths2), radius, K)
    absent = (idx < 0) | _beyond(p1, lengths1)
    dists, idx = narrowed(dists.masked_fill(absent, 0.0), p1, p2), idx.masked_fill(absent, -1)
    return KNN(dists, idx, _gathered(p2, idx) if return_nn else None)


def sample_farthest_points(
    points: CloudBatch,
    lengths: Lengths | None = None,
    K: int | Sequence[int] | Lengths = 50,  # noqa: N803 - its name there
    random_start_point: bool = False,
) -> tuple[Float[Tensor, "b k d"], Int[Tensor, "b k"]]:
    """Choose points evenly over each cloud: always the one farthest from all chosen before.

    Parameters
    ----------
    points, lengths
        Clouds. With D above 3 each point is compared with every chosen one.
    K : int, or (B,) sequence or tensor
        How many to choose of each cloud. For a tensor the host waits for the device.
    random_start_point : bool
        Begin with a random point of each cloud, by torch's generator, instead of its first.

    Returns
    -------
    points : (B, max K, D) float tensor
        In the dtype given (PyTorch3D: float32), with gradients to ``points``; 0 in slots beyond the cloud's
        size or its K.
    indices : (B, max K) int64 tensor
        Their rows; -1 in these slots.
    """
    _check(points=points)
    clouds, size, _ = points.shape
    if lengths is not None and lengths.shape != (clouds,):
        raise ValueError("points and lengths must have same batch dimension.")
    if not isinstance(K, int) and len(K) != clouds:
        raise ValueError("K and points must have the same batch dimension")
    counts = torch.as_tensor(K, device=points.device).expand(clouds)
    most = K if isinstance(K, int) else max(K.tolist() if isinstance(K, Tensor) else K, default=0)
    real = counts.new_full((clouds,), size) if lengths is None else lengths
    start = random_rows(real) if random_start_point else 0
    (positions,) = coordinates(points=points.detach())
    # A copy of the first point is never farther than that, so padding is not chosen before it.
    positions = torch.where(_beyond(positions, lengths), positions[:, :1], positions)
    idx = farthest_points(positions, min(most, size), start=start)
    absent = torch.arange(idx.shape[1], device=idx.device) >= torch.minimum(counts, real)[:, None]
    idx = torch.nn.functional.pad(idx.masked_fill(absent, -1), (0, most - idx.shape[1]), value=-1)
    return _gathered(points, idx[..., None])[:, :, 0], idx


def _check(**clouds: Tensor) -> None:
    for name, points in clouds.items():
        if points.ndim != 3:
            raise ValueError(
                f"{name} must have shape (clouds, points, coordinates); got {tuple(points.shape)}"
            )


def _check_pair(p1: Tensor, p2: Tensor) -> None:
    _check(p1=p1, p2=p2)
    for axis, what in ((0, "batch"), (2, "point")):
        if p1.shape[axis] != p2.shape[axis]:
            got = f"{tuple(p1.shape)} and {tuple(p2.shape)}"
            raise ValueError(f"pts1 and pts2 must have the same {what} dimension; got {got}")


def _without_padding(points: Tensor, lengths: Tensor | None) -> Tensor:
    """Points whose padding is NaN, and so nobody's neighbour."""
    return points if lengths is None else points.masked_fill(_beyond(points, lengths), torch.nan)


def _beyond(points: Tensor, lengths: Tensor | None) -> Tensor:
    """(B, P, 1), or (1, P, 1) without lengths: whether a row is padding."""
    rows = torch.arange(points.shape[1], device=points.device)[:, None]
    if lengths is None:
        return torch.zeros_like(rows, dtype=torch.bool)[None]
    return rows >= lengths[:, None, None]


def _gathered(x: Tensor, idx: Tensor) -> Tensor:
    """Rows of x, 0 for row -1."""
    if not x.shape[1]:
        return x.new_zeros(*idx.shape, x.shape[2])
    batch = torch.arange(len(x), device=x.device)[:, None, None]
    return x[batch, idx.clamp(min=0)].masked_fill(idx[..., None] < 0, 0.0)
