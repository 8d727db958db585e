"""The error of a contender's result against :mod:`pointproj.ops.reference`.

The reference compares all pairs, so of large problems a random part of the queries is checked. For the
features' gradient, the upstream gradient is then zero on all other queries.
"""

import torch
from torch import Tensor

from pointproj.benchmark.contenders import PeerNetwork
from pointproj.benchmark.peer import Nearest
from pointproj.benchmark.workloads import Workload
from pointproj.ops import reference
from pointproj.ops.cases import Problem

PAIRS = {"cuda": 2**28, "cpu": 2**23}
PAIRS_WITH_GRADIENT = {"cuda": 2**22, "cpu": 2**20}  # in one piece: it keeps all pairs times channels
FEWEST_QUERIES = 16


class Expected:
    """The reference's results on some of the queries of a problem.

    Parameters
    ----------
    workload : Workload
    problem : Problem
    """

    def __init__(self, workload: Workload, problem: Problem) -> None:
        self.workload = workload
        self.problem = problem
        self.device = problem.query_points.device
        ranges = problem.ranges()
        budget = PAIRS[self.device.type] // len(ranges)
        generator = torch.Generator().manual_seed(1)
        self.rows = [_some(q, max(FEWEST_QUERIES, budget // len(r)), generator) for q, r in ranges]
        self._values: Tensor | None = None
        self._nearest: Tensor | None = None

    @property
    def checked_queries(self) -> int:
        """How many queries are compared with the reference."""
        return sum(len(rows) for rows in self.rows)

    def neighbors_error(self, found: Nearest, *, check_distances: bool) -> float:
        """The largest error of a neighbour's distance, relative to the distance of the k-th neighbour.

        Parameters
        ----------
        found : Nearest
            With indices in any order. One that is out of range or twice in a row gives inf.
        check_distances : bool
            Whether the distances that were returned have to be those of the indices; other libraries return
            squared ones, or none.
        """
        indices = found.indices
        rows = self.rows[0].to(self.device)
        query, points = self.problem.query_points[rows], self.problem.reference_points
        if self._nearest is None:
            exact = reference.knn_search(query, points, self.workload.neighborhood)
            self._nearest = _distances(query, points, exact)
        expected, got = self._nearest, _distances(query, points, indices[rows].long())
        if (indices[rows].sort(dim=1).values.diff(dim=1) == 0).any():
            return float("inf")  # one neighbour twice
        errors = [(got - expected).abs() / expected[:, -1:]]
        if check_distances:
            returned = found.distances[rows].double().sort(dim=1).values
            errors.append((returned - got).abs() / expected[:, -1:])
        return torch.cat(errors).nan_to_num(nan=float("inf"), posinf=float("inf")).max().item()

    def sums_error(self, values: Tensor, *gradients: Tensor) -> float:
        """The largest error of aggregated features and of gradients, relative in norm.

        Parameters
        ----------
        values : (..., C) tensor
            Of all queries.
        *gradients : tensors
            Of the features; then of query points, reference points and sigma. For the upstream gradient of
            :meth:`fill_upstream`.
        """
        if self._values is None:
            self._values, self._gradients = self._by_reference()
        rows = torch.cat(self.rows).to(self.device)
        errors = [relative_error(values.flatten(0, -2)[rows], self._values)]
        for got, expected in zip(gradients, self._gradients, strict=False):
            errors.append(relative_error(got.view(expected.shape), expected))
        return max(errors)

    def network_error(self, prediction: Tensor, model: torch.nn.Module) -> float:
        """The error of a prediction, relative in norm.

        Parameters
        ----------
        prediction : (1, Q) tensor
        model : torch.nn.Module
            With the weights that made the prediction.
        """
        rows = self.rows[0][: FEWEST_QUERIES * 16].to(self.device)
        exact = PeerNetwork(model, lambda query, points, features: self._reference(query, points, features))
        with torch.no_grad():
            expected = exact(self.problem.query_points[rows], self.problem.reference_points[None])
        return relative_error(prediction[:, rows], expected.squeeze(-1))

    def fill_upstream(self, upstream: Tensor, *, checked_only: bool) -> None:
        """Fill with the same random numbers each time, or with zeros for queries that are not checked."""
        generator = torch.Generator().manual_seed(2)
        numbers = torch.randn(upstream.shape, generator=generator, dtype=upstream.dtype)
        if checked_only:
            keep = torch.zeros(numbers.flatten(0, -2).shape[0], 1)
            keep[torch.cat(self.rows)] = 1
            numbers *= keep.view(*numbers.shape[:-1], 1)
        upstream.copy_(numbers)

    def _by_reference(self) -> tuple[Tensor, list[Tensor]]:
        query, points, features = (tensor.flatten(0, -2) for tensor in self.problem[:3])
        upstream = torch.empty(len(query), features.shape[1], dtype=features.dtype, device=self.device)
        self.fill_upstream(upstream, checked_only=True)
        sigma = torch.tensor(self.workload.case.sigma, dtype=points.dtype, device=self.device)
        values, gradients = [], [torch.zeros_like(of) for of in (features, query, points, sigma)]
        for rows, (_, cloud) in zip(self.rows, self.problem.ranges(), strict=True):
            span = slice(cloud.start, cloud.stop)
            pairs = PAIRS_WITH_GRADIENT[self.device.type]
            for some in rows.to(self.device).split(max(1, pairs // max(1, len(cloud)))):
                places = span, some, span, ...
                parts = zip((features, query, points, sigma), places, strict=True)
                leaves = [of[place].detach().requires_grad_() for of, place in parts]
                value = self._reference(leaves[1], leaves[2], leaves[0], leaves[3])
                found = torch.autograd.grad(value, leaves, upstream[some])
                for gradient, place, part in zip(gradients, places, found, strict=True):
                    gradient[place] += part
                values.append(value.detach())
        return torch.cat(values), gradients

    def _reference(
        self, query: Tensor, points: Tensor, features: Tensor, sigma: Tensor | float | None = None
    ) -> Tensor:
        of = self.workload
        aggregate = reference.knn_aggregate if of.operator == "knn" else reference.radius_aggregate
        return aggregate(query, points, features, of.neighborhood, of.case.sigma if sigma is None else sigma)


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm, in fp64; NaN and inf give inf."""
    got, expected = got.detach().double(), expected.detach().double()
    if got.shape != expected.shape or not got.isfinite().all():
        return float("inf")
    return ((got - expected).norm() / expected.norm().clamp(min=torch.finfo(torch.float32).tiny)).item()


def _some(queries: range, count: int, generator: torch.Generator) -> Tensor:
    return torch.randperm(len(queries), generator=generator)[:count].sort().values + queries.start


def _distances(query: Tensor, points: Tensor, rows: Tensor) -> Tensor:
    """(M, k) in fp64, nearest first, from the points themselves; inf where an index is out of range."""
    exists = (rows >= 0) & (rows < len(points))
    neighbors = points[rows.clamp(0, len(points) - 1)].double()
    distances = (query[:, None].double() - neighbors).norm(dim=-1)
    return torch.where(exists, distances, torch.inf).sort(dim=1).values
