"""Attention from query points to their nearest reference points, with weights that are learned."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from pointproj.ops.reference import safe_sqrt

PAIR_CHANNELS = 5  # displacement (3), distance, height above the neighbour's plane
OWN_PLANE_CHANNELS = 2  # the neighbour's height above the point's own plane, cosine between the two planes
HEAD_CHANNELS = 8
SIDED_CHANNELS = 8


class NeighborAttention(nn.Module):
    """Look at each of the k nearest reference points on its own, then average what was seen.

    A small MLP sees, for every pair, where the neighbour lies from the query point, how high the query point
    is above the neighbour's plane, and the neighbour's features. It gives values and the logits of a softmax
    over the neighbours, one a head of 8 channels. So two sheets that lie close together stay apart, where an
    average over distances alone would mix them.

    Which side of a plane is up says nothing. So some of the neighbour's features are multiplied by the
    height: what a neighbour knows of its two sides becomes something about the query point.

    Parameters
    ----------
    in_channels : int
        Channels of the reference points' features.
    channels : int
        Width of the MLP and of the result; a multiple of 8.
    unit : float
        Displacements are measured in it; the usual distance between reference points.
    own_planes : bool
        Query points have planes too.

    Raises
    ------
    ValueError
        If ``channels`` is not a multiple of 8.
    """

    def __init__(self, in_channels: int, channels: int, *, unit: float, own_planes: bool = False) -> None:
        super().__init__()
        if channels % HEAD_CHANNELS:
            raise ValueError(f"expected channels to be a multiple of {HEAD_CHANNELS}, got {channels}")
        self.unit = unit
        pair_channels = PAIR_CHANNELS + OWN_PLANE_CHANNELS * own_planes
        self.neighbor = nn.Linear(in_channels, channels + SIDED_CHANNELS)
        self.pair = nn.Linear(pair_channels + SIDED_CHANNELS, channels, bias=False)
        self.hidden = nn.Linear(channels, channels)
        self.value = nn.Linear(channels, channels)
        self.logit = nn.Linear(channels, channels // HEAD_CHANNELS)

    def forward(
        self,
        query_points: Float[Tensor, "b q 3"],
        reference_points: Float[Tensor, "b n 3"],
        normals: Float[Tensor, "b n 3"],
        features: Float[Tensor, "b n c"],
        rows: Int[Tensor, "b q k"],
        own_normals: Float[Tensor, "b q 3"] | None = None,
    ) -> Float[Tensor, "b q channels"]:
        """Attend from the query points to the reference points.

        Parameters
        ----------
        query_points : (B, Q, 3) float tensor
        reference_points : (B, N, 3) float tensor
        normals : (B, N, 3) float tensor
            Of the reference points' planes, from :func:`pointproj.nn.planes.local_planes`.
        features : (B, N, in_channels) float tensor
        rows : (B, Q, k) integer tensor
            Of the k nearest reference points, from :func:`pointproj.knn`; -1 for none, as a query point has
            that is not finite: its result is NaN.
        own_normals : (B, Q, 3) float tensor
            Of the query points' planes, where they have some.

        Returns
        -------
        (B, Q, channels) float tensor
        """
        with full_precision(query_points):
            seen = self._seen(query_points, reference_points, normals, features, rows, own_normals)
        hidden = self.hidden(seen.relu()).relu()
        logits = self.logit(hidden)
        weights = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(dim=2)
        values = self.value(hidden).unflatten(-1, (-1, HEAD_CHANNELS))
        return (weights[..., None].to(values.dtype) * values).sum(2).flatten(-2).to(query_points.dtype)

    def _seen(
        self,
        query_points: Tensor,
        reference_points: Tensor,
        normals: Tensor,
        features: Tensor,
        rows: Tensor,
        own_normals: Tensor | None,
    ) -> Float[Tensor, "b q k channels"]:
        """The first layer of the MLP, in which positions become features."""
        rows = rows.clamp(min=0)  # where there is none, the displacement is NaN anyway
        neighbor_points, normals = take_rows(torch.cat([reference_points, normals], dim=-1), rows).split(
            3, dim=-1
        )
        displacement = (neighbor_points - query_points[:, :, None]) / self.unit
        distance = safe_sqrt(displacement.square().sum(-1, keepdim=True))
        height = -(displacement * normals).sum(-1, keepdim=True)
        pair = [displacement, distance, height]
        if own_normals is not None:
            own = own_normals[:, :, None]
            pair += [(other * own).sum(-1, keepdim=True) for other in (displacement, normals)]
        neighbor = take_rows(self.neighbor(features), rows)
        known, sided = neighbor.split([self.hidden.in_features, SIDED_CHANNELS], dim=-1)
        return known + self.pair(torch.cat([*pair, sided * height], dim=-1))


def full_precision(points: Tensor) -> torch.autocast:
    """Context in which autocast is off: differences of positions are lost in low precision."""
    return torch.autocast(points.device.type, enabled=False)


def take_rows(features: Float[Tensor, "b n c"], rows: Tensor) -> Tensor:
    """Rows of each cloud's features: (B, N, C) and integers (B, ...) to (B, ..., C)."""
    clouds, points, channels = features.shape
    first = torch.arange(clouds, device=rows.device).view(-1, *(1,) * (rows.dim() - 1)) * points
    return (
        features.reshape(-1, channels).index_select(0, (rows + first).flatten()).view(*rows.shape, channels)
    )
