"""Kernels of the gradients of the aggregation within a radius."""

import functools

import torch
import warp as wp

from pointproj.ops.backends.warp.common import OPTIONS, REALS, BatchStruct, cloud_of, packed_point
from pointproj.ops.backends.warp.hash_grid import ball_search, searched_struct
from pointproj.ops.backends.warp.lanes import lanes
from pointproj.ops.backends.warp.queue import SMALL_BLOCK, Division, row_queue, row_sum
from pointproj.ops.backends.warp.radius_pairs import neighbor_distance, neighbor_queue, problem_struct
from pointproj.ops.backends.warp.traversal import Visitor
from pointproj.ops.backends.warp.weighting import weight_functions

THREADS_AT_HAND = 1024  # of a processor, in large blocks: latency is what gradients of features wait for
SMALL_BLOCKS = 14  # of a processor
TILE = 32  # points of a tile
TILES_OF_BLOCK = 4  # of which lanes take the sparse ones: of 10^8 points without any, blocks of 8 took 8.6 ms


def launch_bounds(division: Division) -> tuple[int, int]:
    """Threads of a block, and blocks at a time, of sums by lanes."""
    block = division.block
    return block, SMALL_BLOCKS if block == SMALL_BLOCK else THREADS_AT_HAND // block


def sparse_shape(rows: int, division: Division) -> tuple[int, int]:
    """Of a launch for the points of sparse tiles."""
    return -(-rows // (TILES_OF_BLOCK * TILE)) * (division.block // division.lanes), division.lanes


@functools.cache
def feature_gradient_kernel(
    positions: torch.dtype, sums: torch.dtype, division: Division, kernel: str, of_sparse: bool = False
) -> wp.Kernel:
    """Gradient of the features: weighted sum of upstream gradients of the queries near a reference point.

    Of all reference points; or ``of_sparse`` tiles, in a launch of :func:`sparse_shape`.
    """
    place, vec3 = REALS[positions]
    sorted_points = wp.array2d(dtype=place)
    real, _ = REALS[sums]
    count, searches = division.lanes, division.searches
    SearchedStruct, ProblemStruct = searched_struct(positions), problem_struct(positions, sums)
    distance = neighbor_distance(positions, sums)
    load_point, _, row_of = packed_point(positions)
    Channels, add_row, write_row = row_sum(sums, division)
    _, reserve, _, number_at, row_at, set_number, flush_rows = row_queue(sums, division)
    meet, is_full = neighbor_queue(positions, sums, division)
    group = lanes(count)
    item, lane = group.item, group.lane
    rate_of, _, relative_weight, *_ = weight_functions(kernel, sums)

    @wp.struct
    class State:
        chunk: int
        rate: real  # at which weights decay
        sums: Channels
        queued: int  # queries whose distance waits in the queue

    @wp.func
    def weight_of(problem: ProblemStruct, query: int, far: real, rate: real):
        weight = relative_weight(problem.softmax[query, 0], far, rate, problem.limit)
        return weight * problem.softmax[query, 1]

    @wp.func
    def flush(state: State, problem: ProblemStruct):
        """Add up the queries that wait."""
        queue = reserve()
        for i in range(lane(), state.queued, count):
            far = number_at(queue, i)
            set_number(queue, i, weight_of(problem, row_at(queue, i), far, state.rate))
        state.sums = flush_rows(state.sums, problem.grad, state.chunk, queue, state.queued)
        state.queued = 0
        return state

    @wp.func
    def visit(state: State, p: vec3, problem: ProblemStruct, points: sorted_points, at: int, exists: bool):
        if wp.static(count == 1):
            point = load_point(points, at)
            far = distance(problem, p, point)
            if far >= real(0.0):
                query = row_of(point)
                weight = weight_of(problem, query, far, state.rate)
                state.sums = add_row(state.sums, problem.grad, state.chunk, weight, query)
        else:
            state.queued = meet(state.queued, p, problem, points, at, exists)
            if is_full(state.queued):
                state = flush(state, problem)
        return state

    search = ball_search(positions, lanes(count), Visitor(State, ProblemStruct, visit))

    @wp.func
    def gather(
        at: int,
        chunk: int,
        reference_points: sorted_points,
        batch: BatchStruct,
        searched: SearchedStruct,
        problem: ProblemStruct,
        d_features: wp.array2d(dtype=real),
    ):
        point = load_point(reference_points, at)
        p = vec3(point[0], point[1], point[2])
        reference = row_of(point)
        cloud = cloud_of(reference, batch)
        state = State()
        state.chunk = chunk
        state.rate = rate_of(real(1.0), problem.sigma[0], problem.power, problem.limit)
        state = search(state, p, searched, problem, cloud, problem.radius)
        if wp.static(count > 1):
            state = flush(state, problem)
        write_row(state.sums, state.chunk, real(1.0), d_features, reference)

    at_once = division.block // count  # points of a block
    steps = TILES_OF_BLOCK * TILE // at_once * searches

    @wp.kernel(**OPTIONS, launch_bounds=launch_bounds(division))
    def feature_gradient(
        reference_points: sorted_points,
        batch: BatchStruct,
        searched: SearchedStruct,
        problem: ProblemStruct,
        sparse: wp.array(dtype=wp.int32),
        d_features: wp.array2d(dtype=real),
    ):
        # In the order of the cells: threads side by side then read the same rows.
        first, _ = wp.tid()
        number = item(first)
        if wp.static(of_sparse):
            begin = number / at_once * (TILES_OF_BLOCK * TILE) + number % at_once
            number_of_steps = int(steps)  # a variable, so that the loop is not unrolled
            for step in range(number_of_steps):
                at = begin + step / searches * at_once
                if at / TILE < sparse.shape[0] and sparse[at / TILE] != 0:
                    # Lanes beyond the last point repeat it: all of a warp go on together.
                    last = wp.min(at, batch.rows - 1)
                    gather(last, step % searches, reference_points, batch, searched, problem, d_features)
        else:
            chunk = number % searches
            gather(number / searches, chunk, reference_points, batch, searched, problem, d_features)

    return feature_gradient


def _pair_visitor(
    positions: torch.dtype, sums: torch.dtype, kernel: str, reduce: str, from_query: bool
) -> Visitor:
    """Adds up what pairs do to a point's position and to sigma.

    A pair's share is its factors (one for each axis, one for sigma) times the sum over the channels of
    upstream gradient times what the reference's feature exceeds the query's mean by; a sum takes all of it.
    """
    place, vec3 = REALS[positions]
    sorted_points = wp.array2d(dtype=place)
    real, _ = REALS[sums]
    ProblemStruct = problem_struct(positions, sums)
    distance = neighbor_distance(positions, sums)
    load_point, _, row_of = packed_point(positions)
    _, _, relative_weight, pull, sigma_share, _ = weight_functions(kernel, sums)
    Shares = wp.types.vector(length=4, dtype=real)

    @wp.struct
    class State:
        row: int  # of the point itself
        rate: real  # at which weights decay
        base: real  # of the query of a pair, as the forward kept it
        inverse: real
        shares: Shares  # along x, y, z, and of sigma

    @wp.func
    def visit(state: State, p: vec3, problem: ProblemStruct, points: sorted_points, at: int, exists: bool):
        point = load_point(points, at)
        far = distance(problem, p, point)
        if far >= real(0.0):
            query = state.row
            reference = row_of(point)
            if wp.static(not from_query):
                query = reference
                reference = state.row
                state.base = problem.softmax[query, 0]
                state.inverse = problem.softmax[query, 1]
            product = real(0.0)
            for channel in range(problem.grad.shape[1]):
                excess = problem.features[reference, channel]
                if wp.static(reduce == "mean"):
                    excess -= problem.aggregated[query, channel]
                product += problem.grad[query, channel] * excess
            weight = relative_weight(state.base, far, state.rate, problem.limit) * state.inverse
            factors = Shares()
            if far > real(0.0):
                scale = weight * pull(far, state.rate, problem.limit) / far
                for axis in range(3):
                    factors[axis] = scale * real(point[axis] - p[axis])
            factors[3] = weight * sigma_share(far)
            state.shares += product * factors
        return state

    return Visitor(State, ProblemStruct, visit)


@functools.cache
def position_gradient_kernel(
    positions: torch.dtype, sums: torch.dtype, kernel: str, reduce: str, from_query: bool
) -> wp.Kernel:
    """Gradient of the query points and of sigma, or that of the reference points, on a CPU.

    Each is gathered over the pairs of its own points, in the dtype ``sums``, at least as wide as that of the
    positions. ``from_query`` says whether the points are queries, and those near them references.
    """
    _, vec3 = REALS[positions]
    real, wide3 = REALS[sums]
    SearchedStruct, ProblemStruct = searched_struct(positions), problem_struct(positions, sums)
    visitor = _pair_visitor(positions, sums, kernel, reduce, from_query)
    rate_of, *_, sigma_unit = weight_functions(kernel, sums)
    State = visitor.State
    search = ball_search(positions, lanes(1), visitor)

    @wp.kernel(**OPTIONS)
    def position_gradient(
        own_points: wp.array(dtype=vec3),
        batch: BatchStruct,
        searched: SearchedStruct,
        problem: ProblemStruct,
        d_points: wp.array(dtype=wide3),
        d_sigma: wp.array(dtype=real),
    ):
        own = wp.tid()
        p = own_points[own]
        state = State()
        state.row = own
        state.rate = rate_of(real(1.0), problem.sigma[0], problem.power, problem.limit)
        if wp.static(from_query):
            state.base = problem.softmax[own, 0]
            state.inverse = problem.softmax[own, 1]
        state = search(state, p, searched, problem, cloud_of(own, batch), problem.radius)
        d_points[own] = wide3(state.shares[0], state.shares[1], state.shares[2])
        if wp.static(from_query):
            d_sigma[own] = state.shares[3] / sigma_unit(problem.sigma[0])

    return position_gradient
