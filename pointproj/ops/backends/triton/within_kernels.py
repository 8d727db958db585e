"""Kernels for the gradients of positions within a radius: tiles of one side against leaves of the other.

A tile of points goes through the leaves whose box is within the radius of its own. For each leaf the tile has
a matrix of distances, and one of the products of upstream gradients and features.
"""

import triton
import triton.language as tl

from pointproj.ops.backends.triton.products import add_product, load_rows
from pointproj.ops.backends.triton.tiles import (
    END,
    LOG2E,
    first_leaf,
    load_points,
    load_tile,
    next_leaf,
    power,
    root,
    squared_length,
    tile_box,
)


@triton.jit
def pairs(
    x, y, z, cloud, active, leaf, points, clouds, padded, reach,
    real: tl.constexpr, MANY: tl.constexpr, LEAF: tl.constexpr,
):  # fmt: skip
    """(TILE, LEAF): which pairs are within the radius, their differences and distances in ``real``."""
    at = leaf * LEAF + tl.arange(0, LEAF)
    px, py, pz = load_points(points, padded, at)
    dx, dy, dz = x[:, None] - px[None, :], y[:, None] - py[None, :], z[:, None] - pz[None, :]
    squared = squared_length(dx, dy, dz)
    hit = (squared <= reach) & active[:, None]
    if MANY:
        hit &= cloud[:, None] == tl.load(clouds + at)[None, :]
    return at, hit, dx.to(real), dy.to(real), dz.to(real), root(squared).to(real)


@triton.jit
def of_logits(weights, products, means):
    """Gradients of logits. A neighbour with all the weight, to rounding, is the mean: its gradient is 0, and
    not what rounding leaves of it.
    """
    most: tl.constexpr = 1.0 - (2.0**-49 if weights.dtype == tl.float64 else 2.0**-20)
    return tl.where(weights < most, weights * (products - means), 0.0)


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
def pull_kernel(
    queries, query_rows, query_clouds, queries_padded, query_count,
    points, row_of, clouds, padded, boxes, spans,
    features, aggregated, softmax, grad, sigma, reach, means, d_query, d_sigma, channels,
    MANY: tl.constexpr, LEAF: tl.constexpr, FANOUT: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Gradients of the query points and of sigma."""
    real: tl.constexpr = features.dtype.element_ty
    at, x, y, z, cloud, active = load_tile(
        queries, query_clouds, queries_padded, query_count, tl.program_id(0), TILE, MANY
    )
    box = tile_box(x, y, z, cloud, active)
    query = tl.load(query_rows + at, mask=at < query_count, other=0)
    per_sigma = 1.0 / tl.load(sigma)
    slope = per_sigma * LOG2E
    limit = tl.load(reach)
    nearest = tl.load(softmax + 2 * query.to(tl.int64), mask=active, other=0.0)
    inverse = tl.load(softmax + 2 * query.to(tl.int64) + 1, mask=active, other=0.0)
    own = paired_products(grad, query, active, aggregated, query, active, channels, BLOCK)
    lane = tl.arange(0, TILE)
    mean = tl.sum(tl.where(lane[:, None] == lane[None, :], own, 0.0), 1)
    along_x = tl.zeros([TILE], real)
    along_y = tl.zeros([TILE], real)
    along_z = tl.zeros([TILE], real)
    spread = tl.zeros([TILE], real)
    leaves = tl.cast(padded // LEAF, tl.int32)  # sizes may come as 64 bits
    leaf, near = first_leaf(boxes, spans, leaves, box, limit, MANY, FANOUT)
    while leaf < END:
        there, hit, dx, dy, dz, far = pairs(
            x, y, z, cloud, active, leaf, points, clouds, padded, limit, real, MANY, LEAF
        )
        if tl.max(hit.to(tl.int32)) > 0:
            row = tl.load(row_of + there)
            products = paired_products(grad, query, active, features, row, row >= 0, channels, BLOCK)
            weights = power((nearest[:, None] - far) * slope) * inverse[:, None]
            grad_logit = tl.where(hit, of_logits(weights, products, mean[:, None]), 0.0)
            # Gradients of a row's logits add up to 0: distances may be counted from the nearest.
            spread += tl.sum(tl.where(hit, grad_logit * (far - nearest[:, None]), 0.0), 1)
            scale = tl.where(hit & (far > 0), grad_logit * per_sigma / far, 0.0)
            along_x += tl.sum(tl.where(hit, scale * dx, 0.0), 1)
            along_y += tl.sum(tl.where(hit, scale * dy, 0.0), 1)
            along_z += tl.sum(tl.where(hit, scale * dz, 0.0), 1)
        leaf, near = next_leaf(leaf, near, boxes, spans, leaves, box, limit, MANY, FANOUT)
    exists = at < query_count
    out = 3 * query.to(tl.int64)
    tl.store(d_query + out, -along_x, mask=exists)
    tl.store(d_query + out + 1, -along_y, mask=exists)
    tl.store(d_query + out + 2, -along_z, mask=exists)
    tl.store(d_sigma + query, spread * per_sigma * per_sigma, mask=exists)
    tl.store(means + query, mean, mask=exists)


@triton.jit
def push_kernel(
    references, reference_rows, reference_clouds, references_padded, reference_count,
    points, row_of, clouds, padded, boxes, spans,
    features, softmax, means, grad, sigma, reach, d_reference, channels,
    MANY: tl.constexpr, LEAF: tl.constexpr, FANOUT: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Gradient of the reference points, over the queries near a tile of them."""
    real: tl.constexpr = features.dtype.element_ty
    at, x, y, z, cloud, active = load_tile(
        references, reference_clouds, references_padded, reference_count, tl.program_id(0), TILE, MANY
    )
    box = tile_box(x, y, z, cloud, active)
    reference = tl.load(reference_rows + at, mask=at < reference_count, other=0)
    per_sigma = 1.0 / tl.load(sigma)
    slope = per_sigma * LOG2E
    limit = tl.load(reach)
    along_x = tl.zeros([TILE], real)
    along_y = tl.zeros([TILE], real)
    along_z = tl.zeros([TILE], real)
    leaves = tl.cast(padded // LEAF, tl.int32)  # sizes may come as 64 bits
    leaf, near = first_leaf(boxes, spans, leaves, box, limit, MANY, FANOUT)
    while leaf < END:
        there, hit, dx, dy, dz, far = pairs(
            x, y, z, cloud, active, leaf, points, clouds, padded, limit, real, MANY, LEAF
        )
        if tl.max(hit.to(tl.int32)) > 0:
            query = tl.load(row_of + there)
            exists = query >= 0
            nearest = tl.load(softmax + 2 * query.to(tl.int64), mask=exists, other=0.0)
            inverse = tl.load(softmax + 2 * query.to(tl.int64) + 1, mask=exists, other=0.0)
            mean = tl.load(means + query, mask=exists, other=0.0)
            products = paired_products(grad, query, exists, features, reference, active, channels, BLOCK)
            weights = power((nearest[None, :] - far) * slope) * inverse[None, :]
            grad_logit = of_logits(weights, tl.trans(products), mean[None, :])
            scale = tl.where(hit & (far > 0), grad_logit * per_sigma / far, 0.0)
            along_x -= tl.sum(tl.where(hit, scale * dx, 0.0), 1)
            along_y -= tl.sum(tl.where(hit, scale * dy, 0.0), 1)
            along_z -= tl.sum(tl.where(hit, scale * dz, 0.0), 1)
        leaf, near = next_leaf(leaf, near, boxes, spans, leaves, box, limit, MANY, FANOUT)
    exists = at < reference_count
    out = 3 * reference.to(tl.int64)
    tl.store(d_reference + out, along_x, mask=exists)
    tl.store(d_reference + out + 1, along_y, mask=exists)
    tl.store(d_reference + out + 2, along_z, mask=exists)
