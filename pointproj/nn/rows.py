"""Rows of the features of a batch of clouds."""

import torch
from jaxtyping import Float
from torch import Tensor


def take_rows(features: Float[Tensor, "b n c"], rows: Tensor) -> Tensor:
    """Rows of each cloud's features: (B, N, C) and integers (B, ...) to (B, ..., C)."""
    clouds, points, channels = features.shape
    first = torch.arange(clouds, device=rows.device).view(-1, *(1,) * (rows.dim() - 1)) * points
    return (
        features.reshape(-1, channels).index_select(0, (rows + first).flatten()).view(*rows.shape, channels)
    )
