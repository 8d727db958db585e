"""The forward of every aggregation: weights of the neighbours, and the weighted sum of their features.

The lanes of a point divide the channels among them. Weights of a mean are relative to the nearest neighbour
so far: when a nearer one is found, the sums are rescaled. For the gradients the forward saves ``base`` and
1 / ``total`` of each query. Saved as one number, base / sigma - log(total), the small total would be lost to
rounding. Formulas are in :mod:`pointproj.ops.specification.gradients`.
"""

from typing import Any, NamedTuple

import torch
import warp as wp
from torch import Tensor

from pointproj.ops.backends.warp import common
from pointproj.ops.backends.warp.common import OPTIONS, REALS, NumberRows, Numbers, Points, once, struct_of
from pointproj.ops.backends.warp.lanes import lanes, lanes_on
from pointproj.ops.backends.warp.neighbors import NeighborSource, Variant, each_neighbor
from pointproj.ops.backends.warp.queue import BLOCK, Accumulator
from pointproj.ops.backends.warp.traversal import Ball
from pointproj.ops.backends.warp.weights import is_relative, weights_of
from pointproj.ops.bridge.warp_op import Launch
from pointproj.ops.specification.reference import Weighting

CHANNELS = 32  # summed up in one search by all lanes of a point
VECTOR = 4  # channels that a lane of a GPU reads as one word
BLOCKS = 3  # that a multiprocessor runs at the same time


class Problem(NamedTuple):
    """What is aggregated, and its gradients."""

    sigma: Numbers  # ()
    power: float
    eps: float
    support: float
    features: NumberRows  # (N, C), of the reference points
    aggregated: NumberRows  # (Q, C), results of the queries
    softmax: common.NumberPairs  # (Q, 2), of the queries: base and 1 / total
    columns: int  # C
    chunks: int  # searches that it takes to cover all channels
    grad: NumberRows = None  # (Q, C), upstream gradients of the results
    means: common.NumberPairs = None  # (Q, 2), upstream gradient times result, and rest of the gradients
    others: common.Vectors = None  # (n, 3), positions of the neighbours
    d_others: common.CoordinateRows = None  # (n, 3), gradient of those positions, over lists
    d_features: NumberRows = None  # (N, C), gradient of the features


class Rows(NamedTuple):
    """Functions of rows of numbers. Each lane has some channels of a row, or of a chunk of many channels."""

    Channels: Any  # vector of a lane's channels
    load: wp.Function  # (values, row, chunk) -> channels; behind the last column they are arbitrary
    add: wp.Function  # (sums, exists, factor, channels) -> sums + factor channels, if the row exists
    product: wp.Function  # (sum, channels, channels, chunk, columns) -> sum + their scalar product
    scatter: wp.Function  # (channels, exists, factor, values, row, chunk): add factor channels to the row
    store: wp.Function  # (sums, factor, values, row, chunk): write factor sums to the row


# Reads a lane's channels in words of ``vector`` numbers, see ``_in_words``. A lane behind the last column of
# the row reads the first one in vain: so the read needs no branch.
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
def row_functions(variant: Variant) -> Rows:
    real, *_ = REALS[variant.sums]
    matrix, channels, vector = wp.array2d(dtype=real), variant.channels, variant.vector
    Channels = wp.types.vector(length=channels, dtype=real)
    count, lane = variant.lanes, lanes(variant.lanes).lane
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
    def add(sums: Channels, exists: bool, factor: real, values: Channels):
        if exists:  # else the values may be infinite, and 0 times them is NaN
            for i in range(channels):
                sums[i] = multiply_add(factor, values[i], sums[i])
        return sums

    @wp.func
    def product(sum: real, own: Channels, values: Channels, chunk: int, columns: int):
        for i in range(channels):
            if column(chunk, i) < columns:
                sum = multiply_add(own[i], values[i], sum)
        return sum

    @wp.func
    def scatter(own: Channels, exists: bool, factor: real, values: matrix, row: int, chunk: int):
        for i in range(channels):
            if exists and column(chunk, i) < values.shape[1]:
                wp.atomic_add(values, row, column(chunk, i), factor * own[i])

    @wp.func
    def store(sums: Channels, factor: real, values: matrix, row: int, chunk: int):
        for i in range(channels):
            if column(chunk, i) < values.shape[1]:
                values[row, column(chunk, i)] = sums[i] * factor

    return Rows(Channels, load, add, product, scatter, store)


def new_problem(
    source: type[NeighborSource],
    positions: torch.dtype,
    weighting: Weighting,
    features: Tensor,
    sigma: Tensor,
    aggregated: Tensor,
    softmax: Tensor,
    grad: Tensor | None = None,
    of_points: bool = True,
    graded: bool = False,
    **others: Tensor | None,
) -> tuple[Variant, Problem]:
    """What kernels are compiled for, and their argument.

    Channels are divided evenly among the searches that they need. Within a radius a row is read many times,
    so several channels are read as one word. A gradient that is not ``of_points`` reads only ``grad``.
    """
    columns, count = features.shape[1], lanes_on(features.device.type)
    vector = VECTOR if features.is_cuda and source is Ball else 1
    chunks = -(-columns // CHANNELS)
    channels = -(-columns // (chunks * count * vector)) * vector
    sizes, names = (count, channels, vector, chunks == 1), (weighting.kernel, weighting.reduce)
    variant = Variant(source, positions, features.dtype, *sizes, *names, graded)
    if of_points:
        features = _in_words(features, vector)
    if grad is not None:
        grad = _in_words(grad, vector)
        aggregated = _in_words(aggregated, vector) if of_points else aggregated
    rows = features, aggregated, softmax
    return variant, Problem(sigma, *weighting[2:], *rows, columns, chunks, grad, **others)


def _in_words(values: Tensor, vector: int) -> Tensor:
    """Rows as kernels read them: each begins at a multiple of 16 bytes; what that appends is arbitrary."""
    columns, values = values.shape[1], values.contiguous()
    if vector == 1:
        return values
    if columns % vector:
        padded = values.new_empty(values.shape[0], columns + -columns % vector)
        padded[:, :columns] = values
        return padded
    return common.aligned(values)


def launch_sums(
    launch: Launch, variant: Variant, queries: Points, source: NeighborSource, problem: Problem
) -> None:
    """Fill ``problem.aggregated`` and ``problem.softmax``."""
    shape = queries.batch.rows * problem.chunks, variant.lanes
    launch(aggregate_kernel(variant), shape, queries, source, problem, block_dim=BLOCK)


def launch_bounds(variant: Variant) -> tuple[int, int]:
    """Threads of a block, and blocks for which a multiprocessor should have registers."""
    return BLOCK, BLOCKS if variant.positions == torch.float32 else 1


@once
def has_weight_function(variant: Variant) -> wp.Function:
    """``has_weight(problem, row)``: whether the reference weight of a row, its last feature, is not 0."""
    ProblemStruct = struct_of(Problem, variant.positions, variant.sums)

    @wp.func
    def has_weight(problem: ProblemStruct, row: int):
        if wp.static(variant.reduce == "weighted"):
            return problem.features[row, problem.columns - 1] != type(problem.power)(0.0)
        return True

    return has_weight


@once
def aggregate_kernel(variant: Variant) -> wp.Kernel:
    """Weights of the neighbours of each query, and the weighted sum of their features."""
    positions, sums, reduce = variant.positions, variant.sums, variant.reduce
    real, *_ = REALS[sums]
    Pair = wp.types.vector(length=2, dtype=real)
    PointsStruct, ProblemStruct = struct_of(Points, positions), struct_of(Problem, positions, sums)
    group, store = lanes(variant.lanes), row_functions(variant).store
    first_base = weights_of(variant.kernel, reduce, sums).first_base
    accumulator = _sum_accumulator(variant)
    SourceStruct, add_neighbors = each_neighbor(variant, accumulator)
    State = accumulator.State

    @wp.kernel(**OPTIONS, launch_bounds=launch_bounds(variant))
    def aggregate(queries: PointsStruct, source: SourceStruct, problem: ProblemStruct):
        """Launched over queries times chunks, and lanes; fills ``aggregated`` and ``softmax``."""
        number, _ = wp.tid()
        number = group.item(number)
        chunk = number % problem.chunks
        query, q = common.take(queries, number / problem.chunks)
        state = State()
        state.chunk = chunk
        state.inverse_sigma = real(1.0) / problem.sigma[0]
        state.base = real(first_base)
        state = add_neighbors(state, query, q, common.cloud_of(query, queries.batch), source, problem)
        inverse_total = real(1.0)
        if wp.static(reduce != "sum"):
            total = group.total(state.total)
            inverse_total = real(0.0)
            if total > real(0.0):
                inverse_total = real(1.0) / total
        if not wp.isfinite(q):
            inverse_total = real(wp.nan)
        store(state.sums, inverse_total, problem.aggregated, query, chunk)
        if chunk == 0 and group.lane() == 0:
            problem.softmax[query] = Pair(state.base, inverse_total)

    return aggregate


def _sum_accumulator(variant: Variant) -> Accumulator:
    """The sum of the weights, and the weighted sum of rows."""
    real, *_ = REALS[variant.sums]
    ProblemStruct = struct_of(Problem, variant.positions, variant.sums)
    rows, has_weight = row_functions(variant), has_weight_function(variant)
    Channels = rows.Channels
    weights = weights_of(variant.kernel, variant.reduce, variant.sums)
    minimum = lanes(variant.lanes).minimum

    @wp.struct
    class State:
        chunk: int
        inverse_sigma: real
        base: real
        total: real  # of the weights that this lane has computed
        sums: Channels

    @wp.func
    def rescale(state: State, problem: ProblemStruct, least: real):
        """Make weights relative to the nearest of the new neighbours, if it is nearer than the base."""
        base = weights.base(minimum(wp.sqrt(least)), problem)
        if base < state.base:
            factor = weights.weight(base, state.base, state.inverse_sigma, problem)
            state.total *= factor
            state.sums *= factor
            state.base = base
        return state

    @wp.func
    def weigh(state: State, problem: ProblemStruct, row: int, squared: real):
        weight = weights.weight(state.base, wp.sqrt(squared), state.inverse_sigma, problem)
        if has_weight(problem, row):
            state.total += weight
        return state, weight

    @wp.func
    def add_row(state: State, problem: ProblemStruct, exists: bool, row: int, weight: real):
        values = rows.load(problem.features, row, state.chunk)
        state.sums = rows.add(state.sums, exists, weight, values)
        return state, real(0.0)

    relative = is_relative(variant.kernel, variant.reduce)
    return Accumulator(State, ProblemStruct, has_weight, rescale if relative else None, weigh, add_row, None)
