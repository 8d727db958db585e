"""Aggregation over given neighbours, nearest first, forward and backward: row W1 of the benchmark.

What an address to write to is computed from is loaded in the kernel itself: of a helper that returned it, a
torch that traces the kernel would think that it writes to what it loads from.
"""

import inspect
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pointproj.ops.backends import torch as plain
from pointproj.ops.backends.triton.flops import count_aggregation
from pointproj.ops.backends.triton.knn_search import search
from pointproj.ops.backends.triton.launch import launch
from pointproj.ops.backends.triton.matrix_products import channel_block
from pointproj.ops.backends.triton.operators import kernel_op, runs_kernels
from pointproj.ops.backends.triton.tiles import (
    cdiv,
    is_finite,
    load_rows_of_3,
    rounded_root,
    size_class,
    squared_length,
    store_rows_of_3,
    tuned,
)
from pointproj.ops.backends.triton.tree import key_of_both, sorted_together
from pointproj.ops.backends.triton.weights import (
    as_anchor,
    by_distance_per_length,
    choices,
    distance_of_one,
    parameters,
    relative_weights,
    sigma_shares,
    slope_of,
)
from pointproj.ops.bridge.eager import direct
from pointproj.ops.bridge.replay import Replayable
from pointproj.ops.bridge.torch_op import Saved
from pointproj.ops.clouds import Clouds
from pointproj.ops.gradients import DIFFERENTIABLE, aggregate_backward, second_backward_over
from pointproj.ops.pairs import listed_chunks, weighting_of
from pointproj.ops.reference import Weighting

CONFIGS = [
    triton.Config({"TILE": tile}, num_warps=warps) for tile, warps in ((32, 1), (16, 4), (8, 2), (64, 2))
]
FEATURE_TILE = 16
POSITION_TILE = 32


def aggregate_neighbors(
    query_points: Tensor,
    reference_points: Tensor,
    features: Tensor,
    sigma: Tensor,
    neighbor_indices: Tensor,
    weighting: Weighting,
) -> Tensor:
    """As :func:`pointproj.ops.backends.torch.aggregate_neighbors`, for neighbours sorted by distance."""
    return _aggregate(query_points, reference_points, features, sigma, neighbor_indices, *weighting)[0]


def search_and_aggregate(
    clouds: Clouds, features: Tensor, sigma: Tensor, k: int, weighting: Weighting
) -> Tensor:
    """Trees, search and sums in one call, for plain eager mode: their launches are replayed together."""
    others = clouds.query_offsets, clouds.reference_offsets, clouds.count, key_of_both(clouds), k
    return _together(clouds.query_points, clouds.reference_points, features, sigma, *others, *weighting)[0]


def _forward(
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
) -> tuple[Tensor, Tensor]:
    """Aggregated features, and what the backward needs: the weights."""
    queries, k = neighbor_indices.shape
    weighting = Weighting(kernel, reduce, power, eps, support)
    if not runs_kernels(query_points):
        clouds = Clouds(query_points, None, reference_points, None, 1)
        aggregated = plain.aggregate_neighbors(clouds, features, sigma, neighbor_indices, weighting)
        return aggregated, features.new_empty(0, k)
    channels = features.shape[1]
    block = channel_block(channels)
    aggregated = features.new_empty(queries, channels)
    weights = features.new_empty(queries, k)
    blocks = cdiv(channels, block)
    launch(
        aggregate_kernel, lambda meta: (cdiv(queries, meta["TILE"]), blocks),
        query_points, reference_points, features, *parameters(weighting, sigma), neighbor_indices,
        aggregated, weights, queries, k, channels, size_class(queries), *choices(weighting), block,
    )  # fmt: skip
    return aggregated, weights


def _backward(grads: tuple[Tensor, ...], needs: dict[str, bool], saved: Saved) -> tuple[Tensor | None, ...]:
    inputs = saved.inputs
    if not runs_kernels(inputs["query_points"]) or torch.are_deterministic_algorithms_enabled():
        # Without atomics: torch sorts what it adds when deterministic algorithms are asked for.
        return aggregate_backward(grads[0], needs, inputs, listed_chunks)
    neighbor_indices, weights = inputs["neighbor_indices"], saved.outputs[1]
    made: dict[str, Tensor] = {}
    if needs["features"]:
        made["features"] = _feature_gradient(neighbor_indices, weights, grads[0], inputs["features"])
    if needs["query_points"] or needs["reference_points"] or needs["sigma"]:
        made |= _position_gradients(inputs, weights, grads[0])
    return tuple(made[n].to(inputs[n].dtype) if needs[n] else None for n in DIFFERENTIABLE)


def _feature_gradient(neighbor_indices: Tensor, weights: Tensor, grad: Tensor, features: Tensor) -> Tensor:
    queries, k = neighbor_indices.shape
    channels = features.shape[1]
    block = channel_block(channels)
    d_features = torch.zeros_like(features)
    launch(
        feature_kernel, (cdiv(queries, FEATURE_TILE), cdiv(channels, block)),
        neighbor_indices, weights, grad, d_features, queries, k, channels, block, FEATURE_TILE,
    )  # fmt: skip
    return d_features


def _position_gradients(inputs: dict[str, Any], weights: Tensor, grad: Tensor) -> dict[str, Tensor]:
    neighbor_indices, features = inputs["neighbor_indices"], inputs["features"]
    queries, k = neighbor_indices.shape
    channels = features.shape[1]
    d_query = features.new_empty(queries, 3)
    d_reference = features.new_zeros(inputs["reference_points"].shape)
    d_sigma = features.new_empty(queries)
    weighting = weighting_of(inputs)
    launch(
        position_kernel, (cdiv(queries, POSITION_TILE),),
        inputs["query_points"], inputs["reference_points"], features,
        *parameters(weighting, inputs["sigma"]), neighbor_indices,
        weights, grad, torch.empty_like(weights), d_query, d_reference, d_sigma,
        queries, k, channels, *choices(weighting), channel_block(channels), POSITION_TILE,
    )  # fmt: skip
    return {"query_points": d_query, "reference_points": d_reference, "sigma": d_sigma.sum()}


@triton.jit
def difference(query_points, query, reference_points, row, mask, real: tl.constexpr):
    """Query minus neighbour, and its length, rounded after each operation; a small sigma magnifies errors.

    The compiler may compute a value twice, for threads that hold it in another order, and would fuse
    operations differently: a weight would then not be the one that the total was made of. The difference is
    taken in the positions' dtype.
    """
    at, there = query_points + 3 * query, reference_points + 3 * row
    x = (tl.load(at, mask=mask, other=0.0) - tl.load(there, mask=mask, other=0.0)).to(real)
    y = (tl.load(at + 1, mask=mask, other=0.0) - tl.load(there + 1, mask=mask, other=0.0)).to(real)
    z = (tl.load(at + 2, mask=mask, other=0.0) - tl.load(there + 2, mask=mask, other=0.0)).to(real)
    return x, y, z, rounded_root(squared_length(x, y, z))


@tuned(CONFIGS, key=["k", "channels", "scale", "KERNEL", "MEAN"])
@triton.jit
def aggregate_kernel(
    query_points, reference_points, features, shape, eps, neighbor_indices, aggregated, weights,
    queries, k, channels, scale,
    KERNEL: tl.constexpr, MEAN: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Weights of each list, of a mean with the sum 1, and the weighted sum."""
    real: tl.constexpr = features.dtype.element_ty
    query = (tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = query < queries
    slope, eps = slope_of(tl.load(shape), KERNEL), tl.load(eps)
    nearest = distance_of_one(tl.zeros([TILE], real), KERNEL)
    if MEAN:
        first = tl.load(neighbor_indices + query * k, mask=inside, other=-1).to(tl.int64)
        _, _, _, nearest = difference(query_points, query, reference_points, first, first >= 0, real)
        nearest = as_anchor(nearest, eps, KERNEL)
    total = tl.zeros([TILE], real)
    sums = tl.zeros([TILE, BLOCK], real)
    for place in range(k):
        row = tl.load(neighbor_indices + query * k + place, mask=inside, other=-1).to(tl.int64)
        exists = row >= 0
        _, _, _, distance = difference(query_points, query, reference_points, row, exists, real)
        weight = tl.where(exists, relative_weights(nearest, distance, slope, eps, KERNEL), 0.0)
        if tl.program_id(1) == 0:
            tl.store(weights + query * k + place, weight, mask=inside)
        total += weight
        there = exists[:, None] & (channel < channels)[None, :]
        values = tl.load(features + row[:, None] * channels + channel[None, :], mask=there, other=0.0)
        sums += tl.where(there, weight[:, None] * values, 0.0)
    inverse = tl.where(total > 0, 1.0 / total, 0.0) if MEAN else tl.full([TILE], 1.0, real)
    if MEAN and tl.program_id(1) == 0:
        tl.debug_barrier()  # other threads may read what these have written
        for place in range(k):
            at = weights + query * k + place
            tl.store(at, tl.load(at, mask=inside, other=0.0) * inverse, mask=inside)
    x, y, z = load_rows_of_3(query_points, query, inside, 0.0)
    inverse = tl.where(is_finite(x, y, z), inverse, float("nan"))
    out = inside[:, None] & (channel < channels)[None, :]
    tl.store(aggregated + query[:, None] * channels + channel[None, :], sums * inverse[:, None], mask=out)


@triton.jit
def feature_kernel(
    neighbor_indices, weights, grad, d_features, queries, k, channels,
    BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Add each query's upstream gradient, weighted, to the gradients of its neighbours' features."""
    query = (tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = query < queries
    there = inside[:, None] & (channel < channels)[None, :]
    upstream = tl.load(grad + query[:, None] * channels + channel[None, :], mask=there, other=0.0)
    for place in range(k):
        row = tl.load(neighbor_indices + query * k + place, mask=inside, other=-1).to(tl.int64)
        weight = tl.load(weights + query * k + place, mask=inside, other=0.0)
        tl.atomic_add(
            d_features + row[:, None] * channels + channel[None, :],
            weight[:, None] * upstream,
            mask=there & (row >= 0)[:, None],
            sem="relaxed",
        )


@triton.jit
def position_kernel(
    query_points, reference_points, features, shape, eps, neighbor_indices, weights, grad, products,
    d_query, d_reference, d_sigma, queries, k, channels,
    KERNEL: tl.constexpr, MEAN: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Gradients of positions and sigma through the logits; formulas in :mod:`pointproj.ops.gradients`."""
    real: tl.constexpr = features.dtype.element_ty
    query = (tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    inside = query < queries
    shape, eps = tl.load(shape), tl.load(eps)
    mean = tl.zeros([TILE], real)
    for place in range(k):
        row = tl.load(neighbor_indices + query * k + place, mask=inside, other=-1).to(tl.int64)
        weight = tl.load(weights + query * k + place, mask=inside, other=0.0)
        product = tl.zeros([TILE], real)
        for begin in range(0, channels, BLOCK):
            exists = (row >= 0)[:, None] & (begin + channel[None, :] < channels)
            at = grad + query[:, None] * channels + begin + channel[None, :]
            upstream = tl.load(at, mask=exists, other=0.0)
            at = features + row[:, None] * channels + begin + channel[None, :]
            product += tl.sum(upstream * tl.load(at, mask=exists, other=0.0), 1)
        if MEAN:
            mean += weight * product
        tl.store(products + query * k + place, product, mask=inside)
    tl.debug_barrier()  # other threads may read what these have written
    sum_x = tl.zeros([TILE], real)
    sum_y = tl.zeros([TILE], real)
    sum_z = tl.zeros([TILE], real)
    sigma_sum = tl.zeros([TILE], real)
    for place in range(k):
        row = tl.load(neighbor_indices + query * k + place, mask=inside, other=-1).to(tl.int64)
        exists = row >= 0
        weight = tl.load(weights + query * k + place, mask=inside, other=0.0)
        product = tl.load(products + query * k + place, mask=inside, other=0.0)
        x, y, z, distance = difference(query_points, query, reference_points, row, exists, real)
        of_logit = tl.where(exists, weight * (product - mean), 0.0)
        sigma_sum += sigma_shares(of_logit, 0.0, distance, shape, KERNEL)
        scale = of_logit * by_distance_per_length(distance, shape, eps, KERNEL)
        sum_x += scale * x
        sum_y += scale * y
        sum_z += scale * z
        at = d_reference + 3 * row
        tl.atomic_add(at, -scale * x, mask=exists, sem="relaxed")
        tl.atomic_add(at + 1, -scale * y, mask=exists, sem="relaxed")
        tl.atomic_add(at + 2, -scale * z, mask=exists, sem="relaxed")
    store_rows_of_3(d_query, query, sum_x, sum_y, sum_z, inside)
    tl.store(d_sigma + query, sigma_sum, mask=inside)


def _specs(
    query_points: Tensor,
    reference_points: Tensor,
    features: Tensor,
    sigma: Tensor,
    neighbor_indices: Tensor,
    *weighting: str | float,
) -> tuple:
    queries, k = neighbor_indices.shape
    kept = queries if runs_kernels(query_points) else 0
    return ((queries, features.shape[1]), features.dtype), ((kept, k), features.dtype)


_aggregate = kernel_op(
    "pointproj::triton_aggregate_neighbors",
    _forward,
    _specs,
    differentiable=DIFFERENTIABLE,
    backward=_backward,
    second_backward=second_backward_over(listed_chunks),
)
count_aggregation("triton_aggregate_neighbors", list(inspect.signature(_forward).parameters))


def _search_and_aggregate(
    query_points: Tensor,
    reference_points: Tensor,
    features: Tensor,
    sigma: Tensor,
    query_offsets: Tensor | None,
    reference_offsets: Tensor | None,
    count: int,
    key: torch.dtype,
    k: int,
    *weighting: str | float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Aggregated features, weights and rows."""
    clouds = Clouds(query_points, query_offsets, reference_points, reference_offsets, count)
    rows = search(clouds, *sorted_together(clouds, key), torch.int32, k)[1]
    return *_forward(query_points, reference_points, features, sigma, rows, *weighting), rows


def _save(ctx: Any, args: tuple, made: tuple[Tensor, Tensor, Tensor]) -> None:
    """As the sums alone would, of which this is the derivative."""
    *outputs, rows = made
    _aggregate.save(ctx, (*args[:4], rows, *args[9:]), tuple(outputs))
    ctx.mark_non_differentiable(*made[1:])


def _chain(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    by_sums = _aggregate.chain(ctx, *grads[:2])
    return *by_sums[:4], *[None] * (len(ctx.needs_input_grad) - 4)


_together = direct("pointproj::triton_knn_aggregate", Replayable(_search_and_aggregate), _save, _chain)
