"""Sums of rows within a radius on a GPU: 32 points in the order of their cells share one search.

Lanes whose cells lie in one row of the searched table go together: their box, and the cells along the row
from the first to the last of them, widened by the radius, say which candidates there are for any of them.
"""

import functools
import math
from typing import Any

import torch
import warp as wp

from pointproj.ops.backends.warp.common import OPTIONS, REALS, ROUNDINGS, cloud_of, packed_point
from pointproj.ops.backends.warp.lanes import (
    base_at,
    bit_count,
    bits_up_to_lane,
    lanes,
    line_up,
    lowest_bit,
    starts,
)
from pointproj.ops.backends.warp.tiles import BASE, LANES, MOST_SIGMAS, TileShape, tiles
from pointproj.ops.backends.warp.wrapped import table_functions, wrapped_struct
from pointproj.ops.bridge.warp_op import Launch

MOST_STEPS = 2.0**20  # cells on each side: more than any table has along an axis
AT_HAND = 16


_LOWEST = """
#if __CUDA_ARCH__ >= 800
    // as integers in the order of the floats
    const int bits = __float_as_int(x), key = bits ^ (bits >> 31 & 0x7fffffff);
    const int least = __reduce_min_sync(0xffffffffu, key);
    return __int_as_float(least ^ (least >> 31 & 0x7fffffff));
#endif
"""
_LOWEST_INTEGER = """
#if __CUDA_ARCH__ >= 800
    return __reduce_min_sync(0xffffffffu, x);
#endif
"""
_LOWEST_BY_STEPS = """
    for (int step = 16; step > 0; step >>= 1) {
        auto other = __shfl_xor_sync(0xffffffffu, x, step);
        x = other < x ? other : x;
    }
    return x;
"""


@wp.func_native("return threadIdx.x / 32;")
def warp_of_block() -> int: ...


@wp.func_native(_LOWEST + _LOWEST_BY_STEPS)
def lowest(x: wp.float32) -> wp.float32:
    """Smallest of all lanes' numbers, of any sign."""
    ...


@wp.func_native(_LOWEST_BY_STEPS)
def lowest(x: wp.float64) -> wp.float64: ...


@wp.func_native(_LOWEST_INTEGER + _LOWEST_BY_STEPS)
def lowest(x: wp.int32) -> wp.int32: ...


@wp.func_native("return __float2int_rz(__fdividef(x + 0.5f, by));")
def quotient(x: int, by: int) -> int:
    """Of numbers up to 2 ** 20."""
    ...


def _tile_search(positions: torch.dtype, sums: torch.dtype, held: int, warps: int) -> wp.Function:
    """``search(state, seeking, ...) -> state``: the sums of each lane's point, or its nearest point.

    All lanes of a block call it with the same ``seeking`` and ``chunk``; a lane without a point has a ``q``
    that is not finite.
    """
    place, vec3 = REALS[positions]
    real, _ = REALS[sums]
    vec4 = wp.types.vector(length=4, dtype=place)
    matrix = wp.array2d(dtype=real)
    Wrapped, _ = wrapped_struct(positions)
    _, table_of, axis_cell, first_place_of, along = table_functions(positions)
    load_point, _, _ = packed_point(positions)
    tile = tiles(positions, sums, held, warps)
    State, room_of, put, settle = tile.State, tile.room, tile.put, tile.settle
    group = lanes(LANES)
    lane, take, ballot, sum_before = group.lane, group.take, group.ballot, group.sum_before
    unit = torch.finfo(positions).eps * ROUNDINGS

    @wp.func
    def beside(point: vec4, low: vec3, high: vec3):
        """Squared distance to a box."""
        square = place(0.0)
        for axis in range(3):
            gap = wp.max(wp.max(low[axis] - point[axis], point[axis] - high[axis]), place(0.0))
            square += gap * gap
        return square

    @wp.func
    def run_of(
        wrapped: Wrapped, base: int, bits: wp.vec3i, first: wp.vec3i, size: wp.vec3i, split: int, part: int
    ):
        """First point and number of points of a row of cells; where rows wrap, each comes in two parts."""
        places = 1 << bits[0]
        parts = size[1] << split
        begin = int(0)
        run = int(0)
        if part < parts * size[2]:
            across = quotient(part, parts)
            y = (first[1] + ((part - across * parts) >> split)) & ((1 << bits[1]) - 1)
            z = (first[2] + across) & ((1 << bits[2]) - 1)
            x0 = first[0]
            x1 = wp.min(first[0] + size[0], places)
            if (part & split) == 1:
                x0 = 0
                x1 = first[0] + size[0] - places
            row = base + (((z << bits[1]) | y) << bits[0])
            begin = wrapped.start[row + x0]
            run = wrapped.start[row + x1] - begin
        return begin, run

    @wp.func
    def cells_near(bits: wp.vec3i, x0: int, x1: int, y: int, z: int, steps: int):
        """First cell and number of cells along each axis, from ``steps`` before to ``steps`` behind."""
        first = wp.vec3i(x0 - steps, y - steps, z - steps)
        size = wp.vec3i(x1 - x0 + 1 + 2 * steps, 1 + 2 * steps, 1 + 2 * steps)
        for axis in range(3):
            if size[axis] >= (1 << bits[axis]):
                first[axis] = 0
                size[axis] = 1 << bits[axis]
        first[0] = first[0] & ((1 << bits[0]) - 1)
        return first, size

    @wp.func
    def search(
        state: State,
        seeking: bool,
        careful: bool,
        q: vec3,
        cloud: int,
        wrapped: Wrapped,
        radius: place,
        reach: place,
        decay: real,  # of the logarithm of a weight, to the base of BASE
        features: matrix,
        chunk: int,
    ):
        room = room_of()
        table = table_of(cloud, wrapped.offsets, wrapped.rows, wrapped.clouds, wrapped.first_place)
        per_unit = place(1.0) / wrapped.width
        x = along(table, axis_cell(q[0], per_unit))
        y = axis_cell(q[1], per_unit)
        z = axis_cell(q[2], per_unit)
        row = first_place_of(table, y, z)
        there = wp.isfinite(q)
        todo = ballot(there)
        tiles_before = int(0)  # of the rows of cells visited so far
        while todo != 0:
            chosen = lowest_bit(todo)
            chosen_row = take(row, chosen)
            active = there and row == chosen_row
            todo = todo ^ ballot(active)
            low = vec3()
            high = vec3()
            for axis in range(3):
                low[axis] = lowest(wp.where(active, q[axis], place(wp.inf)))
                high[axis] = -lowest(wp.where(active, -q[axis], place(wp.inf)))
            slack = place(unit) * (wp.max(wp.max(wp.abs(low)), wp.max(wp.abs(high))) + radius)
            limit = (radius + slack) * (radius + slack)
            steps = int(wp.min((radius + slack) * per_unit, place(MOST_STEPS))) + 1
            base = take(table.base, chosen)
            bits = wp.vec3i(
                take(table.bits[0], chosen), take(table.bits[1], chosen), take(table.bits[2], chosen)
            )
            x0 = lowest(wp.where(active, x, 1 << bits[0]))
            x1 = -lowest(wp.where(active, -x, 0))
            first, size = cells_near(bits, x0, x1, take(y, chosen), take(z, chosen), steps)
            own_reach = wp.where(active, reach, place(-1.0))
            waiting = int(0)
            split = wp.where(first[0] + size[0] > (1 << bits[0]), 1, 0)
            for first_part in range(0, (size[1] << split) * size[2], LANES):
                begin, run = run_of(wrapped, base, bits, first, size, split, first_part + lane())
                offset = sum_before(run)
                candidates = take(offset + run, LANES - 1)
                bases = line_up(begin - offset, run)
                found = (candidates + LANES - 1) / LANES
                # One more than there are tiles for this warp: then all that wait are added up.
                first_tile = (warp_of_block() - tiles_before) & (warps - 1)
                for number in range(first_tile, found + warps, warps):
                    candidate = number * LANES + lane()
                    before = bit_count(ballot(run > 0 and offset < number * LANES)) - 1
                    at = before + bits_up_to_lane(starts(offset, run, number * LANES))
                    near = candidate < candidates
                    point = vec4()
                    if near:
                        point = load_point(wrapped.points, base_at(bases, at) + candidate)
                        near = beside(point, low, high) <= limit
                    full = number >= found or waiting + bit_count(ballot(near)) > LANES
                    ready = wp.where(full, waiting, 0)
                    state = settle(state, room, ready, seeking, careful, q, own_reach, decay, features, chunk)
                    waiting = put(room, waiting - ready, near, point)
                tiles_before += found
        return state

    return search


def launch_tiles(launch: Launch, kernel: wp.Kernel, shape: TileShape, *args: Any) -> None:
    """Launch ``kernel(searches, points, first, rows, ...)`` for ``rows`` sorted points from ``first`` on."""
    rows, block = args[2], LANES * shape.warps
    blocks = -(-rows // LANES) * shape.searches
    launch(kernel, (blocks, block), shape.searches, *args, block_dim=block)


def _own_point(positions: torch.dtype) -> wp.Function:
    place, vec3 = REALS[positions]
    load_point, _, row_of = packed_point(positions)
    lane = lanes(LANES).lane

    @wp.func
    def own_point(points: wp.array2d(dtype=place), first: int, rows: int, group: int):
        """Position and row of this lane's point; the last group may have fewer than its lanes."""
        at = group * LANES + lane()
        p = vec3(place(wp.nan))
        row = int(-1)
        if at < rows:
            point = load_point(points, first + at)
            p = vec3(point[0], point[1], point[2])
            row = row_of(point)
        return p, row

    return own_point


@functools.cache
def aggregate_tiles(positions: torch.dtype, sums: torch.dtype, held: int, warps: int) -> wp.Kernel:
    """Softmax over the reference points near each query, and the weighted sum of their features."""
    place, _ = REALS[positions]
    real, _ = REALS[sums]
    matrix = wp.array2d(dtype=real)
    _, wrapped_of = wrapped_struct(positions)
    own_point = _own_point(positions)
    tile = tiles(positions, sums, held, warps)
    State, room_of = tile.State, tile.room
    least_of_block, write_means = tile.least_of_block, tile.write_means
    search = _tile_search(positions, sums, held, warps)
    per_sigma = 1.0 / math.log(BASE[sums])

    @wp.kernel(**OPTIONS, launch_bounds=(LANES * warps, AT_HAND // warps))
    def aggregate(
        searches: int,
        query_points: wp.array2d(dtype=place),
        first_query: int,
        queries: int,
        query_offsets: wp.array(dtype=wp.int32),
        clouds: int,
        width: wp.array(dtype=place),
        start: wp.array(dtype=wp.int32),
        points: wp.array2d(dtype=place),
        first_place: int,
        rows: int,
        searched_offsets: wp.array(dtype=wp.int32),
        features: matrix,
        sigma: wp.array(dtype=real),
        radius: wp.float64,
        reach: wp.float64,
        aggregated: matrix,
        softmax: matrix,
    ):
        block, _ = wp.tid()
        chunk = block % searches
        q, query = own_point(query_points, first_query, queries, block / searches)
        cloud = cloud_of(wp.max(query, 0), query_offsets, queries, clouds)
        wrapped = wrapped_of(width, start, points, first_place, rows, searched_offsets, clouds)
        decay = real(per_sigma) / sigma[0]
        # Weights are relative to a neighbour: the first that a warp meets, where they cannot vanish or grow
        # too large then, else the nearest. So one neighbour's weight is 1, and its features every bit.
        state = State()
        state[held + 1] = real(wp.inf)
        base = real(wp.inf)
        passes = wp.where(real(radius) <= real(MOST_SIGMAS) * sigma[0], 1, 2)
        for step in range(passes):
            state = search(
                state,
                step + 1 < passes,
                passes > 1,
                q,
                cloud,
                wrapped,
                place(radius),
                place(reach),
                decay,
                features,
                chunk,
            )
            base = least_of_block(state, room_of())
            if step + 1 < passes:
                state[held + 1] = base
        write_means(state, room_of(), base, decay, query, wp.isfinite(q), chunk, aggregated, softmax)

    return aggregate
