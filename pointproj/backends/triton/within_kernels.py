"""Kernels over all pairs within a radius: tiles of one side against the leaves of the other.

A tile of points goes through the leaves whose box is within the radius of its own. For each leaf the tile has
a matrix of distances; weights times values of the leaf is then a matrix product. With nearest_i the distance
of query i's nearest neighbour, weights are exp((nearest_i - d_ij) / sigma): exact for any sigma.
"""

import triton
import triton.language as tl

from pointproj.backends.triton.tiles import (
    END,
    first_leaf,
    is_finite,
    load_points,
    next_leaf,
    squared_length,
    tile_box,
    tuned,
)

CONFIGS = [
    triton.Config({"TILE": tile}, num_warps=warps) for tile, warps in ((16, 1), (16, 2), (32, 2), (32, 4))
]


@triton.jit
def load_tile(points, clouds, padded, size, TILE: tl.constexpr, MANY: tl.constexpr):
    """The points of this program's tile, their clouds, and which of them can have neighbours."""
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    x, y, z = load_points(points, padded, at)
    cloud = tl.zeros_like(at)
    if MANY:
        cloud = tl.load(clouds + at)
    return at, x, y, z, cloud, (at < size) & is_finite(x, y, z)


@triton.jit
def pairs(
    x, y, z, cloud, active, leaf, points, clouds, padded, reach,
    real: tl.constexpr, MANY: tl.constexpr, LEAF: tl.constexpr,
):  # fmt: skip
    """(TILE, LEAF): which pairs are within the radius, their differences and distances in ``real``."""
    at = leaf * LEAF + tl.arange(0, LEAF)
    px, py, pz = load_points(points, padded, at)
    dx, dy, dz = x[:, None] - px[None, :], y[:, None] - py[None, :], z[:, None] - pz[None, :]
    hit = (squared_length(dx, dy, dz) <= reach) & active[:, None]
    if MANY:
        hit &= cloud[:, None] == tl.load(clouds + at)[None, :]
    dx, dy, dz = dx.to(real), dy.to(real), dz.to(real)
    return at, hit, dx, dy, dz, tl.sqrt(dx * dx + dy * dy + dz * dz)


@triton.jit
def load_rows(values, row, exists, begin, channels, BLOCK: tl.constexpr):
    """Some channels of the rows of a matrix."""
    channel = begin + tl.arange(0, BLOCK)
    at = values + row.to(tl.int64)[:, None] * channels + channel[None, :]
    return tl.load(at, mask=exists[:, None] & (channel < channels)[None, :], other=0.0)


@triton.jit
def product(left, right):
    """Matrix product with the precision of the operands; plain TF32 would round them."""
    if left.dtype == tl.float64:
        result = tl.dot(left, right, out_dtype=tl.float64)
    else:
        result = tl.dot(left, right, input_precision="tf32x3")
    return result


@triton.jit
def quotient(x, y):
    """x / y, rounded."""
    x, y = tl.broadcast(x, y)
    return x / y if x.dtype == tl.float64 else tl.div_rn(x, y)


@triton.jit
def add_weighted(sums, broken, weights, hit, values):
    """Add weights times values. A product would spread what is not finite: see ``broken``."""
    finite = tl.abs(values) < float("inf")
    if tl.min(finite.to(tl.int32)) == 1:
        sums += product(weights, values)
    else:
        sums += product(weights, tl.where(finite, values, 0.0))
        broken += product(hit.to(weights.dtype), 1.0 - finite.to(weights.dtype))
    return sums, broken


@triton.jit
def finish(sums, broken):
    return tl.where(broken > 0, float("nan"), sums)


@tuned(CONFIGS, key=["channels", "MANY", "scale"])
@triton.jit
def aggregate_kernel(
    queries, query_rows, query_clouds, queries_padded, query_count,
    points, row_of, clouds, padded, boxes, spans,
    features, sigma, reach, aggregated, softmax, channels, scale,
    MANY: tl.constexpr, LEAF: tl.constexpr, FANOUT: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Running softmax over the reference points near a tile of queries."""
    real: tl.constexpr = features.dtype.element_ty
    at, x, y, z, cloud, active = load_tile(queries, query_clouds, queries_padded, query_count, TILE, MANY)
    box = tile_box(x, y, z, cloud, active)
    begin = tl.program_id(1) * BLOCK
    per_sigma = 1.0 / tl.load(sigma)
    limit = tl.load(reach)
    nearest = tl.full([TILE], float("inf"), real)
    ones = tl.full([LEAF, 16], 1.0, real)
    totals = tl.zeros([TILE, 16], real)  # every column is the sum of the weights
    sums = tl.zeros([TILE, BLOCK], real)
    broken = tl.zeros([TILE, BLOCK], real)
    leaves = tl.cast(padded // LEAF, tl.int32)  # sizes may come as 64 bits
    leaf, near = first_leaf(boxes, spans, leaves, box, limit, MANY, FANOUT)
    while leaf < END:
        there, hit, _, _, _, far = pairs(
            x, y, z, cloud, active, leaf, points, clouds, padded, limit, real, MANY, LEAF
        )
        closest = tl.min(tl.where(hit, far, float("inf")), 1)
        if tl.min(closest) < float("inf"):
            closest = tl.minimum(closest, nearest)
            rescale = tl.where(nearest < float("inf"), tl.exp((closest - nearest) * per_sigma), 0.0)
            nearest = closest
            weights = tl.where(hit, tl.exp((nearest[:, None] - far) * per_sigma), 0.0)
            # Rounded as the features are, so that features that are all alike come out as they went in.
            totals = totals * rescale[:, None] + product(weights, ones)
            row = tl.load(row_of + there)
            values = load_rows(features, row, row >= 0, begin, channels, BLOCK)
            sums, broken = add_weighted(sums * rescale[:, None], broken, weights, hit, values)
        leaf, near = next_leaf(leaf, near, boxes, spans, leaves, box, limit, MANY, FANOUT)
    total = tl.max(totals, 1)
    has_neighbor = total > 0
    exists = at < query_count
    query = tl.load(query_rows + at, mask=exists, other=0).to(tl.int64)
    channel = begin + tl.arange(0, BLOCK)
    result = quotient(finish(sums, broken), tl.where(has_neighbor, total, 1.0)[:, None])
    result = tl.where(active[:, None], result, float("nan"))
    out = exists[:, None] & (channel < channels)[None, :]
    tl.store(aggregated + query[:, None] * channels + channel[None, :], result, mask=out)
    if tl.program_id(1) == 0:
        tl.store(softmax + 2 * query, nearest, mask=exists)
        tl.store(softmax + 2 * query + 1, tl.where(has_neighbor, 1.0 / total, 0.0), mask=exists)


@tuned(CONFIGS, key=["channels", "MANY", "scale"])
@triton.jit
def gather_kernel(
    references, reference_rows, reference_clouds, references_padded, reference_count,
    points, row_of, clouds, padded, boxes, spans, softmax, grad, sigma, reach, d_features, channels, scale,
    MANY: tl.constexpr, LEAF: tl.constexpr, FANOUT: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Gradient of the features: weighted sum of the upstream gradients near a tile of reference points."""
    real: tl.constexpr = grad.dtype.element_ty
    at, x, y, z, cloud, active = load_tile(
        references, reference_clouds, references_padded, reference_count, TILE, MANY
    )
    box = tile_box(x, y, z, cloud, active)
    begin = tl.program_id(1) * BLOCK
    per_sigma = 1.0 / tl.load(sigma)
    limit = tl.load(reach)
    sums = tl.zeros([TILE, BLOCK], real)
    broken = tl.zeros([TILE, BLOCK], real)
    leaves = tl.cast(padded // LEAF, tl.int32)  # sizes may come as 64 bits
    leaf, near = first_leaf(boxes, spans, leaves, box, limit, MANY, FANOUT)
    while leaf < END:
        there, hit, _, _, _, far = pairs(
            x, y, z, cloud, active, leaf, points, clouds, padded, limit, real, MANY, LEAF
        )
        if tl.max(hit.to(tl.int32)) > 0:
            query = tl.load(row_of + there)
            nearest = tl.load(softmax + 2 * query, mask=query >= 0, other=0.0)
            inverse = tl.load(softmax + 2 * query + 1, mask=query >= 0, other=0.0)
            weights = tl.where(hit, tl.exp((nearest[None, :] - far) * per_sigma) * inverse[None, :], 0.0)
            upstream = load_rows(grad, query, query >= 0, begin, channels, BLOCK)
            sums, broken = add_weighted(sums, broken, weights, hit, upstream)
        leaf, near = next_leaf(leaf, near, boxes, spans, leaves, box, limit, MANY, FANOUT)
    exists = at < reference_count
    reference = tl.load(reference_rows + at, mask=exists, other=0).to(tl.int64)
    channel = begin + tl.arange(0, BLOCK)
    out = exists[:, None] & (channel < channels)[None, :]
    tl.store(d_features + reference[:, None] * channels + channel[None, :], finish(sums, broken), mask=out)


@triton.jit
def paired_products(
    upstream, query, has_query, features, reference, has_reference, channels, BLOCK: tl.constexpr
):
    """Upstream gradients of queries times features of reference points, for all pairs."""
    total = tl.zeros([query.shape[0], reference.shape[0]], upstream.dtype.element_ty)
    for begin in range(0, channels, BLOCK):
        left = load_rows(upstream, query, has_query, begin, channels, BLOCK)
        right = load_rows(features, reference, has_reference, begin, channels, BLOCK)
        total += product(left, tl.trans(right))
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
    at, x, y, z, cloud, active = load_tile(queries, query_clouds, queries_padded, query_count, TILE, MANY)
    box = tile_box(x, y, z, cloud, active)
    query = tl.load(query_rows + at, mask=at < query_count, other=0)
    per_sigma = 1.0 / tl.load(sigma)
    limit = tl.load(reach)
    nearest = tl.load(softmax + 2 * query.to(tl.int64), mask=active, other=0.0)
    inverse = tl.load(softmax + 2 * query.to(tl.int64) + 1, mask=active, other=0.0)
    # By the same operations as the products of pairs: a lone neighbour's product is then its mean exactly.
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
            weights = tl.exp((nearest[:, None] - far) * per_sigma) * inverse[:, None]
            grad_logit = tl.where(hit, weights * (products - mean[:, None]), 0.0)
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
        references, reference_clouds, references_padded, reference_count, TILE, MANY
    )
    box = tile_box(x, y, z, cloud, active)
    reference = tl.load(reference_rows + at, mask=at < reference_count, other=0)
    per_sigma = 1.0 / tl.load(sigma)
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
            weights = tl.exp((nearest[None, :] - far) * per_sigma) * inverse[None, :]
            grad_logit = weights * (tl.trans(products) - mean[None, :])
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
