"""Aggregation over neighbour lists with any weights, also learned ones."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from pointproj.ops import arguments
from pointproj.ops.backends.torch.listed_pairs import ListedPairs
from pointproj.ops.calls import scalar
from pointproj.ops.layers import check_neighbors, check_one_a_pair
from pointproj.ops.neighbor_lists import NeighborList, Neighbors, packed_rows
from pointproj.ops.registry import Backend, choose, modules
from pointproj.ops.specification.clouds import as_dtype
from pointproj.ops.specification.reference import (
    FINITE_SUPPORT,
    Weighting,
    masked_features,
    sigma_in_range,
)
from pointproj.ops.torch_internals import filled, is_known, is_transforming

REDUCTIONS = ("mean", "sum", "max")


def aggregate(
    features: Float[Tensor, "*batch n c"],
    neighbors: Neighbors | NeighborList,
    *,
    weights: Float[Tensor, "*pairs"] | None = None,
    kernel: str = "exponential",
    sigma: float | Float[Tensor, ""] = 0.1,
    power: float = 2.0,
    eps: float = 1e-8,
    reduce: str = "mean",
    reference_weights: Float[Tensor, "*batch n"] | None = None,
    backend: str = "auto",
) -> Float[Tensor, "*batch q c"]:
    """Aggregate features over neighbour lists, with the weights of a kernel or with given ones.

    ``out_i = sum_j w_ij f_j / sum_j w_ij`` over the neighbours j of query i that are in the list. Maxima and
    weights of each channel gather the features of all pairs, in memory of their size; one weight a pair
    gathers some of them at a time.

    Parameters
    ----------
    features : (N, C) or (B, N, C) float tensor
        Of the reference points that were searched, packed ones for ragged batches. float16, bfloat16, float32
        or float64; sums run in float32 or wider.
    neighbors : Neighbors or NeighborList
        From :func:`pointproj.radius_neighbors`; or ``Neighbors(indices, distances)`` with what
        :func:`pointproj.knn` gives, the other way round.
    weights : float tensor, optional
        Of each pair, in the shape of ``neighbors.indices``, or with one more axis for one weight a channel
        (or 1 for all channels). In slots without a neighbour they are not used. None: of the kernel.
    kernel, sigma, power, eps
        As for :func:`pointproj.knn_aggregate`, of the list's distances; ``"compact"`` ends at its radius.
    reduce : {"mean", "sum", "max"}
        ``"mean"`` divides by the sum of the weights (0 where that is 0). ``"max"`` takes the largest
        ``w_ij f_j`` of each channel, of the features themselves if no weights are given.
    reference_weights : (..., N) float tensor, optional
        Multiply the weights, for instance areas of mesh cells.
    backend : str
        As for :func:`pointproj.knn`, one of ``"native"`` and ``"torch"``. Weights of a kernel
        are made in one of ``"native"`` unless distances, sigma or reference weights need a gradient.

    Returns
    -------
    (Q, C) or (B, Q, C) float tensor
        In the features' dtype; 0 for a query without neighbours. Differentiable twice in features, weights,
        sigma, reference weights, and through the distances in both sets of points.

    Raises
    ------
    TypeError, ValueError
        For arguments of wrong type, shape, dtype or device, or the compact kernel without a radius.
    BackendUnavailable
        If ``backend`` names one that cannot run here.
    """
    check_neighbors(neighbors, (Neighbors, NeighborList), features)
    distances = neighbors.distances
    check_one_a_pair("neighbors.distances", distances, neighbors.indices)
    arguments.check_pair_weights(weights, neighbors.indices, features)
    of_sums = arguments.sum_dtype(features.dtype, distances.dtype)
    weighting = arguments.checked_weighting(Weighting(kernel, reduce, power, eps), REDUCTIONS, of_sums)
    arguments.check_sigma(sigma, neighbors.indices, of_sums)
    arguments.check_reference_weights(reference_weights, features)
    clouds = features.shape[:-2]
    count = math.prod(features.shape[:-1])
    module = modules[choose(backend, features.device.type, "aggregate")]
    dtype = torch.promote_types(features.dtype, torch.float32)
    if weights is not None or reduce != "max":
        dtype = torch.promote_types(dtype, (neighbors.distances if weights is None else weights).dtype)
    values = masked_features(features, reference_weights).flatten(0, -2).to(dtype)
    if isinstance(sigma, Tensor):
        sigma = sigma_in_range(sigma.reshape(()).to(dtype))
    aggregated = None
    if weights is None and reduce != "max":
        if kernel in FINITE_SUPPORT:
            weighting = weighting._replace(support=_support(neighbors, kernel))
        aggregated = _by_kernels(module, features, neighbors, values, sigma, weighting, reference_weights)
    if aggregated is None:
        pairs = ListedPairs(*packed_rows(neighbors, features, missing=count), count, module.weighted_sums)
        aggregated = _by_torch(pairs, neighbors, values, weights, sigma, weighting, reference_weights)
    if isinstance(neighbors, Neighbors):
        shape = neighbors.indices.shape[:-1]
    else:
        shape = *clouds, aggregated.shape[0] // max(1, math.prod(clouds))
    return aggregated.view(*shape, features.shape[-1]).to(features.dtype)


def _by_kernels(
    module: Backend,
    features: Tensor,
    neighbors: Neighbors | NeighborList,
    values: Tensor,
    sigma: float | Tensor,
    weighting: Weighting,
    reference_weights: Tensor | None,
) -> Tensor | None:
    """The sums in the backend's kernels; None if it has none for these weights, or they need a gradient."""
    of_weights = [t for t in (neighbors.distances, sigma, reference_weights) if isinstance(t, Tensor)]
    differentiates = torch.is_grad_enabled() and any(t.requires_grad for t in of_weights)
    if (
        module.list_weights is None
        or isinstance(weighting.support, Tensor)
        or differentiates
        or is_transforming()
    ):
        return None
    lists = packed_rows(neighbors, features, missing=-1)
    distances = as_dtype(neighbors.distances.reshape(lists[0].shape), values.dtype)
    if reference_weights is not None:
        reference_weights = as_dtype(reference_weights.flatten(), values.dtype).contiguous()
        if weighting.reduce == "mean":
            weighting = weighting._replace(reduce="weighted")
    if not isinstance(sigma, Tensor):
        sigma = scalar(sigma, values.dtype, values.device)
    weights = module.list_weights(distances, *lists, values.shape[0], reference_weights, sigma, weighting)
    return module.weighted_sums(values, weights, *lists)


def _by_torch(
    pairs: ListedPairs,
    neighbors: Neighbors | NeighborList,
    values: Tensor,
    weights: Tensor | None,
    sigma: float | Tensor,
    weighting: Weighting,
    reference_weights: Tensor | None,
) -> Tensor:
    """The same with weights that torch differentiates, and the largest terms."""
    own, reduce = None, weighting.reduce
    if reference_weights is not None:
        own = pairs.gathered(reference_weights.reshape(-1, 1).to(values.dtype))
    if weights is not None:
        channels = weights.shape[-1] if weights.ndim > neighbors.indices.ndim else 1
        weights = weights.to(values.dtype).reshape(*pairs.rows.shape, channels)
        weights = torch.where(pairs.exists, weights, 0.0)
    elif reduce != "max":
        if not is_known(weighting.eps):
            weighting = weighting._replace(eps=filled((), weighting.eps, values.dtype, values.device))
        if isinstance(weighting.support, Tensor):
            weighting = weighting._replace(support=pairs.of_pairs(weighting.support.reshape(-1, 1)))
        weights = pairs.kernel_weights(neighbors.distances.to(values.dtype), sigma, weighting, own)
    if own is not None:
        weights = own if weights is None else weights * own
    if reduce == "max":
        values = pairs.gathered(values)
        return pairs.largest(values if weights is None else values * weights)
    return pairs.weighted(values, pairs.normalized(weights) if reduce == "mean" else weights)


def _support(neighbors: Neighbors | NeighborList, kernel: str) -> float | Tensor:
    """The radius of the list, one or one of each query."""
    if neighbors.radius is None:
        raise ValueError(
            f'kernel="{kernel}" ends at the radius of the list, which it does not have: make it with '
            "radius_neighbors, or give Neighbors(..., radius=)"
        )
    return neighbors.radius
