"""The aggregations as torch operators: over given neighbours, over the k nearest, within a radius.

Each search and its sums are one operator: that spares eager calls the time of another.
"""

from typing import Any

import torch
from torch import Tensor

from pointproj.ops.backends.warp.cell_list import CellList
from pointproj.ops.backends.warp.cell_list_build import cell_list_specs, cells_per_two_points, fill_cell_list
from pointproj.ops.backends.warp.common import Batch, Points
from pointproj.ops.backends.warp.gradients import Wanted, launch_query_gradients, launch_reference_gradients
from pointproj.ops.backends.warp.knn_search import launch_search, sets_of
from pointproj.ops.backends.warp.neighbors import Lists
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
    each of them, so the queries are sorted with the references where these want a gradient.
    """
    sorts_queries = features.requires_grad or clouds.reference_points.requires_grad
    return _radius_aggregate(*clouds, list(tables or ()), sorts_queries, features, sigma, radius, *weighting)[
        0
    ]


def _gradient_problem(values: dict[str, Any], others: Tensor) -> tuple[Problem, Weighting, Wanted]:
    wanted = Wanted(*[values[f"d_{name}"] for name in DIFFERENTIABLE])
    weighting, aggregated = weighting_of(values), values["aggregated"]
    if wanted.of_points:
        aggregated = in_words(aggregated)
    problem = new_problem(values["features"], values["sigma"], weighting, aggregated, values["softmax"])
    return problem._replace(grad=in_words(values["grad_aggregated"]), others=others), weighting, wanted


def _lists_backward(launch: Launch, **values: Any) -> None:
    if values["grad_aggregated"].is_cuda and torch.are_deterministic_algorithms_enabled():
        _fill_in_fixed_order(values)
        return
    queries, references = values["query_points"], values["reference_points"]
    problem, weighting, wanted = _gradient_problem(values, references)
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


def _lists_second_backward(launch: Launch, **values: Any) -> None:
    fill_second_backward(values, listed_chunks)


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
    second_backward=_lists_second_backward,
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
    second_backward=_lists_second_backward,
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


def _radius_specs(
    query_points: Tensor,
    reference_points: Tensor,
    clouds: int,
    tables: list[Tensor],
    sorts_queries: bool,
    features: Tensor,
    **_: Any,
) -> dict:
    sets = ([] if tables else [reference_points]) + ([query_points] if sorts_queries else [])
    rows = [points.shape[0] for points in sets]
    sizes = [(n, cells_per_two_points(n, True, features.device.type)) for n in rows]
    return _sum_specs(query_points, features) | cell_list_specs(sizes, query_points.dtype, clouds)


def _sides(
    clouds: Clouds, given: list[Tensor], made: CellList, radius: float
) -> tuple[list[Points], tuple[Points, Points], tuple[Ball, Ball]]:
    """What has to be sorted; queries and references in the order of their cells; where each searches.

    The references are in the tables ``given``, or with the queries in those ``made``. Where the queries are
    not sorted, they are taken as they come, and must not be searched.
    """
    queries, references = sets_of(clouds)
    cells = CellList(*given) if given else made
    sorts_queries = len(made.frames) > (0 if given else clouds.count)
    unsorted = ([] if given else [references]) + ([queries] if sorts_queries else [])
    first_row, first_grid = (0, 0) if given else (references.batch.rows, clouds.count)
    if sorts_queries:
        queries = queries._replace(ordered=made.points, first=first_row)
    balls = new_ball(cells, 0, radius), new_ball(made, first_grid, radius)
    return unsorted, (queries, references._replace(ordered=cells.points)), balls


def _radius_backward(launch: Launch, **values: Any) -> None:
    clouds = Clouds(*(values[name] for name in Clouds._fields[:-1]), values["clouds"])
    made = CellList(*(values[name] for name in ("frames", "shapes", "start", "sorted_points")))
    _, sides, balls = _sides(clouds, values["tables"], made, values["radius"])
    queries, references = sides
    problem, weighting, wanted = _gradient_problem(values, references.positions)
    if wanted.of_points:
        problem = problem._replace(means=problem.grad.new_empty(queries.batch.rows))
        launch_query_gradients(launch, queries, balls[0], problem, weighting, wanted)
    if wanted.reference_points is not None or wanted.features is not None:
        problem = problem._replace(others=queries.positions)
        launch_reference_gradients(launch, references, balls[1], problem, weighting, wanted)


def _radius_second_backward(launch: Launch, **values: Any) -> None:
    fill_second_backward(values, chunks_within)


@warp_op(
    "pointproj::warp_radius_aggregate",
    outputs=_radius_specs,
    differentiable=DIFFERENTIABLE,
    backward=_radius_backward,
    second_backward=_radius_second_backward,
)
def _radius_aggregate(
    launch: Launch,
    query_points: Tensor,
    query_offsets: Tensor | None,
    reference_points: Tensor,
    reference_offsets: Tensor | None,
    clouds: int,
    tables: list[Tensor],
    sorts_queries: bool,
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
    frames: Tensor,
    shapes: Tensor,
    start: Tensor,
    sorted_points: Tensor,
) -> None:
    weighting = Weighting(kernel, reduce, power, eps, support)
    both = Clouds(query_points, query_offsets, reference_points, reference_offsets, clouds)
    made = CellList(frames, shapes, start, sorted_points)
    unsorted, (queries, _), (ball, _) = _sides(both, tables, made, radius)
    if unsorted:
        fill_cell_list(launch, unsorted, made, True, radius, None)
    problem = new_problem(features, sigma, weighting, aggregated, softmax)
    launch_sums(launch, queries, ball, problem, weighting)
