"""A hash grid: cells for a known radius, in a table of fixed size that the cells of space wrap around.

Cells are equally wide wherever the points are, so no bounding box is needed and one level does for every
density. Cells that share a bucket of the table only cost a few distance tests in vain. Along x the table is
contiguous: a row of cells is one run of points, or two where it wraps.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import warp as wp
from torch import Tensor

from pointproj.ops.backends.warp.cell_list import rank_in_order
from pointproj.ops.backends.warp.cell_list_kernels import scatter_kernel
from pointproj.ops.backends.warp.cell_width import EDGE, MOST_POINTS, THREADS, edge, widen_kernel
from pointproj.ops.backends.warp.common import (
    LEAST_DISTANCE,
    OPTIONS,
    REALS,
    ROUNDINGS,
    Batch,
    BatchStruct,
    cloud_of,
)
from pointproj.ops.backends.warp.hash_table import FARTHEST, bucket_count, table_functions
from pointproj.ops.backends.warp.lanes import Lanes
from pointproj.ops.backends.warp.scan import running_sum, states_of
from pointproj.ops.backends.warp.traversal import Visitor, run_visitor
from pointproj.ops.bridge.scratch import Scratch
from pointproj.ops.bridge.warp_op import Launch, warp_op


class HashGrid(NamedTuple):
    """The table of one set of points as tensors, or of two: then the other's buckets and rows follow.

    The last bucket of each is for points that are not finite.
    """

    width: Tensor  # (sets,) real: edge of the cells
    start: Tensor  # (buckets + 1,) int32: first sorted row of each bucket
    points: Tensor  # (N, 4) real: positions, sorted, and the bits of their row in the cloud as given


class SearchedGrid(NamedTuple):
    """One set of points in a hash grid, as a search reads it; in kernels :func:`searched_struct`."""

    width: Tensor
    start: Tensor
    points: Tensor
    number: int  # of the set searched: 1 for the second of two in one table
    first_bucket: int  # of that set
    batch: Batch


class Side(NamedTuple):
    """Queries or references, and where they stand in their hash grid."""

    points: Tensor  # as given
    searched: SearchedGrid
    first_sorted: int  # among the sorted points of the grid

    @property
    def batch(self) -> Batch:
        return self.searched.batch

    def in_order(self) -> Tensor:
        """The points sorted by cell."""
        return self.searched.points[self.first_sorted : self.first_sorted + self.batch.rows]


def build_hash_grid(points: Tensor, offsets: Tensor | None, clouds: int, radius: float | Tensor) -> HashGrid:
    """Sort ``points`` (N, 3), packed clouds, for searches within about ``radius``.

    A radius that only the device knows is a tensor of one element.
    """
    known = not isinstance(radius, Tensor)
    radii = (radius, None) if known else (0.0, radius.reshape(1))
    return HashGrid(*_build(points, offsets, clouds, *radii))


def new_hash_grid(
    launch: Launch,
    points: Tensor,
    offsets: Tensor | None,
    clouds: int,
    radius: float,
    radius_on_device: Tensor | None,
) -> HashGrid:
    """The same for an operator that builds its own: that spares the call of another."""
    rows = points.shape[0]
    grid = HashGrid(*_tables(rows, bucket_count(rows, clouds), points.dtype).allocate(points.device))
    fill_hash_grid(launch, [(points, offsets)], clouds, (radius, radius_on_device), grid, rows)
    return grid


def hash_grid_specs(sets: Sequence[Tensor], clouds: int, dtype: torch.dtype) -> dict:
    """Shape and dtype of the tables of some sets of points."""
    rows = [points.shape[0] for points in sets]
    buckets = sum(bucket_count(count, clouds) for count in rows)
    return _table_specs(sum(rows), buckets, dtype, len(sets))


def _table_specs(rows: int, buckets: int, dtype: torch.dtype, sets: int) -> dict:
    return {
        "cell_width": ((sets,), dtype),
        "start": ((buckets + 1,), torch.int32),
        "sorted_points": ((rows, 4), dtype),
    }


@functools.lru_cache
def _tables(rows: int, buckets: int, dtype: torch.dtype) -> Scratch:
    return Scratch((), list(_table_specs(rows, buckets, dtype, 1).values()))


@functools.lru_cache
def _build_memory(rows: int, buckets: int) -> Scratch:
    """States of the running sum, points in each bucket, counters of :func:`widen_kernel`; then the bucket of
    each point, and its rank there.
    """
    counters = ((states_of(buckets),), torch.int64), ((buckets,), torch.int32), ((2,), torch.int32)
    return Scratch(counters, [((rows, 2), torch.int32)])


def _specs(points: Tensor, clouds: int, **_: Any) -> dict:
    return hash_grid_specs([points], clouds, points.dtype)


@warp_op("pointproj::warp_build_hash_grid", outputs=_specs, replayable=True)
def _build(
    launch: Launch,
    points: Tensor,
    offsets: Tensor | None,
    clouds: int,
    radius: float,
    radius_on_device: Tensor | None,
    *,
    cell_width: Tensor,
    start: Tensor,
    sorted_points: Tensor,
) -> None:
    grid = HashGrid(cell_width, start, sorted_points)
    fill_hash_grid(launch, [(points, offsets)], clouds, (radius, radius_on_device), grid, points.shape[0])


def fill_hash_grid(
    launch: Launch,
    sets: Sequence[tuple[Tensor, Tensor | None]],
    clouds: int,
    radius: tuple[float, Tensor | None],
    grid: HashGrid,
    all_rows: int,
) -> None:
    """Sort one or two sets of points.

    Parameters
    ----------
    sets : sequence of (points, offsets)
    radius : (float, Tensor or None)
        The tensor, of one element, is in place of the number where only the device knows it.
    all_rows : int
        Of these points and of those of the other set, if that is in a grid of its own.
    """
    (points, offsets), (others, other_offsets) = (*sets, (None, None))[:2]
    cell_width, start, sorted_points = grid
    rows, buckets = sorted_points.shape[0], start.shape[0] - 1
    counters, states, occupancy, found, placed = _build_memory(rows, buckets).allocate(points.device)
    clear = _clear_kernel(points.dtype)
    first_rows = points.shape[0]
    edges = edge(first_rows, all_rows), edge(rows - first_rows, all_rows)
    launch(clear, counters.shape[0], counters, cell_width, *radius, *edges)
    both = (
        *(points, Batch(offsets, first_rows, clouds)),
        *(others, Batch(other_offsets, rows - first_rows, clouds)),
    )
    if points.is_cuda and 0 < first_rows < rows <= MOST_POINTS and radius[1] is None:
        narrow = tuple(e == EDGE for e in edges)
        launch(widen_kernel(points.dtype), THREADS, *both, radius[0], narrow, found, cell_width)
    launch(_place_kernel(points.dtype), rows, *both, cell_width, occupancy, placed)
    running_sum(launch, occupancy, 0, states, start)
    if points.is_cuda and torch.are_deterministic_algorithms_enabled():
        rank_in_order(placed, start)
    launch(scatter_kernel(points.dtype, start.dtype), rows, points, others, placed, start, sorted_points)


@functools.cache
def _clear_kernel(dtype: torch.dtype) -> wp.Kernel:
    real, _ = REALS[dtype]
    # Widths whose reciprocals are numbers, too.
    least, most = LEAST_DISTANCE[dtype], torch.finfo(dtype).max / 4.0

    @wp.kernel(**OPTIONS)
    def clear(
        counters: wp.array(dtype=wp.int32),
        width: wp.array(dtype=real),
        radius: real,
        radius_on_device: wp.array(dtype=real),
        edge: real,
        other_edge: real,
    ):
        i = wp.tid()
        counters[i] = 0
        if i < width.shape[0]:
            if radius_on_device:
                radius = radius_on_device[0]
            width[i] = wp.clamp(radius * wp.where(i == 0, edge, other_edge), real(least), real(most))

    return clear


@functools.cache
def _place_kernel(dtype: torch.dtype) -> wp.Kernel:
    real, vec3 = REALS[dtype]
    _, table_of, axis_cell, first_bucket_of, along, last_bucket = table_functions(dtype)

    @wp.func
    def bucket_of(p: vec3, row: int, batch: BatchStruct, first_bucket: int, width: real):
        """Bucket of a point; the last of all is for points that are not finite."""
        if not wp.isfinite(p):
            return first_bucket + last_bucket(batch)
        per_unit = real(1.0) / width
        table = table_of(cloud_of(row, batch), batch, first_bucket)
        x = axis_cell(p[0], per_unit)
        y = axis_cell(p[1], per_unit)
        z = axis_cell(p[2], per_unit)
        return first_bucket_of(table, y, z) + along(table, x)

    @wp.kernel(**OPTIONS)
    def place(
        points: wp.array(dtype=vec3),
        batch: BatchStruct,
        others: wp.array(dtype=vec3),
        other_batch: BatchStruct,
        width: wp.array(dtype=real),
        occupancy: wp.array(dtype=wp.int32),
        placed: wp.array2d(dtype=wp.int32),
    ):
        """Bucket of each point and its rank of arrival there."""
        i = wp.tid()
        rows = batch.rows
        at = int(0)
        if i < rows:
            at = bucket_of(points[i], i, batch, 0, width[0])
        else:
            row = i - rows
            first_bucket = last_bucket(batch) + 1
            at = bucket_of(others[row], row, other_batch, first_bucket, width[1])
        placed[i, 0] = at
        placed[i, 1] = wp.atomic_add(occupancy, at, 1)

    return place


@functools.cache
def searched_struct(dtype: torch.dtype) -> Any:
    """:class:`SearchedGrid` inside a kernel."""
    real, _ = REALS[dtype]

    @wp.struct
    class SearchedStruct:
        width: wp.array(dtype=real)
        start: wp.array(dtype=wp.int32)
        points: wp.array2d(dtype=real)
        number: int
        first_bucket: int
        batch: BatchStruct

    return SearchedStruct


_QUICK_ROOT = """
#if defined(__CUDA_ARCH__)
    float root;
    asm("sqrt.approx.f32 %0, %1;" : "=f"(root) : "f"(x));
    return root;
#else
    return sqrtf(x);
#endif
"""


@wp.func_native(_QUICK_ROOT)
def quick_root(x: wp.float32) -> wp.float32:
    """Right up to two rounding errors, which the slack of a search covers many times."""
    ...


@wp.func
def quick_root(x: wp.float64):
    return wp.sqrt(x)


def ball_search(dtype: torch.dtype, lanes: Lanes, visitor: Visitor) -> wp.Function:
    """``search(state, q, searched, data, cloud, radius) -> state``: meet everything within the radius.

    The visitor sees some points that are farther away; of a ``q`` that is not finite none.
    """
    real, vec3 = REALS[dtype]
    SearchedStruct, State, Data = searched_struct(dtype), visitor.State, visitor.Data
    Table, table_of, axis_cell, first_bucket_of, along, _ = table_functions(dtype)
    visit_runs = run_visitor(dtype, lanes, visitor)
    unit, least, most = torch.finfo(dtype).eps * ROUNDINGS, LEAST_DISTANCE[dtype], torch.finfo(dtype).max
    count, lane, any_item = lanes.count, lanes.lane, lanes.any_item

    @wp.func
    def gap(x: real, cell: int, width: real, slack: real):
        """Distance along an axis from x to a cell's slab, never too large."""
        x = wp.clamp(x, real(-FARTHEST) * width, real(FARTHEST) * width)
        low = real(cell) * width
        return wp.max(wp.max(low - x, x - (low + width)) - slack, real(0.0))

    @wp.struct
    class Ball:
        table: Table
        first: wp.vec3i  # of the cells that the ball may touch
        size: wp.vec3i
        whole: bool  # the ball is as wide as the table: no row can be left out by its distance
        split: int  # 1 where rows wrap, and come in two parts
        width: real
        slack: real
        limit: real  # squared distance

    @wp.func
    def ball_around(q: vec3, searched: SearchedStruct, cloud: int, radius: real):
        ball = Ball()
        ball.table = table_of(cloud, searched.batch, searched.first_bucket)
        ball.slack = real(unit) * (wp.max(wp.abs(q)) + radius) + real(least)
        reach = radius + ball.slack
        # A number, so that what is left of it is one: no square of a neighbour's distance overflows.
        ball.limit = wp.min(reach * reach, real(most))
        ball.width = searched.width[searched.number]
        per_unit = real(1.0) / ball.width
        for axis in range(3):
            ball.first[axis] = axis_cell(q[axis] - radius - ball.slack, per_unit)
            ball.size[axis] = axis_cell(q[axis] + radius + ball.slack, per_unit) - ball.first[axis] + 1
            if ball.size[axis] >= (1 << ball.table.bits[axis]):
                ball.size[axis] = 1 << ball.table.bits[axis]
                ball.whole = True
        ball.split = wp.where(
            along(ball.table, ball.first[0]) + ball.size[0] > (1 << ball.table.bits[0]), 1, 0
        )
        return ball

    @wp.func
    def run_of(q: vec3, ball: Ball, start: wp.array(dtype=wp.int32), row_part: int, row_z: int):
        """First point and number of points of a row of cells, or part of it, that the ball touches."""
        per_unit = real(1.0) / ball.width
        buckets = 1 << ball.table.bits[0]
        y = ball.first[1] + (row_part >> ball.split)
        z = ball.first[2] + row_z
        across_y = gap(q[1], y, ball.width, ball.slack)
        across_z = gap(q[2], z, ball.width, ball.slack)
        across = across_y * across_y + across_z * across_z
        begin_x = along(ball.table, ball.first[0])
        x0 = begin_x
        x1 = begin_x + ball.size[0]
        if not ball.whole:  # only what the ball touches in this row
            half = quick_root(wp.max(ball.limit - across, real(0.0))) + ball.slack
            x0 += wp.max(axis_cell(q[0] - half, per_unit) - ball.first[0], 0)
            x1 = wp.min(x1, begin_x + axis_cell(q[0] + half, per_unit) - ball.first[0] + 1)
        if (row_part & ball.split) == 0:
            x1 = wp.min(x1, buckets)
        else:
            x0 = wp.max(x0 - buckets, 0)
            x1 -= buckets
        begin = int(0)
        run = int(0)
        if (ball.whole or across <= ball.limit) and x0 < x1:
            bucket = first_bucket_of(ball.table, y, z)
            begin = start[bucket + x0]
            run = start[bucket + x1] - begin
        return begin, run

    @wp.func
    def search(state: State, q: vec3, searched: SearchedStruct, data: Data, cloud: int, radius: real):
        searches = wp.isfinite(q)
        if not searches:
            q = vec3()
        ball = ball_around(q, searched, cloud, radius)
        along_y = ball.size[1] << ball.split
        rows = wp.where(searches, along_y * ball.size[2], 0)
        row_part = int(lane())
        row_z = int(0)
        begun = int(0)
        begin = int(0)
        run = int(0)
        # Each row is looked up while the points of the one before are visited.
        while any_item(begun < rows + count):
            next_begin = int(0)
            next_run = int(0)
            while row_part >= along_y:
                row_part -= along_y
                row_z += 1
            if begun < rows and row_z < ball.size[2]:
                next_begin, next_run = run_of(q, ball, searched.start, row_part, row_z)
            if begun > 0:
                state = visit_runs(state, q, searched.points, data, begin, run)
            begin = next_begin
            run = next_run
            row_part += count
            begun += count
        return state

    return search
