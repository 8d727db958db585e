"""Kernels of grouped vector attention of narrow layers, whose products are made here too.

See :mod:`pointproj.ops.backends.triton.vector_attention`. They need no memory for pairs, and one launch each.
"""

import triton
import triton.language as tl

from pointproj.ops.backends.triton.activations import activated
from pointproj.ops.backends.triton.pairs import (
    OF_LAYER,
    add_bias,
    add_product,
    columns_of_places,
    layer_of_columns,
    lists_of,
    per_pair,
    steps_at,
    sums_of_queries,
    tile_of_pairs,
    times,
)
from pointproj.ops.backends.triton.vector_kernels import channels_of, ended


@triton.jit
def pairs_of(
    keys, values, queries, first, score, place, shift, row, query, hit, columns,
    s, scores, c, channels, inputs,
    POSITION_ACT: tl.constexpr, POSITION_SLOPE: tl.constexpr, ENDS: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What the scores' activation gets (P, SCORES), and value plus position of each pair (P, C).

    If an activation ENDS the position's network, also its result and its derivative.
    """
    there = hit[:, None] & (s < scores)[None, :]
    u = tl.load(queries + query[:, None] * scores + s[None, :], mask=there, other=0.0)
    u -= tl.load(keys + row[:, None] * scores + s[None, :], mask=there, other=0.0)
    in_channels = hit[:, None] & (c < channels)[None, :]
    moved = tl.load(shift + c, mask=c < channels, other=0.0)[None, :]
    moved = tl.broadcast_to(moved, [row.shape[0], c.shape[0]])
    value = values + row[:, None] * channels + c[None, :]
    if not ENDS:
        moved += tl.load(value, mask=in_channels, other=0.0)
    slope = tl.full([row.shape[0], c.shape[0]], 1.0, u.dtype)
    for start in range(0, inputs, BLOCK):
        h = start + tl.arange(0, BLOCK)
        a = layer_of_columns(columns, first, h, inputs, PRECISION)
        a = activated(a, POSITION_ACT, POSITION_SLOPE)[0]
        moved = times(a, place, h, inputs, 1, c, channels, inputs, moved, PRECISION)
        if not ENDS:
            u = times(a, score, h, inputs, 1, s, scores, inputs, u, PRECISION)
    position = moved
    if ENDS:
        position, slope = activated(moved, POSITION_ACT, POSITION_SLOPE)
        u = times(position, score, c, channels, 1, s, scores, channels, u, PRECISION)
        moved = position + tl.load(value, mask=in_channels, other=0.0)
    return u, moved, position, slope


@triton.jit
def scores_of(
    active, last, last_bias, s, scores, groups, LASTS: tl.constexpr, GROUPS: tl.constexpr,
    ACT: tl.constexpr, SLOPE: tl.constexpr, ENDS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores (P, GROUPS), and the derivative of the activation that ENDS them."""
    g = tl.arange(0, LASTS)
    made = tl.zeros([active.shape[0], LASTS], active.dtype)
    made = times(active, last, s, scores, 1, g, groups, scores, made, PRECISION)
    return ended(made, last_bias, groups, LASTS, GROUPS, ACT, SLOPE, ENDS)


@triton.jit
def narrow_kernel(
    rows, row_splits, query_points, reference_points, items, references, k, PADDED: tl.constexpr,
    keys, values, queries, first, score, place, shift, last, last_bias, inputs: tl.constexpr,
    scores: tl.constexpr, groups: tl.constexpr, depth: tl.constexpr, channels: tl.constexpr,
    result, sums,
    SCORES: tl.constexpr, GROUPS: tl.constexpr, DEPTH: tl.constexpr, LASTS: tl.constexpr,
    EXACT: tl.constexpr, PRECISION: tl.constexpr, POSITION_ACT: tl.constexpr, POSITION_SLOPE: tl.constexpr,
    SCORE_ACT: tl.constexpr, SCORE_SLOPE: tl.constexpr, POSITION_ENDS: tl.constexpr,
    SCORE_ENDS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Attention of a tile of queries."""
    real: tl.constexpr = first.dtype.element_ty
    query = (tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)
    exists = query < items
    begin, end = lists_of(query, exists, row_splits, k, PADDED)
    own, s, g = per_pair(query, TILE, STEP), tl.arange(0, SCORES), tl.arange(0, GROUPS)
    c = channels_of(groups, depth, channels, GROUPS, DEPTH, EXACT)
    largest = tl.full([TILE, GROUPS], -float("inf"), real)
    total = tl.zeros([TILE, GROUPS], real)
    found = tl.zeros([TILE, GROUPS, DEPTH], real)
    for step in range(0, tl.max(end - begin), STEP):
        _, row, hit = steps_at(rows, begin, end, step, references, TILE, STEP)
        columns = columns_of_places(reference_points, query_points, row, own, hit, real)
        u, moved, _, _ = pairs_of(
            keys, values, queries, first, score, place, shift, row, own, hit, columns,
            s, scores, c, channels, inputs, POSITION_ACT, POSITION_SLOPE, POSITION_ENDS, BLOCK, PRECISION,
        )  # fmt: skip
        active, _ = activated(u, SCORE_ACT, SCORE_SLOPE)
        own_scores, _ = scores_of(
            active, last, last_bias, s, scores, groups, LASTS, GROUPS, SCORE_ACT, SCORE_SLOPE, SCORE_ENDS,
            PRECISION,
        )  # fmt: skip
        is_pair = tl.reshape(hit, [TILE, STEP])[:, :, None]
        own_scores = tl.where(is_pair, tl.reshape(own_scores, [TILE, STEP, GROUPS]), -float("inf"))
        larger = tl.maximum(largest, tl.max(own_scores, 1))
        base = tl.where(larger == -float("inf"), 0.0, larger)  # it cannot be subtracted
        scale, weight = tl.exp(largest - base), tl.exp(own_scores - base[:, None, :])
        total = total * scale + tl.sum(weight, 1)
        moved = tl.reshape(moved, [TILE, STEP, GROUPS, DEPTH]) * weight[:, :, :, None]
        found = found * scale[:, :, None] + tl.sum(moved, 1)
        largest = larger
    one = tl.where(total != 0, total, 1.0)
    found = tl.reshape(found / one[:, :, None], [TILE, GROUPS * DEPTH])
    there = exists[:, None] & (c < channels)[None, :]
    tl.store(result + query[:, None] * channels + c[None, :], found, mask=there)
    kept = tl.where(total != 0, largest + tl.log(one), -float("inf"))
    tl.store(sums + query[:, None] * groups + g[None, :], kept, mask=exists[:, None] & (g < groups)[None, :])


@triton.jit
def narrow_gradient_kernel(
    rows, query_of, query_points, reference_points, items, references, k, PADDED: tl.constexpr,
    keys, values, queries, first, score, place, shift, last, last_bias, inputs: tl.constexpr,
    scores: tl.constexpr, groups: tl.constexpr, depth: tl.constexpr, channels: tl.constexpr,
    sums, grad, shares,
    d_query_points, d_reference_points, d_keys, d_values, d_queries,
    d_first, d_last, d_last_bias, d_score, d_place, d_shift, of_copy,
    PLACES: tl.constexpr, FIRST: tl.constexpr,
    SCORES: tl.constexpr, GROUPS: tl.constexpr, DEPTH: tl.constexpr, LASTS: tl.constexpr,
    EXACT: tl.constexpr, PRECISION: tl.constexpr, POSITION_ACT: tl.constexpr, POSITION_SLOPE: tl.constexpr,
    SCORE_ACT: tl.constexpr, SCORE_SLOPE: tl.constexpr, POSITION_ENDS: tl.constexpr,
    SCORE_ENDS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Gradients of what :func:`narrow_kernel` reads, from a tile of pairs."""
    real: tl.constexpr = first.dtype.element_ty
    P: tl.constexpr = TILE * STEP
    query, exists, _, row, hit, _ = tile_of_pairs(rows, query_of, 0, items, references, k, PADDED, TILE, STEP)
    own, s, g = per_pair(query, TILE, STEP), tl.arange(0, SCORES), tl.arange(0, GROUPS)
    c = channels_of(groups, depth, channels, GROUPS, DEPTH, EXACT)
    columns = columns_of_places(reference_points, query_points, row, own, hit, real)
    there = hit[:, None] & (g < groups)[None, :]
    at_group = own[:, None] * groups + g[None, :]
    at_grad = grad + own[:, None] * channels + c[None, :]
    in_channels = hit[:, None] & (c < channels)[None, :]
    d_weight = -tl.load(shares + at_group, mask=there, other=0.0)
    u, moved, position, slope_of_position = pairs_of(
        keys, values, queries, first, score, place, shift, row, own, hit, columns,
        s, scores, c, channels, inputs, POSITION_ACT, POSITION_SLOPE, POSITION_ENDS, BLOCK, PRECISION,
    )  # fmt: skip
    upstream = tl.load(at_grad, mask=in_channels, other=0.0)
    d_weight += tl.sum(tl.reshape(upstream * moved, [P, GROUPS, DEPTH]), 2)
    active, slope = activated(u, SCORE_ACT, SCORE_SLOPE)
    active = tl.where(hit[:, None], active, 0.0)
    own_scores, slope_at_end = scores_of(
        active, last, last_bias, s, scores, groups, LASTS, GROUPS, SCORE_ACT, SCORE_SLOPE, SCORE_ENDS,
        PRECISION,
    )  # fmt: skip
    weight = tl.exp(own_scores - tl.load(sums + at_group, mask=there, other=0.0))
    weight = tl.where(there, weight, 0.0)
    d_scores = tl.where(there, weight * d_weight * slope_at_end, 0.0)
    if SCORE_ENDS:
        add_bias(d_last_bias, d_scores, g, groups, of_copy)
    if LASTS > GROUPS:  # those beyond the groups are multiplied by zeros
        d_scores = tl.broadcast_to(d_scores[:, None, :], [P, LASTS // GROUPS, GROUPS])
        d_scores = tl.reshape(d_scores, [P, LASTS])
    lasts = tl.arange(0, LASTS)
    add_product(d_last, d_scores, active, s, scores, lasts, groups, of_copy, PRECISION)
    d_u = tl.zeros([P, SCORES], real)
    d_u = times(d_scores, last, lasts, groups, scores, s, scores, 1, d_u, PRECISION)
    in_scores = hit[:, None] & (s < scores)[None, :]
    d_u = tl.where(in_scores, d_u * slope, 0.0)
    tl.atomic_add(d_keys + row[:, None] * scores + s[None, :], -d_u, mask=in_scores, sem="relaxed")
    target = d_queries + query[:, None] * scores + s[None, :]
    there = exists[:, None] & (s < scores)[None, :]
    tl.atomic_add(target, sums_of_queries(d_u, TILE, STEP), mask=there, sem="relaxed")
    upstream = tl.load(at_grad, mask=in_channels, other=0.0)
    d_moved = tl.reshape(tl.reshape(upstream, [P, GROUPS, DEPTH]) * weight[:, :, None], [P, GROUPS * DEPTH])
    d_moved = tl.where(in_channels, d_moved, 0.0)
    target = d_values + row[:, None] * channels + c[None, :]
    tl.atomic_add(target, d_moved, mask=in_channels, sem="relaxed")
    if POSITION_ENDS:
        add_product(d_score, d_u, position, c, channels, s, scores, of_copy, PRECISION)
        d_moved = times(d_u, score, s, scores, channels, c, channels, 1, d_moved, PRECISION)
        d_moved *= slope_of_position
        add_bias(d_shift, d_moved, c, channels, of_copy)
    column, d_columns = tl.arange(0, 16), tl.zeros([P, 16], real)
    for start in range(0, inputs, BLOCK):
        h = start + tl.arange(0, BLOCK)
        empty = tl.zeros([P, BLOCK], real)
        a = layer_of_columns(columns, first, h, inputs, PRECISION)
        a, slope_of_a = activated(a, POSITION_ACT, POSITION_SLOPE)
        d_a = times(d_moved, place, c, channels, inputs, h, inputs, 1, empty, PRECISION)
        if not POSITION_ENDS:
            d_a = times(d_u, score, s, scores, inputs, h, inputs, 1, d_a, PRECISION)
            add_product(d_score, d_u, a, h, inputs, s, scores, of_copy, PRECISION)
        d_a = tl.where(hit[:, None], d_a * slope_of_a, 0.0)
        if FIRST:
            add_product(d_first, columns, d_a, h, inputs, column, OF_LAYER, of_copy, PRECISION)
        if PLACES:
            d_columns = times(d_a, first, h, inputs, 1, column, OF_LAYER, inputs, d_columns, PRECISION)
        add_product(d_place, d_moved, a, h, inputs, c, channels, of_copy, PRECISION)
    if PLACES:
        there = hit[:, None] & (column < 3)[None, :]
        target = d_reference_points + 3 * row[:, None] + column[None, :]
        tl.atomic_add(target, d_columns, mask=there, sem="relaxed")
        target = d_query_points + 3 * own[:, None] + column[None, :]
        tl.atomic_add(target, -d_columns, mask=there, sem="relaxed")
