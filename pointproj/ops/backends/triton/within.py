"""Aggregation over all points within a radius: nothing is listed, nothing truncated.

Gradients that belong to reference points are gathered by tiles of reference points over the queries near
each, so nothing is ever added to one place by two programs: results are the same, bit for bit, in every run.
"""

import inspect

import torch
import triton
from torch import Tensor
from torch.library import wrap_triton

from pointproj.ops.backends import torch as plain
from pointproj.ops.backends.triton.flops import count_aggregation
from pointproj.ops.backends.triton.lists import channel_block
from pointproj.ops.backends.triton.nearby import LISTS, RING
from pointproj.ops.backends.triton.operators import kernel_op, runs_kernels
from pointproj.ops.backends.triton.sums import SOME, TILE, WARPS, programs, sums_kernel
from pointproj.ops.backends.triton.tiles import FANOUT, LEAF
from pointproj.ops.backends.triton.tree import Tree
from pointproj.ops.backends.triton.within_kernels import pull_kernel, push_kernel
from pointproj.ops.bridge.torch_op import Saved
from pointproj.ops.clouds import Clouds
from pointproj.ops.gradients import DIFFERENTIABLE, aggregate_backward, second_backward_over
from pointproj.ops.pairs import chunks_within, largest_square_within

PAIRED = {"TILE": 32, "num_warps": 4}  # of the kernels for positions' gradients


def aggregate_within(
    clouds: Clouds, queries: Tree, references: Tree, features: Tensor, sigma: Tensor, radius: float
) -> Tensor:
    """Weighted mean of the features within ``radius``: ``(Q, C)`` in their dtype."""
    return _aggregate(*clouds, list(queries), list(references), features, sigma, radius)[0]


def _specs(
    query_points: Tensor,
    query_offsets: Tensor | None,
    reference_points: Tensor,
    reference_offsets: Tensor | None,
    clouds: int,
    query_tree: list[Tensor],
    reference_tree: list[Tensor],
    features: Tensor,
    sigma: Tensor,
    radius: float,
) -> tuple:
    queries = query_points.shape[0]
    return (
        ((queries, features.shape[1]), features.dtype),
        ((queries if runs_kernels(query_points) else 0, 2), features.dtype),
    )


def _forward(
    query_points: Tensor,
    query_offsets: Tensor | None,
    reference_points: Tensor,
    reference_offsets: Tensor | None,
    clouds: int,
    query_tree: list[Tensor],
    reference_tree: list[Tensor],
    features: Tensor,
    sigma: Tensor,
    radius: float,
) -> tuple[Tensor, Tensor]:
    """Aggregated features, and of each query the nearest distance and 1 / total weight relative to it."""
    if not runs_kernels(query_points):
        of_clouds = Clouds(query_points, query_offsets, reference_points, reference_offsets, clouds)
        return plain.radius_aggregate(of_clouds, None, features, sigma, radius), features.new_empty(0, 2)
    aggregated = features.new_empty(query_points.shape[0], features.shape[1])
    softmax = features.new_empty(query_points.shape[0], 2)
    _sum(query_tree, reference_tree, features, sigma, radius, softmax, aggregated, clouds, False)
    return aggregated, softmax


def _sum(
    own: list[Tensor],
    others: list[Tensor],
    values: Tensor,
    sigma: Tensor,
    radius: float,
    softmax: Tensor,
    summed: Tensor,
    clouds: int,
    gather: bool,
) -> None:
    """Into ``summed``, for each point of a side of its own, what there is near it of the other's values."""
    count, channels = summed.shape
    block = channel_block(channels)
    grid = programs(count), triton.cdiv(channels, block)
    lists = own[1].new_empty(grid[0] * grid[1], LISTS.value)
    rings = own[0].new_empty(grid[0] * grid[1], 3 * RING.value)
    wrap_triton(sums_kernel)[grid](
        *_side(own), count, *_tree(others), values, sigma, _reach(radius, own[0]), softmax, summed,
        lists, rings, channels, gather, clouds != 1, LEAF, FANOUT, block,
        TILE, SOME, num_warps=WARPS,
    )  # fmt: skip


def _side(tree: list[Tensor]) -> tuple:
    """What a kernel takes of the points that it has in tiles."""
    points, rows, clouds = tree[:3]
    return points, rows, clouds, rows.shape[0]


def _tree(tree: list[Tensor]) -> tuple:
    """What a kernel takes of the points whose leaves it visits."""
    boxes, spans = tree[3:5]
    return *_side(tree), boxes, spans


def _reach(radius: float, points: Tensor) -> Tensor:
    """The largest squared distance within the radius; a tensor, because kernels take numbers as fp32."""
    return points.new_full((), largest_square_within(radius, points.dtype))


def _backward(grads: tuple[Tensor, ...], needs: dict[str, bool], saved: Saved) -> tuple[Tensor | None, ...]:
    inputs = saved.inputs
    if not runs_kernels(inputs["query_points"]):
        return aggregate_backward(grads[0], needs, inputs, chunks_within)
    softmax, made = saved.outputs[1], {}
    if needs["features"]:
        made["features"] = _gather(inputs, softmax, grads[0])
    if needs["query_points"] or needs["reference_points"] or needs["sigma"]:
        made |= _pull(inputs, saved, grads[0])
    if needs["reference_points"]:
        made["reference_points"] = _push(inputs, softmax, made["means"], grads[0])
    return tuple(made[n].to(inputs[n].dtype) if needs[n] else None for n in DIFFERENTIABLE)


def _gather(inputs: dict, softmax: Tensor, grad: Tensor) -> Tensor:
    d_features = torch.empty_like(inputs["features"])
    _sum(
        inputs["reference_tree"], inputs["query_tree"], grad, inputs["sigma"], inputs["radius"], softmax,
        d_features, inputs["clouds"], True,
    )  # fmt: skip
    return d_features


def _pull(inputs: dict, saved: Saved, grad: Tensor) -> dict[str, Tensor]:
    features, count = inputs["features"], inputs["query_points"].shape[0]
    channels = features.shape[1]
    means, d_sigma = features.new_empty(count), features.new_empty(count)
    d_query = features.new_empty(count, 3)
    wrap_triton(pull_kernel)[(triton.cdiv(count, PAIRED["TILE"]),)](
        *_side(inputs["query_tree"]), count, *_tree(inputs["reference_tree"]), features, *saved.outputs,
        grad, inputs["sigma"], _reach(inputs["radius"], inputs["query_points"]), means, d_query, d_sigma,
        channels, inputs["clouds"] != 1, LEAF, FANOUT, channel_block(channels), **PAIRED,
    )  # fmt: skip
    return {"query_points": d_query, "sigma": d_sigma.sum(), "means": means}


def _push(inputs: dict, softmax: Tensor, means: Tensor, grad: Tensor) -> Tensor:
    features, count = inputs["features"], inputs["reference_points"].shape[0]
    channels = features.shape[1]
    d_reference = features.new_empty(count, 3)
    wrap_triton(push_kernel)[(triton.cdiv(count, PAIRED["TILE"]),)](
        *_side(inputs["reference_tree"]), count, *_tree(inputs["query_tree"]), features, softmax, means,
        grad, inputs["sigma"], _reach(inputs["radius"], inputs["query_points"]), d_reference,
        channels, inputs["clouds"] != 1, LEAF, FANOUT, channel_block(channels), **PAIRED,
    )  # fmt: skip
    return d_reference


_aggregate = kernel_op(
    "pointproj::triton_aggregate_within",
    _forward,
    _specs,
    differentiable=DIFFERENTIABLE,
    backward=_backward,
    second_backward=second_backward_over(chunks_within),
)
count_aggregation("triton_aggregate_within", list(inspect.signature(_forward).parameters))
