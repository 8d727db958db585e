"""Aggregation over given rows of neighbours, nearest first: forward and backward kernels for kNN."""

import functools
from typing import Any, NamedTuple

import torch
import warp as wp
from torch import Tensor

from pointproj.ops.backends.warp.common import OPTIONS, REALS
from pointproj.ops.backends.warp.lanes import lanes
from pointproj.ops.backends.warp.queue import Division, divide, row_queue, row_sum
from pointproj.ops.backends.warp.weighting import is_relative, limit_of, weight_functions
from pointproj.ops.bridge.warp_op import Launch, warp_op
from pointproj.ops.gradients import DIFFERENTIABLE, aggregate_backward, fill_second_backward
from pointproj.ops.pairs import listed_chunks, weighting_of
from pointproj.ops.reference import Weighting


def aggregate_neighbors(
    query_points: Tensor,
    reference_points: Tensor,
    features: Tensor,
    sigma: Tensor,
    neighbor_indices: Tensor,
    weighting: Weighting,
) -> Tensor:
    """As :func:`pointproj.ops.backends.torch.aggregate_neighbors`, for lists sorted by distance."""
    return _aggregate(query_points, reference_points, features, sigma, neighbor_indices, *weighting)[0]


class NeighborProblem(NamedTuple):
    """Points and their neighbours as kernels take them."""

    query_points: Tensor
    reference_points: Tensor
    sigma: Tensor
    neighbor_indices: Tensor  # (Q, k)
    power: float
    limit: float  # of the kernel: see the module of weightings


def _specs(query_points: Tensor, features: Tensor, neighbor_indices: Tensor, **_: Any) -> dict:
    return {
        "aggregated": ((query_points.shape[0], features.shape[1]), features.dtype),
        "weights": (tuple(neighbor_indices.shape), features.dtype),
    }


def _backward(
    launch: Launch,
    d_query_points: Tensor | None,
    d_reference_points: Tensor | None,
    d_features: Tensor | None,
    d_sigma: Tensor | None,
    **values: Any,
) -> None:
    wanted = dict(zip(DIFFERENTIABLE, (d_query_points, d_reference_points, d_features, d_sigma), strict=True))
    query_points, features, neighbor_indices, weights, grad = (
        values[name]
        for name in ("query_points", "features", "neighbor_indices", "weights", "grad_aggregated")
    )
    if query_points.is_cuda and torch.are_deterministic_algorithms_enabled():
        _fill_in_fixed_order(values, wanted)
        return
    count = 32 if features.is_cuda else 1
    kernels = gradient_kernels(features.dtype, count)
    queries, k = neighbor_indices.shape
    if d_features is not None:
        d_features.zero_()
        launch(kernels.features, (queries, count), neighbor_indices, weights, grad, d_features)
    if d_query_points is None and d_reference_points is None and d_sigma is None:
        return
    products = torch.empty_like(weights)
    launch(kernels.products, (queries, k), neighbor_indices, features, grad, products)
    made = {
        "query_points": features.new_empty(queries, 3),
        "reference_points": features.new_zeros(values["reference_points"].shape),
        "sigma": features.new_empty(queries),
    }
    weighting = weighting_of(values)
    problem = NeighborProblem(
        query_points,
        values["reference_points"],
        values["sigma"],
        neighbor_indices,
        weighting.power,
        limit_of(weighting),
    )
    dtypes = query_points.dtype, features.dtype
    kernel = position_gradient_kernel(*dtypes, weighting.kernel, weighting.reduce)
    launch(kernel, queries, problem, weights, products, *made.values())
    made["sigma"] = made["sigma"].sum()
    for name, grad_of_input in made.items():
        if wanted[name] is not None:
            wanted[name].copy_(grad_of_input)


def _fill_in_fixed_order(values: dict[str, Any], wanted: dict[str, Tensor | None]) -> None:
    """Without atomics: torch sorts what it adds when deterministic algorithms are asked for."""
    needs = {name: tensor is not None for name, tensor in wanted.items()}
    made = aggregate_backward(values["grad_aggregated"], needs, values, listed_chunks)
    for tensor, grad in zip(wanted.values(), made, strict=True):
        if tensor is not None:
            tensor.copy_(grad)


def _second_backward(launch: Launch, **values: Any) -> None:
    fill_second_backward(values, listed_chunks)


@warp_op(
    "pointproj::warp_aggregate_neighbors",
    outputs=_specs,
    differentiable=DIFFERENTIABLE,
    backward=_backward,
    second_backward=_second_backward,
)
def _aggregate(
    launch: Launch,
    query_points: Tensor,
    reference_points: Tensor,
    features: Tensor,
    sigma: Tensor,
    neighbor_indices: Tensor,
    kernel: str,
    reduce: str,
    power: float,
    eps: float,
    support: float,
    *,
    aggregated: Tensor,
    weights: Tensor,
) -> None:
    division = divide(features.shape[1], features.device.type, most_lanes=8)
    compiled = aggregate_kernel(query_points.dtype, features.dtype, division, kernel, reduce)
    limit = limit_of(Weighting(kernel, reduce, power, eps, support))
    problem = NeighborProblem(query_points, reference_points, sigma, neighbor_indices, power, limit)
    shape = (query_points.shape[0] * division.searches, division.lanes)
    launch(compiled, shape, problem, features, aggregated, weights)


class GradientKernels(NamedTuple):
    features: wp.Kernel
    products: wp.Kernel


@functools.cache
def _problem_struct(positions: torch.dtype, sums: torch.dtype) -> Any:
    """:class:`NeighborProblem` inside a kernel."""
    _, vec3 = REALS[positions]
    real, _ = REALS[sums]

    @wp.struct
    class ProblemStruct:
        query_points: wp.array(dtype=vec3)
        reference_points: wp.array(dtype=vec3)
        sigma: wp.array(dtype=real)
        neighbor_indices: wp.array2d(dtype=wp.int32)
        power: real
        limit: real

    return ProblemStruct


@functools.cache
def _distance(positions: torch.dtype, sums: torch.dtype) -> wp.Function:
    _, vec3 = REALS[positions]
    real, _ = REALS[sums]

    @wp.func
    def distance(p: vec3, q: vec3):
        dx = real(p[0] - q[0])
        dy = real(p[1] - q[1])
        dz = real(p[2] - q[2])
        return wp.sqrt(dx * dx + dy * dy + dz * dz)

    return distance


@functools.cache
def aggregate_kernel(
    positions: torch.dtype, sums: torch.dtype, division: Division, kernel: str, reduce: str
) -> wp.Kernel:
    """Weights over each list, and the weighted sum."""
    count, channels, searches = division
    real, _ = REALS[sums]
    ProblemStruct = _problem_struct(positions, sums)
    distance = _distance(positions, sums)
    Channels, channel_of, add_row = row_sum(sums, count, channels)
    queue = row_queue(sums, count, channels)
    reserve, push, flush = queue.reserve, queue.push, queue.flush
    item, lane, total_of = lanes(count).item, lanes(count).lane, lanes(count).total
    rate_of, level_of, relative_weight, *_ = weight_functions(kernel, sums)

    @wp.kernel(**OPTIONS)
    def aggregate(
        problem: ProblemStruct,
        features: wp.array2d(dtype=real),
        aggregated: wp.array2d(dtype=real),
        weights: wp.array2d(dtype=real),
    ):
        first, _ = wp.tid()
        query = item(first) / searches
        chunk = item(first) % searches
        p = problem.query_points[query]
        k = problem.neighbor_indices.shape[1]
        rate = rate_of(real(1.0), problem.sigma[0], problem.power, problem.limit)
        base = real(0.0)
        if wp.static(is_relative(kernel, reduce)) and problem.neighbor_indices[query, 0] >= 0:
            nearest = distance(p, problem.reference_points[problem.neighbor_indices[query, 0]])
            base = level_of(nearest, problem.limit)
        total = real(0.0)
        sums = Channels()
        for begin in range(0, k, count):
            i = begin + lane()
            row = int(-1)
            weight = real(0.0)
            if i < k:
                row = problem.neighbor_indices[query, i]
                if row >= 0:
                    far = distance(p, problem.reference_points[row])
                    weight = relative_weight(base, far, rate, problem.limit)
                if chunk == 0:
                    weights[query, i] = weight
            total += weight
            if wp.static(count == 1):
                if row >= 0:
                    sums = add_row(sums, features, chunk, weight, row)
            else:
                address = reserve()
                sums = flush(sums, features, chunk, address, push(address, 0, row >= 0, weight, row))
        inverse = real(1.0)
        if wp.static(reduce == "mean"):
            total = total_of(total)
            inverse = real(0.0)
            if total > real(0.0):
                inverse = real(1.0) / total
            if chunk == 0:
                for begin in range(0, k, count):
                    if begin + lane() < k:
                        weights[query, begin + lane()] = weights[query, begin + lane()] * inverse
        if not wp.isfinite(p):
            inverse = real(wp.nan)
        for i in range(channels):
            channel = channel_of(chunk, i)
            if channel < features.shape[1]:
                aggregated[query, channel] = sums[i] * inverse

    return aggregate


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
    distance = _distance(positions, sums)
    ProblemStruct = _problem_struct(positions, sums)
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
