"""What kernels of networks with matrix products on pairs share.

A forward program has some queries, and steps over their neighbours. A backward program has one tile of pairs
(PAIRS = TILE x STEP): of padded lists some steps of some queries, of others consecutive slots. Nothing of a
pair is kept from the forward.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from pointproj.ops.backends.triton.arithmetic import load_points, rounded_root
from pointproj.ops.bridge.triton_op import cdiv
from pointproj.ops.specification.clouds import queries_of

# As measured on an H200: PAIRS of a tile, and BLOCK inputs of a product that are computed at once. Attention
# of layers that are not NARROW has products of torch, for pairs of at most CHUNK_BYTES at a time, and kernels
# for "queries", "rows" and "inputs".
_COMMON = {"PAIRS": 64, "BLOCK": 32, "num_warps": 4, "num_stages": 1}
LAUNCH = {
    "forward": _COMMON,
    "backward": _COMMON,
    "narrow chain": {**_COMMON, "maxnreg": 128},
    "wide chain": {**_COMMON, "num_warps": 8},
    "narrow rows": {**_COMMON, "BLOCK": 64, "maxnreg": 168},
    "queries": {**_COMMON, "PAIRS": 16, "BLOCK": 64, "num_warps": 2},
    "rows": {**_COMMON, "PAIRS": 16, "BLOCK": 64, "maxnreg": 128},
    "inputs": {**_COMMON, "BLOCK": 64},
}
STEPS = (16, 8, 4)
EXACT = "tf32x3"
MOST_CHANNELS = 256
NARROW = 64
CHUNK_BYTES = 2**28
COPIES = tl.constexpr(64)  # of a layer's gradients: programs that add to the same one wait for each other
OF_LAYER = tl.constexpr(5)  # rows of the layer of places: three coordinates, the distance, the bias


class Lists(NamedTuple):
    """Neighbour lists and points, the first arguments of kernels."""

    rows: Tensor  # (Q, k), or (M,): other than 0 to N - 1 where there is no pair
    queries_or_splits: Tensor  # of lists that are not padded: where each query's begins, or each slot's query
    query_points: Tensor  # (Q, 3)
    reference_points: Tensor  # (N, 3)
    items: int  # rows of the lists: queries, or in the backward of lists that are not padded slots
    references: int
    k: int
    PADDED: bool


def lists(inputs: dict[str, Any], backward: bool) -> Lists:
    """The lists of an operator's inputs; in the backward, slots of lists that are not padded are items."""
    rows, splits = inputs["rows"], inputs["row_splits"]
    points = [in_space(inputs[name]) for name in ("query_points", "reference_points")]
    k, others = (rows.shape[1], rows) if splits is None else (1, splits)
    items = rows.shape[0] if splits is None or backward else splits.shape[0] - 1
    if not inputs["query_points"].shape[0]:
        items = 0  # slots without a query are in no list
    elif backward and splits is not None:
        others = queries_of(splits, rows.shape[0])
    references = inputs["reference_points"].shape[0]
    return Lists(rows, others, *points, items, references, k, splits is None)


def in_space(points: Tensor) -> Tensor:
    """Points with three coordinates, or fewer, with three; with none, as they are."""
    return points if points.shape[1] in (0, 3) else pad(points, (0, 3 - points.shape[1]))


def launch_options(kind: str, of: Lists, backward: bool) -> dict[str, int]:
    """PAIRS as TILE queries times STEP of each, where few steps are empty, and the rest of the options."""
    options = dict(LAUNCH[kind])
    pairs = options.pop("PAIRS")
    if of.PADDED:
        step = min(STEPS, key=lambda step: (cdiv(of.k, step) * step, -step))
    else:
        step = 1 if backward else 8
    return options | {"TILE": pairs // step, "STEP": step}


def chunks(of: Lists, bytes_of_pair: int) -> Iterator[tuple[int, int]]:
    """First and last item of each chunk."""
    size = max(1, CHUNK_BYTES // (bytes_of_pair * max(1, of.k)))
    size -= size % 64 if size > 64 else 0  # kernels are compiled anew for numbers that 16 divides
    for first in range(0, of.items if of.k else 0, size):
        yield first, min(first + size, of.items)


def grid_of(of: Lists, first: int, last: int, options: dict[str, int]) -> tuple[int, int]:
    """Programs of a backward kernel for some items."""
    return cdiv(last - first, options["TILE"]), cdiv(of.k, options["STEP"])


def power_of_two(count: int) -> int:
    """The least that is not below a count, also of a symbolic one."""
    size = 1
    while size < count:
        size *= 2
    return size


def width_of(channels: int) -> int:
    """Channels of a tile: a power of two, as matrix products want it."""
    return max(16, power_of_two(channels))


def fits(like: Tensor, width: int, weights: int = 0) -> bool:
    """Whether tiles of the widest layer, and so many weights, fit a GPU's registers and shared memory."""
    size = max(options["PAIRS"] for options in LAUNCH.values())
    block = max(options.get("BLOCK", 0) for options in LAUNCH.values())
    numbers = max((size + block) * width + 3 * size * 64, size * width + weights)
    if like.dtype == torch.float32 and precision(width) == EXACT:  # each tensor is two
        numbers = 2 * max((2 * size + 32) * width, size * width + weights)
    return width <= MOST_CHANNELS and numbers * like.element_size() <= shared_memory(like)


def shared_memory(like: Tensor) -> int:
    """Bytes that a program on a tensor's device can have."""
    if not like.is_cuda:
        return 2**32
    return torch.cuda.get_device_properties(like.device).shared_memory_per_block_optin


def copies_of(shapes: Sequence[tuple[int, ...]], like: Tensor) -> tuple[int, tuple[Tensor, ...]]:
    """Numbers of a row, and columns of zeros for COPIES of tensors of these shapes, a row for each copy."""
    sizes = [*map(_aligned, shapes)]
    return sum(sizes), like.new_zeros(COPIES.value, sum(sizes)).split(sizes, dim=1)


def sums_of_copies(copies: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Tensors of these shapes from the columns of :func:`copies_of`; they share no memory."""
    return [own.sum(0)[: math.prod(shape)].view(shape) for own, shape in zip(copies, shapes, strict=True)]


def _aligned(shape: tuple[int, ...]) -> int:
    """Numbers of a tensor, rounded up: kernels add to four at once."""
    return cdiv(math.prod(shape), 16) * 16


def precision(width: int = 0) -> str:
    """How fp32 is multiplied: as torch multiplies it; layers of many channels by three products of TF32."""
    if torch.backends.cuda.matmul.allow_tf32:
        return "tf32"
    return EXACT if width > 32 else "ieee"


def rows_of_places(inputs: dict[str, Any]) -> Tensor:
    """The layer of places (OF_LAYER, H): of three coordinates, the distance, and the bias."""
    layer, dims = inputs["weight_1"], inputs["query_points"].shape[1]
    parts = [pad(layer[:, :dims], (0, 3 - dims)), pad(layer[:, dims:], (0, 1 - inputs["with_distance"]))]
    return torch.cat([*parts, inputs["bias_1"][:, None]], dim=1).t().contiguous()


def weight_of_places(rows: Tensor, inputs: dict[str, Any]) -> Tensor:
    """The gradient of ``weight_1``, from that of :func:`rows_of_places`."""
    dims, distances = inputs["query_points"].shape[1], int(inputs["with_distance"])
    return torch.cat([rows[:dims], rows[3 : 3 + distances]]).t()


@triton.jit
def lists_of(query, exists, row_splits, k, PADDED: tl.constexpr):
    """Where the pairs of queries begin and end."""
    if PADDED:
        begin = tl.where(exists, query * k, 0)
        end = tl.where(exists, begin + k, 0)
    else:
        begin = tl.load(row_splits + query, mask=exists, other=0)
        end = tl.load(row_splits + query + 1, mask=exists, other=0)
    return begin, end


@triton.jit
def per_pair(values, TILE: tl.constexpr, STEP: tl.constexpr):
    """Of each pair, what its query has: (TILE,) to (TILE * STEP,)."""
    return tl.reshape(tl.broadcast_to(values[:, None], [TILE, STEP]), [TILE * STEP])


@triton.jit
def sums_of_queries(values, TILE: tl.constexpr, STEP: tl.constexpr):
    """Sums over each query's pairs of a tile: (TILE * STEP, C) to (TILE, C)."""
    return tl.sum(tl.reshape(values, [TILE, STEP, values.shape[1]]), 1)


@triton.jit
def steps_at(rows, begin, end, step, references, TILE: tl.constexpr, STEP: tl.constexpr):
    """Slots of pairs in a forward program, their rows, and which of them exist: (TILE * STEP,)."""
    at = tl.reshape(begin[:, None] + step + tl.arange(0, STEP)[None, :], [TILE * STEP])
    row = tl.load(rows + at, mask=at < per_pair(end, TILE, STEP), other=-1).to(tl.int64)
    return at, row, (row >= 0) & (row < references)


@triton.jit
def tile_of_pairs(
    rows, query_of, first, last, references, k, PADDED: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr
):
    """Queries of a backward program and which exist (TILE,); its slots, their rows, and which are pairs.

    The last result says which slots are slots of these lists.
    """
    item = (first + tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)
    step = tl.program_id(1) * STEP + tl.arange(0, STEP)
    query, exists = item, item < last
    if not PADDED:
        query = tl.load(query_of + item, mask=exists, other=0)
    inside = tl.reshape(exists[:, None] & (step < k)[None, :], [TILE * STEP])
    at = tl.reshape(item[:, None] * k + step[None, :], [TILE * STEP])
    row = tl.load(rows + at, mask=inside, other=-1).to(tl.int64)
    return query, exists, at, row, (row >= 0) & (row < references), inside


@triton.jit
def places_of_pairs(
    reference_points, query_points, row, query, hit, real: tl.constexpr, DISTANCE: tl.constexpr
):
    """Reference minus query point, and the distance if asked, 0 where there is no pair."""
    x, y, z = load_points(reference_points, row, hit, 0.0)
    px, py, pz = load_points(query_points, query, hit, 0.0)
    x, y, z = (x - px).to(real), (y - py).to(real), (z - pz).to(real)
    distance = tl.zeros_like(x)
    if DISTANCE:
        distance = rounded_root(x * x + y * y + z * z)
    return x, y, z, distance


@triton.jit
def columns_of_places(reference_points, query_points, row, query, hit, real: tl.constexpr):
    """Rows that the layer of places multiplies (P, 16): reference minus query point, 0, 1, and zeros."""
    column = tl.arange(0, 16)
    there = hit[:, None] & (column < 3)[None, :]
    place = tl.load(reference_points + 3 * row[:, None] + column[None, :], mask=there, other=0.0)
    place -= tl.load(query_points + 3 * query[:, None] + column[None, :], mask=there, other=0.0)
    return tl.where(column[None, :] == 4, 1.0, place.to(real))


@triton.jit
def layer_of_columns(columns, layer, channel, channels, PRECISION: tl.constexpr):
    """The layer of places (OF_LAYER rows of channels) of :func:`columns_of_places`."""
    total, column = tl.zeros([columns.shape[0], channel.shape[0]], columns.dtype), tl.arange(0, 16)
    return times(columns, layer, column, OF_LAYER, channels, channel, channels, 1, total, PRECISION)


@triton.jit
def linear_of_places(values, layer, channel, channels, x, y, z, distance, DISTANCE: tl.constexpr):
    """Add the layer of places (OF_LAYER rows of channels) to values (P, C)."""
    inside = channel < channels
    for row in tl.static_range(0, 4 if DISTANCE else 3):
        weight = tl.load(layer + row * channels + channel, mask=inside, other=0.0)
        place = x if row == 0 else (y if row == 1 else (z if row == 2 else distance))
        values += place[:, None] * weight[None, :]
    return values + tl.load(layer + 4 * channels + channel, mask=inside, other=0.0)[None, :]


@triton.jit
def first_layer_of(
    hidden, of_queries, layer, row, query, hit, channel, channels, x, y, z, distance,
    HIDDEN: tl.constexpr, OF_QUERIES: tl.constexpr, PLACES: tl.constexpr, DISTANCE: tl.constexpr,
):  # fmt: skip
    """Some channels of the first layer of pairs: (P, BLOCK)."""
    there = hit[:, None] & (channel < channels)[None, :]
    values = tl.zeros([row.shape[0], channel.shape[0]], layer.dtype.element_ty)
    if OF_QUERIES:
        more = tl.load(of_queries + query[:, None] * channels + channel[None, :], mask=there, other=0.0)
        values += more.to(values.dtype)
    if HIDDEN:
        more = tl.load(hidden + row[:, None] * channels + channel[None, :], mask=there, other=0.0)
        values += more.to(values.dtype)
    if PLACES:
        values = linear_of_places(values, layer, channel, channels, x, y, z, distance, DISTANCE)
    return values


@triton.jit
def times(x, weight, i, n_in, by_in, o, n_out, by_out, total, PRECISION: tl.constexpr):
    """``total + x @ w``, of the rows i and columns o of a matrix with these strides."""
    inside = (i < n_in)[:, None] & (o < n_out)[None, :]
    w = tl.load(weight + i[:, None] * by_in + o[None, :] * by_out, mask=inside, other=0.0)
    return tl.dot(x, w, total, input_precision=PRECISION, out_dtype=total.dtype)


@triton.jit
def own_copy(copies, of_copy):
    """Where a program adds to gradients of layers, of which there are copies of this length."""
    program = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    return copies + (program % COPIES) * of_copy


@triton.jit
def add_layer_of_places(
    d_layer, d_values, channel, channels, x, y, z, distance, of_copy, DISTANCE: tl.constexpr
):
    """Add to the gradient of the layer of places, in one of several copies."""
    inside = channel < channels
    target = own_copy(d_layer, of_copy) + channel
    for row in tl.static_range(0, 4 if DISTANCE else 3):
        place = x if row == 0 else (y if row == 1 else (z if row == 2 else distance))
        own = tl.sum(d_values * place[:, None], 0)
        tl.atomic_add(target + row * channels, own, mask=inside, sem="relaxed")
    tl.atomic_add(target + 4 * channels, tl.sum(d_values, 0), mask=inside, sem="relaxed")


@triton.jit
def moved_by(d_values, layer, channel, channels, x, y, z, distance, rx, ry, rz, DISTANCE: tl.constexpr):
    """Add what the layer of places gives to the gradient of relative positions."""
    inside = channel < channels
    wx = tl.load(layer + channel, mask=inside, other=0.0)
    wy = tl.load(layer + channels + channel, mask=inside, other=0.0)
    wz = tl.load(layer + 2 * channels + channel, mask=inside, other=0.0)
    rx += tl.sum(d_values * wx[None, :], 1)
    ry += tl.sum(d_values * wy[None, :], 1)
    rz += tl.sum(d_values * wz[None, :], 1)
    if DISTANCE:
        wd = tl.load(layer + 3 * channels + channel, mask=inside, other=0.0)
        along = tl.sum(d_values * wd[None, :], 1) / tl.where(distance > 0, distance, 1.0)
        rx += along * x
        ry += along * y
        rz += along * z
    return rx, ry, rz


@triton.jit
def add_places(
    d_reference, d_query, row, query, hit, rx, ry, rz, REFERENCE: tl.constexpr, QUERY: tl.constexpr
):
    """Add gradients of relative positions to those of both sets of points."""
    for column in tl.static_range(0, 3):
        own = rx if column == 0 else (ry if column == 1 else rz)
        if REFERENCE:
            tl.atomic_add(d_reference + 3 * row + column, own, mask=hit, sem="relaxed")
        if QUERY:
            tl.atomic_add(d_query + 3 * query + column, -own, mask=hit, sem="relaxed")


@triton.jit
def add_product(d_weight, d_out, x, i, n_in, o, n_out, of_copy, PRECISION: tl.constexpr):
    """Add the gradient of a weight (out, in) from a tile's pairs, in one of several copies."""
    target = own_copy(d_weight, of_copy) + o[:, None] * n_in + i[None, :]
    own = tl.dot(tl.trans(d_out), x, input_precision=PRECISION, out_dtype=x.dtype)
    tl.atomic_add(target, own, mask=(o < n_out)[:, None] & (i < n_in)[None, :], sem="relaxed")


@triton.jit
def add_bias(d_bias, d_out, o, n_out, of_copy):
    """Add the gradient of a bias from a tile's pairs, in one of several copies."""
    target = own_copy(d_bias, of_copy) + o
    tl.atomic_add(target, tl.sum(d_out, 0), mask=o < n_out, sem="relaxed")


@triton.jit
def largest_of(values, at, hit, largest, winner, TILE: tl.constexpr, STEP: tl.constexpr):
    """The largest of each query so far, and its slot: of several the first; NaN is the largest."""
    values = tl.reshape(values, [TILE, STEP, values.shape[1]])
    there = tl.reshape(hit, [TILE, STEP])[:, :, None]
    is_nan = (values != values) & there
    top = tl.max(tl.where(there & (values == values), values, -float("inf")), 1)
    has_nan = tl.max(is_nan.to(tl.int32), 1) > 0
    is_top = tl.where(has_nan[:, None, :], is_nan, there & (values == top[:, None, :]))
    none: tl.constexpr = 2147483647
    slot = tl.min(tl.where(is_top, tl.reshape(at, [TILE, STEP])[:, :, None], none), 1)
    top = tl.where(has_nan, float("nan"), top)
    is_larger = (winner < 0) | (top > largest) | (has_nan & (largest == largest))
    is_larger &= slot < none
    return tl.where(is_larger, top, largest), tl.where(is_larger, slot, winner)
