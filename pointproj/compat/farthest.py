"""Farthest-point sampling as torch-cluster, PyTorch Geometric and pyg-lib have it."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pointproj.compat.edges import boundaries
from pointproj.compat.pairs import coordinates
from pointproj.ops.farthest_points import farthest_points


def sampled_rows(
    src: Float[Tensor, "*points f"],
    ptr: Int[Tensor, " clouds+1"] | None,
    ratio: float | Tensor,
    random_start: bool,
) -> Int[Tensor, " chosen"]:
    """Rows of ceil(ratio * n) points of each cloud; a tensor ``ratio`` may hold one number for each."""
    (points,) = coordinates(src=src.detach().flatten(1) if src.ndim > 1 else src.detach()[:, None])
    sizes = torch.tensor([len(src)], device=src.device) if ptr is None else ptr.diff()
    counts = (sizes.float() * ratio).ceil().long().tolist()
    start = 0
    if random_start:
        drawn = torch.rand(sizes.shape, device=sizes.device) * sizes
        start = torch.minimum(drawn.long(), sizes - 1).clamp(min=0)
    if ptr is None:
        return farthest_points(points, counts[0], start=start)
    return farthest_points(points, counts, start=start, offsets=ptr)


def boundaries_of(src: Tensor, batch: Tensor | None, batch_size: int | None) -> Tensor | None:
    """Where the clouds of a batch vector begin and end, None if there is one."""
    if batch is not None and batch.numel() != len(src):
        raise AssertionError(
            f"batch must name the cloud of each of the {len(src)} points; got {batch.numel()}"
        )
    return boundaries(src, src, batch, batch, batch_size)[0]
