"""The operators as plain torch that a tracer can follow for any number of points.

An exported program must run where this package is not installed, so its operators are replaced by these.
They go through the queries in chunks, as :mod:`pointproj.ops.backends.torch` does, but in a loop that remains
a loop when it is traced: memory stays bounded, and neither the number of queries nor of points is fixed.
Ragged batches are not exported.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from pointproj.ops.backends.torch import nearest_rows
from pointproj.ops.bridge.torch_internals import map_rows
from pointproj.ops.clouds import Clouds
from pointproj.ops.gradients import Chunk, aggregate_chunk
from pointproj.ops.records import fields_apart
from pointproj.ops.reference import Weighting, nan_where_query_is_not_finite, squared_distances
from pointproj.ops.rounding import largest_square_within

QUERIES_AT_ONCE = 64


@fields_apart
def search(clouds: Clouds, k: int) -> Tensor:
    """Packed rows of the k nearest, (Q, k) int64, -1 where there are fewer."""

    def nearest(query: Tensor, points: Tensor, cloud: Tensor) -> Tensor:
        return nearest_rows(squared_distances(query, points), k, cloud * points.shape[0])

    return _by_chunks(nearest, clouds, (clouds.reference_points,), (), k)


@fields_apart
def aggregate_neighbors(
    query_points: Tensor,
    reference_points: Tensor,
    features: Tensor,
    sigma: Tensor,
    neighbor_indices: Tensor,
    weighting: Weighting,
) -> Tensor:
    """Weighted mean or sum over neighbour lists, (Q, C)."""
    rows, is_neighbor = neighbor_indices.clamp(min=0).long(), neighbor_indices >= 0
    whole = Chunk(slice(None), slice(None), is_neighbor, rows)
    aggregated = aggregate_chunk(whole, weighting, query_points, reference_points, features, sigma)
    return nan_where_query_is_not_finite(aggregated, query_points)


@fields_apart
def radius_aggregate(
    clouds: Clouds, features: Tensor, sigma: Tensor, radius: float, weighting: Weighting
) -> Tensor:
    """Weighted mean or sum over all points within the radius, (Q, C)."""

    def within(query: Tensor, points: Tensor, values: Tensor, cloud: Tensor, sigma: Tensor) -> Tensor:
        is_neighbor = squared_distances(query, points) <= largest_square_within(radius, query.dtype)
        whole = Chunk(slice(None), slice(None), is_neighbor)
        aggregated = aggregate_chunk(whole, weighting, query, points, values, sigma)
        return nan_where_query_is_not_finite(aggregated, query)

    per_reference = (clouds.reference_points, features)
    return _by_chunks(within, clouds, per_reference, (sigma,), features.shape[1])


def _by_chunks(
    function: Callable[..., Tensor],
    points: Clouds,
    per_reference: tuple[Tensor, ...],
    others: tuple[Tensor, ...],
    width: int,
) -> Tensor:
    """``function(query, *per_reference, cloud, *others)`` for chunks of each cloud's queries, (Q, width)."""
    query_points, clouds = points.query_points, points.count
    size = query_points.shape[0] // clouds
    chunks = (size - 1) // QUERIES_AT_ONCE + 2  # one to spare: for a tracer, 1 is another case than more
    padding = (0, 0, 0, chunks * QUERIES_AT_ONCE - size)
    queries = torch.nn.functional.pad(query_points.view(clouds, size, 3), padding, value=torch.nan)
    cloud = torch.arange(clouds * chunks, device=query_points.device) // chunks
    of_clouds = [t.view(clouds, t.shape[0] // clouds, t.shape[1]) for t in per_reference]

    # The compiler looks among the arguments for the symbols that the shape of the result is made of.
    symbols = (size,) if isinstance(size, torch.SymInt) else ()

    def one(chunk: tuple[Tensor, Tensor], *arguments: Tensor) -> Tensor:
        query, cloud = chunk
        own = [t.index_select(0, cloud.view(1))[0] for t in arguments[: len(per_reference)]]
        return function(query, *own, cloud, *arguments[len(per_reference) :][: len(others)])

    in_chunks = queries.reshape(clouds * chunks, QUERIES_AT_ONCE, 3)
    made = map_rows(one, (in_chunks, cloud), *of_clouds, *others, *symbols)
    return made.reshape(clouds, chunks * QUERIES_AT_ONCE, width)[:, :size].reshape(clouds * size, width)
