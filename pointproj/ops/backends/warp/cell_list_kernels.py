"""Kernels that build the two-level cell list of :mod:`pointproj.ops.backends.warp.cell_list`."""

import functools
from typing import Any, NamedTuple

import torch
import warp as wp

from pointproj.ops.backends.warp.bounds import bound_kernel, build_struct, grid_shape_function
from pointproj.ops.backends.warp.common import (
    AXIS_BITS,
    DENSE,
    FRACTION,
    MARGIN,
    OPTIONS,
    POINTS_PER_SUBCELL,
    REALS,
    SAMPLE,
    BatchStruct,
    cell_functions,
    cloud_of,
    packed_point,
    subcells_along,
)
from pointproj.ops.backends.warp.counters import (
    arrive,
    await_tickets,
    completes,
    finish_ticket,
    fresh,
    take_ticket,
)
from pointproj.ops.backends.warp.grids import cell_list_struct
from pointproj.ops.backends.warp.scan import points_before


class BuildKernels(NamedTuple):
    clear: wp.Kernel
    bound: wp.Kernel
    count: wp.Kernel
    subdivide: wp.Kernel
    scatter: wp.Kernel


@functools.cache
def build_kernels(dtype: torch.dtype, lane_count: int) -> BuildKernels:
    """The kernels of the build, for positions of one dtype; 32 lanes on a GPU, 1 on a CPU."""
    return BuildKernels(
        _clear_kernel(dtype),
        bound_kernel(dtype, lane_count),
        _count_kernel(dtype),
        _subdivide_kernel(dtype),
        scatter_kernel(dtype, torch.int64),
    )


def _clear_kernel(dtype: torch.dtype) -> wp.Kernel:
    real, _ = REALS[dtype]
    CellListStruct, BuildStruct = cell_list_struct(dtype), build_struct(dtype)

    @wp.kernel(**OPTIONS)
    def clear(counters: wp.array(dtype=wp.int32), cells: CellListStruct, build: BuildStruct):
        """``counters`` is the memory of all counters of the build."""
        i = wp.tid()
        counters[i] = 0
        if i < cells.subgrid.shape[0]:
            cells.subgrid[i] = 0
        if i < cells.subdims.shape[0]:
            for column in range(6):
                cells.subframes[i, column] = real(0.0)
            cells.subdims[i, 0] = 0
            cells.subdims[i, 1] = 0
        if i < build.box.shape[0]:
            for axis in range(6):
                build.box[i, axis] = real(wp.inf)
                build.box[i, axis + 6] = real(0.0)
            build.box[i, 12] = real(0.0)

    return clear


@functools.cache
def _cell_finder(dtype: torch.dtype) -> Any:
    """Which cell of its cloud's grid a point is in, and which sub-cell of a dense cell."""
    _, vec3 = REALS[dtype]
    CellListStruct = cell_list_struct(dtype)
    inverse, _, low_of, edge_of, cell_at, _ = cell_functions(dtype)

    @wp.func
    def cell_in_cloud(p: vec3, cells: CellListStruct, cloud: int):
        shape = wp.vec3i(cells.dims[cloud, 0], cells.dims[cloud, 1], cells.dims[cloud, 2])
        return cell_at(p, low_of(cells.frames, cloud), inverse(edge_of(cells.frames, cloud)), shape), shape

    @wp.func
    def subcell_in(p: vec3, cells: CellListStruct, subgrid: int):
        shape = subcells_along(cells.subdims[subgrid, 0])
        low = low_of(cells.subframes, subgrid)
        at = cell_at(p, low, inverse(edge_of(cells.subframes, subgrid)), shape)
        return cells.subdims[subgrid, 1] + (at[2] * shape[1] + at[1]) * shape[0] + at[0]

    return cell_in_cloud, subcell_in


def _count_kernel(dtype: torch.dtype) -> wp.Kernel:
    """Count the points in the cells of each cloud's grid, and number the dense cells.

    Of each point it keeps cell and rank of arrival there; points that are not finite are in the last cell.
    """
    _, vec3 = REALS[dtype]
    CellListStruct, BuildStruct = cell_list_struct(dtype), build_struct(dtype)
    cell_in_cloud, _ = _cell_finder(dtype)

    @wp.kernel(**OPTIONS)
    def count(points: wp.array(dtype=vec3), batch: BatchStruct, cells: CellListStruct, build: BuildStruct):
        row = wp.tid()
        p = points[row]
        cell = build.occupancy.shape[0] - 1
        if wp.isfinite(p):
            cloud = cloud_of(row, batch)
            at, shape = cell_in_cloud(p, cells, cloud)
            cell = cells.dims[cloud, 3] + (at[2] * shape[1] + at[1]) * shape[0] + at[0]
        rank = arrive(build.occupancy, cell)
        build.placed[row, 0] = cell
        build.placed[row, 1] = rank
        if rank == DENSE - 1 and cell < cells.subgrid.shape[0]:
            cells.subgrid[cell] = wp.atomic_add(build.dense_count, 0, 1)

    return count


@functools.cache
def _extent_of_sample(dtype: torch.dtype) -> Any:
    """Where a sample of a dense cell lies in it: ``add`` a point to it, then ``choose`` the sub-cells.

    The extent is in FRACTIONs of the cell; its lowest numbers are counted from above.
    """
    real, vec3 = REALS[dtype]
    CellListStruct = cell_list_struct(dtype)
    *_, cell_span = cell_functions(dtype)
    grid_shape = grid_shape_function(dtype)
    extents = wp.array2d(dtype=wp.int32)
    top = int(FRACTION) - 1

    @wp.func
    def add(extent: extents, subgrid: int, p: vec3, at: wp.vec3i, cells: CellListStruct, cloud: int):
        for axis in range(3):
            low, high = cell_span(cells.frames, cloud, axis, at[axis], cells.dims[cloud, axis])
            t = real(0.0)
            if high > low:
                t = wp.clamp((p[axis] - low) / (high - low), real(0.0), real(1.0))
            q = wp.min(int(t * real(FRACTION)), top)
            wp.atomic_max(extent, subgrid, axis, top - q)
            wp.atomic_max(extent, subgrid, axis + 3, q)

    @wp.func
    def choose(extent: extents, subgrid: int, size: int, at: wp.vec3i, cells: CellListStruct, cloud: int):
        """Write the frame of a dense cell's sub-cells; returns how many there are along each axis."""
        low = vec3()
        width = vec3()
        for axis in range(3):
            cell_low, cell_high = cell_span(cells.frames, cloud, axis, at[axis], cells.dims[cloud, axis])
            begin = real(top - fresh(extent, subgrid, axis)) / real(FRACTION)
            end = real(fresh(extent, subgrid, axis + 3) + 1) / real(FRACTION)
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
            cells.subframes[subgrid, axis] = low[axis]
            cells.subframes[subgrid, axis + 3] = width[axis] / real(shape[axis])
        return shape

    return add, choose


def _subdivide_kernel(dtype: torch.dtype) -> wp.Kernel:
    """Choose the sub-cells of each dense cell, by a sample of its points: the last of them to come does it.

    Then find the sub-cell of each point in a dense cell, and its rank of arrival there. So there are two
    threads for each point, in whole blocks, and the second half waits for the first.
    """
    _, vec3 = REALS[dtype]
    CellListStruct, BuildStruct = cell_list_struct(dtype), build_struct(dtype)
    cell_in_cloud, subcell_in = _cell_finder(dtype)
    add, choose = _extent_of_sample(dtype)

    @wp.func
    def choose_subcells(
        row: int,
        p: vec3,
        subgrid: int,
        size: int,
        cloud: int,
        cells: CellListStruct,
        build: BuildStruct,
    ):
        at, _shape = cell_in_cloud(p, cells, cloud)
        # By row, not by arrival: the same points give the same cells.
        scattered = int((wp.uint32(row) * wp.uint32(1640531527)) >> wp.uint32(8))
        if scattered % size < SAMPLE:
            add(build.extent, subgrid, p, at, cells, cloud)
        if completes(build.arrived, subgrid, size):
            sub = choose(build.extent, subgrid, size, at, cells, cloud)
            first = cells.subgrid.shape[0] + wp.atomic_add(build.subcell_count, 0, sub[0] * sub[1] * sub[2])
            cells.subdims[subgrid, 0] = sub[0] | (sub[1] << AXIS_BITS) | (sub[2] << (2 * AXIS_BITS))
            cells.subdims[subgrid, 1] = first

    @wp.kernel(**OPTIONS)
    def subdivide(
        points: wp.array(dtype=vec3),
        batch: BatchStruct,
        cells: CellListStruct,
        build: BuildStruct,
        half: int,
    ):
        if build.dense_count[0] == 0:
            return
        cell_count = cells.subgrid.shape[0]
        number = take_ticket(build.tickets)
        row = number % half
        cell = cell_count
        if row < batch.rows:
            cell = build.placed[row, 0]
        dense = cell < cell_count and build.occupancy[wp.min(cell, cell_count - 1)] >= DENSE
        if number < half:
            if dense:
                size = build.occupancy[cell]
                subgrid = cells.subgrid[cell]
                choose_subcells(row, points[row], subgrid, size, cloud_of(row, batch), cells, build)
            finish_ticket(build.tickets)
        else:
            await_tickets(build.tickets, half)
            if dense:
                subcell = subcell_in(points[row], cells, cells.subgrid[cell])
                build.placed[row, 0] = subcell
                build.placed[row, 1] = arrive(build.occupancy, subcell)

    return subdivide


@functools.cache
def scatter_kernel(dtype: torch.dtype, sums: torch.dtype) -> Any:
    """Move each point to its place in the order of the cells; then those of another set, if there is one."""
    real, vec3 = REALS[dtype]
    _, store_point, _ = packed_point(dtype)

    @wp.kernel(**OPTIONS)
    def scatter(
        points: wp.array(dtype=vec3),
        others: wp.array(dtype=vec3),
        placed: wp.array2d(dtype=wp.int32),
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
