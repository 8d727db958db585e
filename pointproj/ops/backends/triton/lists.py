"""Aggregation over neighbour lists, nearest first: forward and backward kernels for kNN."""

import inspect
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from pointproj.ops.backends import torch as plain
from pointproj.ops.backends.triton.flops import count_aggregation
from pointproj.ops.backends.triton.operators import kernel_op, runs_kernels
from pointproj.ops.backends.triton.tiles import is_finite, size_class, tuned
from pointproj.ops.bridge.torch_op import Saved
from pointproj.ops.clouds import Clouds
from pointproj.ops.gradients import DIFFERENTIABLE, aggregate_backward, second_backward_over
from pointproj.ops.pairs import listed_chunks


def aggregate_neighbors(
    query_points: Tensor, reference_points: Tensor, features: Tensor, sigma: Tensor, neighbor_indices: Tensor
) -> Tensor:
    """As :func:`pointproj.ops.backends.torch.aggregate_neighbors`, for lists sorted by distance."""
    return _aggregate(query_points, reference_points, features, sigma, neighbor_indices)[0]


def channel_block(channels: int) -> int:
    """How many channels a program holds: a power of two that wastes little."""
    if channels <= 16:
        return 16
    return 32 if channels <= 32 else 64


def _specs(
    query_points: Tensor, reference_points: Tensor, features: Tensor, sigma: Tensor, neighbor_indices: Tensor
) -> tuple:
    queries = query_points.shape[0]
    lists = queries if runs_kernels(query_points) else 0
    return (
        ((queries, features.shape[1]), features.dtype),
        ((lists, neighbor_indices.shape[1]), features.dtype),
    )


def _forward(
    query_points: Tensor, reference_points: Tensor, features: Tensor, sigma: Tensor, neighbor_indices: Tensor
) -> tuple[Tensor, Tensor]:
    """Aggregated features, and what the backward needs: the weights."""
    if not runs_kernels(query_points):
        clouds = Clouds(query_points, None, reference_points, None, 1)
        aggregated = plain.aggregate_neighbors(clouds, features, sigma, neighbor_indices)
        return aggregated, features.new_empty(0, neighbor_indices.shape[1])
    queries, k = neighbor_indices.shape
    channels = features.shape[1]
    block = channel_block(channels)
    aggregated = features.new_empty(queries, channels)
    weights = features.new_empty(queries, k)
    blocks = triton.cdiv(channels, block)
    wrap_triton(aggregate_kernel)[lambda meta: (triton.cdiv(queries, meta["TILE"]), blocks)](
        query_points, reference_points, features, sigma, neighbor_indices, aggregated, weights,
        queries, k, channels, size_class(queries), block,
    )  # fmt: skip
    return aggregated, weights


def _backward(grads: tuple[Tensor, ...], needs: dict[str, bool], saved: Saved) -> tuple[Tensor | None, ...]:
    inputs = saved.inputs
    points, features = inputs["query_points"], inputs["features"]
    if not runs_kernels(points) or torch.are_deterministic_algorithms_enabled():
        # Without atomics: torch sorts what it adds when deterministic algorithms are asked for.
        return aggregate_backward(grads[0], needs, inputs, listed_chunks)
    neighbor_indices, weights = inputs["neighbor_indices"], saved.outputs[1]
    made: dict[str, Tensor] = {}
    if needs["features"]:
        made["features"] = _spread(neighbor_indices, weights, grads[0], features)
    if needs["query_points"] or needs["reference_points"] or needs["sigma"]:
        made |= _pull(inputs, weights, grads[0])
    return tuple(made[n].to(inputs[n].dtype) if needs[n] else None for n in DIFFERENTIABLE)


def _spread(neighbor_indices: Tensor, weights: Tensor, grad: Tensor, features: Tensor) -> Tensor:
    queries, k = neighbor_indices.shape
    channels = features.shape[1]
    block = channel_block(channels)
    d_features = torch.zeros_like(features)
    wrap_triton(spread_kernel)[(triton.cdiv(queries, SPREAD_TILE), triton.cdiv(channels, block))](
        neighbor_indices, weights, grad, d_features, queries, k, channels, block, SPREAD_TILE
    )
    return d_features


def _pull(inputs: dict[str, Any], weights: Tensor, grad: Tensor) -> dict[str, Tensor]:
    neighbor_indices, features = inputs["neighbor_indices"], inputs["features"]
    queries, k = neighbor_indices.shape
    channels = features.shape[1]
    products = torch.empty_like(weights)
    d_query = features.new_empty(queries, 3)
    d_reference = features.new_zeros(inputs["reference_points"].shape)
    d_sigma = features.new_empty(queries)
    wrap_triton(pull_kernel)[(triton.cdiv(queries, PULL_TILE),)](
        inputs["query_points"], inputs["reference_points"], features, inputs["sigma"], neighbor_indices,
        weights, grad, products, d_query, d_reference, d_sigma,
        queries, k, channels, channel_block(channels), PULL_TILE,
    )  # fmt: skip
    return {"query_points": d_query, "reference_points": d_reference, "sigma": d_sigma.sum()}


CONFIGS = [
    triton.Config({"TILE": tile}, num_warps=warps) for tile, warps in ((32, 1), (16, 4), (8, 2), (64, 2))
]
SPREAD_TILE = 16
PULL_TILE = 32


@triton.jit
def difference(query_points, query, reference_points, row, mask, real: tl.constexpr):
    """Query minus neighbour, and its length. The difference is taken in the positions' dtype."""
    at, there = query_points + 3 * query, reference_points + 3 * row
    x = (tl.load(at, mask=mask, other=0.0) - tl.load(there, mask=mask, other=0.0)).to(real)
    y = (tl.load(at + 1, mask=mask, other=0.0) - tl.load(there + 1, mask=mask, other=0.0)).to(real)
    z = (tl.load(at + 2, mask=mask, other=0.0) - tl.load(there + 2, mask=mask, other=0.0)).to(real)
    return x, y, z, tl.sqrt(x * x + y * y + z * z)


@tuned(CONFIGS, key=["k", "channels", "scale"])
@triton.jit
def aggregate_kernel(
    query_points, reference_points, features, sigma, neighbor_indices, aggregated, weights,
    queries, k, channels, scale, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Softmax over each list, and the weighted sum."""
    real: tl.constexpr = features.dtype.element_ty
    query = (tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = query < queries
    per_sigma = 1.0 / tl.load(sigma)
    first = tl.load(neighbor_indices + query * k, mask=inside, other=-1).to(tl.int64)
    _, _, _, nearest = difference(query_points, query, reference_points, first, first >= 0, real)
    total = tl.zeros([TILE], real)
    sums = tl.zeros([TILE, BLOCK], real)
    for place in range(k):
        row = tl.load(neighbor_indices + query * k + place, mask=inside, other=-1).to(tl.int64)
        exists = row >= 0
        _, _, _, far = difference(query_points, query, reference_points, row, exists, real)
        weight = tl.where(exists, tl.exp((nearest - far) * per_sigma), 0.0)
        if tl.program_id(1) == 0:
            tl.store(weights + query * k + place, weight, mask=inside)
        total += weight
        there = exists[:, None] & (channel < channels)[None, :]
        values = tl.load(features + row[:, None] * channels + channel[None, :], mask=there, other=0.0)
        sums += tl.where(there, weight[:, None] * values, 0.0)
    inverse = tl.where(total > 0, 1.0 / total, 0.0)
    if tl.program_id(1) == 0:
        tl.debug_barrier()  # other threads may read what these have written
        for place in range(k):
            at = weights + query * k + place
            tl.store(at, tl.load(at, mask=inside, other=0.0) * inverse, mask=inside)
    x = tl.load(query_points + 3 * query, mask=inside, other=0.0)
    y = tl.load(query_points + 3 * query + 1, mask=inside, other=0.0)
    z = tl.load(query_points + 3 * query + 2, mask=inside, other=0.0)
    inverse = tl.where(is_finite(x, y, z), inverse, float("nan"))
    out = inside[:, None] & (channel < channels)[None, :]
    tl.store(aggregated + query[:, None] * channels + channel[None, :], sums * inverse[:, None], mask=out)


@triton.jit
def spread_kernel(
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
def pull_kernel(
    query_points, reference_points, features, sigma, neighbor_indices, weights, grad, products,
    d_query, d_reference, d_sigma, queries, k, channels, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """What the logits' gradients do to positions and sigma; formulas in :mod:`pointproj.ops.gradients`."""
    real: tl.constexpr = features.dtype.element_ty
    query = (tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    inside = query < queries
    per_sigma = 1.0 / tl.load(sigma)
    mean = tl.zeros([TILE], real)
    for place in range(k):
        row = tl.load(neighbor_indices + query * k + place, mask=inside, other=-1).to(tl.int64)
        weight = tl.load(weights + query * k + place, mask=inside, other=0.0)
        product = tl.zeros([TILE], real)
        for begin in range(0, channels, BLOCK):
            there = begin + channel[None, :]
            exists = (row >= 0)[:, None] & (there < channels)
            upstream = tl.load(
                grad + query[:, None] * channels + begin + channel[None, :], mask=exists, other=0.0
            )
            values = tl.load(
                features + row[:, None] * channels + begin + channel[None, :], mask=exists, other=0.0
            )
            product += tl.sum(upstream * values, 1)
        mean += weight * product
        tl.store(products + query * k + place, product, mask=inside)
    tl.debug_barrier()  # other threads may read what these have written
    along_x = tl.zeros([TILE], real)
    along_y = tl.zeros([TILE], real)
    along_z = tl.zeros([TILE], real)
    spread = tl.zeros([TILE], real)
    for place in range(k):
        row = tl.load(neighbor_indices + query * k + place, mask=inside, other=-1).to(tl.int64)
        exists = row >= 0
        weight = tl.load(weights + query * k + place, mask=inside, other=0.0)
        product = tl.load(products + query * k + place, mask=inside, other=0.0)
        x, y, z, far = difference(query_points, query, reference_points, row, exists, real)
        grad_logit = tl.where(exists, weight * (product - mean), 0.0)
        spread += grad_logit * far
        scale = tl.where(far > 0, grad_logit * per_sigma / far, 0.0)
        along_x += scale * x
        along_y += scale * y
        along_z += scale * z
        at = d_reference + 3 * row
        tl.atomic_add(at, scale * x, mask=exists, sem="relaxed")
        tl.atomic_add(at + 1, scale * y, mask=exists, sem="relaxed")
        tl.atomic_add(at + 2, scale * z, mask=exists, sem="relaxed")
    tl.store(d_query + 3 * query, -along_x, mask=inside)
    tl.store(d_query + 3 * query + 1, -along_y, mask=inside)
    tl.store(d_query + 3 * query + 2, -along_z, mask=inside)
    tl.store(d_sigma + query, spread * per_sigma * per_sigma, mask=inside)


_aggregate = kernel_op(
    "pointproj::triton_aggregate_neighbors",
    _forward,
    _specs,
    differentiable=DIFFERENTIABLE,
    backward=_backward,
    second_backward=second_backward_over(listed_chunks),
)
count_aggregation("triton_aggregate_neighbors", list(inspect.signature(_forward).parameters))
