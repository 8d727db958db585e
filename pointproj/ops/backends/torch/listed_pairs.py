"""The pairs of neighbour lists, padded or CSR, and what is gathered for them and summed over each query's."""

from collections.abc import Callable

import torch
from torch import Tensor

from pointproj.ops.backends.torch.weighted_sums import weighted_sums
from pointproj.ops.specification.clouds import distinct_rows, queries_of, rows_of
from pointproj.ops.specification.reference import Weighting, kernel_weights

SPARE = 256  # rows of zeros for missing neighbours, a power of two: a GPU adds to one row serially


class ListedPairs:
    """Pairs of queries and reference points: ``rows`` of these, ``missing`` where there is no pair.

    In padded lists, (Q, K), a query's pairs are a row of their own; else, (M,), they follow one another.
    ``sums`` is the ``weighted_sums`` of a backend, by default torch's.
    """

    def __init__(
        self,
        rows: Tensor,
        row_splits: Tensor | None,
        missing: int,
        sums: Callable[..., Tensor] | None = None,
    ) -> None:
        self.rows, self.row_splits = rows, row_splits
        self.weighted_sums = weighted_sums if sums is None else sums
        self.exists = (rows < missing)[..., None]
        self.queries = (rows if row_splits is None else row_splits[1:]).shape[0]
        if row_splits is not None:
            # What unused slots add is 0.
            query = queries_of(row_splits, len(rows))
            self.query = distinct_rows(query, self.exists[:, 0], self.queries)

    def of_pairs(self, numbers: Tensor) -> Tensor:
        """Numbers (Q, C) of each pair's query: (..., C)."""
        return numbers[:, None] if self.row_splits is None else rows_of(numbers, self.query)

    def summed(self, terms: Tensor) -> Tensor:
        """Sums over each query's pairs: (Q, C)."""
        if self.row_splits is None:
            return terms.sum(1)
        if terms.shape[-1] == 1:
            none = self.exists[:, 0].logical_not().long()
            return self.weighted_sums(terms.new_ones(1, 1), terms[:, 0], none, self.row_splits)
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

    def normalized(self, weights: Tensor) -> Tensor:
        """Weights (..., C) with the sum 1 of each query's pairs, 0 where the sum is 0."""
        total = self.summed(weights)
        divided = weights / self.of_pairs(torch.where(total != 0, total, torch.inf))
        if not divided.requires_grad:
            return divided
        one = self.summed(divided)  # as reference.normalized has it
        return divided + divided.detach() * self.of_pairs(one.detach() - one)

    def gathered(self, values: Tensor) -> Tensor:
        """Values (N, C) of each pair's reference point, 0 without one: (..., C)."""
        padded = torch.nn.functional.pad(values, (0, 0, 0, SPARE))  # rows of zeros behind the others
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
            nearest = self.of_pairs(self.extreme("amin", known).nan_to_num(nan=0.0, posinf=0.0))
        return kernel_weights(distances, self.exists, nearest, sigma, weighting)

    def weighted(self, values: Tensor, weights: Tensor) -> Tensor:
        """Sums of values (N, C) over each query's pairs: (Q, C)."""
        if weights.shape[-1] == 1:
            return self.weighted_sums(values, weights[..., 0], self.rows, self.row_splits)
        return self.summed(self.gathered(values) * weights)
