"""Kernels of the gradients of the aggregation over given rows of neighbours."""

import functools

import torch
import warp as wp

from pointproj.ops.backends.warp.common import OPTIONS, REALS
from pointproj.ops.backends.warp.lanes import lanes
from pointproj.ops.backends.warp.neighbor_problem import distance_function, neighbor_struct
from pointproj.ops.backends.warp.queue import Division
from pointproj.ops.backends.warp.row_products import ROWS, row_products
from pointproj.ops.backends.warp.weighting import weight_functions

BLOCKS = 10  # of a processor at a time: as many registers as products of rows need

_ADD_TO_ROWS = """
    const int lane = threadIdx.x & 31, columns = grad.shape[1], k = neighbor_indices.shape[1];
    const size_t place = static_cast<size_t>(query) * k;
    for (int begin = 0; begin < k; begin += 32) {{
        // Each lane reads one neighbour, for all of them.
        const bool exists = begin + lane < k;
        const int own_row = exists ? neighbor_indices.data[place + begin + lane] : -1;
        const {real} own_weight = exists ? weights.data[place + begin + lane] : 0;
        const int some = k - begin < 32 ? k - begin : 32;
        for (int channel = lane; channel - lane < columns; channel += 32) {{
            const bool reads = channel < columns;
            const {real} upstream = reads ? grad.data[static_cast<size_t>(query) * columns + channel] : 0;
            for (int i = 0; i < some; ++i) {{
                const int row = __shfl_sync(0xffffffffu, own_row, i);
                const {real} weight = __shfl_sync(0xffffffffu, own_weight, i);
                if (!reads || row < 0) continue;
                atomicAdd(d_features.data + static_cast<size_t>(row) * columns + channel, weight * upstream);
            }}
        }}
    }}
"""


@functools.cache
def feature_gradient_kernel(sums: torch.dtype, on_gpu: bool) -> wp.Kernel:
    """Added by atomics: by a warp of a GPU for each query, or a thread of a CPU."""
    real, _ = REALS[sums]
    lists = wp.array2d(dtype=wp.int32)
    matrix = wp.array2d(dtype=real)
    item = lanes(32).item

    @wp.func_native(_ADD_TO_ROWS.format(real="float" if sums == torch.float32 else "double"))
    def add_to_rows(
        query: int, neighbor_indices: lists, weights: matrix, grad: matrix, d_features: matrix
    ): ...

    @wp.kernel(**OPTIONS)
    def feature_gradient(neighbor_indices: lists, weights: matrix, grad: matrix, d_features: matrix):
        query, _ = wp.tid()
        if wp.static(on_gpu):
            add_to_rows(item(query), neighbor_indices, weights, grad, d_features)
        else:
            for i in range(neighbor_indices.shape[1]):
                row = neighbor_indices[query, i]
                if row >= 0:
                    for channel in range(grad.shape[1]):
                        wp.atomic_add(d_features, row, channel, weights[query, i] * grad[query, channel])

    return feature_gradient


@functools.cache
def product_kernel(sums: torch.dtype) -> wp.Kernel:
    """Upstream gradient times the features of each neighbour, on a CPU."""
    real, _ = REALS[sums]
    lists = wp.array2d(dtype=wp.int32)
    matrix = wp.array2d(dtype=real)

    @wp.kernel(**OPTIONS)
    def products(neighbor_indices: lists, features: matrix, grad: matrix, product: matrix):
        query, i = wp.tid()
        row = neighbor_indices[query, i]
        total = real(0.0)
        if row >= 0:
            for channel in range(features.shape[1]):
                total += grad[query, channel] * features[row, channel]
        product[query, i] = total

    return products


@functools.cache
def position_gradient_kernel(
    positions: torch.dtype, sums: torch.dtype, kernel: str, reduce: str
) -> wp.Kernel:
    """Gradients of points and sigma on a CPU, in a dtype of sums at least as wide as that of positions."""
    real, _ = REALS[sums]
    distance = distance_function(positions, sums)
    ProblemStruct = neighbor_struct(positions, sums)
    matrix = wp.array2d(dtype=real)
    rate_of, _, _, pull, sigma_share, sigma_unit = weight_functions(kernel, sums)

    @wp.kernel(**OPTIONS)
    def position_gradient(
        problem: ProblemStruct,
        weights: matrix,
        product: matrix,
        d_query: matrix,
        d_reference: matrix,
        d_sigma: wp.array(dtype=real),
    ):
        """What the logits' gradients do to positions and sigma: see :mod:`pointproj.ops.gradients`."""
        query = wp.tid()
        p = problem.query_points[query]
        k = problem.neighbor_indices.shape[1]
        mean = real(0.0)
        if wp.static(reduce == "mean"):
            for i in range(k):
                mean += weights[query, i] * product[query, i]
        rate = rate_of(real(1.0), problem.sigma[0], problem.power, problem.limit)
        own = wp.vector(real(0.0), real(0.0), real(0.0))
        share_of_sigma = real(0.0)
        for i in range(k):
            row = problem.neighbor_indices[query, i]
            if row >= 0:
                grad_logit = weights[query, i] * (product[query, i] - mean)
                far = distance(p, problem.reference_points[row])
                share_of_sigma += grad_logit * sigma_share(far)
                if far > real(0.0):
                    scale = grad_logit * pull(far, rate, problem.limit) / far
                    for axis in range(3):
                        along = scale * real(p[axis] - problem.reference_points[row][axis])
                        own[axis] -= along
                        wp.atomic_add(d_reference, row, axis, along)
        for axis in range(3):
            d_query[query, axis] = own[axis]
        d_sigma[query] = share_of_sigma / sigma_unit(problem.sigma[0])

    return position_gradient


@functools.cache
def lane_gradient_kernel(
    positions: torch.dtype,
    sums: torch.dtype,
    division: Division,
    weighting: tuple[str, str],
    of_features: bool,
) -> wp.Kernel:
    """All gradients on a GPU: the lanes of a query add those of the reference points and of the features,
    ``d_reference`` and ``d_features``, by atomics.
    """
    kernel, reduce = weighting
    real, _ = REALS[sums]
    ProblemStruct, distance = neighbor_struct(positions, sums), distance_function(positions, sums)
    matrix = wp.array2d(dtype=real)
    Sums, product, add_rows, _ = row_products(sums, division, "output" if of_features else "")
    rate_of, _, _, pull, sigma_share, sigma_unit = weight_functions(kernel, sums)
    group, channels, of_row = lanes(division.lanes), division.channels, division.lanes // ROWS
    item, lane, total_of = group.item, group.lane, group.total
    Shares = wp.types.vector(length=4, dtype=real)

    @wp.kernel(**OPTIONS, launch_bounds=(division.block, BLOCKS))
    def gradient(
        problem: ProblemStruct,
        weights: matrix,
        features: matrix,
        aggregated: matrix,
        grad: matrix,
        d_features: matrix,
        d_query: matrix,
        d_reference: matrix,
        d_sigma: wp.array(dtype=real),
    ):
        first, _ = wp.tid()
        query = item(first)
        p = problem.query_points[query]
        k = problem.neighbor_indices.shape[1]
        rate = rate_of(real(1.0), problem.sigma[0], problem.power, problem.limit)
        mean = real(0.0)
        if wp.static(reduce == "mean"):
            mean = product(grad, query, aggregated, query)
        shares = Shares()  # along x, y, z, and of sigma
        sums = Sums()
        for begin in range(0, k, ROWS):
            i = begin + lane() / of_row
            row = int(-1)
            weight = real(0.0)
            if i < k:
                row = problem.neighbor_indices[query, i]
                weight = weights[query, i]
            sums = add_rows(sums, grad, query, features, weight, row, d_features)
            if row >= 0 and lane() % of_row == 0:
                other = problem.reference_points[row]
                grad_logit = weight * (sums[channels] - mean)
                far = distance(p, other)
                shares[3] += grad_logit * sigma_share(far)
                if far > real(0.0):
                    scale = grad_logit * pull(far, rate, problem.limit) / far
                    for axis in range(3):
                        along = scale * real(p[axis] - other[axis])
                        shares[axis] -= along
                        wp.atomic_add(d_reference, row, axis, along)
        for i in range(4):
            shares[i] = total_of(shares[i])
        if lane() == 0:
            for axis in range(3):
                d_query[query, axis] = shares[axis]
            d_sigma[query] = shares[3] / sigma_unit(problem.sigma[0])

    return gradient
