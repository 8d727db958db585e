"""The specification of the operators, in plain torch for one cloud. Read this first.

For a query point p_i and its neighbours N(i) among the reference points q_j with features f_j

    w_ij = a_j K(|p_i - q_j|)          out_i = sum_j w_ij f_j / sum_j w_ij,   j in N(i)

with a_j = 1 where no reference weights are given, and a kernel K of :class:`Weighting`, by default
exp(-distance / sigma). ``reduce="sum"`` leaves out the division. Weights of a mean are taken relative to the
nearest neighbour that counts: one whose a_j is not 0. A neighbour whose a_j is 0 has no influence. a_j may be
negative; where the sum of the weights is 0, so is the result.

Gradients come from torch's autograd, so they are the derivatives of exactly this code. Values and gradients
of every backend are compared with it in ``tests/ops/test_operators.py``. Queries are processed in chunks, so
that no whole query-by-reference matrix is ever in memory.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import hardtanh

from pointproj.ops.specification.rounding import largest_squares_within, radius_in_range, rounded_root
from pointproj.ops.torch_internals import filled

PAIRS_AT_ONCE = 2**22


class Weighting(NamedTuple):
    """How a distance d becomes a weight, and what becomes of the weighted features.

    Attributes
    ----------
    kernel : {"exponential", "gaussian", "inverse_distance", "uniform", "compact"}
        exp(-d / sigma), exp(-d^2 / (2 sigma^2)), 1 / max(d, eps)^power, 1, or (1 - (d / support)^2)^2.
    reduce : {"mean", "sum", "weighted"}
        Whether the sum is divided by the sum of the weights. ``"weighted"`` is internal: the mean with
        reference weights, which are the last feature. Only neighbours whose reference weight is not 0 count:
        weights are relative to the nearest of these, and are divided by the sum over these.
    power, eps : float
        Of the inverse distance.
    support : float
        Of the compact kernel, which is 0 from there on.
    """

    kernel: str = "exponential"
    reduce: str = "mean"
    power: float = 2.0
    eps: float = 1e-8
    support: float = math.inf


DEFAULT = Weighting()

# The least and the largest sigma: squares of the least and the inverse of the largest are normal.
SIGMA_RANGE = {
    dtype: (math.sqrt(torch.finfo(dtype).tiny), 1 / torch.finfo(dtype).tiny)
    for dtype in (torch.float32, torch.float64)
}


def knn_search(
    query_points: Float[Tensor, "q 3"], reference_points: Float[Tensor, "n 3"], k: int
) -> Int[Tensor, "q k"]:
    """Indices of the k nearest reference points, nearest first, ties by the lower index.

    A neighbour that does not exist is -1. Points that are not finite neither have neighbours nor are
    neighbours, and points so far apart that the squared distance overflows are not neighbours of each other.
    """
    rows = max(1, PAIRS_AT_ONCE // reference_points.shape[0])
    chunks = query_points.split(rows)
    return torch.cat([_smallest(squared_distances(chunk, reference_points), k) for chunk in chunks])


def knn_aggregate(
    query_points: Float[Tensor, "q 3"],
    reference_points: Float[Tensor, "n 3"],
    features: Float[Tensor, "n c"],
    k: int,
    sigma: float | Tensor = 0.1,
    weighting: Weighting = DEFAULT,
    reference_weights: Float[Tensor, " n"] | None = None,
) -> Float[Tensor, "q c"]:
    """Weighted mean (or sum) of the features of the k nearest reference points."""
    neighbor_indices = knn_search(query_points, reference_points, k)
    index = neighbor_indices.clamp(min=0)
    own = None if reference_weights is None else reference_weights[index]
    features = masked_features(features, reference_weights)
    delta = query_points[:, None] - reference_points[index]
    weights = _weights(delta, neighbor_indices >= 0, sigma, weighting, own)
    aggregated = (weights[..., None] * features[index].to(weights.dtype)).sum(1)
    return nan_where_query_is_not_finite(aggregated, query_points).to(features.dtype)


def radius_aggregate(
    query_points: Float[Tensor, "q 3"],
    reference_points: Float[Tensor, "n 3"],
    features: Float[Tensor, "n c"],
    radius: float,
    sigma: float | Tensor = 0.1,
    weighting: Weighting = DEFAULT,
    reference_weights: Float[Tensor, " n"] | None = None,
) -> Float[Tensor, "q c"]:
    """Weighted mean (or sum) of the features within ``radius`` (inclusive); 0 if there are none."""
    rows = max(1, PAIRS_AT_ONCE // reference_points.shape[0])
    features = masked_features(features, reference_weights)
    chunks = []
    for query in query_points.split(rows):
        delta = query[:, None] - reference_points
        is_neighbor = within(query, reference_points, radius)
        weights = _weights(delta, is_neighbor, sigma, weighting, reference_weights)
        terms = torch.where(is_neighbor[..., None], weights[..., None] * features.to(weights.dtype), 0.0)
        chunks.append(nan_where_query_is_not_finite(terms.sum(1), query))
    return torch.cat(chunks).to(features.dtype)


def radius_search(
    query_points: Float[Tensor, "q 3"],
    reference_points: Float[Tensor, "n 3"],
    radius: float | Float[Tensor, " q"],
    k: int,
) -> tuple[Int[Tensor, "q k"], Int[Tensor, " q"]]:
    """Rows of the k nearest within ``radius``, as :func:`knn_search`, and how many are, up to k + 1."""
    is_neighbor = within(query_points, reference_points, radius)
    squared = squared_distances(query_points, reference_points).masked_fill(~is_neighbor, torch.inf)
    return _smallest(squared, k), is_neighbor.sum(1).clamp(max=k + 1)


def radius_list(
    query_points: Float[Tensor, "q 3"],
    reference_points: Float[Tensor, "n 3"],
    radius: float | Float[Tensor, " q"],
) -> tuple[Int[Tensor, " q+1"], Int[Tensor, " pairs"]]:
    """All neighbours within ``radius``, in ascending order; those of query i begin at ``row_splits[i]``."""
    is_neighbor = within(query_points, reference_points, radius)
    row_splits = torch.nn.functional.pad(is_neighbor.sum(1).cumsum(0), (1, 0))
    return row_splits, is_neighbor.nonzero()[:, 1]


def within(
    query_points: Float[Tensor, "m 3"],
    reference_points: Float[Tensor, "n 3"],
    radius: float | Float[Tensor, " m"],
) -> Bool[Tensor, "m n"]:
    """Which pairs are no farther apart than the radius, one for all queries or one for each.

    :mod:`pointproj.ops.specification.rounding` says what that means to the last bit.
    """
    limits = largest_squares_within(radii_of(radius, query_points))
    return squared_distances(query_points, reference_points) <= limits.reshape(-1, 1)


def radii_of(radius: float | Float[Tensor, " q"], query_points: Float[Tensor, "q 3"]) -> Float[Tensor, " r"]:
    """The radius of each query, (Q,), or one for all of them, (1,), in the points' dtype."""
    if isinstance(radius, Tensor):
        return radius
    number = radius_in_range(radius, query_points.dtype)
    return filled((1,), number, query_points.dtype, query_points.device)


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


def rounded_length(delta: Float[Tensor, "*pairs 3"]) -> Float[Tensor, "*pairs"]:
    """The root of :func:`squared_distances`, to the last bit, of differences that are known."""
    return rounded_root(squared_lengths(delta))


def squared_lengths(delta: Float[Tensor, "*pairs d"]) -> Float[Tensor, "*pairs"]:
    """dx dx + dy dy + ..., rounded after every operation in this order."""
    first, *rest = delta.square().unbind(-1)
    return sum(rest, first)


def safe_sqrt(squared: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Square root whose gradient is 0 (not infinite) at 0."""
    apart = squared > 0
    return torch.where(apart, torch.where(apart, squared, 1.0).sqrt(), 0.0)


def nan_where_query_is_not_finite(
    per_query: Float[Tensor, "q c"], query_points: Float[Tensor, "q 3"]
) -> Float[Tensor, "q c"]:
    """Rows of queries with a NaN or inf coordinate are NaN, whatever was found for them."""
    # In eager mode isfinite() and all() are twice as many kernels. A maximum with a NaN is NaN.
    is_finite = query_points.detach().abs().amax(-1, keepdim=True) < torch.inf
    return torch.where(is_finite, per_query, torch.nan)


def _smallest(squared: Tensor, k: int) -> Tensor:
    squared = squared.nan_to_num(nan=torch.inf, posinf=torch.inf)
    squared, order = squared.sort(dim=1, stable=True)  # stable: the lower index stays in front
    return torch.where(squared[:, :k].isfinite(), order[:, :k], -1)


def sigma_in_range(sigma: Float[Tensor, ""]) -> Float[Tensor, ""]:
    """Sigma clamped to :data:`SIGMA_RANGE`; outside of it, also at 0, the gradient is 0.

    At the lower end only the nearest neighbours have a weight, all the same; at the upper end the weights of
    all neighbours are equal. Both are the limits of the formula while squared distances are normal numbers.
    """
    return hardtanh(sigma, *SIGMA_RANGE[sigma.dtype])  # clamp would do, but its backward is five kernels


def nearest_of(
    distances: Float[Tensor, "*rows k"], counts: Bool[Tensor, "*rows k"]
) -> Float[Tensor, "*rows 1"]:
    """The distance of each row's nearest neighbour that counts, 0 without one; a constant for autograd."""
    if not distances.shape[-1]:
        return distances.new_zeros(*distances.shape[:-1], 1)
    nearest = distances.detach().masked_fill(~counts, torch.inf).amin(-1, keepdim=True)
    return nearest.masked_fill(nearest.isinf(), 0.0)


def _relative_gaussian(d: Tensor, nearest: Tensor, sigma: float | Tensor, _: Weighting) -> Tensor:
    total = ((nearest + d) / sigma).clamp(max=torch.finfo(d.dtype).max)  # else 0 times inf at the nearest
    return (nearest - d) / sigma * total / 2


def _relative_inverse_distance(d: Tensor, nearest: Tensor, _: float | Tensor, weighting: Weighting) -> Tensor:
    return weighting.power * (nearest.clamp(min=weighting.eps) / d.clamp(min=weighting.eps)).log()


def _compact_log(d: Tensor, _: float | Tensor, weighting: Weighting) -> Tensor:
    rest = 1 - (d / weighting.support).square()
    inside = (d < weighting.support) & (rest > 0)  # 0 from the support on, exactly
    return torch.where(inside, 2 * torch.where(inside, rest, 1.0).log(), -torch.inf)


# The logarithm of each kernel at a distance d.
TABLE: dict[str, Callable[[Tensor, float | Tensor, Weighting], Tensor]] = {
    "exponential": lambda d, sigma, _: -d / sigma,
    "gaussian": lambda d, sigma, _: -(d / sigma).square() / 2,
    "inverse_distance": lambda d, _, weighting: -weighting.power * d.clamp(min=weighting.eps).log(),
    "uniform": lambda d, *_: torch.zeros_like(d),
    "compact": _compact_log,
}
# The same minus the logarithm at the nearest neighbour, for kernels whose means are relative to it.
RELATIVE: dict[str, Callable[[Tensor, Tensor, float | Tensor, Weighting], Tensor]] = {
    "exponential": lambda d, nearest, sigma, _: (nearest - d) / sigma,
    "gaussian": _relative_gaussian,
    "inverse_distance": _relative_inverse_distance,
}
# Those that are 0 from ``Weighting.support`` on.
FINITE_SUPPORT = ("compact",)
KERNELS = tuple(TABLE)


def kernel_weights(
    distances: Float[Tensor, "*pairs"],
    is_neighbor: Bool[Tensor, "*pairs"],
    nearest: Float[Tensor, "*rows"] | None,
    sigma: float | Tensor,
    weighting: Weighting,
) -> Float[Tensor, "*pairs"]:
    """The kernel at each neighbour, 0 for all others; relative to the row's ``nearest`` if that is given."""
    if nearest is None or weighting.kernel not in RELATIVE:
        logits = TABLE[weighting.kernel](distances, sigma, weighting)
    else:
        logits = RELATIVE[weighting.kernel](distances, nearest, sigma, weighting)
        # One without a reference weight may be nearer. Its weight must be finite: it is multiplied by 0.
        logits = logits.clamp(max=math.log(torch.finfo(logits.dtype).max) - 8)
    return torch.where(is_neighbor, logits, -torch.inf).exp()


def normalized(
    weights: Float[Tensor, "*rows k"], counts: Bool[Tensor, "*rows k"]
) -> Float[Tensor, "*rows k"]:
    """Weights divided by the sum of those in their row that count, 0 where that is 0.

    The gradient of a mean by a logit is w (c - C), where C is the mean of all c. If one neighbour has nearly
    all the weight, the rounding error of its own is multiplied by the slope of the kernel, and by its square
    in second derivatives. Therefore the mean of what is left is subtracted as well.
    """
    total = torch.where(counts, weights, 0.0).sum(-1, keepdim=True)
    made = torch.where(total != 0, weights / torch.where(total != 0, total, 1.0), 0.0)
    if not made.requires_grad:
        return made
    counted = torch.where(counts, made, 0.0)
    one = counted.sum(-1, keepdim=True)
    return made + counted.detach() * (one.detach() - one)


def masked_features(
    features: Float[Tensor, "*n c"], reference_weights: Float[Tensor, "*n"] | None
) -> Float[Tensor, "*n c"]:
    """Features without those that are not finite where the reference weight is 0: 0 times them is not 0."""
    if reference_weights is None:
        return features
    return features.masked_fill((reference_weights == 0)[..., None] & ~features.isfinite(), 0.0)


def relative_weights(
    delta: Float[Tensor, "*pairs 3"],
    is_neighbor: Bool[Tensor, "*pairs"],
    counts: Bool[Tensor, "*pairs"],
    sigma: float | Tensor,
    weighting: Weighting,
) -> Float[Tensor, "*pairs"]:
    """The kernel, 0 where there is no neighbour; for a mean, relative to the row's nearest that counts."""
    delta = torch.where(is_neighbor[..., None], delta, 0.0)
    distances = length(delta)
    if weighting.kernel in FINITE_SUPPORT:  # the last bit decides who has a weight
        distances = distances + (rounded_length(delta) - distances).detach()
    nearest = None if weighting.reduce == "sum" else nearest_of(distances, counts)
    return kernel_weights(distances, is_neighbor, nearest, sigma, weighting)


def _weights(
    delta: Tensor, is_neighbor: Tensor, sigma: float | Tensor, weighting: Weighting, own: Tensor | None
) -> Tensor:
    """Weights of the neighbours in each row, 0 for all others; of a mean they have the sum 1, never 0 / 0."""
    if isinstance(sigma, Tensor):
        sigma = sigma_in_range(sigma)
    counts = is_neighbor if own is None else is_neighbor & (own != 0)
    weights = relative_weights(delta, is_neighbor, counts, sigma, weighting)
    if own is not None:
        weights = weights * own.to(weights.dtype)
    return normalized(weights, is_neighbor) if weighting.reduce == "mean" else weights
