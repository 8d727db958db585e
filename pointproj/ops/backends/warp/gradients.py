"""The two gradients of every aggregation: that of the queries and sigma, and that of the references.

Formulas are in :mod:`pointproj.ops.specification.gradients`.
"""

from typing import NamedTuple

import torch
import warp as wp
from torch import Tensor

from pointproj.ops.backends.warp import common
from pointproj.ops.backends.warp.common import OPTIONS, REALS, Points, once, struct_of
from pointproj.ops.backends.warp.lanes import lanes
from pointproj.ops.backends.warp.neighbors import BLOCK, Adder, Form, Source, meeting
from pointproj.ops.backends.warp.sums import (
    BLOCKS,
    Problem,
    counts_function,
    row_functions,
)
from pointproj.ops.backends.warp.weights import PER_SIGMA, weights_of
from pointproj.ops.bridge.warp_op import Launch


class Gathered(NamedTuple):
    """Which gradients a kernel fills.

    Over lists, queries add to the gradients of their references by atomics; within a radius each point
    gathers its own over its neighbours in the other set.
    """

    of_queries: bool  # else of references
    points: bool  # of the own points, with sigma for queries; over lists of the references too
    features: bool


def launch_gradients(
    launch: Launch,
    form: Form,
    points: Points,
    source: Source,
    problem: Problem,
    gathered: Gathered,
    d_points: Tensor | None,
    d_sigma: Tensor | None = None,
) -> None:
    """Fill the gradients of the points, of features and of sigma, as far as they are gathered.

    With that of query points it fills ``problem.means`` (Q,), which those of the references read.
    """
    of_sigma = None
    if gathered.of_queries and gathered.points:
        d_points = torch.empty_like(points.positions) if d_points is None else d_points
        of_sigma = problem.softmax.new_empty(points.batch.rows)
    chunks = problem.chunks if gathered.features and not gathered.of_queries else 1  # each takes a search
    given = points, source, problem, chunks, d_points, of_sigma
    shape = points.batch.rows * chunks, form.lanes
    launch(gradient_kernel(form, gathered), shape, *given, block_dim=BLOCK)
    if d_sigma is not None:
        torch.sum(of_sigma, 0, out=d_sigma)


@once
def gradient_kernel(form: Form, gathered: Gathered) -> wp.Kernel:
    """What ``gathered`` says."""
    positions, sums, reduce = form.positions, form.sums, form.reduce
    place, vec3, _ = REALS[positions]
    real, *_ = REALS[sums]
    PointsStruct, ProblemStruct = struct_of(Points, positions), struct_of(Problem, positions, sums)
    rows = row_functions(form)
    group = lanes(form.lanes)
    weights, per_sigma = weights_of(form.kernel, reduce, sums), PER_SIGMA.get(form.kernel, 0.0)
    adder = _gradient_adder(form, gathered)
    State = adder.State
    SourceStruct, each_neighbor = meeting(form, adder)
    of_queries, of_points, of_features = gathered

    @wp.func
    def mean_of(query: int, problem: ProblemStruct):
        """Upstream gradient times result, rounded as their products with features."""
        mean = real(0.0)
        if wp.static(reduce != "sum"):
            for block in range(problem.chunks):
                own = rows.load(problem.grad, query, block)
                values = rows.load(problem.aggregated, query, block)
                mean = rows.product(mean, own, values, block, problem.columns)
            mean = group.total(mean)
        return mean

    @wp.kernel(**OPTIONS, launch_bounds=(BLOCK, BLOCKS if positions == torch.float32 else 1))
    def gradient(
        points: PointsStruct,
        source: SourceStruct,
        problem: ProblemStruct,
        chunks: int,
        d_points: wp.array(dtype=vec3),
        of_sigma: wp.array(dtype=real),
    ):
        """Launched over points times chunks, and lanes; fills what is gathered, for queries ``means`` too."""
        number, _ = wp.tid()
        number = group.item(number)
        chunk = number % chunks
        row, q = common.take(points, number / chunks)
        state = State()
        state.q = q
        state.row = row
        state.chunk = chunk
        state.rate = weights.rate(problem.sigma[0], problem.power, problem.limit)
        if wp.static(of_queries):
            softmax = problem.softmax[row]
            state.base = softmax[0]
            state.inverse = softmax[1]
            state.own = rows.load(problem.grad, row, 0)
            if wp.static(of_points):
                state.mean = mean_of(row, problem)
        elif wp.static(of_points):
            state.own = rows.load(problem.features, row, 0)
        state = each_neighbor(state, row, q, common.cloud_of(row, points.batch), source, problem)
        if wp.static(of_features and not of_queries):
            rows.store(state.sums, real(1.0), problem.d_features, row, chunk)
        if wp.static(of_points):
            for i in range(4):
                state.shares[i] = group.total(state.shares[i])
            if chunk == 0 and group.lane() == 0:
                d_points[row] = vec3(place(state.shares[0]), place(state.shares[1]), place(state.shares[2]))
                if wp.static(of_queries):
                    of_sigma[row] = state.shares[3] * state.rate * real(per_sigma)
                    if problem.means:
                        problem.means[row] = state.mean

    return gradient


def _gradient_adder(form: Form, gathered: Gathered) -> Adder:
    """What a pair does to a point's position, to features and to sigma.

    A pair's share of the position is its factors times what the product of upstream gradient and feature
    exceeds that with the query's mean by; a sum takes all of it.
    """
    positions, sums = form.positions, form.sums
    place, vec3, _ = REALS[positions]
    real, *_ = REALS[sums]
    ProblemStruct = struct_of(Problem, positions, sums)
    rows = row_functions(form)
    Channels = rows.Channels
    weights = weights_of(form.kernel, form.reduce, sums)
    of_queries, of_points, of_features = gathered
    gathers, scatters = of_features and not of_queries, of_features and of_queries
    single, divides, counts = form.single, form.reduce != "sum", counts_function(form)
    Shares, Nothing = (wp.types.vector(length=length, dtype=real) for length in (4, 1))
    Own = Channels if of_points or of_queries else Nothing
    Sums = Channels if gathers else Nothing

    @wp.struct
    class State:
        waiting: int
        square: place
        q: vec3
        row: int  # of the point itself
        chunk: int
        rate: real  # at which weights decay
        base: real  # of a query, as the forward kept it
        inverse: real
        mean: real  # of a query: upstream gradient times result
        own: Own  # of the point's own values the first chunk
        shares: Shares  # along x, y, z, and of sigma
        sums: Sums

    @wp.func
    def weigh(state: State, problem: ProblemStruct, row: int, squared: real):
        base = state.base
        inverse = state.inverse
        if wp.static(not of_queries):
            softmax = problem.softmax[row]
            base = softmax[0]
            inverse = softmax[1]
        return state, weights.weight(base, wp.sqrt(squared), state.rate, problem.limit) * inverse

    @wp.func
    def gather_row(state: State, problem: ProblemStruct, exists: bool, other: int, weight: real):
        state.sums = rows.add(state.sums, exists, weight, rows.load(problem.grad, other, state.chunk))
        return state, real(0.0)

    @wp.func
    def gather_product(state: State, problem: ProblemStruct, exists: bool, other: int, weight: real):
        """The neighbour's row; of upstream gradient and feature, one is the point's own, the product."""
        sum = real(0.0)
        chunks = wp.where(wp.static(single), 1, problem.chunks)
        for block in range(chunks):
            own = state.own
            if wp.static(of_queries):
                if block > 0:
                    own = rows.load(problem.grad, state.row, block)
                if wp.static(of_points):
                    values = rows.load(problem.features, other, block)
                    sum = rows.product(sum, own, values, block, problem.columns)
                if wp.static(scatters):
                    rows.scatter(own, exists, weight, problem.d_features, other, block)
            else:
                if block > 0:
                    own = rows.load(problem.features, state.row, block)
                values = rows.load(problem.grad, other, block)
                sum = rows.product(sum, own, values, block, problem.columns)
                if wp.static(gathers):
                    here = exists and block == state.chunk
                    state.sums = rows.add(state.sums, here, weight, values)
        return state, sum

    gather = gather_product if of_points or of_queries else gather_row

    @wp.func
    def settle(state: State, problem: ProblemStruct, row: int, weight: real, product: real):
        if not counts(problem, wp.where(wp.static(of_queries), row, state.row)):
            return state
        mean = state.mean
        if wp.static(not of_queries and divides):
            mean = problem.means[row]
        share = weight * (product - mean)
        other = problem.others[row]
        far = wp.sqrt(common.squared_distance(state.q, other, weight))
        if wp.static(of_queries):
            state.shares[3] += share * weights.beyond(state.base, far, state.rate, problem.limit)
        if far > real(0.0):
            scale = share * weights.slope(state.base, far, state.rate, problem.limit) / far
            for axis in range(3):
                along = scale * real(other[axis] - state.q[axis])
                state.shares[axis] += along
                if problem.d_others:
                    wp.atomic_add(problem.d_others, row, axis, place(-along))
        return state

    return Adder(State, ProblemStruct, None, None, weigh, gather, settle if of_points else None)
