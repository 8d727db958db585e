"""Gradients of positions within a radius on a GPU, and of features with them: lanes gather for one point."""

import functools
from typing import NamedTuple

import torch
import warp as wp

from pointproj.ops.backends.warp.common import OPTIONS, REALS, BatchStruct, cloud_of, packed_point
from pointproj.ops.backends.warp.hash_grid import ball_search, searched_struct
from pointproj.ops.backends.warp.lanes import lanes
from pointproj.ops.backends.warp.queue import Division, row_queue
from pointproj.ops.backends.warp.radius_pairs import neighbor_queue, problem_struct
from pointproj.ops.backends.warp.row_products import ROWS, row_products
from pointproj.ops.backends.warp.traversal import Visitor
from pointproj.ops.backends.warp.weighting import weight_functions

BLOCKS = 12  # of a processor at a time: so many registers keep most of a search and of the rows on their way


class Gathered(NamedTuple):
    """Whose gradients a kernel gathers: those of queries and sigma, or of references and their features."""

    from_query: bool
    features: bool


@functools.cache
def _pair_adder(
    positions: torch.dtype,
    sums: torch.dtype,
    division: Division,
    kernel: str,
    reduce: str,
    gathered: Gathered,
) -> tuple[Visitor, wp.Function]:
    """A visitor of candidates, and ``flush(state, q, problem, points) -> state`` to add up those that wait.

    A pair's share of the position is its factors times what the product of upstream gradient and feature
    exceeds that with the query's mean by; a sum takes all of it.
    """
    place, vec3 = REALS[positions]
    sorted_points = wp.array2d(dtype=place)
    real, _ = REALS[sums]
    ProblemStruct = problem_struct(positions, sums)
    load_point, _, _ = packed_point(positions)
    _, reserve, _, number_at, row_at, *_ = row_queue(sums, division)
    meet, is_full = neighbor_queue(positions, sums, division, keeps_place=True)
    Sums, _, add_rows, _ = row_products(sums, division, "sums" if gathered.features else "")
    _, _, relative_weight, pull, sigma_share, _ = weight_functions(kernel, sums)
    Shares = wp.types.vector(length=4, dtype=real)
    group, channels, of_row = lanes(division.lanes), division.channels, division.lanes // ROWS
    lane, any_item = group.lane, group.any_item
    from_query, divides = gathered.from_query, reduce == "mean"

    @wp.struct
    class State:
        place: int  # of the point itself among those of its set
        queued: int  # candidates whose distance waits in the queue
        rate: real  # at which weights decay
        mean: real  # of a query: upstream gradient times result
        shares: Shares  # along x, y, z, and of sigma
        sums: Sums

    @wp.func
    def flush(state: State, q: vec3, problem: ProblemStruct, points: sorted_points):
        queue = reserve()
        first = int(0)
        while any_item(first < state.queued):
            i = first + lane() / of_row
            place = int(-1)
            far = real(0.0)
            weight = real(0.0)
            mean = state.mean
            if i < state.queued:
                place = row_at(queue, i)
                far = number_at(queue, i)
                query = place
                if wp.static(from_query):
                    query = state.place
                elif wp.static(divides):
                    mean = problem.means[place]
                base = problem.softmax[query, 0]
                weight = relative_weight(base, far, state.rate, problem.limit) * problem.softmax[query, 1]
            if wp.static(from_query):
                state.sums = add_rows(
                    state.sums, problem.grad, state.place, problem.features, weight, place, problem.grad
                )
            else:
                state.sums = add_rows(
                    state.sums, problem.features, state.place, problem.grad, weight, place, problem.grad
                )
            if place >= 0 and lane() % of_row == 0:
                share = weight * (state.sums[channels] - mean)
                if wp.static(from_query):
                    state.shares[3] += share * sigma_share(far)
                if far > real(0.0):
                    scale = share * pull(far, state.rate, problem.limit) / far
                    point = load_point(points, place + problem.first)
                    for axis in range(3):
                        state.shares[axis] += scale * real(point[axis] - q[axis])
            first += ROWS
        state.queued = 0
        return state

    @wp.func
    def visit(state: State, q: vec3, problem: ProblemStruct, points: sorted_points, at: int, exists: bool):
        state.queued = meet(state.queued, q, problem, points, at, exists)
        if is_full(state.queued):
            state = flush(state, q, problem, points)
        return state

    return Visitor(State, ProblemStruct, visit), flush


@functools.cache
def point_gradient_kernel(
    positions: torch.dtype,
    sums: torch.dtype,
    division: Division,
    kernel: str,
    reduce: str,
    gathered: Gathered,
) -> wp.Kernel:
    """Gradient of the query points and of sigma, or that of the reference points and of their features.

    The first also writes the mean of each query, which the second reads: upstream gradient times result.
    Features, upstream gradients, softmax and means are in the order of the sorted points.
    """
    place, vec3 = REALS[positions]
    real, wide3 = REALS[sums]
    load_point, _, row_of = packed_point(positions)
    SearchedStruct, ProblemStruct = searched_struct(positions), problem_struct(positions, sums)
    visitor, flush = _pair_adder(positions, sums, division, kernel, reduce, gathered)
    State = visitor.State
    search = ball_search(positions, lanes(division.lanes), visitor)
    _, product, _, write = row_products(sums, division, "sums" if gathered.features else "")
    rate_of, *_, sigma_unit = weight_functions(kernel, sums)
    group = lanes(division.lanes)
    item, lane, total_of = group.item, group.lane, group.total

    @wp.kernel(**OPTIONS, launch_bounds=(division.block, BLOCKS))
    def point_gradient(
        sorted_points: wp.array2d(dtype=place),
        batch: BatchStruct,
        searched: SearchedStruct,
        problem: ProblemStruct,
        d_points: wp.array(dtype=wide3),
        d_sigma: wp.array(dtype=real),
        d_features: wp.array2d(dtype=real),
    ):
        first, _ = wp.tid()
        at = item(first)
        point = load_point(sorted_points, at)
        q = vec3(point[0], point[1], point[2])
        own = row_of(point)
        state = State()
        state.place = at
        state.rate = rate_of(real(1.0), problem.sigma[0], problem.power, problem.limit)
        if wp.static(gathered.from_query and reduce == "mean"):
            state.mean = product(problem.grad, at, problem.aggregated, own)
        state = search(state, q, searched, problem, cloud_of(own, batch), problem.radius)
        state = flush(state, q, problem, searched.points)
        for i in range(4):
            state.shares[i] = total_of(state.shares[i])
        if lane() == 0:
            d_points[own] = wide3(state.shares[0], state.shares[1], state.shares[2])
            if wp.static(gathered.from_query):
                d_sigma[own] = state.shares[3] / sigma_unit(problem.sigma[0])
                problem.means[at] = state.mean
        if wp.static(gathered.features):
            write(state.sums, d_features, own)

    return point_gradient
