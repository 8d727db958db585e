"""Aggregation over neighbour lists with any weights, also learned ones."""

import torch
from jaxtyping import Float
from torch import Tensor

from pointproj.ops import arguments
from pointproj.ops.backends.torch.listed_pairs import ListedPairs
from pointproj.ops.neighbor_lists import NeighborList, Neighbors, packed_rows
from pointproj.ops.registry import choose, modules
from pointproj.ops.specification.reference import (
    FINITE_SUPPORT,
    Weighting,
    masked_features,
    sigma_in_range,
)
from pointproj.ops.torch_internals import filled, is_known

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
        As for :func:`pointproj.knn`, one of ``"native"`` and ``"torch"``; on a GPU both sum as the latter.

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
    arguments.check_neighbors(neighbors, (Neighbors, NeighborList), features)
    arguments.check_pair_weights(weights, neighbors.indices, features)
    of_sums = arguments.sum_dtype(features.dtype, neighbors.distances.dtype)
    weighting = arguments.checked_weighting(Weighting(kernel, reduce, power, eps), REDUCTIONS, of_sums)
    arguments.check_sigma(sigma, neighbors.indices, of_sums)
    arguments.check_reference_weights(reference_weights, features)
    clouds = features.shape[:-2]
    count = features.shape[:-1].numel()
    module = modules[choose(backend, features.device.type, "aggregate")]
    pairs = ListedPairs(*packed_rows(neighbors, features, missing=count), count, module.weighted_sums)
    dtype = torch.promote_types(features.dtype, torch.float32)
    if weights is not None or reduce != "max":
        dtype = torch.promote_types(dtype, (neighbors.distances if weights is None else weights).dtype)
    values = masked_features(features, reference_weights).flatten(0, -2).to(dtype)
    own = None
    if reference_weights is not None:
        own = pairs.gathered(reference_weights.reshape(-1, 1).to(dtype))
    if weights is not None:
        channels = weights.shape[-1] if weights.ndim > neighbors.indices.ndim else 1
        weights = torch.where(pairs.exists, weights.to(dtype).reshape(*pairs.rows.shape, channels), 0.0)
    elif reduce != "max":
        if isinstance(sigma, Tensor):
            sigma = sigma_in_range(sigma.reshape(()).to(dtype))
        if not is_known(eps):
            weighting = weighting._replace(eps=filled((), weighting.eps, dtype, features.device))
        if kernel in FINITE_SUPPORT:
            weighting = weighting._replace(support=_support(neighbors, pairs, kernel))
        weights = pairs.kernel_weights(neighbors.distances.to(dtype), sigma, weighting, own)
    if own is not None:
        weights = own if weights is None else weights * own
    if reduce == "max":
        values = pairs.gathered(values)
        aggregated = pairs.largest(values if weights is None else values * weights)
    else:
        aggregated = pairs.weighted(values, pairs.normalized(weights) if reduce == "mean" else weights)
    if isinstance(neighbors, Neighbors):
        shape = neighbors.indices.shape[:-1]
    else:
        shape = *clouds, pairs.queries // max(1, clouds.numel())
    return aggregated.view(*shape, features.shape[-1]).to(features.dtype)


def _support(neighbors: Neighbors | NeighborList, pairs: ListedPairs, kernel: str) -> float | Tensor:
    """The radius at each pair."""
    if neighbors.radius is None:
        raise ValueError(
            f'kernel="{kernel}" ends at the radius of the list, which it does not have: make it with '
            "radius_neighbors, or give Neighbors(..., radius=)"
        )
    if isinstance(neighbors.radius, Tensor):
        return pairs.of_pairs(neighbors.radius.reshape(-1, 1))
    return neighbors.radius
