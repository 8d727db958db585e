"""Building the cell list: bound the clouds, count the points of each cell, sum up counts, scatter points.

Every size follows from the numbers of points and clouds, nothing is read back, and torch owns all buffers. So
the build can be captured in a CUDA graph. In deterministic mode, and on a CPU, points keep their order within
a cell; otherwise atomics decide their order.
"""

from typing import Any, NamedTuple

import torch
import warp as wp
from torch import Tensor

from pointproj.ops.backends.warp import common
from pointproj.ops.backends.warp.cell_list import (
    FRAME,
    KNOTS,
    CellList,
    cell_at,
    first_cell,
    grid_of,
    may_be_graded,
)
from pointproj.ops.backends.warp.cell_list_boxes import bound_kernel, boxes_function
from pointproj.ops.backends.warp.cell_list_sample import SAMPLE, quantile_functions, rank_kernel
from pointproj.ops.backends.warp.common import OPTIONS, REALS, Batch, Points, once, struct_of
from pointproj.ops.backends.warp.lanes import WARP, lanes
from pointproj.ops.bridge.warp_op import Launch, warp_op

FEW_POINTS, MANY_POINTS = 2**17, 2**18
PART, MOST_PARTS = 512, 2**11  # least number of points in a part of a cloud; largest number of parts
SMALL_PART, FEW_PARTS = 64, 8  # the same for small clouds
EDGE = 0.5  # of a cell for a known radius, in radii
# Points of a cloud, in a batch the mean: the grids of smaller ones are not graded. On a GPU, a sample and
# kernels that can read graded grids would take W1 from 75 us to 97.
LEAST_GRADED = {"cpu": 2**11, "cuda": 2**17}
# A grid is graded if points have so many times as many others around them as in a uniform cloud: a normal
# distribution has 4 times, CFD clouds 100 times and more.
CROWDED = 16.0


class Density(NamedTuple):
    """Cells for every two points: many up to some number of rows, few beyond."""

    many: int
    few: int
    most_rows: int

    def at(self, rows: int) -> int:
        return self.many if rows <= self.most_rows else self.few

    def bound(self, rows: int) -> int:
        """At least all cells, without a branch, which would limit the rows of an exported program."""
        least = torch.sym_max(self.few * rows, self.many * self.most_rows)
        return torch.sym_min(self.many * rows, least) // 2


def density_of(for_radius: bool, device_type: str) -> Density:
    """Fine cells save distances; for many points, most of the time goes into the tables themselves.

    Self-kNN of 10^6 uniform points takes 0.76 ms with one cell for two points, and 1.10 ms with two cells for
    each point. The search of W1 takes 40 us with two cells for each point, and 53 us with one. For a radius
    this is an upper limit: the width of the cells follows from the radius.
    """
    if for_radius:
        return Density(16, 2, FEW_POINTS)
    return Density(4, 1, MANY_POINTS) if device_type == "cuda" else Density(2, 2, 0)


def _specs(points: Tensor, clouds: int, for_radius: bool, **_: Any) -> dict:
    rows = points.shape[0]
    cells = density_of(for_radius, points.device.type).bound(rows) + 2 * clouds
    graded = torch.sym_min(rows // (LEAST_GRADED[points.device.type] * torch.sym_max(clouds, 1)), 1)
    return {
        "frames": ((clouds, FRAME + 3 * (KNOTS + 1) * graded), points.dtype),
        "shapes": ((clouds, 8), torch.int32),
        "start": ((cells + 1,), torch.int32),
        "sorted_points": ((rows, 4), points.dtype),
    }


def build_cell_list(
    points: Tensor, offsets: Tensor | None, clouds: int, radius: float | Tensor | None
) -> CellList:
    """Sort ``points`` (N, 3), packed clouds, into cells for kNN, or for searches within about this radius."""
    radii = (None, radius.reshape(1)) if isinstance(radius, Tensor) else (radius, None)
    return CellList(*_build(points, offsets, clouds, radius is not None, *radii))


@warp_op("pointproj::warp_build_cell_list", outputs=_specs)
def _build(
    launch: Launch,
    points: Tensor,
    offsets: Tensor | None,
    clouds: int,
    for_radius: bool,
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
    """The cell list of a set, for an operator that builds its own, to save a call of another."""
    like, for_radius = points.positions, radius is not None or largest is not None
    specs = _specs(like, points.batch.count, for_radius)
    cells = CellList(*[like.new_empty(shape, dtype=dtype) for shape, dtype in specs.values()])
    _fill(launch, points, cells, radius, largest)
    return cells


def _fill(
    launch: Launch, points: Points, cells: CellList, radius: float | None, largest: Tensor | None
) -> None:
    """Divide the space and sort the points; ``largest`` (1,) is a radius that only the device knows."""
    (rows, clouds), device, dtype = points.batch[1:], cells.points.device, cells.points.dtype
    count = WARP if device.type == "cuda" else 1
    size = rows // max(1, clouds)
    parts = max(min(size // PART, MOST_PARTS), min(size // SMALL_PART, FEW_PARTS), 1)
    corners = cells.points.new_empty(parts * clouds, 6)
    sample, quantiles, graded = None, None, may_be_graded(cells)
    if graded:
        sample, quantiles = corners.new_empty(2, 3 * clouds, SAMPLE)
    kernel = bound_kernel(dtype, count, graded)
    launch(kernel, (parts * clouds, count), points, parts, corners, sample, block_dim=64)
    if graded:
        launch(rank_kernel(dtype), sample.shape, sample, quantiles)
    density = density_of(radius is not None or largest is not None, device.type).at(rows)
    given = points, parts, corners, quantiles, density, radius or 0.0, largest
    launch(divide_kernel(dtype, count, graded), (clouds, count), *given, cells)
    _sort(launch, points, cells, 0.0)


def sorted_into(launch: Launch, points: Points, cells: CellList, radius: float) -> CellList:
    """Other points in the cells of a list, for searches within ``radius`` of the list's own points."""
    made = CellList(*cells[:2], torch.empty_like(cells.start), cells.points.new_empty(points.batch.rows, 4))
    _sort(launch, points, made, radius)
    return made


def _sort(launch: Launch, points: Points, cells: CellList, radius: float) -> None:
    """Points farther than ``radius`` from the cloud that the cells were made for come last, in no cell."""
    rows, dtype = points.batch.rows, cells.points.dtype
    placed = cells.start.new_empty(rows, 2)
    cells.start.zero_()
    launch(count_kernel(dtype, may_be_graded(cells)), rows, points, radius, cells, placed)
    torch.cumsum(cells.start, 0, dtype=torch.int32, out=cells.start)
    if placed.is_cuda and torch.are_deterministic_algorithms_enabled():  # ranks by atomics vary
        numbers, ranks = placed.unbind(1)
        ranks.copy_(numbers.argsort(stable=True).argsort() - cells.start[numbers.long()])
    launch(scatter_kernel(dtype), rows, points, placed, cells)


@wp.func
def shape_of(extent: Any, budget: int, width: Any):
    """Cells along each axis: nearly cubes, fewer than ``budget`` in all, and no narrower than ``width``.

    An axis that is thinner than the edge of a cell gets one cell. The others then share the budget, and the
    edge becomes longer. At most three axes can drop out, so the fourth round is final.
    """
    longest = wp.max(extent)
    shape = wp.vec3i(1, 1, 1)
    if longest > type(width)(0.0):
        relative = extent / longest
        share = type(width)(budget) * type(width)(0.9999)  # so that rounding cannot exceed the budget
        edge = type(width)(1.0e-6)
        for _ in range(4):
            axes = int(0)
            volume = type(width)(1.0) / share
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
            if width > type(width)(0.0) and extent[axis] / width < type(width)(shape[axis]):
                shape[axis] = wp.max(int(extent[axis] / width), 1)
    return shape


@once
def divide_kernel(dtype: torch.dtype, count: int, graded: bool) -> wp.Kernel:
    """The grid of each cloud, from the corners of its parts."""
    real, vec3, _ = REALS[dtype]
    CellListStruct, PointsStruct = struct_of(CellList, dtype), struct_of(Points, dtype)
    group, boxes_of = lanes(count), boxes_function(dtype, count)
    knot_of, crowding_of = quantile_functions(dtype, count)

    @wp.kernel(**OPTIONS)
    def divide(
        points: PointsStruct,
        parts: int,
        corners: wp.array2d(dtype=real),
        quantiles: wp.array2d(dtype=real),
        density: int,
        radius: real,
        radius_on_device: wp.array(dtype=real),
        cells: CellListStruct,
    ):
        """Launched over clouds and lanes; fills ``frames`` and ``shapes`` of the cell list."""
        cloud, _ = wp.tid()
        cloud = group.item(cloud)
        low, high, inner_low, inner_high = boxes_of(cloud, parts, corners)
        base = density * common.first_row_of(cloud, points.batch) / 2 + 2 * cloud
        last = density * common.first_row_of(cloud + 1, points.batch) / 2 + 2 * cloud + 1
        width = real(EDGE) * radius
        if radius_on_device:
            width = real(EDGE) * radius_on_device[0]
        extent = wp.max(inner_high - inner_low, vec3())
        shape = shape_of(extent, last - base, width)
        between = wp.vec3i()
        if wp.static(graded):
            crowding = crowding_of(cloud, extent, quantiles)
            edge = wp.vec3(float(extent[0]), float(extent[1]), float(extent[2]))
            edge = wp.cw_div(edge, wp.vec3(float(shape[0]), float(shape[1]), float(shape[2])))
            crowded = crowding[0] * crowding[1] * crowding[2] > real(CROWDED)
            if crowded and wp.max(edge) > 2.0 * float(width):
                shape = shape_of(wp.cw_div(extent, crowding), last - base, width)
                for axis in range(3):
                    between[axis] = shape[axis] / wp.min(shape[axis], KNOTS)
                    shape[axis] = between[axis] * wp.min(shape[axis], KNOTS)
            for axis in range(3):
                intervals = int(0)
                if between[axis] > 0:
                    intervals = shape[axis] / between[axis]
                for number in range(group.lane(), KNOTS + 1, count):
                    x = real(0.0)  # of a knot that the grid lacks
                    if intervals > 0 and number <= intervals:
                        x = knot_of(quantiles, 3 * cloud + axis, number, intervals)
                        x = wp.clamp(x, inner_low[axis], inner_high[axis])
                    cells.frames[cloud, FRAME + axis * (KNOTS + 1) + number] = x
        for axis in range(3):
            cells.shapes[cloud, axis + 5] = between[axis]
            cells.frames[cloud, axis] = inner_low[axis]
            cells.frames[cloud, axis + 3] = extent[axis] / real(shape[axis])
            cells.frames[cloud, axis + 6] = low[axis]
            cells.frames[cloud, axis + 9] = high[axis]
            cells.shapes[cloud, axis] = shape[axis]
        cells.shapes[cloud, 3] = base
        cells.shapes[cloud, 4] = last

    return divide


@once
def count_kernel(dtype: torch.dtype, graded: bool) -> wp.Kernel:
    """The cell of each point, and its rank in the cell."""
    real, *_ = REALS[dtype]
    CellListStruct, PointsStruct = struct_of(CellList, dtype), struct_of(Points, dtype)
    _, load = grid_of(dtype)

    @wp.kernel(**OPTIONS)
    def count(points: PointsStruct, radius: real, cells: CellListStruct, placed: wp.array2d(dtype=wp.int32)):
        """Launched over the points of a set; fills ``placed``, and counts in ``start[cell + 1]``."""
        row = wp.tid()
        p = points.positions[row]
        number = common.cloud_of(row, points.batch)
        cell = cells.shapes[number, 4]
        if wp.isfinite(p):
            grid = load(cells, number, p, graded)
            if wp.max(grid.outside) <= radius:
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
