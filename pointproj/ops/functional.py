"""The public operators that search or aggregate: they check, pack batches, choose the backend, and unpack."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pointproj.ops import arguments
from pointproj.ops.backends.torch import brute_force
from pointproj.ops.backends.torch.distances import with_gradient
from pointproj.ops.calls import checked_clouds, choose_backend, periodic_box, scalar
from pointproj.ops.index import Index, build_index
from pointproj.ops.specification.clouds import as_dtype, rows_in_cloud, rows_in_packed
from pointproj.ops.specification.distances import distances_of
from pointproj.ops.specification.records import Summands
from pointproj.ops.specification.reference import (
    FINITE_SUPPORT,
    Weighting,
    masked_features,
    sigma_in_range,
)

__all__ = ["Index", "build_index", "knn", "knn_aggregate", "radius_aggregate"]

REDUCTIONS = ("mean", "sum")


def knn(
    query_points: Float[Tensor, "*batch q dims"],
    reference_points: Float[Tensor, "*batch n dims"],
    k: int,
    *,
    max_radius: float | None = None,
    box: Sequence[float] | None = None,
    index_dtype: torch.dtype = torch.int64,
    index: Index | None = None,
    backend: str = "auto",
    query_offsets: Int[Tensor, " clouds+1"] | None = None,
    reference_offsets: Int[Tensor, " clouds+1"] | None = None,
) -> tuple[Float[Tensor, "*batch q k"], Int[Tensor, "*batch q k"]]:
    """The k nearest reference points of every query point.

    Parameters
    ----------
    query_points : (Q, 3) or (B, Q, 3) float tensor
        float32 or float64. Points in the plane have 2 coordinates instead of 3, in all functions. Only in
        this one they may have more than 3. Then all pairs are compared, in chunks, the host waits for the
        device once, and an index, a box or a named backend other than ``"torch"`` is refused.
    reference_points : (N, 3) or (B, N, 3) float tensor
        Of the same dtype as ``query_points``.
    k : int
        Neighbours of each query, 1 to N.
    max_radius : float, optional
        Points farther away, in the units of the points, are not neighbours.
    box : sequence of float, optional
        Lengths of a periodic box, one for each coordinate, inf for an axis that is not periodic. Distances
        are then to the nearest copy of each reference point. With an index, reference points must lie in
        the box, from 0 to its lengths; otherwise all points may lie anywhere.
    index_dtype : torch.dtype
        Of the indices: torch.int64, or torch.int32 for half the memory.
    index : Index, optional
        From :func:`pointproj.build_index` on the same reference points. None: it is built in this call.
    backend : str
        ``"auto"`` or a name from :func:`pointproj.backends`.
    query_offsets : (B + 1,) integer tensor, optional
        For clouds of different sizes, packed one after the other: the queries of cloud b are rows
        ``query_offsets[b]:query_offsets[b + 1]``. Neighbours are never of another cloud.
    reference_offsets : (B + 1,) integer tensor, optional
        The same for the reference points.

    Returns
    -------
    distances : (..., Q, k) float tensor
        In the dtype and units of the points, nearest first. Differentiable in both sets of points, with
        subgradient 0 at distance 0.
    neighbor_indices : (..., Q, k) int64 or int32 tensor
        Rows of ``reference_points`` (within the cloud for dense batches, of the packed tensor for ragged
        ones). Equal distances: the lower index first.

        A reference point with a NaN or inf coordinate is not a neighbour of any query, and a query point
        with one has no neighbours. Where a neighbour is missing, the index is -1 and the distance inf (NaN
        if it is the query that is not finite).

    Raises
    ------
    TypeError, ValueError
        For arguments of wrong type, shape, dtype or device, or k > N.
    BackendUnavailable
        If ``backend`` names one that cannot run here.
    """
    clouds = checked_clouds(query_points, reference_points, query_offsets, reference_offsets, in_space=False)
    arguments.check_k(k, reference_points)
    if max_radius is not None:
        max_radius = arguments.checked_radius(max_radius, query_points.dtype, "max_radius")
    periodic = periodic_box(box, max_radius, reference_points, inside=index is not None)
    arguments.check_index_dtype(index_dtype)
    if query_points.shape[-1] > 3:
        brute_force.check_backend(backend, index=index, box=box)
        module, tables = brute_force, None
    else:
        module, tables = choose_backend(backend, None, index, reference_points, clouds)
    own = clouds.detached()
    searched = own if periodic is None else periodic.clouds(own)
    distances, rows = module.nearest(searched, tables, int(k), index_dtype, max_radius)
    if periodic is not None:
        rows = periodic.merged(rows, own, int(k))
        distances = distances_of(own, rows, box=periodic)
    distances = with_gradient(distances, rows, clouds, box=periodic)
    if max_radius is not None:
        farther = distances.detach() > scalar(max_radius, distances.dtype, distances.device)
        rows, distances = rows.masked_fill(farther, -1), distances.masked_fill(farther, torch.inf)
    if query_points.ndim == 2:
        return distances, rows
    shape = *query_points.shape[:-1], k
    return distances.view(shape), rows_in_cloud(rows.view(shape), reference_points)


def knn_aggregate(
    query_points: Float[Tensor, "*batch q dims"],
    reference_points: Float[Tensor, "*batch n dims"],
    features: Float[Tensor, "*batch n c"],
    k: int,
    *,
    sigma: float | Float[Tensor, ""] = 0.1,
    kernel: str = "exponential",
    power: float = 2.0,
    eps: float = 1e-8,
    reduce: str = "mean",
    reference_weights: Float[Tensor, "*batch n"] | None = None,
    max_radius: float | None = None,
    index: Index | None = None,
    neighbor_indices: Int[Tensor, "*batch q k"] | None = None,
    backend: str = "auto",
    query_offsets: Int[Tensor, " clouds+1"] | None = None,
    reference_offsets: Int[Tensor, " clouds+1"] | None = None,
) -> Float[Tensor, "*batch q c"]:
    """Aggregate the features of the k nearest reference points of every query point.

    ``out_i = sum_j w_ij f_j / sum_j w_ij`` with ``w_ij = exp(-|p_i - q_j| / sigma)``: the softmax of
    -distance / sigma over the neighbours. :mod:`pointproj.ops.specification.reference` is the specification.

    Parameters
    ----------
    query_points, reference_points, k, index, backend, query_offsets, reference_offsets
        As for :func:`knn`.
    features : (..., N, C) float tensor
        float16, bfloat16, float32 or float64; sums run in float32 or wider.
    sigma : float or float tensor of one element
        Softmax temperature in the units of the points, positive. A tensor gets a gradient. Of the kernels
        ``"exponential"`` and ``"gaussian"``.
    kernel : {"exponential", "gaussian", "inverse_distance", "uniform", "compact"}
        The weight at distance d: ``exp(-d / sigma)``, ``exp(-d^2 / (2 sigma^2))``,
        ``1 / max(d, eps)^power``, ``1``, or ``(1 - (d / max_radius)^2)^2``.
    power, eps : float
        Of the kernel ``"inverse_distance"``; eps in the units of the points.
    reduce : {"mean", "sum"}
        Whether the sum is divided by the sum of the weights.
    reference_weights : (..., N) float tensor, optional
        Multiply the weights, for instance areas of mesh cells. They get a gradient. A neighbour whose weight
        is 0 has no influence; weights may be negative, and where their sum is 0, so is the mean.
    max_radius : float, optional
        As for :func:`knn`; the kernel ``"compact"`` needs it.
    neighbor_indices : (..., Q, k) int32 or int64 tensor, optional
        Known neighbours, in any order; nothing is searched. A value that is not a row of
        ``reference_points`` stands for no neighbour.

    Returns
    -------
    (..., Q, C) float tensor
        In the features' dtype. Differentiable twice in features, query points, reference points and sigma;
        the choice of neighbours is treated as constant. A query without neighbours gets 0. A query that
        is not finite gets a row of NaN and has no influence on any gradient.

    Raises
    ------
    TypeError, ValueError, BackendUnavailable
        As for :func:`knn`.
    """
    clouds = checked_clouds(query_points, reference_points, query_offsets, reference_offsets)
    arguments.check_k(k, reference_points)
    if max_radius is not None:
        max_radius = arguments.checked_radius(max_radius, query_points.dtype, "max_radius")
    elif kernel in FINITE_SUPPORT:
        raise ValueError(
            f'kernel="{kernel}" ends at max_radius, which is missing: give it in units of the points'
        )
    if neighbor_indices is not None:
        arguments.check_neighbor_indices(neighbor_indices, query_points, reference_points, int(k))

    weighting = Weighting(kernel, reduce, power, eps, max_radius or torch.inf)
    summands = _checked_summands(reference_points, features, sigma, weighting, reference_weights)
    module, tables = choose_backend(backend, None, index, reference_points, clouds)
    if neighbor_indices is None and max_radius is None and reference_weights is None:
        aggregated = module.knn_aggregate(clouds, tables, summands, int(k))
        return _unpacked(aggregated, summands, query_points, features)
    if neighbor_indices is not None:
        rows = rows_in_packed(neighbor_indices, reference_points).to(torch.int32).reshape(-1, int(k))
        distances = distances_of(clouds.detached(), rows)
    else:
        distances, rows = module.nearest(clouds.detached(), tables, int(k), torch.int32, max_radius)
    if max_radius is not None:
        rows = torch.where(distances <= scalar(max_radius, distances.dtype, distances.device), rows, -1)
    if neighbor_indices is not None or reference_weights is not None:
        rows = _nearest_in_front(rows, distances, reference_weights)
    aggregated = module.aggregate_neighbors(clouds, summands, rows)
    return _unpacked(aggregated, summands, query_points, features)


def radius_aggregate(
    query_points: Float[Tensor, "*batch q dims"],
    reference_points: Float[Tensor, "*batch n dims"],
    features: Float[Tensor, "*batch n c"],
    radius: float,
    *,
    sigma: float | Float[Tensor, ""] = 0.1,
    kernel: str = "exponential",
    power: float = 2.0,
    eps: float = 1e-8,
    reduce: str = "mean",
    reference_weights: Float[Tensor, "*batch n"] | None = None,
    index: Index | None = None,
    backend: str = "auto",
    query_offsets: Int[Tensor, " clouds+1"] | None = None,
    reference_offsets: Int[Tensor, " clouds+1"] | None = None,
) -> Float[Tensor, "*batch q c"]:
    """Aggregate the features of all reference points within ``radius`` of every query point.

    The same weighting as :func:`knn_aggregate`, over every reference point with
    ``|p_i - q_j| <= radius``, however many: nothing is truncated.

    Parameters
    ----------
    query_points, reference_points, index, backend, query_offsets, reference_offsets
        As for :func:`knn`.
    features, sigma, kernel, power, eps, reduce, reference_weights
        As for :func:`knn_aggregate`; the kernel ``"compact"`` is ``(1 - (d / radius)^2)^2``.
    radius : float
        Cut-off in the units of the points, positive; it has no gradient.

    Returns
    -------
    (..., Q, C) float tensor
        As for :func:`knn_aggregate`; a query without neighbours gets 0 and contributes no gradient.

    Raises
    ------
    TypeError, ValueError, BackendUnavailable
        As for :func:`knn`.
    """
    clouds = checked_clouds(query_points, reference_points, query_offsets, reference_offsets)
    radius = arguments.checked_radius(radius, query_points.dtype)
    weighting = Weighting(kernel, reduce, power, eps, radius)
    summands = _checked_summands(reference_points, features, sigma, weighting, reference_weights)
    module, tables = choose_backend(backend, radius, index, reference_points, clouds)
    aggregated = module.radius_aggregate(clouds, tables, summands, radius)
    return _unpacked(aggregated, summands, query_points, features)


def _checked_summands(
    reference_points: Tensor,
    features: Tensor,
    sigma: float | Tensor,
    weighting: Weighting,
    reference_weights: Tensor | None,
) -> Summands:
    """The packed features and what goes with them, after their checks.

    Reference weights multiply the features. For a mean they become one more channel, so that one call gives
    both sums: that of the weighted features, and that of the weights, by which the first is divided.
    """
    arguments.check_features(features, reference_points)
    dtype = arguments.sum_dtype(features.dtype, reference_points.dtype)
    arguments.check_sigma(sigma, reference_points, dtype)
    if reference_weights is not None:
        arguments.check_reference_weights(reference_weights, features)
    weighting = arguments.checked_weighting(weighting, REDUCTIONS, dtype)
    if isinstance(sigma, Tensor):
        sigma = sigma_in_range((sigma.reshape(()) if sigma.ndim else sigma).to(dtype))
    else:
        sigma = scalar(sigma, dtype, features.device)
    values = features if reference_weights is None else masked_features(features, reference_weights)
    if values.ndim > 2:
        values = values.reshape(-1, values.shape[-1])
    values = as_dtype(values, dtype).contiguous()
    if reference_weights is not None:
        weights = reference_weights.reshape(-1, 1).to(dtype)
        values = values * weights
        if weighting.reduce == "mean":
            values, weighting = torch.cat([values, weights], 1), weighting._replace(reduce="weighted")
    return Summands(values, sigma, weighting)


def _unpacked(aggregated: Tensor, summands: Summands, query_points: Tensor, features: Tensor) -> Tensor:
    """Means from sums that are weighted, as (..., Q, C) in the features' own dtype."""
    if summands.weighting.reduce == "weighted":
        summed, total = aggregated.split([features.shape[-1], 1], dim=1)
        # Rows of queries that are not finite are NaN, which must not enter second derivatives.
        divides = (total != 0) & ~total.isnan()
        otherwise = torch.where(total == 0, 0.0, torch.nan)
        aggregated = torch.where(divides, summed / torch.where(divides, total, 1.0), otherwise)
    if aggregated.dtype != features.dtype:
        aggregated = aggregated.to(features.dtype)
    return aggregated if features.ndim == 2 else aggregated.view(*query_points.shape[:-1], features.shape[-1])


def _nearest_in_front(rows: Tensor, distances: Tensor, reference_weights: Tensor | None) -> Tensor:
    """Rows (Q, k) whose first is the nearest neighbour with a weight: weights are relative to it."""
    counts = rows >= 0
    if reference_weights is not None:
        counts &= (reference_weights.detach().reshape(-1) != 0)[rows.clamp(min=0)]
    first = torch.where(counts, distances, torch.inf).argmin(1, keepdim=True)
    front, rows = rows.gather(1, first), rows.scatter(1, first, rows[:, :1])
    return torch.cat([front, rows[:, 1:]], 1)
