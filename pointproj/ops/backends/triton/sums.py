"""Weighted sums over neighbours: those of lists, or all within a radius. Gradients use the same traversal.

Neighbours come in runs. A list is one run of rows. Within a radius, each row of the cube of cells is one run
of sorted points, some of which are too far away. All lanes of a tile visit the runs of their queries.

Weights of a mean are relative to the nearest neighbour so far: when a nearer one is found, the sums are
rescaled. The sum of each query has a fixed order, so results are the same, bit for bit, in every run.

Addresses of stores are computed in the kernel itself, from values that it loads itself. If a helper returned
them, torch's tracing would conclude that the kernel writes to the tensors that the helper reads.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from pointproj.ops.backends.triton.arithmetic import load_points, quotient, rounded_root, squared_length
from pointproj.ops.backends.triton.cell_list import CellList, cloud_numbers
from pointproj.ops.backends.triton.traversal import cell_of, cube_within, load_queries, run_of, runs_of
from pointproj.ops.backends.triton.weights import (
    SUM,
    WEIGHTED,
    base_of,
    base_of_sum,
    choices,
    parameters,
    weigh,
)
from pointproj.ops.bridge.triton_op import cdiv, launch
from pointproj.ops.specification.clouds import Clouds
from pointproj.ops.specification.reference import Weighting
from pointproj.ops.specification.rounding import largest_square_within

# Queries of a tile, and neighbours of each that are processed together: as many pairs as a warp has lanes.
# Both determine the order of sums, so they are not tuned.
LAUNCH = {"TILE": 4, "STEP": 8, "num_warps": 1}


class NeighborSource(NamedTuple):
    """Where kernels find the neighbours of queries; the fields are their first arguments."""

    query_points: Tensor  # (Q, 3)
    clouds: Tensor  # (Q,) int32, see cloud_numbers
    points: Tensor  # (N, 3): of lists in the given order, else sorted
    rows: Tensor  # (Q, k): the lists, -1 for none; else (N,): the row of each sorted point
    first: Tensor  # of the cell list, like frame and side
    frame: Tensor
    limit: Tensor  # () the largest squared distance
    queries: int
    side: int
    k: int
    LISTED: bool
    BATCHED: bool

    def launch(self, kernel: Any, *args: Any, columns: int = 1) -> None:
        """Launch a kernel over tiles of queries, and columns of blocks of channels."""
        launch(kernel, (cdiv(self.queries, LAUNCH["TILE"]), columns), *self, *args, **LAUNCH)


def listed(query_points: Tensor, reference_points: Tensor, rows: Tensor) -> NeighborSource:
    """The neighbours are given, as rows (Q, k)."""
    unused = (rows, reference_points, reference_points)
    count, k = rows.shape
    return NeighborSource(query_points, rows, reference_points, rows, *unused, count, 1, k, True, False)


def within(clouds: Clouds, cells: CellList, radius: float) -> NeighborSource:
    """All reference points within the radius."""
    points, batched = clouds.query_points, clouds.count != 1
    numbers = cloud_numbers(points, clouds.query_offsets, clouds.count)
    limit = points.new_full((), largest_square_within(radius, points.dtype))
    return NeighborSource(points, numbers, *cells, limit, points.shape[0], cells.side, 1, False, batched)


def summed(
    source: NeighborSource, features: Tensor, sigma: Tensor, weighting: Weighting
) -> tuple[Tensor, Tensor]:
    """Aggregated features (Q, C), and (Q, 2) what the gradients need: base and 1 / total."""
    channels = features.shape[1]
    block = channel_block(channels)
    aggregated = features.new_empty(source.queries, channels)
    softmax = features.new_empty(source.queries, 2)
    source.launch(
        sum_kernel,
        features, *parameters(weighting, sigma), aggregated, softmax, channels,
        *choices(weighting), block, columns=cdiv(channels, block),
    )  # fmt: skip
    return aggregated, softmax


def channel_block(channels: int) -> int:
    """How many channels a program sums up: a power of two of which few are unused."""
    if channels <= 16:
        return 16
    return 32 if channels <= 32 else 64


@triton.jit
def cubes_of(x, y, z, active, limit, frame, side, LISTED: tl.constexpr):
    """The cubes of cells that contain the neighbours of queries, and the number of runs: 1 for lists."""
    if LISTED:
        nowhere = tl.zeros_like(x).to(tl.int32)
        cx, cy, cz, size, runs = nowhere, nowhere, nowhere, nowhere, 1
    else:
        cx, cy, cz = cell_of(x, y, z, frame, side)
        size = cube_within(x, y, z, cx, cy, cz, tl.load(limit), frame, side)
        runs = tl.max(tl.where(active, runs_of(cy, cz, size, side), 0))
    return cx, cy, cz, size, runs


@triton.jit
def neighbors_of(number, query, k, cx, cy, cz, size, cloud, active, first, side, LISTED: tl.constexpr):
    """Where the neighbours of a run begin and end."""
    if LISTED:
        begin = tl.where(active, query * k, 0)
        end = tl.where(active, begin + k, 0)
    else:
        begin, end = run_of(number, cx, cy, cz, size, -1, cloud, active, first, side)
    return begin, end


@triton.jit
def pair(x, y, z, points, at, exists, limit, LISTED: tl.constexpr, real: tl.constexpr):
    """Which points are neighbours, and differences and distances of the points; 0 where there is no point.

    Differences have the positions' dtype. All is rounded after each operation: a compiler may compute a value
    twice, and a small sigma magnifies errors.
    """
    px, py, pz = load_points(points, at, exists, 0.0)
    x = tl.where(exists, x[:, None] - px, 0.0)
    y = tl.where(exists, y[:, None] - py, 0.0)
    z = tl.where(exists, z[:, None] - pz, 0.0)
    hit = exists
    if not LISTED:
        hit &= squared_length(x, y, z) <= tl.load(limit)
    x, y, z = x.to(real), y.to(real), z.to(real)
    return hit, x, y, z, rounded_root(squared_length(x, y, z))


@triton.jit
def has_reference_weight(features, row, hit, channels, REDUCE: tl.constexpr):
    """Which neighbours have a reference weight other than 0, or none is given."""
    has_weight = hit
    if REDUCE == WEIGHTED:
        has_weight &= tl.load(features + row * channels + channels - 1, mask=hit, other=0.0) != 0
    return has_weight


@triton.jit
def sum_kernel(
    query_points, clouds, points, rows, first, frame, limit, queries, side, k,
    LISTED: tl.constexpr, BATCHED: tl.constexpr,
    features, parameter, eps, aggregated, softmax, channels,
    KERNEL: tl.constexpr, REDUCE: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Weighted means or sums of some channels for a tile of queries."""
    side = tl.cast(side, tl.int32)  # sizes may come as 64 bits
    real: tl.constexpr = features.dtype.element_ty
    query = (tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)
    exists = query < queries
    x, y, z, cloud, active = load_queries(query_points, clouds, query, exists, BATCHED)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    parameter, eps = tl.load(parameter), tl.load(eps)
    sums, total = tl.zeros([TILE, BLOCK], real), tl.zeros([TILE], real)
    base = base_of_sum(total, KERNEL) if REDUCE == SUM else tl.full([TILE], float("inf"), real)
    cx, cy, cz, size, runs = cubes_of(x, y, z, active, limit, frame, side, LISTED)
    for number in range(0, runs, 2):
        begin, end = neighbors_of(number, query, k, cx, cy, cz, size, cloud, active, first, side, LISTED)
        for step in range(0, tl.max(end - begin), STEP):
            at = begin[:, None] + step + tl.arange(0, STEP)[None, :]
            row = tl.load(rows + at, mask=at < end[:, None], other=-1).to(tl.int64)
            place, is_point = (row, row >= 0) if LISTED else (at, at < end[:, None])
            hit, _, _, _, distance = pair(x, y, z, points, place, is_point, limit, LISTED, real)
            if tl.max(hit.to(tl.int32)) > 0:
                has_weight = has_reference_weight(features, row, hit, channels, REDUCE)
                if REDUCE != SUM:
                    bases = tl.where(has_weight, base_of(distance, eps, KERNEL), float("inf"))
                    nearest = tl.minimum(base, tl.min(bases, 1))
                    rescale, _, _ = weigh(nearest, base, parameter, eps, KERNEL, REDUCE)
                    rescale = tl.where((nearest < base) & (base < float("inf")), rescale, 1.0)
                    base = nearest
                    total *= rescale
                    sums *= rescale[:, None]
                weight, _, _ = weigh(base[:, None], distance, parameter, eps, KERNEL, REDUCE)
                total += tl.sum(tl.where(has_weight, weight, 0.0), 1)
                there = hit[:, :, None] & (channel < channels)
                values = tl.load(features + row[:, :, None] * channels + channel, mask=there, other=0.0)
                sums += tl.sum(tl.where(there, weight[:, :, None] * values, 0.0), 1)
    inverse = tl.full([TILE], 1.0, real)
    if REDUCE != SUM:
        has_neighbor = total != 0  # weights may be negative, and NaN stays NaN
        inverse = tl.where(has_neighbor, 1.0 / total, 0.0)
        sums = quotient(sums, tl.where(has_neighbor, total, 1.0)[:, None])
    if tl.program_id(1) == 0:
        tl.store(softmax + 2 * query, base, mask=exists)
        tl.store(softmax + 2 * query + 1, inverse, mask=exists)
    out = exists[:, None] & (channel < channels)[None, :]
    sums = tl.where(active[:, None], sums, float("nan"))
    tl.store(aggregated + query[:, None] * channels + channel[None, :], sums, mask=out)
