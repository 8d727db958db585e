"""Runs one call on a backend and compares everything that it returns with the formula."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

import pointproj
from pointproj import NeighborList, Neighbors
from pointproj.ops.registry import load
from tests.differential.draw import NAMES, Call, laid_out
from tests.differential.truth import ExpectedPairs, Formula, find_pairs
from tests.oracle import all_derivatives, assert_close

ROUNDINGS = 4  # units in the last place that each step of a formula with noise is off, at most
# The derivative of a mean by a weight is f / total - mean / total. Each term comes from an exponential (2
# units), two products, a sum, a quotient and the upstream gradient (half a unit each or more): where both are
# equal, some 8 units of one are left. Plain torch in float32 needs as many: of 5,186 weighted calls three
# differ with 4 units, two with 6, none with 8.
WEIGHTED_ROUNDINGS = 8
NOISY = 6  # formulas with errors of rounding, where one in plain torch has been lucky
Outputs = dict[str, Tensor]


@dataclass
class Expected:
    """What a call must return, and how well plain torch does it."""

    call: Call
    pairs: ExpectedPairs
    upstream: list[Tensor]
    directions: dict[str, Tensor]
    exact: Outputs
    plain: Outputs
    noisy: list[Outputs] = field(default_factory=list)

    @classmethod
    def of(cls, call: Call) -> "Expected":
        pairs = find_pairs(call)
        rng = call.generator()
        outputs = Formula(call, pairs)(call.leaves)
        kinds = rng.choice(["contiguous", "transposed", "strided", "expanded"], len(outputs))
        upstream = [
            laid_out(torch.from_numpy(rng.normal(size=tuple(value.shape))).to(value.dtype), kind)
            for value, kind in zip(outputs.values(), kinds, strict=True)
        ]
        directions = {
            n: torch.from_numpy(np.asarray(rng.normal(size=tuple(t.shape)))).to(t.dtype)
            for n, t in call.leaves.items()
        }
        made = cls(call, pairs, upstream, directions, {}, {})
        made.exact = made.derived(Formula(call, pairs), double=True)
        made.plain = made.derived(Formula(call, pairs))
        return made

    def derived(self, function: Callable, *, double: bool = False, device: str = "cpu") -> Outputs:
        given = self.call.leaves, self.upstream, self.directions
        made = all_derivatives(function, *given, double=double, device=device)
        return {n: t.cpu() for n, t in made.items()}

    def with_noise(self) -> list[Outputs]:
        """The same after errors of rounding in each step, of the narrowest dtype that it may run in."""
        if not self.noisy:
            narrow = [t.dtype for n, t in self.call.leaves.items() if n != "features"]
            if self.call.reduce == "max":  # of the features themselves, whatever the points are
                narrow.append(torch.float32)
            weighted = "reference_weights" in self.call.leaves
            limits = max((torch.finfo(d) for d in narrow), key=lambda of: of.eps)
            size = (WEIGHTED_ROUNDINGS if weighted else ROUNDINGS) * limits.eps
            for seed in range(NOISY):
                formula = Formula(self.call, self.pairs, (seed, size, limits.smallest_normal * limits.eps))
                self.noisy.append(self.derived(formula, double=True))
        return self.noisy


class Runner:
    """One call on a backend and device; lists are compared where they are made."""

    def __init__(self, expected: Expected, backend: str, device: str) -> None:
        self.call, self.pairs = expected.call, expected.pairs
        self.device = device
        self.options: dict = {"backend": backend}
        if self.call.offsets:
            names = "query_offsets", "reference_offsets"
            self.options |= {n: o.to(device) for n, o in zip(names, self.call.offsets, strict=True)}
        self.lists_differ: list[str] = []

    def __call__(self, leaves: dict[str, Tensor]) -> Outputs:
        call, points = self.call, [leaves[n] for n in NAMES]
        options = dict(self.options)
        if call.index_radius is not ...:
            made = {n: o for n, o in options.items() if n != "query_offsets"}
            options["index"] = pointproj.build_index(points[1].detach(), radius=call.index_radius, **made)
        if call.operator == "knn_aggregate":
            options |= self.weighting(leaves) | {"max_radius": call.radius}
            if call.rows:
                options["neighbor_indices"] = self.given_rows()
            return {"aggregated": pointproj.knn_aggregate(*points, leaves["features"], call.k, **options)}
        if call.operator == "radius_aggregate":
            options |= self.weighting(leaves)
            aggregated = pointproj.radius_aggregate(*points, leaves["features"], call.radius, **options)
            return {"aggregated": aggregated}
        neighbors = self.neighbors(points, options)
        if call.operator == "aggregate":
            options = self.weighting(leaves)
            if "aggregate" in load(self.options["backend"]).OPERATORS:
                options["backend"] = self.options["backend"]
            return {"aggregated": pointproj.aggregate(leaves["features"], neighbors, **options)}
        return self.compared(neighbors)

    def weighting(self, leaves: dict[str, Tensor]) -> dict:
        options = {name: getattr(self.call, name) for name in ("kernel", "reduce", "power", "eps")}
        sigma, weights = leaves.get("sigma", self.call.sigma), leaves.get("reference_weights")
        return {"sigma": sigma, "reference_weights": weights, **options}

    def given_rows(self) -> Tensor:
        query, points = (self.call.leaves[n] for n in NAMES)
        rows = self.pairs.lists.view(*query.shape[:-1], self.call.k)
        rows = in_cloud(rows, points).to(self.call.rows_dtype)
        return laid_out(rows, "transposed").to(self.device)

    def neighbors(self, points: list[Tensor], options: dict) -> Neighbors | NeighborList:
        call = self.call
        options |= {"box": call.box}
        if call.form == "nearest":
            distances, rows = pointproj.knn(*points, call.k, max_radius=call.radius, **options)
            return Neighbors(rows, distances, radius=call.radius)
        radius = call.radius.to(self.device) if isinstance(call.radius, Tensor) else call.radius
        options |= {"displacements": True}
        if call.form == "padded":
            return pointproj.radius_neighbors(*points, radius, max_neighbors=call.k, **options)
        capacity = None if call.capacity == "none" else len(self.pairs.lists)
        return pointproj.radius_neighbors(*points, radius, capacity=capacity, **options)

    def compared(self, found: Neighbors | NeighborList) -> Outputs:
        """Distances and displacements, 0 in slots without a pair, after a look at all that is exact."""
        call, pairs = self.call, self.pairs
        query, points = (call.leaves[n] for n in NAMES)
        finite = query.reshape(-1, query.shape[-1]).isfinite().all(1)
        exists = pairs.lists >= 0
        if call.form == "csr":
            ends = pairs.counts.cumsum(0)
            splits = torch.nn.functional.pad(ends, (1, 0)).clamp(max=len(pairs.lists))
            clouds = torch.zeros_like(pairs.lists)
            clouds[: len(pairs.query)] = pairs.query // max(1, query.shape[-2])
            rows = torch.where(exists, pairs.lists - clouds * points.shape[-2], -1)
            rows = rows if points.ndim == 3 else pairs.lists
            queries = torch.full_like(pairs.lists, -1)
            queries[: len(pairs.query)] = pairs.query
            self.same("row_splits", found.row_splits, splits)
            self.same("total", found.total, pairs.counts.sum())
            self.same("query_indices", found.query_indices, queries)
            absent = torch.full(exists.shape, torch.inf)
        else:
            rows = in_cloud(pairs.lists.view(*query.shape[:-1], call.k), points)
            if call.form == "padded":
                self.same("counts", found.counts, pairs.counts.clamp(max=call.k + 1).view(query.shape[:-1]))
            absent = torch.where(finite[:, None], torch.inf, torch.nan).expand(exists.shape)
        self.same("indices", found.indices, rows)
        missing = found.distances.detach().cpu().reshape(exists.shape)[~exists]
        if not torch.equal(missing.nan_to_num(nan=-1.0), absent[~exists].to(missing).nan_to_num(nan=-1.0)):
            self.lists_differ.append("distances of slots without a pair")
        exists = exists.flatten().to(self.device)
        outputs = {"distances": torch.where(exists, found.distances.flatten(), 0.0)}
        if call.operator != "knn":
            outputs["displacements"] = found.displacements.flatten(0, -2)
        return outputs

    def same(self, name: str, got: Tensor, expected: Tensor) -> None:
        got = got.cpu()
        if got.dtype != torch.int64 or not torch.equal(got, expected):
            self.lists_differ.append(name)


def in_cloud(rows: Tensor, points: Tensor) -> Tensor:
    """Packed rows of lists (..., Q, k) as rows of each cloud of a dense batch."""
    if points.ndim == 2:
        return rows
    first = torch.arange(len(points))[:, None, None] * points.shape[-2]
    return torch.where(rows >= 0, rows - first, -1)


def check(expected: Expected, backend: str, device: str = "cpu") -> list[str]:
    """Compare one call on one backend; what differs."""
    runner = Runner(expected, backend, device)
    try:
        got = expected.derived(runner, device=device)
    except Exception as error:
        return [f"{type(error).__name__}: {error}"[:300]]
    if runner.lists_differ:
        return list(dict.fromkeys(runner.lists_differ))
    missing = expected.exact.keys() - got.keys()
    differences = [f"{name}: missing" for name in missing if expected.exact[name].any()]
    known = got.keys() & expected.exact.keys()  # for others no gradient was needed
    return differences + [of for name in known if (of := _difference(name, got[name], expected))]


def _difference(name: str, got: Tensor, expected: Expected) -> str:
    """What differs of a tensor; nothing of one that plain torch cannot compute in its dtype."""
    exact, plain = expected.exact[name], expected.plain[name]
    # Rows of queries that are not finite.
    if name == "aggregated" and torch.equal(got.isnan(), exact.isnan()):
        got, exact, plain = (t.where(~exact.isnan(), 0.0) for t in (got, exact, plain))
    largest = exact.abs().amax() if exact.numel() else 0.0
    # Weights of neighbours that do not count may be as large as the dtype has numbers; second derivatives
    # have products of two of them.
    most = torch.finfo(got.dtype).max
    most = most**0.5 / 1024 if "reference_weights" in expected.call.leaves else most / 4
    if not exact.isfinite().all() or largest > most or not plain.isfinite().all():
        return ""
    try:
        assert_close(name, got, exact, plain)
        return ""
    except AssertionError as error:
        words = str(error)
    for noisy in expected.with_noise():
        try:
            assert_close(name, got, exact, noisy[name].to(got.dtype).nan_to_num(nan=0.0))
            return ""
        except AssertionError:
            continue
    return words
