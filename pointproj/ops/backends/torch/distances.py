"""Distances as an operator: they are known from a search, and get derivatives here."""

import math
from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pointproj.ops.bridge.torch_op import torch_op
from pointproj.ops.specification.clouds import Clouds, chunks_of, distinct_rows, queries_of
from pointproj.ops.specification.distances import IndexedPairs
from pointproj.ops.specification.gradients import second_gradients
from pointproj.ops.specification.periodic import PeriodicBox
from pointproj.ops.specification.records import OptionalTensors, Saved, Tensors
from pointproj.ops.torch_internals import is_transforming

NOT_PERIODIC = PeriodicBox((math.inf, math.inf, math.inf))


def with_gradient(
    distances: Float[Tensor, "*pairs"],
    rows: Int[Tensor, "*pairs"],
    clouds: Clouds,
    row_splits: Int[Tensor, " q+1"] | None = None,
    box: PeriodicBox | None = None,
) -> Float[Tensor, "*pairs"]:
    """The same distances, differentiable twice in the points if these can get a gradient."""
    points = clouds.query_points, clouds.reference_points
    needed = torch.is_grad_enabled() and (points[0].requires_grad or points[1].requires_grad)
    if not needed and not is_transforming():
        return distances
    return _distances(*points, distances, rows, row_splits, *(box or NOT_PERIODIC).lengths)


def _forward(
    query_points: Tensor,
    reference_points: Tensor,
    distances: Tensor,
    rows: Tensor,
    row_splits: Tensor | None,
    box_x: float,
    box_y: float,
    box_z: float,
) -> tuple[Tensor]:
    return (distances.clone(),)  # an operator must not return an input


def _chunks(saved: Saved) -> Iterator[tuple[slice, slice, IndexedPairs]]:
    """Some of the pairs: their slice, the slice of their query points, and the pairs themselves."""
    query_points, reference_points, distances, rows, row_splits, *lengths = saved.inputs.values()
    if not (query_points.shape[0] and reference_points.shape[0]):
        return
    exists, queries = rows >= 0, None
    if row_splits is not None:
        queries = distinct_rows(queries_of(row_splits, len(rows)), exists, len(query_points))
    rows, box = distinct_rows(rows, exists, len(reference_points)), PeriodicBox(tuple(lengths))
    box = None if box == NOT_PERIODIC else box
    apart = (exists & (distances > 0))[..., None]
    for at in chunks_of(rows, width=3):
        own = at if queries is None else slice(None)
        yield at, own, IndexedPairs(None if queries is None else queries[at], rows[at], box, apart[at])


def _backward(grads: Tensors, needs: dict[str, bool], saved: Saved) -> OptionalTensors:
    query_points, reference_points, distances, *_ = saved.inputs.values()
    d_queries, d_references = torch.zeros_like(query_points), torch.zeros_like(reference_points)
    inverse = (grads[0] / distances)[..., None]
    for at, own, pairs in _chunks(saved):
        delta = pairs.differences(query_points[own], reference_points)
        along = torch.where(pairs.apart, inverse[at] * delta, 0.0)
        if pairs.queries is None:
            torch.sum(along, 1, out=d_queries[own])
        else:
            d_queries.index_add_(0, pairs.queries, along)
        d_references.index_add_(0, pairs.rows.flatten(), along.flatten(0, -2), alpha=-1)
    made = zip((d_queries, d_references), needs.values(), strict=True)
    return tuple(gradient if need else None for gradient, need in made)


def _second_backward(directions: Tensors, grads: Tensors, saved: Saved) -> Tensors:
    query_points, reference_points, *_ = saved.inputs.values()
    made = [torch.zeros_like(v) for v in (grads[0], query_points, reference_points)]
    for at, own, pairs in _chunks(saved):
        points, along = (query_points[own], reference_points), (directions[0][own], directions[1])
        of_grad, of_queries, of_references = second_gradients(pairs.lengths, points, grads[0][at], along)
        made[0][at] = of_grad
        made[1][own] += of_queries
        made[2] += of_references
    return tuple(made)


_distances = torch_op(
    "pointproj::distances",
    _forward,
    lambda query_points, reference_points, distances, *others: ((distances.shape, distances.dtype),),
    differentiable=("query_points", "reference_points"),
    backward=_backward,
    second_backward=_second_backward,
    numbers=("box_x", "box_y", "box_z"),
)
