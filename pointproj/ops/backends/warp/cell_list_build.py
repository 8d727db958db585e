"""Building the cell list: bounds of each cloud, points counted by cell, a running sum, points scattered.

Every size follows from the number of points and clouds, nothing is read back, and torch owns all buffers:
the build can be captured in a CUDA graph. In deterministic mode points keep their order within a cell;
otherwise, on a GPU, that is the order in which they arrive.
"""

from typing import Any

import torch
import warp as wp
from torch import Tensor

from pointproj.ops.backends.warp import common
from pointproj.ops.backends.warp.cell_list import CellList, cell_at, first_cell, grid_of
from pointproj.ops.backends.warp.common import OPTIONS, REALS, Batch, Points, once, struct_of
from pointproj.ops.backends.warp.lanes import WARP, lanes
from pointproj.ops.bridge.warp_op import Launch, warp_op

FEW_POINTS, MANY_POINTS = 2**17, 2**18
PART, MOST_PARTS = 512, 2**11  # points that a group of lanes bounds, or more; groups
AT_ONCE = 8  # points that a lane reads before it looks at the first
RUN = 4  # points in a row that belong to one part
EDGE = 0.5  # of cells for a known radius, in radii


def cells_per_two_points(rows: int, for_radius: bool, device_type: str) -> int:
    """Fine cells spare distances; for many points the tables themselves are what takes time.

    Self-kNN of 10^6 uniform points takes 0.76 ms with one cell for two points, 1.10 with two for one; the
    search of W1 40 us with two for one, 53 with one for one. For a radius there are as many as cells of its
    width need, if that is not more.
    """
    if for_radius:
        return 16 if rows <= FEW_POINTS else 2
    if device_type != "cuda":
        return 2
    return 4 if rows <= MANY_POINTS else 1


def _specs(points: Tensor, clouds: int, radius: float | None, largest: Tensor | None, **_: Any) -> dict:
    rows, for_radius = points.shape[0], radius is not None or largest is not None
    cells = cells_per_two_points(rows, for_radius, points.device.type) * rows // 2 + 2 * clouds
    return {
        "frames": ((clouds, 12), points.dtype),
        "shapes": ((clouds, 5), torch.int32),
        "start": ((cells + 1,), torch.int32),
        "sorted_points": ((rows, 4), points.dtype),
    }


def build_cell_list(
    points: Tensor, offsets: Tensor | None, clouds: int, radius: float | Tensor | None
) -> CellList:
    """Sort ``points`` (N, 3), packed clouds, into cells, for kNN or for searches within about a radius."""
    if isinstance(radius, Tensor):
        return CellList(*_build(points, offsets, clouds, None, radius.reshape(1)))
    return CellList(*_build(points, offsets, clouds, radius, None))


@warp_op("pointproj::warp_build_cell_list", outputs=_specs)
def _build(
    launch: Launch,
    points: Tensor,
    offsets: Tensor | None,
    clouds: int,
    radius: float | None,
    largest: Tensor | None,
    *,
    frames: Tensor,
    shapes: Tensor,
    start: Tensor,
    sorted_points: Tensor,
) -> None:
    own = Points(points, Batch(offsets, points.shape[0], clouds))
    _fill(launch, own, CellList(frames, shapes, start, sorted_points), radius, largest)


def new_cell_list(
    launch: Launch, points: Points, radius: float | None = None, largest: Tensor | None = None
) -> CellList:
    """The cell list of a set, for an operator that builds its own: that spares the call of another."""
    specs, like = _specs(points.positions, points.batch.count, radius, largest), points.positions
    cells = CellList(*[like.new_empty(shape, dtype=dtype) for shape, dtype in specs.values()])
    _fill(launch, points, cells, radius, largest)
    return cells


def _fill(
    launch: Launch, points: Points, cells: CellList, radius: float | None, largest: Tensor | None
) -> None:
    """Divide the space and sort the points; ``largest`` (1,) is a radius that the host does not know."""
    (rows, clouds), device, dtype = points.batch[1:], cells.points.device, cells.points.dtype
    count = WARP if device.type == "cuda" else 1
    parts = min(rows // (PART * max(1, clouds)), MOST_PARTS) or 1
    corners = cells.points.new_empty(parts * clouds, 6)
    launch(bound_kernel(dtype, count), (parts * clouds, count), points, parts, corners, block_dim=64)
    density = cells_per_two_points(rows, radius is not None or largest is not None, device.type)
    given = points, parts, corners, density, radius or 0.0, largest
    launch(divide_kernel(dtype, count), (clouds, count), *given, cells)
    _sort(launch, points, cells, 0.0)


def sorted_into(launch: Launch, points: Points, cells: CellList, reach: float) -> CellList:
    """Other points in the cells of a list, for searches around its own points, no farther than ``reach``."""
    made = CellList(*cells[:2], torch.empty_like(cells.start), cells.points.new_empty(points.batch.rows, 4))
    _sort(launch, points, made, reach)
    return made


def _sort(launch: Launch, points: Points, cells: CellList, reach: float) -> None:
    """Those farther than ``reach`` from the cloud that the cells were made for come last, in none."""
    rows, dtype = points.batch.rows, cells.points.dtype
    placed = cells.start.new_empty(rows, 2)
    cells.start.zero_()
    launch(count_kernel(dtype), rows, points, reach, cells, placed)
    torch.cumsum(cells.start, 0, dtype=torch.int32, out=cells.start)
    if placed.is_cuda and torch.are_deterministic_algorithms_enabled():  # atomics rank them as they arrive
        numbers, ranks = placed.unbind(1)
        ranks.copy_(numbers.argsort(stable=True).argsort() - cells.start[numbers.long()])
    launch(scatter_kernel(dtype), rows, points, placed, cells)


@once
def bound_kernel(dtype: torch.dtype, count: int) -> wp.Kernel:
    """Lowest corner, and negated highest corner, of the finite points in each part of each cloud.

    The points in their order are divided into sections, and of each a part gets a short run at random. So
    points may be in the order of a coordinate or of a structured grid, and still each part is as wide as most
    of the cloud.
    """
    real, vec3, _ = REALS[dtype]
    PointsStruct = struct_of(Points, dtype)
    group = lanes(count)
    length = min(count, RUN)  # of a run: one point on a CPU, whose lane is alone
    Several = wp.types.matrix(shape=(AT_ONCE, 3), dtype=real)

    @wp.kernel(**OPTIONS)
    def bound(points: PointsStruct, parts: int, corners: wp.array2d(dtype=real)):
        """Launched over parts of all clouds, and lanes; fills ``corners`` (parts of all clouds, 6)."""
        number, _ = wp.tid()
        number = group.item(number)
        cloud = number / parts
        end = common.first_row_of(cloud + 1, points.batch)
        section = group.lane() / length
        begin = common.first_row_of(cloud, points.batch) + section * parts * length
        low = vec3(real(wp.inf))
        high = vec3(real(wp.inf))
        several = Several()
        while begin < end:
            for i in range(AT_ONCE):  # all on their way before the first is looked at
                turn = wp.randi(wp.rand_init(0, section), 0, parts)  # the same for all parts
                row = begin + (number + turn) % parts * length + group.lane() % length
                several[i] = wp.where(row < end, points.positions[wp.min(row, end - 1)], vec3(real(wp.inf)))
                begin += parts * count
                section += count / length
            for i in range(AT_ONCE):
                p = several[i]
                finite = wp.dot(p - p, vec3(real(1.0))) == real(0.0)
                low = wp.where(finite, wp.min(low, p), low)
                high = wp.where(finite, wp.min(high, -p), high)
        for axis in range(3):
            low[axis] = group.minimum(low[axis])
            high[axis] = group.minimum(high[axis])
            if group.lane() == 0:
                corners[number, axis] = low[axis]
                corners[number, axis + 3] = high[axis]

    return bound


@once
def divide_kernel(dtype: torch.dtype, count: int) -> wp.Kernel:
    """The grid of each cloud, from the corners of its parts.

    Their means are the box that holds most of the cloud, but no outliers.
    """
    real, vec3, _ = REALS[dtype]
    CellListStruct, PointsStruct = struct_of(CellList, dtype), struct_of(Points, dtype)
    group = lanes(count)

    @wp.func
    def shape_of(extent: vec3, budget: int, width: real):
        """Cells along each axis, near cubes, fewer than ``budget`` in all, and no narrower than ``width``.

        An axis thinner than the edge that all axes together suggest gets one cell, and the others share;
        at most three axes can drop out, so the fourth round is final.
        """
        longest = wp.max(extent)
        shape = wp.vec3i(1, 1, 1)
        if longest > real(0.0):
            relative = extent / longest
            share = real(budget) * real(0.9999)  # so that rounding cannot exceed the budget
            edge = real(1.0e-6)
            for _ in range(4):
                axes = int(0)
                volume = real(1.0) / share
                for axis in range(3):
                    if relative[axis] > edge:
                        axes += 1
                        volume *= relative[axis]
                if axes == 3:
                    edge = wp.max(edge, wp.cbrt(volume))
                if axes == 2:
                    edge = wp.max(edge, wp.sqrt(volume))
                if axes == 1:
                    edge = wp.max(edge, volume)
            for axis in range(3):
                if relative[axis] > edge:
                    shape[axis] = int(relative[axis] / edge)
                if width > real(0.0) and extent[axis] / width < real(shape[axis]):
                    shape[axis] = wp.max(int(extent[axis] / width), 1)
        return shape

    @wp.kernel(**OPTIONS)
    def divide(
        points: PointsStruct,
        parts: int,
        corners: wp.array2d(dtype=real),
        density: int,
        radius: real,
        radius_on_device: wp.array(dtype=real),
        cells: CellListStruct,
    ):
        """Launched over clouds and lanes; fills ``frames`` and ``shapes`` of the cell list."""
        cloud, _ = wp.tid()
        cloud = group.item(cloud)
        low = vec3(real(wp.inf))
        high = vec3(real(wp.inf))
        sum_low = vec3()
        sum_high = vec3()
        filled = real(0.0)  # parts with a finite point
        for part in range(cloud * parts + group.lane(), (cloud + 1) * parts, count):
            if corners[part, 0] < real(wp.inf):
                part_low = vec3(corners[part, 0], corners[part, 1], corners[part, 2])
                part_high = vec3(corners[part, 3], corners[part, 4], corners[part, 5])
                low = wp.min(low, part_low)
                high = wp.min(high, part_high)
                sum_low += part_low
                sum_high += part_high
                filled += real(1.0)
        filled = group.total(filled)
        extent = vec3()
        for axis in range(3):
            low[axis] = group.minimum(low[axis])
            high[axis] = -group.minimum(high[axis])
            cells.frames[cloud, axis + 6] = low[axis]
            cells.frames[cloud, axis + 9] = high[axis]
            mean_low = group.total(sum_low[axis]) / filled
            mean_high = -group.total(sum_high[axis]) / filled
            if wp.isfinite(mean_low) and wp.isfinite(mean_high):
                low[axis] = wp.max(low[axis], mean_low)
                high[axis] = wp.min(high[axis], mean_high)
            if filled > real(0.0):
                extent[axis] = wp.max(high[axis] - low[axis], real(0.0))
        base = density * common.first_row_of(cloud, points.batch) / 2 + 2 * cloud
        last = density * common.first_row_of(cloud + 1, points.batch) / 2 + 2 * cloud + 1
        width = real(EDGE) * radius
        if radius_on_device:
            width = real(EDGE) * radius_on_device[0]
        shape = shape_of(extent, last - base, width)
        for axis in range(3):
            cells.frames[cloud, axis] = low[axis]
            cells.frames[cloud, axis + 3] = extent[axis] / real(shape[axis])
            cells.shapes[cloud, axis] = shape[axis]
        cells.shapes[cloud, 3] = base
        cells.shapes[cloud, 4] = last

    return divide


@once
def count_kernel(dtype: torch.dtype) -> wp.Kernel:
    """The cell of each point, and its rank of arrival there."""
    real, *_ = REALS[dtype]
    CellListStruct, PointsStruct = struct_of(CellList, dtype), struct_of(Points, dtype)
    _, load = grid_of(dtype)

    @wp.kernel(**OPTIONS)
    def count(points: PointsStruct, reach: real, cells: CellListStruct, placed: wp.array2d(dtype=wp.int32)):
        """Launched over the points of a set; fills ``placed``, counts in ``start`` behind each cell."""
        row = wp.tid()
        p = points.positions[row]
        number = common.cloud_of(row, points.batch)
        cell = cells.shapes[number, 4]
        if wp.isfinite(p):
            grid = load(cells, number, p)
            if wp.max(grid.outside) <= reach:
                at = cell_at(p, grid)
                cell = first_cell(grid, at[1], at[2]) + at[0]
        placed[row, 0] = cell
        placed[row, 1] = wp.atomic_add(cells.start, cell + 1, 1)

    return count


@once
def scatter_kernel(dtype: torch.dtype) -> wp.Kernel:
    """Each point goes to its place in the order of the cells."""
    CellListStruct, PointsStruct = struct_of(CellList, dtype), struct_of(Points, dtype)

    @wp.kernel(**OPTIONS)
    def scatter(points: PointsStruct, placed: wp.array2d(dtype=wp.int32), cells: CellListStruct):
        """Launched over the points of a set; fills ``points`` of the cell list."""
        row = wp.tid()
        at = cells.start[placed[row, 0]] + placed[row, 1]
        common.store_point(cells.points, at, points.positions[row], row)

    return scatter
