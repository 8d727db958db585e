"""A two-level cell list: built on the device in a fixed number of launches, for any density.

Each cloud's bounding box is cut into about ``points / POINTS_PER_CELL`` cells. A cell that holds many
points is cut again where most of them lie, which a small sample tells: a dense cluster then costs no more
than an even cloud, also when a few other points share its cell. The sub-cells at the border reach out to
the border of the cell. Points are sorted by (cell, sub-cell): cells that follow each other along x hold
one contiguous run of points.

Every size follows from the number of points and clouds, nothing is read back, and torch owns all buffers:
the build can be captured in a CUDA graph.
"""

import functools
from typing import Any, NamedTuple

import torch
import warp as wp
from torch import Tensor

from pointproj.warp_op import warp_op

POINTS_PER_CELL = 2
POINTS_PER_SUBCELL = 4
CELLS_PER_RADIUS = 2  # with a known radius, cells are at least radius / CELLS_PER_RADIUS wide
AXIS_BITS = 10  # a cell is cut into less than 2 ** AXIS_BITS sub-cells along an axis
SAMPLE = 64  # about so many points of a crowded cell say where its sub-cells go
MARGIN = 1.0 / 16.0  # and so much of their extent is added on each side
FRACTION = 2.0**30  # positions inside a cell, as integers

REALS = {torch.float32: (wp.float32, wp.vec3f), torch.float64: (wp.float64, wp.vec3d)}
MODULE_OPTIONS = {"fuse_fp": False, "enable_backward": False}  # the reference rounds after every operation


class Cells(NamedTuple):
    """The cell list as tensors; ``cells`` = N // 2 + clouds, ``subcells`` <= cells + N // 4."""

    frames: Tensor  # (clouds, 6) real: lowest corner and cell edges of each cloud's grid
    dims: Tensor  # (clouds, 4) int32: cells along x, y, z; number of the first cell
    subframes: Tensor  # (cells, 6) real: the same for the sub-cells of each cell
    subdims: Tensor  # (cells,) int32: sub-cells along x, y, z, AXIS_BITS bits each
    first: Tensor  # (cells + 1,) int32: number of each cell's first sub-cell
    start: Tensor  # (subcells + 1,) int32: first sorted row of each sub-cell
    points: Tensor  # (N, 3) real: positions, sorted
    order: Tensor  # (N,) int32: row of each sorted point in the cloud as given


def cell_count(points: int, clouds: int) -> int:
    """Rows of the cell tables, from sizes alone."""
    return points // POINTS_PER_CELL + clouds


def subcell_count(points: int, clouds: int) -> int:
    """Rows of the sub-cell tables, from sizes alone."""
    return cell_count(points, clouds) + points // POINTS_PER_SUBCELL


def build_cells(points: Tensor, offsets: Tensor | None, clouds: int, radius: float | None) -> Cells:
    """Sort ``points`` (N, 3), packed clouds, into cells. Points that are not finite are left out."""
    return Cells(*_build_cells(points, offsets, clouds, 0.0 if radius is None else radius))


def _specs(points: Tensor, offsets: Any, clouds: int, radius: float) -> dict:
    rows, dtype = points.shape[0], points.dtype
    cells, subcells = cell_count(rows, clouds), subcell_count(rows, clouds)
    return {
        "frames": ((clouds, 6), dtype),
        "dims": ((clouds, 4), torch.int32),
        "subframes": ((cells, 6), dtype),
        "subdims": ((cells,), torch.int32),
        "first": ((cells + 1,), torch.int32),
        "start": ((subcells + 1,), torch.int32),
        "sorted_points": ((rows, 3), dtype),
        "order": ((rows,), torch.int32),
    }


@warp_op("pointproj::warp_build_cells", outputs=_specs)
def _build_cells(
    launch: Any,
    points: Tensor,
    offsets: Tensor | None,
    clouds: int,
    radius: float,
    frames: Tensor,
    dims: Tensor,
    subframes: Tensor,
    subdims: Tensor,
    first: Tensor,
    start: Tensor,
    sorted_points: Tensor,
    order: Tensor,
) -> None:
    kernels = build_kernels(points.dtype)
    rows, cells, subcells = points.shape[0], subdims.shape[0], start.shape[0] - 1
    box = points.new_empty(clouds, 6)
    # One buffer, one launch to clear it: occupancy of cells, their points' extent, occupancy of sub-cells.
    counts = subdims.new_empty(7 * cells + subcells)
    occupancy, extent = counts[:cells], counts[cells : 7 * cells].view(cells, 6)
    suboccupancy = counts[7 * cells :]
    place = subdims.new_empty(rows, 2)  # sub-cell of each point, and its rank in there

    cloud = (points, offsets, clouds)
    launch(kernels.clear, max(counts.shape[0], 1), counts, box, first, start)
    threads = kernels.bound_threads(rows)
    launch(kernels.bound, threads, *cloud, threads, box)
    launch(kernels.frame, clouds, rows, offsets, clouds, box, radius / CELLS_PER_RADIUS, frames, dims)
    launch(kernels.count, rows, *cloud, frames, dims, occupancy)
    launch(kernels.tighten, rows, *cloud, frames, dims, occupancy, extent)
    launch(kernels.cut, cells, clouds, frames, dims, occupancy, extent, subframes, subdims)
    torch.cumsum(occupancy, 0, dtype=torch.int32, out=first[1:])
    launch(kernels.place, rows, *cloud, frames, dims, subframes, subdims, first, suboccupancy, place)
    torch.cumsum(suboccupancy, 0, dtype=torch.int32, out=start[1:])
    if torch.are_deterministic_algorithms_enabled():
        place[:, 1] = _stable_ranks(place[:, 0], start)
    launch(kernels.scatter, rows, points, place, start, sorted_points, order)


def _stable_ranks(subcells: Tensor, start: Tensor) -> Tensor:
    """Ranks in the order of the rows, where atomics would give them in the order of arrival."""
    absent = subcells < 0
    keys = torch.where(absent, start.shape[0], subcells).long()
    by_cell = keys.argsort(stable=True)
    ranks = torch.empty_like(by_cell)
    ranks[by_cell] = torch.arange(len(by_cell), device=by_cell.device)
    return (ranks - start[subcells.clamp(min=0).long()]).to(torch.int32)


class BuildKernels(NamedTuple):
    clear: wp.Kernel
    bound: wp.Kernel
    frame: wp.Kernel
    count: wp.Kernel
    tighten: wp.Kernel
    cut: wp.Kernel
    place: wp.Kernel
    scatter: wp.Kernel

    @staticmethod
    def bound_threads(rows: int) -> int:
        """Whole warps, each thread taking several points, so that few atomics meet."""
        return 32 * max(1, min(-(-rows // (32 * 8)), 2**12))


@wp.func
def cloud_of(row: int, offsets: wp.array(dtype=wp.int32), rows: int, clouds: int):
    """Cloud that a packed row belongs to."""
    if clouds == 1:
        return 0
    if not offsets:
        return row / (rows / clouds)
    low = int(0)
    high = int(clouds)
    while high - low > 1:
        middle = (low + high) / 2
        if offsets[middle] <= row:
            low = middle
        else:
            high = middle
    return low


@wp.func
def first_row_of(cloud: int, offsets: wp.array(dtype=wp.int32), rows: int, clouds: int):
    """First packed row of a cloud (of the one past the last: number of rows)."""
    if clouds == 1:
        return cloud * rows
    if not offsets:
        return cloud * (rows / clouds)
    return offsets[cloud]


_WARP_MIN = """
#if defined(__CUDA_ARCH__)
    for (int lanes = 16; lanes > 0; lanes >>= 1) {
        auto other = __shfl_xor_sync(0xffffffffu, x, lanes);
        x = other < x ? other : x;
    }
#endif
    return x;
"""


@wp.func_native(_WARP_MIN)
def warp_min(x: wp.float32) -> wp.float32: ...


@wp.func_native(_WARP_MIN)
def warp_min(x: wp.float64) -> wp.float64: ...


_IS_LEADER = """
#if defined(__CUDA_ARCH__)
    return thread % 32 == 0;
#else
    return true;
#endif
"""


@wp.func_native(_IS_LEADER)
def is_leader(thread: int) -> bool: ...


@functools.cache
def cell_functions(dtype: torch.dtype) -> Any:
    """Where a point falls, for positions of one dtype; shared by build and search."""
    real, vec3 = REALS[dtype]

    @wp.func
    def axis_cell(x: real, low: real, edge: real, cells: int):
        """Cell along one axis; points outside, by rounding or far away, go to the border."""
        if edge <= real(0.0):
            return 0
        t = (x - low) / edge
        if not (t > real(0.0)):
            return 0
        return int(wp.min(t, real(cells - 1)))

    @wp.func
    def low_of(frames: wp.array2d(dtype=real), row: int):
        return vec3(frames[row, 0], frames[row, 1], frames[row, 2])

    @wp.func
    def edge_of(frames: wp.array2d(dtype=real), row: int):
        return vec3(frames[row, 3], frames[row, 4], frames[row, 5])

    @wp.func
    def cell_of(p: vec3, low: vec3, edge: vec3, nx: int, ny: int, nz: int):
        """Number of the cell within its grid, x fastest."""
        x = axis_cell(p[0], low[0], edge[0], nx)
        y = axis_cell(p[1], low[1], edge[1], ny)
        z = axis_cell(p[2], low[2], edge[2], nz)
        return (z * ny + y) * nx + x

    @wp.func
    def grid_shape(extent: vec3, budget: int, narrowest: real):
        """Cells along each axis: near cubes, fewer than ``budget`` in all, none thinner than ``narrowest``.

        An axis thinner than the edge that all axes together suggest gets one cell, and the others share;
        at most three axes can drop out, so the fourth round is final. In float64: volumes underflow.
        """
        width = wp.vec3d(wp.float64(extent[0]), wp.float64(extent[1]), wp.float64(extent[2]))
        share = wp.float64(budget) * wp.float64(0.9999)  # so that rounding cannot exceed the budget
        edge = wp.float64(0.0)
        for _ in range(4):
            axes = wp.float64(0.0)
            volume = wp.float64(1.0)
            for axis in range(3):
                if width[axis] > edge:
                    axes += wp.float64(1.0)
                    volume *= width[axis]
            if axes > wp.float64(0.0):
                even = wp.pow(volume / share, wp.float64(1.0) / axes)
                edge = wp.max(edge, wp.max(even, wp.float64(narrowest)))
        shape = wp.vec3i(1, 1, 1)
        for axis in range(3):
            if width[axis] > edge:
                shape[axis] = int(width[axis] / edge)
        return shape

    return axis_cell, low_of, edge_of, cell_of, grid_shape


@functools.cache
def build_kernels(dtype: torch.dtype) -> BuildKernels:
    """The kernels of the build, for positions of one dtype."""
    real, vec3 = REALS[dtype]
    axis_cell, low_of, edge_of, cell_of, grid_shape = cell_functions(dtype)
    ints = wp.array(dtype=wp.int32)
    reals2d = wp.array2d(dtype=real)
    options = {"module": "unique", "module_options": MODULE_OPTIONS}

    @wp.kernel(**options)
    def clear(counts: ints, box: reals2d, first: ints, start: ints):
        i = wp.tid()
        counts[i] = 0
        if i == 0:
            first[0] = 0
            start[0] = 0
        if i < box.shape[0]:
            for axis in range(6):
                box[i, axis] = real(wp.inf)

    @wp.kernel(**options)
    def bound(points: wp.array(dtype=vec3), offsets: ints, clouds: int, threads: int, box: reals2d):
        """Lowest corner and negated highest corner of each cloud's finite points."""
        thread = wp.tid()
        rows = points.shape[0]
        low = vec3(real(wp.inf))
        high = vec3(real(wp.inf))
        cloud = int(0)
        row = int(thread)
        while row < rows:
            p = points[row]
            if wp.isfinite(p):
                if clouds > 1:
                    now = cloud_of(row, offsets, rows, clouds)
                    if now != cloud:
                        keep(box, cloud, low, high)
                        low = vec3(real(wp.inf))
                        high = vec3(real(wp.inf))
                        cloud = now
                low = wp.min(low, p)
                high = wp.min(high, -p)
            row += threads
        if clouds > 1:
            keep(box, cloud, low, high)
        else:
            for axis in range(3):
                low[axis] = warp_min(low[axis])
                high[axis] = warp_min(high[axis])
            if is_leader(thread):
                keep(box, 0, low, high)

    @wp.func
    def keep(box: reals2d, cloud: int, low: vec3, high: vec3):
        for axis in range(3):
            if low[axis] < box[cloud, axis]:
                wp.atomic_min(box, cloud, axis, low[axis])
            if high[axis] < box[cloud, axis + 3]:
                wp.atomic_min(box, cloud, axis + 3, high[axis])

    @wp.kernel(**options)
    def frame(
        rows: int,
        offsets: ints,
        clouds: int,
        box: reals2d,
        narrowest: real,
        frames: reals2d,
        dims: wp.array2d(dtype=int),
    ):
        cloud = wp.tid()
        begin = first_row_of(cloud, offsets, rows, clouds)
        end = first_row_of(cloud + 1, offsets, rows, clouds)
        extent = vec3()
        for axis in range(3):
            if box[cloud, axis] < real(wp.inf):
                extent[axis] = -box[cloud, axis + 3] - box[cloud, axis]
        shape = grid_shape(extent, (end - begin) / POINTS_PER_CELL + 1, narrowest)
        for axis in range(3):
            frames[cloud, axis] = box[cloud, axis]
            frames[cloud, axis + 3] = extent[axis] / real(shape[axis])
            dims[cloud, axis] = shape[axis]
        dims[cloud, 3] = begin / POINTS_PER_CELL + cloud

    @wp.func
    def home(p: vec3, cloud: int, frames: reals2d, dims: wp.array2d(dtype=int)):
        """Number of a point's cell among the cells of all clouds."""
        cell = cell_of(
            p, low_of(frames, cloud), edge_of(frames, cloud), dims[cloud, 0], dims[cloud, 1], dims[cloud, 2]
        )
        return dims[cloud, 3] + cell

    @wp.kernel(**options)
    def count(
        points: wp.array(dtype=vec3),
        offsets: ints,
        clouds: int,
        frames: reals2d,
        dims: wp.array2d(dtype=int),
        occupancy: ints,
    ):
        row = wp.tid()
        p = points[row]
        if wp.isfinite(p):
            cloud = cloud_of(row, offsets, points.shape[0], clouds)
            wp.atomic_add(occupancy, home(p, cloud, frames, dims), 1)

    @wp.kernel(**options)
    def tighten(
        points: wp.array(dtype=vec3),
        offsets: ints,
        clouds: int,
        frames: reals2d,
        dims: wp.array2d(dtype=int),
        occupancy: ints,
        extent: wp.array2d(dtype=int),
    ):
        """Extent of a sample of each crowded cell, in FRACTIONs of the cell; lowest ones from above."""
        row = wp.tid()
        p = points[row]
        if wp.isfinite(p):
            cloud = cloud_of(row, offsets, points.shape[0], clouds)
            cell = home(p, cloud, frames, dims)
            # By row, not by arrival: the same points give the same cells.
            scattered = (wp.uint32(row) * wp.uint32(1640531527)) >> wp.uint32(8)
            crowd = occupancy[cell]
            if crowd >= 2 * POINTS_PER_SUBCELL and int(scattered) % crowd < SAMPLE:
                for axis in range(3):
                    low = frames[cloud, axis]
                    edge = frames[cloud, axis + 3]
                    t = real(0.0)
                    if edge > real(0.0):
                        at = axis_cell(p[axis], low, edge, dims[cloud, axis])
                        t = wp.clamp((p[axis] - low) / edge - real(at), real(0.0), real(1.0))
                    q = wp.min(int(t * real(FRACTION)), int(FRACTION) - 1)
                    if int(FRACTION) - 1 - q > extent[cell, axis]:
                        wp.atomic_max(extent, cell, axis, int(FRACTION) - 1 - q)
                    if q > extent[cell, axis + 3]:
                        wp.atomic_max(extent, cell, axis + 3, q)

    @wp.kernel(**options)
    def cut(
        clouds: int,
        frames: reals2d,
        dims: wp.array2d(dtype=int),
        occupancy: ints,
        extent: wp.array2d(dtype=int),
        subframes: reals2d,
        subdims: ints,
    ):
        """Choose the sub-cells of each cell; ``occupancy`` becomes their number, 0 for spare rows."""
        cell = wp.tid()
        cloud = int(0)
        while cloud + 1 < clouds and dims[cloud + 1, 3] <= cell:
            cloud += 1
        local = cell - dims[cloud, 3]
        nx = dims[cloud, 0]
        ny = dims[cloud, 1]
        if local >= nx * ny * dims[cloud, 2]:
            occupancy[cell] = 0
            return
        edge = edge_of(frames, cloud)
        at = vec3(real(local % nx), real((local / nx) % ny), real(local / (nx * ny)))
        low = low_of(frames, cloud) + wp.cw_mul(at, edge)
        width = edge
        shape = wp.vec3i(1, 1, 1)
        points = occupancy[cell]
        if points >= 2 * POINTS_PER_SUBCELL:
            for axis in range(3):
                from_low = real(int(FRACTION) - 1 - extent[cell, axis]) / real(FRACTION)
                to_high = real(extent[cell, axis + 3] + 1) / real(FRACTION)
                margin = wp.max(to_high - from_low, real(0.0)) * real(MARGIN)
                from_low = wp.max(from_low - margin, real(0.0))
                to_high = wp.min(to_high + margin, real(1.0))
                if from_low >= to_high:  # no point was sampled
                    from_low = real(0.0)
                    to_high = real(1.0)
                low[axis] = low[axis] + edge[axis] * from_low
                width[axis] = edge[axis] * (to_high - from_low)
            shape = grid_shape(width, points / POINTS_PER_SUBCELL, real(0.0))
            for axis in range(3):
                shape[axis] = wp.min(shape[axis], (1 << AXIS_BITS) - 1)
        for axis in range(3):
            subframes[cell, axis] = low[axis]
            subframes[cell, axis + 3] = width[axis] / real(shape[axis])
        subdims[cell] = shape[0] | (shape[1] << AXIS_BITS) | (shape[2] << (2 * AXIS_BITS))
        occupancy[cell] = shape[0] * shape[1] * shape[2]

    @wp.kernel(**options)
    def place(
        points: wp.array(dtype=vec3),
        offsets: ints,
        clouds: int,
        frames: reals2d,
        dims: wp.array2d(dtype=int),
        subframes: reals2d,
        subdims: ints,
        first: ints,
        suboccupancy: ints,
        placed: wp.array2d(dtype=int),
    ):
        """Sub-cell of each point and its rank of arrival there; -1 for a point that is not finite."""
        row = wp.tid()
        p = points[row]
        placed[row, 0] = -1
        if wp.isfinite(p):
            cell = home(p, cloud_of(row, offsets, points.shape[0], clouds), frames, dims)
            subcell = first[cell]
            shape = subdims[cell]
            if shape != (1 | (1 << AXIS_BITS) | (1 << (2 * AXIS_BITS))):
                mask = (1 << AXIS_BITS) - 1
                nx = shape & mask
                ny = (shape >> AXIS_BITS) & mask
                nz = shape >> (2 * AXIS_BITS)
                subcell += cell_of(p, low_of(subframes, cell), edge_of(subframes, cell), nx, ny, nz)
            placed[row, 0] = subcell
            placed[row, 1] = wp.atomic_add(suboccupancy, subcell, 1)

    @wp.kernel(**options)
    def scatter(
        points: wp.array(dtype=vec3),
        placed: wp.array2d(dtype=int),
        start: ints,
        sorted_points: wp.array(dtype=vec3),
        order: ints,
    ):
        row = wp.tid()
        if placed[row, 0] >= 0:
            to = start[placed[row, 0]] + placed[row, 1]
            sorted_points[to] = points[row]
            order[to] = row

    return BuildKernels(clear, bound, frame, count, tighten, cut, place, scatter)
