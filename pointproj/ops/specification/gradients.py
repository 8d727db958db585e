"""The aggregation over chunks of pairs in bounded memory, and its derivatives, which autograd makes.

Kernels write the first backward out. With the logits l_ij = log K(d_ij), d_ij = |p_i - q_j|, their
derivatives l_d and l_sigma, unit vectors n_ij = (p_i - q_j) / d_ij (0 where d_ij = 0) and softmax weights
a_ij over the neighbours of i, it is, of out_i = sum_j a_ij f_j for an upstream gradient g_i,

    c_ij = g_i . f_j                 s_ij = a_ij (c_ij - sum_k a_ik c_ik)        (gradient of the logit)
    d f_j = sum_i a_ij g_i           d p_i = sum_j s_ij l_d n_ij
    d q_j = -sum_i s_ij l_d n_ij     d sigma = sum_ij s_ij l_sigma

For ``reduce="sum"`` the weights are a_ij = K(d_ij), and the sum over k, which comes from the division by the
total weight, is 0. For ``"weighted"`` the total is over the neighbours with a reference weight, and the sum
over k is left out for the others, whose f_j is 0. Neighbour sets are constants.

The second backward differentiates the sum of all first gradients times directions p', q', f' and sigma'.
Rates are derivatives along these: l'_ij = l_d n_ij . (p'_i - q'_j) + l_sigma sigma', and c'_ij = g_i . f'_j.
With the means over the neighbours C_i of c_ij and L_i of l'_ij, and
T_i = sum_j a_ij (c'_ij + (l'_ij - L_i) (c_ij - C_i)),

    d g_i = sum_j a_ij (f'_j + (l'_ij - L_i) f_j)        d f_j = sum_i a_ij (l'_ij - L_i) g_i
    t_ij = a_ij (c'_ij + (l'_ij - L_i) (c_ij - C_i) - T_i)   (gradient of the logit; s_ij is that of its rate)

and those of points and sigma follow from t_ij and s_ij by the chain rule. For ``reduce="sum"`` C, L and T are
0.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pointproj.ops.specification.clouds import rows_of
from pointproj.ops.specification.records import OptionalTensors, Saved, Tensors, record_of
from pointproj.ops.specification.reference import (
    Weighting,
    nan_where_query_is_not_finite,
    normalized,
    relative_weights,
)
from pointproj.ops.torch_internals import recording

DIFFERENTIABLE = ("query_points", "reference_points", "features", "sigma")


class Chunk(NamedTuple):
    """Some of the queries, the reference points they may meet, and which of these are neighbours.

    Candidates of row i are the reference points ``indices[i]``, or without indices all of them.
    """

    query: slice
    reference: slice
    is_neighbor: Tensor  # (m, K) of indices, else (m, n)
    indices: Tensor | None = None  # (m, K), in range also where is_neighbor is false

    def parts(self, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Views of the rows that belong to the chunk, of one value for each differentiable input."""
        query_points, reference_points, features, sigma = values
        return query_points[self.query], reference_points[self.reference], features[self.reference], sigma

    def rows_of(self, per_reference: Tensor) -> Tensor:
        """(m, K, C) of indices, else (1, n, C)"""
        return per_reference[None] if self.indices is None else rows_of(per_reference, self.indices)

    def sums(self, weights: Tensor, features: Tensor) -> Tensor:
        if self.indices is not None:
            terms = weights[..., None] * self.rows_of(features)
            return torch.where(self.is_neighbor[..., None], terms, 0.0).sum(1)
        # A matrix product would spread the NaN of one reference point to rows it is no neighbour of.
        finite = features.isfinite()
        has_such_neighbor = self.is_neighbor.to(weights.dtype) @ (~finite).to(weights.dtype) > 0
        sums = weights @ torch.where(finite, features, 0.0)
        return sums + torch.where(has_such_neighbor, torch.nan, 0.0)


Chunks = Callable[[dict[str, Any]], Iterator[Chunk]]  # from an operator's inputs


def aggregate_chunk(
    chunk: Chunk,
    weighting: Weighting,
    query_points: Tensor,
    reference_points: Tensor,
    features: Tensor,
    sigma: Tensor,
) -> Tensor:
    """Aggregated features (m, C) of the parts that belong to one chunk."""
    delta = (query_points[:, None] - chunk.rows_of(reference_points)).to(sigma.dtype)
    counts = is_neighbor = chunk.is_neighbor
    if weighting.reduce == "weighted":
        counts = is_neighbor & (chunk.rows_of(features[:, -1:]) != 0)[..., 0]
    weights = relative_weights(delta, is_neighbor, counts, sigma, weighting)
    return chunk.sums(weights if weighting.reduce == "sum" else normalized(weights, counts), features)


def aggregate(inputs: dict[str, Any], chunks: Chunks) -> Tensor:
    """Forward over all chunks: (Q, C); 0 without neighbours, NaN where the query is not finite."""
    query_points, features = inputs["query_points"], inputs["features"]
    aggregated = features.new_zeros(len(query_points), features.shape[1])
    with _exact_products(features):
        for chunk, function, values in _functions(inputs, chunks):
            aggregated[chunk.query] = function(*values)
    return nan_where_query_is_not_finite(aggregated, query_points)


def aggregate_backward(
    grads: Tensors, needs: dict[str, bool], saved: Saved, chunks: Chunks
) -> OptionalTensors:
    """Gradients of all differentiable inputs, None where not needed."""
    inputs = saved.inputs
    made = [torch.zeros_like(inputs[name]) for name in DIFFERENTIABLE]
    needed = [needs[name] for name in DIFFERENTIABLE]
    grad = _zero_where_query_is_not_finite(grads[0], inputs)
    with _exact_products(grad):
        for chunk, function, values in _functions(inputs, chunks):
            own = first_gradients(function, values, grad[chunk.query], needed)
            _add(own, chunk.parts(made))
    return tuple(m if need else None for m, need in zip(made, needed, strict=True))


def aggregate_second_backward(directions: Tensors, grads: Tensors, saved: Saved, chunks: Chunks) -> Tensors:
    """Gradients of sum(direction * gradient) for the upstream one and all differentiable inputs."""
    inputs = saved.inputs
    made = [torch.zeros_like(v) for v in (grads[0], *(inputs[name] for name in DIFFERENTIABLE))]
    grad = _zero_where_query_is_not_finite(grads[0], inputs)
    with _exact_products(grad):
        for chunk, function, values in _functions(inputs, chunks):
            own = second_gradients(function, values, grad[chunk.query], chunk.parts(directions))
            _add(own, [made[0][chunk.query], *chunk.parts(made[1:])])
    return (_zero_where_query_is_not_finite(made[0], inputs), *made[1:])


def first_gradients(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], grad: Tensor, needs: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Gradients of a function's inputs for the upstream ``grad``, None where not needed or always 0."""
    with recording():
        leaves = [v.detach().requires_grad_(need) for v, need in zip(inputs, needs, strict=True)]
        result = function(*leaves)
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        made = torch.autograd.grad(result, wanted, grad, allow_unused=True) if result.requires_grad else ()
    found = iter(made)
    return tuple(next(found, None) if need else None for need in needs)


def second_gradients(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], grad: Tensor, directions: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Gradients of sum(direction * gradient) for the upstream ``grad`` of a function, then for its inputs."""
    with recording():
        grad, *leaves = (v.detach().requires_grad_() for v in (grad, *inputs))
        settings = {"create_graph": True, "materialize_grads": True}
        firsts = torch.autograd.grad(function(*leaves), leaves, grad, **settings)
        total = sum((first * along).sum() for first, along in zip(firsts, directions, strict=True))
        return torch.autograd.grad(total, [grad, *leaves], materialize_grads=True)


def fill_second_backward(values: dict[str, Any], chunks: Chunks) -> None:
    """:func:`aggregate_second_backward` for a launcher, whose arguments ``values`` hold by name."""
    directions = tuple(values[f"direction_{name}"] for name in DIFFERENTIABLE)
    made = aggregate_second_backward(directions, (values["grad_aggregated"],), Saved(values, ()), chunks)
    for name, gradient in zip(("grad_aggregated", *DIFFERENTIABLE), made, strict=True):
        values[f"d_{name}"].copy_(gradient)


def _functions(
    inputs: dict[str, Any], chunks: Chunks
) -> Iterator[tuple[Chunk, Callable[..., Tensor], tuple[Tensor, ...]]]:
    """The chunks, with each one's function of the differentiable inputs, and their values."""
    weighting, values = record_of(Weighting, inputs), [inputs[name] for name in DIFFERENTIABLE]
    for chunk in chunks(inputs):
        yield chunk, partial(aggregate_chunk, chunk, weighting), chunk.parts(values)


def _add(values: Sequence[Tensor | None], into: Sequence[Tensor]) -> None:
    for total, value in zip(into, values, strict=True):
        if value is not None:
            total += value


@contextlib.contextmanager
def _exact_products(like: Tensor) -> Iterator[None]:
    """Matrix products with every bit of the operands: what makes layers fast must not round weights."""
    switches = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    before = [switch.fp32_precision for switch in switches]
    try:
        for switch in switches:
            switch.fp32_precision = "ieee"
        with torch.autocast(like.device.type, enabled=False):
            yield
    finally:
        for switch, precision in zip(switches, before, strict=True):
            switch.fp32_precision = precision


def _zero_where_query_is_not_finite(per_query: Tensor, inputs: dict[str, Any]) -> Tensor:
    # Such a row is NaN whatever the inputs: it must not send NaN into anybody's gradient.
    return torch.where(inputs["query_points"].isfinite().all(-1, keepdim=True), per_query, 0.0)
