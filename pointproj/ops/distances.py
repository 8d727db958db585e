"""Distances of neighbours that were searched: what a search must return, and their derivatives."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from pointproj.ops.bridge.torch_internals import is_transforming
from pointproj.ops.bridge.torch_op import OptionalTensors, Saved, Tensors, torch_op
from pointproj.ops.clouds import Clouds, queries_of
from pointproj.ops.gradients import second_gradients
from pointproj.ops.reference import length, nan_where_query_is_not_finite, rounded_length


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


class _Pairs(NamedTuple):
    """Pairs (Q, k) of all queries, or (M,) of a list."""

    queries: Tensor | None  # (M,) of a list
    rows: Tensor  # in range also where there is no neighbour
    apart: Tensor  # neighbours whose known distance is neither 0 nor inf: the others have no gradient

    def differences(self, query_points: Tensor, reference_points: Tensor) -> Tensor:
        """(..., 3), 0 where not apart."""
        own = query_points[:, None] if self.queries is None else query_points.index_select(0, self.queries)
        others = reference_points.index_select(0, self.rows.flatten()).view(*self.rows.shape, own.shape[-1])
        return torch.where(self.apart[..., None], own - others, 0.0)

    def lengths(self, query_points: Tensor, reference_points: Tensor) -> Tensor:
        return length(self.differences(query_points, reference_points))


def _pairs(saved: Saved) -> tuple[list[Tensor], _Pairs]:
    """Both sets of points, and the pairs."""
    *points, distances, rows, row_splits = saved.inputs.values()
    # Where there is no neighbour 0 is added: to any point, since a GPU adds to one place after the other.
    slots = torch.arange(len(rows), device=rows.device)
    queries, others = None, slots % max(1, len(points[1]))
    if row_splits is None:
        others = others[:, None]
    else:
        queries = torch.where(rows >= 0, queries_of(row_splits, len(rows)), slots % max(1, len(points[0])))
    apart = (distances > 0) & (distances < torch.inf)
    return points, _Pairs(queries, torch.where(rows >= 0, rows, others), apart)


def _forward(
    query_points: Tensor, reference_points: Tensor, distances: Tensor, rows: Tensor, row_splits: Tensor | None
) -> tuple[Tensor]:
    return (distances.clone(),)  # they are known; an operator does not return what it was given


def _backward(grads: Tensors, needs: dict[str, bool], saved: Saved) -> OptionalTensors:
    points, pairs = _pairs(saved)
    made = [torch.zeros_like(p) for p in points]
    if all(map(len, points)):
        along = torch.where(pairs.apart, grads[0] / saved.inputs["distances"], 0.0)[..., None]
        along = along * pairs.differences(*points)
        if pairs.queries is None:
            made[0] = along.sum(1)
        else:
            made[0].index_add_(0, pairs.queries, along)
        made[1].index_add_(0, pairs.rows.flatten(), along.flatten(0, -2), alpha=-1)
    return tuple(m if need else None for m, need in zip(made, needs.values(), strict=True))


def _second_backward(directions: Tensors, grads: Tensors, saved: Saved) -> Tensors:
    points, pairs = _pairs(saved)
    if not all(map(len, points)):
        return tuple(torch.zeros_like(v) for v in (grads[0], *points))
    return second_gradients(pairs.lengths, points, grads[0], directions)


_distances = torch_op(
    "pointproj::distances",
    _forward,
    lambda query_points, reference_points, distances, *rows: ((distances.shape, distances.dtype),),
    differentiable=("query_points", "reference_points"),
    backward=_backward,
    second_backward=_second_backward,
)
