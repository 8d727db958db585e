"""What a call must return: neighbours in the points' dtype, everything else from all pairs at once.

Derivatives are those of torch's autograd. Nothing but the squared distances, which decide who is whose
neighbour, comes from the package.
"""

import itertools
import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pointproj.ops.specification import reference
from pointproj.ops.specification.reference import FINITE_SUPPORT, Weighting
from tests.differential.draw import NAMES, OF_FEATURES, Call
from tests.oracle import log_kernel


class ExpectedPairs(NamedTuple):
    """Who is whose neighbour, in packed rows."""

    query: Tensor  # (P,)
    reference: Tensor  # (P,)
    slots: Tensor  # (P,) where each stands in the (flattened) lists
    lists: Tensor  # (Q, K) or (capacity,) rows, -1 where there is none
    counts: Tensor  # (Q,) of all within the radius
    at_end: Tensor  # (P,) no nearer than the radius, to the last bit


@torch.no_grad()
def find_pairs(call: Call) -> ExpectedPairs:
    """The neighbours of a call."""
    squared = _squared_distances(call)
    within = torch.ones_like(squared, dtype=torch.bool)
    at_end = ~within
    if call.radius is not None:
        radii = torch.as_tensor(call.radius, dtype=squared.dtype).reshape(-1, 1)
        distances = torch.from_numpy(np.sqrt(squared.numpy()))  # torch's root may be off by a bit
        within = distances <= radii
        features = call.leaves.get("features", squared).dtype
        if call.operator == "aggregate" or torch.promote_types(features, squared.dtype) == squared.dtype:
            at_end = distances >= radii  # else weights are of distances with more bits
    within &= squared.isfinite()
    counts = within.sum(1)
    if call.form == "csr":
        rows = within.nonzero()
        size = _capacity(call, len(rows))
        lists = torch.nn.functional.pad(rows[:size, 1], (0, max(0, size - len(rows))), value=-1)
        query, found = rows[:size].T
        return ExpectedPairs(query, found, torch.arange(len(query)), lists, counts, at_end[query, found])
    squared, order = squared.masked_fill(~within, torch.inf).sort(dim=1, stable=True)
    order = torch.where(squared.isfinite(), order, -1)[:, : call.k]
    lists = torch.nn.functional.pad(order, (0, call.k - order.shape[1]), value=-1)
    if call.rows in ("holes", "shuffled"):
        rng = np.random.default_rng([call.seed, call.number, 2])
        lists = torch.where(torch.from_numpy(rng.random(lists.shape) < 0.3), -1, lists)
        if call.rows == "shuffled":
            lists = lists.gather(1, torch.from_numpy(rng.random(lists.shape)).argsort(1))
    query, column = (lists >= 0).nonzero(as_tuple=True)
    found = lists[query, column]
    return ExpectedPairs(query, found, query * call.k + column, lists, counts, at_end[query, found])


def _capacity(call: Call, pairs: int) -> int:
    if call.operator == "radius_aggregate":
        return pairs
    return {"none": pairs, "exact": pairs, "more": pairs + 5, "fewer": pairs // 2}[call.capacity]


def _squared_distances(call: Call) -> Tensor:
    """(Q, N) of all clouds, inf for two points of different clouds or not finite."""
    query, points = (in_space(call.leaves[n]) for n in NAMES)
    dtype = torch.float64 if call.box else query.dtype  # exact in either, as they were drawn
    squared = torch.full((len(query), len(points)), torch.inf, dtype=dtype)
    starts = call.ends()
    for (q0, q1), (r0, r1) in zip(*(itertools.pairwise(s) for s in starts), strict=True):
        if call.box:
            delta = minimum_image(query[q0:q1, None].double() - points[r0:r1].double(), call.box)
            block = delta.square().sum(-1)
        else:
            block = reference.squared_distances(query[q0:q1], points[r0:r1])
        squared[q0:q1, r0:r1] = block
    return squared.nan_to_num(nan=torch.inf, posinf=torch.inf)


def in_space(points: Tensor) -> Tensor:
    """Packed points with three coordinates."""
    points = points.reshape(-1, points.shape[-1])
    return torch.nn.functional.pad(points, (0, 3 - points.shape[-1]))


def minimum_image(delta: Tensor, box: tuple[float, ...]) -> Tensor:
    """Differences to the nearest copy."""
    lengths = torch.tensor(box, dtype=delta.dtype)
    lengths = torch.nn.functional.pad(lengths, (0, delta.shape[-1] - len(box)), value=torch.inf)
    turns = (delta.detach() / lengths).round()
    return delta - torch.where(lengths.isfinite(), lengths * turns, 0.0)


class Formula:
    """A call's values from its leaves, in their dtypes; with noise, after errors of rounding in each step.

    ``noise`` is the seed of the errors, their size, and the least positive number that weights have.
    """

    def __init__(
        self, call: Call, pairs: ExpectedPairs, noise: tuple[int, float, float] | None = None
    ) -> None:
        self.call, self.pairs = call, pairs
        self.noise = noise
        self.generator = torch.Generator().manual_seed(noise[0]) if noise else None

    def rounded(self, values: Tensor) -> Tensor:
        if self.noise is None:
            return values
        return values * (1 + self.noise[1] * self.errors(values))

    def errors(self, values: Tensor) -> Tensor:
        """From -1 to 1: one of each number, or one for all, since those of equal numbers add up."""
        shape = values.shape if self.noise[0] % 2 == 0 else ()
        return torch.rand(shape, generator=self.generator, dtype=torch.float64) * 2 - 1

    def __call__(self, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
        """The differentiable outputs by name: distances and displacements, or what is aggregated."""
        query, points = (leaves[n].reshape(-1, leaves[n].shape[-1]) for n in NAMES)
        delta = query[self.pairs.query] - points[self.pairs.reference]
        if self.call.box:
            delta = minimum_image(delta, self.call.box)
        delta = self.rounded(delta)
        if self.call.operator in OF_FEATURES:
            aggregated = self.aggregated(delta, leaves)
            if self.call.operator != "aggregate":
                aggregated = torch.where(query.isfinite().all(1, keepdim=True), aggregated, torch.nan)
            shape = *leaves["query_points"].shape[:-1], aggregated.shape[1]
            return {"aggregated": aggregated.view(shape).to(leaves["features"].dtype)}
        outputs = {"distances": self.slots_of(self.length(delta)[:, None]).squeeze(1)}
        if self.call.operator != "knn":
            outputs["displacements"] = self.slots_of(delta)
        return outputs

    def slots_of(self, values: Tensor) -> Tensor:
        """Values of the pairs in the slots of the lists, 0 where there is no pair."""
        slots = self.pairs.lists.numel()
        return values.new_zeros(slots, values.shape[1]).index_add(0, self.pairs.slots, values)

    def length(self, delta: Tensor) -> Tensor:
        squared = delta.square().sum(-1)
        apart = squared > 0
        return self.rounded(torch.where(apart, torch.where(apart, squared, 1.0).sqrt(), 0.0))

    def aggregated(self, delta: Tensor, leaves: dict[str, Tensor]) -> Tensor:
        features = leaves["features"].reshape(-1, leaves["features"].shape[-1])
        own = leaves.get("reference_weights")
        if own is not None:  # what has the weight 0 has no influence
            features = features.masked_fill((own.reshape(-1, 1) == 0) & ~features.isfinite(), 0.0)
        plain = self.call.reduce == "max"  # no kernel unless there are weights
        dtype = torch.promote_types(features.dtype, torch.float32)
        if not plain:
            dtype = torch.promote_types(dtype, delta.dtype)
        values = features[self.pairs.reference].to(dtype)
        own = values.new_ones(1, 1) if own is None else own.reshape(-1, 1)[self.pairs.reference].to(dtype)
        if plain:
            return self.largest(self.rounded(values * own))
        sigma = leaves.get("sigma", self.call.sigma)
        sigma = sigma.to(dtype) if isinstance(sigma, Tensor) else sigma
        logits = self.log_kernel(self.length(delta.to(dtype)), sigma)[:, None]
        if self.call.reduce == "sum":
            return self.summed(self.rounded(self.weights(logits, own) * values))
        counting = torch.where(own != 0, logits.detach(), -torch.inf)
        logits = logits - self.most(counting)[self.pairs.query]
        logits = logits.clamp(max=math.log(torch.finfo(dtype).max) - 8)  # of those that do not count
        summed = self.summed(self.rounded(self.weights(logits, own) * values))
        total = self.summed(self.weights(logits, own))
        return torch.where(total != 0, summed / torch.where(total != 0, total, 1.0), 0.0)

    def weights(self, logits: Tensor, own: Tensor) -> Tensor:
        """Errors are in the logarithms: those of factors would cancel in a mean."""
        if self.noise is not None:
            size = torch.where(own == 0, 1.0, own.abs())
            own = own * size ** (self.rounded(torch.ones_like(logits)) - 1)
            kernel = logits.detach().exp()  # near the least number, that is the unit of its rounding
            own = own * (1 + self.noise[2] * self.errors(kernel) / kernel.clamp(min=self.noise[2]))
        return self.rounded(logits).exp() * own

    def log_kernel(self, distances: Tensor, sigma: float | Tensor) -> Tensor:
        call, support = self.call, self.call.radius
        if isinstance(support, Tensor):
            support = support.reshape(-1)[self.pairs.query].to(distances.dtype)
        weighting = Weighting(call.kernel, power=call.power, eps=call.eps, support=support)
        logits = log_kernel(distances, sigma, weighting)
        return logits.masked_fill(self.pairs.at_end, -torch.inf) if call.kernel in FINITE_SUPPORT else logits

    def summed(self, terms: Tensor) -> Tensor:
        """Sums over the pairs of each query."""
        return terms.new_zeros(len(self.pairs.counts), terms.shape[1]).index_add(0, self.pairs.query, terms)

    def most(self, terms: Tensor) -> Tensor:
        """The largest of each query's pairs, 0 where that is not finite."""
        at = self.pairs.query[:, None].expand_as(terms)
        most = terms.new_full((len(self.pairs.counts), terms.shape[1]), -torch.inf)
        most = most.scatter_reduce(0, at, terms, "amax")
        return torch.where(most.isfinite(), most, 0.0)

    def largest(self, terms: Tensor) -> Tensor:
        """The same, differentiable: equal ones share the gradient."""
        chosen = terms.detach() == self.most(terms.detach())[self.pairs.query]
        count = self.summed(chosen.to(terms.dtype)).clamp(min=1.0)
        return self.summed(torch.where(chosen, terms, 0.0)) / count
