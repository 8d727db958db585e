"""Lists of the reference points within a radius of each query: padded, or one after the other (CSR)."""

from collections.abc import Sequence
from types import EllipsisType
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pointproj.ops import arguments
from pointproj.ops.clouds import Clouds, checked_clouds, dense_clouds, queries_of, rows_in_cloud
from pointproj.ops.distances import pair_distances, with_gradient
from pointproj.ops.index import Index, choose_backend
from pointproj.ops.periodic import PeriodicBox, periodic_box
from pointproj.ops.reference import nan_where_query_is_not_finite
from pointproj.ops.registry import Backend, Tables
from pointproj.ops.rounding import radius_in_range


class Neighbors(NamedTuple):
    """The nearest neighbours within a radius, at most K of each query, nearest first.

    Attributes
    ----------
    indices : (..., Q, K) int64 tensor
        Rows of the reference points (within the cloud for dense batches, of the packed tensor for ragged
        ones), -1 where there are fewer. Equal distances: the lower index first.
    distances : (..., Q, K) float tensor
        In the points' dtype; inf where there is no neighbour, NaN if the query is not finite.
    counts : (..., Q) int64 tensor
        All points within the radius: where that is more than K, some were left out.
    displacements : (..., Q, K, 3) float tensor or None
        Query point minus reference point, 0 where there is no neighbour.
    radius : float, (..., Q) float tensor or None
        That was searched within.
    """

    indices: Tensor
    distances: Tensor
    counts: Tensor | None = None
    displacements: Tensor | None = None
    radius: float | Tensor | None = None


class NeighborList(NamedTuple):
    """All neighbours within a radius, one query's after the other's, in ascending order of their indices.

    Queries count through the clouds of a batch.

    Attributes
    ----------
    row_splits : (Q + 1,) int64 tensor
        The neighbours of query i are at ``row_splits[i]:row_splits[i + 1]``.
    indices : (M,) int64 tensor
        Rows of the reference points, as in :class:`Neighbors`; -1 in slots that are not used, at the end.
    distances : (M,) float tensor
        In the points' dtype, inf in slots that are not used.
    total : () int64 tensor
        How many pairs there are: where that is more than M, the last ones were left out (in a periodic box,
        any of the last query that has room for some).
    displacements : (M, 3) float tensor or None
        Query point minus reference point, 0 in slots that are not used.
    radius : float, (..., Q) float tensor or None
        That was searched within.
    """

    row_splits: Tensor
    indices: Tensor
    distances: Tensor
    total: Tensor | None = None
    displacements: Tensor | None = None
    radius: float | Tensor | None = None

    @property
    def query_indices(self) -> Int[Tensor, " pairs"]:
        """The query of each pair, -1 in slots that are not used."""
        queries = queries_of(self.row_splits, len(self.indices))
        return torch.where(self.indices >= 0, queries, -1)


def radius_neighbors(
    query_points: Float[Tensor, "*batch q dims"],
    reference_points: Float[Tensor, "*batch n dims"],
    radius: float | Float[Tensor, "*batch q"],
    *,
    max_neighbors: int | None = None,
    capacity: int | EllipsisType | None = ...,
    displacements: bool = False,
    box: Sequence[float] | None = None,
    index: Index | None = None,
    backend: str = "auto",
    query_offsets: Int[Tensor, " clouds+1"] | None = None,
    reference_offsets: Int[Tensor, " clouds+1"] | None = None,
) -> Neighbors | NeighborList:
    """The reference points within ``radius`` of every query point, as lists.

    A pair belongs to the list if ``|p_i - q_j| <= radius``. One of ``max_neighbors`` and ``capacity`` says
    which form the lists have. Neither form is truncated in silence: both say how many pairs there are.

    Parameters
    ----------
    query_points, reference_points, backend, query_offsets, reference_offsets
        As for :func:`pointproj.knn`.
    radius : float, or (..., Q) float tensor
        Cut-off in the units of the points, one for all queries or one for each (in the points' dtype). It has
        no gradient.
    max_neighbors : int, optional
        Gives :class:`Neighbors`: the nearest ``max_neighbors`` of each query, padded.
    capacity : int or None, optional
        Gives :class:`NeighborList`: all neighbours of all queries, in so many slots. None: exactly as many
        as there are, for which the call waits for the device once, and cannot be compiled without a break or
        captured in a CUDA graph.
    displacements : bool
        Whether to return ``query - reference`` too.
    box : sequence of float, optional
        As for :func:`pointproj.knn`; the radius must be less than half of each length.
    index : Index, optional
        As for :func:`pointproj.knn`, best built with this radius.

    Returns
    -------
    Neighbors or NeighborList
        Distances and displacements are differentiable twice in both sets of points, with subgradient 0 at
        distance 0; the choice of neighbours is treated as constant. A point with a NaN or inf coordinate
        neither has neighbours nor is one.

    Raises
    ------
    TypeError, ValueError
        For arguments of wrong type, shape, dtype or device.
    BackendUnavailable
        If ``backend`` names one that cannot run here.
    """
    clouds = checked_clouds(query_points, reference_points, query_offsets, reference_offsets)
    arguments.check_radii(radius, query_points)
    arguments.check_list_form(max_neighbors, capacity)
    arguments.check_box(box, radius, reference_points, inside=index is not None)
    dims = query_points.shape[-1]
    search = _Search(clouds, radius, periodic_box(box), dims)
    largest = search.radius if index is None else search.largest()
    module, tables = choose_backend(backend, largest, index, reference_points, clouds)
    size = reference_points.shape[-2]
    if max_neighbors is not None:
        distances, rows, counts = search.padded(module, tables, int(max_neighbors))
        shape = *query_points.shape[:-1], int(max_neighbors)
        delta = search.displacements(rows).view(*shape, dims) if displacements else None
        rows = rows_in_cloud(rows.view(shape), size, dense_clouds(reference_points))
        return Neighbors(rows, distances.view(shape), counts.view(shape[:-1]), delta, radius)
    row_splits, rows, distances, total = search.listed(module, tables, capacity)
    delta = search.displacements(rows, row_splits) if displacements else None
    rows = rows_in_cloud(rows, size, dense_clouds(reference_points, row_splits, len(rows)))
    return NeighborList(row_splits, rows, distances, total, delta, radius)


def _selected(points: Tensor, rows: Tensor) -> Tensor:
    """The points of rows (...), as (..., 3)."""
    if not points.shape[0]:  # then no pair exists, and any point will do
        points = torch.nn.functional.pad(points, (0, 0, 0, 1))
    return points.index_select(0, rows.flatten()).view(*rows.shape, 3)


class _Search:
    """One search within a radius, in a box or in open space."""

    def __init__(
        self, clouds: Clouds, radius: float | Tensor, periodic: PeriodicBox | None, dims: int
    ) -> None:
        self.points = clouds
        self.dims = dims
        self.periodic = periodic
        self.clouds = clouds.detached() if periodic is None else periodic.clouds(clouds.detached())
        if isinstance(radius, Tensor):
            # Values on a GPU were not checked: those that are no radius find nothing, or all points.
            most = torch.finfo(radius.dtype).max
            radius = radius.detach().reshape(-1).nan_to_num(0.0, most, 0.0).clamp(min=0.0)
            self.radius = radius.repeat_interleave(periodic.images) if periodic else radius.contiguous()
        else:
            self.radius = radius_in_range(radius, clouds.query_points.dtype)

    def largest(self) -> float | Tensor:
        """The largest radius, for an index."""
        if not isinstance(self.radius, Tensor):
            return self.radius
        return self.radius.amax() if self.radius.shape[0] else self.radius.new_ones(())

    def padded(self, module: Backend, tables: Tables | None, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """Distances (Q, k), and rows (Q, k) and counts (Q,), both int64."""
        most = min(k, self.points.reference_points.shape[0])
        if most == 0:
            none = self.points.query_points.new_zeros(self.points.query_points.shape[0], dtype=torch.int64)
            rows = none[:, None].expand(-1, k) - 1
            return self._distances_of_some(rows), rows, none
        distances, rows, counts = module.radius_search(self.clouds, tables, self.radius, most)
        if self.periodic is not None:
            rows = self.periodic.merged(rows, self.clouds, k)
            counts = counts.view(-1, self.periodic.images).sum(1)
        missing = k - rows.shape[1]
        if missing:
            rows = torch.nn.functional.pad(rows, (0, missing), value=-1)
        if missing or self.periodic is not None:
            return self._distances_of_some(rows), rows, counts
        return with_gradient(distances, rows, self.points), rows, counts

    def listed(
        self, module: Backend, tables: Tables | None, capacity: int | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Row splits (Q + 1,) within the capacity, rows and distances (capacity,), and how many there are."""
        if capacity is None:
            if tables is None:
                points = self.clouds.reference_points, self.clouds.reference_offsets, self.clouds.count
                tables = module.build_index(*points, self.largest())
            row_splits, *_ = module.radius_list(self.clouds, tables, self.radius, 0)
            capacity = int(row_splits[-1])
        row_splits, rows, distances = module.radius_list(self.clouds, tables, self.radius, int(capacity))
        total = row_splits[-1]
        if self.periodic is None:
            row_splits = row_splits.clamp(max=capacity)
            return row_splits, rows, with_gradient(distances, rows, self.points, row_splits), total
        references = self.points.reference_points.shape[0]
        row_splits, rows = self.periodic.merged_list(row_splits, rows, references)
        row_splits = row_splits.clamp(max=capacity)
        return row_splits, rows, pair_distances(self._delta(rows, row_splits), rows >= 0), total

    def displacements(self, rows: Tensor, row_splits: Tensor | None = None) -> Tensor:
        """Differences of pairs in as many dimensions as the points have, 0 where there is no pair."""
        return torch.where(rows[..., None] >= 0, self._delta(rows, row_splits), 0.0)[..., : self.dims]

    def _distances_of_some(self, rows: Tensor) -> Tensor:
        """Distances of what a search of these points, as they are, has not found."""
        distances = pair_distances(self._delta(rows), rows >= 0)
        return nan_where_query_is_not_finite(distances, self.points.query_points)

    def _delta(self, rows: Tensor, row_splits: Tensor | None = None) -> Tensor:
        """Differences of pairs, of any two points where there is none; without splits rows are (Q, k)."""
        if row_splits is None:
            query_points = self.points.query_points[:, None]
        else:
            query_points = _selected(self.points.query_points, queries_of(row_splits, len(rows)))
        delta = query_points - _selected(self.points.reference_points, rows.clamp(min=0))
        return delta if self.periodic is None else self.periodic.minimum_image(delta)
