"""Kernels that build the two-level cell list of :mod:`pointproj.ops.backends.warp.cells`."""

import functools
from typing import Any, NamedTuple

import torch
import warp as wp

from pointproj.ops.backends.warp.arrivals import arrive, await_turns, completes, end_turn, fresh, take_turn
from pointproj.ops.backends.warp.boxes import bound_kernel, grid_shape_function
from pointproj.ops.backends.warp.common import (
    AXIS_BITS,
    CROWD,
    FRACTION,
    MARGIN,
    OPTIONS,
    POINTS_PER_SUBCELL,
    REALS,
    SAMPLE,
    cell_functions,
    cloud_of,
    packed_point,
    subcells_along,
)
from pointproj.ops.backends.warp.scan import points_before

INTS = wp.array(dtype=wp.int32)
INT_ROWS = wp.array2d(dtype=wp.int32)


class BuildKernels(NamedTuple):
    clear: wp.Kernel
    bound: wp.Kernel
    count: wp.Kernel
    cut: wp.Kernel
    scatter: wp.Kernel


@functools.cache
def build_kernels(dtype: torch.dtype) -> BuildKernels:
    """The kernels of the build, for positions of one dtype."""
    return BuildKernels(
        _clear_kernel(dtype),
        bound_kernel(dtype),
        _count_kernel(dtype),
        _cut_kernel(dtype),
        scatter_kernel(dtype, torch.int64),
    )


def _clear_kernel(dtype: torch.dtype) -> wp.Kernel:
    real, _ = REALS[dtype]

    @wp.kernel(**OPTIONS)
    def clear(
        counters: INTS,
        box: wp.array2d(dtype=real),
        cut: INTS,
        subframes: wp.array2d(dtype=real),
        subdims: INT_ROWS,
    ):
        i = wp.tid()
        counters[i] = 0
        if i < cut.shape[0]:
            cut[i] = 0
        if i < subdims.shape[0]:
            for column in range(6):
                subframes[i, column] = real(0.0)
            subdims[i, 0] = 0
            subdims[i, 1] = 0
        if i < box.shape[0]:
            for axis in range(6):
                box[i, axis] = real(wp.inf)
                box[i, axis + 6] = real(0.0)
            box[i, 12] = real(0.0)

    return clear


def _count_kernel(dtype: torch.dtype) -> wp.Kernel:
    """Count the points in the cells of each cloud's grid, and number the crowded cells.

    Of each point it keeps cell and rank of arrival there; points that are not finite are in the last cell.
    """
    real, vec3 = REALS[dtype]
    inverse, _, low_of, edge_of, cell_at, _ = cell_functions(dtype)

    @wp.kernel(**OPTIONS)
    def count(
        points: wp.array(dtype=vec3),
        offsets: INTS,
        clouds: int,
        frames: wp.array2d(dtype=real),
        dims: INT_ROWS,
        occupancy: INTS,
        cut_count: INTS,
        cut: INTS,
        placed: INT_ROWS,
    ):
        row = wp.tid()
        p = points[row]
        cell = occupancy.shape[0] - 1
        if wp.isfinite(p):
            cloud = cloud_of(row, offsets, points.shape[0], clouds)
            shape = wp.vec3i(dims[cloud, 0], dims[cloud, 1], dims[cloud, 2])
            at = cell_at(p, low_of(frames, cloud), inverse(edge_of(frames, cloud)), shape)
            cell = dims[cloud, 3] + (at[2] * shape[1] + at[1]) * shape[0] + at[0]
        rank = arrive(occupancy, cell)
        placed[row, 0] = cell
        placed[row, 1] = rank
        if rank == CROWD - 1 and cell < cut.shape[0]:
            cut[cell] = wp.atomic_add(cut_count, 0, 1)

    return count


@functools.cache
def _extent_of_sample(dtype: torch.dtype) -> Any:
    """Where a sample of a crowd lies in its cell: ``add`` a point to it, then ``choose`` the sub-cells.

    The extent is in FRACTIONs of the cell; its lowest numbers are counted from above.
    """
    real, vec3 = REALS[dtype]
    *_, cell_span = cell_functions(dtype)
    grid_shape = grid_shape_function(dtype)
    frame_rows = wp.array2d(dtype=real)
    top = int(FRACTION) - 1

    @wp.func
    def add(
        extent: INT_ROWS, crowd: int, p: vec3, at: wp.vec3i, frames: frame_rows, dims: INT_ROWS, cloud: int
    ):
        for axis in range(3):
            low, high = cell_span(frames, cloud, axis, at[axis], dims[cloud, axis])
            t = real(0.0)
            if high > low:
                t = wp.clamp((p[axis] - low) / (high - low), real(0.0), real(1.0))
            q = wp.min(int(t * real(FRACTION)), top)
            wp.atomic_max(extent, crowd, axis, top - q)
            wp.atomic_max(extent, crowd, axis + 3, q)

    @wp.func
    def choose(
        extent: INT_ROWS,
        crowd: int,
        size: int,
        at: wp.vec3i,
        frames: frame_rows,
        dims: INT_ROWS,
        cloud: int,
        subframes: frame_rows,
    ):
        """Write the frame of a crowd's sub-cells; returns how many there are along each axis."""
        low = vec3()
        width = vec3()
        for axis in range(3):
            cell_low, cell_high = cell_span(frames, cloud, axis, at[axis], dims[cloud, axis])
            begin = real(top - fresh(extent, crowd, axis)) / real(FRACTION)
            end = real(fresh(extent, crowd, axis + 3) + 1) / real(FRACTION)
            margin = wp.max(end - begin, real(0.0)) * real(MARGIN)
            begin = wp.max(begin - margin, real(0.0))
            end = wp.min(end + margin, real(1.0))
            if begin >= end:  # no point was sampled
                begin = real(0.0)
                end = real(1.0)
            low[axis] = cell_low + (cell_high - cell_low) * begin
            width[axis] = (cell_high - cell_low) * (end - begin)
        shape = grid_shape(width, size / POINTS_PER_SUBCELL)
        for axis in range(3):
            shape[axis] = wp.min(shape[axis], (1 << AXIS_BITS) - 1)
            subframes[crowd, axis] = low[axis]
            subframes[crowd, axis + 3] = width[axis] / real(shape[axis])
        return shape

    return add, choose


def _cut_kernel(dtype: torch.dtype) -> wp.Kernel:
    """Choose the sub-cells of each crowd, by a sample of its points: the last of them to come does it.

    Then find the sub-cell of each point in a crowd, and its rank of arrival there. So there are two threads
    for each point, in whole blocks, and the second half waits for the first.
    """
    real, vec3 = REALS[dtype]
    inverse, _, low_of, edge_of, cell_at, _ = cell_functions(dtype)
    add, choose = _extent_of_sample(dtype)
    frame_rows = wp.array2d(dtype=real)

    @wp.func
    def cut(
        row: int,
        p: vec3,
        crowd: int,
        size: int,
        cloud: int,
        frames: frame_rows,
        dims: INT_ROWS,
        extent: INT_ROWS,
        arrived: INTS,
        cells: int,
        subcell_count: INTS,
        subframes: frame_rows,
        subdims: INT_ROWS,
    ):
        shape = wp.vec3i(dims[cloud, 0], dims[cloud, 1], dims[cloud, 2])
        at = cell_at(p, low_of(frames, cloud), inverse(edge_of(frames, cloud)), shape)
        # By row, not by arrival: the same points give the same cells.
        scattered = int((wp.uint32(row) * wp.uint32(1640531527)) >> wp.uint32(8))
        if scattered % size < SAMPLE:
            add(extent, crowd, p, at, frames, dims, cloud)
        if completes(arrived, crowd, size):
            sub = choose(extent, crowd, size, at, frames, dims, cloud, subframes)
            subdims[crowd, 0] = sub[0] | (sub[1] << AXIS_BITS) | (sub[2] << (2 * AXIS_BITS))
            subdims[crowd, 1] = cells + wp.atomic_add(subcell_count, 0, sub[0] * sub[1] * sub[2])

    @wp.func
    def place(
        row: int,
        p: vec3,
        crowd: int,
        subframes: frame_rows,
        subdims: INT_ROWS,
        occupancy: INTS,
        placed: INT_ROWS,
    ):
        shape = subcells_along(subdims[crowd, 0])
        at = cell_at(p, low_of(subframes, crowd), inverse(edge_of(subframes, crowd)), shape)
        subcell = subdims[crowd, 1] + (at[2] * shape[1] + at[1]) * shape[0] + at[0]
        placed[row, 0] = subcell
        placed[row, 1] = arrive(occupancy, subcell)

    @wp.kernel(**OPTIONS)
    def cut_crowds(
        points: wp.array(dtype=vec3),
        offsets: INTS,
        clouds: int,
        frames: frame_rows,
        dims: INT_ROWS,
        occupancy: INTS,
        cut_count: INTS,
        cells_cut: INTS,
        placed: INT_ROWS,
        turns: INTS,
        half: int,
        extent: INT_ROWS,
        arrived: INTS,
        subcell_count: INTS,
        subframes: frame_rows,
        subdims: INT_ROWS,
    ):
        if cut_count[0] == 0:
            return
        cells = cells_cut.shape[0]
        number = take_turn(turns)
        row = number % half
        cell = cells
        if row < points.shape[0]:
            cell = placed[row, 0]
        crowded = cell < cells and occupancy[wp.min(cell, cells - 1)] >= CROWD
        if number < half:
            if crowded:
                p = points[row]
                size = occupancy[cell]
                crowd = cells_cut[cell]
                cloud = cloud_of(row, offsets, points.shape[0], clouds)
                cut(
                    row,
                    p,
                    crowd,
                    size,
                    cloud,
                    frames,
                    dims,
                    extent,
                    arrived,
                    cells,
                    subcell_count,
                    subframes,
                    subdims,
                )
            end_turn(turns)
        else:
            await_turns(turns, half)
            if crowded:
                place(row, points[row], cells_cut[cell], subframes, subdims, occupancy, placed)

    return cut_crowds


@functools.cache
def scatter_kernel(dtype: torch.dtype, sums: torch.dtype) -> Any:
    """Move each point to its place in the order of the cells; then those of another set, if there is one."""
    real, vec3 = REALS[dtype]
    _, store_point, _ = packed_point(dtype)

    @wp.kernel(**OPTIONS)
    def scatter(
        points: wp.array(dtype=vec3),
        others: wp.array(dtype=vec3),
        placed: INT_ROWS,
        start: wp.array(dtype=wp.dtype_from_torch(sums)),
        sorted_points: wp.array2d(dtype=real),
    ):
        i = wp.tid()
        at = points_before(start[placed[i, 0]]) + placed[i, 1]
        if i < points.shape[0]:
            store_point(sorted_points, at, points[i], i)
        else:
            store_point(sorted_points, at, others[i - points.shape[0]], i - points.shape[0])

    return scatter
