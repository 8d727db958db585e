"""Neighbours as lists of edges, which PyTorch Geometric, torch-cluster and pyg-lib share.

An edge list is as long as there are pairs, so each of these functions waits for the device once. For fixed
shapes, which compile and are captured, call :func:`pointproj.knn` or :func:`pointproj.radius_neighbors`.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from pointproj.compat.pairs import boundary, coordinates, pairs_within, squared_lengths
from pointproj.ops.functional import knn
from pointproj.ops.neighbor_lists import radius_neighbors

FLOWS = ("source_to_target", "target_to_source")

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
    count = min(k + skip_self, len(reference_points))
    offsets = {"query_offsets": ptr_y, "reference_offsets": ptr_x}
    _, rows = knn(query_points, reference_points, count, **offsets)
    return _listed(rows, _kept(rows, rows >= 0, k, skip_self))


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
    offsets = {"query_offsets": ptr_y, "reference_offsets": ptr_x}
    if max_num_neighbors is None:
        queries, indices, _ = pairs_within(query_points, reference_points, r, inclusive=False, **offsets)
        edges = torch.stack([queries, indices])
        return edges[:, queries != indices] if skip_self else edges
    count = min(max_num_neighbors + skip_self, len(reference_points))
    reach, squared_radius = boundary(r, query_points)
    found = radius_neighbors(
        query_points, reference_points, reach, max_neighbors=count, displacements=True, **offsets
    )
    nearer = (found.indices >= 0) & (squared_lengths(found.displacements) < squared_radius)
    kept = _kept(found.indices, nearer, max_num_neighbors, skip_self)
    rows = found.indices.masked_fill(~kept, len(reference_points)).sort(dim=1).values
    return _listed(rows, rows < len(reference_points))


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


def _kept(rows: Tensor, found: Bool[Tensor, "q k"], k: int, skip_self: bool) -> Bool[Tensor, "q k"]:
    """At most k, without the own point, which many coincident points may have left out already."""
    if not skip_self:
        return found
    others = found & (rows != torch.arange(len(rows), device=rows.device)[:, None])
    return others & (others.cumsum(1) <= k)


def _listed(rows: Int[Tensor, "q k"], kept: Bool[Tensor, "q k"]) -> Edges:
    slots = kept.flatten().nonzero()[:, 0]
    return torch.stack([slots // rows.shape[1], rows.flatten()[slots]])


def _no_edges(x: Tensor) -> Edges:
    return torch.empty(2, 0, dtype=torch.int64, device=x.device)
