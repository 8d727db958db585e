"""Operators of PointNet++: ``pointnet2_ops.pointnet2_utils`` by its names and signatures.

Written after the paper (Qi et al. 2017) and the CUDA extension that most networks use. Unlike the extension,
these functions run on the CPU too, take float64, and are differentiable twice. They raise TypeError or
ValueError for arguments that do not fit together.
"""

import torch
from jaxtyping import Float, Int32
from torch import Tensor, nn

from pointproj.compat.pairs import coordinates, first_within, nearest
from pointproj.ops.farthest_points import farthest_points

__all__ = [
    "GroupAll",
    "QueryAndGroup",
    "ball_query",
    "furthest_point_sample",
    "gather_operation",
    "grouping_operation",
    "three_interpolate",
    "three_nn",
]


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
    terms = (
        gather_operation(features, rows) * share[:, None]
        for rows, share in zip(idx.unbind(-1), weight.unbind(-1), strict=True)
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


def furthest_point_sample(xyz: Float[Tensor, "b n 3"], npoint: int) -> Int32[Tensor, "b npoint"]:
    """Choose ``npoint`` points of each cloud, from the first on: always the one farthest from all before.

    Of equally far points, the lower row. The extension never chooses points nearer than 0.03 to the origin;
    here all points are equal. ValueError for more points than there are.
    """
    return farthest_points(*coordinates(xyz=xyz), npoint).int()


def gather_operation(
    features: Float[Tensor, "b c n"], idx: Int32[Tensor, "b npoint"]
) -> Float[Tensor, "b c npoint"]:
    """Features of chosen points. Differentiable in ``features``."""
    return features.gather(2, idx.long()[:, None].expand(-1, features.shape[1], -1))


def grouping_operation(
    features: Float[Tensor, "b c n"], idx: Int32[Tensor, "b npoint nsample"]
) -> Float[Tensor, "b c npoint nsample"]:
    """Features of the points of each group. Differentiable in ``features``."""
    return gather_operation(features, idx.flatten(1)).unflatten(2, idx.shape[1:])


class QueryAndGroup(nn.Module):
    """Points within a ball of each centre, relative to it, and their features.

    ``radius`` and ``nsample`` are those of :func:`ball_query`; ``use_xyz`` puts the relative positions before
    the features.
    """

    def __init__(self, radius: float, nsample: int, use_xyz: bool = True) -> None:
        super().__init__()
        self.radius, self.nsample, self.use_xyz = radius, nsample, use_xyz

    def forward(
        self,
        xyz: Float[Tensor, "b n 3"],
        new_xyz: Float[Tensor, "b npoint 3"],
        features: Float[Tensor, "b c n"] | None = None,
    ) -> Float[Tensor, "b channels npoint nsample"]:
        """Positions (3), features (C), or both. ValueError without features if ``use_xyz`` is false."""
        idx = ball_query(self.radius, self.nsample, xyz, new_xyz)
        relative = grouping_operation(xyz.mT, idx) - new_xyz.mT[..., None]
        return _grouped(
            relative, None if features is None else grouping_operation(features, idx), self.use_xyz
        )


class GroupAll(nn.Module):
    """All points as one group; positions are as given, and ``use_xyz`` puts them before the features."""

    def __init__(self, use_xyz: bool = True) -> None:
        super().__init__()
        self.use_xyz = use_xyz

    def forward(
        self,
        xyz: Float[Tensor, "b n 3"],
        new_xyz: Tensor | None = None,
        features: Float[Tensor, "b c n"] | None = None,
    ) -> Float[Tensor, "b channels 1 n"]:
        """As :meth:`QueryAndGroup.forward`, with one group of all points; ``new_xyz`` is not read."""
        return _grouped(xyz.mT[:, :, None], None if features is None else features[:, :, None], self.use_xyz)


def _grouped(positions: Tensor, features: Tensor | None, use_xyz: bool) -> Tensor:
    if features is None:
        if not use_xyz:
            raise ValueError("expected features, or use_xyz=True, which groups positions; got neither")
        return positions
    return torch.cat([positions, features], dim=1) if use_xyz else features


def _check(**clouds: Tensor) -> None:
    """Raise ValueError unless all are dense batches of equally many clouds."""
    shapes = {name: tuple(points.shape) for name, points in clouds.items()}
    if any(len(shape) != 3 for shape in shapes.values()) or len({shape[0] for shape in shapes.values()}) > 1:
        got = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"expected equally many clouds (B, points, 3), got {got}")
