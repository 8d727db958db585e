"""Sums of rows within a radius on a GPU: 32 points in the order of their cells share one search.

Lanes whose cells lie in one row of the searched table go together: their box, and the cells along the row
from the first to the last of them, widened by the radius, say which candidates there are for any of them.
"""

import functools
import math

import torch
import warp as wp
from torch import Tensor

from pointproj.ops.backends.warp.common import (
    LEAST_DISTANCE,
    OPTIONS,
    ROUNDINGS,
    Batch,
    BatchStruct,
    cloud_of,
    packed_point,
)
from pointproj.ops.backends.warp.hash_grid import SearchedGrid, searched_struct
from pointproj.ops.backends.warp.hash_table import MOST_STEPS, table_functions
from pointproj.ops.backends.warp.lanes import bit_count, lanes, lowest_bit
from pointproj.ops.backends.warp.radius_pairs import RadiusProblem, problem_struct
from pointproj.ops.backends.warp.sparse_sums import launch_sparse
from pointproj.ops.backends.warp.sparse_tiles import mark_sparse
from pointproj.ops.backends.warp.tiles import LANES, MOST_DECAY, SumTask, Tiles, sum_tiles, tile_shape
from pointproj.ops.backends.warp.traversal import line_of_runs
from pointproj.ops.backends.warp.weighting import WITHOUT_END, is_relative, weight_functions
from pointproj.ops.bridge.warp_op import Launch

WARPS_AT_HAND = 16  # of a processor: registers count for more than warps


@wp.func_native("return threadIdx.x / 32;")
def warp_of_block() -> int: ...


@wp.func_native("return __float2int_rz(__fdividef(x + 0.5f, by));")
def quotient(x: int, by: int) -> int:
    """Of numbers up to 2 ** 20."""
    ...


def tile_search(tile: Tiles, warps: int) -> wp.Function:
    """``search(state, q, cloud, searched, problem, task) -> state``: what a tile does for each lane's point.

    All lanes of a block call it with the same ``task``; a lane without a point has a ``q``
    that is not finite.
    """
    SearchedStruct = searched_struct(torch.float32)
    ProblemStruct = problem_struct(torch.float32, torch.float32)
    Table, table_of, axis_cell, first_bucket_of, along, _ = table_functions(torch.float32)
    load_point, _, _ = packed_point(torch.float32)
    State, Task, reserve, push, flush = tile
    group = lanes(LANES)
    lane, take, ballot = group.lane, group.take, group.ballot
    sum_before, minimum = group.sum_before, group.minimum
    line_up, starts, bits_up_to_lane, base_at = line_of_runs(LANES)
    unit, least = torch.finfo(torch.float32).eps * ROUNDINGS, LEAST_DISTANCE[torch.float32]

    @wp.func
    def beside(point: wp.vec4f, low: wp.vec3f, high: wp.vec3f):
        """Squared distance to a box."""
        square = float(0.0)
        for axis in range(3):
            gap = wp.max(wp.max(low[axis] - point[axis], point[axis] - high[axis]), float(0.0))
            square += gap * gap
        return square

    @wp.func
    def run_of(
        start: wp.array(dtype=wp.int32),
        table: Table,
        first: wp.vec3i,
        size: wp.vec3i,
        split: int,
        part: int,
    ):
        """First point and number of points of a row of cells; where rows wrap, each comes in two parts."""
        buckets = 1 << table.bits[0]
        parts = size[1] << split
        begin = int(0)
        run = int(0)
        if part < parts * size[2]:
            across = quotient(part, parts)
            y = first[1] + ((part - across * parts) >> split)
            z = first[2] + across
            x0 = first[0]
            x1 = wp.min(first[0] + size[0], buckets)
            if (part & split) == 1:
                x0 = 0
                x1 = first[0] + size[0] - buckets
            row = first_bucket_of(table, y, z)
            begin = start[row + x0]
            run = start[row + x1] - begin
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
        q: wp.vec3f,
        cloud: int,
        searched: SearchedStruct,
        problem: ProblemStruct,
        task: Task,
    ):
        queue = reserve()
        radius = problem.radius
        table = table_of(cloud, searched.batch, searched.first_bucket)
        per_unit = float(1.0) / searched.width[searched.number]
        x = along(table, axis_cell(q[0], per_unit))
        y = axis_cell(q[1], per_unit)
        z = axis_cell(q[2], per_unit)
        row = first_bucket_of(table, y, z)
        there = wp.isfinite(q)
        todo = ballot(there)
        tiles_before = int(0)  # of the rows of cells visited so far
        while todo != 0:
            chosen = lowest_bit(todo)
            chosen_row = take(row, chosen)
            active = there and row == chosen_row
            todo = todo ^ ballot(active)
            low = wp.vec3f()
            high = wp.vec3f()
            for axis in range(3):
                low[axis] = minimum(wp.where(active, q[axis], float(wp.inf)))
                high[axis] = -minimum(wp.where(active, -q[axis], float(wp.inf)))
            largest = wp.max(wp.max(wp.abs(low)), wp.max(wp.abs(high)))
            slack = float(unit) * (largest + radius) + float(least)
            limit = (radius + slack) * (radius + slack)
            steps = int(wp.min((radius + slack) * per_unit, float(MOST_STEPS))) + 1
            shared = Table()
            shared.base = take(table.base, chosen)
            for axis in range(3):
                shared.bits[axis] = take(table.bits[axis], chosen)
            buckets = 1 << shared.bits[0]
            x0 = minimum(wp.where(active, x, buckets))
            x1 = -minimum(wp.where(active, -x, 0))
            first, size = cells_near(shared.bits, x0, x1, take(y, chosen), take(z, chosen), steps)
            own_square = wp.where(active, problem.largest_square, float(-1.0))
            waiting = int(0)
            split = wp.where(first[0] + size[0] > buckets, 1, 0)
            for first_part in range(0, (size[1] << split) * size[2], LANES):
                begin, run = run_of(searched.start, shared, first, size, split, first_part + lane())
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
                    point = wp.vec4f()
                    if near:
                        point = load_point(searched.points, base_at(bases, at) + candidate)
                        near = beside(point, low, high) <= limit
                    full = number >= found or waiting + bit_count(ballot(near)) > LANES
                    ready = wp.where(full, waiting, 0)
                    state = flush(state, queue, ready, q, own_square, task)
                    waiting = push(queue, waiting - ready, near, point)
                tiles_before += found
        return state

    return search


def is_careful(kernel: str) -> wp.Function:
    """``careful(problem, decay)``: whether weights may vanish, or be too large, next to any other."""
    ProblemStruct = problem_struct(torch.float32, torch.float32)
    _, level_of, *_ = weight_functions(kernel, torch.float32)
    decays, most = kernel in WITHOUT_END, MOST_DECAY / math.log(2.0)

    @wp.func
    def careful(problem: ProblemStruct, decay: float):
        far = bool(False)
        if wp.static(decays):
            levels = level_of(problem.radius, problem.limit) - level_of(float(0.0), problem.limit)
            far = not (levels * decay <= float(most))
        return far

    return careful


def launch_tiles(
    launch: Launch,
    sorted_queries: Tensor,
    batch: Batch,
    searched: SearchedGrid,
    problem: RadiusProblem,
    kernel: str,
    reduce: str,
) -> None:
    """Fill ``problem.aggregated`` and ``problem.softmax``, all in float32.

    Of many points, tiles that are sparse are left to :mod:`pointproj.ops.backends.warp.sparse_sums`.

    For W2 at radius 0.1 and 0.25 the kernel takes 22 and 52 us, where a warp a query took 32 and 67; among
    10^6 uniform points with 32 neighbours 1.3 to 1.5 ms instead of 2.8.
    """
    shape = tile_shape(batch.rows, problem.features.shape[1])
    compiled = aggregate_tiles(shape.channels, shape.warps, kernel, reduce)
    sparse = mark_sparse(launch, sorted_queries, batch, searched, problem.radius)
    values = sorted_queries, batch, searched, problem, sparse
    launch(compiled, shape.dim, shape.searches, *values, block_dim=shape.block)
    if sparse is not None:
        launch_sparse(launch, sorted_queries, batch, searched, problem, sparse, kernel, reduce)


@functools.cache
def aggregate_tiles(channels: int, warps: int, kernel: str, reduce: str) -> wp.Kernel:
    """Weights of the reference points near each query, and the weighted sum of their features."""
    SearchedStruct = searched_struct(torch.float32)
    ProblemStruct = problem_struct(torch.float32, torch.float32)
    load_point, _, row_of = packed_point(torch.float32)
    tile, least_of_block, write_rows = sum_tiles(channels, warps, kernel, reduce)
    State, reserve = tile.State, tile.reserve
    search = tile_search(tile, warps)
    lane = lanes(LANES).lane
    rate_of, *_ = weight_functions(kernel, torch.float32)
    careful, relative = is_careful(kernel), is_relative(kernel, reduce)
    unit = 1.0 / math.log(2.0)

    @wp.kernel(**OPTIONS, launch_bounds=(LANES * warps, WARPS_AT_HAND // warps))
    def aggregate(
        searches: int,
        sorted_queries: wp.array2d(dtype=wp.float32),
        batch: BatchStruct,
        searched: SearchedStruct,
        problem: ProblemStruct,
        sparse: wp.array(dtype=wp.int32),
    ):
        block, _ = wp.tid()
        if sparse and sparse[block / searches] != 0:
            return
        task = SumTask()
        task.chunk = block % searches
        task.values = problem.features
        task.limit = problem.limit
        at = block / searches * LANES + lane()
        q = wp.vec3f(float(wp.nan))
        query = int(-1)
        if at < batch.rows:  # the last block may have fewer points than lanes
            point = load_point(sorted_queries, at)
            q = wp.vec3f(point[0], point[1], point[2])
            query = row_of(point)
        cloud = cloud_of(wp.max(query, 0), batch)
        task.decay = rate_of(float(unit), problem.sigma[0], problem.power, problem.limit)
        # Weights of a mean are relative to a neighbour: the first that a warp meets, where they cannot
        # vanish or grow too large then, else the nearest. So one weight is 1, and its features every bit.
        state = State()
        if wp.static(relative):
            state[channels + 1] = float(wp.inf)
        base = float(wp.inf)
        task.careful = careful(problem, task.decay)
        passes = wp.where(wp.static(relative) and task.careful, 2, 1)
        for step in range(passes):
            task.seeking = step + 1 < passes
            state = search(state, q, cloud, searched, problem, task)
            base = least_of_block(state, reserve())
            if task.seeking:
                state[channels + 1] = base
        finite = wp.isfinite(q)
        aggregated, softmax = problem.aggregated, problem.softmax
        write_rows(state, reserve(), base, task.decay, query, finite, task.chunk, aggregated, softmax)

    return aggregate
