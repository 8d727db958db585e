"""Building the cell list: bounds of each cloud, points counted by cell, a running sum, points scattered.

Every size follows from the number of points and clouds, nothing is read back, and torch owns all buffers:
the build can be captured in a CUDA graph. In deterministic mode points keep their order within a cell;
otherwise, on a GPU, that is the order in which they arrive.
"""

import os
from typing import Any

import torch
import warp as wp
from torch import Tensor

from pointproj.ops.backends.warp.cell_list import CellList, cell_list_struct, grid_functions
from pointproj.ops.backends.warp.common import (
    OPTIONS,
    REALS,
    Batch,
    BatchStruct,
    Points,
    cloud_of,
    first_row_of,
    once,
    packed_point,
    points_struct,
)
from pointproj.ops.backends.warp.lanes import WARP, fence, lanes
from pointproj.ops.bridge.warp_op import Launch, warp_op

FEW_POINTS, MANY_POINTS = 2**17, 2**18
PART, MOST_PARTS = 512, 2**11  # points that a group of lanes bounds, or more; groups
AT_ONCE = 8  # points that a lane reads before it looks at the first
EDGE = float(os.environ.get("PP_EDGE", "1.0"))  # of cells for a known radius, in radii
NOBODY = Points(None, Batch(None, 0, 0))


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


def cell_list_specs(sets: list[tuple[int, int]], dtype: torch.dtype, clouds: int) -> dict:
    """Shape and dtype of the tables of some sets of points: the rows and ``cells_per_two_points`` of each."""
    grids = len(sets) * clouds
    cells = sum(_cells_of(rows, clouds, density) for rows, density in sets)
    return {
        "frames": ((grids, 12), dtype),
        "shapes": ((grids, 5), torch.int32),
        "start": ((cells + 1 + grids,), torch.int32),
        "sorted_points": ((sum(rows for rows, _ in sets), 4), dtype),
    }


def _cells_of(rows: int, clouds: int, density: int) -> int:
    return density * rows // 2 + 2 * clouds


def build_cell_list(
    points: Tensor, offsets: Tensor | None, clouds: int, radius: float | Tensor | None
) -> CellList:
    """Sort ``points`` (N, 3), packed clouds, into cells, for kNN or for searches within about a radius."""
    known = radius if isinstance(radius, float) else 0.0
    on_device = radius.reshape(1) if isinstance(radius, Tensor) else None
    return CellList(*_build(points, offsets, clouds, radius is not None, known, on_device))


def _specs(points: Tensor, clouds: int, for_radius: bool, **_: Any) -> dict:
    density = cells_per_two_points(points.shape[0], for_radius, points.device.type)
    return cell_list_specs([(points.shape[0], density)], points.dtype, clouds)


@warp_op("pointproj::warp_build_cell_list", outputs=_specs)
def _build(
    launch: Launch,
    points: Tensor,
    offsets: Tensor | None,
    clouds: int,
    for_radius: bool,
    radius: float,
    radius_on_device: Tensor | None,
    *,
    frames: Tensor,
    shapes: Tensor,
    start: Tensor,
    sorted_points: Tensor,
) -> None:
    cells = CellList(frames, shapes, start, sorted_points)
    own = Points(points, Batch(offsets, points.shape[0], clouds))
    fill_cell_list(launch, [own], cells, for_radius, radius, radius_on_device)


def new_cell_list(
    launch: Launch,
    sets: list[Points],
    for_radius: bool,
    radius: float = 0.0,
    radius_on_device: Tensor | None = None,
) -> CellList:
    """The cell list of one or two sets for an operator that builds its own."""
    device, dtype = sets[0].positions.device, sets[0].positions.dtype
    sizes = [(s.batch.rows, cells_per_two_points(s.batch.rows, for_radius, device.type)) for s in sets]
    specs = cell_list_specs(sizes, dtype, sets[0].batch.count)
    cells = CellList(*(torch.empty(shape, dtype=of, device=device) for shape, of in specs.values()))
    fill_cell_list(launch, sets, cells, for_radius, radius, radius_on_device)
    return cells


def fill_cell_list(
    launch: Launch,
    sets: list[Points],
    cells: CellList,
    for_radius: bool,
    radius: float,
    radius_on_device: Tensor | None,
) -> None:
    """Sort one or two sets of points; ``radius_on_device`` (1,) is one that the host does not know."""
    first, second = (*sets, NOBODY)[:2]
    device, dtype = cells.points.device, cells.points.dtype
    divisions = [_division(s.batch, for_radius, device.type) for s in (first, second)]
    rows, grids = cells.points.shape[0], cells.frames.shape[0]
    count = WARP if device.type == "cuda" else 1
    cells.start.zero_()
    corners = torch.empty(sum(groups for _, groups, _ in divisions), 6, dtype=dtype, device=device)
    bounds = bound_kernel(dtype, count)
    shape = corners.shape[0], count
    launch(bounds, shape, first, second, *divisions, radius, radius_on_device, corners, cells, block_dim=64)
    placed = torch.empty(rows, 2, dtype=torch.int32, device=device)
    launch(count_kernel(dtype), rows, first, second, cells, placed)
    start = cells.start[: cells.start.shape[0] - grids]
    finish_counting(placed, start)
    launch(scatter_kernel(dtype), rows, first, second, placed, start, cells.points)


def finish_counting(placed: Tensor, start: Tensor) -> None:
    """From counts to places: ``start`` (cells + 1,) int32 becomes the running sum.

    ``placed`` (n, 2) int32 holds the cell of each point and its rank of arrival there; in deterministic mode
    ranks become those in the order of the points.
    """
    torch.cumsum(start, 0, dtype=torch.int32, out=start)
    if placed.is_cuda and torch.are_deterministic_algorithms_enabled():
        cells, ranks = placed.unbind(1)
        by_cell = cells.argsort(stable=True)
        in_order = torch.empty_like(by_cell)
        in_order[by_cell] = torch.arange(len(by_cell), device=by_cell.device)
        ranks.copy_(in_order - start[cells.long()])


def _division(batch: Batch, for_radius: bool, device_type: str) -> tuple[int, int, int]:
    """Groups of lanes that bound a cloud, those for all clouds, and cells for two points."""
    parts = min(batch.rows // (PART * max(1, batch.count)), MOST_PARTS) or 1
    return parts, parts * batch.count, cells_per_two_points(batch.rows, for_radius, device_type)


@wp.func
def first_cell(cloud: int, batch: BatchStruct, density: int):
    """Number of the first cell of a cloud among those of its set."""
    return density * first_row_of(cloud, batch) / 2 + 2 * cloud


@once
def _shape_function(dtype: torch.dtype) -> wp.Function:
    real, vec3, _ = REALS[dtype]

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

    return shape_of


_FRESH = """
    const char* first = reinterpret_cast<const char*>(table.data) + row * table.strides[0];
    return reinterpret_cast<const volatile {real}*>(first)[column];
"""


@once
def _grid_chooser(dtype: torch.dtype, count: int) -> wp.Function:
    """``choose(corners, first, parts, budget, width, cells, grid)``: divide the box of a cloud's points.

    ``corners`` are those of ``parts`` groups of its points, the highest negated. Their means are the box that
    holds most of the cloud, but no outliers.
    """
    real, vec3, _ = REALS[dtype]
    CellListStruct = cell_list_struct(dtype)
    shape_of = _shape_function(dtype)
    group = lanes(count)
    lane, minimum, total = group.lane, group.minimum, group.total

    @wp.func_native(_FRESH.format(real="float" if dtype == torch.float32 else "double"))
    def fresh(table: wp.array2d(dtype=real), row: int, column: int) -> real:
        """An entry as other threads of this launch have left it, not as a cache remembers it."""
        ...

    @wp.func
    def choose(
        corners: wp.array2d(dtype=real),
        first: int,
        parts: int,
        budget: int,
        width: real,
        cells: CellListStruct,
        grid: int,
    ):
        low = vec3(real(wp.inf))
        high = vec3(real(wp.inf))
        sum_low = vec3()
        sum_high = vec3()
        groups = real(0.0)
        for part in range(first + lane(), first + parts, count):
            own_low = vec3(fresh(corners, part, 0), fresh(corners, part, 1), fresh(corners, part, 2))
            own_high = vec3(fresh(corners, part, 3), fresh(corners, part, 4), fresh(corners, part, 5))
            if own_low[0] < real(wp.inf):
                low = wp.min(low, own_low)
                high = wp.min(high, own_high)
                sum_low += own_low
                sum_high += own_high
                groups += real(1.0)
        groups = total(groups)
        extent = vec3()
        for axis in range(3):
            low[axis] = minimum(low[axis])
            high[axis] = -minimum(high[axis])
            cells.frames[grid, axis + 6] = low[axis]
            cells.frames[grid, axis + 9] = high[axis]
            mean_low = total(sum_low[axis]) / groups
            mean_high = -total(sum_high[axis]) / groups
            if wp.isfinite(mean_low) and wp.isfinite(mean_high):
                low[axis] = wp.max(low[axis], mean_low)
                high[axis] = wp.min(high[axis], mean_high)
            if groups > real(0.0):
                extent[axis] = wp.max(high[axis] - low[axis], real(0.0))
        shape = shape_of(extent, budget, width)
        for axis in range(3):
            cells.frames[grid, axis] = low[axis]
            cells.frames[grid, axis + 3] = extent[axis] / real(shape[axis])
            cells.shapes[grid, axis] = shape[axis]

    return choose


@once
def bound_kernel(dtype: torch.dtype, count: int) -> wp.Kernel:
    """Bounds of the points of each cloud, and from them its grid."""
    real, vec3, _ = REALS[dtype]
    CellListStruct, PointsStruct = cell_list_struct(dtype), points_struct(dtype)
    choose = _grid_chooser(dtype, count)
    group = lanes(count)
    item, lane, take, minimum = group.item, group.lane, group.take, group.minimum
    Several = wp.types.matrix(shape=(AT_ONCE, 3), dtype=real)

    @wp.func
    def bounds_of(points: PointsStruct, begin: int, end: int, stride: int):
        """Lowest corner and negated highest corner of the finite ones."""
        low = vec3(real(wp.inf))
        high = vec3(real(wp.inf))
        several = Several()
        row = int(begin)
        while row < end:
            for i in range(AT_ONCE):  # all on their way before the first is looked at
                several[i] = points.positions[wp.min(row + i * stride, end - 1)]
            for i in range(AT_ONCE):
                p = several[i]
                finite = wp.dot(p - p, vec3(real(1.0))) == real(0.0)
                low = wp.where(finite, wp.min(low, p), low)
                high = wp.where(finite, wp.min(high, -p), high)
            row += AT_ONCE * stride
        return low, high

    @wp.func
    def bound_part(
        points: PointsStruct,
        division: wp.vec3i,
        number: int,
        before: wp.vec3i,
        width: real,
        corners: wp.array2d(dtype=real),
        cells: CellListStruct,
    ):
        """One group of a set; ``before`` it are so many groups, grids and cells of another set."""
        parts = division[0]
        cloud = number / parts
        grid = before[1] + cloud
        begin = first_row_of(cloud, points.batch) + (number % parts) * count + lane()
        low, high = bounds_of(points, begin, first_row_of(cloud + 1, points.batch), parts * count)
        for axis in range(3):
            low[axis] = minimum(low[axis])
            high[axis] = minimum(high[axis])
        arrived = int(0)
        if lane() == 0:
            for axis in range(3):
                corners[before[0] + number, axis] = low[axis]
                corners[before[0] + number, axis + 3] = high[axis]
            fence()
            counter = cells.start.shape[0] - cells.frames.shape[0] + grid
            arrived = wp.atomic_add(cells.start, counter, 1)
        if take(arrived, 0) == parts - 1:  # the last one
            fence()
            base = before[2] + first_cell(cloud, points.batch, division[2])
            last = before[2] + first_cell(cloud + 1, points.batch, division[2]) - 1
            choose(corners, before[0] + cloud * parts, parts, last - base, width, cells, grid)
            cells.shapes[grid, 3] = base
            cells.shapes[grid, 4] = last

    @wp.kernel(**OPTIONS)
    def bound(
        first: PointsStruct,
        second: PointsStruct,
        first_division: wp.vec3i,
        second_division: wp.vec3i,
        radius: real,
        radius_on_device: wp.array(dtype=real),
        corners: wp.array2d(dtype=real),
        cells: CellListStruct,
    ):
        """Launched over groups and lanes; fills ``frames`` and ``shapes``, counts groups behind ``start``."""
        number, _ = wp.tid()
        number = item(number)
        width = radius
        if radius_on_device:
            width = radius_on_device[0]
        width *= real(EDGE)
        groups = first_division[1]
        if number < groups:
            bound_part(first, first_division, number, wp.vec3i(), width, corners, cells)
        else:
            cells_before = first_cell(first.batch.count, first.batch, first_division[2])
            before = wp.vec3i(groups, first.batch.count, cells_before)
            bound_part(second, second_division, number - groups, before, width, corners, cells)

    return bound


@once
def count_kernel(dtype: torch.dtype) -> wp.Kernel:
    """The cell of each point, and its rank of arrival there."""
    _, vec3, _ = REALS[dtype]
    CellListStruct, PointsStruct = cell_list_struct(dtype), points_struct(dtype)
    grid_of = grid_functions(dtype)
    load, cell_at, row_of_cells = grid_of.load, grid_of.cell_at, grid_of.row

    @wp.func
    def cell_of(p: vec3, number: int, cells: CellListStruct):
        if not wp.isfinite(p):
            return cells.shapes[number, 4]
        grid = load(cells, number, p)
        at = cell_at(p, grid)
        return row_of_cells(grid, at[1], at[2]) + at[0]

    @wp.kernel(**OPTIONS)
    def count(
        first: PointsStruct, second: PointsStruct, cells: CellListStruct, placed: wp.array2d(dtype=wp.int32)
    ):
        """Launched over the points of both sets; fills ``placed`` (n, 2), counts in ``start`` behind each cell."""
        i = wp.tid()
        cell = int(0)
        if i < first.batch.rows:
            cell = cell_of(first.positions[i], cloud_of(i, first.batch), cells)
        else:
            row = i - first.batch.rows
            number = first.batch.count + cloud_of(row, second.batch)
            cell = cell_of(second.positions[row], number, cells)
        placed[i, 0] = cell
        placed[i, 1] = wp.atomic_add(cells.start, cell + 1, 1)

    return count


@once
def scatter_kernel(dtype: torch.dtype) -> wp.Kernel:
    """Each point goes to its place in the order of the cells."""
    real, *_ = REALS[dtype]
    PointsStruct = points_struct(dtype)
    _, store_point, _ = packed_point(dtype)

    @wp.kernel(**OPTIONS)
    def scatter(
        first: PointsStruct,
        second: PointsStruct,
        placed: wp.array2d(dtype=wp.int32),
        start: wp.array(dtype=wp.int32),
        sorted_points: wp.array2d(dtype=real),
    ):
        """Launched over the points of both sets; fills ``sorted_points`` (n, 4)."""
        i = wp.tid()
        at = start[placed[i, 0]] + placed[i, 1]
        if i < first.batch.rows:
            store_point(sorted_points, at, first.positions[i], i)
        else:
            row = i - first.batch.rows
            store_point(sorted_points, at, second.positions[row], row)

    return scatter
