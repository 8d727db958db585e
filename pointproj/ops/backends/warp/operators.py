"""The functions of the backend, and its aggregations: over lists of neighbours, or all within a radius."""

from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from pointproj.ops.backends.warp.cell_list import NO_TABLES, CellList, may_be_graded, readable
from pointproj.ops.backends.warp.cell_list_build import build_cell_list as build_index
from pointproj.ops.backends.warp.cell_list_build import sorted_into
from pointproj.ops.backends.warp.gradients import launch_query_gradient, launch_reference_gradient
from pointproj.ops.backends.warp.knn_search import in_order_of, launch_search, nearest, sets_of
from pointproj.ops.backends.warp.lists import radius_list, radius_search
from pointproj.ops.backends.warp.neighbors import Lists
from pointproj.ops.backends.warp.sums import launch_sums, new_problem
from pointproj.ops.backends.warp.top_k import LONGEST_LIST, Found
from pointproj.ops.backends.warp.traversal import Ball, new_ball
from pointproj.ops.bridge.flops import count_aggregation
from pointproj.ops.bridge.warp_op import Launch, warp_op
from pointproj.ops.specification.clouds import Clouds
from pointproj.ops.specification.gradients import DIFFERENTIABLE, aggregate_backward, fill_second_backward
from pointproj.ops.specification.pairs import chunks_within, listed_chunks
from pointproj.ops.specification.records import Saved, Summands, Tables, fields_apart, record_of
from pointproj.ops.specification.reference import Weighting

__all__ = [
    "aggregate_neighbors",
    "build_index",
    "knn_aggregate",
    "nearest",
    "radius_aggregate",
    "radius_list",
    "radius_search",
]
ONE_INDEX = True


def aggregate_neighbors(clouds: Clouds, summands: Summands, rows: Tensor) -> Tensor:
    """As :func:`pointproj.ops.backends.torch.aggregate_neighbors`, for lists sorted by distance."""
    features, sigma, weighting = summands
    one = Clouds(clouds.query_points, None, clouds.reference_points, None, 1)
    return _knn_aggregate(*one, *NO_TABLES, rows, features, sigma, rows.shape[1], *weighting)[0]


def knn_aggregate(clouds: Clouds, tables: Tables | None, summands: Summands, k: int) -> Tensor:
    """Weighted mean or sum of the features of the k nearest: ``(Q, C)`` in their dtype."""
    features, sigma, weighting = summands
    return _knn_aggregate(*clouds, *(tables or NO_TABLES), None, features, sigma, k, *weighting)[0]


def radius_aggregate(clouds: Clouds, tables: Tables | None, summands: Summands, radius: float) -> Tensor:
    """Weighted mean or sum of the features within ``radius``, without lists.

    Gradients of reference points and features are gathered over the queries around each reference point: the
    backward sorts the queries into cells.
    """
    features, sigma, weighting = summands
    if tables is None:
        points = clouds.reference_points.detach()
        tables = build_index(points, clouds.reference_offsets, clouds.count, radius)
    return _radius_aggregate(*clouds, *tables, features, sigma, radius, *weighting)[0]


_wanted = itemgetter(*(f"d_{name}" for name in DIFFERENTIABLE))  # gradients, None where one is not needed
_summed = itemgetter("features", "sigma", "aggregated", "softmax", "grad_aggregated")


def _lists_of(values: dict[str, Any]) -> dict[str, Any]:
    """The values, with the lists that were given, or else found."""
    given = values["neighbor_indices"]
    return values | {"neighbor_indices": values["found"] if given is None else given}


def _lists_backward(launch: Launch, **values: Any) -> None:
    values = _lists_of(values)
    if values["grad_aggregated"].is_cuda and torch.are_deterministic_algorithms_enabled():
        _fill_in_fixed_order(values)
        return
    d_queries, d_references, d_features, d_sigma = _wanted(values)
    for added in (d_references, d_features):
        if added is not None:
            added.zero_()
    of_points = not (d_queries is d_references is d_sigma is None)
    queries, references = sets_of(record_of(Clouds, values))
    added = {"others": references.positions, "d_others": d_references, "d_features": d_features}
    weighting, dtype = record_of(Weighting, values), references.positions.dtype
    variant, problem = new_problem(Lists, dtype, weighting, *_summed(values), of_points, **added)
    source = Lists(references.positions, values["neighbor_indices"])
    launch_query_gradient(launch, variant, queries, source, problem, of_points, d_queries, d_sigma)


def _fill_in_fixed_order(values: dict[str, Any]) -> None:
    """Without atomics: in deterministic mode torch sorts before it adds."""
    needs = {name: values[f"d_{name}"] is not None for name in DIFFERENTIABLE}
    made = aggregate_backward((values["grad_aggregated"],), needs, Saved(values, ()), listed_chunks)
    for name, gradient in zip(DIFFERENTIABLE, made, strict=True):
        if needs[name]:
            values[f"d_{name}"].copy_(gradient)


def _sum_specs(query_points: Tensor, features: Tensor, **_: Any) -> dict:
    queries = query_points.shape[0]
    return {
        "aggregated": ((queries, features.shape[1]), features.dtype),
        "softmax": ((queries, 2), features.dtype),
    }


def _knn_specs(
    query_points: Tensor, neighbor_indices: Tensor | None, features: Tensor, k: int, **_: Any
) -> dict:
    searched = query_points.shape[0] if neighbor_indices is None else 0
    return _sum_specs(query_points, features) | {"found": ((searched, k), torch.int32)}


@warp_op(
    "pointproj::warp_knn_aggregate",
    outputs=_knn_specs,
    differentiable=DIFFERENTIABLE,
    backward=_lists_backward,
    second_backward=lambda launch, **values: fill_second_backward(_lists_of(values), listed_chunks),
)
@fields_apart
def _knn_aggregate(
    launch: Launch,
    clouds: Clouds,
    cells: CellList,
    neighbor_indices: Tensor | None,
    features: Tensor,
    sigma: Tensor,
    k: int,
    weighting: Weighting,
    *,
    aggregated: Tensor,
    softmax: Tensor,
    found: Tensor,
) -> None:
    queries, references = sets_of(clouds)
    if neighbor_indices is None:
        heap = clouds.query_points.new_empty(found.shape) if k > LONGEST_LIST[found.device.type] else None
        launch_search(launch, queries, references, cells, Found(found, heap))
        neighbor_indices = found
    given = references.positions.dtype, weighting, features, sigma, aggregated, softmax
    variant, problem = new_problem(Lists, *given)
    launch_sums(launch, variant, queries, Lists(references.positions, neighbor_indices), problem)


def _radius_backward(launch: Launch, **values: Any) -> None:
    d_queries, d_references, d_features, d_sigma = _wanted(values)
    of_points = not (d_queries is d_references is d_sigma is None)
    queries, references = sets_of(record_of(Clouds, values))
    cells, radius = readable(record_of(CellList, values)), values["radius"]
    weighting, others = record_of(Weighting, values), references.positions
    given = others.dtype, weighting, *_summed(values), of_points, may_be_graded(cells)
    variant, problem = new_problem(Ball, *given, others=others)
    of_references = not (d_references is d_features is None)
    if of_references:
        query_cells = sorted_into(launch, queries, cells, radius)
        queries = queries._replace(ordered=query_cells.points)
    if of_points:
        problem = problem._replace(means=torch.empty_like(problem.softmax))
        source = new_ball(cells, radius)
        launch_query_gradient(launch, variant, queries, source, problem, of_points, d_queries, d_sigma)
    if of_references:
        problem = problem._replace(others=queries.positions, d_features=d_features)
        references, source = references._replace(ordered=cells.points), new_ball(query_cells, radius)
        launch_reference_gradient(launch, variant, references, source, problem, d_references)


@warp_op(
    "pointproj::warp_radius_aggregate",
    outputs=_sum_specs,
    differentiable=DIFFERENTIABLE,
    backward=_radius_backward,
    second_backward=lambda launch, **values: fill_second_backward(values, chunks_within),
)
@fields_apart
def _radius_aggregate(
    launch: Launch,
    clouds: Clouds,
    cells: CellList,
    features: Tensor,
    sigma: Tensor,
    radius: float,
    weighting: Weighting,
    *,
    aggregated: Tensor,
    softmax: Tensor,
) -> None:
    cells = readable(cells)
    queries = in_order_of(cells, *sets_of(clouds))
    given = queries.positions.dtype, weighting, features, sigma, aggregated, softmax
    variant, problem = new_problem(Ball, *given, graded=may_be_graded(cells))
    launch_sums(launch, variant, queries, new_ball(cells, radius), problem)


count_aggregation("warp_knn_aggregate", _knn_aggregate.parameters, searches=True)
count_aggregation("warp_radius_aggregate", _radius_aggregate.parameters)
