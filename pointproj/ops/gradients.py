"""The aggregation and its first and second derivatives, written out for a block of pairs.

With the logits l_ij = log K(d_ij), d_ij = |p_i - q_j|, their derivatives l_d and l_sigma, unit vectors
n_ij = (p_i - q_j) / d_ij (0 where d_ij = 0) and softmax weights a_ij over the neighbours of i, the first
backward of out_i = sum_j a_ij f_j for an upstream gradient g_i is

    c_ij = g_i . f_j                 s_ij = a_ij (c_ij - sum_k a_ik c_ik)        (gradient of the logit)
    d f_j = sum_i a_ij g_i           d p_i = sum_j s_ij l_d n_ij
    d q_j = -sum_i s_ij l_d n_ij     d sigma = sum_ij s_ij l_sigma

The second backward differentiates <those four, (U, u, v, t)>. That scalar is the directional derivative of
<g, out> along features U and logits h_ij = l_d (u_i - v_j) . n_ij + t l_sigma, hence

    d g_i = sum_j a_ij (U_j + (h_ij - H_i) f_j),   H_i = sum_j a_ij h_ij
    d f_j = sum_i a_ij (h_ij - H_i) g_i
    d l_ij = a_ij (t_ij - sum_k a_ik t_ik),  t_ij = g_i . U_j + (c_ij - sum_k a_ik c_ik) (h_ij - H_i)
    d h_ij = s_ij

and l and h pass theirs on to p, q and sigma. For ``reduce="sum"`` the weights are a_ij = K(d_ij), and every
sum over k above, which comes from the division by the total weight, is 0. For ``"counted"`` that total, and
with it H_i, is of the neighbours that count. Of the others f_j is 0, and what the division brings is left
out. Neighbour sets are constants.
The same formulas serve neighbour lists (kNN) and dense blocks with a mask (radius): only how features are
found differs.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pointproj.ops.reference import (
    DEFAULT,
    Slopes,
    Weighting,
    kernel_weights,
    log_kernel_slopes,
    nan_where_query_is_not_finite,
    nearest_of,
    normalized,
)

DIFFERENTIABLE = ("query_points", "reference_points", "features", "sigma")


class Gradients(NamedTuple):
    """Gradients, or directions, one for each differentiable input."""

    query_points: Tensor  # (Q, 3)
    reference_points: Tensor  # (N, 3)
    features: Tensor  # (N, C)
    sigma: Tensor  # ()


@dataclass
class ListedNeighbors:
    """Row i's neighbours are ``indices[i]``: features are gathered by row."""

    indices: Tensor  # (m, K), in range also where is_neighbor is false
    is_neighbor: Tensor  # (m, K)

    def rows_of(self, per_reference: Tensor) -> Tensor:
        return per_reference[self.indices]  # (m, K, C)

    def dot(self, per_query: Tensor, per_reference: Tensor) -> Tensor:
        products = (per_query[:, None] * self.rows_of(per_reference)).sum(-1)
        return torch.where(self.is_neighbor, products, 0.0)

    def mean(self, weights: Tensor, per_reference: Tensor) -> Tensor:
        terms = weights[..., None] * self.rows_of(per_reference)
        return torch.where(self.is_neighbor[..., None], terms, 0.0).sum(1)

    def scatter(self, into: Tensor, weights: Tensor, per_query: Tensor) -> None:
        self.scatter_pairs(into, weights[..., None] * per_query[:, None])

    def scatter_pairs(self, into: Tensor, per_pair: Tensor) -> None:
        into.index_add_(0, self.indices.flatten(), per_pair.flatten(0, 1))


@dataclass
class MaskedNeighbors:
    """Every reference point is a candidate for every row; ``is_neighbor`` says which count."""

    is_neighbor: Tensor  # (m, N)

    def rows_of(self, per_reference: Tensor) -> Tensor:
        return per_reference[None]  # (1, N, C)

    def dot(self, per_query: Tensor, per_reference: Tensor) -> Tensor:
        return torch.where(self.is_neighbor, _product(per_query, per_reference.T), 0.0)

    def mean(self, weights: Tensor, per_reference: Tensor) -> Tensor:
        # A matrix product would spread the NaN of one reference point to rows it is no neighbour of.
        finite = per_reference.isfinite()
        sums = _product(weights, torch.where(finite, per_reference, 0.0))
        has_such_neighbor = _product(self.is_neighbor.to(weights.dtype), (~finite).to(weights.dtype)) > 0
        return torch.where(has_such_neighbor, torch.nan, sums)

    def scatter(self, into: Tensor, weights: Tensor, per_query: Tensor) -> None:
        into += _product(weights.T, per_query)

    def scatter_pairs(self, into: Tensor, per_pair: Tensor) -> None:
        into += per_pair.sum(0)


Neighbors = ListedNeighbors | MaskedNeighbors


def _product(left: Tensor, right: Tensor) -> Tensor:
    """The matrix product with every bit of the operands: what makes layers fast must not round weights."""
    if torch.compiler.is_compiling():  # into a program that has its own switches
        return left @ right
    switches = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    before = [switch.fp32_precision for switch in switches]
    try:
        for switch in switches:
            switch.fp32_precision = "ieee"
        with torch.autocast(left.device.type, enabled=False):
            return left @ right
    finally:
        for switch, precision in zip(switches, before, strict=True):
            switch.fp32_precision = precision


def _share(grad_logits: Tensor, derivative: Tensor | float) -> Tensor:
    """The product, 0 where the logit has no gradient, even if its derivative overflows."""
    return torch.where(grad_logits != 0, grad_logits * derivative, 0.0)


class Block:
    """Weights and geometry of one chunk of queries against their neighbours."""

    def __init__(
        self,
        query_points: Tensor,
        reference_points: Tensor,
        features: Tensor,
        sigma: Tensor,
        neighbors: Neighbors,
        weighting: Weighting = DEFAULT,
    ):
        self.neighbors = neighbors
        self.sigma = sigma
        self.weighting = weighting
        is_neighbor = neighbors.is_neighbor
        delta = query_points[:, None] - neighbors.rows_of(reference_points)
        delta = torch.where(is_neighbor[..., None], delta, 0.0).to(sigma.dtype)
        self.distances = delta.square().sum(-1).sqrt()
        self.units = delta / torch.where(self.distances > 0, self.distances, 1.0)[..., None]
        self.counts = is_neighbor
        if weighting.reduce == "counted":
            self.counts = is_neighbor & (neighbors.rows_of(features[:, -1:]) != 0)[..., 0]
        self.nearest = None if weighting.reduce == "sum" else nearest_of(self.distances, self.counts)
        self.weights = kernel_weights(self.distances, is_neighbor, self.nearest, sigma, weighting)
        if weighting.reduce != "sum":
            self.weights = normalized(self.weights, self.counts)

    def slopes(self) -> Slopes:
        nearest = 0.0 if self.nearest is None else self.nearest
        return log_kernel_slopes(self.distances, self.sigma, self.weighting, nearest)

    def centred(self, per_pair: Tensor) -> Tensor:
        """Less the mean of the row, which the division by the total weight brings; a sum is not divided."""
        if self.weighting.reduce == "sum":
            return per_pair
        mean = (self.weights * per_pair).sum(-1, keepdim=True)
        return torch.where(self.counts, per_pair - mean, per_pair)

    def of_neighbors(self, per_pair: Tensor) -> Tensor:
        """0 for all other pairs, also where the row's own neighbours have made them NaN."""
        return torch.where(self.neighbors.is_neighbor, per_pair, 0.0)

    def forward(self, features: Tensor) -> Tensor:
        return self.neighbors.mean(self.weights, features)

    def backward(self, grad: Tensor, features: Tensor, into: Gradients) -> Tensor:
        """Add this block's share to ``into`` (all but the query points); return the queries' own rows."""
        products = self.neighbors.dot(grad, features)
        grad_logits = self.of_neighbors(self.weights * self.centred(products))
        slopes = self.slopes()
        along = _share(grad_logits, slopes.by_d)[..., None] * self.units
        self.neighbors.scatter(into.features, self.weights, grad)
        self.neighbors.scatter_pairs(into.reference_points, -along)
        into.sigma.add_(_share(grad_logits, slopes.by_sigma).sum())
        return along.sum(1)

    def second_backward(
        self, grad: Tensor, features: Tensor, query_direction: Tensor, direction: Gradients, into: Gradients
    ) -> tuple[Tensor, Tensor]:
        """Add this block's share to ``into``; return the rows of the gradient and of the query points."""
        units, distances, weights, slopes = self.units, self.distances, self.weights, self.slopes()
        relative = query_direction[:, None] - self.neighbors.rows_of(direction.reference_points)
        relative = torch.where(self.neighbors.is_neighbor[..., None], relative, 0.0)
        radial = (relative * units).sum(-1)
        h = slopes.by_d * radial + direction.sigma * slopes.by_sigma
        if self.weighting.reduce != "sum":
            h = h - (torch.where(self.counts, self.weights, 0.0) * h).sum(-1, keepdim=True)

        grad_rows = self.neighbors.mean(weights, direction.features)
        grad_rows = grad_rows + self.neighbors.mean(weights * h, features)
        self.neighbors.scatter(into.features, weights * h, grad)

        products = self.centred(self.neighbors.dot(grad, features))
        t = self.neighbors.dot(grad, direction.features) + products * h
        grad_logits = self.of_neighbors(weights * self.centred(t))
        grad_h = self.of_neighbors(weights * products)

        inverse = torch.where(distances > 0, 1.0 / torch.where(distances > 0, distances, 1.0), 0.0)
        across = (relative - radial[..., None] * units) * inverse[..., None]
        through_h = grad_h * (slopes.by_d_d * radial + slopes.by_d_sigma * direction.sigma)
        grad_delta = (grad_logits * slopes.by_d + through_h)[..., None] * units
        grad_delta = grad_delta + (grad_h * slopes.by_d)[..., None] * across
        self.neighbors.scatter_pairs(into.reference_points, -grad_delta)
        through_h = grad_h * (slopes.by_d_sigma * radial + slopes.by_sigma_sigma * direction.sigma)
        into.sigma.add_((grad_logits * slopes.by_sigma + through_h).sum())
        return grad_rows, grad_delta.sum(1)


class Chunk(NamedTuple):
    """Some of the queries, the reference points they may meet, and what holds between them."""

    query: slice
    reference: slice
    block: Block


Chunks = Callable[[dict[str, Any]], Iterator[Chunk]]  # from an operator's inputs


def aggregate(inputs: dict[str, Any], chunks: Chunks) -> Tensor:
    """Forward over all chunks: (Q, C); 0 without neighbours, NaN where the query is not finite."""
    query_points, features = inputs["query_points"], inputs["features"]
    aggregated = features.new_zeros(len(query_points), features.shape[1])
    for query, reference, block in chunks(inputs):
        aggregated[query] = block.forward(features[reference])
    return nan_where_query_is_not_finite(aggregated, query_points)


def aggregate_backward(
    grad: Tensor, needs: dict[str, bool], inputs: dict[str, Any], chunks: Chunks
) -> tuple[Tensor | None, ...]:
    """Gradients of all differentiable inputs, None where not needed."""
    into = _zeros(inputs)
    grad = _zero_where_query_is_not_finite(grad, inputs)
    for query, reference, block in chunks(inputs):
        rows = block.backward(grad[query], inputs["features"][reference], _rows(into, reference))
        into.query_points[query] = rows
    made = _in_dtype_of(inputs, into)
    return tuple(g if needs[n] else None for n, g in zip(DIFFERENTIABLE, made, strict=True))


def aggregate_second_backward(
    directions: tuple[Tensor, ...], grad: Tensor, inputs: dict[str, Any], chunks: Chunks
) -> tuple[Tensor, ...]:
    """Gradients of sum(direction * gradient) for ``grad`` and all differentiable inputs."""
    direction = Gradients(*(d.to(inputs["sigma"].dtype) for d in directions))
    into, grad_rows = _zeros(inputs), torch.zeros_like(grad)
    grad = _zero_where_query_is_not_finite(grad, inputs)
    for query, reference, block in chunks(inputs):
        grad_rows[query], into.query_points[query] = block.second_backward(
            grad[query],
            inputs["features"][reference],
            direction.query_points[query],
            _rows(direction, reference),
            _rows(into, reference),
        )
    return (_zero_where_query_is_not_finite(grad_rows, inputs), *_in_dtype_of(inputs, into))


def backward_over(chunks: Chunks) -> Callable[..., tuple[Tensor | None, ...]]:
    """:func:`aggregate_backward` as :func:`pointproj.ops.bridge.torch_op.torch_op` calls it."""
    return lambda grads, needs, saved: aggregate_backward(grads[0], needs, saved.inputs, chunks)


def second_backward_over(chunks: Chunks) -> Callable[..., tuple[Tensor, ...]]:
    """:func:`aggregate_second_backward` as :func:`pointproj.ops.bridge.torch_op.torch_op` calls it."""
    return lambda directions, grads, saved: aggregate_second_backward(
        directions, grads[0], saved.inputs, chunks
    )


def fill_second_backward(values: dict[str, Any], chunks: Chunks) -> None:
    """:func:`aggregate_second_backward` for a launcher, whose arguments ``values`` hold by name."""
    directions = tuple(values[f"direction_{name}"] for name in DIFFERENTIABLE)
    made = aggregate_second_backward(directions, values["grad_aggregated"], values, chunks)
    for name, gradient in zip(("grad_aggregated", *DIFFERENTIABLE), made, strict=True):
        values[f"d_{name}"].copy_(gradient)


def _zeros(inputs: dict[str, Any]) -> Gradients:
    dtype = inputs["sigma"].dtype  # sums run in fp32 or wider, whatever the positions are
    return Gradients(*(torch.zeros_like(inputs[n], dtype=dtype) for n in DIFFERENTIABLE))


def _rows(gradients: Gradients, reference: slice) -> Gradients:
    """Views of the rows that belong to a chunk's reference points."""
    return gradients._replace(
        reference_points=gradients.reference_points[reference], features=gradients.features[reference]
    )


def _in_dtype_of(inputs: dict[str, Any], gradients: Gradients) -> Gradients:
    return Gradients(*(g.to(inputs[n].dtype) for n, g in zip(DIFFERENTIABLE, gradients, strict=True)))


def _zero_where_query_is_not_finite(per_query: Tensor, inputs: dict[str, Any]) -> Tensor:
    # Such a row is NaN whatever the inputs: it must not send NaN into anybody's gradient.
    return torch.where(inputs["query_points"].isfinite().all(-1, keepdim=True), per_query, 0.0)
