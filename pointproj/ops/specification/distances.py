"""Distances of neighbours that were searched, to the last bit as a search must return them."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pointproj.ops.specification.clouds import Clouds, queries_of, rows_of
from pointproj.ops.specification.periodic import PeriodicBox
from pointproj.ops.specification.reference import length, nan_where_query_is_not_finite, rounded_length


class IndexedPairs(NamedTuple):
    """Pairs (Q, k) of all queries, or (M,) of a list."""

    queries: Tensor | None  # (M,) of a list
    rows: Tensor  # in range also where there is no neighbour
    box: PeriodicBox | None
    apart: Tensor | None = None  # (..., 1): pairs with a gradient: neighbours at a distance above 0

    def differences(self, query_points: Tensor, reference_points: Tensor) -> Float[Tensor, "*pairs 3"]:
        """Query point minus the nearest copy of the reference point."""
        own = query_points[:, None] if self.queries is None else rows_of(query_points, self.queries)
        delta = own - rows_of(reference_points, self.rows)
        return delta if self.box is None else self.box.minimum_image(delta)

    def lengths(self, query_points: Tensor, reference_points: Tensor) -> Float[Tensor, "*pairs"]:
        """Lengths of the differences; 0 for pairs without a gradient."""
        return length(torch.where(self.apart, self.differences(query_points, reference_points), 0.0))


def differences(
    clouds: Clouds,
    rows: Int[Tensor, "*pairs"],
    row_splits: Int[Tensor, " q+1"] | None = None,
    box: PeriodicBox | None = None,
) -> Float[Tensor, "*pairs 3"]:
    """Differences of pairs, of any two points where the row is -1.

    Rows are (Q, k), or with ``row_splits`` (M,), those of query i from ``row_splits[i]`` on.
    """
    queries = None if row_splits is None else queries_of(row_splits, rows.shape[0])
    pairs = IndexedPairs(queries, rows.clamp(min=0), box)
    return pairs.differences(clouds.query_points, clouds.reference_points)


def distances_of(
    clouds: Clouds,
    rows: Int[Tensor, "*pairs"],
    row_splits: Int[Tensor, " q+1"] | None = None,
    box: PeriodicBox | None = None,
) -> Float[Tensor, "*pairs"]:
    """Distances to packed rows, rounded as the reference does; inf for row -1, NaN for a query not finite."""
    distances = rounded_length(differences(clouds, rows, row_splits, box)).masked_fill(rows < 0, torch.inf)
    if row_splits is not None:  # of a query that is not finite there are none
        return distances
    return nan_where_query_is_not_finite(distances, clouds.query_points)
