"""The boxes around clouds, and the grids that divide them into cells."""

import functools
from typing import Any

import torch
import warp as wp
from torch import Tensor

from pointproj.ops.backends.warp.common import OPTIONS, REALS, BatchStruct, cloud_of, first_row_of
from pointproj.ops.backends.warp.counters import completes, fresh
from pointproj.ops.backends.warp.grids import cell_list_struct
from pointproj.ops.backends.warp.lanes import lanes

AT_ONCE = 16  # points that a thread reads before it looks at the first


def bound_threads(points: Tensor) -> int:
    """So many that a GPU warp, or a thread of a CPU, gets 512 points or more: few atomics collide then."""
    return max(1, min(points.shape[0] // 512, 2**11)) * (32 if points.is_cuda else 1)


@functools.cache
def build_struct(dtype: torch.dtype) -> Any:
    """What the kernels of the build work with, and no search reads."""
    real, _ = REALS[dtype]

    @wp.struct
    class BuildStruct:
        box: wp.array2d(dtype=real)  # (clouds, 13): corners, sums of the corners of groups; number of groups
        placed: wp.array2d(dtype=wp.int32)  # (N, 2): cell or sub-cell of each point, and its rank in there
        occupancy: wp.array(dtype=wp.int32)  # points in each cell and sub-cell
        extent: wp.array2d(dtype=wp.int32)  # (subgrids, 6): where a sample of each dense cell lies
        arrived: wp.array(dtype=wp.int32)  # points of each dense cell that have been looked at
        threads_arrived: wp.array(dtype=wp.int32)
        dense_count: wp.array(dtype=wp.int32)
        subcell_count: wp.array(dtype=wp.int32)
        tickets: wp.array(dtype=wp.int32)

    return BuildStruct


# Floats of one sign are ordered as their bits are: one atomic, where Warp's own compares and swaps in a loop.
_LOWER = """
    char* first = reinterpret_cast<char*>(table.data) + row * table.strides[0];
    {real}* at = reinterpret_cast<{real}*>(first) + column;
#if defined(__CUDA_ARCH__)
    const {signed} bits = {bits}(value);  // their sign, not that of the value: -0 counts among the negative
    if (bits >= 0) atomicMin(reinterpret_cast<{signed}*>(at), bits);
    else atomicMax(reinterpret_cast<unsigned {signed}*>(at), static_cast<unsigned {signed}>(bits));
#else
    if (value < *at) *at = value;
#endif
"""
_LOWER_NAMES = {
    torch.float32: {"real": "float", "signed": "int", "bits": "__float_as_int"},
    torch.float64: {"real": "double", "signed": "long long", "bits": "__double_as_longlong"},
}


@functools.cache
def atomic_lower(dtype: torch.dtype) -> wp.Function:
    """``lower(table, row, column, value)``: lower an entry of a table to a value."""
    real, _ = REALS[dtype]

    @wp.func_native(_LOWER.format(**_LOWER_NAMES[dtype]))
    def lower(table: wp.array2d(dtype=real), row: int, column: int, value: real): ...

    return lower


@functools.cache
def grid_shape_function(dtype: torch.dtype) -> wp.Function:
    real, vec3 = REALS[dtype]

    @wp.func
    def grid_shape(extent: vec3, budget: int):
        """Cells along each axis, near cubes, fewer than ``budget`` in all.

        An axis thinner than the edge that all axes together suggest gets one cell, and the others share;
        at most three axes can drop out, so the fourth round is final.
        """
        longest = wp.max(extent)
        shape = wp.vec3i(1, 1, 1)
        if longest > real(0.0):
            width = extent / longest
            share = real(budget) * real(0.9999)  # so that rounding cannot exceed the budget
            edge = real(1.0e-6)
            for _ in range(4):
                axes = int(0)
                volume = real(1.0) / share
                for axis in range(3):
                    if width[axis] > edge:
                        axes += 1
                        volume *= width[axis]
                if axes == 3:
                    edge = wp.max(edge, wp.cbrt(volume))
                if axes == 2:
                    edge = wp.max(edge, wp.sqrt(volume))
                if axes == 1:
                    edge = wp.max(edge, volume)
            for axis in range(3):
                if width[axis] > edge:
                    shape[axis] = int(width[axis] / edge)
        return shape

    return grid_shape


@functools.cache
def _grid_chooser(dtype: torch.dtype) -> wp.Function:
    real, vec3 = REALS[dtype]
    grid_shape = grid_shape_function(dtype)
    CellListStruct = cell_list_struct(dtype)

    @wp.func
    def choose_grid(
        cloud: int, batch: BatchStruct, density: int, box: wp.array2d(dtype=real), cells: CellListStruct
    ):
        """Divide a cloud's box into about ``density`` cells for two points."""
        begin = first_row_of(cloud, batch)
        budget = density * (first_row_of(cloud + 1, batch) - begin) / 2 + 1
        groups = fresh(box, cloud, 12)
        low = vec3()
        high = vec3()
        for axis in range(3):
            low[axis] = fresh(box, cloud, axis)
            high[axis] = -fresh(box, cloud, axis + 3)
            cells.frames[cloud, axis + 6] = low[axis]
            cells.frames[cloud, axis + 9] = high[axis]
            if groups > real(1.0):
                low[axis] = wp.max(low[axis], fresh(box, cloud, axis + 6) / groups)
                high[axis] = wp.min(high[axis], -fresh(box, cloud, axis + 9) / groups)
        extent = vec3()
        if low[0] < real(wp.inf):
            extent = wp.max(high - low, vec3())
        shape = grid_shape(extent, budget)
        for axis in range(3):
            cells.frames[cloud, axis] = low[axis]
            cells.frames[cloud, axis + 3] = extent[axis] / real(shape[axis])
            cells.dims[cloud, axis] = shape[axis]
        cells.dims[cloud, 3] = density * begin / 2 + cloud

    return choose_grid


@functools.cache
def bound_kernel(dtype: torch.dtype, lane_count: int) -> wp.Kernel:
    """Lowest corner and negated highest corner of each cloud's finite points; from them, its grid.

    Of a single cloud also the mean corners of groups of 512: a box that holds most of it, but no outliers.
    The lanes are 32 on a GPU, 1 on a CPU.
    """
    real, vec3 = REALS[dtype]
    CellListStruct, BuildStruct = cell_list_struct(dtype), build_struct(dtype)
    lower = atomic_lower(dtype)
    choose_grid = _grid_chooser(dtype)
    group = lanes(lane_count)
    lane, minimum, ballot = group.lane, group.minimum, group.ballot
    boxes = wp.array2d(dtype=real)
    Points = wp.types.matrix(shape=(AT_ONCE, 3), dtype=real)

    @wp.func
    def keep(box: boxes, cloud: int, low: vec3, high: vec3):
        for axis in range(3):
            if low[axis] < box[cloud, axis]:
                lower(box, cloud, axis, low[axis])
            if high[axis] < box[cloud, axis + 3]:
                lower(box, cloud, axis + 3, high[axis])

    @wp.func
    def keep_one(box: boxes, column: int, low: vec3, high: vec3):
        """What a group adds to one column of the box of a single cloud."""
        axis = column % 3
        value = wp.where(axis == 0, low[0], wp.where(axis == 1, low[1], low[2]))
        if column % 6 >= 3:
            value = wp.where(axis == 0, high[0], wp.where(axis == 1, high[1], high[2]))
        if column < 6:
            lower(box, 0, column, value)
        else:
            wp.atomic_add(box, 0, column, wp.where(column < 12, value, real(1.0)))

    @wp.kernel(**OPTIONS)
    def bound(
        points: wp.array(dtype=vec3),
        batch: BatchStruct,
        threads: int,
        density: int,
        cells: CellListStruct,
        build: BuildStruct,
    ):
        thread = wp.tid()
        rows = batch.rows
        low = vec3(real(wp.inf))
        high = vec3(real(wp.inf))
        cloud = int(0)
        row = int(thread)
        while batch.count == 1 and row < rows:
            several = Points()
            for i in range(AT_ONCE):  # all on their way before the first is looked at
                several[i] = points[wp.min(row + i * threads, rows - 1)]
            for i in range(AT_ONCE):
                p = several[i]
                finite = wp.dot(p - p, vec3(real(1.0))) == real(0.0)
                low = wp.where(finite, wp.min(low, p), low)
                high = wp.where(finite, wp.min(high, -p), high)
            row += AT_ONCE * threads
        while row < rows:
            p = points[row]
            if wp.isfinite(p):
                now = cloud_of(row, batch)
                if now != cloud:
                    keep(build.box, cloud, low, high)
                    low = vec3(real(wp.inf))
                    high = vec3(real(wp.inf))
                    cloud = now
                low = wp.min(low, p)
                high = wp.min(high, -p)
            row += threads
        if batch.count > 1:
            keep(build.box, cloud, low, high)
        else:
            for axis in range(3):
                low[axis] = minimum(low[axis])
                high[axis] = minimum(high[axis])
            if low[0] < real(wp.inf):
                for column in range(lane(), 13, lane_count):  # each thread has one
                    keep_one(build.box, column, low, high)
        if ballot(completes(build.threads_arrived, 0, threads)) != 0:  # the last ones
            for other in range(lane(), batch.count, lane_count):
                choose_grid(other, batch, density, build.box, cells)

    return bound
