"""Operators of PointNet++: ``pointnet2_ops.pointnet2_utils`` by its names and signatures.

Written after the paper (Qi et al. 2017) and the CUDA extension that most networks use. Unlike the extension,
these functions run on the CPU too, take float64, and are differentiable twice. They raise TypeError or
ValueError for arguments that do not fit together.
"""

import torch
from jaxtyping import Float, Int32
from torch import Tensor

from pointproj.compat.pairs import coordinates, first_within, nearest

__all__ = ["ball_query", "three_interpolate", "three_nn"]


def three_nn(
    unknown: Float[Tensor, "b n 3"], known: Float[Tensor, "b m 3"]
) -> tuple[Float[Tensor, "b n 3"], Int32[Tensor, "b n 3"]]:
    """The three nearest points of ``known`` of each point of ``unknown``; nothing waits for the device.

    Returns
    -------
    dist : (B, n, 3) float tensor
        Distances, nearest first, ties by the lower index; inf beyond the m-th. Differentiable in both clouds,
        subgradient 0 at distance 0. The extension has no gradient: detach them for the same training.
    idx : (B, n, 3) int32 tensor
        Rows of ``known``; 0 beyond the m-th.
    """
    _check(unknown=unknown, known=known)
    dist, idx = nearest(*coordinates(unknown=unknown, known=known), 3)
    return dist.to(unknown.dtype), idx.clamp(min=0).int()


def three_interpolate(
    features: Float[Tensor, "b c m"], idx: Int32[Tensor, "b n 3"], weight: Float[Tensor, "b n 3"]
) -> Float[Tensor, "b c n"]:
    """Weighted sum of the features of three points for each of n points; nothing waits for the device.

    ``idx`` is of :func:`three_nn`; ``weight`` is 1 / distance, divided by its sum, in most networks.
    Differentiable in ``features``, as in the extension, and in ``weight``.
    """
    if idx.shape != weight.shape or len(idx) != len(features):
        raise ValueError(
            "idx and weight must have one shape (B, n, 3) and features (B, C, m) as many clouds; got "
            f"{tuple(idx.shape)}, {tuple(weight.shape)} and {tuple(features.shape)}"
        )
    columns = idx.long()[:, None].expand(-1, features.shape[1], -1, -1)
    terms = (
        features.gather(2, column) * share[:, None]
        for column, share in zip(columns.unbind(-1), weight.unbind(-1), strict=True)
    )
    return sum(terms)


def ball_query(
    radius: float, nsample: int, xyz: Float[Tensor, "b n 3"], new_xyz: Float[Tensor, "b m 3"]
) -> Int32[Tensor, "b m nsample"]:
    """The first ``nsample`` points of ``xyz``, by their index, within ``radius`` of each of ``new_xyz``.

    A point at exactly the radius is outside. If there are fewer, the first is repeated; if there are none,
    all are 0. All pairs within the radius are listed first: the host waits for the device, and memory grows
    with their number.
    """
    _check(new_xyz=new_xyz, xyz=xyz)
    query_points, reference_points = coordinates(new_xyz=new_xyz.detach(), xyz=xyz.detach())
    _, idx = first_within(query_points, reference_points, radius, nsample)
    return torch.where(idx < 0, idx[..., :1], idx).clamp(min=0).int()


def _check(**clouds: Tensor) -> None:
    """Raise ValueError unless all are dense batches of equally many clouds."""
    shapes = {name: tuple(points.shape) for name, points in clouds.items()}
    if any(len(shape) != 3 for shape in shapes.values()) or len({shape[0] for shape in shapes.values()}) > 1:
        got = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"expected equally many clouds (B, points, 3), got {got}")
