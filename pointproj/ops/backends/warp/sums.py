"""The forward of every aggregation: weights of the neighbours, and the weighted sum of their features.

The lanes of a point stand side by side over the channels.
Weights of a mean are a_ij = exp(-beyond_ij) / total_i, relative to the distance base_i of the nearest
met so far. The forward keeps base_i and 1 / total_i for the gradients, apart, because their logarithm would
round away what is small next to base_i rate. Formulas are in :mod:`pointproj.ops.specification.gradients`.
"""

from typing import Any, NamedTuple

import torch
import warp as wp
from torch import Tensor

from pointproj.ops.backends.warp import common
from pointproj.ops.backends.warp.common import (
    OPTIONS,
    REALS,
    NumberPairs,
    NumberRows,
    Numbers,
    PlaceRows,
    Points,
    Vectors,
    once,
    struct_of,
)
from pointproj.ops.backends.warp.lanes import lanes, lanes_on
from pointproj.ops.backends.warp.neighbors import BLOCK, Adder, Form, Source, meeting
from pointproj.ops.backends.warp.traversal import Ball
from pointproj.ops.backends.warp.weights import is_relative, limit_of, weights_of
from pointproj.ops.bridge.warp_op import Launch
from pointproj.ops.specification.reference import Weighting

CHANNELS = 32  # that the lanes of a point sum up in one search
VECTOR = 4  # channels that a lane reads in one word on a GPU
BLOCKS = 3  # of a multiprocessor at a time


class Problem(NamedTuple):
    """What is aggregated."""

    sigma: Numbers  # ()
    power: float
    limit: float  # of the kernel: see the module of weights
    features: NumberRows  # (N, C), of the reference points
    aggregated: NumberRows  # (Q, C), results of the queries
    softmax: NumberPairs  # (Q, 2), of the queries: what weights are relative to, 1 / total weight
    columns: int  # C
    chunks: int  # searches that it takes to cover all channels
    grad: NumberRows = None  # (Q, C), upstream gradients of the results
    means: Numbers = None  # (Q,), sums over the channels of upstream gradient times result
    others: Vectors = None  # (n, 3), positions of the neighbours
    d_others: PlaceRows = None  # (n, 3), gradient of those positions that lists are added to
    d_features: NumberRows = None  # (N, C), gradient of the features


class Rows(NamedTuple):
    """Rows of numbers, of which each lane has some channels; chunk by chunk if there are many."""

    Channels: Any  # vector of those of a lane
    load: wp.Function  # (values, row, chunk) -> channels; beyond the last column anything
    add: wp.Function  # (total, exists, factor, channels) -> total with factor times them, if they exist
    product: wp.Function  # (sum, channels, channels, chunk, columns) -> sum with products of those that exist
    scatter: wp.Function  # (channels, exists, factor, values, row, chunk): add factor times them to the row
    store: wp.Function  # (total, factor, values, row, chunk): write factor times total


# A lane's channels in long words, at multiples of which rows begin: see ``_in_words``. A lane beyond the last
# column reads the first in vain: nothing has to be decided before rows are on their way.
_LOAD_ROW = """
    struct {align} Word {{ {real} x[{vector}]; }};
    const int lane = {lane};
    wp::vec_t<{channels}, {real}> loaded;
    #pragma unroll
    for (int i = 0; i < {channels}; i += {vector}) {{
        const int column = (chunk * {channels} + i) * {count} + lane * {vector};
        const {real}* const first = values.data + (column < values.shape[1] ? column : 0);
        const size_t offset = size_t(unsigned(row)) * unsigned(values.strides[0]);
        const Word word = *reinterpret_cast<const Word*>(reinterpret_cast<const char*>(first) + offset);
        #pragma unroll
        for (int j = 0; j < {vector}; ++j) loaded[i + j] = word.x[j];
    }}
    return loaded;
"""
_MULTIPLY_ADD = """
#if defined(__CUDA_ARCH__)
    return fma(x, y, sum);
#else
    return x * y + sum;
#endif
"""


for number in (wp.float32, wp.float64):

    @wp.func_native(_MULTIPLY_ADD)
    def multiply_add(x: number, y: number, sum: number) -> number: ...


@once
def row_functions(form: Form) -> Rows:
    """For sums of one form."""
    real, *_ = REALS[form.sums]
    matrix, channels, vector = wp.array2d(dtype=real), form.channels, form.vector
    Channels = wp.types.vector(length=channels, dtype=real)
    count, lane = form.lanes, lanes(form.lanes).lane
    names = {"real": f"wp::{real.__name__}", "channels": channels, "count": count, "vector": vector}
    names |= {
        "align": "alignas(16)" if vector > 1 else "",
        "lane": f"threadIdx.x & {count - 1}" if count > 1 else "0",
    }

    @wp.func
    def column(chunk: int, i: int):
        return (chunk * channels + i - i % vector) * count + lane() * vector + i % vector

    @wp.func_native(_LOAD_ROW.format(**names))
    def load(values: matrix, row: int, chunk: int) -> Channels: ...

    @wp.func
    def add(total: Channels, exists: bool, factor: real, values: Channels):
        if exists:  # what is not there may be infinite
            for i in range(channels):
                total[i] = multiply_add(factor, values[i], total[i])
        return total

    @wp.func
    def product(total: real, own: Channels, values: Channels, chunk: int, columns: int):
        for i in range(channels):
            if column(chunk, i) < columns:
                total = multiply_add(own[i], values[i], total)
        return total

    @wp.func
    def scatter(own: Channels, exists: bool, factor: real, values: matrix, row: int, chunk: int):
        for i in range(channels):
            if exists and column(chunk, i) < values.shape[1]:
                wp.atomic_add(values, row, column(chunk, i), factor * own[i])

    @wp.func
    def store(total: Channels, factor: real, values: matrix, row: int, chunk: int):
        for i in range(channels):
            if column(chunk, i) < values.shape[1]:
                values[row, column(chunk, i)] = total[i] * factor

    return Rows(Channels, load, add, product, scatter, store)


def new_problem(
    source: type[Source],
    positions: torch.dtype,
    weighting: Weighting,
    features: Tensor,
    sigma: Tensor,
    aggregated: Tensor,
    softmax: Tensor,
    grad: Tensor | None = None,
    of_points: bool = True,
    **others: Tensor | None,
) -> tuple[Form, Problem]:
    """What kernels are compiled for, and the problem as they take it.

    Channels are divided evenly among as many searches as they take. Within a radius, where a row is read many
    times, several are read in a word; over lists it is read once. For a gradient that is not ``of_points``
    only upstream gradients are.
    """
    columns, count = features.shape[1], lanes_on(features.device.type)
    vector = VECTOR if features.is_cuda and source is Ball else 1
    chunks = -(-columns // CHANNELS)
    channels = -(-columns // (chunks * count * vector)) * vector
    kind = count, channels, vector, chunks == 1, weighting.kernel, weighting.reduce
    form = Form(source, positions, features.dtype, *kind)
    if of_points:
        features = _in_words(features, vector)
    if grad is not None:
        grad = _in_words(grad, vector)
        aggregated = _in_words(aggregated, vector) if of_points else aggregated
    rows, limit = (features, aggregated, softmax), limit_of(weighting)
    return form, Problem(sigma, weighting.power, limit, *rows, columns, chunks, grad, **others)


def _in_words(values: Tensor, vector: int) -> Tensor:
    """Rows as kernels read them: long words at multiples of 16 bytes, with anything in what that adds."""
    columns, values = values.shape[1], values.contiguous()
    if vector == 1:
        return values
    if columns % vector:
        padded = values.new_empty(values.shape[0], columns + -columns % vector)
        padded[:, :columns] = values
        return padded
    return common.aligned(values)


def launch_sums(launch: Launch, form: Form, queries: Points, source: Source, problem: Problem) -> None:
    """Fill ``problem.aggregated`` and ``problem.softmax``."""
    shape = queries.batch.rows * problem.chunks, form.lanes
    launch(aggregate_kernel(form), shape, queries, source, problem, block_dim=BLOCK)


@once
def counts_function(form: Form) -> wp.Function:
    """``counts(problem, row)``: whether a reference has a weight, its last feature, if they have."""
    ProblemStruct = struct_of(Problem, form.positions, form.sums)

    @wp.func
    def counts(problem: ProblemStruct, row: int):
        if wp.static(form.reduce == "weighted"):
            return problem.features[row, problem.columns - 1] != type(problem.power)(0.0)
        return True

    return counts


@once
def aggregate_kernel(form: Form) -> wp.Kernel:
    """Weights of the neighbours of each query, and the weighted sum of their features."""
    positions, sums, reduce = form.positions, form.sums, form.reduce
    real, *_ = REALS[sums]
    PointsStruct, ProblemStruct = struct_of(Points, positions), struct_of(Problem, positions, sums)
    store = row_functions(form).store
    group = lanes(form.lanes)
    rate_of = weights_of(form.kernel, reduce, sums).rate
    relative = is_relative(form.kernel, reduce)
    adder = _sum_adder(form)
    State, Pair = adder.State, wp.types.vector(length=2, dtype=real)
    SourceStruct, each_neighbor = meeting(form, adder)

    @wp.kernel(**OPTIONS, launch_bounds=(BLOCK, BLOCKS if positions == torch.float32 else 1))
    def aggregate(queries: PointsStruct, source: SourceStruct, problem: ProblemStruct):
        """Launched over queries times chunks, and lanes; fills ``aggregated`` and ``softmax``."""
        number, _ = wp.tid()
        number = group.item(number)
        chunk = number % problem.chunks
        query, q = common.take(queries, number / problem.chunks)
        state = State()
        state.chunk = chunk
        state.rate = rate_of(problem.sigma[0], problem.power, problem.limit)
        if wp.static(relative):
            state.base = real(wp.inf)
        state = each_neighbor(state, query, q, common.cloud_of(query, queries.batch), source, problem)
        inverse = real(1.0)
        if wp.static(reduce != "sum"):
            total = group.total(state.total)
            inverse = real(0.0)
            if total > real(0.0):
                inverse = real(1.0) / total
        if not wp.isfinite(q):
            inverse = real(wp.nan)
        store(state.sums, inverse, problem.aggregated, query, chunk)
        if chunk == 0 and group.lane() == 0:
            problem.softmax[query] = Pair(state.base, inverse)

    return aggregate


def _sum_adder(form: Form) -> Adder:
    """A running total of the weights, and of the weighted rows."""
    positions, sums, relative = form.positions, form.sums, is_relative(form.kernel, form.reduce)
    place, *_ = REALS[positions]
    real, *_ = REALS[sums]
    ProblemStruct = struct_of(Problem, positions, sums)
    rows = row_functions(form)
    Channels, load, add_row = rows.Channels, rows.load, rows.add
    minimum = lanes(form.lanes).minimum
    weight_of, counts = weights_of(form.kernel, form.reduce, sums).weight, counts_function(form)

    @wp.struct
    class State:
        waiting: int
        square: place
        chunk: int
        rate: real  # at which weights decay
        base: real  # distance of the nearest so far, if weights are relative to it
        total: real  # of the weights that this lane has seen
        sums: Channels

    @wp.func
    def approach(state: State, problem: ProblemStruct, least: real):
        """From now on weights are relative to the nearest that counts among the new ones, if it is nearer."""
        nearest = minimum(wp.sqrt(least))
        if nearest < state.base:
            rescale = weight_of(nearest, state.base, state.rate, problem.limit)
            state.total *= rescale
            state.sums *= rescale
            state.base = nearest
        return state

    @wp.func
    def weigh(state: State, problem: ProblemStruct, row: int, squared: real):
        weight = weight_of(state.base, wp.sqrt(squared), state.rate, problem.limit)
        if counts(problem, row):
            state.total += weight
        return state, weight

    @wp.func
    def gather(state: State, problem: ProblemStruct, exists: bool, row: int, weight: real):
        state.sums = add_row(state.sums, exists, weight, load(problem.features, row, state.chunk))
        return state, real(0.0)

    return Adder(State, ProblemStruct, counts, approach if relative else None, weigh, gather, None)
