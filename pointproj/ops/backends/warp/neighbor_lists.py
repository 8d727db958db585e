"""The nearest reference points within a radius of each query; :mod:`.all_within` lists all of them.

Both search the hash grid. Lists of the nearest are made, and all are counted, in one launch.
"""

import functools
from typing import Any, NamedTuple

import torch
import warp as wp
from torch import Tensor

from pointproj.ops.backends.warp.common import OPTIONS, REALS, Batch, BatchStruct, cloud_of, packed_point
from pointproj.ops.backends.warp.hash_grid import (
    SearchedGrid,
    ball_search,
    new_hash_grid,
    searched_struct,
)
from pointproj.ops.backends.warp.lanes import Lanes, lanes
from pointproj.ops.backends.warp.top_k import TopK, top_k_struct
from pointproj.ops.backends.warp.top_k_within import LANES, in_blocks, in_heap, in_lanes
from pointproj.ops.backends.warp.traversal import Visitor
from pointproj.ops.bridge.warp_op import Launch, warp_op
from pointproj.ops.clouds import Clouds
from pointproj.ops.pairs import largest_square_within, largest_squares_within
from pointproj.ops.registry import Tables

BLOCK = 128


def nearest_within(
    clouds: Clouds, grid: Tables | None, radius: float | Tensor, k: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Distances and rows of the k nearest within the radius, ``(Q, k)``, and counts of all, ``(Q,)``."""
    return _nearest_within(*arguments(clouds, grid, radius), k)


def arguments(clouds: Clouds, grid: Tables | None, radius: float | Tensor) -> tuple:
    """The first arguments of both operators: without a grid they build their own, which spares a call."""
    radii = (0.0, radius) if isinstance(radius, Tensor) else (float(radius), None)
    return *clouds.detached(), [] if grid is None else list(grid), *radii


class Balls(NamedTuple):
    """The queries and their radii; in kernels :func:`balls_struct`."""

    points: Tensor
    batch: Batch
    itself: bool  # whether they are the points of the hash grid
    radius: float
    largest_square: float  # largest squared distance that counts as within the radius
    radii: Tensor | None  # of each query, in place of one for all
    largest_squares: Tensor | None


@functools.cache
def balls_struct(dtype: torch.dtype) -> Any:
    """:class:`Balls` inside a kernel."""
    real, vec3 = REALS[dtype]

    @wp.struct
    class BallsStruct:
        points: wp.array(dtype=vec3)
        batch: BatchStruct
        itself: bool
        radius: real
        largest_square: real
        radii: wp.array(dtype=real)
        largest_squares: wp.array(dtype=real)

    return BallsStruct


def problem_of(
    launch: Launch,
    query_points: Tensor,
    query_offsets: Tensor | None,
    reference_points: Tensor,
    reference_offsets: Tensor | None,
    clouds: int,
    grid: list[Tensor],
    radius: float,
    radii: Tensor | None,
) -> tuple[Balls, SearchedGrid]:
    """What is searched for, and in which grid."""
    count, references = query_points.shape[0], reference_points.shape[0]
    # A cloud that searches itself goes in the order of its cells: warps side by side share what they read.
    itself = query_points.data_ptr() == reference_points.data_ptr() and count == references
    if not grid:
        largest = radii.amax().view(1) if radii is not None and count else None
        grid = new_hash_grid(launch, reference_points, reference_offsets, clouds, radius, largest)
    if radii is None:
        radius_and_limits = radius, largest_square_within(radius, query_points.dtype), None, None
    else:
        radius_and_limits = 0.0, 0.0, radii, largest_squares_within(radii, query_points)
    balls = Balls(query_points, Batch(query_offsets, count, clouds), itself, *radius_and_limits)
    return balls, SearchedGrid(*grid, 0, 0, Batch(reference_offsets, references, clouds))


def _nearest_specs(query_points: Tensor, k: int, **_: Any) -> dict:
    count = query_points.shape[0]
    return {
        "distances": ((count, k), query_points.dtype),
        "rows": ((count, k), torch.int64),
        "counts": ((count,), torch.int64),
    }


@warp_op("pointproj::warp_nearest_within", outputs=_nearest_specs, replayable=True)
def _nearest_within(
    launch: Launch,
    query_points: Tensor,
    query_offsets: Tensor | None,
    reference_points: Tensor,
    reference_offsets: Tensor | None,
    clouds: int,
    grid: list[Tensor],
    radius: float,
    radii: Tensor | None,
    k: int,
    *,
    distances: Tensor,
    rows: Tensor,
    counts: Tensor,
) -> None:
    problem = problem_of(
        launch, query_points, query_offsets, reference_points, reference_offsets, clouds, grid, radius, radii
    )
    width = LANES if query_points.is_cuda else 1
    kernel = nearest_kernel(query_points.dtype, width, k <= LANES)
    launch(kernel, (rows.shape[0], width), *problem, TopK(rows, distances), counts, block_dim=BLOCK)


class Ball(NamedTuple):
    """Functions that say which query a thread has, and search its ball."""

    query_of: wp.Function  # (number, balls, searched) -> the query of these lanes: its packed row and point
    search: wp.Function  # (state, query, q, balls, searched, data) -> state
    largest_square_of: wp.Function  # (query, balls)
    sum_of: wp.Function  # (x) -> sum over all lanes of a query, of int32


def ball_of(dtype: torch.dtype, group: Lanes, visitor: Visitor) -> Ball:
    _, vec3 = REALS[dtype]
    SearchedStruct, BallsStruct = searched_struct(dtype), balls_struct(dtype)
    State, Data = visitor.State, visitor.Data
    search_ball = ball_search(dtype, group, visitor)
    load_point, _, row_of = packed_point(dtype)
    item, take, sum_before, last = group.item, group.take, group.sum_before, group.count - 1

    @wp.func
    def query_of(number: int, balls: BallsStruct, searched: SearchedStruct):
        query = item(number)
        if balls.itself:
            point = load_point(searched.points, query)
            return row_of(point), vec3(point[0], point[1], point[2])
        return query, balls.points[query]

    @wp.func
    def search(state: State, query: int, q: vec3, balls: BallsStruct, searched: SearchedStruct, data: Data):
        radius = balls.radius
        if balls.radii:
            radius = balls.radii[query]
        if wp.isfinite(q):
            state = search_ball(state, q, searched, data, cloud_of(query, balls.batch), radius)
        return state

    @wp.func
    def largest_square_of(query: int, balls: BallsStruct):
        if balls.largest_squares:
            return balls.largest_squares[query]
        return balls.largest_square

    @wp.func
    def sum_of(x: int):
        return take(sum_before(x) + x, last)

    return Ball(query_of, search, largest_square_of, sum_of)


@functools.cache
def nearest_kernel(dtype: torch.dtype, width: int, few: bool) -> wp.Kernel:
    """The nearest within the radius, by ``width`` lanes a query; ``few``: not more than lanes of a warp."""
    SearchedStruct, BallsStruct = searched_struct(dtype), balls_struct(dtype)
    TopKStruct = top_k_struct(dtype, torch.int64)
    real, _ = REALS[dtype]
    maker = in_heap if width == 1 else in_lanes if few else in_blocks
    visitor, begin, finish = maker(dtype)
    group = lanes(width)
    query_of, search, largest_square_of, sum_of = ball_of(dtype, group, visitor)
    lane = group.lane

    @wp.kernel(**OPTIONS)
    def nearest(
        balls: BallsStruct, searched: SearchedStruct, found: TopKStruct, counts: wp.array(dtype=wp.int64)
    ):
        number, _ = wp.tid()
        query, q = query_of(number, balls, searched)
        state = begin(query, found, largest_square_of(query, balls))
        state = search(state, query, q, balls, searched, found)
        finish(state, query, found, wp.where(wp.isfinite(q), real(wp.inf), real(wp.nan)))
        count = sum_of(state.count)
        if lane() == 0:
            counts[query] = wp.int64(count)

    return nearest
