"""Distances of neighbours that were searched: what a search must return, and their derivatives.

With unit vectors n_ij = (p_i - q_j) / d_ij (0 where d_ij = 0 or there is no neighbour), the first backward of
d_ij = |p_i - q_j| for an upstream gradient g_ij is

    d p_i = sum_j g_ij n_ij          d q_j = -sum_i g_ij n_ij

and that of <both, (u, v)>, with r_ij = u_i - v_j,

    d g_ij = r_ij . n_ij             d (p_i - q_j) = g_ij (r_ij - (r_ij . n_ij) n_ij) / d_ij
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from pointproj.ops.bridge.torch_internals import is_transforming
from pointproj.ops.bridge.torch_op import OptionalTensors, Saved, Tensors, torch_op
from pointproj.ops.clouds import Clouds, queries_of
from pointproj.ops.reference import length, nan_where_query_is_not_finite, rounded_length

VALUES_AT_ONCE = 2**26  # what the differences of a chunk of neighbours may take


def distances_of(clouds: Clouds, rows: Int[Tensor, "q k"]) -> Float[Tensor, "q k"]:
    """Distances to packed rows, rounded as the reference does; inf for row -1, NaN for a query not finite."""
    delta = clouds.query_points[:, None] - clouds.reference_points[rows.clamp(min=0)]
    distances = rounded_length(delta).masked_fill(rows < 0, torch.inf)
    return nan_where_query_is_not_finite(distances, clouds.query_points)


def pair_distances(
    delta: Float[Tensor, "*pairs 3"], is_neighbor: Bool[Tensor, "*pairs"]
) -> Float[Tensor, "*pairs"]:
    """Rounded lengths of the differences of neighbours, inf for all other pairs, which get no gradient."""
    rounded = rounded_length(delta.detach())
    if delta.requires_grad or is_transforming():
        own = length(torch.where(is_neighbor[..., None], delta, 0.0))
        rounded = own + (rounded - own).detach()  # exactly, since they differ by a bit
    return torch.where(is_neighbor, rounded, torch.inf)


def with_gradient(
    distances: Float[Tensor, "*pairs"],
    rows: Int[Tensor, "*pairs"],
    clouds: Clouds,
    row_splits: Int[Tensor, " q+1"] | None = None,
) -> Float[Tensor, "*pairs"]:
    """The same distances, differentiable twice in the points if these can get a gradient.

    They are (Q, k), or with ``row_splits`` (M,), those of query i from ``row_splits[i]`` on.
    """
    points = clouds.query_points, clouds.reference_points
    needed = torch.is_grad_enabled() and any(p.requires_grad for p in points)
    return _distances(*points, distances, rows, row_splits) if needed or is_transforming() else distances


class _Chunk(NamedTuple):
    """Some pairs: (m, k) of m queries, or (m,) of a list."""

    at: slice  # of the first axis of the pairs
    queries: Tensor | None  # (m,) of a list; else those of the same slice
    indices: Tensor  # (m, k) or (m,), in range also where there is no neighbour
    apart: Tensor  # likewise: neighbours at a distance above 0, the others have no gradient
    lengths: Tensor  # likewise, 1 where not apart
    units: Tensor  # (..., 3), 0 where not apart

    def of_pairs(self, per_query: Tensor, per_reference: Tensor) -> Tensor:
        """Differences (..., 3) of values of the points, 0 where not apart."""
        own = per_query[self.at, None] if self.queries is None else per_query[self.queries]
        return torch.where(self.apart[..., None], own - per_reference[self.indices], 0.0)

    def scatter(self, per_pair: Tensor, into: tuple[Tensor, Tensor]) -> None:
        """Add gradients of the differences to the queries and the reference points."""
        if self.queries is None:
            into[0][self.at] = per_pair.sum(1)
        else:
            into[0].index_add_(0, self.queries, per_pair)
        into[1].index_add_(0, self.indices.flatten(), per_pair.flatten(0, -2), alpha=-1)


def _chunks(inputs: dict[str, Tensor]) -> Iterator[_Chunk]:
    query_points, reference_points, distances, rows, row_splits = inputs.values()
    if not (len(query_points) and len(reference_points)):
        return
    # Where there is no neighbour 0 is added: to any point, since a GPU adds to one place after the other.
    numbers = torch.arange(len(rows), device=rows.device)
    others = numbers % len(reference_points)
    if row_splits is None:
        queries, others = None, others[:, None]
    else:
        queries = torch.where(rows >= 0, queries_of(row_splits, len(rows)), numbers % len(query_points))
    size = max(1, VALUES_AT_ONCE // max(1, query_points.shape[1] * rows[:1].numel()))
    for first in range(0, len(rows), size):
        at = slice(first, first + size)
        apart = (distances[at] > 0) & (distances[at] < torch.inf)
        lengths = torch.where(apart, distances[at], 1.0)
        indices = torch.where(rows[at] >= 0, rows[at], others[at])
        chunk = _Chunk(at, None if queries is None else queries[at], indices, apart, lengths, lengths)
        delta = chunk.of_pairs(query_points, reference_points)
        yield chunk._replace(units=delta / lengths[..., None])


def _forward(
    query_points: Tensor,
    reference_points: Tensor,
    distances: Tensor,
    rows: Tensor,
    row_splits: Tensor | None,
) -> tuple[Tensor]:
    return (distances.clone(),)  # they are known; an operator does not return what it was given


def _backward(grads: Tensors, needs: dict[str, bool], saved: Saved) -> OptionalTensors:
    made = _zeros(saved)
    for chunk in _chunks(saved.inputs):
        along = torch.where(chunk.apart, grads[0][chunk.at], 0.0)[..., None] * chunk.units
        chunk.scatter(along, made)
    return tuple(m if need else None for m, need in zip(made, needs.values(), strict=True))


def _second_backward(directions: Tensors, grads: Tensors, saved: Saved) -> Tensors:
    by_grad, made = torch.zeros_like(grads[0]), _zeros(saved)
    for chunk in _chunks(saved.inputs):
        relative = chunk.of_pairs(*directions)
        radial = (relative * chunk.units).sum(-1)
        by_grad[chunk.at] = radial
        across = (relative - radial[..., None] * chunk.units) / chunk.lengths[..., None]
        chunk.scatter(torch.where(chunk.apart, grads[0][chunk.at], 0.0)[..., None] * across, made)
    return by_grad, *made


def _zeros(saved: Saved) -> tuple[Tensor, Tensor]:
    return tuple(torch.zeros_like(saved.inputs[n]) for n in ("query_points", "reference_points"))


_distances = torch_op(
    "pointproj::distances",
    _forward,
    lambda query_points, reference_points, distances, *rows: ((distances.shape, distances.dtype),),
    differentiable=("query_points", "reference_points"),
    backward=_backward,
    second_backward=_second_backward,
)
