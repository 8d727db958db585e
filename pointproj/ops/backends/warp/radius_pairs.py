"""What the kernels of the aggregation within a radius share: what they read and write, who is a neighbour.

Each thread, or GPU warp, owns one point, visits the points of the other set within the radius, and writes its
own rows only. Weights of a mean are a_ij = exp((nearest_i - d_ij) / sigma) / total_i, and for other kernels
what :mod:`pointproj.ops.backends.warp.weighting` says. The forward keeps nearest_i and 1 / total_i for the
backward, apart, because their logarithm would round away what is small next to nearest_i / sigma. Formulas
are in :mod:`pointproj.ops.gradients`.
"""

import functools
from typing import Any, NamedTuple

import torch
import warp as wp
from torch import Tensor

from pointproj.ops.backends.warp.common import REALS, packed_point
from pointproj.ops.backends.warp.lanes import lanes
from pointproj.ops.backends.warp.queue import Division, row_queue, row_sum
from pointproj.ops.backends.warp.weighting import limit_of
from pointproj.ops.pairs import largest_square_within
from pointproj.ops.reference import Weighting


class RadiusProblem(NamedTuple):
    """What is aggregated within which radius; in kernels :func:`problem_struct`."""

    radius: float
    largest_square: float  # largest squared distance that counts as within the radius
    sigma: Tensor
    power: float
    limit: float  # of the kernel: see the module of weightings
    features: Tensor  # (N, C), of the reference points
    aggregated: Tensor  # (Q, C), results of the queries
    softmax: Tensor  # (Q, 2), of the queries: level that weights are relative to, and 1 / total weight
    grad: Tensor | None = None  # (Q, C), upstream gradients of the results
    means: Tensor | None = None  # (Q,), sums over the channels of upstream gradient times result
    first: int = (
        0  # among the sorted points of the grid searched: the first of the set, whose rows are in order
    )


def radius_problem(
    query_points: Tensor,
    features: Tensor,
    sigma: Tensor,
    radius: float,
    weighting: Weighting,
    aggregated: Tensor,
    softmax: Tensor,
    grad: Tensor | None = None,
) -> RadiusProblem:
    """The problem as kernels take it."""
    square = largest_square_within(radius, query_points.dtype)
    numbers = weighting.power, limit_of(weighting)
    return RadiusProblem(radius, square, sigma, *numbers, features, aggregated, softmax, grad)


@functools.cache
def problem_struct(positions: torch.dtype, sums: torch.dtype) -> Any:
    """:class:`RadiusProblem` inside a kernel."""
    place, _ = REALS[positions]
    real, _ = REALS[sums]

    @wp.struct
    class ProblemStruct:
        radius: place
        largest_square: place
        sigma: wp.array(dtype=real)
        features: wp.array2d(dtype=real)
        aggregated: wp.array2d(dtype=real)
        softmax: wp.array2d(dtype=real)
        grad: wp.array2d(dtype=real)
        means: wp.array(dtype=real)
        power: real
        limit: real
        first: int

    return ProblemStruct


@functools.cache
def neighbor_distance(positions: torch.dtype, sums: torch.dtype) -> wp.Function:
    """``distance(problem, q, p)`` if within the radius, with the rounding of the reference; else -1."""
    place, vec3 = REALS[positions]
    vec4 = wp.types.vector(length=4, dtype=place)
    real, _ = REALS[sums]
    ProblemStruct = problem_struct(positions, sums)

    @wp.func
    def distance(problem: ProblemStruct, q: vec3, p: vec4):
        dx = q[0] - p[0]
        dy = q[1] - p[1]
        dz = q[2] - p[2]
        if not (dx * dx + dy * dy + dz * dz <= problem.largest_square):
            return real(-1.0)
        x = real(dx)
        y = real(dy)
        z = real(dz)
        return wp.sqrt(x * x + y * y + z * z)

    return distance


class NeighborQueue(NamedTuple):
    """Neighbours of a point that wait, with their distances, until it is worth to add them up."""

    meet: wp.Function  # (queued, q, problem, points, at, exists) -> queued, with the candidate of each lane
    is_full: wp.Function  # (queued) -> whether for any point of the GPU warp the next might not fit


@functools.cache
def neighbor_queue(
    positions: torch.dtype, sums: torch.dtype, division: Division, *, keeps_place: bool = False
) -> NeighborQueue:
    """For several lanes a point, which wait in the queue of :func:`row_queue`, there with the row of each
    neighbour, or its place among the sorted points of its set.
    """
    place, vec3 = REALS[positions]
    real, _ = REALS[sums]
    ProblemStruct = problem_struct(positions, sums)
    distance = neighbor_distance(positions, sums)
    load_point, _, row_of = packed_point(positions)
    queue = row_queue(sums, division)
    reserve, push, most = queue.reserve, queue.push, queue.capacity - division.lanes
    any_item = lanes(division.lanes).any_item

    @wp.func
    def meet(
        queued: int, q: vec3, problem: ProblemStruct, points: wp.array2d(dtype=place), at: int, exists: bool
    ):
        far = real(-1.0)
        row = int(0)
        if exists:
            point = load_point(points, at)
            far = distance(problem, q, point)
            row = row_of(point)
            if wp.static(keeps_place):
                row = at - problem.first
        return push(reserve(), queued, far >= real(0.0), far, row)

    @wp.func
    def is_full(queued: int):
        return any_item(queued > most)

    return NeighborQueue(meet, is_full)


@functools.cache
def result_writer(positions: torch.dtype, sums: torch.dtype, division: Division, reduce: str) -> wp.Function:
    """``write(problem, query, finite, chunk, base, total, sums)``: a query's results, and its softmax."""
    real, _ = REALS[sums]
    ProblemStruct = problem_struct(positions, sums)
    rows = row_sum(sums, division)
    Channels, write_row = rows.Channels, rows.write_row
    lane, total_of = lanes(division.lanes).lane, lanes(division.lanes).total

    @wp.func
    def write(
        problem: ProblemStruct, query: int, finite: bool, chunk: int, base: real, total: real, sums: Channels
    ):
        inverse = real(1.0)
        if wp.static(reduce == "mean"):
            total = total_of(total)
            inverse = real(0.0)
            if total > real(0.0):
                inverse = real(1.0) / total
        if not finite:
            inverse = real(wp.nan)
        write_row(sums, chunk, inverse, problem.aggregated, query)
        if chunk == 0 and lane() == 0:
            problem.softmax[query, 0] = base
            problem.softmax[query, 1] = inverse

    return write
