"""Lists of the reference points within a radius of each query: padded, or one after the other (CSR)."""

import math
from collections.abc import Sequence
from types import EllipsisType
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pointproj import notebook
from pointproj.ops import arguments
from pointproj.ops.backends.torch.distances import with_gradient
from pointproj.ops.calls import checked_clouds, choose_backend, periodic_box
from pointproj.ops.index import Index
from pointproj.ops.specification.clouds import as_dtype, queries_of, rows_in_cloud, rows_in_packed
from pointproj.ops.specification.distances import differences, distances_of
from pointproj.ops.torch_internals import filled


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
        Points within the radius; K + 1 where there are more than K, so that some were left out.
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

    def _repr_html_(self) -> str:
        """A table for notebooks; on a GPU it waits for the values."""
        counts = (self.indices >= 0).sum(-1)
        places = {"places": self.indices.shape[-1]}
        return _shown("Neighbors", self, counts, places | {"cut off": self._cut_off()})

    def _cut_off(self) -> int | None:
        return None if self.counts is None else int((self.counts > self.indices.shape[-1]).sum())


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

    def _repr_html_(self) -> str:
        """A table for notebooks; on a GPU it waits for the values."""
        facts = {"slots": len(self.indices), "pairs": None if self.total is None else int(self.total)}
        return _shown("NeighborList", self, self.row_splits.diff(), facts)


def _shown(
    title: str, neighbors: "Neighbors | NeighborList", counts: Tensor, facts: dict[str, int | None]
) -> str:
    """The table of a list, of whose queries each has so many neighbours."""
    if counts.numel():
        facts |= {"fewest, most neighbours": f"{int(counts.min())}, {int(counts.max())}"}
        facts |= {"mean neighbours": float(counts.double().mean())}
    near = neighbors.distances[neighbors.indices >= 0].detach()
    if near.numel():
        facts |= {"largest distance": float(near.max())}
    where = f"{neighbors.distances.dtype}, {neighbors.distances.device}"
    return notebook.table(title, {"queries": counts.numel(), **facts, "distances": where})


def radius_neighbors(
    query_points: Float[Tensor, "*batch q dims"],
    reference_points: Float[Tensor, "*batch n dims"],
    radius: float | Float[Tensor, "*batch q"] | Sequence[float],
    *,
    max_neighbors: int | Sequence[int] | None = None,
    capacity: int | EllipsisType | None = ...,
    displacements: bool = False,
    box: Sequence[float] | None = None,
    index: Index | None = None,
    backend: str = "auto",
    query_offsets: Int[Tensor, " clouds+1"] | None = None,
    reference_offsets: Int[Tensor, " clouds+1"] | None = None,
) -> Neighbors | NeighborList | tuple[Neighbors, ...]:
    """The reference points within ``radius`` of every query point, as lists.

    A pair belongs to the list if ``|p_i - q_j| <= radius``. One of ``max_neighbors`` and ``capacity`` says
    which form the lists have. Neither form is truncated in silence: ``counts`` and ``total`` tell.

    Parameters
    ----------
    query_points, reference_points, backend, query_offsets, reference_offsets
        As for :func:`pointproj.knn`.
    radius : float, or (..., Q) float tensor
        Cut-off in the units of the points, one for all queries or one for each (in the points' dtype). It has
        no gradient. A tuple of numbers: several scales at once.
    max_neighbors : int, optional
        Gives :class:`Neighbors`: the nearest ``max_neighbors`` of each query, padded. With several scales, a
        tuple: one number for each.
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
    Neighbors or NeighborList, or a tuple of one Neighbors for each scale
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
    if isinstance(radius, tuple | list) or isinstance(max_neighbors, tuple | list):
        options = {"displacements": displacements, "box": box, "index": index, "backend": backend}
        options |= {"query_offsets": query_offsets, "reference_offsets": reference_offsets}
        arguments.check_points(query_points, reference_points)
        radius = arguments.checked_scales(radius, max_neighbors, capacity, query_points.dtype)
        return _scales(query_points, reference_points, radius, max_neighbors, options)
    clouds = checked_clouds(query_points, reference_points, query_offsets, reference_offsets)
    radii = arguments.checked_radii(radius, query_points)
    arguments.check_list_form(max_neighbors, capacity)
    periodic = periodic_box(box, radius, reference_points, inside=index is not None)
    module, tables = choose_backend(backend, radius, index, reference_points, clouds, "lists")
    points = clouds.detached()
    searched = points if periodic is None else periodic.clouds(points)
    if periodic is not None and isinstance(radii, Tensor):
        radii = radii.repeat_interleave(periodic.images)
    row_splits = delta = None
    if max_neighbors is not None:
        k, knn_tables = int(max_neighbors), None if index is None else index.tables["knn"]
        distances, rows, counts = module.radius_search(searched, tables, radii, k, knn_tables)
        if periodic is not None:
            rows = periodic.merged(rows, points, k)
            counts = counts.view(-1, periodic.images).sum(1).clamp(max=k + 1)
            distances = distances_of(points, rows, box=periodic)
    else:
        if capacity is None:
            if tables is None:  # both searches take these
                tables = module.build_index(*searched[2:], _largest(radii))
            capacity = module.radius_list(searched, tables, radii, 0)[0][-1].item()
        row_splits, rows, distances = module.radius_list(searched, tables, radii, int(capacity))
        total = row_splits[-1]
        if periodic is not None:
            row_splits, rows = periodic.merged_list(row_splits, rows, points.reference_points.shape[0])
            distances = distances_of(points, rows, row_splits, periodic)
        row_splits = row_splits.clamp(max=capacity)
    distances = with_gradient(distances, rows, clouds, row_splits, periodic)
    if displacements:
        delta = torch.where(rows[..., None] >= 0, differences(clouds, rows, row_splits, periodic), 0.0)
        delta = delta[..., : query_points.shape[-1]]
    if row_splits is not None:
        rows = rows_in_cloud(rows, reference_points, row_splits)
        return NeighborList(row_splits, rows, distances, total, delta, radius)
    shape = *query_points.shape[:-1], int(max_neighbors)
    rows = rows_in_cloud(rows.view(shape), reference_points)
    delta = None if delta is None else delta.view(*shape, query_points.shape[-1])
    return Neighbors(rows, distances.view(shape), counts.view(shape[:-1]), delta, radius)


def _scales(
    query_points: Tensor,
    reference_points: Tensor,
    radii: Sequence[float],
    most: Sequence[int],
    options: dict,
) -> tuple[Neighbors, ...]:
    """A list for each scale, from one search: each is in front of the nearest neighbours of all."""
    largest, k = max(radii), max(most)
    # Whether the longest list is cut off within a smaller radius, only one neighbour more can tell.
    k += any(own == k and radius < largest for radius, own in zip(radii, most, strict=True))
    found = radius_neighbors(query_points, reference_points, largest, max_neighbors=k, **options)
    lists = []
    for radius, own in zip(radii, most, strict=True):
        rows, distances, delta = found.indices[..., :own], found.distances[..., :own], found.displacements
        counts = found.counts
        if radius < largest:
            limit = filled((), radius, distances.dtype, distances.device)
            counts = (found.distances.detach() <= limit).sum(-1)
            farther = distances.detach() > limit
            rows, distances = rows.masked_fill(farther, -1), distances.masked_fill(farther, torch.inf)
        if delta is not None:
            delta = torch.where(rows[..., None] >= 0, delta[..., :own, :], 0.0)
        lists.append(Neighbors(rows, distances, counts.clamp(max=own + 1), delta, radius))
    return tuple(lists)


def _largest(radii: float | Tensor) -> float | Tensor:
    """The one radius, or the largest of those of the queries; any where there is no query."""
    if isinstance(radii, Tensor):
        return radii.amax() if len(radii) else 1.0
    return radii


def packed_rows(
    neighbors: Neighbors | NeighborList, points: Tensor, missing: int
) -> tuple[Tensor, Tensor | None]:
    """Rows (Q, K), or (M,) and their row splits, of packed points; ``missing`` where there is no pair."""
    splits = None
    if isinstance(neighbors, NeighborList):
        splits = as_dtype(neighbors.row_splits, torch.int64).contiguous()
    rows = neighbors.indices
    if missing != -1 or math.prod(points.shape[:-2]) > 1:  # others are what lists have
        rows = rows_in_packed(rows, points, splits, missing)
    return as_dtype(rows if splits is not None else rows.flatten(0, -2), torch.int64), splits
