"""Aggregation over neighbour lists, nearest first: forward and backward kernels for kNN."""

import functools
from typing import Any, NamedTuple

import torch
import warp as wp
from torch import Tensor

from pointproj.ops.backends.warp.common import OPTIONS, REALS
from pointproj.ops.backends.warp.lanes import lanes
from pointproj.ops.backends.warp.row_sums import Division, divide, row_sum, waiting_rows
from pointproj.ops.bridge.warp_op import Launch, warp_op
from pointproj.ops.gradients import DIFFERENTIABLE, aggregate_backward, fill_second_backward
from pointproj.ops.pairs import listed_chunks


def aggregate_neighbors(
    query_points: Tensor, reference_points: Tensor, features: Tensor, sigma: Tensor, neighbor_indices: Tensor
) -> Tensor:
    """As :func:`pointproj.ops.backends.torch.aggregate_neighbors`, for lists sorted by distance."""
    return _aggregate(query_points, reference_points, features, sigma, neighbor_indices)[0]


def _specs(
    query_points: Tensor, reference_points: Tensor, features: Tensor, sigma: Tensor, neighbor_indices: Tensor
) -> dict:
    return {
        "aggregated": ((query_points.shape[0], features.shape[1]), features.dtype),
        "weights": (tuple(neighbor_indices.shape), features.dtype),
    }


def _backward(
    launch: Launch,
    query_points: Tensor,
    reference_points: Tensor,
    features: Tensor,
    sigma: Tensor,
    neighbor_indices: Tensor,
    weights: Tensor,
    grad_aggregated: Tensor,
    d_query_points: Tensor | None,
    d_reference_points: Tensor | None,
    d_features: Tensor | None,
    d_sigma: Tensor | None,
) -> None:
    wanted = {n: t for n, t in zip(DIFFERENTIABLE, _listed(locals()), strict=True) if t is not None}
    if query_points.is_cuda and torch.are_deterministic_algorithms_enabled():
        _fill_in_fixed_order(locals(), wanted)
        return
    count = 32 if features.is_cuda else 1
    kernels = list_kernels(query_points.dtype, features.dtype, count)
    queries, k = neighbor_indices.shape
    if d_features is not None:
        d_features.zero_()
        launch(kernels.spread, (queries, count), neighbor_indices, weights, grad_aggregated, d_features)
    if wanted.keys() - {"features"}:
        products = torch.empty_like(weights)
        launch(kernels.products, (queries, k), neighbor_indices, features, grad_aggregated, products)
        rows = features.new_empty(queries, 3)
        shares = features.new_zeros(reference_points.shape)
        sigma_rows = features.new_empty(queries)
        points = (query_points, reference_points, sigma, neighbor_indices, weights, products)
        launch(kernels.pull, queries, *points, rows, shares, sigma_rows)
        made = {"query_points": rows, "reference_points": shares}
        for name in wanted.keys() & made.keys():
            wanted[name].copy_(made[name])
        if d_sigma is not None:
            d_sigma.copy_(sigma_rows.sum())


def _listed(values: dict[str, Any]) -> list[Tensor | None]:
    return [values[f"d_{name}"] for name in DIFFERENTIABLE]


def _fill_in_fixed_order(inputs: dict[str, Any], wanted: dict[str, Tensor]) -> None:
    """Without atomics: torch sorts what it adds when deterministic algorithms are asked for."""
    needs = {name: name in wanted for name in DIFFERENTIABLE}
    made = aggregate_backward(inputs["grad_aggregated"], needs, inputs, listed_chunks)
    for name, grad in zip(DIFFERENTIABLE, made, strict=True):
        if name in wanted:
            wanted[name].copy_(grad)


def _second_backward(
    query_points: Tensor,
    reference_points: Tensor,
    features: Tensor,
    sigma: Tensor,
    neighbor_indices: Tensor,
    grad_aggregated: Tensor,
    direction_query_points: Tensor,
    direction_reference_points: Tensor,
    direction_features: Tensor,
    direction_sigma: Tensor,
    d_grad_aggregated: Tensor,
    d_query_points: Tensor,
    d_reference_points: Tensor,
    d_features: Tensor,
    d_sigma: Tensor,
) -> None:
    fill_second_backward(locals(), listed_chunks)


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
    aggregated: Tensor,
    weights: Tensor,
) -> None:
    division = divide(features.shape[1], features.device.type, most_lanes=8)
    kernel = aggregate_kernel(query_points.dtype, features.dtype, division)
    points = (query_points, reference_points, features, sigma, neighbor_indices)
    shape = (query_points.shape[0] * division.searches, division.lanes)
    launch(kernel, shape, *points, aggregated, weights)


class ListKernels(NamedTuple):
    spread: wp.Kernel
    products: wp.Kernel
    pull: wp.Kernel


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
def aggregate_kernel(positions: torch.dtype, sums: torch.dtype, division: Division) -> wp.Kernel:
    """Softmax over each list, and the weighted sum."""
    count, held, searches = division
    _, vec3 = REALS[positions]
    real, _ = REALS[sums]
    distance = _distance(positions, sums)
    Channels, channel_of, add_row = row_sum(sums, count, held)
    waiting = waiting_rows(sums, count, held)
    room_of, put, add_all = waiting.room, waiting.put, waiting.add_all
    item, lane, total_of = lanes(count).item, lanes(count).lane, lanes(count).total

    @wp.kernel(**OPTIONS)
    def aggregate(
        query_points: wp.array(dtype=vec3),
        reference_points: wp.array(dtype=vec3),
        features: wp.array2d(dtype=real),
        sigma: wp.array(dtype=real),
        neighbor_indices: wp.array2d(dtype=wp.int32),
        aggregated: wp.array2d(dtype=real),
        weights: wp.array2d(dtype=real),
    ):
        first, _ = wp.tid()
        query = item(first) / searches
        chunk = item(first) % searches
        p = query_points[query]
        k = neighbor_indices.shape[1]
        per_sigma = real(1.0) / sigma[0]
        nearest = real(0.0)
        if neighbor_indices[query, 0] >= 0:
            nearest = distance(p, reference_points[neighbor_indices[query, 0]])
        total = real(0.0)
        sums = Channels()
        for begin in range(0, k, count):
            i = begin + lane()
            row = int(-1)
            weight = real(0.0)
            if i < k:
                row = neighbor_indices[query, i]
                if row >= 0:
                    weight = wp.exp((nearest - distance(p, reference_points[row])) * per_sigma)
                if chunk == 0:
                    weights[query, i] = weight
            total += weight
            if wp.static(count == 1):
                if row >= 0:
                    sums = add_row(sums, features, chunk, weight, row)
            else:
                room = room_of()
                sums = add_all(sums, features, chunk, room, put(room, 0, row >= 0, weight, row))
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
        for i in range(held):
            channel = channel_of(chunk, i)
            if channel < features.shape[1]:
                aggregated[query, channel] = sums[i] * inverse

    return aggregate


@functools.cache
def list_kernels(positions: torch.dtype, sums: torch.dtype, count: int) -> ListKernels:
    """Kernels of the backward, for positions of one dtype and sums in another, at least as wide."""
    item, lane, take = lanes(count).item, lanes(count).lane, lanes(count).take
    _, vec3 = REALS[positions]
    real, _ = REALS[sums]
    distance = _distance(positions, sums)
    points3 = wp.array(dtype=vec3)
    lists = wp.array2d(dtype=wp.int32)
    matrix = wp.array2d(dtype=real)

    @wp.kernel(**OPTIONS)
    def spread(neighbor_indices: lists, weights: matrix, grad: matrix, d_features: matrix):
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

    @wp.kernel(**OPTIONS)
    def pull(
        query_points: points3,
        reference_points: points3,
        sigma: wp.array(dtype=real),
        neighbor_indices: lists,
        weights: matrix,
        product: matrix,
        d_query: matrix,
        d_reference: matrix,
        d_sigma: wp.array(dtype=real),
    ):
        """What the logits' gradients do to positions and sigma: see :mod:`pointproj.ops.gradients`."""
        query = wp.tid()
        p = query_points[query]
        k = neighbor_indices.shape[1]
        mean = real(0.0)
        for i in range(k):
            mean += weights[query, i] * product[query, i]
        own = wp.vector(real(0.0), real(0.0), real(0.0))
        share_of_sigma = real(0.0)
        for i in range(k):
            row = neighbor_indices[query, i]
            if row >= 0:
                grad_logit = weights[query, i] * (product[query, i] - mean)
                far = distance(p, reference_points[row])
                share_of_sigma += grad_logit * far
                if far > real(0.0):
                    scale = grad_logit / (sigma[0] * far)
                    for axis in range(3):
                        along = scale * real(p[axis] - reference_points[row][axis])
                        own[axis] -= along
                        wp.atomic_add(d_reference, row, axis, along)
        for axis in range(3):
            d_query[query, axis] = own[axis]
        d_sigma[query] = share_of_sigma / (sigma[0] * sigma[0])

    return ListKernels(spread, products, pull)
