"""Searches of torch-cluster by their names and signatures, which are those of PyTorch Geometric."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pointproj.compat.edges import boundaries, sampled_rows
from pointproj.compat.torch_geometric import knn, knn_graph, nearest, radius, radius_graph

__all__ = ["fps", "knn", "knn_graph", "nearest", "radius", "radius_graph"]


def fps(
    src: Float[Tensor, "*points f"],
    batch: Int[Tensor, " n"] | None = None,
    ratio: float | Tensor | None = None,
    random_start: bool = True,
    batch_size: int | None = None,
    ptr: Int[Tensor, " clouds+1"] | Sequence[int] | None = None,
) -> Int[Tensor, " chosen"]:
    """As :func:`pointproj.compat.torch_geometric.fps`, which has fewer arguments.

    Parameters
    ----------
    src, batch, random_start, batch_size
        As ``x``, ``batch``, ``random_start`` and ``batch_size`` there.
    ratio : float, or tensor of shape () or (B,), optional
        The share of each cloud's points that is chosen. None: 0.5.
    ptr : (B + 1,) integer tensor or sequence, optional
        Where each cloud begins and ends, instead of ``batch``; ValueError if it does not ascend from 0 to N.
    """
    if ptr is None:
        ptr = boundaries(src, src, batch, batch, batch_size)[0]
    elif not isinstance(ptr, Tensor):
        ptr = torch.tensor(ptr, device=src.device)
    return sampled_rows(src, ptr, 0.5 if ratio is None else ratio, random_start)
