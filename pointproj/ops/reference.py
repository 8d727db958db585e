"""The specification of the operators, in plain torch for one cloud. Read this first.

For a query point p_i and its neighbours N(i) among the reference points q_j with features f_j

    w_ij = exp(-|p_i - q_j| / sigma)          out_i = sum_j w_ij f_j / sum_j w_ij,   j in N(i)

Gradients come from torch's autograd, so they are the derivatives of exactly this code. Values and gradients
of every backend are compared with it in ``tests/ops/test_operators.py``. Queries are processed in chunks, so
that no whole query-by-reference matrix is ever in memory.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

PAIRS_AT_ONCE = 2**22


def knn_search(
    query_points: Float[Tensor, "q 3"], reference_points: Float[Tensor, "n 3"], k: int
) -> Int[Tensor, "q k"]:
    """Indices of the k nearest reference points, nearest first, ties by the lower index.

    A neighbour that does not exist is -1. Points that are not finite neither have neighbours nor are
    neighbours, and points so far apart that the squared distance overflows are not neighbours of each other.
    """
    rows = max(1, PAIRS_AT_ONCE // reference_points.shape[0])
    chunks = [_nearest(chunk, reference_points, k) for chunk in query_points.split(rows)]
    return torch.cat(chunks)


def knn_aggregate(
    query_points: Float[Tensor, "q 3"],
    reference_points: Float[Tensor, "n 3"],
    features: Float[Tensor, "n c"],
    k: int,
    sigma: float | Tensor = 0.1,
) -> Float[Tensor, "q c"]:
    """Mean of the features of the k nearest reference points, weighted by exp(-distance / sigma)."""
    neighbor_indices = knn_search(query_points, reference_points, k)
    index = neighbor_indices.clamp(min=0)
    weights = _weights(query_points[:, None] - reference_points[index], neighbor_indices >= 0, sigma)
    aggregated = (weights[..., None] * features[index].to(weights.dtype)).sum(1)
    return nan_where_query_is_not_finite(aggregated, query_points).to(features.dtype)


def radius_aggregate(
    query_points: Float[Tensor, "q 3"],
    reference_points: Float[Tensor, "n 3"],
    features: Float[Tensor, "n c"],
    radius: float,
    sigma: float | Tensor = 0.1,
) -> Float[Tensor, "q c"]:
    """Mean of the features within ``radius`` (inclusive), weighted by exp(-distance / sigma); 0 if none."""
    rows = max(1, PAIRS_AT_ONCE // reference_points.shape[0])
    chunks = []
    for query in query_points.split(rows):
        distances = squared_distances(query, reference_points).sqrt()
        is_neighbor = distances <= torch.tensor(radius, dtype=distances.dtype)
        weights = _weights(query[:, None] - reference_points, is_neighbor, sigma)
        terms = torch.where(is_neighbor[..., None], weights[..., None] * features.to(weights.dtype), 0.0)
        chunks.append(nan_where_query_is_not_finite(terms.sum(1), query))
    return torch.cat(chunks).to(features.dtype)


@torch.no_grad()
def squared_distances(
    query_points: Float[Tensor, "m 3"], reference_points: Float[Tensor, "n 3"]
) -> Float[Tensor, "m n"]:
    """(dx dx + dy dy) + dz dz, rounded after every operation, NaN where a coordinate is not finite.

    Backends that search must round in this order, without fused multiply-adds: equal distances are then
    equal on all of them and the lower index wins everywhere.
    """
    dx, dy, dz = (query_points[:, None, axis] - reference_points[None, :, axis] for axis in range(3))
    squared = dx * dx + dy * dy + dz * dz
    finite = query_points.isfinite().all(-1)[:, None] & reference_points.isfinite().all(-1)
    return torch.where(finite, squared, torch.nan)


def length(delta: Float[Tensor, "*pairs 3"]) -> Float[Tensor, "*pairs"]:
    """Length of each difference, with subgradient 0 at distance 0."""
    return safe_sqrt(delta.square().sum(-1))


def safe_sqrt(squared: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Square root whose gradient is 0 (not infinite) at 0."""
    apart = squared > 0
    return torch.where(apart, torch.where(apart, squared, 1.0).sqrt(), 0.0)


def nan_where_query_is_not_finite(
    per_query: Float[Tensor, "q c"], query_points: Float[Tensor, "q 3"]
) -> Float[Tensor, "q c"]:
    """Rows of queries with a NaN or inf coordinate are NaN, whatever was found for them."""
    return torch.where(query_points.isfinite().all(-1, keepdim=True), per_query, torch.nan)


def _nearest(query_points: Tensor, reference_points: Tensor, k: int) -> Tensor:
    squared = squared_distances(query_points, reference_points).nan_to_num(nan=torch.inf, posinf=torch.inf)
    squared, order = squared.sort(dim=1, stable=True)  # stable: the lower index stays in front
    return torch.where(squared[:, :k].isfinite(), order[:, :k], -1)


def _weights(delta: Tensor, is_neighbor: Tensor, sigma: float | Tensor) -> Tensor:
    """Softmax of -distance / sigma over the neighbours in each row: 0 for all others, never 0 / 0."""
    delta = delta.to(torch.promote_types(delta.dtype, torch.float32))
    distances = length(torch.where(is_neighbor[..., None], delta, 0.0))
    logits = torch.where(is_neighbor, -distances / sigma, -torch.inf)
    largest = logits.detach().amax(-1, keepdim=True).clamp(min=torch.finfo(logits.dtype).min)
    weights = torch.where(is_neighbor, (logits - largest).exp(), 0.0)
    return weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
