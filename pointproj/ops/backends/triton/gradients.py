"""Gradients of the weighted sums; formulas in :mod:`pointproj.ops.specification.gradients`.

Each query adds to the gradients of its neighbours by atomics, so their last bits may differ from run to run.
In deterministic mode torch computes them instead.
"""

import triton
import triton.language as tl
from torch import Tensor

from pointproj.ops.backends.triton.sums import (
    NeighborSource,
    channel_block,
    cubes_of,
    has_reference_weight,
    neighbors_of,
    pair,
)
from pointproj.ops.backends.triton.traversal import load_queries
from pointproj.ops.backends.triton.weights import SUM, choices, parameters, weigh
from pointproj.ops.specification.gradients import DIFFERENTIABLE
from pointproj.ops.specification.records import OptionalTensors, Saved, record_of
from pointproj.ops.specification.reference import Weighting


def gradients(source: NeighborSource, grad: Tensor, needs: dict[str, bool], saved: Saved) -> OptionalTensors:
    """Gradients of all differentiable inputs, None where not needed."""
    inputs, (aggregated, softmax) = saved.inputs, saved.outputs
    features, weighting = inputs["features"], record_of(Weighting, inputs)
    channels = features.shape[1]
    positions = needs["query_points"] or needs["reference_points"] or needs["sigma"]
    d_query = features.new_empty(source.queries if positions else 0, 3)
    d_reference = features.new_zeros(inputs["reference_points"].shape[0] if positions else 0, 3)
    d_features = features.new_zeros(features.shape if needs["features"] else (0, channels))
    d_sigma = features.new_empty(source.queries if positions else 0)
    source.launch(
        gradient_kernel,
        features, *parameters(weighting, inputs["sigma"]), aggregated, softmax, grad,
        d_query, d_reference, d_features, d_sigma, channels,
        *choices(weighting), needs["features"], positions, channel_block(channels),
    )  # fmt: skip
    made = d_query, d_reference, d_features, d_sigma.sum() if needs["sigma"] else d_sigma
    return tuple(
        m.to(inputs[n].dtype) if needs[n] else None for n, m in zip(DIFFERENTIABLE, made, strict=True)
    )


@triton.jit
def products_with(grad, query, values, row, exists, channels, BLOCK: tl.constexpr):
    """Scalar products of the upstream gradients of queries (TILE,) with rows (TILE, STEP) of values."""
    total = tl.zeros_like(row).to(grad.dtype.element_ty)
    for begin in range(0, channels, BLOCK):
        channel = begin + tl.arange(0, BLOCK)
        there = exists[:, :, None] & (channel < channels)
        upstream = tl.load(grad + query[:, None, None] * channels + channel, mask=there, other=0.0)
        products = upstream * tl.load(values + row[:, :, None] * channels + channel, mask=there, other=0.0)
        total += tl.sum(products, 2)
    return total


@triton.jit
def gradient_kernel(
    query_points, clouds, points, rows, first, frame, limit, queries, side, k,
    LISTED: tl.constexpr, BATCHED: tl.constexpr,
    features, parameter, eps, aggregated, softmax, grad,
    d_query, d_reference, d_features, d_sigma, channels,
    KERNEL: tl.constexpr, REDUCE: tl.constexpr, FEATURES: tl.constexpr, POSITIONS: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of queries; atomics add to those of their neighbours."""
    side = tl.cast(side, tl.int32)  # sizes may come as 64 bits
    real: tl.constexpr = features.dtype.element_ty
    query = (tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)
    exists = query < queries
    x, y, z, cloud, active = load_queries(query_points, clouds, query, exists, BATCHED)
    parameter, eps = tl.load(parameter), tl.load(eps)
    base = tl.load(softmax + 2 * query, mask=active, other=0.0)[:, None]
    inverse = tl.load(softmax + 2 * query + 1, mask=active, other=0.0)[:, None]
    mean = tl.zeros([TILE, 1], real)
    if POSITIONS and REDUCE != SUM:
        mean = products_with(grad, query, aggregated, query[:, None], active[:, None], channels, BLOCK)
    sum_x, sum_y, sum_z = tl.zeros([TILE], real), tl.zeros([TILE], real), tl.zeros([TILE], real)
    sigma_sum = tl.zeros([TILE], real)
    # If a neighbour has nearly all the weight, its product less the mean is little more than rounding errors.
    # The gradients of the logits have the sum 0, so that of such a neighbour is minus the sum of the others.
    rest, largest = tl.zeros([TILE], real), tl.full([TILE], -1, tl.int64)
    largest_x, largest_y, largest_z = tl.zeros([TILE], real), tl.zeros([TILE], real), tl.zeros([TILE], real)
    largest_sigma = tl.zeros([TILE], real)
    cx, cy, cz, size, runs = cubes_of(x, y, z, active, limit, frame, side, LISTED)
    for number in range(0, runs, 2):
        begin, end = neighbors_of(number, query, k, cx, cy, cz, size, cloud, active, first, side, LISTED)
        for step in range(0, tl.max(end - begin), STEP):
            at = begin[:, None] + step + tl.arange(0, STEP)[None, :]
            row = tl.load(rows + at, mask=at < end[:, None], other=-1).to(tl.int64)
            place, is_point = (row, row >= 0) if LISTED else (at, at < end[:, None])
            hit, dx, dy, dz, distance = pair(x, y, z, points, place, is_point, limit, LISTED, real)
            if tl.max(hit.to(tl.int32)) > 0:
                weight, decay_per_distance, by_sigma = weigh(base, distance, parameter, eps, KERNEL, REDUCE)
                weight = tl.where(hit, weight * inverse, 0.0)
                if FEATURES:
                    for channel in range(0, channels, BLOCK):
                        channel = channel + tl.arange(0, BLOCK)
                        there = hit[:, :, None] & (channel < channels)
                        upstream = grad + query[:, None, None] * channels + channel
                        share = weight[:, :, None] * tl.load(upstream, mask=there, other=0.0)
                        into = d_features + row[:, :, None] * channels + channel
                        tl.atomic_add(into, share, mask=there, sem="relaxed")
                if POSITIONS:
                    d_logit = weight * (
                        products_with(grad, query, features, row, hit, channels, BLOCK) - mean
                    )
                    if REDUCE != SUM:
                        has_weight = has_reference_weight(features, row, hit, channels, REDUCE)
                        is_largest = has_weight & (weight > 0.75)
                        d_logit = tl.where(has_weight & ~is_largest, d_logit, 0.0)
                        rest -= tl.sum(d_logit, 1)
                        largest = tl.maximum(largest, tl.max(tl.where(is_largest, at, -1), 1))
                        scale = tl.where(is_largest & (decay_per_distance > 0), decay_per_distance, 0.0)
                        largest_x += tl.sum(scale * dx, 1)
                        largest_y += tl.sum(scale * dy, 1)
                        largest_z += tl.sum(scale * dz, 1)
                        largest_sigma += tl.sum(tl.where(is_largest, by_sigma, 0.0), 1)
                    has_gradient = hit & (d_logit != 0)
                    sigma_sum += tl.sum(tl.where(has_gradient & (by_sigma != 0), d_logit * by_sigma, 0.0), 1)
                    has_gradient &= decay_per_distance > 0  # where it is 0, d_logit may be infinite
                    scale = tl.where(has_gradient, -d_logit * decay_per_distance, 0.0)
                    sum_x += tl.sum(scale * dx, 1)
                    sum_y += tl.sum(scale * dy, 1)
                    sum_z += tl.sum(scale * dz, 1)
                    into = d_reference + 3 * row
                    tl.atomic_add(into, -scale * dx, mask=has_gradient, sem="relaxed")
                    tl.atomic_add(into + 1, -scale * dy, mask=has_gradient, sem="relaxed")
                    tl.atomic_add(into + 2, -scale * dz, mask=has_gradient, sem="relaxed")
    if POSITIONS:
        if REDUCE != SUM:
            has_gradient = (largest >= 0) & (rest != 0)
            rest = tl.where(has_gradient, rest, 0.0)
            sigma_sum += rest * largest_sigma
            into = d_reference + 3 * tl.load(rows + largest, mask=has_gradient, other=0).to(tl.int64)
            tl.atomic_add(into, rest * largest_x, mask=has_gradient, sem="relaxed")
            tl.atomic_add(into + 1, rest * largest_y, mask=has_gradient, sem="relaxed")
            tl.atomic_add(into + 2, rest * largest_z, mask=has_gradient, sem="relaxed")
            sum_x, sum_y, sum_z = sum_x - rest * largest_x, sum_y - rest * largest_y, sum_z - rest * largest_z
        tl.store(d_query + 3 * query, sum_x, mask=exists)
        tl.store(d_query + 3 * query + 1, sum_y, mask=exists)
        tl.store(d_query + 3 * query + 2, sum_z, mask=exists)
        tl.store(d_sigma + query, sigma_sum, mask=exists)
