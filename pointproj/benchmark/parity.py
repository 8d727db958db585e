"""The error of an implementation's result against :mod:`pointproj.ops.specification.reference`.

The reference compares all pairs, so of large problems a random part of the queries is checked. For the
features' gradient, the upstream gradient is then zero on all other queries.
"""

from collections.abc import Callable, Iterator
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

import pointproj
from pointproj.benchmark.calls import Calls, eikonal_loss
from pointproj.benchmark.config import LIST_SUMS, NETWORK
from pointproj.benchmark.implementations import FoundPairs, Implementation, Nearest
from pointproj.benchmark.peers import attention_by_einsum
from pointproj.benchmark.workloads import Inputs, Workload
from pointproj.ops.specification import reference

PAIRS = {"cuda": 2**28, "cpu": 2**23}  # that the reference compares
PAIRS_WITH_GRADIENT = {"cuda": 2**22, "cpu": 2**20}  # at once: autograd stores pairs times channels
FEWEST_QUERIES = 16
BOUNDARY = 1e-5  # relative to the radius: a list may have or lack a pair that is so close to it
WRONG = float("inf")


class Expected:
    """The reference's results on some of the queries of a workload."""

    def __init__(self, workload: Workload, inputs: Inputs) -> None:
        self.workload, self.inputs = workload, inputs
        self.query, self.points, self.features = (of.flatten(0, -2) for of in inputs.problem[:3])
        self.device = self.query.device
        ranges, generator = inputs.problem.ranges(), torch.Generator().manual_seed(1)
        budget = PAIRS[self.device.type] // len(ranges)
        fewest = FEWEST_QUERIES if len(ranges) == 1 else 1
        self.rows, self.clouds = [], [slice(own.start, own.stop) for _, own in ranges]
        for queries, own in ranges:
            order = torch.randperm(len(queries), generator=generator)
            count = max(fewest, budget // max(1, len(own)))
            self.rows.append(order[:count].sort().values + queries.start)
        self.checked = torch.cat(self.rows).to(self.device)
        self._sums = cache(self._attention if workload.operator == "attend" else self._by_reference)

    def error(self, calls: Calls, mode: str, execution: str, result: Any) -> float | None:
        """The error of what a call of this mode returned; None of an index, which its searches show."""
        implementation = calls.implementation
        if not implementation.compared or mode == "build":
            return None
        if mode in ("knn", "search"):
            return self.neighbors_error(result, check_distances=implementation.kind == "backend")
        if mode in ("padded", "csr"):
            return self.pairs_error(mode, implementation.read(result), implementation)
        if mode == "farthest":
            return self.farthest_error(result)
        if mode in NETWORK:
            step = calls.step(execution)
            prediction = result if mode == "forward" else step.forward(calls.batch)
            return self.network_error(prediction, step.model)
        if mode == "second":
            return relative_error(result.flatten(0, -2), self._second)
        return self.sums_error(mode, *((result,) if mode == "aggregate" else result))

    def neighbors_error(self, found: Nearest, *, check_distances: bool) -> float:
        """The largest error of a neighbour's distance, relative to the distance of the k-th neighbour.

        Indices may come in any order. An index that is out of range, or twice among the neighbours of one
        query, gives inf. ``check_distances`` compares the returned distances too.
        """
        k = self.inputs.k
        indices = found.indices.reshape(-1, k)[self.checked].long()
        if (indices.sort(dim=1).values.diff(dim=1) == 0).any():
            return WRONG  # one neighbour twice
        got = self._distances(indices)
        errors = [got - self._nearest]
        if check_distances:
            errors.append(found.distances.reshape(-1, k)[self.checked].double().sort(dim=1).values - got)
        relative = torch.stack(errors).abs() / self._nearest[:, -1:]
        return relative.nan_to_num(nan=WRONG, posinf=WRONG).max().item()

    @cached_property
    def _nearest(self) -> Tensor:
        """The distances of the k nearest of the checked queries."""
        k, clouds = self.inputs.k, zip(self.rows, self.clouds, strict=True)
        found = [reference.knn_search(self.query[rows], self.points[own], k) for rows, own in clouds]
        return self._distances(torch.cat(found))

    def _distances(self, indices: Tensor) -> Tensor:
        """(M, k) in fp64, nearest first, from the points themselves; inf where an index is out of range."""
        size = self.inputs.points[1].shape[-2]  # of each cloud
        first = self.checked[:, None] // self.inputs.points[0].shape[-2] * size
        exists = (indices >= 0) & (indices < size)
        neighbors = self.points[torch.where(exists, first + indices, 0)].double()
        distances = (self.query[self.checked][:, None].double() - neighbors).norm(dim=-1)
        return torch.where(exists, distances, torch.inf).sort(dim=1).values

    def pairs_error(self, mode: str, found: FoundPairs, implementation: Implementation) -> float:
        """The largest error of a distance in a list of all queries, relative to the radius.

        Returned distances are compared with those between the points. If the implementation promises the
        nearest, the distances of the listed points are compared with those of the nearest. The error is inf
        if a query has too many or too few neighbours, one that does not exist, or one twice, or a wrong
        count.
        """
        rows, radius = self.checked, self.inputs.radius
        most = self.inputs.k if mode == "padded" else None
        exact = self._pairs
        if not implementation.itself:
            own = rows[:, None] == torch.arange(exact.shape[1], device=self.device)
            exact = exact.masked_fill(own, torch.inf)
        fewest, largest = ((exact <= radius * (1 + sign * BOUNDARY)).sum(1) for sign in (-1, 1))
        if found.counts is not None:
            limits = found.counts[rows], fewest, largest
            # Counts of nearest neighbours may end at one more than the most.
            if _outside(*(limits if most is None else (limit.clamp(max=most + 1) for limit in limits))):
                return WRONG
        position = torch.full((len(self.query),), -1, device=self.device)
        position[rows] = torch.arange(len(rows), device=self.device)
        row = position[found.queries]
        checked = row >= 0
        row, index = row[checked], found.indices[checked]
        if ((index < 0) | (index >= exact.shape[1])).any():
            return WRONG
        if most is not None:
            fewest, largest = fewest.clamp(max=most), largest.clamp(max=most)
        taken = torch.zeros_like(exact, dtype=torch.bool)
        taken[row, index] = True
        got = exact[row, index]
        if int(taken.sum()) < len(got) or _outside(taken.sum(1), fewest, largest):
            return WRONG
        errors = [(got - radius).clamp(min=0.0)]
        if found.distances is not None:
            errors.append((found.distances[checked].double() - got).abs())
        if implementation.nearest and most is not None:
            chosen = exact.where(taken, torch.inf).topk(most, largest=False).values
            nearest = exact.topk(most, largest=False).values
            errors.append((chosen - nearest).abs()[chosen.isfinite()])
        worst = torch.cat(errors) / radius
        return worst.nan_to_num(nan=WRONG).max().item() if len(worst) else 0.0

    def farthest_error(self, rows: Tensor) -> float:
        """The largest 1 - d / D over all choices; ``rows`` are (count,) or (B, count) in the order chosen.

        Here d is the squared distance of the chosen point to the nearest point chosen before it, and D that
        of the farthest point. A row that is chosen twice gives 1.
        """
        points = self.query.double().view(len(self.clouds), -1, 3)
        nearest = points.new_full(points.shape[:2], torch.inf)
        worst = points.new_zeros(len(points))
        for own in rows.long().view(len(points), -1).split(1, dim=1):
            most, chosen = nearest.amax(1), nearest.gather(1, own).squeeze(1)
            worst = torch.where(most.isfinite(), torch.maximum(worst, 1 - chosen / most), worst)
            delta = points - points.gather(1, own[..., None].expand(-1, -1, 3))
            nearest = torch.minimum(nearest, delta.square().sum(-1))
        return worst.max().item()

    @cached_property
    def _pairs(self) -> Tensor:
        """Distances in fp64 from the checked queries to all reference points."""
        return reference.squared_distances(self.query[self.checked].double(), self.points.double()).sqrt_()

    def sums_error(self, mode: str, values: Tensor, *gradients: Tensor) -> float:
        """The largest error of aggregated features and of gradients, relative in norm.

        The mode decides which neighbours are summed. Gradients, for the upstream gradient of
        :meth:`fill_upstream`, are those of features, query points, reference points and sigma; of attention
        those of queries, keys and values.
        """
        exact, exact_gradients = self._sums(mode if mode in LIST_SUMS else "operator")
        errors = [relative_error(values.flatten(0, -2)[self.checked], exact)]
        for got, expected in zip(gradients, exact_gradients, strict=False):
            errors.append(relative_error(got.view(expected.shape), expected))
        return max(errors)

    def network_error(self, prediction: Tensor, model: torch.nn.Module) -> float:
        """The error of a prediction (1, Q), relative in norm, for the model's present weights."""
        rows = self.rows[0][: FEWEST_QUERIES * 16].to(self.device)
        aggregate = self._aggregate("operator")
        with torch.no_grad():
            hidden = model.reference_mlp(self.points)
            sums = aggregate(self.query[rows], self.points, hidden, self.inputs.sigma)
            return relative_error(prediction[:, rows], model.query_mlp(sums).T)

    def fill_upstream(self, upstream: Tensor, *, checked_only: bool) -> None:
        """Fill with random numbers, the same each time; if wanted, with zeros for queries not checked."""
        rows = upstream.view(-1, upstream.shape[-1])
        if checked_only:
            rows.zero_()[self.checked] = self._upstream[self.checked]
        else:
            rows.copy_(self._upstream)

    @cached_property
    def _upstream(self) -> Tensor:
        """The gradient of the loss with respect to the result, a row for each query."""
        generator, size = torch.Generator().manual_seed(2), (len(self.query), self.features.shape[1])
        return torch.randn(size, generator=generator, dtype=self.features.dtype).to(self.device)

    def _attention(self, form: str) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Values and gradients in fp64, of the checked queries."""
        rows, lists = self.checked, self.inputs.neighbors
        lists = pointproj.Neighbors(lists.indices[rows], lists.distances[rows])
        leaves = [tensor.double().requires_grad_() for tensor in self.inputs.tensors]
        query, *others = leaves
        values = attention_by_einsum(self.inputs._replace(neighbors=lists), query[rows], *others)
        return values.detach(), torch.autograd.grad(values, leaves, self._upstream[rows].double())

    def _by_reference(self, form: str) -> tuple[Tensor, list[Tensor]]:
        aggregate, values = self._aggregate(form), []
        sigma = self.query.new_tensor(self.inputs.sigma)
        tensors = self.features, self.query, self.points, sigma
        features, query, points, sigma = leaves = [of.detach().clone().requires_grad_() for of in tensors]
        for some, own in self._parts():
            value = aggregate(query[some], points[own], features[own], sigma)
            value.backward(self._upstream[some])  # adds to the gradients
            values.append(value.detach())
        return torch.cat(values), [of.grad for of in leaves]

    @cached_property
    def _second(self) -> Tensor:
        """The features' gradient, in fp64, of the eikonal loss of the checked queries."""
        aggregate, features = self._aggregate("operator"), self.features.double().requires_grad_()
        sigma = features.new_tensor(self.inputs.sigma)
        for some, own in self._parts():
            query = self.query[some].double().requires_grad_()
            values = aggregate(query, self.points[own].double(), features[own], sigma)
            eikonal_loss(values, query, self._upstream[some, 0].double()).backward()
        return features.grad

    def _parts(self) -> Iterator[tuple[Tensor, slice]]:
        """Some of the checked queries at a time, and the points of their cloud."""
        for rows, own in zip(self.rows, self.clouds, strict=True):
            pairs = PAIRS_WITH_GRADIENT[self.device.type]
            for some in rows.to(self.device).split(max(1, pairs // max(1, own.stop - own.start))):
                yield some, own

    def _aggregate(self, form: str) -> Callable[..., Tensor]:
        """(query, reference, features, sigma) to aggregated features, by the reference."""
        inputs = self.inputs
        if form == "aggregate_padded":
            nearest = {"k": inputs.k, "max_radius": inputs.radius, "backend": "torch"}
            return lambda *tensors: pointproj.knn_aggregate(*tensors[:3], **nearest, sigma=tensors[3])
        if self.workload.operator == "knn":
            return lambda *tensors: reference.knn_aggregate(*tensors[:3], inputs.k, tensors[3])
        return lambda *tensors: reference.radius_aggregate(*tensors[:3], inputs.radius, tensors[3])


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm, in fp64; NaN and inf give inf."""
    got, expected = got.detach().double(), expected.detach().double()
    if got.shape != expected.shape or not got.isfinite().all():
        return WRONG
    return ((got - expected).norm() / expected.norm().clamp(min=torch.finfo(torch.float32).tiny)).item()


def _outside(counts: Tensor, fewest: Tensor, largest: Tensor) -> bool:
    return bool(((counts < fewest) | (counts > largest)).any())
