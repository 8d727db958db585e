"""Gradients of positions and sigma within a radius; formulas in :mod:`pointproj.ops.gradients`.

A tile of points of one side goes through the leaves of the other side whose box is within the radius of its
own. For each leaf the tile has a matrix of distances, and one of the products of upstream gradients and
features. One kernel makes the gradients of query points and, after that, those of reference points.

No row of the benchmark asks for these gradients; without this kernel they would take a dense matrix of pairs.
"""

import triton
import triton.language as tl
from torch import Tensor

from pointproj.ops.backends.triton.launch import launch
from pointproj.ops.backends.triton.matrix_products import add_product, channel_block, load_rows
from pointproj.ops.backends.triton.tiles import (
    END,
    LEAF,
    cdiv,
    load_points,
    load_tile,
    squared_length,
    store_rows_of_3,
    tile_box,
)
from pointproj.ops.backends.triton.traversal import first_leaf, next_leaf
from pointproj.ops.backends.triton.tree import Tree
from pointproj.ops.backends.triton.weights import (
    by_distance_per_length,
    choices,
    length,
    parameters,
    relative_weights,
    sigma_shares,
    slope_of,
)
from pointproj.ops.reference import Weighting

LAUNCH = {"TILE": 32, "num_warps": 4}


def position_gradients(
    queries: Tree,
    references: Tree,
    query_points: Tensor,
    reference_points: Tensor,
    values: tuple[Tensor, ...],
    clouds: int,
    of_references: bool,
    weighting: Weighting,
) -> dict[str, Tensor]:
    """Gradients of query points, of sigma and, if asked for, of reference points, by name.

    ``values`` are features, the aggregated ones, the softmax, the upstream gradient, sigma and the largest
    squared distance within the radius.
    """
    *values, sigma, limit = values
    features = values[0]
    channels = features.shape[1]
    count = query_points.shape[0]
    # Upstream gradient times aggregated features of each query, which the second launch reads.
    means, d_sigma = features.new_empty(count), features.new_empty(count)
    made = {}
    sides = {"query_points": (queries, references, query_points)}
    if of_references:
        sides["reference_points"] = (references, queries, reference_points)
    for name, (own, others, points) in sides.items():
        made[name] = features.new_empty(points.shape)
        launch(
            position_kernel, (cdiv(points.shape[0], LAUNCH["TILE"]),),
            *own.side(), points.shape[0], *others.side(), others.boxes, others.spans, *values,
            *parameters(weighting, sigma), limit, means, made[name], d_sigma, channels,
            name == "query_points", clouds != 1, *choices(weighting), channel_block(channels), **LAUNCH,
        )  # fmt: skip
    return {**made, "sigma": d_sigma.sum()}


@triton.jit
def pair_with_leaf(
    x, y, z, cloud, active, leaf, side, limit,
    real: tl.constexpr, BATCHED: tl.constexpr, KERNEL: tl.constexpr,
):  # fmt: skip
    """(TILE, LEAF): which pairs are within the radius, their differences and distances in ``real``."""
    points, _, clouds, padded = side
    at = leaf * LEAF + tl.arange(0, LEAF)
    px, py, pz = load_points(points, padded, at)
    dx, dy, dz = x[:, None] - px[None, :], y[:, None] - py[None, :], z[:, None] - pz[None, :]
    squared = squared_length(dx, dy, dz)
    hit = (squared <= limit) & active[:, None]
    if BATCHED:
        hit &= cloud[:, None] == tl.load(clouds + at)[None, :]
    return at, hit, dx.to(real), dy.to(real), dz.to(real), length(squared, KERNEL).to(real)


@triton.jit
def logit_gradient(weights, products, means, MEAN: tl.constexpr):
    """A neighbour with all the weight, to rounding, is the mean: its gradient is 0, and not what rounding
    leaves of it. From a sum nothing is taken away.
    """
    if MEAN:
        most: tl.constexpr = 1.0 - (2.0**-49 if weights.dtype == tl.float64 else 2.0**-20)
        gradient = tl.where(weights < most, weights * (products - means), 0.0)
    else:
        gradient = weights * products
    return gradient


@triton.jit
def paired_products(
    upstream, query, has_query, features, reference, has_reference, channels, BLOCK: tl.constexpr
):
    """Upstream gradients of queries times features of reference points, for all pairs."""
    total = tl.zeros([query.shape[0], reference.shape[0]], upstream.dtype.element_ty)
    for begin in range(0, channels, BLOCK):
        left = load_rows(upstream, query, has_query, begin, channels, BLOCK)
        right = load_rows(features, reference, has_reference, begin, channels, BLOCK)
        total = add_product(total, left, tl.trans(right))
    return total


@triton.jit
def load_softmax(softmax, query, exists):
    """The distance that weights of a query are relative to, and 1 / their total."""
    at = softmax + 2 * query.to(tl.int64)
    return tl.load(at, mask=exists, other=0.0), tl.load(at + 1, mask=exists, other=0.0)


@triton.jit
def position_kernel(
    own, own_rows, own_clouds, own_padded, own_count,
    points, row_of, clouds, padded, boxes, spans,
    features, aggregated, softmax, grad, shape, eps, limit, means, d_own, d_sigma, channels,
    OF_QUERIES: tl.constexpr, BATCHED: tl.constexpr, KERNEL: tl.constexpr, MEAN: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Gradient of the points of one side: of the queries with that of sigma, or of the reference points."""
    real: tl.constexpr = features.dtype.element_ty
    side = (points, row_of, clouds, padded)
    at, x, y, z, cloud, active = load_tile(
        (own, own_rows, own_clouds, own_padded), own_count, tl.program_id(0), TILE, BATCHED
    )
    box = tile_box(x, y, z, cloud, active)
    own_row = tl.load(own_rows + at, mask=at < own_count, other=0)
    shape, eps = tl.load(shape), tl.load(eps)
    slope = slope_of(shape, KERNEL)
    farthest = tl.load(limit)
    if OF_QUERIES:
        nearest, inverse = load_softmax(softmax, own_row, active)
        own_products = paired_products(grad, own_row, active, aggregated, own_row, active, channels, BLOCK)
        lane = tl.arange(0, TILE)
        mean = tl.sum(tl.where(lane[:, None] == lane[None, :], own_products, 0.0), 1)
        sigma_sum = tl.zeros([TILE], real)
    sum_x = tl.zeros([TILE], real)
    sum_y = tl.zeros([TILE], real)
    sum_z = tl.zeros([TILE], real)
    leaves = tl.cast(padded // LEAF, tl.int32)  # sizes may come as 64 bits
    leaf, near = first_leaf(boxes, spans, leaves, box, farthest, BATCHED)
    while leaf < END:
        there, hit, dx, dy, dz, distance = pair_with_leaf(
            x, y, z, cloud, active, leaf, side, farthest, real, BATCHED, KERNEL
        )
        if tl.max(hit.to(tl.int32)) > 0:
            row = tl.load(row_of + there)
            if OF_QUERIES:
                products = paired_products(grad, own_row, active, features, row, row >= 0, channels, BLOCK)
                weights = relative_weights(nearest[:, None], distance, slope, eps, KERNEL)
                of_logit = logit_gradient(weights * inverse[:, None], products, mean[:, None], MEAN)
                # Of a mean, gradients of a row's logits add up to 0: logits may be relative to the nearest.
                of_sigma = sigma_shares(of_logit, nearest[:, None], distance, shape, KERNEL)
                sigma_sum += tl.sum(tl.where(hit, of_sigma, 0.0), 1)
            else:
                is_point = row >= 0
                other_nearest, other_inverse = load_softmax(softmax, row, is_point)
                other_mean = tl.load(means + row, mask=is_point, other=0.0)
                products = paired_products(grad, row, is_point, features, own_row, active, channels, BLOCK)
                weights = relative_weights(other_nearest[None, :], distance, slope, eps, KERNEL)
                weights *= other_inverse[None, :]
                of_logit = logit_gradient(weights, tl.trans(products), other_mean[None, :], MEAN)
            scale = tl.where(hit, of_logit * by_distance_per_length(distance, shape, eps, KERNEL), 0.0)
            sum_x += tl.sum(tl.where(hit, scale * dx, 0.0), 1)
            sum_y += tl.sum(tl.where(hit, scale * dy, 0.0), 1)
            sum_z += tl.sum(tl.where(hit, scale * dz, 0.0), 1)
        leaf, near = next_leaf(leaf, near, boxes, spans, leaves, box, farthest, BATCHED)
    exists = at < own_count
    store_rows_of_3(d_own, own_row, sum_x, sum_y, sum_z, exists)
    if OF_QUERIES:
        tl.store(d_sigma + own_row, sigma_sum, mask=exists)
        tl.store(means + own_row, mean, mask=exists)
