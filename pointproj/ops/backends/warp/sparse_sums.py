"""Sums within a radius for points on a GPU that have few neighbours in common: some lanes work on each.

What :mod:`pointproj.ops.backends.warp.tile_sums` leaves. A forward of the workload
``large`` takes 34.9 ms, with tiles alone 291.
"""

import functools

import torch
import warp as wp
from torch import Tensor

from pointproj.ops.backends.warp.common import OPTIONS, REALS, Batch, BatchStruct, cloud_of, packed_point
from pointproj.ops.backends.warp.hash_grid import SearchedGrid, ball_search, searched_struct
from pointproj.ops.backends.warp.lanes import lanes
from pointproj.ops.backends.warp.queue import Division, few_lanes, row_queue, row_sum
from pointproj.ops.backends.warp.radius_gradients import TILE, launch_bounds
from pointproj.ops.backends.warp.radius_pairs import (
    RadiusProblem,
    neighbor_queue,
    problem_struct,
    result_writer,
)
from pointproj.ops.backends.warp.traversal import Visitor
from pointproj.ops.backends.warp.weighting import is_relative, weight_functions
from pointproj.ops.bridge.warp_op import Launch


def launch_sparse(
    launch: Launch,
    sorted_queries: Tensor,
    batch: Batch,
    searched: SearchedGrid,
    problem: RadiusProblem,
    sparse: Tensor,
    kernel: str,
    reduce: str,
) -> None:
    """Fill the rows of ``problem.aggregated`` and ``problem.softmax`` whose tile is sparse."""
    division = few_lanes(problem.features)
    compiled = sparse_kernel(division, kernel, reduce)
    shape, own = (batch.rows * division.searches, division.lanes), (sorted_queries, batch)
    launch(compiled, shape, *own, searched, problem, sparse, block_dim=division.block)


@functools.cache
def sparse_kernel(division: Division, kernel: str, reduce: str) -> wp.Kernel:
    """Running softmax, or sum, over the reference points near a query."""
    positions = sums = torch.float32
    place, vec3 = REALS[positions]
    sorted_points = wp.array2d(dtype=place)
    real, _ = REALS[sums]
    count, searches = division.lanes, division.searches
    SearchedStruct, ProblemStruct = searched_struct(positions), problem_struct(positions, sums)
    load_point, _, row_of = packed_point(positions)
    Channels = row_sum(sums, division).Channels
    _, reserve, _, number_at, _, set_number, flush_rows = row_queue(sums, division)
    meet, is_full = neighbor_queue(positions, sums, division)
    write = result_writer(positions, sums, division, reduce)
    group = lanes(count)
    item, lane, minimum = group.item, group.lane, group.minimum
    rate_of, level_of, relative_weight, *_ = weight_functions(kernel, sums)
    relative = is_relative(kernel, reduce)

    @wp.struct
    class State:
        chunk: int
        rate: real  # at which weights decay
        base: real  # level of the nearest neighbour so far, if weights are relative to it
        total: real  # of this lane's weights
        sums: Channels
        queued: int  # references whose distance waits in the queue

    @wp.func
    def flush(state: State, problem: ProblemStruct):
        """Add up the references that wait."""
        queue = reserve()
        if wp.static(relative):
            least = real(wp.inf)
            for i in range(lane(), state.queued, count):
                least = wp.min(least, level_of(number_at(queue, i), problem.limit))
            least = minimum(least)
            if least < state.base:
                rescale = wp.exp((least - state.base) * state.rate)
                state.total *= rescale
                state.sums *= rescale
                state.base = least
        for i in range(lane(), state.queued, count):
            weight = relative_weight(state.base, number_at(queue, i), state.rate, problem.limit)
            state.total += weight
            set_number(queue, i, weight)
        state.sums = flush_rows(state.sums, problem.features, state.chunk, queue, state.queued)
        state.queued = 0
        return state

    @wp.func
    def visit(state: State, q: vec3, problem: ProblemStruct, points: sorted_points, at: int, exists: bool):
        state.queued = meet(state.queued, q, problem, points, at, exists)
        if is_full(state.queued):
            state = flush(state, problem)
        return state

    search = ball_search(positions, group, Visitor(State, ProblemStruct, visit))

    @wp.kernel(**OPTIONS, launch_bounds=launch_bounds(division))
    def aggregate_sparse(
        sorted_queries: wp.array2d(dtype=place),
        batch: BatchStruct,
        searched: SearchedStruct,
        problem: ProblemStruct,
        sparse: wp.array(dtype=wp.int32),
    ):
        first, _ = wp.tid()
        at = item(first) / searches
        if sparse[at / TILE] == 0:
            return
        point = load_point(sorted_queries, at)
        q = vec3(point[0], point[1], point[2])
        query = row_of(point)
        state = State()
        state.chunk = item(first) % searches
        state.rate = rate_of(real(1.0), problem.sigma[0], problem.power, problem.limit)
        if wp.static(relative):
            state.base = real(wp.inf)
        state = search(state, q, searched, problem, cloud_of(query, batch), problem.radius)
        state = flush(state, problem)
        write(problem, query, wp.isfinite(q), state.chunk, state.base, state.total, state.sums)

    return aggregate_sparse
