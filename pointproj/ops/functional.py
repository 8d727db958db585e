"""The public operators: they check, pack batches, choose the backend, and unpack."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pointproj.ops import arguments
from pointproj.ops.clouds import Clouds, pack
from pointproj.ops.index import Index, build_index, choose_backend
from pointproj.ops.reference import DEFAULT, length, nan_where_query_is_not_finite

__all__ = ["Index", "build_index", "knn", "knn_aggregate", "radius_aggregate"]


def knn(
    query_points: Float[Tensor, "*batch q 3"],
    reference_points: Float[Tensor, "*batch n 3"],
    k: int,
    *,
    index: Index | None = None,
    backend: str = "auto",
    query_offsets: Int[Tensor, " clouds+1"] | None = None,
    reference_offsets: Int[Tensor, " clouds+1"] | None = None,
) -> tuple[Float[Tensor, "*batch q k"], Int[Tensor, "*batch q k"]]:
    """The k nearest reference points of every query point.

    Parameters
    ----------
    query_points : (Q, 3) or (B, Q, 3) float tensor
        float32 or float64.
    reference_points : (N, 3) or (B, N, 3) float tensor
        Of the same dtype as ``query_points``.
    k : int
        Neighbours of each query, 1 to N.
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
    neighbor_indices : (..., Q, k) int64 tensor
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
    clouds = _checked_clouds(query_points, reference_points, query_offsets, reference_offsets)
    arguments.check_k(k, reference_points)
    module, tables = choose_backend(backend, None, index, reference_points, clouds)
    rows = module.search(clouds.detached(), tables, int(k)).long()
    distances = _distances(clouds.query_points, clouds.reference_points, rows)
    if query_points.ndim == 3:
        rows = rows.view(*query_points.shape[:2], k)
        rows = torch.where(rows >= 0, rows - _first_rows(reference_points), -1)
        distances = distances.view(*query_points.shape[:2], k)
    return distances, rows


def knn_aggregate(
    query_points: Float[Tensor, "*batch q 3"],
    reference_points: Float[Tensor, "*batch n 3"],
    features: Float[Tensor, "*batch n c"],
    k: int,
    *,
    sigma: float | Float[Tensor, ""] = 0.1,
    index: Index | None = None,
    neighbor_indices: Int[Tensor, "*batch q k"] | None = None,
    backend: str = "auto",
    query_offsets: Int[Tensor, " clouds+1"] | None = None,
    reference_offsets: Int[Tensor, " clouds+1"] | None = None,
) -> Float[Tensor, "*batch q c"]:
    """Aggregate the features of the k nearest reference points of every query point.

    ``out_i = sum_j w_ij f_j / sum_j w_ij`` with ``w_ij = exp(-|p_i - q_j| / sigma)``: the softmax of
    -distance / sigma over the neighbours. :mod:`pointproj.ops.reference` is the specification.

    Parameters
    ----------
    query_points : (..., Q, 3) float tensor
        As for :func:`knn`.
    reference_points : (..., N, 3) float tensor
        As for :func:`knn`.
    features : (..., N, C) float tensor
        float16, bfloat16, float32 or float64; sums run in float32 or wider.
    k : int
        As for :func:`knn`.
    sigma : float or float tensor of one element
        Softmax temperature in the units of the points, positive. A tensor gets a gradient.
    index : Index, optional
        As for :func:`knn`.
    neighbor_indices : (..., Q, k) int32 or int64 tensor, optional
        Neighbours that are known already, from :func:`knn` on the same points: nothing is searched then. A
        value that is not a row of ``reference_points`` counts as no neighbour.
    backend : str
        As for :func:`knn`.
    query_offsets : (B + 1,) integer tensor, optional
        As for :func:`knn`.
    reference_offsets : (B + 1,) integer tensor, optional
        As for :func:`knn`.

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
    clouds = _checked_clouds(query_points, reference_points, query_offsets, reference_offsets)
    arguments.check_k(k, reference_points)
    arguments.check_features(features, reference_points)
    arguments.check_sigma(sigma, query_points)
    if neighbor_indices is not None:
        arguments.check_neighbor_indices(neighbor_indices, query_points, reference_points, int(k))
    module, tables = choose_backend(backend, None, index, reference_points, clouds)
    packed, sigma = _packed_features(features, query_points.dtype, sigma)
    if neighbor_indices is None:
        rows = module.search(clouds.detached(), tables, int(k))
    else:
        rows = _packed_rows(neighbor_indices, reference_points)
    aggregated = module.aggregate_neighbors(clouds, packed, sigma, rows, DEFAULT)
    return aggregated.to(features.dtype).view(*query_points.shape[:-1], features.shape[-1])


def radius_aggregate(
    query_points: Float[Tensor, "*batch q 3"],
    reference_points: Float[Tensor, "*batch n 3"],
    features: Float[Tensor, "*batch n c"],
    radius: float,
    *,
    sigma: float | Float[Tensor, ""] = 0.1,
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
    query_points : (..., Q, 3) float tensor
        As for :func:`knn`.
    reference_points : (..., N, 3) float tensor
        As for :func:`knn`.
    features : (..., N, C) float tensor
        As for :func:`knn_aggregate`.
    radius : float
        Cut-off in the units of the points, positive; it has no gradient.
    sigma : float or float tensor of one element
        As for :func:`knn_aggregate`.
    index : Index, optional
        As for :func:`knn`.
    backend : str
        As for :func:`knn`.
    query_offsets : (B + 1,) integer tensor, optional
        As for :func:`knn`.
    reference_offsets : (B + 1,) integer tensor, optional
        As for :func:`knn`.

    Returns
    -------
    (..., Q, C) float tensor
        As for :func:`knn_aggregate`; a query without neighbours gets 0 and contributes no gradient.

    Raises
    ------
    TypeError, ValueError, BackendUnavailable
        As for :func:`knn`.
    """
    clouds = _checked_clouds(query_points, reference_points, query_offsets, reference_offsets)
    arguments.check_radius(radius)
    arguments.check_features(features, reference_points)
    arguments.check_sigma(sigma, query_points)
    module, tables = choose_backend(backend, float(radius), index, reference_points, clouds)
    packed, sigma = _packed_features(features, query_points.dtype, sigma)
    aggregated = module.radius_aggregate(clouds, tables, packed, sigma, float(radius), DEFAULT)
    return aggregated.to(features.dtype).view(*query_points.shape[:-1], features.shape[-1])


def _checked_clouds(
    query_points: Tensor,
    reference_points: Tensor,
    query_offsets: Tensor | None,
    reference_offsets: Tensor | None,
) -> Clouds:
    arguments.check_points(query_points, reference_points)
    arguments.check_offsets(query_offsets, reference_offsets, query_points, reference_points)
    return pack(query_points, reference_points, query_offsets, reference_offsets)


def _packed_features(
    features: Tensor, positions: torch.dtype, sigma: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Features and sigma in the dtype that sums run in: the widest of fp32, features and positions."""
    dtype = torch.promote_types(torch.promote_types(features.dtype, positions), torch.float32)
    if isinstance(sigma, Tensor):
        sigma = sigma.reshape(()).to(dtype)
    else:  # filled on the device: a copy from the host would wait for it
        sigma = torch.full((), sigma, dtype=dtype, device=features.device)
    return features.reshape(-1, features.shape[-1]).to(dtype).contiguous(), sigma


def _first_rows(reference_points: Tensor) -> Tensor:
    """Where each cloud of a dense batch begins among the packed points: (B, 1, 1)."""
    batch, size = reference_points.shape[:2]
    return torch.arange(batch, device=reference_points.device)[:, None, None] * size


def _packed_rows(neighbor_indices: Tensor, reference_points: Tensor) -> Tensor:
    """The inverse of what :func:`knn` does to rows: (Q, k) int32 rows of the packed points, -1 for none."""
    size = reference_points.shape[-2]
    exists = (neighbor_indices >= 0) & (neighbor_indices < size)
    if reference_points.ndim == 3:
        neighbor_indices = neighbor_indices + _first_rows(reference_points)
    rows = torch.where(exists, neighbor_indices, -1).to(torch.int32)
    return rows.reshape(-1, rows.shape[-1]).contiguous()


def _distances(query_points: Tensor, reference_points: Tensor, rows: Tensor) -> Tensor:
    exists = rows >= 0
    delta = query_points[:, None] - reference_points[rows.clamp(min=0)]
    distances = torch.where(exists, length(torch.where(exists[..., None], delta, 0.0)), torch.inf)
    return nan_where_query_is_not_finite(distances, query_points)
