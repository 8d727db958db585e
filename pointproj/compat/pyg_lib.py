"""Searches of pyg-lib by the names and signatures of ``pyg_lib.ops``.

They take the boundaries of clouds instead of batch vectors, so nothing has to be read to know their number.
Edges are (2, E) int64 tensors as :mod:`pointproj.compat.torch_geometric` describes them under the same names.

All of them raise TypeError or ValueError for arguments of wrong shape, dtype or device.
"""

from jaxtyping import Float, Int
from torch import Tensor

from pointproj.compat.edges import Edges, directed, knn_edges, nearest_rows, radius_edges

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
    """For each point of ``y`` the k nearest points of ``x``.

    Parameters
    ----------
    x, y : (N, D) and (M, D) tensors
        Points. With more than 3 coordinates, all pairs are compared, in chunks.
    k : int
        Neighbours of each point.
    ptr_x, ptr_y : (B + 1,) integer tensors, optional
        Where each cloud begins and ends: cloud b is ``x[ptr_x[b]:ptr_x[b + 1]]``.
    cosine : bool
        Nearest by the angle between vectors.
    num_workers : int
        Not read.
    """
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
    """Edges between each point and its k nearest.

    Parameters
    ----------
    x, k, ptr, cosine, num_workers
        As for :func:`knn`.
    loop : bool
        Whether a point counts as its own neighbour.
    flow : {"source_to_target", "target_to_source"}
        Whether the neighbours are in row 1 or in row 0: in pyg-lib the opposite of what it means in PyTorch
        Geometric and torch-cluster, and so it is here.
    """
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

    Parameters
    ----------
    x, y, ptr_x, ptr_y, num_workers
        As for :func:`knn`.
    r : float
        Radius; a point at exactly this distance is outside.
    max_num_neighbors : int
        Of more than that, the nearest stay.
    ignore_same_index : bool
        Whether to leave out pairs of equal row numbers.
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
    """Edges between each point and those nearer than ``r``.

    Parameters
    ----------
    x, r, ptr, max_num_neighbors, num_workers
        As for :func:`radius`.
    loop, flow
        As for :func:`knn_graph`.
    """
    edges = radius(x, x, r, ptr, ptr, max_num_neighbors, num_workers, ignore_same_index=not loop)
    return directed(edges, flow, "target_to_source")


def nearest(
    x: Float[Tensor, "n d"],
    y: Float[Tensor, "m d"],
    ptr_x: Boundaries | None = None,
    ptr_y: Boundaries | None = None,
) -> Int[Tensor, " n"]:
    """For each point of ``x`` the nearest point of ``y``: the other way round than :func:`knn`.

    Parameters
    ----------
    x, y, ptr_x, ptr_y
        As for :func:`knn`.

    Returns
    -------
    (N,) int64 tensor
        Rows of ``y``; -1 where there is none. Nothing waits for the device up to 3 coordinates.
    """
    return nearest_rows(x, y, ptr_x, ptr_y)
