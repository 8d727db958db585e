"""Kernels that build the two-level cell list of :mod:`pointproj.backends.warp.cells`."""

import functools
from typing import Any, NamedTuple

import torch
import warp as wp

from pointproj.backends.warp.boxes import bound_kernel
from pointproj.backends.warp.common import (
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
    first_row_of,
    packed_point,
)

INTS = wp.array(dtype=wp.int32)
INT_ROWS = wp.array2d(dtype=wp.int32)


class BuildKernels(NamedTuple):
    clear: wp.Kernel
    bound: wp.Kernel
    count: wp.Kernel
    sample: wp.Kernel
    cut: wp.Kernel
    place: wp.Kernel
    scatter: wp.Kernel


@functools.cache
def build_kernels(dtype: torch.dtype) -> BuildKernels:
    """The kernels of the build, for positions of one dtype."""
    return BuildKernels(
        _clear_kernel(dtype),
        bound_kernel(dtype),
        _count_kernel(dtype),
        _sample_kernel(dtype),
        _cut_kernel(dtype),
        _place_kernel(dtype),
        scatter_kernel(dtype),
    )


def _clear_kernel(dtype: torch.dtype) -> wp.Kernel:
    real, _ = REALS[dtype]

    @wp.kernel(**OPTIONS)
    def clear(counters: INTS, box: wp.array2d(dtype=real), cut: INTS, shift: INTS, start: INTS):
        i = wp.tid()
        counters[i] = 0
        if i < cut.shape[0]:
            cut[i] = 0
        if i == 0:
            shift[0] = 0
            start[0] = 0
        if i < box.shape[0]:
            for axis in range(6):
                box[i, axis] = real(wp.inf)
                box[i, axis + 6] = real(0.0)
            box[i, 12] = real(0.0)

    return clear


@functools.cache
def _grid_shape(dtype: torch.dtype) -> wp.Function:
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
def _home(dtype: torch.dtype) -> wp.Function:
    real, vec3 = REALS[dtype]
    inverse, _, low_of, edge_of, cell_at, _ = cell_functions(dtype)

    @wp.func
    def home(p: vec3, cloud: int, frames: wp.array2d(dtype=real), dims: INT_ROWS):
        """Number of a point's cell among the cells of all clouds."""
        shape = wp.vec3i(dims[cloud, 0], dims[cloud, 1], dims[cloud, 2])
        at = cell_at(p, low_of(frames, cloud), inverse(edge_of(frames, cloud)), shape)
        return dims[cloud, 3] + (at[2] * shape[1] + at[1]) * shape[0] + at[0]

    return home


@wp.func_native(f"""
#if defined(__CUDA_ARCH__)
    // Threads of a warp that meet in a cell count together: a dense cluster is one address for millions.
    const unsigned same = __match_any_sync(__activemask(), cell);
    if ((threadIdx.x & 31) != __ffs(same) - 1) return false;
    const int size = __popc(same);
    const int before = atomicAdd(occupancy.data + cell, size);
#else
    const int size = 1;
    const int before = occupancy.data[cell]++;
#endif
    return before < {CROWD} && before + size >= {CROWD};
""")
def joins_crowd(occupancy: INTS, cell: int) -> bool:
    """Count a point in; true for the one that makes the cell a crowd."""
    ...


def _count_kernel(dtype: torch.dtype) -> wp.Kernel:
    """Choose each cloud's grid, count the points in its cells, and list the crowded ones."""
    real, vec3 = REALS[dtype]
    grid_shape = _grid_shape(dtype)
    inverse, _, _, _, cell_at, _ = cell_functions(dtype)

    @wp.kernel(**OPTIONS)
    def count(
        points: wp.array(dtype=vec3),
        offsets: INTS,
        clouds: int,
        density: int,
        box: wp.array2d(dtype=real),
        frames: wp.array2d(dtype=real),
        dims: INT_ROWS,
        occupancy: INTS,
        cut_count: INTS,
        cut: INTS,
        cut_cells: INTS,
    ):
        i = wp.tid()
        rows = points.shape[0]
        counts = bool(False)
        cloud = int(0)
        if i < rows:
            counts = wp.isfinite(points[i])
            cloud = cloud_of(i, offsets, rows, clouds)
        writes = i < clouds
        # A thread for a cloud's grid is a thread for a point too: each works out the grid that it needs.
        for task in range(2):
            owner = wp.where(task == 0, i, cloud)
            if (task == 0 and writes) or (task == 1 and counts):
                begin = first_row_of(owner, offsets, rows, clouds)
                budget = density * (first_row_of(owner + 1, offsets, rows, clouds) - begin) / 2 + 1
                low = vec3(box[owner, 0], box[owner, 1], box[owner, 2])
                high = vec3(-box[owner, 3], -box[owner, 4], -box[owner, 5])
                if task == 0:
                    for axis in range(3):
                        frames[owner, axis + 6] = low[axis]
                        frames[owner, axis + 9] = high[axis]
                groups = box[owner, 12]
                if groups > real(1.0):
                    for axis in range(3):
                        low[axis] = wp.max(low[axis], box[owner, axis + 6] / groups)
                        high[axis] = wp.min(high[axis], -box[owner, axis + 9] / groups)
                extent = vec3()
                if low[0] < real(wp.inf):
                    extent = wp.max(high - low, vec3())
                shape = grid_shape(extent, budget)
                edge = vec3()
                for axis in range(3):
                    edge[axis] = extent[axis] / real(shape[axis])
                base = density * begin / 2 + owner
                if task == 0:
                    for axis in range(3):
                        frames[owner, axis] = low[axis]
                        frames[owner, axis + 3] = edge[axis]
                        dims[owner, axis] = shape[axis]
                    dims[owner, 3] = base
                else:
                    at = cell_at(points[i], low, inverse(edge), shape)
                    cell = base + (at[2] * shape[1] + at[1]) * shape[0] + at[0]
                    if joins_crowd(occupancy, cell):
                        crowd = wp.atomic_add(cut_count, 0, 1)
                        cut[cell] = crowd
                        cut_cells[crowd] = cell

    return count


def _sample_kernel(dtype: torch.dtype) -> wp.Kernel:
    """Extent of a sample of each crowd, in FRACTIONs of its cell; the lowest ones counted from above."""
    real, vec3 = REALS[dtype]
    inverse, axis_cell, _, edge_of, _, cell_span = cell_functions(dtype)
    home = _home(dtype)

    @wp.kernel(**OPTIONS)
    def sample(
        points: wp.array(dtype=vec3),
        offsets: INTS,
        clouds: int,
        frames: wp.array2d(dtype=real),
        dims: INT_ROWS,
        occupancy: INTS,
        cut: INTS,
        extent: INT_ROWS,
    ):
        row = wp.tid()
        p = points[row]
        if wp.isfinite(p):
            cloud = cloud_of(row, offsets, points.shape[0], clouds)
            cell = home(p, cloud, frames, dims)
            crowd = occupancy[cell]
            if crowd >= CROWD:
                # By row, not by arrival: the same points give the same cells.
                scattered = int((wp.uint32(row) * wp.uint32(1640531527)) >> wp.uint32(8))
                if scattered % crowd < SAMPLE:
                    per_unit = inverse(edge_of(frames, cloud))
                    for axis in range(3):
                        at = axis_cell(p[axis], frames[cloud, axis], per_unit[axis], dims[cloud, axis])
                        low, high = cell_span(frames, cloud, axis, at, dims[cloud, axis])
                        t = real(0.0)
                        if high > low:
                            t = wp.clamp((p[axis] - low) / (high - low), real(0.0), real(1.0))
                        q = wp.min(int(t * real(FRACTION)), int(FRACTION) - 1)
                        wp.atomic_max(extent, cut[cell], axis, int(FRACTION) - 1 - q)
                        wp.atomic_max(extent, cut[cell], axis + 3, q)

    return sample


def _cut_kernel(dtype: torch.dtype) -> wp.Kernel:
    """Choose the sub-cells of each crowded cell."""
    real, vec3 = REALS[dtype]
    *_, cell_span = cell_functions(dtype)
    grid_shape = _grid_shape(dtype)

    @wp.kernel(**OPTIONS)
    def cut_crowds(
        clouds: int,
        frames: wp.array2d(dtype=real),
        dims: INT_ROWS,
        cut_count: INTS,
        cut_cells: INTS,
        occupancy: INTS,
        extent: INT_ROWS,
        subframes: wp.array2d(dtype=real),
        subdims: INTS,
        extra: INTS,
    ):
        crowd = wp.tid()
        if crowd >= cut_count[0]:
            for i in range(6):
                subframes[crowd, i] = real(0.0)
            subdims[crowd] = 0
        else:
            cell = cut_cells[crowd]
            cloud = int(0)
            while cloud + 1 < clouds and dims[cloud + 1, 3] <= cell:
                cloud += 1
            local = cell - dims[cloud, 3]
            nx = dims[cloud, 0]
            ny = dims[cloud, 1]
            at = wp.vec3i(local % nx, (local / nx) % ny, local / (nx * ny))
            low = vec3()
            width = vec3()
            for axis in range(3):
                cell_low, cell_high = cell_span(frames, cloud, axis, at[axis], dims[cloud, axis])
                begin = real(int(FRACTION) - 1 - extent[crowd, axis]) / real(FRACTION)
                end = real(extent[crowd, axis + 3] + 1) / real(FRACTION)
                margin = wp.max(end - begin, real(0.0)) * real(MARGIN)
                begin = wp.max(begin - margin, real(0.0))
                end = wp.min(end + margin, real(1.0))
                if begin >= end:  # no point was sampled
                    begin = real(0.0)
                    end = real(1.0)
                low[axis] = cell_low + (cell_high - cell_low) * begin
                width[axis] = (cell_high - cell_low) * (end - begin)
            shape = grid_shape(width, occupancy[cell] / POINTS_PER_SUBCELL)
            for axis in range(3):
                shape[axis] = wp.min(shape[axis], (1 << AXIS_BITS) - 1)
                subframes[crowd, axis] = low[axis]
                subframes[crowd, axis + 3] = width[axis] / real(shape[axis])
            subdims[crowd] = shape[0] | (shape[1] << AXIS_BITS) | (shape[2] << (2 * AXIS_BITS))
            extra[cell] = shape[0] * shape[1] * shape[2] - 1

    return cut_crowds


def _place_kernel(dtype: torch.dtype) -> wp.Kernel:
    """Sub-cell of each point and its rank of arrival there; the last is for points that are not finite."""
    real, vec3 = REALS[dtype]
    inverse, _, low_of, edge_of, cell_at, _ = cell_functions(dtype)
    home = _home(dtype)

    @wp.kernel(**OPTIONS)
    def place(
        points: wp.array(dtype=vec3),
        offsets: INTS,
        clouds: int,
        frames: wp.array2d(dtype=real),
        dims: INT_ROWS,
        cut: INTS,
        subframes: wp.array2d(dtype=real),
        subdims: INTS,
        shift: INTS,
        suboccupancy: INTS,
        placed: INT_ROWS,
    ):
        row = wp.tid()
        p = points[row]
        subcell = suboccupancy.shape[0] - 1
        if wp.isfinite(p):
            cell = home(p, cloud_of(row, offsets, points.shape[0], clouds), frames, dims)
            subcell = cell + shift[cell]
            if shift[cell + 1] > shift[cell]:
                crowd = cut[cell]
                packed = subdims[crowd]
                mask = (1 << AXIS_BITS) - 1
                shape = wp.vec3i(packed & mask, (packed >> AXIS_BITS) & mask, packed >> (2 * AXIS_BITS))
                at = cell_at(p, low_of(subframes, crowd), inverse(edge_of(subframes, crowd)), shape)
                subcell += (at[2] * shape[1] + at[1]) * shape[0] + at[0]
        placed[row, 0] = subcell
        placed[row, 1] = wp.atomic_add(suboccupancy, subcell, 1)

    return place


@functools.cache
def scatter_kernel(dtype: torch.dtype) -> Any:
    """Move each point to its place in the order of the cells; then those of another set, if there is one."""
    real, vec3 = REALS[dtype]
    _, store_point, _ = packed_point(dtype)

    @wp.kernel(**OPTIONS)
    def scatter(
        points: wp.array(dtype=vec3),
        others: wp.array(dtype=vec3),
        placed: INT_ROWS,
        start: INTS,
        sorted_points: wp.array2d(dtype=real),
    ):
        i = wp.tid()
        at = start[placed[i, 0]] + placed[i, 1]
        if i < points.shape[0]:
            store_point(sorted_points, at, points[i], i)
        else:
            store_point(sorted_points, at, others[i - points.shape[0]], i - points.shape[0])

    return scatter
