"""Attention to the two sides of the nearest reference points, with weights that are learned."""

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
    """Look at the side of each neighbour that faces the point, and at the other; then average what was seen.

    Every reference point has two sides, that of its normal first, and features for each. Which of them faces
    a point follows from the sign of the point's height above the plane, so the sign of a normal makes no
    difference. Lengths are measured in each neighbour's own unit, so that clouds of any density look alike.

    ``own_channels`` are of what a point knows of itself, ``side_channels`` of a side's features,
    ``channels``, a multiple of 8 (else ``ValueError``), of the MLP and the result. ``own_normals`` says that
    points have normals too, ``sensors`` that reference points have directions in which they were seen.
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
        self.logit = nn.Linear(channels, channels // HEAD_CHANNELS, bias=False)  # a softmax takes no notice

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

        ``known`` is what each point knows of itself. ``sides`` are features of the side of each reference
        point that its normal points to, and of the other. ``places`` (B, N, 7 or, with sensors, 10) are their
        positions, unit normals, units of length, and unit vectors to the sensors that saw them, 0 where not
        known. ``rows`` are those of the k nearest, -1 for none, as a point has that is not finite: its result
        is NaN. ``own_normals`` are those of the sides of planes that the points are on, if they are.
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
        """Where the neighbours lie; and rows of their sides that face the points, two for each neighbour."""
        rows = rows.clamp(min=0)  # where there is none, the displacement is NaN anyway
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
    """Context in which autocast is off: differences of positions are lost in low precision."""
    return torch.autocast(points.device.type, enabled=False)
