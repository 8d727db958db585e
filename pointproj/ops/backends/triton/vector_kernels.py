"""Kernels of grouped vector attention, of which torch makes the products.

See :mod:`pointproj.ops.backends.triton.vector_attention`.
"""

import triton
import triton.language as tl

from pointproj.ops.backends.triton.activations import activated
from pointproj.ops.backends.triton.pairs import (
    add_bias,
    add_layer_of_places,
    add_places,
    add_product,
    linear_of_places,
    lists_of,
    moved_by,
    per_pair,
    places_of_pairs,
    steps_at,
    sums_of_queries,
    tile_of_pairs,
    times,
)


@triton.jit
def channels_of(groups, depth, channels, GROUPS: tl.constexpr, DEPTH: tl.constexpr, EXACT: tl.constexpr):
    """Channels of a tile's columns, DEPTH for each group; their number where a column has none.

    Columns that are EXACT, one for each channel, are read and written several at once.
    """
    column = tl.arange(0, GROUPS * DEPTH)
    if EXACT:
        channel = column
    else:
        group, inner = column // DEPTH, column % DEPTH
        channel = tl.where((group < groups) & (inner < depth), group * depth + inner, channels)
    return channel


@triton.jit
def values_of(values, shift, row, hit, c, channels):
    """Value and the position's last bias of each pair: (P, channels)."""
    there = hit[:, None] & (c < channels)[None, :]
    moved = tl.load(values + row[:, None] * channels + c[None, :], mask=there, other=0.0)
    return moved + tl.load(shift + c, mask=c < channels, other=0.0)[None, :]


@triton.jit
def moved_values(values, shift, products, row, hit, slot, scores, c, channels):
    """Value plus position of each pair: (P, channels)."""
    at = products + slot[:, None] * (scores + channels) + scores + c[None, :]
    made = tl.load(at, mask=hit[:, None] & (c < channels)[None, :], other=0.0)
    return made + values_of(values, shift, row, hit, c, channels)


@triton.jit
def score_inputs(keys, queries, products, row, own, hit, slot, s, scores, channels):
    """What the scores' activation gets (P, BLOCK), and which of it exists."""
    there = hit[:, None] & (s < scores)[None, :]
    u = tl.load(queries + own[:, None] * scores + s[None, :], mask=there, other=0.0)
    u -= tl.load(keys + row[:, None] * scores + s[None, :], mask=there, other=0.0)
    at = products + slot[:, None] * (scores + channels) + s[None, :]
    return u + tl.load(at, mask=there, other=0.0), there


@triton.jit
def ended(
    made, last_bias, groups, LASTS: tl.constexpr, GROUPS: tl.constexpr, ACT: tl.constexpr,
    SLOPE: tl.constexpr, ENDS: tl.constexpr,
):  # fmt: skip
    """Scores (P, GROUPS) from a product with LASTS columns, those beyond the groups 0.

    With them the derivative of the activation that ENDS them.
    """
    if LASTS > GROUPS:
        made = tl.sum(tl.reshape(made, [made.shape[0], LASTS // GROUPS, GROUPS]), 1)
    slope = tl.full([made.shape[0], GROUPS], 1.0, made.dtype)
    if ENDS:
        g = tl.arange(0, GROUPS)
        made += tl.load(last_bias + g, mask=g < groups, other=0.0)[None, :]
        made, slope = activated(made, ACT, SLOPE)
    return made, slope


@triton.jit
def scores_of(
    keys, queries, products, last, last_bias, row, own, hit, slot, scores, groups, channels,
    LASTS: tl.constexpr, GROUPS: tl.constexpr, PRECISION: tl.constexpr, ACT: tl.constexpr,
    SLOPE: tl.constexpr, ENDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Scores (P, GROUPS), and the derivative of the activation that ENDS them."""
    lasts = tl.arange(0, LASTS)
    made = tl.zeros([row.shape[0], LASTS], products.dtype.element_ty)
    for start in range(0, scores, BLOCK):
        s = start + tl.arange(0, BLOCK)
        u, _ = score_inputs(keys, queries, products, row, own, hit, slot, s, scores, channels)
        active, _ = activated(u, ACT, SLOPE)
        made = times(active, last, s, scores, 1, lasts, groups, scores, made, PRECISION)
    return ended(made, last_bias, groups, LASTS, GROUPS, ACT, SLOPE, ENDS)


@triton.jit
def attend_kernel(
    rows, row_splits, references, k, PADDED: tl.constexpr,
    keys, values, queries, shift, last, last_bias, scores: tl.constexpr, groups: tl.constexpr,
    depth: tl.constexpr, channels: tl.constexpr,
    first_query, last_query, first_slot, last_slot, products, result, sums,
    GROUPS: tl.constexpr, DEPTH: tl.constexpr, LASTS: tl.constexpr, EXACT: tl.constexpr,
    PRECISION: tl.constexpr, ACT: tl.constexpr, SLOPE: tl.constexpr, ENDS: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Attention of a tile of queries so far, with those of their pairs that have products."""
    real: tl.constexpr = products.dtype.element_ty
    query = (first_query + tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)
    begin, end = lists_of(query, query < last_query, row_splits, k, PADDED)
    begin, end = tl.maximum(begin, first_slot), tl.minimum(end, last_slot)
    exists = begin < end
    own, g = per_pair(query, TILE, STEP), tl.arange(0, GROUPS)
    c = channels_of(groups, depth, channels, GROUPS, DEPTH, EXACT)
    in_result, in_sums = exists[:, None] & (c < channels)[None, :], exists[:, None] & (g < groups)[None, :]
    at_result, at_sums = query[:, None] * channels + c[None, :], query[:, None] * groups + g[None, :]
    largest = tl.load(sums + at_sums, mask=in_sums, other=-float("inf"))
    total = tl.where(largest != -float("inf"), 1.0, 0.0).to(real)
    found = tl.reshape(tl.load(result + at_result, mask=in_result, other=0.0), [TILE, GROUPS, DEPTH])
    for step in range(0, tl.max(end - begin), STEP):
        at, row, hit = steps_at(rows, begin, end, step, references, TILE, STEP)
        slot = at - first_slot
        own_scores, _ = scores_of(
            keys, queries, products, last, last_bias, row, own, hit, slot, scores, groups, channels,
            LASTS, GROUPS, PRECISION, ACT, SLOPE, ENDS, BLOCK,
        )  # fmt: skip
        is_pair = tl.reshape(hit, [TILE, STEP])[:, :, None]
        own_scores = tl.where(is_pair, tl.reshape(own_scores, [TILE, STEP, GROUPS]), -float("inf"))
        larger = tl.maximum(largest, tl.max(own_scores, 1))
        base = tl.where(larger == -float("inf"), 0.0, larger)  # it cannot be subtracted
        scale, weight = tl.exp(largest - base), tl.exp(own_scores - base[:, None, :])
        total = total * scale + tl.sum(weight, 1)
        moved = moved_values(values, shift, products, row, hit, slot, scores, c, channels)
        moved = tl.reshape(moved, [TILE, STEP, GROUPS, DEPTH]) * weight[:, :, :, None]
        found = found * scale[:, :, None] + tl.sum(moved, 1)
        largest = larger
    one = tl.where(total != 0, total, 1.0)
    found = tl.reshape(found / one[:, :, None], [TILE, GROUPS * DEPTH])
    tl.store(result + at_result, found, mask=in_result)
    kept = tl.where(total != 0, largest + tl.log(one), -float("inf"))
    tl.store(sums + at_sums, kept, mask=in_sums)


@triton.jit
def inputs_kernel(
    rows, query_of, query_points, reference_points, items, references, k, PADDED: tl.constexpr,
    first, inputs: tl.constexpr, first_item, last_item,
    made, d_query_points, d_reference_points, d_first, of_copy,
    BACKWARD: tl.constexpr, PLACES: tl.constexpr, FIRST: tl.constexpr, ACT: tl.constexpr,
    SLOPE: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Store ``a`` of a tile of pairs, or add what its gradient gives to those of the layer and of points."""
    real: tl.constexpr = first.dtype.element_ty
    P: tl.constexpr = TILE * STEP
    query, _, at, row, hit, inside = tile_of_pairs(
        rows, query_of, first_item, last_item, references, k, PADDED, TILE, STEP
    )
    own, slot = per_pair(query, TILE, STEP), at - first_item * k
    x, y, z, distance = places_of_pairs(reference_points, query_points, row, own, hit, real, False)
    rx, ry, rz = tl.zeros([P], real), tl.zeros([P], real), tl.zeros([P], real)
    for start in range(0, inputs, BLOCK):
        h = start + tl.arange(0, BLOCK)
        a = linear_of_places(tl.zeros([P, BLOCK], real), first, h, inputs, x, y, z, distance, False)
        a, slope = activated(a, ACT, SLOPE)
        at_pairs = made + slot[:, None] * inputs + h[None, :]
        there = (h < inputs)[None, :]
        if BACKWARD:
            d_a = tl.load(at_pairs, mask=hit[:, None] & there, other=0.0)
            d_a = tl.where(hit[:, None], d_a * slope, 0.0)
            if FIRST:
                add_layer_of_places(d_first, d_a, h, inputs, x, y, z, distance, of_copy, False)
            if PLACES:
                rx, ry, rz = moved_by(d_a, first, h, inputs, x, y, z, distance, rx, ry, rz, False)
        else:
            tl.store(at_pairs, tl.where(hit[:, None], a, 0.0), mask=inside[:, None] & there)
    if BACKWARD and PLACES:
        add_places(d_reference_points, d_query_points, row, own, hit, rx, ry, rz, True, True)


@triton.jit
def attend_gradient_kernel(
    rows, query_of, query_points, reference_points, items, references, k, PADDED: tl.constexpr,
    keys, values, queries, shift, last, last_bias, scores: tl.constexpr, groups: tl.constexpr,
    depth: tl.constexpr, channels: tl.constexpr,
    first_item, last_item, sums, grad, shares, products, d_keys, d_values, d_queries, d_last, d_last_bias,
    of_copy,
    GROUPS: tl.constexpr, DEPTH: tl.constexpr, LASTS: tl.constexpr, EXACT: tl.constexpr,
    PRECISION: tl.constexpr, ACT: tl.constexpr, SLOPE: tl.constexpr, ENDS: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Gradients of rows and of ``T`` from a tile of pairs; those of the products take their place."""
    real: tl.constexpr = products.dtype.element_ty
    P: tl.constexpr = TILE * STEP
    query, exists, at, row, hit, inside = tile_of_pairs(
        rows, query_of, first_item, last_item, references, k, PADDED, TILE, STEP
    )
    own, g, lasts = per_pair(query, TILE, STEP), tl.arange(0, GROUPS), tl.arange(0, LASTS)
    c = channels_of(groups, depth, channels, GROUPS, DEPTH, EXACT)
    slot = at - first_item * k
    there = hit[:, None] & (g < groups)[None, :]
    at_group = own[:, None] * groups + g[None, :]
    at_grad = grad + own[:, None] * channels + c[None, :]
    in_channels = hit[:, None] & (c < channels)[None, :]
    moved = moved_values(values, shift, products, row, hit, slot, scores, c, channels)
    moved *= tl.load(at_grad, mask=in_channels, other=0.0)
    d_weight = tl.sum(tl.reshape(moved, [P, GROUPS, DEPTH]), 2)
    d_weight -= tl.load(shares + at_group, mask=there, other=0.0)
    weight, slope_at_end = scores_of(
        keys, queries, products, last, last_bias, row, own, hit, slot, scores, groups, channels,
        LASTS, GROUPS, PRECISION, ACT, SLOPE, ENDS, BLOCK,
    )  # fmt: skip
    weight = tl.exp(weight - tl.load(sums + at_group, mask=there, other=0.0))
    weight = tl.where(there, weight, 0.0)
    d_scores = tl.where(there, weight * d_weight * slope_at_end, 0.0)
    if ENDS:
        add_bias(d_last_bias, d_scores, g, groups, of_copy)
    if LASTS > GROUPS:  # those beyond the groups are multiplied by zeros
        d_scores = tl.broadcast_to(d_scores[:, None, :], [P, LASTS // GROUPS, GROUPS])
        d_scores = tl.reshape(d_scores, [P, LASTS])
    for start in range(0, scores, BLOCK):
        s = start + tl.arange(0, BLOCK)
        u, in_scores = score_inputs(keys, queries, products, row, own, hit, slot, s, scores, channels)
        active, slope = activated(u, ACT, SLOPE)
        active = tl.where(hit[:, None], active, 0.0)
        add_product(d_last, d_scores, active, s, scores, lasts, groups, of_copy, PRECISION)
        d_u = tl.zeros([P, BLOCK], real)
        d_u = times(d_scores, last, lasts, groups, scores, s, scores, 1, d_u, PRECISION)
        d_u = tl.where(in_scores, d_u * slope, 0.0)
        target = products + slot[:, None] * (scores + channels) + s[None, :]
        tl.store(target, d_u, mask=inside[:, None] & (s < scores)[None, :])
        tl.atomic_add(d_keys + row[:, None] * scores + s[None, :], -d_u, mask=in_scores, sem="relaxed")
        target = d_queries + query[:, None] * scores + s[None, :]
        of_query = exists[:, None] & (s < scores)[None, :]
        tl.atomic_add(target, sums_of_queries(d_u, TILE, STEP), mask=of_query, sem="relaxed")
    upstream = tl.load(at_grad, mask=in_channels, other=0.0)
    d_moved = tl.reshape(tl.reshape(upstream, [P, GROUPS, DEPTH]) * weight[:, :, None], [P, GROUPS * DEPTH])
    d_moved = tl.where(in_channels, d_moved, 0.0)
    target = products + slot[:, None] * (scores + channels) + scores + c[None, :]
    tl.store(target, d_moved, mask=inside[:, None] & (c < channels)[None, :])
    target = d_values + row[:, None] * channels + c[None, :]
    tl.atomic_add(target, d_moved, mask=in_channels, sem="relaxed")
