"""Searches of torch-cluster by their names and signatures, which are those of PyTorch Geometric."""

import torch
from torch import Tensor

from pointproj.compat.torch_geometric import knn, knn_graph, nearest, radius, radius_graph

__all__ = ["fps", "knn", "knn_graph", "nearest", "radius", "radius_graph"]


def fps(
    src: Tensor,
    batch: Tensor | None = None,
    ratio: float | Tensor | None = None,
    random_start: bool = True,
    batch_size: int | None = None,
    ptr: Tensor | list[int] | None = None,
) -> Tensor:
    """As :func:`pointproj.compat.torch_geometric.fps`, which has fewer arguments.

    Parameters
    ----------
    src, batch, random_start, batch_size
        As ``x``, ``batch``, ``random_start`` and ``batch_size`` there.
    ratio : float, or tensor of shape () or (B,), optional
        The share of each cloud's points that is chosen. None: 0.5.
    ptr : (B + 1,) integer tensor or list, optional
        Where each cloud begins and ends, instead of ``batch``; ValueError if it does not ascend from 0 to N.
    """
    # In branches that torch.jit.script can type.
    share, shares = 0.5, torch.jit.annotate(Tensor | None, None)
    if isinstance(ratio, Tensor):
        shares = ratio
    elif ratio is not None:
        share = float(ratio)
    bounds = torch.jit.annotate(Tensor | None, None)
    if isinstance(ptr, Tensor):
        bounds = ptr
    elif ptr is not None:
        bounds = torch.tensor(ptr, device=src.device)
    return torch.ops.pointproj.batched_fps(src, batch, share, shares, random_start, batch_size, bounds)
