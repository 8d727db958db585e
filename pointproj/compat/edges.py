"""Neighbours as lists of edges, which PyTorch Geometric, torch-cluster and pyg-lib share.

An edge list is as long as there are pairs, so each of these functions waits for the device. For fixed shapes,
which compile and are captured, call :func:`pointproj.knn` or :func:`pointproj.radius_neighbors`.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from pointproj.compat.pairs import boundary, coordinates, pairs_within, squared_lengths
from pointproj.ops.arguments import check_size
from pointproj.ops.clouds import checked_clouds
from pointproj.ops.index import choose_backend

FLOWS = ("source_to_target", "target_to_source")
MOST_PADDED = 64  # neighbours; who allows more seldom has so many, and slots for them would be mostly empty

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
    """Row 0: queries ``y``; row 1: for each the k nearest of ``x``, nearest first, ties by the lower index.

    A cloud with fewer than k points gives as many edges as it has points. ``cosine``: nearest by the angle
    between the vectors; a vector of length 0 has no neighbours. ``skip_self``: not the row of the same
    number.
    """
    if x.numel() == 0 or y.numel() == 0:
        return _no_edges(x)
    reference_points, query_points = _points("x", x), _points("y", y)
    if cosine:  # the chord between unit vectors grows with the angle
        reference_points, query_points = _directions(reference_points), _directions(query_points)
    rows = _nearest(query_points, reference_points, k + skip_self, ptr_y, ptr_x)
    return _listed(rows, _kept(rows, k, skip_self))


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

    Of more than ``max_num_neighbors`` the nearest stay; None: all of them.
    """
    if x.numel() == 0 or y.numel() == 0:
        return _no_edges(x)
    reference_points, query_points = _points("x", x), _points("y", y)
    if max_num_neighbors is None or max_num_neighbors > MOST_PADDED:
        offsets = {"query_offsets": ptr_y, "reference_offsets": ptr_x}
        queries, indices, squared = pairs_within(
            query_points, reference_points, r, inclusive=False, **offsets
        )
        edges = torch.stack([queries, indices])
        if skip_self:
            others = (queries != indices).nonzero()[:, 0]
            edges, squared = edges.index_select(1, others), squared[others]
        return edges if max_num_neighbors is None else _nearest_of_each(edges, squared, max_num_neighbors)
    reach, squared_radius = boundary(r, query_points)
    rows = _nearest(query_points, reference_points, max_num_neighbors + skip_self, ptr_y, ptr_x, reach)
    beyond_all = len(reference_points)
    rows = rows.masked_fill(~_kept(rows, max_num_neighbors, skip_self), beyond_all).sort(dim=1).values
    edges = _listed(rows, rows < beyond_all)
    queries, indices = edges
    displacements = query_points.index_select(0, queries) - reference_points.index_select(0, indices)
    inside = squared_lengths(displacements) < squared_radius
    return edges.index_select(1, inside.nonzero()[:, 0])


def directed(edges: Edges, flow: str, neighbors_first: str) -> Edges:
    """Edges as ``flow`` asks for; ``neighbors_first`` is the flow that has the neighbours in row 0."""
    if flow not in FLOWS:
        raise AssertionError(f"flow must be 'source_to_target' or 'target_to_source'; got {flow!r}")
    return edges.flip(0) if flow == neighbors_first else edges


def _points(name: str, points: Tensor) -> Tensor:
    points = points.detach()
    if points.ndim == 1:
        points = points[:, None]
    if points.ndim != 2:
        raise ValueError(f"{name} must have shape (points, coordinates); got {tuple(points.shape)}")
    return coordinates(name, points).contiguous()


def _directions(points: Tensor) -> Tensor:
    return points / points.norm(dim=-1, keepdim=True)  # 0 / 0 is NaN, which is nobody's neighbour


def _nearest(
    query_points: Tensor,
    reference_points: Tensor,
    k: int,
    query_offsets: Tensor | None,
    reference_offsets: Tensor | None,
    radius: float | None = None,
) -> Int[Tensor, "q k"]:
    """Rows of the k nearest, nearest first, -1 where there are fewer; the distances are never needed."""
    clouds = checked_clouds(query_points, reference_points, query_offsets, reference_offsets)
    check_size("the number of neighbours", k, least=1)
    k = min(k, len(reference_points))
    module, _ = choose_backend("auto", radius, None, reference_points, clouds)
    if radius is None:
        return module.search(clouds, None, k)
    return module.radius_search(clouds, None, radius, k)[1]


def _kept(rows: Int[Tensor, "q k"], k: int, skip_self: bool) -> Bool[Tensor, "q k"]:
    """At most k, without the own point, which many coincident points may have left out already."""
    found = rows >= 0
    if not skip_self:
        return found
    others = found & (rows != torch.arange(len(rows), device=rows.device)[:, None])
    return others & (others.cumsum(1) <= k)


def _nearest_of_each(edges: Edges, squared: Float[Tensor, " edges"], k: int) -> Edges:
    """The nearest k edges of each query, ties by the lower index, in the order that they had."""
    numbers = torch.arange(edges.shape[1], device=edges.device)
    rank = numbers - torch.searchsorted(edges[0].contiguous(), edges[0])
    if not bool((rank >= k).any()):
        return edges
    by_distance = squared.argsort(stable=True)
    order = by_distance[edges[0, by_distance].argsort(stable=True)]  # by query, then by distance
    kept = torch.empty_like(order, dtype=torch.bool).scatter(0, order, rank < k)
    return edges.index_select(1, kept.nonzero()[:, 0])


def _listed(rows: Int[Tensor, "q k"], kept: Bool[Tensor, "q k"]) -> Edges:
    slots = kept.flatten().nonzero()[:, 0]
    return torch.stack([slots // rows.shape[1], rows.flatten().index_select(0, slots).long()])


def _no_edges(x: Tensor) -> Edges:
    return torch.empty(2, 0, dtype=torch.int64, device=x.device)
