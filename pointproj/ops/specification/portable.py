"""The operators as plain torch that a tracer can follow for any number of points, for one cloud.

An exported program must run where this package is not installed, so its operators are replaced by these.
They go through the queries in chunks, as :mod:`pointproj.ops.backends.torch` does, but in a loop that remains
a loop when it is traced: memory stays bounded, and neither the number of queries nor of points is fixed.
Networks are exported for one cloud.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from pointproj.ops.specification.clouds import Clouds
from pointproj.ops.specification.gradients import Chunk, aggregate_chunk
from pointproj.ops.specification.pairs import nearest_rows
from pointproj.ops.specification.records import fields_apart
from pointproj.ops.specification.reference import Weighting, nan_where_query_is_not_finite, squared_distances
from pointproj.ops.specification.rounding import largest_square_within
from pointproj.ops.torch_internals import map_rows

QUERIES_AT_ONCE = 64


@fields_apart
def search(clouds: Clouds, k: int, *, for_onnx: bool = False) -> Tensor:
    """Rows of the k nearest, (Q, k) int64, -1 where there are fewer; without a loop ``for_onnx``."""

    def nearest(query: Tensor, points: Tensor) -> Tensor:
        return nearest_rows(squared_distances(query, points), k, 0, by_topk=for_onnx)

    if for_onnx:
        return nearest(clouds.query_points, clouds.reference_points)
    return _by_chunks(nearest, clouds.query_points, k, clouds.reference_points)


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
    clouds: Clouds,
    features: Tensor,
    sigma: Tensor,
    radius: float,
    weighting: Weighting,
    *,
    for_onnx: bool = False,
) -> Tensor:
    """Weighted mean or sum over all points within the radius, (Q, C); without a loop ``for_onnx``."""

    def within(query: Tensor, points: Tensor, values: Tensor, sigma: Tensor) -> Tensor:
        is_neighbor = squared_distances(query, points) <= largest_square_within(radius, query.dtype)
        whole = Chunk(slice(None), slice(None), is_neighbor)
        aggregated = aggregate_chunk(whole, weighting, query, points, values, sigma)
        return nan_where_query_is_not_finite(aggregated, query)

    others = clouds.reference_points, features, sigma
    if for_onnx:
        return within(clouds.query_points, *others)
    return _by_chunks(within, clouds.query_points, features.shape[1], *others)


def _by_chunks(function: Callable[..., Tensor], query_points: Tensor, width: int, *others: Tensor) -> Tensor:
    """``function(query, *others)`` for chunks of the queries, (Q, width)."""
    size = query_points.shape[0]
    chunks = (size - 1) // QUERIES_AT_ONCE + 2  # one to spare: for a tracer, 1 is another case than more
    padding = (0, 0, 0, chunks * QUERIES_AT_ONCE - size)
    queries = torch.nn.functional.pad(query_points, padding, value=torch.nan)

    # The compiler looks among the arguments for the symbols that the shape of the result is made of.
    symbols = (size,) if isinstance(size, torch.SymInt) else ()

    def one(chunk: tuple[Tensor], *arguments: Tensor) -> Tensor:
        return function(*chunk, *arguments[: len(others)])

    in_chunks = queries.reshape(chunks, QUERIES_AT_ONCE, 3)
    made = map_rows(one, (in_chunks,), *others, *symbols)
    return made.reshape(chunks * QUERIES_AT_ONCE, width)[:size]
