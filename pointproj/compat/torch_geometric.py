"""Searches and interpolation of PyTorch Geometric: ``torch_geometric.nn`` by its names and signatures.

Written against torch-geometric 2.8, whose own searches need pyg-lib. :mod:`pointproj.compat.torch_cluster`
has the same functions under the name of the library that had them before. None of them needs either.
"""

import warnings

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pointproj.compat.edges import Edges, directed, knn_edges, radius_edges
from pointproj.compat.pairs import coordinates
from pointproj.ops.functional import knn_aggregate

__all__ = ["knn", "knn_graph", "knn_interpolate", "radius", "radius_graph"]

Batch = Int[Tensor, " n"]


def knn(
    x: Float[Tensor, "n f"],
    y: Float[Tensor, "m f"],
    k: int,
    batch_x: Batch | None = None,
    batch_y: Batch | None = None,
    cosine: bool = False,
    num_workers: int = 1,
    batch_size: int | None = None,
) -> Edges:
    """For each point of ``y`` the k nearest points of ``x``.

    Parameters
    ----------
    x : (N, F) or (N,) tensor
        Points that are found, with F = 1 to 3 coordinates, of any real dtype.
    y : (M, F) or (M,) tensor
        Points that are searched for.
    k : int
        Neighbours of each point, as many as are wanted; the library has a limit of 100 on a GPU.
    batch_x, batch_y : (N,) and (M,) int64 tensors, optional
        The cloud of each point, in ascending order. Neighbours are never of another cloud.
    cosine : bool
        Nearest by the angle between vectors. Also on the CPU, where the library has no such search.
    num_workers : int
        Not read.
    batch_size : int, optional
        Number of clouds. None: read from the batch vectors, for which the host waits for the device.

    Returns
    -------
    (2, E) int64 tensor
        Row 0: the point of ``y``, ascending; row 1: its neighbour of ``x``, nearest first, ties by the lower
        index. A cloud of fewer than k points gives fewer edges; a point with a NaN or inf coordinate has
        none. E depends on the data, so the host waits for the device; :func:`pointproj.knn` does not.

    Raises
    ------
    AssertionError
        For batch vectors of a wrong length, or one without the other.
    ValueError
        For more than 3 coordinates.
    """
    ptr_x, ptr_y = _boundaries(x, y, batch_x, batch_y, batch_size)
    return knn_edges(x, y, k, ptr_x, ptr_y, cosine=cosine)


def knn_graph(
    x: Float[Tensor, "n f"],
    k: int,
    batch: Batch | None = None,
    loop: bool = False,
    flow: str = "source_to_target",
    cosine: bool = False,
    num_workers: int = 1,
    batch_size: int | None = None,
) -> Edges:
    """Edges between each point and its k nearest.

    Parameters
    ----------
    x : (N, F) or (N,) tensor
        As for :func:`knn`.
    k : int
        As for :func:`knn`.
    batch : (N,) int64 tensor, optional
        As for :func:`knn`.
    loop : bool
        Whether a point counts as its own neighbour. If not, each point has at most k edges, also among
        points that coincide, where torch-cluster may give k + 1.
    flow : {"source_to_target", "target_to_source"}
        Whether the neighbours are in row 0 or in row 1.
    cosine, num_workers, batch_size
        As for :func:`knn`.

    Returns
    -------
    (2, E) int64 tensor
        Ordered as by :func:`knn`, with the rows that ``flow`` says.

    Raises
    ------
    AssertionError, ValueError
        As for :func:`knn`, and for an unknown ``flow``.
    """
    batch = _on_device_of(x, batch, "knn_graph")
    ptr, _ = _boundaries(x, x, batch, batch, batch_size)
    edges = knn_edges(x, x, k, ptr, ptr, cosine=cosine, skip_self=not loop)
    return directed(edges, flow, neighbors_first="source_to_target")


def radius(
    x: Float[Tensor, "n f"],
    y: Float[Tensor, "m f"],
    r: float,
    batch_x: Batch | None = None,
    batch_y: Batch | None = None,
    max_num_neighbors: int | None = 32,
    num_workers: int = 1,
    batch_size: int | None = None,
) -> Edges:
    """For each point of ``y`` the points of ``x`` that are nearer than ``r``.

    Parameters
    ----------
    x, y : (N, F) and (M, F) tensors
        As for :func:`knn`.
    r : float
        Radius; a point at exactly this distance is outside, as in the library.
    batch_x, batch_y : (N,) and (M,) int64 tensors, optional
        As for :func:`knn`.
    max_num_neighbors : int or None
        Of more than that, the nearest stay. The library keeps the first that it meets: those of the lowest
        index on a GPU, on the CPU what its tree visits first. None: all. With None or more than 64, all pairs
        nearer than ``r`` are listed first, and the memory is theirs.
    num_workers, batch_size
        As for :func:`knn`.

    Returns
    -------
    (2, E) int64 tensor
        Row 0: the point of ``y``, ascending; row 1: its neighbours of ``x``, ascending, as the library orders
        them on a GPU. The host waits for the device; :func:`pointproj.radius_neighbors` does not.

    Raises
    ------
    AssertionError, ValueError
        As for :func:`knn`.
    """
    ptr_x, ptr_y = _boundaries(x, y, batch_x, batch_y, batch_size)
    return radius_edges(x, y, r, ptr_x, ptr_y, max_num_neighbors=max_num_neighbors)


def radius_graph(
    x: Float[Tensor, "n f"],
    r: float,
    batch: Batch | None = None,
    loop: bool = False,
    max_num_neighbors: int | None = 32,
    flow: str = "source_to_target",
    num_workers: int = 1,
    batch_size: int | None = None,
) -> Edges:
    """Edges between each point and those nearer than ``r``.

    Parameters
    ----------
    x : (N, F) or (N,) tensor
        As for :func:`knn`.
    r : float
        As for :func:`radius`.
    batch : (N,) int64 tensor, optional
        As for :func:`knn`.
    loop : bool
        Whether a point counts as its own neighbour. If not, it takes no place among
        ``max_num_neighbors``.
    max_num_neighbors : int or None
        As for :func:`radius`.
    flow : {"source_to_target", "target_to_source"}
        As for :func:`knn_graph`.
    num_workers, batch_size
        As for :func:`knn`.

    Returns
    -------
    (2, E) int64 tensor
        Ordered as by :func:`radius`, with the rows that ``flow`` says.

    Raises
    ------
    AssertionError, ValueError
        As for :func:`knn_graph`.
    """
    batch = _on_device_of(x, batch, "radius_graph")
    ptr, _ = _boundaries(x, x, batch, batch, batch_size)
    edges = radius_edges(x, x, r, ptr, ptr, max_num_neighbors=max_num_neighbors, skip_self=not loop)
    return directed(edges, flow, neighbors_first="source_to_target")


def knn_interpolate(
    x: Float[Tensor, "n c"],
    pos_x: Float[Tensor, "n d"],
    pos_y: Float[Tensor, "m d"],
    batch_x: Batch | None = None,
    batch_y: Batch | None = None,
    k: int = 3,
    num_workers: int = 1,
) -> Float[Tensor, "m c"]:
    """Features at ``pos_y``: the mean of the k nearest, weighted by 1 / max(distance^2, 1e-16).

    Parameters
    ----------
    x : (N, C) float tensor
        Features.
    pos_x : (N, D) tensor
        Where they are, D = 1 to 3.
    pos_y : (M, D) tensor
        Where they are wanted.
    batch_x, batch_y : (N,) and (M,) int64 tensors, optional
        As for :func:`knn`. The number of clouds is read from them, for which the host waits for the device;
        without them nothing waits, and the call compiles as a whole.
    k : int
        As for :func:`knn`.
    num_workers : int
        Not read.

    Returns
    -------
    (M, C) float tensor
        Differentiable twice in ``x``, as in the library, and in both sets of positions, which get no gradient
        there: detach positions that shall get none. Points of ``y`` in a cloud without points of ``x`` get 0,
        not NaN.

    Raises
    ------
    AssertionError, ValueError
        As for :func:`knn`.
    """
    ptr_x, ptr_y = _boundaries(pos_x, pos_y, batch_x, batch_y, None)
    reference_points, query_points = coordinates("pos_x", pos_x), coordinates("pos_y", pos_y)
    return knn_aggregate(
        query_points,
        reference_points,
        x.to(torch.promote_types(x.dtype, reference_points.dtype)),
        min(k, len(pos_x)),
        kernel="inverse_distance",
        power=2.0,
        eps=1e-8,
        query_offsets=ptr_y,
        reference_offsets=ptr_x,
    )


def _boundaries(
    x: Tensor, y: Tensor, batch_x: Tensor | None, batch_y: Tensor | None, batch_size: int | None
) -> tuple[Tensor | None, Tensor | None]:
    """Offsets of the clouds, None if there is one."""
    for name, points, batch in (("x", x, batch_x), ("y", y, batch_y)):
        if batch is not None and batch.numel() != len(points):
            raise AssertionError(
                f"batch_{name} must name the cloud of each of the {len(points)} points; got {batch.numel()}"
            )
    batches = [batch for batch in (batch_x, batch_y) if batch is not None and batch.numel()]
    if batch_size is None:
        batch_size = max([1, *(int(batch.max()) + 1 for batch in batches)])
    if batch_size < 1:
        raise AssertionError(f"batch_size must be at least 1; got {batch_size}")
    if batch_size == 1:
        return None, None
    if batch_x is None or batch_y is None:
        missing = "batch_x" if batch_x is None else "batch_y"
        raise AssertionError(f"{batch_size} clouds need batch_x and batch_y; {missing} is missing")
    starts = torch.arange(batch_size + 1, device=x.device)
    return torch.searchsorted(batch_x.contiguous(), starts), torch.searchsorted(batch_y.contiguous(), starts)


def _on_device_of(x: Tensor, batch: Tensor | None, name: str) -> Tensor | None:
    if batch is None or batch.device == x.device:
        return batch
    warnings.warn(
        f"{name}: x is on {x.device} and batch on {batch.device}; it is copied, for which the host waits",
        stacklevel=3,
    )
    return batch.to(x.device)
