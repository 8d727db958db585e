"""Aggregation over all points within a radius: nothing is listed, nothing truncated.

The forward visits the reference points near each query and keeps a running softmax. Gradients that belong
to reference points are gathered by the transposed search, over the queries near each reference point, so
that no two threads ever add to one place.
"""

import functools
from typing import Any

import torch
import warp as wp
from torch import Tensor

from pointproj.ops.backends.warp.common import OPTIONS, REALS, Batch, BatchStruct, cloud_of, packed_point
from pointproj.ops.backends.warp.hash_grid import (
    SearchedGrid,
    Side,
    ball_search,
    bucket_count,
    build_hash_grid,
    searched_struct,
)
from pointproj.ops.backends.warp.lanes import lanes
from pointproj.ops.backends.warp.queue import Division, divide, row_sum
from pointproj.ops.backends.warp.radius_backward import Wanted, ball_backward, tile_backward
from pointproj.ops.backends.warp.radius_pairs import neighbor_distance, problem_struct, radius_problem
from pointproj.ops.backends.warp.tile_sums import launch_tiles
from pointproj.ops.backends.warp.traversal import Visitor
from pointproj.ops.backends.warp.weighting import is_relative, weight_functions
from pointproj.ops.bridge.warp_op import Launch, warp_op
from pointproj.ops.clouds import Clouds
from pointproj.ops.gradients import DIFFERENTIABLE, fill_second_backward
from pointproj.ops.pairs import chunks_within, weighting_of
from pointproj.ops.reference import Weighting
from pointproj.ops.registry import Tables


def radius_aggregate(
    clouds: Clouds,
    grid: Tables | None,
    features: Tensor,
    sigma: Tensor,
    radius: float,
    weighting: Weighting,
) -> Tensor:
    """Weighted mean or sum of the features within ``radius``: ``(Q, C)`` in their dtype.

    Without a hash grid of the references, one build makes it, and that of the queries where it is needed.
    """
    points = clouds.detached()
    queries = points.query_points, points.query_offsets
    needs_queries = features.is_cuda or features.requires_grad or clouds.reference_points.requires_grad
    both = grid is None and needs_queries
    if grid is None:
        references = points.reference_points, points.reference_offsets, points.count
        others = {"others": queries[0], "other_offsets": queries[1]} if both else {}
        grid = build_hash_grid(*references, radius, **others)
    tables = [*grid]
    if needs_queries and not both:
        tables = [*tables, *build_hash_grid(*queries, points.count, radius)]
    return _aggregate(*clouds, tables, both, features, sigma, radius, *weighting)[0]


def _sides(clouds: Clouds, grids: list[Tensor], both: bool) -> tuple[Side, Side]:
    """Queries and references; ``grids`` are one of ``both``, or the references' and then the queries'."""
    queries = Batch(clouds.query_offsets, clouds.query_points.shape[0], clouds.count)
    references = Batch(clouds.reference_offsets, clouds.reference_points.shape[0], clouds.count)
    first_bucket, first_sorted = (
        (bucket_count(references.rows, clouds.count), references.rows) if both else (0, 0)
    )
    return (
        Side(clouds.query_points, SearchedGrid(*grids[-3:], first_bucket, queries), first_sorted),
        Side(clouds.reference_points, SearchedGrid(*grids[:3], 0, references), 0),
    )


def _specs(query_points: Tensor, features: Tensor, **_: Any) -> dict:
    return {
        "aggregated": ((query_points.shape[0], features.shape[1]), features.dtype),
        "softmax": ((query_points.shape[0], 2), features.dtype),
    }


def _backward(
    launch: Launch,
    query_points: Tensor,
    query_offsets: Tensor | None,
    reference_points: Tensor,
    reference_offsets: Tensor | None,
    clouds: int,
    grids: list[Tensor],
    both: bool,
    features: Tensor,
    sigma: Tensor,
    radius: float,
    aggregated: Tensor,
    softmax: Tensor,
    grad_aggregated: Tensor,
    d_query_points: Tensor | None,
    d_reference_points: Tensor | None,
    d_features: Tensor | None,
    d_sigma: Tensor | None,
    **values: Any,
) -> None:
    packed = Clouds(query_points, query_offsets, reference_points, reference_offsets, clouds)
    queries, references = _sides(packed, grids, both)
    weighting = weighting_of(values)
    results = aggregated, softmax, grad_aggregated
    problem = radius_problem(query_points, features, sigma, radius, weighting, *results)
    wanted = Wanted(d_query_points, d_reference_points, d_features, d_sigma)
    if features.is_cuda and features.dtype == torch.float32:  # then positions are, too
        tile_backward(launch, queries, references, problem, weighting, wanted)
    else:
        ball_backward(launch, queries, references, problem, weighting, wanted)


def _second_backward(launch: Launch, **values: Any) -> None:
    fill_second_backward(values, chunks_within)


@warp_op(
    "pointproj::warp_radius_aggregate",
    outputs=_specs,
    differentiable=DIFFERENTIABLE,
    backward=_backward,
    second_backward=_second_backward,
)
def _aggregate(
    launch: Launch,
    query_points: Tensor,
    query_offsets: Tensor | None,
    reference_points: Tensor,
    reference_offsets: Tensor | None,
    clouds: int,
    grids: list[Tensor],
    both: bool,
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
    packed = Clouds(query_points, query_offsets, reference_points, reference_offsets, clouds)
    queries, references = _sides(packed, grids, both)
    weighting = Weighting(kernel, reduce, power, eps, support)
    problem = radius_problem(query_points, features, sigma, radius, weighting, aggregated, softmax)
    if features.is_cuda and features.dtype == torch.float32:  # then positions are, too
        own = queries.in_order(), queries.batch
        launch_tiles(launch, *own, references.searched, problem, kernel, reduce)
        return
    division = divide(features.shape[1], "cpu", most_lanes=1)
    compiled = aggregate_kernel(query_points.dtype, features.dtype, division, kernel, reduce)
    threads = queries.batch.rows * division.searches
    launch(compiled, threads, query_points, queries.batch, references.searched, problem)


@functools.cache
def aggregate_kernel(
    positions: torch.dtype, sums: torch.dtype, division: Division, kernel: str, reduce: str
) -> wp.Kernel:
    """Running softmax, or sum, over the points near a query, a thread a query: on a CPU, and in float64."""
    place, vec3 = REALS[positions]
    sorted_points = wp.array2d(dtype=place)
    real, _ = REALS[sums]
    _, channels, searches = division
    SearchedStruct, ProblemStruct = searched_struct(positions), problem_struct(positions, sums)
    distance = neighbor_distance(positions, sums)
    load_point, _, row_of = packed_point(positions)
    Channels, channel_of, add_row = row_sum(sums, 1, channels)
    rate_of, level_of, relative_weight, *_ = weight_functions(kernel, sums)
    relative = is_relative(kernel, reduce)

    @wp.struct
    class State:
        chunk: int
        rate: real  # at which weights decay
        base: real  # level of the nearest neighbour so far, if weights are relative to it
        total: real  # of the weights
        sums: Channels

    @wp.func
    def visit(state: State, q: vec3, problem: ProblemStruct, points: sorted_points, at: int, exists: bool):
        point = load_point(points, at)
        far = distance(problem, q, point)
        if far >= real(0.0):
            if wp.static(relative):
                level = level_of(far, problem.limit)
                if level < state.base:
                    rescale = wp.exp((level - state.base) * state.rate)
                    state.total *= rescale
                    state.sums *= rescale
                    state.base = level
            weight = relative_weight(state.base, far, state.rate, problem.limit)
            state.total += weight
            state.sums = add_row(state.sums, problem.features, state.chunk, weight, row_of(point))
        return state

    search = ball_search(positions, lanes(1), Visitor(State, ProblemStruct, visit))

    @wp.kernel(**OPTIONS)
    def aggregate(
        query_points: wp.array(dtype=vec3),
        batch: BatchStruct,
        searched: SearchedStruct,
        problem: ProblemStruct,
    ):
        query = wp.tid() / searches
        q = query_points[query]
        cloud = cloud_of(query, batch)
        state = State()
        state.chunk = wp.tid() % searches
        state.rate = rate_of(real(1.0), problem.sigma[0], problem.power, problem.limit)
        if wp.static(relative):
            state.base = real(wp.inf)
        if wp.isfinite(q):
            state = search(state, q, searched, problem, cloud, problem.radius)
        inverse = real(1.0)
        if wp.static(reduce == "mean"):
            inverse = real(0.0)
            if state.total > real(0.0):
                inverse = real(1.0) / state.total
        if not wp.isfinite(q):
            inverse = real(wp.nan)
        for i in range(channels):
            channel = channel_of(state.chunk, i)
            if channel < problem.features.shape[1]:
                problem.aggregated[query, channel] = state.sums[i] * inverse
        if state.chunk == 0:
            problem.softmax[query, 0] = state.base
            problem.softmax[query, 1] = inverse

    return aggregate
