"""The error of lists of neighbours, of any library, against :mod:`pointproj.ops.reference`."""

import torch
from torch import Tensor

import pointproj
from pointproj.benchmark.list_peers import Pairs, Question
from pointproj.benchmark.parity import relative_error
from pointproj.ops import reference

CHECKED = {"cuda": 512, "cpu": 64}  # queries that are compared with the reference
BOUNDARY = (
    1e-5  # pairs whose distance differs from the radius by less than this part of it may be found or not
)
WRONG = float("inf")


class ExpectedPairs:
    """The distances in fp64 from some of the queries to all reference points.

    Parameters
    ----------
    asked : Question
        On any device.
    """

    def __init__(self, asked: Question) -> None:
        queries, points = asked.query_points, asked.reference_points
        self.within_itself = queries is points
        self.queries = len(queries)
        generator = torch.Generator().manual_seed(1)
        some = torch.randperm(self.queries, generator=generator)[: CHECKED[queries.device.type]]
        self.rows = some.sort().values.to(queries.device)
        self.distances = reference.squared_distances(queries[self.rows].double(), points.double()).sqrt()

    def error(
        self,
        found: Pairs,
        *,
        radius: float,
        most: int | None,
        nearest: bool = True,
        itself: bool = True,
    ) -> float:
        """The largest error of a distance, relative to the radius.

        Distances that were returned are compared with those of the indices, and if the nearest had to be
        found, distances of the indices with those of the nearest. Otherwise any within the radius will do.

        Parameters
        ----------
        found : Pairs
            Of all queries.
        radius : float
        most : int or None
            The most neighbours that were asked for; None: all within the radius.
        nearest : bool
            Whether they had to be the nearest.
        itself : bool
            Whether a point that is searched within its own cloud counts as its neighbour.

        Returns
        -------
        float
            inf if a query has too many or too few neighbours, one that does not exist, or one twice, or if
            its count is wrong.
        """
        exact = self._exact(itself)
        fewest, largest = ((exact <= radius * (1 + sign * BOUNDARY)).sum(1) for sign in (-1, 1))
        if found.counts is not None and _outside(found.counts[self.rows], fewest, largest):
            return WRONG
        place = torch.full((self.queries,), -1, device=exact.device)
        place[self.rows] = torch.arange(len(self.rows), device=exact.device)
        row = place[found.queries]
        checked = row >= 0
        row, index = row[checked], found.indices[checked]
        if ((index < 0) | (index >= exact.shape[1])).any():
            return WRONG
        if most is not None:
            fewest, largest = fewest.clamp(max=most), largest.clamp(max=most)
        repeated = len(index) - len((row * exact.shape[1] + index).unique())
        if repeated or _outside(row.bincount(minlength=len(self.rows)), fewest, largest):
            return WRONG
        got = exact[row, index]
        errors = [(got - radius).clamp(min=0.0)]
        if found.distances is not None:
            errors.append((found.distances[checked].double() - got).abs())
        if nearest and most is not None:
            errors.append(_from_nearest(row, got, exact.topk(most, largest=False).values))
        worst = torch.cat(errors) / radius
        return worst.nan_to_num(nan=WRONG).max().item() if len(worst) else 0.0

    def _exact(self, itself: bool) -> Tensor:
        if itself or not self.within_itself:
            return self.distances
        without = self.distances.clone()
        without[torch.arange(len(self.rows), device=without.device), self.rows] = torch.inf
        return without


def _outside(counts: Tensor, fewest: Tensor, largest: Tensor) -> bool:
    return bool(((counts < fewest) | (counts > largest)).any())


def _from_nearest(row: Tensor, got: Tensor, kth: Tensor) -> Tensor:
    """How far each distance is from that of as near a neighbour; rows in ascending order."""
    by_distance = got.argsort()
    order = by_distance[row[by_distance].argsort(stable=True)]
    row, got = row[order], got[order]
    starts = torch.searchsorted(row, row)
    return (got - kth[row, torch.arange(len(row), device=row.device) - starts]).abs()


class ExpectedSums:
    """What the reference makes of the features of the same neighbours, and the features' gradient.

    Parameters
    ----------
    asked : Question
    features : (N, C) tensor
        Requires a gradient.
    upstream : (Q, C) tensor
        Of the result; here that of the other queries counts as 0.
    rows : (M,) int64 tensor
        The queries that are compared.
    sigma : float
    """

    def __init__(
        self, asked: Question, features: Tensor, upstream: Tensor, rows: Tensor, sigma: float
    ) -> None:
        self.asked, self.features, self.rows, self.sigma = asked, features, rows, sigma
        self.upstream = torch.zeros_like(upstream)
        self.upstream[rows] = upstream[rows]

    def error(self, mode: str, values: Tensor, gradient: Tensor) -> float:
        """The larger relative error in norm, of values and of the gradient for :attr:`upstream`."""
        asked = self.asked
        given = asked.query_points[self.rows], asked.reference_points, self.features
        with_torch = {"sigma": self.sigma, "backend": "torch"}
        if mode == "aggregate_padded":
            expected = pointproj.knn_aggregate(*given, asked.k, max_radius=asked.radius, **with_torch)
        else:
            expected = pointproj.radius_aggregate(*given, asked.radius, **with_torch)
        (exact,) = torch.autograd.grad(expected, self.features, self.upstream[self.rows])
        return max(relative_error(values[self.rows], expected), relative_error(gradient, exact))
