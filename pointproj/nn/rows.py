"""Rows of features, for a batch of clouds."""

import torch
from jaxtyping import Float
from torch import Tensor

from pointproj.ops.specification.clouds import rows_of


def take_rows(features: Float[Tensor, "*batch n c"], rows: Tensor) -> Tensor:
    """Take rows of each cloud's features (B, N, C) by integers (B, ...): (B, ..., C); B may be absent."""
    *clouds, points, _ = features.shape
    if clouds:
        first = torch.arange(*clouds, device=rows.device) * points
        rows = rows + first.view(-1, *(1,) * (rows.dim() - 1))
    return rows_of(features.flatten(0, -2), rows)
