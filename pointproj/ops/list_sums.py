"""Aggregation over neighbour lists with any weights, also learned ones, in plain torch."""

import torch
from jaxtyping import Float
from torch import Tensor

from pointproj.ops import arguments
from pointproj.ops.clouds import as_dtype, queries_of, rows_in_packed, rows_of, spread
from pointproj.ops.neighbor_lists import NeighborList, Neighbors
from pointproj.ops.reference import Weighting, counted_features, kernel_weights, sigma_in_range
from pointproj.ops.weighted_sums import weighted_sums

REDUCTIONS = ("mean", "sum", "max")
SPARE = 256  # rows for what has no neighbour (a power of two): a GPU adds to one place after the other


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

    Returns
    -------
    (Q, C) or (B, Q, C) float tensor
        In the features' dtype; 0 for a query without neighbours. Differentiable twice in features, weights,
        sigma, reference weights, and through the distances in both sets of points.

    Raises
    ------
    TypeError, ValueError
        For arguments of wrong type, shape, dtype or device, or the compact kernel without a radius.
    """
    arguments.check_neighbors(neighbors, (Neighbors, NeighborList), features)
    arguments.check_pair_weights(weights, neighbors.indices, features)
    sums = arguments.sum_dtype(features.dtype, neighbors.distances.dtype)
    weighting = arguments.checked_weighting(Weighting(kernel, reduce, power, eps), REDUCTIONS, sums)
    arguments.check_sigma(sigma, neighbors.indices, sums)
    arguments.check_reference_weights(reference_weights, features)
    clouds = features.shape[:-2]
    count = features.shape[:-1].numel()
    pairs = Pairs(*packed_rows(neighbors, features, missing=count), count)
    dtype = torch.promote_types(features.dtype, torch.float32)
    if weights is not None or reduce != "max":
        dtype = torch.promote_types(dtype, (neighbors.distances if weights is None else weights).dtype)
    values = counted_features(features, reference_weights).flatten(0, -2).to(dtype)
    own = None
    if reference_weights is not None:
        own = pairs.gathered(reference_weights.reshape(-1, 1).to(dtype))
    if weights is not None:
        channels = weights.shape[-1] if weights.ndim > neighbors.indices.ndim else 1
        weights = torch.where(pairs.exists, weights.to(dtype).reshape(*pairs.rows.shape, channels), 0.0)
    elif reduce != "max":
        if isinstance(sigma, Tensor):
            sigma = sigma_in_range(sigma.reshape(()).to(dtype))
        if kernel == "compact":
            weighting = weighting._replace(support=_support(neighbors, pairs))
        weights = pairs.kernel_weights(neighbors.distances.to(dtype), sigma, weighting, own)
    if own is not None:
        weights = own if weights is None else weights * own
    if reduce == "max":
        values = pairs.gathered(values)
        aggregated = pairs.largest(values if weights is None else values * weights)
    else:
        aggregated = pairs.weighted(values, weights)
        if reduce == "mean":
            total = pairs.summed(weights)
            aggregated = torch.where(total != 0, aggregated / torch.where(total != 0, total, 1.0), 0.0)
    if isinstance(neighbors, Neighbors):
        shape = neighbors.indices.shape[:-1]
    else:
        shape = *clouds, pairs.queries // max(1, clouds.numel())
    return aggregated.view(*shape, features.shape[-1]).to(features.dtype)


def _support(neighbors: Neighbors | NeighborList, pairs: "Pairs") -> float | Tensor:
    """The radius at each pair."""
    if neighbors.radius is None:
        raise ValueError(
            'kernel="compact" ends at the radius of the list, which it does not have: make it with '
            "radius_neighbors, or give Neighbors(..., radius=)"
        )
    if isinstance(neighbors.radius, Tensor):
        return pairs.of_pairs(neighbors.radius.reshape(-1))
    return neighbors.radius


def packed_rows(
    neighbors: Neighbors | NeighborList, points: Tensor, missing: int
) -> tuple[Tensor, Tensor | None]:
    """Rows (Q, K), or (M,) and their row splits, of packed points; ``missing`` where there is no pair."""
    splits = None if isinstance(neighbors, Neighbors) else neighbors.row_splits
    rows = neighbors.indices
    if missing != -1 or points.shape[:-2].numel() > 1:  # others are what lists have
        rows = rows_in_packed(rows, points, splits, missing)
    return as_dtype(rows if splits is not None else rows.flatten(0, -2), torch.int64), splits


class Pairs:
    """Pairs of queries and reference points: ``rows`` of these, ``missing`` where there is no pair.

    In padded lists, (Q, K), a query's pairs are a row of their own; else, (M,), they follow one another.
    """

    def __init__(self, rows: Tensor, row_splits: Tensor | None, missing: int) -> None:
        self.rows, self.row_splits = rows, row_splits
        self.exists = (rows < missing)[..., None]
        self.queries = (rows if row_splits is None else row_splits[1:]).shape[0]
        if row_splits is not None:
            # Unused slots add nothing to any query.
            query = queries_of(row_splits, len(rows))
            self.query = spread(query, self.exists[:, 0], self.queries)

    def of_pairs(self, numbers: Tensor) -> Tensor:
        """Numbers (Q,) of each pair's query: (..., 1)."""
        if self.row_splits is None:
            return numbers.view(-1, 1, 1)
        return rows_of(numbers[:, None], self.query)

    def summed(self, terms: Tensor) -> Tensor:
        """Sums over each query's pairs: (Q, C)."""
        if self.row_splits is None:
            return terms.sum(1)
        if terms.shape[-1] == 1:
            none = self.exists[:, 0].logical_not().long()
            return weighted_sums(terms.new_ones(1, 1), terms[:, 0], none, self.row_splits)
        into = terms.new_zeros(max(1, self.queries), terms.shape[1])
        return into.index_add(0, self.query, terms)[: self.queries]

    def largest(self, terms: Tensor) -> Tensor:
        """The largest of each query's pairs, 0 without one: (Q, C)."""
        largest = self.extreme("amax", torch.where(self.exists, terms, -torch.inf))
        has_pairs = self.extreme("amax", self.exists.to(terms.dtype)) > 0
        return torch.where(has_pairs, largest, 0.0)

    def extreme(self, reduce: str, terms: Tensor) -> Tensor:
        """The largest ("amax") or least ("amin") of each query's slots, -inf or inf without one: (Q, C)."""
        none = -torch.inf if reduce == "amax" else torch.inf
        if self.row_splits is None:
            return getattr(terms, reduce)(1) if terms.shape[1] else terms.sum(1) + none
        into = terms.new_full((max(1, self.queries), terms.shape[1]), none)
        return into.scatter_reduce(0, self.query[:, None].expand_as(terms), terms, reduce)[: self.queries]

    def gathered(self, values: Tensor) -> Tensor:
        """Values (N, C) of each pair's reference point, 0 without one: (..., C)."""
        padded = torch.nn.functional.pad(values, (0, 0, 0, SPARE))  # rows of zeros, behind the others
        rows, count = self.rows, values.shape[0]
        if rows.is_cuda:
            numbers = torch.arange(rows.numel(), device=rows.device).view(rows.shape)
            rows = torch.where(rows < count, rows, count + (numbers & (SPARE - 1)))
        return rows_of(padded, rows)

    def kernel_weights(
        self, distances: Tensor, sigma: float | Tensor, weighting: Weighting, own: Tensor | None
    ) -> Tensor:
        """Weights (..., 1), for a mean relative to that of each query's nearest whose own weight is not 0."""
        distances, nearest = torch.where(self.exists, distances.reshape(self.exists.shape), 0.0), None
        if weighting.reduce == "mean":
            counts = self.exists if own is None else self.exists & (own != 0)
            known = torch.where(counts, distances.detach(), torch.inf)
            # inf, of queries without neighbours, cannot be subtracted
            nearest = self.of_pairs(self.extreme("amin", known).nan_to_num(nan=0.0, posinf=0.0)[:, 0])
        return kernel_weights(distances, self.exists, nearest, sigma, weighting)

    def weighted(self, values: Tensor, weights: Tensor) -> Tensor:
        """Sums of values (N, C) over each query's pairs: (Q, C)."""
        if weights.shape[-1] == 1:
            return weighted_sums(values, weights[..., 0], self.rows, self.row_splits)
        return self.summed(self.gathered(values) * weights)
