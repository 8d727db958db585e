"""The aggregations as torch operators: over given neighbours, over the k nearest, within a radius."""

from typing import Any

import torch
from torch import Tensor

from pointproj.ops.backends.warp.cell_list import cell_list_of
from pointproj.ops.backends.warp.cell_list_build import build_cell_list, sorted_into
from pointproj.ops.backends.warp.common import Batch, Points
from pointproj.ops.backends.warp.gradients import Wanted, launch_query_gradients, launch_reference_gradients
from pointproj.ops.backends.warp.knn_search import in_order_of, launch_search, sets_of
from pointproj.ops.backends.warp.neighbors import Lists, Source
from pointproj.ops.backends.warp.sums import Problem, in_words, launch_sums, new_problem
from pointproj.ops.backends.warp.top_k import LONGEST_LIST, Found
from pointproj.ops.backends.warp.traversal import Ball, new_ball
from pointproj.ops.bridge.warp_op import Launch, warp_op
from pointproj.ops.clouds import Clouds
from pointproj.ops.gradients import DIFFERENTIABLE, aggregate_backward, fill_second_backward
from pointproj.ops.pairs import chunks_within, listed_chunks, weighting_of
from pointproj.ops.reference import Weighting
from pointproj.ops.registry import Tables


def aggregate_neighbors(
    clouds: Clouds, features: Tensor, sigma: Tensor, rows: Tensor, weighting: Weighting
) -> Tensor:
    """As :func:`pointproj.ops.backends.torch.aggregate_neighbors`, for lists sorted by distance."""
    points = clouds.query_points, clouds.reference_points
    return _aggregate_neighbors(*points, features, sigma, rows, *weighting)[0]


def knn_aggregate(
    clouds: Clouds, tables: Tables | None, features: Tensor, sigma: Tensor, k: int, weighting: Weighting
) -> Tensor:
    """Weighted mean or sum of the features of the k nearest: ``(Q, C)`` in their dtype."""
    return _knn_aggregate(*clouds, list(tables or ()), features, sigma, k, *weighting)[0]


def radius_aggregate(
    clouds: Clouds,
    tables: Tables | None,
    features: Tensor,
    sigma: Tensor,
    radius: float,
    weighting: Weighting,
) -> Tensor:
    """Weighted mean or sum of the features within ``radius``: nothing is listed, nothing truncated.

    Gradients that belong to reference points are gathered by the transposed search, over the queries near
    each of them: the backward sorts the queries.
    """
    if tables is None:
        points = clouds.reference_points.detach()
        tables = build_cell_list(points, clouds.reference_offsets, clouds.count, radius)
    return _radius_aggregate(*clouds, list(tables), features, sigma, radius, *weighting)[0]


def _gradient_problem(
    values: dict[str, Any], source: type[Source], others: Tensor
) -> tuple[Problem, Weighting, Wanted]:
    """Of the rows those that are read: for the features' gradient alone only upstream gradients."""
    weighting, wanted = weighting_of(values), Wanted(*[values[f"d_{name}"] for name in DIFFERENTIABLE])
    rows = [values["features"], values["aggregated"]]
    if wanted.of_points:
        rows = [in_words(source, r) for r in rows]
    problem = new_problem(rows[0], values["sigma"], weighting, rows[1], values["softmax"])
    grad, columns = in_words(source, values["grad_aggregated"]), values["features"].shape[1]
    return problem._replace(grad=grad, columns=columns, others=others), weighting, wanted


def _lists_backward(launch: Launch, **values: Any) -> None:
    if values["grad_aggregated"].is_cuda and torch.are_deterministic_algorithms_enabled():
        _fill_in_fixed_order(values)
        return
    queries, references = values["query_points"], values["reference_points"]
    problem, weighting, wanted = _gradient_problem(values, Lists, references)
    own = Points(queries, Batch(None, queries.shape[0], 1))
    source = Lists(references, values["neighbor_indices"])
    launch_query_gradients(launch, own, source, problem, weighting, wanted)


def _fill_in_fixed_order(values: dict[str, Any]) -> None:
    """Without atomics: torch sorts what it adds when deterministic algorithms are asked for."""
    needs = {name: values[f"d_{name}"] is not None for name in DIFFERENTIABLE}
    made = aggregate_backward(values["grad_aggregated"], needs, values, listed_chunks)
    for name, gradient in zip(DIFFERENTIABLE, made, strict=True):
        if needs[name]:
            values[f"d_{name}"].copy_(gradient)


def _sum_specs(query_points: Tensor, features: Tensor, **_: Any) -> dict:
    queries = query_points.shape[0]
    return {
        "aggregated": ((queries, features.shape[1]), features.dtype),
        "softmax": ((queries, 2), features.dtype),
    }


@warp_op(
    "pointproj::warp_aggregate_neighbors",
    outputs=_sum_specs,
    differentiable=DIFFERENTIABLE,
    backward=_lists_backward,
    second_backward=lambda launch, **values: fill_second_backward(values, listed_chunks),
)
def _aggregate_neighbors(
    launch: Launch,
    query_points: Tensor,
    reference_points: Tensor,
    features: Tensor,
    sigma: Tensor,
    neighbor_indices: Tensor,
    kernel: str,
    reduce: str,
    power: float,
    eps: float,
    support: float,
    *,
    aggregated: Tensor,
    softmax: Tensor,
) -> None:
    weighting = Weighting(kernel, reduce, power, eps, support)
    queries = Points(query_points, Batch(None, query_points.shape[0], 1))
    problem = new_problem(features, sigma, weighting, aggregated, softmax)
    launch_sums(launch, queries, Lists(reference_points, neighbor_indices), problem, weighting)


def _knn_specs(query_points: Tensor, features: Tensor, k: int, **_: Any) -> dict:
    lists = {"neighbor_indices": ((query_points.shape[0], k), torch.int32)}
    return _sum_specs(query_points, features) | lists


@warp_op(
    "pointproj::warp_knn_aggregate",
    outputs=_knn_specs,
    differentiable=DIFFERENTIABLE,
    backward=_lists_backward,
    second_backward=lambda launch, **values: fill_second_backward(values, listed_chunks),
)
def _knn_aggregate(
    launch: Launch,
    query_points: Tensor,
    query_offsets: Tensor | None,
    reference_points: Tensor,
    reference_offsets: Tensor | None,
    clouds: int,
    tables: list[Tensor],
    features: Tensor,
    sigma: Tensor,
    k: int,
    kernel: str,
    reduce: str,
    power: float,
    eps: float,
    support: float,
    *,
    aggregated: Tensor,
    softmax: Tensor,
    neighbor_indices: Tensor,
) -> None:
    weighting = Weighting(kernel, reduce, power, eps, support)
    both = Clouds(query_points, query_offsets, reference_points, reference_offsets, clouds)
    queries, references = sets_of(both)
    heap = query_points.new_empty(query_points.shape[0], k) if k > LONGEST_LIST else None
    launch_search(launch, queries, references, tables, Found(neighbor_indices, heap))
    problem = new_problem(features, sigma, weighting, aggregated, softmax)
    launch_sums(launch, queries, Lists(reference_points, neighbor_indices), problem, weighting)


def _radius_backward(launch: Launch, **values: Any) -> None:
    clouds = Clouds(*[values[name] for name in Clouds._fields[:-1]], values["clouds"])
    queries, references = sets_of(clouds)
    cells, radius = cell_list_of(values["tables"]), values["radius"]
    problem, weighting, wanted = _gradient_problem(values, Ball, references.positions)
    of_references = wanted.reference_points is not None or wanted.features is not None
    if of_references:
        query_cells = sorted_into(launch, queries, cells, radius)
        queries = queries._replace(ordered=query_cells.points)
    if wanted.of_points:
        problem = problem._replace(means=problem.grad.new_empty(queries.batch.rows))
        launch_query_gradients(launch, queries, new_ball(cells, radius), problem, weighting, wanted)
    if of_references:
        problem = problem._replace(others=queries.positions)
        references, ball = references._replace(ordered=cells.points), new_ball(query_cells, radius)
        launch_reference_gradients(launch, references, ball, problem, weighting, wanted)


@warp_op(
    "pointproj::warp_radius_aggregate",
    outputs=_sum_specs,
    differentiable=DIFFERENTIABLE,
    backward=_radius_backward,
    second_backward=lambda launch, **values: fill_second_backward(values, chunks_within),
)
def _radius_aggregate(
    launch: Launch,
    query_points: Tensor,
    query_offsets: Tensor | None,
    reference_points: Tensor,
    reference_offsets: Tensor | None,
    clouds: int,
    tables: list[Tensor],
    features: Tensor,
    sigma: Tensor,
    radius: float,
    kernel: str,
    reduce: str,
    power: float,
    eps: float,
    support: float,
    *,
    aggregated: Tensor,
    softmax: Tensor,
) -> None:
    weighting = Weighting(kernel, reduce, power, eps, support)
    sets = sets_of(Clouds(query_points, query_offsets, reference_points, reference_offsets, clouds))
    cells = cell_list_of(tables)
    problem = new_problem(features, sigma, weighting, aggregated, softmax)
    launch_sums(launch, in_order_of(cells, *sets), new_ball(cells, radius), problem, weighting)
