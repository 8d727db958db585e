"""Kernels of edge networks of one activation, see :mod:`pointproj.ops.backends.triton.edge_mlp`."""

import triton
import triton.language as tl

from pointproj.ops.backends.triton.activations import activated
from pointproj.ops.backends.triton.arithmetic import load_points, rounded_root
from pointproj.ops.backends.triton.pairs import COPIES, OF_LAYER, lists_of

SLOTS = tl.constexpr(16)  # that are counted at once


@triton.jit
def lists_from(query, exists, row_splits, k, PADDED: tl.constexpr):
    """Where the pairs of queries begin, and how many slots there are for them."""
    begin, end = lists_of(query, exists, row_splits, k, PADDED)
    return begin, (end - begin).to(tl.int32)


@triton.jit
def row_at(rows, begin, length, step, references):
    """The row in a slot of each query, and whether it is one."""
    row = tl.load(rows + begin + step, mask=step < length, other=-1)
    return row, (row >= 0) & (row < references)


@triton.jit
def begin_of(row, channels):
    """Where rows of a matrix begin: a product of 32 bits each."""
    return (row.to(tl.uint32).to(tl.int64) * tl.cast(channels, tl.uint32).to(tl.int64))[:, None]


@triton.jit
def places_of(
    reference_points, row, hit, px, py, pz, real: tl.constexpr, PLACES: tl.constexpr, DISTANCE: tl.constexpr
):
    """Reference minus query point of pairs, and the distance; zeros unless asked for."""
    x = tl.zeros([row.shape[0]], real)
    y, z, distance = x, x, x
    if PLACES:
        x, y, z = load_points(reference_points, row, hit, 0.0)
        x, y, z = (x - px).to(real), (y - py).to(real), (z - pz).to(real)
    if DISTANCE:
        distance = rounded_root(x * x + y * y + z * z)
    return x, y, z, distance


@triton.jit
def of_tile(
    query_points, of_queries, layer, query, exists, channel, channels,
    OF_QUERIES: tl.constexpr, PLACES: tl.constexpr, DISTANCE: tl.constexpr,
):  # fmt: skip
    """What the pairs of a tile share: query points, what queries add (TILE, BLOCK), the layer of places."""
    real: tl.constexpr = layer.dtype.element_ty
    inside = channel < channels
    px, py, pz = (
        tl.zeros([query.shape[0]], real),
        tl.zeros([query.shape[0]], real),
        tl.zeros([query.shape[0]], real),
    )
    constant = tl.zeros([query.shape[0], channel.shape[0]], real)
    wx = tl.zeros([channel.shape[0]], real)
    wy, wz, wd = wx, wx, wx
    if PLACES:
        px, py, pz = load_points(query_points, query, exists, 0.0)
        wx = tl.load(layer + channel, mask=inside, other=0.0)
        wy = tl.load(layer + channels + channel, mask=inside, other=0.0)
        wz = tl.load(layer + 2 * channels + channel, mask=inside, other=0.0)
        constant += tl.load(layer + 4 * channels + channel, mask=inside, other=0.0)[None, :]
    if DISTANCE:
        wd = tl.load(layer + 3 * channels + channel, mask=inside, other=0.0)
    if OF_QUERIES:
        at = query[:, None] * channels + channel[None, :]
        there = exists[:, None] & inside[None, :]
        constant += tl.load(of_queries + at, mask=there, other=0.0).to(real)
    return px, py, pz, constant, wx, wy, wz, wd


@triton.jit
def first_layer(
    hidden, row, there, channel, channels, constant, x, y, z, distance, wx, wy, wz, wd,
    HIDDEN: tl.constexpr, PLACES: tl.constexpr, DISTANCE: tl.constexpr,
):  # fmt: skip
    """Results of the first layer for one pair of each query: (TILE, BLOCK)."""
    values = constant
    if HIDDEN:
        at = begin_of(row, channels) + channel[None, :]
        values += tl.load(hidden + at, mask=there, other=0.0).to(values.dtype)
    if PLACES:
        values += x[:, None] * wx[None, :]
        values += y[:, None] * wy[None, :]
        values += z[:, None] * wz[None, :]
    if DISTANCE:
        values += distance[:, None] * wd[None, :]
    return values


@triton.jit
def sum_kernel(
    rows, row_splits, query_points, reference_points, hidden, of_queries, weights, layer,
    queries, references, k, channels, counts, sums,
    PADDED: tl.constexpr, HIDDEN: tl.constexpr, OF_QUERIES: tl.constexpr, WEIGHTED: tl.constexpr,
    PLACES: tl.constexpr, DISTANCE: tl.constexpr, MEAN: tl.constexpr, ACTIVATION: tl.constexpr,
    SLOPE: tl.constexpr, ROUGH: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Sums or means of some channels for a tile of queries, and the number of pairs of each."""
    real: tl.constexpr = layer.dtype.element_ty
    query = (tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)
    exists = query < queries
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    px, py, pz, constant, wx, wy, wz, wd = of_tile(
        query_points, of_queries, layer, query, exists, channel, channels, OF_QUERIES, PLACES, DISTANCE
    )
    begin, length = lists_from(query, exists, row_splits, k, PADDED)
    total = tl.zeros([TILE, BLOCK], real)
    for step in range(0, tl.max(length)):
        row, hit = row_at(rows, begin, length, step, references)
        x, y, z, distance = places_of(reference_points, row, hit, px, py, pz, real, PLACES, DISTANCE)
        there = hit[:, None] & (channel < channels)[None, :]
        values = first_layer(
            hidden, row, there, channel, channels, constant, x, y, z, distance, wx, wy, wz, wd,
            HIDDEN, PLACES, DISTANCE,
        )  # fmt: skip
        values, _ = activated(tl.where(there, values, 0.0), ACTIVATION, SLOPE, ROUGH)  # 0 stays 0
        if WEIGHTED:
            values *= tl.load(weights + begin + step, mask=hit, other=0.0)[:, None]
        total += values
    count = tl.zeros([TILE], tl.int32)
    for step in range(0, tl.max(length), SLOTS):
        _, hit = row_at(
            rows, begin[:, None], length[:, None], step + tl.arange(0, SLOTS)[None, :], references
        )
        count += tl.sum(hit.to(tl.int32), 1)
    if MEAN:
        total /= tl.maximum(count, 1).to(real)[:, None]
    if tl.program_id(1) == 0:
        tl.store(counts + query, count, mask=exists)
    out = exists[:, None] & (channel < channels)[None, :]
    tl.store(sums + query[:, None] * channels + channel[None, :], total, mask=out)


@triton.jit
def gradient_kernel(
    rows, row_splits, query_points, reference_points, hidden, of_queries, weights, layer,
    queries, references, k, channels, counts,
    grad, d_reference, d_hidden, d_query, d_of_queries, d_weights, d_layer,
    PADDED: tl.constexpr, HIDDEN: tl.constexpr, OF_QUERIES: tl.constexpr, WEIGHTED: tl.constexpr,
    PLACES: tl.constexpr, DISTANCE: tl.constexpr, MEAN: tl.constexpr, ACTIVATION: tl.constexpr,
    SLOPE: tl.constexpr, ROUGH: tl.constexpr, BLOCK: tl.constexpr, FLAGS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Gradients of what :func:`sum_kernel` reads, as far as ``FLAGS`` says, in the order of the arguments."""
    real: tl.constexpr = layer.dtype.element_ty
    query = (tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)
    exists = query < queries
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    px, py, pz, constant, wx, wy, wz, wd = of_tile(
        query_points, of_queries, layer, query, exists, channel, channels, OF_QUERIES, PLACES, DISTANCE
    )
    out = query[:, None] * channels + channel[None, :]
    upstream = tl.load(grad + out, mask=exists[:, None] & inside[None, :], other=0.0).to(real)
    if MEAN:
        upstream /= tl.maximum(tl.load(counts + query, mask=exists, other=1.0), 1.0)[:, None]
    begin, length = lists_from(query, exists, row_splits, k, PADDED)
    d_constant = tl.zeros([TILE, BLOCK], real)
    dx, dy, dz, dd = d_constant, d_constant, d_constant, d_constant
    qx, qy, qz = tl.zeros([TILE], real), tl.zeros([TILE], real), tl.zeros([TILE], real)
    for step in range(0, tl.max(length)):
        row, hit = row_at(rows, begin, length, step, references)
        x, y, z, distance = places_of(reference_points, row, hit, px, py, pz, real, PLACES, DISTANCE)
        x, y, z = tl.where(hit, x, 0.0), tl.where(hit, y, 0.0), tl.where(hit, z, 0.0)
        distance = tl.where(hit, distance, 0.0)
        there = hit[:, None] & inside[None, :]
        values = first_layer(
            hidden, row, there, channel, channels, constant, x, y, z, distance, wx, wy, wz, wd,
            HIDDEN, PLACES, DISTANCE,
        )  # fmt: skip
        values, slope = activated(values, ACTIVATION, SLOPE, ROUGH)
        d_values = tl.where(there, upstream * slope, 0.0)
        if FLAGS & 16:
            own = tl.sum(tl.where(there, upstream * values, 0.0), 1)
            tl.atomic_add(d_weights + begin + step, own, mask=hit, sem="relaxed")
        if WEIGHTED:
            d_values *= tl.load(weights + begin + step, mask=hit, other=0.0)[:, None]
        if FLAGS & 2:
            target = d_hidden + begin_of(row, channels) + channel[None, :]
            tl.atomic_add(target, d_values, mask=there, sem="relaxed")
        d_constant += d_values
        if FLAGS & 32:
            dx += d_values * x[:, None]
            dy += d_values * y[:, None]
            dz += d_values * z[:, None]
            if DISTANCE:
                dd += d_values * distance[:, None]
        if FLAGS & 5:
            rx = tl.sum(d_values * wx[None, :], 1)
            ry = tl.sum(d_values * wy[None, :], 1)
            rz = tl.sum(d_values * wz[None, :], 1)
            if DISTANCE:
                along = tl.sum(d_values * wd[None, :], 1) / tl.where(distance > 0, distance, 1.0)
                rx += along * x
                ry += along * y
                rz += along * z
            if FLAGS & 1:
                target = d_reference + 3 * row.to(tl.int64)
                tl.atomic_add(target, rx, mask=hit, sem="relaxed")
                tl.atomic_add(target + 1, ry, mask=hit, sem="relaxed")
                tl.atomic_add(target + 2, rz, mask=hit, sem="relaxed")
            qx += rx
            qy += ry
            qz += rz
    if FLAGS & 4:
        target = d_query + 3 * query
        tl.atomic_add(target, -qx, mask=exists, sem="relaxed")
        tl.atomic_add(target + 1, -qy, mask=exists, sem="relaxed")
        tl.atomic_add(target + 2, -qz, mask=exists, sem="relaxed")
    if FLAGS & 8:
        tl.store(d_of_queries + out, d_constant, mask=exists[:, None] & inside[None, :])
    if FLAGS & 32:
        target = d_layer + (tl.program_id(0) % COPIES) * OF_LAYER * channels + channel
        tl.atomic_add(target, tl.sum(dx, 0), mask=inside, sem="relaxed")
        tl.atomic_add(target + channels, tl.sum(dy, 0), mask=inside, sem="relaxed")
        tl.atomic_add(target + 2 * channels, tl.sum(dz, 0), mask=inside, sem="relaxed")
        tl.atomic_add(target + 3 * channels, tl.sum(dd, 0), mask=inside, sem="relaxed")
        tl.atomic_add(target + 4 * channels, tl.sum(d_constant, 0), mask=inside, sem="relaxed")
