"""The cell list: points sorted by cell, the first point of each cell, and the distances to cells.

Each cloud has a grid, which divides the box that holds most of the cloud. Cells at the border extend to the
farthest points. Adjacent cells along x hold one contiguous run of points.

Cells are of equal width, but in a large cloud that is crowded: there the grid is graded. Along each axis,
knots at quantiles of a sample divide the box, and between two knots there are as many cells as between any
other two. Kernels have two forms: only one of them can read graded grids.

Distances to cells are shortened by a slack of a few rounding errors of the coordinates, because the cell of
a point and the border of a cell are rounded differently.
"""

from typing import Any, NamedTuple

import torch
import warp as wp
from torch import Tensor

from pointproj.ops.backends.warp.common import REALS, CoordinateRows, IntRows, Ints, aligned, once, struct_of
from pointproj.ops.specification.records import FIELDS

ROUNDINGS = 16.0  # rounding errors of a distance to a cell, relative to the largest coordinate of its faces
# Squares of distances below about this one round to 0 or lose bits: the slack is at least as large.
LEAST_DISTANCE = {torch.float32: 1.5e-22, torch.float64: 9e-162}
KNOTS = 32  # most intervals of a graded grid along an axis
FRAME = 12  # numbers of a frame before the knots


class CellList(NamedTuple):
    """The tables of a set of points.

    The last cell of a cloud is not part of its grid: it has the points that are not finite.
    """

    # (clouds, FRAME or FRAME + 3 (KNOTS + 1)): corner of cell 0, edges of a cell, lowest and highest of all,
    # knots, if grids may be graded
    frames: CoordinateRows
    # (clouds, 8): cells along x, y, z; numbers of the first cell and of the last; cells between two knots
    # along x, y, z, 0 where cells are of equal width
    shapes: IntRows
    start: Ints  # (cells + 1,): first sorted point of each cell, then the number of points
    points: CoordinateRows  # (rows, 4): sorted positions, and the bits of their row in the given set


FIELDS[CellList] = dict.fromkeys(CellList._fields, Tensor | None)
NO_TABLES = CellList(None, None, None, None)  # for an operator that builds them


def may_be_graded(cells: CellList) -> bool:
    """Whether kernels need their form for graded grids, as the shapes of the tables say."""
    return cells.frames.shape[1] > FRAME


def readable(cells: CellList) -> CellList:
    """The tables of an index, with points aligned for reads of 16 bytes, wherever a hook moved them."""
    return cells._replace(points=aligned(cells.points))


@once
def grid_of(dtype: torch.dtype) -> tuple[Any, wp.Function]:
    """One cloud's grid, and ``load(cells, cloud, q, graded) -> grid``, with a slack for distances from q.

    Where a kernel says that the grid is not ``graded``, compilers leave out all that such grids need.
    """
    real, vec3, _ = REALS[dtype]
    CellListStruct = struct_of(CellList, dtype)
    unit, least = torch.finfo(dtype).eps * ROUNDINGS, LEAST_DISTANCE[dtype]

    @wp.struct
    class GridStruct:
        low: vec3  # corner of cell 0
        edge: vec3
        per_unit: vec3  # cells per unit of length
        shape: wp.vec3i
        outside: vec3  # distance along each axis from q to the cloud, never too large
        base: int  # number of cell 0 in the tables
        slack: real
        between: wp.vec3i  # cells between two knots; 0 where cells are of equal width
        frames: wp.array2d(dtype=real)
        cloud: int

    @wp.func
    def load(cells: CellListStruct, cloud: int, q: vec3, graded: bool):
        grid = GridStruct()
        largest = real(0.0)
        for axis in range(3):
            grid.low[axis] = cells.frames[cloud, axis]
            grid.edge[axis] = cells.frames[cloud, axis + 3]
            grid.shape[axis] = cells.shapes[cloud, axis]
            if graded:
                grid.between[axis] = cells.shapes[cloud, axis + 5]
            if grid.edge[axis] > real(0.0):
                grid.per_unit[axis] = real(1.0) / grid.edge[axis]
            lowest = cells.frames[cloud, axis + 6]
            highest = cells.frames[cloud, axis + 9]
            grid.outside[axis] = wp.max(lowest - q[axis], q[axis] - highest)
            # Of faces alone: a point far beyond them is in a border cell, whose end there is exact.
            begin = grid.low[axis]
            end = begin + real(grid.shape[axis]) * grid.edge[axis]
            largest = wp.max(largest, wp.max(wp.abs(q[axis]), wp.max(wp.abs(begin), wp.abs(end))))
        grid.slack = real(unit) * largest + real(least)
        for axis in range(3):
            grid.outside[axis] = wp.max(grid.outside[axis] - grid.slack, real(0.0))
        grid.base = cells.shapes[cloud, 3]
        grid.frames = cells.frames
        grid.cloud = cloud
        return grid

    return GridStruct, load


@wp.func
def knot(grid: Any, axis: int, number: int):
    return grid.frames[grid.cloud, FRAME + axis * (KNOTS + 1) + number]


@wp.func
def graded_cell(x: Any, grid: Any, axis: int):
    """The cell of a coordinate in a graded grid: the last knot up to it, and its part of the interval."""
    between = grid.between[axis]
    low = int(0)
    high = grid.shape[axis] / between
    while high - low > 1:
        middle = (low + high) / 2
        if x >= knot(grid, axis, middle):
            low = middle
        else:
            high = middle
    begin = knot(grid, axis, low)
    width = knot(grid, axis, low + 1) - begin
    part = int(0)
    if x > begin and width > type(x)(0.0):
        t = (x - begin) / width * type(x)(between)
        part = int(wp.min(t, type(x)(between - 1)))
    return low * between + part


@wp.func
def cell_along(x: Any, grid: Any, axis: int):
    """The cell of a coordinate along an axis; outside of the grid, the border cell."""
    if grid.between[axis] > 0:
        return graded_cell(x, grid, axis)
    t = (x - grid.low[axis]) * grid.per_unit[axis]
    if not (t > type(x)(0.0)):
        return 0
    return int(wp.min(t, type(x)(grid.shape[axis] - 1)))


@wp.func
def cell_at(p: Any, grid: Any):
    """A point's cell along each axis."""
    return wp.vec3i(cell_along(p[0], grid, 0), cell_along(p[1], grid, 1), cell_along(p[2], grid, 2))


@wp.func
def first_cell(grid: Any, y: int, z: int):
    """The number of the first cell of a row along x in the tables."""
    return grid.base + (z * grid.shape[1] + y) * grid.shape[0]


@wp.func
def face(grid: Any, axis: int, cell: int):
    """Where a cell begins along an axis."""
    between = grid.between[axis]
    if between > 0:
        begin = knot(grid, axis, cell / between)
        part = cell % between
        if part > 0:
            width = knot(grid, axis, cell / between + 1) - begin
            begin += width * (type(grid.slack)(part) / type(grid.slack)(between))
        return begin
    return grid.low[axis] + type(grid.slack)(cell) * grid.edge[axis]


@wp.func
def gap(x: Any, grid: Any, axis: int, cell: int):
    """A lower bound of the distance along an axis to a cell; border cells extend to the farthest points."""
    away = grid.outside[axis]
    if cell > 0:
        away = wp.max(away, face(grid, axis, cell) - x - grid.slack)
    if cell < grid.shape[axis] - 1:
        away = wp.max(away, x - face(grid, axis, cell + 1) - grid.slack)
    return away


@wp.func
def clip(x: Any, grid: Any, axis: int, square: Any, first: int, last: int):
    """The cells from first to last within a squared distance along an axis; none if it is negative."""
    if square < type(x)(0.0):
        return first, first - 1
    if square < type(x)(wp.inf):
        far = wp.sqrt(square) + grid.slack
        first = wp.max(first, cell_along(x - far, grid, axis))
        last = wp.min(last, cell_along(x + far, grid, axis))
    return first, last


@wp.func
def squared_outside(q: Any, grid: Any, at: wp.vec3i, shell: int):
    """A lower bound of the squared distance to cells outside of a shell; infinite if there are none."""
    zero = type(grid.slack)(0.0)
    nearest = type(grid.slack)(wp.inf)
    for axis in range(3):
        rest = type(grid.slack)(0.0)
        for other in range(3):
            if other != axis:
                rest += grid.outside[other] * grid.outside[other]
        if at[axis] - shell > 0:
            before = wp.max(q[axis] - face(grid, axis, at[axis] - shell) - grid.slack, zero)
            nearest = wp.min(nearest, rest + before * before)
        if at[axis] + shell < grid.shape[axis] - 1:
            after = wp.max(face(grid, axis, at[axis] + shell + 1) - q[axis] - grid.slack, zero)
            nearest = wp.min(nearest, rest + after * after)
    return nearest
