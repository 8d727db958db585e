"""Kernels of the gradients of the aggregation over given rows of neighbours."""

import functools
from typing import NamedTuple

import torch
import warp as wp

from pointproj.ops.backends.warp.common import OPTIONS, REALS
from pointproj.ops.backends.warp.lanes import lanes
from pointproj.ops.backends.warp.neighbor_problem import distance_function, neighbor_struct
from pointproj.ops.backends.warp.weighting import weight_functions


class GradientKernels(NamedTuple):
    features: wp.Kernel
    products: wp.Kernel


@functools.cache
def gradient_kernels(sums: torch.dtype, count: int) -> GradientKernels:
    """Kernels of the backward that read weights and features alone."""
    item, lane, take = lanes(count).item, lanes(count).lane, lanes(count).take
    real, _ = REALS[sums]
    lists = wp.array2d(dtype=wp.int32)
    matrix = wp.array2d(dtype=real)

    @wp.kernel(**OPTIONS)
    def feature_gradient(neighbor_indices: lists, weights: matrix, grad: matrix, d_features: matrix):
        first, _ = wp.tid()
        query = item(first)
        k = neighbor_indices.shape[1]
        for first_channel in range(0, grad.shape[1], count):
            channel = first_channel + lane()
            there = channel < grad.shape[1]
            g = real(0.0)
            if there:
                g = grad[query, channel]
            for begin in range(0, k, count):
                # Each lane reads one neighbour, for all of them.
                row_here = int(-1)
                weight_here = real(0.0)
                if begin + lane() < k:
                    row_here = neighbor_indices[query, begin + lane()]
                    weight_here = weights[query, begin + lane()]
                for i in range(wp.min(count, k - begin)):
                    row = take(row_here, i)
                    weight = take(weight_here, i)
                    if there and row >= 0:
                        wp.atomic_add(d_features, row, channel, weight * g)

    @wp.kernel(**OPTIONS)
    def products(neighbor_indices: lists, features: matrix, grad: matrix, product: matrix):
        """Upstream gradient times the neighbour's features."""
        query, i = wp.tid()
        row = neighbor_indices[query, i]
        total = real(0.0)
        if row >= 0:
            for channel in range(features.shape[1]):
                total += grad[query, channel] * features[row, channel]
        product[query, i] = total

    return GradientKernels(feature_gradient, products)


@functools.cache
def position_gradient_kernel(
    positions: torch.dtype, sums: torch.dtype, kernel: str, reduce: str
) -> wp.Kernel:
    """Gradients of points and sigma, for positions of one dtype and sums in another, at least as wide."""
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
