"""Aggregation over given rows of neighbours, nearest first: forward and backward kernels for kNN."""

import functools
from typing import Any

import torch
import warp as wp
from torch import Tensor

from pointproj.ops.backends.warp.common import OPTIONS, REALS
from pointproj.ops.backends.warp.knn_search import LARGEST_LIST, launch_search
from pointproj.ops.backends.warp.lanes import lanes
from pointproj.ops.backends.warp.neighbor_gradients import (
    feature_gradient_kernel,
    lane_gradient_kernel,
    position_gradient_kernel,
    product_kernel,
)
from pointproj.ops.backends.warp.neighbor_problem import NeighborProblem, distance_function, neighbor_struct
from pointproj.ops.backends.warp.queue import Division, divide, few_lanes, row_queue, row_sum
from pointproj.ops.backends.warp.top_k import TopK
from pointproj.ops.backends.warp.weighting import is_relative, limit_of, weight_functions
from pointproj.ops.bridge.warp_op import Launch, warp_op
from pointproj.ops.clouds import Clouds
from pointproj.ops.gradients import DIFFERENTIABLE, aggregate_backward, fill_second_backward
from pointproj.ops.pairs import listed_chunks, weighting_of
from pointproj.ops.reference import Weighting
from pointproj.ops.registry import Tables


def aggregate_neighbors(
    query_points: Tensor,
    reference_points: Tensor,
    features: Tensor,
    sigma: Tensor,
    neighbor_indices: Tensor,
    weighting: Weighting,
) -> Tensor:
    """As :func:`pointproj.ops.backends.torch.aggregate_neighbors`, for lists sorted by distance."""
    return _aggregate(query_points, reference_points, features, sigma, neighbor_indices, *weighting)[0]


def knn_aggregate(
    clouds: Clouds, cells: Tables | None, features: Tensor, sigma: Tensor, k: int, weighting: Weighting
) -> Tensor:
    """Search and aggregation in one operator: that spares eager calls the time of another."""
    return _search_and_aggregate(*clouds, list(cells or ()), features, sigma, k, *weighting)[0]


def _specs(query_points: Tensor, features: Tensor, neighbor_indices: Tensor, **_: Any) -> dict:
    return {
        "aggregated": ((query_points.shape[0], features.shape[1]), features.dtype),
        "weights": (tuple(neighbor_indices.shape), features.dtype),
    }


def _backward(
    launch: Launch,
    d_query_points: Tensor | None,
    d_reference_points: Tensor | None,
    d_features: Tensor | None,
    d_sigma: Tensor | None,
    **values: Any,
) -> None:
    wanted = dict(zip(DIFFERENTIABLE, (d_query_points, d_reference_points, d_features, d_sigma), strict=True))
    neighbor_indices, weights, grad = (
        values[name] for name in ("neighbor_indices", "weights", "grad_aggregated")
    )
    on_gpu = grad.is_cuda
    if on_gpu and torch.are_deterministic_algorithms_enabled():
        _fill_in_fixed_order(values, wanted)
        return
    of_points = d_query_points is not None or d_reference_points is not None or d_sigma is not None
    if d_features is not None:
        d_features.zero_()
        if not (of_points and on_gpu):  # else with the others
            shape = neighbor_indices.shape[0], 32 if on_gpu else 1
            compiled = feature_gradient_kernel(grad.dtype, on_gpu)
            launch(compiled, shape, neighbor_indices, weights, grad, d_features)
    if not of_points:
        return
    made = _made_for_points(values, wanted)
    _launch_points(launch, made, d_features, **values)
    if d_sigma is not None:
        d_sigma.copy_(made["sigma"].sum())
    for name in ("query_points", "reference_points"):
        if wanted[name] is not None and wanted[name] is not made[name]:
            wanted[name].copy_(made[name])


def _launch_points(
    launch: Launch,
    made: dict[str, Tensor],
    d_features: Tensor | None,
    query_points: Tensor,
    reference_points: Tensor,
    features: Tensor,
    sigma: Tensor,
    neighbor_indices: Tensor,
    weights: Tensor,
    aggregated: Tensor,
    grad_aggregated: Tensor,
    **values: Any,
) -> None:
    """Fill the gradients of points and sigma; on a GPU add that of the features too, if there is one."""
    weighting = weighting_of(values)
    points = query_points, reference_points
    problem = NeighborProblem(*points, sigma, neighbor_indices, weighting.power, limit_of(weighting))
    dtypes, (queries, k) = (query_points.dtype, features.dtype), neighbor_indices.shape
    if features.is_cuda:
        division = few_lanes(features, grad_aggregated)
        compiled = lane_gradient_kernel(*dtypes, division, weighting[:2], d_features is not None)
        read = weights, features, aggregated, grad_aggregated
        shape, filled = (queries, division.lanes), (d_features, *made.values())
        launch(compiled, shape, problem, *read, *filled, block_dim=division.block)
        return
    products = torch.empty_like(weights)
    compiled = product_kernel(features.dtype)
    launch(compiled, (queries, k), neighbor_indices, features, grad_aggregated, products)
    compiled = position_gradient_kernel(*dtypes, weighting.kernel, weighting.reduce)
    launch(compiled, queries, problem, weights, products, *made.values())


def _made_for_points(values: dict[str, Any], wanted: dict[str, Tensor | None]) -> dict[str, Tensor]:
    """Where kernels write: gradients of positions where they are wanted, if in the dtype of sums."""
    features = values["features"]
    made = {}
    for name in ("query_points", "reference_points"):
        there = wanted[name]
        fits = there is not None and there.dtype == features.dtype
        made[name] = there if fits else features.new_empty(values[name].shape)
    made["reference_points"].zero_()
    made["sigma"] = features.new_empty(values["query_points"].shape[0])
    return made


def _fill_in_fixed_order(values: dict[str, Any], wanted: dict[str, Tensor | None]) -> None:
    """Without atomics: torch sorts what it adds when deterministic algorithms are asked for."""
    needs = {name: tensor is not None for name, tensor in wanted.items()}
    made = aggregate_backward(values["grad_aggregated"], needs, values, listed_chunks)
    for tensor, grad in zip(wanted.values(), made, strict=True):
        if tensor is not None:
            tensor.copy_(grad)


def _second_backward(launch: Launch, **values: Any) -> None:
    fill_second_backward(values, listed_chunks)


@warp_op(
    "pointproj::warp_aggregate_neighbors",
    outputs=_specs,
    differentiable=DIFFERENTIABLE,
    backward=_backward,
    second_backward=_second_backward,
    replayable=True,
)
def _aggregate(
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
    weights: Tensor,
) -> None:
    points = query_points, reference_points
    weighting = Weighting(kernel, reduce, power, eps, support)
    _launch_sums(launch, points, features, sigma, neighbor_indices, weighting, (aggregated, weights))


def _knn_specs(query_points: Tensor, features: Tensor, k: int, **_: Any) -> dict:
    queries = query_points.shape[0]
    return {
        "aggregated": ((queries, features.shape[1]), features.dtype),
        "weights": ((queries, k), features.dtype),
        "neighbor_indices": ((queries, k), torch.int32),
    }


@warp_op(
    "pointproj::warp_knn_aggregate",
    outputs=_knn_specs,
    differentiable=DIFFERENTIABLE,
    backward=_backward,
    second_backward=_second_backward,
    replayable=True,
)
def _search_and_aggregate(
    launch: Launch,
    query_points: Tensor,
    query_offsets: Tensor | None,
    reference_points: Tensor,
    reference_offsets: Tensor | None,
    clouds: int,
    cells: list[Tensor],
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
    weights: Tensor,
    neighbor_indices: Tensor,
) -> None:
    points = query_points, reference_points
    both = Clouds(query_points, query_offsets, reference_points, reference_offsets, clouds)
    heap = query_points.new_empty(query_points.shape[0] if k > LARGEST_LIST else 0, k)
    launch_search(launch, both, cells, TopK(neighbor_indices, heap))
    weighting = Weighting(kernel, reduce, power, eps, support)
    _launch_sums(launch, points, features, sigma, neighbor_indices, weighting, (aggregated, weights))


def _launch_sums(
    launch: Launch,
    points: tuple[Tensor, Tensor],
    features: Tensor,
    sigma: Tensor,
    neighbor_indices: Tensor,
    weighting: Weighting,
    into: tuple[Tensor, Tensor],
) -> None:
    """``points`` are the queries and the references, ``into`` aggregated features and weights."""
    division = divide(features.shape[1], features.device.type, most_lanes=8)
    dtypes = points[0].dtype, features.dtype
    compiled = aggregate_kernel(*dtypes, division, weighting.kernel, weighting.reduce)
    problem = NeighborProblem(*points, sigma, neighbor_indices, weighting.power, limit_of(weighting))
    shape = (neighbor_indices.shape[0] * division.searches, division.lanes)
    launch(compiled, shape, problem, features, *into)


@functools.cache
def aggregate_kernel(
    positions: torch.dtype, sums: torch.dtype, division: Division, kernel: str, reduce: str
) -> wp.Kernel:
    """Weights over each list, and the weighted sum."""
    count, searches = division.lanes, division.searches
    real, _ = REALS[sums]
    ProblemStruct = neighbor_struct(positions, sums)
    distance = distance_function(positions, sums)
    Channels, add_row, write_row = row_sum(sums, division)
    queue = row_queue(sums, division)
    reserve, push, flush = queue.reserve, queue.push, queue.flush
    item, lane, total_of = lanes(count).item, lanes(count).lane, lanes(count).total
    rate_of, level_of, relative_weight, *_ = weight_functions(kernel, sums)

    @wp.kernel(**OPTIONS)
    def aggregate(
        problem: ProblemStruct,
        features: wp.array2d(dtype=real),
        aggregated: wp.array2d(dtype=real),
        weights: wp.array2d(dtype=real),
    ):
        first, _ = wp.tid()
        query = item(first) / searches
        chunk = item(first) % searches
        p = problem.query_points[query]
        k = problem.neighbor_indices.shape[1]
        rate = rate_of(real(1.0), problem.sigma[0], problem.power, problem.limit)
        base = real(0.0)
        if wp.static(is_relative(kernel, reduce)) and problem.neighbor_indices[query, 0] >= 0:
            nearest = distance(p, problem.reference_points[problem.neighbor_indices[query, 0]])
            base = level_of(nearest, problem.limit)
        total = real(0.0)
        sums = Channels()
        for begin in range(0, k, count):
            i = begin + lane()
            row = int(-1)
            weight = real(0.0)
            if i < k:
                row = problem.neighbor_indices[query, i]
                if row >= 0:
                    far = distance(p, problem.reference_points[row])
                    weight = relative_weight(base, far, rate, problem.limit)
                if chunk == 0:
                    weights[query, i] = weight
            total += weight
            if wp.static(count == 1):
                if row >= 0:
                    sums = add_row(sums, features, chunk, weight, row)
            else:
                address = reserve()
                sums = flush(sums, features, chunk, address, push(address, 0, row >= 0, weight, row))
        inverse = real(1.0)
        if wp.static(reduce == "mean"):
            total = total_of(total)
            inverse = real(0.0)
            if total > real(0.0):
                inverse = real(1.0) / total
            if chunk == 0:
                for begin in range(0, k, count):
                    if begin + lane() < k:
                        weights[query, begin + lane()] = weights[query, begin + lane()] * inverse
        if not wp.isfinite(p):
            inverse = real(wp.nan)
        write_row(sums, chunk, inverse, aggregated, query)

    return aggregate
