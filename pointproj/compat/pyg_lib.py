"""Searches of pyg-lib by the names and signatures of ``pyg_lib.ops``.

They are those of the same names in :mod:`pointproj.compat.torch_geometric`, except for two arguments:

- ``ptr``, ``ptr_x``, ``ptr_y``: (B + 1,) integer tensors instead of batch vectors, where each cloud begins
  and ends: cloud b is ``x[ptr_x[b]:ptr_x[b + 1]]``. Their shape is the number of clouds.
- ``flow``: whether the neighbours are in row 1 ("source_to_target") or in row 0. As in pyg-lib, this is the
  opposite of what it means in PyTorch Geometric and torch-cluster.

All of them raise TypeError or ValueError for arguments of wrong shape, dtype or device.
"""

from jaxtyping import Float, Int
from torch import Tensor

from pointproj.compat.edges import Edges, directed, knn_edges, radius_edges
from pointproj.compat.edges import nearest_rows as nearest

__all__ = ["knn", "knn_graph", "nearest", "radius", "radius_graph"]

Boundaries = Int[Tensor, " clouds+1"]


def knn(
    x: Float[Tensor, "n d"],
    y: Float[Tensor, "m d"],
    k: int = 1,
    ptr_x: Boundaries | None = None,
    ptr_y: Boundaries | None = None,
    cosine: bool = False,
    num_workers: int = 1,
) -> Edges:
    """For each point of ``y`` the k nearest points of ``x``."""
    return knn_edges(x, y, k, ptr_x, ptr_y, cosine=cosine)


def knn_graph(
    x: Float[Tensor, "n d"],
    k: int,
    ptr: Boundaries | None = None,
    loop: bool = False,
    flow: str = "source_to_target",
    cosine: bool = False,
    num_workers: int = 1,
) -> Edges:
    """Edges between each point and its k nearest."""
    edges = knn_edges(x, x, k, ptr, ptr, cosine=cosine, skip_self=not loop)
    return directed(edges, flow, "target_to_source")


def radius(
    x: Float[Tensor, "n d"],
    y: Float[Tensor, "m d"],
    r: float = 1.0,
    ptr_x: Boundaries | None = None,
    ptr_y: Boundaries | None = None,
    max_num_neighbors: int = 32,
    num_workers: int = 1,
    ignore_same_index: bool = False,
) -> Edges:
    """For each point of ``y`` the points of ``x`` that are nearer than ``r``.

    ``ignore_same_index`` leaves out pairs of equal row numbers.
    """
    return radius_edges(
        x, y, r, ptr_x, ptr_y, max_num_neighbors=max_num_neighbors, skip_self=ignore_same_index
    )


def radius_graph(
    x: Float[Tensor, "n d"],
    r: float,
    ptr: Boundaries | None = None,
    loop: bool = False,
    max_num_neighbors: int = 32,
    flow: str = "source_to_target",
    num_workers: int = 1,
) -> Edges:
    """Edges between each point and those nearer than ``r``."""
    edges = radius(x, x, r, ptr, ptr, max_num_neighbors, num_workers, ignore_same_index=not loop)
    return directed(edges, flow, "target_to_source")
