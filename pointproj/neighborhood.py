"""Attention from query points to their nearest reference points, with weights that are learned."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from pointproj.context import safe_sqrt

PAIR_CHANNELS = 4  # displacement (3) and distance
HEAD_CHANNELS = 8


class NeighborAttention(nn.Module):
    """Look at each of the k nearest reference points on its own, then average what was seen.

    A small MLP sees, for every pair, where the neighbour lies from the query point and the neighbour's
    features. It gives values and the logits of a softmax over the neighbours, one a head of 8 channels. So
    two sheets that lie close together stay apart, where an average over distances alone would mix them.

    Parameters
    ----------
    in_channels : int
        Channels of the reference points' features; 0 for none.
    channels : int
        Width of the MLP and of the result; a multiple of 8.
    unit : float
        Displacements are measured in it; the usual distance between reference points.

    Raises
    ------
    ValueError
        If ``channels`` is not a multiple of 8.
    """

    def __init__(self, in_channels: int, channels: int, *, unit: float) -> None:
        super().__init__()
        if channels % HEAD_CHANNELS:
            raise ValueError(f"expected channels to be a multiple of {HEAD_CHANNELS}, got {channels}")
        self.unit = unit
        self.neighbor = nn.Linear(in_channels, channels, bias=False) if in_channels else None
        self.pair = nn.Linear(PAIR_CHANNELS, channels)
        self.hidden = nn.Linear(channels, channels)
        self.value = nn.Linear(channels, channels)
        self.logit = nn.Linear(channels, channels // HEAD_CHANNELS)

    def forward(
        self,
        query_points: Float[Tensor, "b q 3"],
        reference_points: Float[Tensor, "b n 3"],
        features: Float[Tensor, "b n c"] | None,
        rows: Int[Tensor, "b q k"],
    ) -> Float[Tensor, "b q channels"]:
        """Attend from the query points to the reference points.

        Parameters
        ----------
        query_points : (B, Q, 3) float tensor
        reference_points : (B, N, 3) float tensor
        features : (B, N, in_channels) float tensor or None
        rows : (B, Q, k) integer tensor
            Of the k nearest reference points, from :func:`pointproj.knn`; -1 for none, as a query point has
            that is not finite: its result is NaN.

        Returns
        -------
        (B, Q, channels) float tensor
        """
        rows = rows.clamp(min=0)  # where there is none, the displacement is NaN anyway
        displacement = (take_rows(reference_points, rows) - query_points[:, :, None]) / self.unit
        distance = safe_sqrt(displacement.square().sum(-1, keepdim=True))
        hidden = self.pair(torch.cat([displacement, distance], dim=-1))
        if self.neighbor is not None:
            hidden = hidden + take_rows(self.neighbor(features), rows)
        hidden = self.hidden(hidden.relu()).relu()
        logits = self.logit(hidden)
        weights = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(dim=2)
        values = self.value(hidden).unflatten(-1, (-1, HEAD_CHANNELS))
        return (weights[..., None].to(values.dtype) * values).sum(2).flatten(-2)


def take_rows(features: Float[Tensor, "b n c"], rows: Tensor) -> Tensor:
    """Rows of each cloud's features: (B, N, C) and integers (B, ...) to (B, ..., C)."""
    clouds, points, channels = features.shape
    first = torch.arange(clouds, device=rows.device).view(-1, *(1,) * (rows.dim() - 1)) * points
    return (
        features.reshape(-1, channels).index_select(0, (rows + first).flatten()).view(*rows.shape, channels)
    )
