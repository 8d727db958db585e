"""Neighbours as lists of edges, which PyTorch Geometric, torch-cluster and pyg-lib share.

An edge list is as long as there are pairs, so these functions wait for the device. For fixed shapes, which
can be captured, call :func:`pointproj.knn` or :func:`pointproj.radius_neighbors`.
"""

import warnings

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from pointproj.compat.pairs import (
    boundary,
    by_distance,
    coordinates,
    nearest,
    of_pairs,
    others,
    pairs_within,
    random_rows,
    ranks,
)
from pointproj.ops.arguments import check_size
from pointproj.ops.farthest_points import farthest_points
from pointproj.ops.neighbor_lists import radius_neighbors
from pointproj.ops.specification.reference import squared_lengths

MOST_PADDED = 64  # neighbours; larger limits are seldom used up, so most padded slots would be empty

Points = Float[Tensor, "n f"]
Edges = Int[Tensor, "2 edges"]


def knn_edges(
    x: Points,
    y: Points,
    k: int,
    ptr_x: Int[Tensor, " clouds+1"] | None = None,
    ptr_y: Int[Tensor, " clouds+1"] | None = None,
    *,
    cosine: bool = False,
    skip_self: bool = False,
) -> Edges:
    """Row 0: queries ``y``; row 1: for each the k nearest of ``x``, as :func:`knn_rows` has them.

    ``cosine`` takes the nearest by the angle between the vectors; a vector of length 0 has no neighbours.
    ``skip_self`` leaves out the row of the query's number.
    """
    rows = knn_rows(x, y, k, ptr_x, ptr_y, cosine=cosine, skip_self=skip_self)
    return _listed(rows, rows >= 0)


def knn_rows(
    x: Points,
    y: Points,
    k: int,
    ptr_x: Int[Tensor, " clouds+1"] | None = None,
    ptr_y: Int[Tensor, " clouds+1"] | None = None,
    *,
    cosine: bool = False,
    skip_self: bool = False,
) -> Int[Tensor, "queries k"]:
    """For each of the queries ``y`` the k nearest of ``x``, nearest first, ties by the lower index.

    In a cloud with fewer than k points all are neighbours, and -1 fills the row.
    """
    check_size("the number of neighbours k", k, least=1)
    if x.numel() == 0 or y.numel() == 0:
        return torch.empty(len(y), 0, dtype=torch.int64, device=x.device)
    reference_points, query_points = _points(x, y)
    if cosine:  # the chord between unit vectors grows with the angle
        # 0 / 0 is NaN, which is nobody's neighbour.
        reference_points, query_points = (
            p / p.norm(dim=-1, keepdim=True) for p in (reference_points, query_points)
        )
    offsets = {"query_offsets": ptr_y, "reference_offsets": ptr_x}
    rows = nearest(query_points, reference_points, min(k + skip_self, len(x)), **offsets)[1]
    return rows.gather(1, others(rows)) if skip_self else rows


def radius_edges(
    x: Points,
    y: Points,
    r: float,
    ptr_x: Int[Tensor, " clouds+1"] | None = None,
    ptr_y: Int[Tensor, " clouds+1"] | None = None,
    *,
    max_num_neighbors: int | None = 32,
    skip_self: bool = False,
) -> Edges:
    """Row 0: queries ``y``; row 1: points of ``x`` nearer than ``r``, by ascending index.

    If there are more than ``max_num_neighbors``, only the nearest are taken; None takes all.
    """
    if max_num_neighbors is not None:
        check_size("max_num_neighbors", max_num_neighbors, least=1)
    if x.numel() == 0 or y.numel() == 0:
        return torch.empty(2, 0, dtype=torch.int64, device=x.device)
    reference_points, query_points = _points(x, y)
    offsets = {"query_offsets": ptr_y, "reference_offsets": ptr_x}
    most = len(x) if max_num_neighbors is None else max_num_neighbors
    if most <= MOST_PADDED and query_points.shape[1] <= 3:
        search_radius, squared_radius = boundary(r, query_points)
        slots = most + skip_self
        rows = radius_neighbors(
            query_points, reference_points, search_radius, max_neighbors=slots, **offsets
        ).indices
        rows = rows.gather(1, others(rows)) if skip_self else rows
        rows = torch.where(rows >= 0, rows, len(x)).sort(dim=1).values
        edges = _listed(rows, rows < len(x))
        squared = squared_lengths(
            query_points.index_select(0, edges[0]) - reference_points.index_select(0, edges[1])
        )
        return edges.index_select(1, (squared < of_pairs(squared_radius, edges[0])).nonzero()[:, 0])
    queries, indices, squared = pairs_within(query_points, reference_points, r, inclusive=False, **offsets)
    edges = torch.stack([queries, indices])
    if skip_self:
        apart = (queries != indices).nonzero()[:, 0]
        edges, squared = edges.index_select(1, apart), squared[apart]
    if max_num_neighbors is None:
        return edges
    fits = ranks(edges[0]) < most
    if bool(fits.all()):
        return edges
    return edges.index_select(1, by_distance(edges[0], squared)[fits].sort().values)


def nearest_rows(
    x: Points,
    y: Points,
    ptr_x: Int[Tensor, " clouds+1"] | None = None,
    ptr_y: Int[Tensor, " clouds+1"] | None = None,
) -> Int[Tensor, " n"]:
    """For each point of ``x`` the nearest of ``y``; -1 where there is none.

    With up to 3 coordinates nothing waits for the device.
    """
    query_points, reference_points = _points(x, y)
    found = nearest(query_points, reference_points, 1, query_offsets=ptr_x, reference_offsets=ptr_y)
    return found[1][:, 0]


def sampled_rows(
    src: Float[Tensor, "*points f"],
    ptr: Int[Tensor, " clouds+1"] | None,
    ratio: float | Tensor,
    random_start: bool,
) -> Int[Tensor, " chosen"]:
    """Rows of ceil(ratio * n) farthest points of each cloud; ``ratio`` may have a number for each cloud."""
    (points,) = coordinates(src=src.detach().flatten(1) if src.ndim > 1 else src.detach()[:, None])
    sizes = torch.tensor([len(src)], device=src.device) if ptr is None else ptr.diff()
    counts = (sizes.float() * ratio).ceil().long().tolist()
    start = random_rows(sizes) if random_start else 0
    return farthest_points(points, counts[0] if ptr is None else counts, start=start, offsets=ptr)


def directed(edges: Tensor, flow: str, neighbors_first: str) -> Tensor:
    """Edges in the direction ``flow``; in ``neighbors_first`` row 0 has the neighbours. Scriptable."""
    if flow != "source_to_target" and flow != "target_to_source":
        raise AssertionError(f"flow must be 'source_to_target' or 'target_to_source'; got '{flow}'")
    return edges.flip(0) if flow == neighbors_first else edges


def boundaries(
    x: Tensor, y: Tensor, batch_x: Tensor | None, batch_y: Tensor | None, batch_size: int | None
) -> tuple[Tensor | None, Tensor | None]:
    """Offsets of the clouds of x and of y, None if there is only one cloud."""
    names, batches = ("batch", "batch") if batch_x is batch_y else ("batch_x", "batch_y"), []
    for name, points, batch in zip(names, (x, y), (batch_x, batch_y), strict=True):
        if batch is not None and batch.device != x.device:
            where = f"x is on {x.device} and its batch vector on {batch.device}"
            warnings.warn(f"{where}: copied, so the host waits for the device", stacklevel=2)
            batch = batch.to(x.device)
        if batch is not None and batch.numel() != len(points):
            raise AssertionError(
                f"{name} must name the cloud of each of the {len(points)} points; got {batch.numel()}"
            )
        batches.append(batch)
    if batch_size is None:
        batch_size = max([1, *(int(b.max()) + 1 for b in batches if b is not None and b.numel())])
    if batch_size < 1:
        raise AssertionError(f"batch_size must be at least 1; got {batch_size}")
    if batch_size == 1 or (batch_x is None and batch_y is None):
        return None, None
    if batch_x is None or batch_y is None:
        missing = "batch_x" if batch_x is None else "batch_y"
        raise AssertionError(f"{batch_size} clouds need batch_x and batch_y; {missing} is missing")
    starts = torch.arange(batch_size + 1, device=x.device)
    return tuple(torch.searchsorted(batch.contiguous(), starts) for batch in batches)


@torch.library.custom_op("pointproj::batched_knn", mutates_args=())
def _batched_knn(
    x: Tensor,
    y: Tensor,
    k: int,
    batch_x: Tensor | None,
    batch_y: Tensor | None,
    cosine: bool,
    batch_size: int | None,
    skip_self: bool,
) -> Tensor:
    ptr_x, ptr_y = boundaries(x, y, batch_x, batch_y, batch_size)
    return knn_edges(x, y, k, ptr_x, ptr_y, cosine=cosine, skip_self=skip_self)


@torch.library.custom_op("pointproj::batched_radius", mutates_args=())
def _batched_radius(
    x: Tensor,
    y: Tensor,
    r: float,
    open_r: Tensor | None,
    batch_x: Tensor | None,
    batch_y: Tensor | None,
    max_num_neighbors: int | None,
    batch_size: int | None,
    skip_self: bool,
) -> Tensor:
    r = r if open_r is None else open_r.item()
    ptr_x, ptr_y = boundaries(x, y, batch_x, batch_y, batch_size)
    return radius_edges(x, y, r, ptr_x, ptr_y, max_num_neighbors=max_num_neighbors, skip_self=skip_self)


@torch.library.custom_op("pointproj::batched_fps", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def _batched_fps(
    src: Tensor,
    batch: Tensor | None,
    ratio: float,
    ratios: Tensor | None,
    random_start: bool,
    batch_size: int | None,
    ptr: Tensor | None,
) -> Tensor:
    if ptr is None:
        ptr = boundaries(src, src, batch, batch, batch_size)[0]
    return sampled_rows(src, ptr, ratio if ratios is None else ratios, random_start)


@_batched_fps.register_fake
def _rows_of_unknown_number(src: Tensor, *others: object) -> Tensor:
    return src.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.int64)


@_batched_knn.register_fake
@_batched_radius.register_fake
def _edges_of_unknown_number(x: Tensor, *others: object) -> Tensor:
    return x.new_empty(2, torch.library.get_ctx().new_dynamic_size(), dtype=torch.int64)


def _points(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    x, y = (
        points[:, None] if isinstance(points, Tensor) and points.ndim == 1 else points for points in (x, y)
    )
    x, y = coordinates(x=x, y=y)
    for name, points in (("x", x), ("y", y)):
        if points.ndim != 2:
            raise ValueError(f"{name} must have shape (points, coordinates); got {tuple(points.shape)}")
    return x.detach(), y.detach()


def _listed(rows: Int[Tensor, "q k"], exists: Bool[Tensor, "q k"]) -> Edges:
    slots = exists.flatten().nonzero()[:, 0]
    return torch.stack([slots // rows.shape[1], rows.flatten().index_select(0, slots).long()])
