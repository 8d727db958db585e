"""Attention to the two sides of the nearest reference points."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from pointproj.nn.rows import take_rows
from pointproj.ops.specification.reference import safe_sqrt

HEAD_CHANNELS = 8
PAIR_CHANNELS = 6  # displacement (3), distance, height over the neighbour's plane, distance along it
SENSOR_CHANNELS = 3  # along the neighbour's sight line, distance from it, whether there is one
OWN_NORMAL_CHANNELS = 2  # the neighbour's height over the point's own plane, cosine between the two sides


class SideAttention(nn.Module):
    """Attention of points to both sides of each neighbour: the side that faces the point, and the other.

    Every reference point has features for two sides; the first is the side that its normal points to. Which
    side faces a point follows from the sign of the point's height above the plane, so the sign of a normal
    makes no difference. Lengths are in a unit of each neighbour, so the density of the cloud makes no
    difference either.

    Parameters
    ----------
    own_channels : int
        Channels of a point's own features.
    side_channels : int
        Channels of the features of a side.
    channels : int
        Channels of the MLP and the result, a multiple of 8.
    own_normals : bool
        Whether the points have normals too.
    sensors : bool
        Whether reference points have directions to the sensors that saw them.

    Raises
    ------
    ValueError
        If ``channels`` is not a multiple of 8.
    """

    def __init__(
        self,
        own_channels: int,
        side_channels: int,
        channels: int,
        *,
        own_normals: bool = False,
        sensors: bool = False,
    ) -> None:
        super().__init__()
        if channels % HEAD_CHANNELS:
            raise ValueError(f"expected channels to be a multiple of {HEAD_CHANNELS}, got {channels}")
        self.own = nn.Linear(own_channels, channels)
        self.side = nn.Linear(2 * side_channels, channels, bias=False)
        pair_channels = PAIR_CHANNELS + OWN_NORMAL_CHANNELS * own_normals + SENSOR_CHANNELS * sensors
        self.pair = nn.Linear(pair_channels, channels, bias=False)
        self.hidden = nn.Linear(channels, channels)
        self.value = nn.Linear(channels, channels)
        self.logit = nn.Linear(channels, channels // HEAD_CHANNELS, bias=False)  # softmax ignores a bias

    def forward(
        self,
        known: Float[Tensor, "b q own"],
        sides: Float[Tensor, "b n 2 side"],
        points: Float[Tensor, "b q 3"],
        places: Float[Tensor, "b n p"],
        rows: Int[Tensor, "b q k"],
        own_normals: Float[Tensor, "b q 3"] | None = None,
    ) -> Float[Tensor, "b q channels"]:
        """Attend from points to reference points.

        Parameters
        ----------
        known : (B, Q, own) float tensor
            Features of the points.
        sides : (B, N, 2, side) float tensor
            Features of both sides of each reference point; the first is the side that its normal points to.
        points : (B, Q, 3) float tensor
            Positions of the points.
        places : (B, N, 7) float tensor, or (B, N, 10) with sensors
            Of each reference point: position, unit normal, unit of length, and the unit vector to the sensor
            that saw it, 0 if unknown.
        rows : (B, Q, k) integer tensor
            The k nearest reference points; -1 for a point that is not finite, whose result is NaN.
        own_normals : (B, Q, 3) float tensor, optional
            Normals of the points, if they are sides of planes themselves.

        Returns
        -------
        (B, Q, channels) float tensor
        """
        with full_precision(points):
            pair, rows = self._pairs(points, places, rows, own_normals)
            both = torch.stack([sides.flatten(2), sides.flip(2).flatten(2)], dim=2)  # the facing one first
            facing = take_rows(self.side(both).flatten(1, 2), rows)
            seen = facing + self.pair(pair) + self.own(known)[:, :, None]
        hidden = self.hidden(seen.relu()).relu()
        logits = self.logit(hidden)
        weights = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(dim=2)
        values = self.value(hidden).unflatten(-1, (-1, HEAD_CHANNELS))
        return (weights[..., None].to(values.dtype) * values).sum(2).flatten(-2).to(points.dtype)

    def _pairs(
        self, points: Tensor, places: Tensor, rows: Tensor, own_normals: Tensor | None
    ) -> tuple[Float[Tensor, "b q k pair"], Int[Tensor, "b q k"]]:
        """Return features of each pair, and the row of the neighbour's side that faces the point.

        Each neighbour has two rows, one for each side.
        """
        rows = rows.clamp(min=0)  # -1 is for points that are not finite; their displacements are NaN anyway
        neighbors, normals, unit, sensors = take_rows(places, rows).tensor_split((3, 6, 7), dim=-1)
        displacement = (neighbors - points[:, :, None]) / unit
        height = -(displacement * normals).sum(-1, keepdim=True)
        squared = displacement.square().sum(-1, keepdim=True)
        along = safe_sqrt((squared - height.square()).clamp(min=0))
        behind = height < 0
        pair = [displacement, safe_sqrt(squared), height.abs(), along]
        if own_normals is not None:
            facing = torch.where(behind, -normals, normals)
            own = own_normals[:, :, None]
            pair += [(other * own).sum(-1, keepdim=True) for other in (displacement, facing)]
        if sensors.shape[-1]:
            ahead = -(displacement * sensors).sum(-1, keepdim=True)
            beside = safe_sqrt((squared - ahead.square()).clamp(min=0))
            pair += [ahead, beside, sensors.square().sum(-1, keepdim=True)]
        return torch.cat(pair, dim=-1), 2 * rows + behind.squeeze(-1)


def full_precision(points: Tensor) -> torch.autocast:
    """Return a context without autocast, since low precision would lose small differences of positions."""
    return torch.autocast(points.device.type, enabled=False)
