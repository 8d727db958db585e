"""Aggregation over all points within a radius: nothing is listed, nothing truncated.

The forward visits the reference points near each query and keeps a running softmax. Gradients that belong
to reference points are gathered by the transposed search, over the queries near each reference point, so
that no two threads ever add to one place.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
import warp as wp
from torch import Tensor

from pointproj.ops.backends.warp.common import OPTIONS, REALS, Batch, BatchStruct, cloud_of, packed_point
from pointproj.ops.backends.warp.hash_grid import (
    HashGrid,
    SearchedGrid,
    Side,
    ball_search,
    bucket_count,
    fill_hash_grid,
    hash_grid_specs,
    searched_struct,
)
from pointproj.ops.backends.warp.lanes import lanes
from pointproj.ops.backends.warp.queue import Division, divide, row_sum
from pointproj.ops.backends.warp.radius_backward import Wanted, fill_gradients
from pointproj.ops.backends.warp.radius_pairs import (
    neighbor_distance,
    problem_struct,
    radius_problem,
    result_writer,
)
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

    Without a hash grid of the references, the operator builds it, and that of the queries where it is needed.
    """
    needs_queries = features.is_cuda or features.requires_grad or clouds.reference_points.requires_grad
    return _aggregate(*clouds, list(grid or ()), needs_queries, features, sigma, radius, *weighting)[0]


def _sides(clouds: Clouds, given: Sequence[Tensor], made: Sequence[Tensor]) -> tuple[Side, Side]:
    """Queries and references, in the tables that were ``given``, of the references, and ``made``.

    Where that of the queries is not needed, it is missing, and must not be searched.
    """
    queries = Batch(clouds.query_offsets, clouds.query_points.shape[0], clouds.count)
    references = Batch(clouds.reference_offsets, clouds.reference_points.shape[0], clouds.count)
    second = 0, 0
    first_sorted = 0
    if not given:
        second = 1, bucket_count(references.rows, clouds.count)
        first_sorted = references.rows
    return (
        Side(clouds.query_points, SearchedGrid(*made, *second, queries), first_sorted),
        Side(clouds.reference_points, SearchedGrid(*(given or made), 0, 0, references), 0),
    )


def _specs(
    query_points: Tensor,
    reference_points: Tensor,
    clouds: int,
    grid: list[Tensor],
    with_queries: bool,
    features: Tensor,
    **_: Any,
) -> dict:
    sets = ([] if grid else [reference_points]) + ([query_points] if with_queries else [])
    return {
        "aggregated": ((query_points.shape[0], features.shape[1]), features.dtype),
        "softmax": ((query_points.shape[0], 2), features.dtype),
        **hash_grid_specs(sets, clouds, query_points.dtype),
    }


def _by_tiles(features: Tensor) -> bool:
    """Whether tiles of points work together: on a GPU in float32, which positions are then too."""
    return features.is_cuda and features.dtype == torch.float32


def _backward(
    launch: Launch,
    query_points: Tensor,
    query_offsets: Tensor | None,
    reference_points: Tensor,
    reference_offsets: Tensor | None,
    clouds: int,
    grid: list[Tensor],
    features: Tensor,
    sigma: Tensor,
    radius: float,
    aggregated: Tensor,
    softmax: Tensor,
    cell_width: Tensor,
    start: Tensor,
    sorted_points: Tensor,
    grad_aggregated: Tensor,
    d_query_points: Tensor | None,
    d_reference_points: Tensor | None,
    d_features: Tensor | None,
    d_sigma: Tensor | None,
    **values: Any,
) -> None:
    packed = Clouds(query_points, query_offsets, reference_points, reference_offsets, clouds)
    queries, references = _sides(packed, grid, (cell_width, start, sorted_points))
    weighting = weighting_of(values)
    results = aggregated, softmax, grad_aggregated
    problem = radius_problem(query_points, features, sigma, radius, weighting, *results)
    wanted = Wanted(d_query_points, d_reference_points, d_features, d_sigma)
    fill_gradients(launch, queries, references, problem, weighting, wanted)


def _second_backward(launch: Launch, **values: Any) -> None:
    fill_second_backward(values, chunks_within)


@warp_op(
    "pointproj::warp_radius_aggregate",
    outputs=_specs,
    differentiable=DIFFERENTIABLE,
    backward=_backward,
    second_backward=_second_backward,
    replayable=True,
)
def _aggregate(
    launch: Launch,
    query_points: Tensor,
    query_offsets: Tensor | None,
    reference_points: Tensor,
    reference_offsets: Tensor | None,
    clouds: int,
    grid: list[Tensor],
    with_queries: bool,
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
    cell_width: Tensor,
    start: Tensor,
    sorted_points: Tensor,
) -> None:
    """Build what is missing, and aggregate: in one operator, which spares eager calls the time of another."""
    packed = Clouds(query_points, query_offsets, reference_points, reference_offsets, clouds)
    made = HashGrid(cell_width, start, sorted_points)
    sets = [] if grid else [(reference_points, reference_offsets)]
    if with_queries:
        sets.append((query_points, query_offsets))
    if sets:
        rows = query_points.shape[0] + reference_points.shape[0]
        fill_hash_grid(launch, sets, clouds, (radius, None), made, rows)
    queries, references = _sides(packed, grid, made)
    weighting = Weighting(kernel, reduce, power, eps, support)
    problem = radius_problem(query_points, features, sigma, radius, weighting, aggregated, softmax)
    if _by_tiles(features):
        own = queries.in_order(), queries.batch
        launch_tiles(launch, *own, references.searched, problem, kernel, reduce)
        return
    division = divide(features.shape[1], "cpu", most_lanes=1)
    compiled = aggregate_kernel(query_points.dtype, features.dtype, division, kernel, reduce)
    threads = query_points.shape[0] * division.searches
    launch(compiled, threads, query_points, queries.batch, references.searched, problem)


@functools.cache
def aggregate_kernel(
    positions: torch.dtype, sums: torch.dtype, division: Division, kernel: str, reduce: str
) -> wp.Kernel:
    """Running softmax, or sum, over the points near a query, a thread a query: on a CPU, and in float64."""
    place, vec3 = REALS[positions]
    sorted_points = wp.array2d(dtype=place)
    real, _ = REALS[sums]
    searches = division.searches
    SearchedStruct, ProblemStruct = searched_struct(positions), problem_struct(positions, sums)
    distance = neighbor_distance(positions, sums)
    load_point, _, row_of = packed_point(positions)
    Channels, add_row, _ = row_sum(sums, division)
    write = result_writer(positions, sums, division, reduce)
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
        state = search(state, q, searched, problem, cloud, problem.radius)
        write(problem, query, wp.isfinite(q), state.chunk, state.base, state.total, state.sums)

    return aggregate
