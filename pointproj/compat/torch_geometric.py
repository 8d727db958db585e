"""Searches and interpolation of PyTorch Geometric: ``torch_geometric.nn`` by its names and signatures.

Written against torch-geometric 2.8, whose own searches need pyg-lib. :mod:`pointproj.compat.torch_cluster`
has the same functions by the name of torch-cluster. Neither needs any of these libraries.

Arguments mean the same in all functions, and what the library's documentation says. In addition:

- ``x``, ``y``: (N, F) and (M, F) tensors of any real dtype, or (N,) and (M,). With more than 3 coordinates,
  all pairs are compared, in chunks.
- ``batch``, ``batch_x``, ``batch_y``: (N,) and (M,) int64 tensors, the cloud of each point, ascending.
- ``batch_size``: the number of clouds. None: read from the batch vectors, for which the host waits for the
  device.
- ``k``: any number; the library has a limit of 100 on a GPU.
- ``r``: a point at exactly this distance is outside, as in the library.
- ``max_num_neighbors``: if there are more, the nearest are taken. The library takes the first that it finds:
on
  a GPU those of the lowest index, on the CPU those that its tree visits first. None: all. With None or more
  than 64, all pairs nearer than ``r`` are listed first, and memory grows with their number.
- ``loop``: whether a point is its own neighbour. If not, it does not count in ``k`` or ``max_num_neighbors``.
  The same holds for points that coincide, where torch-cluster may return k + 1.
- ``flow``: whether the neighbours are in row 0 ("source_to_target") or in row 1 ("target_to_source").
- ``cosine``: take the nearest by the angle between vectors; on the CPU too, where the library cannot.
- ``num_workers``: not read.

Searches return edges, a (2, E) int64 tensor. E depends on the data, so the host waits for the device;
:func:`pointproj.knn` and :func:`pointproj.radius_neighbors` do not. A cloud of fewer than k points gives
fewer edges; a point with a NaN or inf coordinate has none. AssertionError is raised for batch vectors of a
wrong length, for one without the other, and for an unknown ``flow``; TypeError or ValueError for points that
do not fit together, and for k below 1.

Each search is one operator of torch, so it can be compiled and scripted; for ``torch.jit.script`` its
annotations have no shapes.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pointproj.compat.edges import boundaries, directed, knn_edges, nearest_rows, radius_edges, sampled_rows
from pointproj.compat.pairs import coordinates
from pointproj.compat.pairs import nearest as nearest_points
from pointproj.ops.functional import knn_aggregate
from pointproj.ops.list_sums import aggregate
from pointproj.ops.neighbor_lists import Neighbors
from pointproj.ops.torch_internals import in_tensor_if_open

__all__ = ["fps", "install", "knn", "knn_graph", "knn_interpolate", "nearest", "radius", "radius_graph"]

Batch = Int[Tensor, " n"]
NEAREST = 1e-8  # smaller distances count as this one
OPERATORS = {  # of pyg-lib, as PyTorch Geometric calls them
    "knn": "Tensor x, Tensor y, Tensor? ptr_x, Tensor? ptr_y, int k, bool cosine, int num_workers",
    "radius": "Tensor x, Tensor y, Tensor? ptr_x, Tensor? ptr_y, float r, int? max_num_neighbors, "
    "int num_workers, bool ignore_same_index",
    "nearest": "Tensor x, Tensor y, Tensor? ptr_x, Tensor? ptr_y",
    "fps": "Tensor src, Tensor ptr, float ratio, bool random_start",
}

_libraries: list[torch.library.Library] = []  # keep what is registered alive


def knn(
    x: Tensor,
    y: Tensor,
    k: int,
    batch_x: Tensor | None = None,
    batch_y: Tensor | None = None,
    cosine: bool = False,
    num_workers: int = 1,
    batch_size: int | None = None,
) -> Tensor:
    """For each point of ``y`` (row 0) the k nearest of ``x`` (row 1): nearest first, ties by lower index."""
    return torch.ops.pointproj.batched_knn(x, y, k, batch_x, batch_y, cosine, batch_size, False)


def knn_graph(
    x: Tensor,
    k: int,
    batch: Tensor | None = None,
    loop: bool = False,
    flow: str = "source_to_target",
    cosine: bool = False,
    num_workers: int = 1,
    batch_size: int | None = None,
) -> Tensor:
    """Edges between each point and its k nearest, nearest first."""
    edges = torch.ops.pointproj.batched_knn(x, x, k, batch, batch, cosine, batch_size, not loop)
    return directed(edges, flow, "source_to_target")


def radius(
    x: Tensor,
    y: Tensor,
    r: float,
    batch_x: Tensor | None = None,
    batch_y: Tensor | None = None,
    max_num_neighbors: int | None = 32,
    num_workers: int = 1,
    batch_size: int | None = None,
) -> Tensor:
    """For each point of ``y`` (row 0) the points of ``x`` nearer than ``r`` (row 1), both rows ascending.

    This is the library's order on a GPU.
    """
    return _radius(x, y, r, batch_x, batch_y, max_num_neighbors, batch_size, False)


def radius_graph(
    x: Tensor,
    r: float,
    batch: Tensor | None = None,
    loop: bool = False,
    max_num_neighbors: int | None = 32,
    flow: str = "source_to_target",
    num_workers: int = 1,
    batch_size: int | None = None,
) -> Tensor:
    """Edges between each point and those nearer than ``r``, ordered as by :func:`radius`."""
    edges = _radius(x, x, r, batch, batch, max_num_neighbors, batch_size, not loop)
    return directed(edges, flow, "source_to_target")


def _radius(
    x: Tensor,
    y: Tensor,
    r: float,
    batch_x: Tensor | None,
    batch_y: Tensor | None,
    most: int | None,
    batch_size: int | None,
    skip_self: bool,
) -> Tensor:
    open_r = torch.jit.annotate(Tensor | None, None)
    if not torch.jit.is_scripting():
        r, open_r = in_tensor_if_open(r)
    return torch.ops.pointproj.batched_radius(x, y, r, open_r, batch_x, batch_y, most, batch_size, skip_self)


def nearest(
    x: Float[Tensor, "n f"],
    y: Float[Tensor, "m f"],
    batch_x: Batch | None = None,
    batch_y: Batch | None = None,
) -> Int[Tensor, " n"]:
    """For each point of ``x`` the nearest point of ``y``: the other way round than :func:`knn`.

    A missing batch vector says that all points are of cloud 0. ValueError for batch vectors that do not
    ascend, and for those that do not name the same clouds.

    Returns
    -------
    (N,) int64 tensor
        Rows of ``y``; -1 for a point that is not finite, or if no point of ``y`` is.
    """
    if batch_x is None and batch_y is None:
        return nearest_rows(x, y)
    batches = [
        points.new_zeros(len(points), dtype=torch.int64) if batch is None else batch
        for points, batch in ((x, batch_x), (y, batch_y))
    ]
    for name, batch in zip(("batch_x", "batch_y"), batches, strict=True):
        if bool((batch.diff() < 0).any()):
            raise ValueError(f"{name} must be in ascending order")
    if not torch.equal(*(batch.unique_consecutive() for batch in batches)):
        raise ValueError("batch_x and batch_y must name the same clouds")
    ptr_x, ptr_y = boundaries(x, y, *batches, None)
    return nearest_rows(x, y, ptr_x, ptr_y)


def knn_interpolate(
    x: Float[Tensor, "n c"],
    pos_x: Float[Tensor, "n d"],
    pos_y: Float[Tensor, "m d"],
    batch_x: Tensor | None = None,
    batch_y: Tensor | None = None,
    k: int = 3,
    num_workers: int = 1,
) -> Float[Tensor, "m c"]:
    """Features at ``pos_y``: the mean of the k nearest, weighted by 1 / max(distance^2, 1e-16).

    Without batch vectors nothing waits for the device, and the call compiles as a whole.

    Parameters
    ----------
    x : (N, C) float tensor
        Features.
    pos_x, pos_y : (N, D) and (M, D) tensors
        Where they are, and where they are wanted.

    Returns
    -------
    (M, C) float tensor
        Differentiable twice in ``x``, and in both sets of positions, which have no gradient in the library:
        detach them for the same training. Where a cloud has no points of ``x``, values are 0, not NaN.
    """
    ptr_x, ptr_y = boundaries(pos_x, pos_y, batch_x, batch_y, None)
    reference_points, query_points = coordinates(pos_x=pos_x, pos_y=pos_y)
    features = x.to(torch.promote_types(x.dtype, reference_points.dtype))
    offsets = {"query_offsets": ptr_y, "reference_offsets": ptr_x}
    kernel = {"kernel": "inverse_distance", "power": 2.0, "eps": NEAREST}
    k = min(k, len(pos_x))
    if k == 0 or pos_x.shape[-1] > 3:
        distances, rows = nearest_points(query_points, reference_points, k, **offsets)
        values = aggregate(features, Neighbors(rows, distances), **kernel)
    else:
        values = knn_aggregate(query_points, reference_points, features, k, **kernel, **offsets)
    narrow = pos_x.is_floating_point() and torch.promote_types(x.dtype, pos_x.dtype)
    return values.to(narrow) if narrow else values


def fps(
    x: Tensor,
    batch: Tensor | None = None,
    ratio: float = 0.5,
    random_start: bool = True,
    batch_size: int | None = None,
) -> Tensor:
    """Choose points evenly over each cloud: always the one farthest from all chosen before.

    ``random_start`` begins with a random point of each cloud, by torch's generator, instead of its first.
    With more than 3 coordinates each point is compared with every chosen one.

    Returns
    -------
    (sum of ceil(ratio * n),) int64 tensor
        Rows of ``x``, cloud after cloud, in the order in which they were chosen; of equally far points the
        lower row. The host waits for the device; :func:`pointproj.farthest_points` does not.
    """
    return torch.ops.pointproj.batched_fps(x, batch, ratio, None, random_start, batch_size, None)


def install() -> None:
    """Let PyTorch Geometric search with these functions, also in its layers; a second call changes nothing.

    Its searches, and layers such as ``DynamicEdgeConv``, ``XConv`` and ``GravNetConv``, call operators of
    pyg-lib. Missing ones are registered by the same names: ``torch.ops.pyg.knn``, ``radius``, ``nearest`` and
    ``fps``. This cannot be undone within a process.

    Raises
    ------
    ImportError
        If the library is not installed.
    """
    from torch_geometric import typing

    functions = {
        "knn": lambda x, y, ptr_x, ptr_y, k, cosine, _: knn_edges(x, y, k, ptr_x, ptr_y, cosine=cosine),
        "radius": lambda x, y, ptr_x, ptr_y, r, most, _, skip_self: radius_edges(
            x, y, r, ptr_x, ptr_y, max_num_neighbors=most, skip_self=skip_self
        ),
        "nearest": nearest_rows,
        "fps": sampled_rows,
    }
    library = torch.library.Library("pyg", "FRAGMENT")
    for name, arguments in OPERATORS.items():
        if not hasattr(torch.ops.pyg, name):
            library.define(f"{name}({arguments}) -> Tensor")
            library.impl(name, functions[name], "CompositeExplicitAutograd")
        setattr(typing, f"WITH_{name.upper()}", True)
    _libraries.append(library)
