"""Context: where the neighbours of a query point are, from the same aggregation as their features."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from pointproj.ops.specification.reference import safe_sqrt

CONTEXT_CHANNELS = 6  # displacement (3), soft distance, spread, has_neighbour

Aggregate = Callable[[Tensor], Tensor]  # (..., N, C) at the reference points -> (..., Q, C) at the queries


def aggregate_with_context(
    aggregate: Aggregate,
    query_points: Float[Tensor, "*batch q 3"],
    reference_points: Float[Tensor, "*batch n 3"],
    features: Float[Tensor, "*batch n c"],
) -> list[Tensor]:
    """Aggregate features together with the positions of the neighbours.

    ``aggregate`` carries values from these reference points to these query points, as
    :func:`pointproj.knn_aggregate` does; its result is 0 for a query without neighbours.

    Returns a list of five tensors:

    - the aggregated features (..., Q, C);
    - the displacement (..., Q, 3) from the query point to the weighted mean of its neighbours;
    - the soft distance (..., Q, 1), which is the length of the displacement;
    - the spread (..., Q, 1), which is the weighted standard deviation of the neighbours about their mean;
    - has_neighbour (..., Q, 1): 1, or 0 for a query without neighbours, whose other results are 0 too.
    """
    dtype = torch.promote_types(features.dtype, reference_points.dtype)
    squared_norm = reference_points.square().sum(-1, keepdim=True)
    moments = torch.cat([reference_points, squared_norm, torch.ones_like(squared_norm)], dim=-1)
    aggregated = aggregate(torch.cat([features.to(dtype), moments.to(dtype)], dim=-1))
    features, mean, mean_square, has_neighbour = aggregated.split([features.shape[-1], 3, 1, 1], dim=-1)
    displacement = mean - has_neighbour * query_points
    # Rounding can make E|q|^2 - |E q|^2 negative.
    variance = (mean_square - mean.square().sum(-1, keepdim=True)).clamp(min=0)
    soft_distance = safe_sqrt(displacement.square().sum(-1, keepdim=True))
    return [features, displacement, soft_distance, safe_sqrt(variance), has_neighbour]
