"""The two gradients of every aggregation: that of the queries and sigma, and that of the references.

Formulas are in :mod:`pointproj.ops.specification.gradients`. The gradient of a pair's logit is its weight
times (product - mean): product is upstream gradient times feature, mean is upstream gradient times result.

If a neighbour has nearly all the weight, this difference is little more than rounding errors, which steep
kernels magnify. The gradients of the logits of a query have the sum 0, so that of such a neighbour is minus
the sum of the others.
"""

import torch
import warp as wp
from torch import Tensor

from pointproj.ops.backends.warp import common
from pointproj.ops.backends.warp.common import OPTIONS, REALS, Points, once, struct_of
from pointproj.ops.backends.warp.lanes import lanes
from pointproj.ops.backends.warp.neighbors import NeighborSource, Variant, each_neighbor
from pointproj.ops.backends.warp.queue import BLOCK, Accumulator
from pointproj.ops.backends.warp.sums import Problem, has_weight_function, launch_bounds, row_functions
from pointproj.ops.backends.warp.weights import POWER_OF_SIGMA, weights_of
from pointproj.ops.bridge.warp_op import Launch

NEARLY_ALL = 0.75, 0.875  # of the weight; the rounding of a reference's weight is not that of its query's


def launch_query_gradient(
    launch: Launch,
    variant: Variant,
    queries: Points,
    source: NeighborSource,
    problem: Problem,
    of_points: bool,
    d_points: Tensor | None,
    d_sigma: Tensor | None,
) -> None:
    """Fill the gradients of query points and sigma, if ``of_points``, and ``problem.means``.

    Over lists, atomics add up the gradients of features and reference points, where the problem has them.
    """
    of_sigma = None
    if of_points:
        d_points = torch.empty_like(queries.positions) if d_points is None else d_points
        of_sigma = problem.softmax.new_empty(queries.batch.rows)
    kernel = query_gradient_kernel(variant, of_points, problem.d_features is not None)
    shape = queries.batch.rows, variant.lanes
    launch(kernel, shape, queries, source, problem, d_points, of_sigma, block_dim=BLOCK)
    if d_sigma is not None:
        torch.sum(of_sigma, 0, out=d_sigma)


def launch_reference_gradient(
    launch: Launch,
    variant: Variant,
    references: Points,
    source: NeighborSource,
    problem: Problem,
    d_points: Tensor | None,
) -> None:
    """Fill the gradients of reference points and features, gathered over the queries within the radius."""
    of_features = problem.d_features is not None
    chunks = problem.chunks if of_features else 1  # each chunk of the features takes a search
    kernel = reference_gradient_kernel(variant, d_points is not None, of_features)
    shape = references.batch.rows * chunks, variant.lanes
    launch(kernel, shape, references, source, problem, chunks, d_points, block_dim=BLOCK)


@once
def query_gradient_kernel(variant: Variant, of_points: bool, of_features: bool) -> wp.Kernel:
    """A gather over the neighbours of each query."""
    coordinate, vec3, _ = REALS[variant.positions]
    real, *_ = REALS[variant.sums]
    PointsStruct = struct_of(Points, variant.positions)
    ProblemStruct = struct_of(Problem, variant.positions, variant.sums)
    rows, group = row_functions(variant), lanes(variant.lanes)
    weights = weights_of(variant.kernel, variant.reduce, variant.sums)
    accumulator, add_logit = _query_accumulator(variant, of_points, of_features)
    SourceStruct, add_neighbors = each_neighbor(variant, accumulator)
    State, Vectors, Reals = accumulator.State, wp.array(dtype=vec3), wp.array(dtype=real)
    Pair = wp.types.vector(length=2, dtype=real)

    @wp.func
    def mean_of(query: int, problem: ProblemStruct):
        """Upstream gradient times result, rounded as the products with features are."""
        mean = real(0.0)
        if wp.static(variant.reduce != "sum"):
            for chunk in range(problem.chunks):
                own = rows.load(problem.grad, query, chunk)
                values = rows.load(problem.aggregated, query, chunk)
                mean = rows.product(mean, own, values, chunk, problem.columns)
            mean = group.total(mean)
        return mean

    @wp.kernel(**OPTIONS, launch_bounds=launch_bounds(variant))
    def query_gradient(
        points: PointsStruct, source: SourceStruct, problem: ProblemStruct, d_points: Vectors, d_sigma: Reals
    ):
        """Launched over queries and lanes; fills the gradients, and ``means``."""
        number, _ = wp.tid()
        query, q = common.take(points, group.item(number))
        softmax = problem.softmax[query]
        state = State()
        state.q = q
        state.row = query
        state.inverse_sigma = real(1.0) / problem.sigma[0]
        state.base = softmax[0]
        state.inverse_total = softmax[1]
        state.own = rows.load(problem.grad, query, 0)
        if wp.static(of_points):
            state.mean = mean_of(query, problem)
            state.largest = -1
        state = add_neighbors(state, query, q, common.cloud_of(query, points.batch), source, problem)
        if wp.static(of_points):
            rest = group.total(state.rest)
            if state.largest >= 0:
                state = add_logit(state, problem, state.largest, rest)
            d_point = vec3()
            for axis in range(3):
                d_point[axis] = coordinate(group.total(state.d_point[axis]))
            d_logits = group.total(state.logits)
            if group.lane() == 0:
                d_points[query] = d_point
                d_sigma[query] = weights.by_sigma(d_logits, state.inverse_sigma)
                if problem.means:
                    problem.means[query] = Pair(state.mean, rest)

    return query_gradient


def _query_accumulator(
    variant: Variant, of_points: bool, of_features: bool
) -> tuple[Accumulator, wp.Function]:
    """The gradients of a query's position and of sigma; those of references are added by atomics.

    The second is ``add_logit(state, problem, row, gradient of its logit)``.
    """
    coordinate, vec3, _ = REALS[variant.positions]
    real, sums_vec3, _ = REALS[variant.sums]
    ProblemStruct = struct_of(Problem, variant.positions, variant.sums)
    rows, has_weight = row_functions(variant), has_weight_function(variant)
    Channels = rows.Channels
    weights = weights_of(variant.kernel, variant.reduce, variant.sums)

    @wp.struct
    class State:
        q: vec3
        row: int
        inverse_sigma: real
        base: real
        inverse_total: real
        mean: real
        own: Channels  # the first chunk of the query's upstream gradient
        d_point: sums_vec3
        logits: real  # sum of logits times their gradients
        largest: int  # the neighbour with nearly all the weight, -1 without one
        rest: real  # minus the gradients of the logits of all others

    @wp.func
    def weigh(state: State, problem: ProblemStruct, row: int, squared: real):
        weight = weights.weight(state.base, wp.sqrt(squared), state.inverse_sigma, problem)
        return state, weight * state.inverse_total

    @wp.func
    def add_row(state: State, problem: ProblemStruct, exists: bool, row: int, weight: real):
        product = real(0.0)
        for chunk in range(wp.where(wp.static(variant.single), 1, problem.chunks)):
            own = state.own
            if chunk > 0:
                own = rows.load(problem.grad, state.row, chunk)
            if wp.static(of_points):
                values = rows.load(problem.features, row, chunk)
                product = rows.product(product, own, values, chunk, problem.columns)
            if wp.static(of_features):
                rows.scatter(own, exists, weight, problem.d_features, row, chunk)
        return state, product

    @wp.func
    def add_logit(state: State, problem: ProblemStruct, row: int, d_logit: real):
        other = problem.others[row]
        distance = wp.sqrt(common.squared_distance(state.q, other, d_logit))
        if wp.static(variant.kernel in POWER_OF_SIGMA):
            state.logits += d_logit * weights.logit(state.base, distance, state.inverse_sigma, problem)
        decay = weights.decay(distance, state.inverse_sigma, problem)
        if distance > real(0.0) and decay > real(0.0):  # where it is 0, d_logit may be infinite
            for axis in range(3):
                step = d_logit * decay * (real(other[axis] - state.q[axis]) / distance)
                state.d_point[axis] += step
                if problem.d_others:
                    wp.atomic_add(problem.d_others, row, axis, coordinate(-step))
        return state

    @wp.func
    def add_pair(state: State, problem: ProblemStruct, row: int, weight: real, product: real):
        if has_weight(problem, row):
            if wp.static(variant.reduce != "sum") and weight > real(wp.static(NEARLY_ALL[0])):
                state.largest = row
            else:
                d_logit = weight * (product - state.mean)
                state.rest -= d_logit
                state = add_logit(state, problem, row, d_logit)
        return state

    pairs = add_pair if of_points else None
    return Accumulator(State, ProblemStruct, has_weight, None, weigh, add_row, pairs), add_logit


@once
def reference_gradient_kernel(variant: Variant, of_points: bool, of_features: bool) -> wp.Kernel:
    """A gather over the queries around each reference point."""
    coordinate, vec3, _ = REALS[variant.positions]
    real, *_ = REALS[variant.sums]
    PointsStruct = struct_of(Points, variant.positions)
    ProblemStruct = struct_of(Problem, variant.positions, variant.sums)
    rows, group = row_functions(variant), lanes(variant.lanes)
    accumulator = _reference_accumulator(variant, of_points, of_features)
    SourceStruct, add_neighbors = each_neighbor(variant, accumulator)
    State, Vectors = accumulator.State, wp.array(dtype=vec3)

    @wp.kernel(**OPTIONS, launch_bounds=launch_bounds(variant))
    def reference_gradient(
        references: PointsStruct, source: SourceStruct, problem: ProblemStruct, chunks: int, d_points: Vectors
    ):
        """Launched over references times chunks, and lanes; fills the gradients."""
        number, _ = wp.tid()
        number = group.item(number)
        row, q = common.take(references, number / chunks)
        state = State()
        state.q = q
        state.row = row
        state.chunk = number % chunks
        state.inverse_sigma = real(1.0) / problem.sigma[0]
        if wp.static(of_points):
            state.own = rows.load(problem.features, row, 0)
        state = add_neighbors(state, row, q, common.cloud_of(row, references.batch), source, problem)
        if wp.static(of_features):
            rows.store(state.sums, real(1.0), problem.d_features, row, state.chunk)
        if wp.static(of_points):
            d_point = vec3()
            for axis in range(3):
                d_point[axis] = coordinate(group.total(state.d_point[axis]))
            if state.chunk == 0 and group.lane() == 0:
                d_points[row] = d_point

    return reference_gradient


def _reference_accumulator(variant: Variant, of_points: bool, of_features: bool) -> Accumulator:
    """The gradients of a reference point's position and of its features."""
    _, vec3, _ = REALS[variant.positions]
    real, sums_vec3, _ = REALS[variant.sums]
    ProblemStruct = struct_of(Problem, variant.positions, variant.sums)
    rows, has_weight = row_functions(variant), has_weight_function(variant)
    Channels = rows.Channels
    weights = weights_of(variant.kernel, variant.reduce, variant.sums)

    @wp.struct
    class State:
        q: vec3
        row: int
        chunk: int
        inverse_sigma: real
        own: Channels  # the first chunk of the point's features
        d_point: sums_vec3
        sums: Channels  # of the features' gradient

    @wp.func
    def weigh(state: State, problem: ProblemStruct, query: int, squared: real):
        softmax = problem.softmax[query]
        weight = weights.weight(softmax[0], wp.sqrt(squared), state.inverse_sigma, problem)
        return state, weight * softmax[1]

    @wp.func
    def add_upstream(state: State, problem: ProblemStruct, exists: bool, query: int, weight: real):
        state.sums = rows.add(state.sums, exists, weight, rows.load(problem.grad, query, state.chunk))
        return state, real(0.0)

    @wp.func
    def add_product(state: State, problem: ProblemStruct, exists: bool, query: int, weight: real):
        product = real(0.0)
        for chunk in range(wp.where(wp.static(variant.single), 1, problem.chunks)):
            own = state.own
            if chunk > 0:
                own = rows.load(problem.features, state.row, chunk)
            values = rows.load(problem.grad, query, chunk)
            product = rows.product(product, own, values, chunk, problem.columns)
            if wp.static(of_features):
                state.sums = rows.add(state.sums, exists and chunk == state.chunk, weight, values)
        return state, product

    @wp.func
    def add_pair(state: State, problem: ProblemStruct, query: int, weight: real, product: real):
        if has_weight(problem, state.row):
            d_logit = weight * product
            if wp.static(variant.reduce != "sum"):
                mean = problem.means[query]
                has_nearly_all = weight > real(wp.static(NEARLY_ALL[1]))
                d_logit = wp.where(has_nearly_all, mean[1], weight * (product - mean[0]))
            other = problem.others[query]
            distance = wp.sqrt(common.squared_distance(state.q, other, weight))
            decay = weights.decay(distance, state.inverse_sigma, problem)
            if distance > real(0.0) and decay > real(0.0):
                for axis in range(3):
                    state.d_point[axis] += d_logit * decay * (real(other[axis] - state.q[axis]) / distance)
        return state

    if not of_points:
        return Accumulator(State, ProblemStruct, has_weight, None, weigh, add_upstream, None)
    return Accumulator(State, ProblemStruct, has_weight, None, weigh, add_product, add_pair)
