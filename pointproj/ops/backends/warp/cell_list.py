"""The cell list: points sorted by cell, the first of each cell, and how far away cells are.

The box that holds most of a cloud is divided into cells, one grid for each cloud; those at its border extend
to the farthest points. Cells that follow each other along x hold one contiguous run of points.

Distances to cells are shortened by a slack of a few rounding errors of the coordinates, because a point
and the border of its cell are computed in different ways.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import warp as wp
from torch import Tensor

from pointproj.ops.backends.warp.common import REALS, IntRows, Ints, PlaceRows, aligned, once, struct_of

ROUNDINGS = 16.0  # rounding errors, in units of the largest coordinate, that a distance to a cell can have
# Below about this distance squares round to 0, or to numbers of few bits: slack for that.
LEAST_DISTANCE = {torch.float32: 1.5e-22, torch.float64: 9e-162}


class CellList(NamedTuple):
    """The tables of a set of points.

    Each cloud has a grid, with one more cell, its last, for points that are not finite: nobody looks there.
    """

    frames: PlaceRows  # (clouds, 12): corner of cell 0, edges of cells, lowest and highest corner of all
    shapes: IntRows  # (clouds, 5): cells along x, y, z; numbers of the first cell and of the last
    start: Ints  # (cells + 1,): first sorted point of each cell, then their number
    points: PlaceRows  # (rows, 4): positions, sorted, and the bits of their row in the set as given


def cell_list_of(tables: Sequence[Tensor]) -> CellList:
    """The tables of an index; points are read in long words, wherever a hook has brought them back."""
    cells = CellList(*tables)
    return cells._replace(points=aligned(cells.points))


class Grid(NamedTuple):
    """One cloud's grid of cells inside a kernel."""

    struct: Any
    load: wp.Function  # (cells, number, q) -> grid, with slack for distances from q
    along: wp.Function  # (x, grid, axis) -> cell along an axis
    cell_at: wp.Function  # (p, grid) -> its cell along each axis
    row: wp.Function  # (grid, y, z) -> number of the first cell of a row along x
    gap: wp.Function  # (x, grid, axis, cell) -> distance along an axis from x to a cell, never too large
    clip: wp.Function  # (x, grid, axis, square, first, last) -> those of the cells within a squared distance
    beyond: wp.Function  # (q, grid, at, shell) -> squared distance to the cells outside of a shell around one


@once
def grid_functions(dtype: torch.dtype) -> Grid:
    """Struct and functions for positions of one dtype."""
    real, vec3, _ = REALS[dtype]
    CellListStruct = struct_of(CellList, dtype)
    unit, least = torch.finfo(dtype).eps * ROUNDINGS, LEAST_DISTANCE[dtype]

    @wp.struct
    class GridStruct:
        low: vec3  # corner of cell 0
        edge: vec3
        per_unit: vec3  # cells a unit of length
        shape: wp.vec3i
        outside: vec3  # distance along each axis from q to the cloud, never too large
        base: int  # number of cell 0 in the tables
        slack: real

    @wp.func
    def load(cells: CellListStruct, number: int, q: vec3):
        grid = GridStruct()
        largest = real(0.0)
        for axis in range(3):
            grid.low[axis] = cells.frames[number, axis]
            grid.edge[axis] = cells.frames[number, axis + 3]
            grid.shape[axis] = cells.shapes[number, axis]
            if grid.edge[axis] > real(0.0):
                grid.per_unit[axis] = real(1.0) / grid.edge[axis]
            lowest = cells.frames[number, axis + 6]
            highest = cells.frames[number, axis + 9]
            grid.outside[axis] = wp.max(lowest - q[axis], q[axis] - highest)
            largest = wp.max(largest, wp.max(wp.abs(q[axis]), wp.max(wp.abs(lowest), wp.abs(highest))))
        grid.slack = real(unit) * largest + real(least)
        for axis in range(3):
            grid.outside[axis] = wp.max(grid.outside[axis] - grid.slack, real(0.0))
        grid.base = cells.shapes[number, 3]
        return grid

    @wp.func
    def along(x: real, grid: GridStruct, axis: int):
        """Points outside, by rounding or far away, are in the border cells."""
        t = (x - grid.low[axis]) * grid.per_unit[axis]
        if not (t > real(0.0)):
            return 0
        return int(wp.min(t, real(grid.shape[axis] - 1)))

    @wp.func
    def cell_at(p: vec3, grid: GridStruct):
        return wp.vec3i(along(p[0], grid, 0), along(p[1], grid, 1), along(p[2], grid, 2))

    @wp.func
    def row(grid: GridStruct, y: int, z: int):
        return grid.base + (z * grid.shape[1] + y) * grid.shape[0]

    @wp.func
    def face(grid: GridStruct, axis: int, cell: int):
        return grid.low[axis] + real(cell) * grid.edge[axis]

    @wp.func
    def gap(x: real, grid: GridStruct, axis: int, cell: int):
        """Border cells extend to the farthest points."""
        away = grid.outside[axis]
        if cell > 0:
            away = wp.max(away, face(grid, axis, cell) - x - grid.slack)
        if cell < grid.shape[axis] - 1:
            away = wp.max(away, x - face(grid, axis, cell + 1) - grid.slack)
        return away

    @wp.func
    def clip(x: real, grid: GridStruct, axis: int, square: real, first: int, last: int):
        """None of them if the square is negative."""
        if square < real(0.0):
            return first, first - 1
        if square < real(wp.inf):
            far = wp.sqrt(square) + grid.slack
            first = wp.max(first, along(x - far, grid, axis))
            last = wp.min(last, along(x + far, grid, axis))
        return first, last

    @wp.func
    def beyond(q: vec3, grid: GridStruct, at: wp.vec3i, shell: int):
        """Never too large; infinite where there are no such cells."""
        nearest = real(wp.inf)
        for axis in range(3):
            rest = real(0.0)
            for other in range(3):
                if other != axis:
                    rest += grid.outside[other] * grid.outside[other]
            if at[axis] - shell > 0:
                before = wp.max(q[axis] - face(grid, axis, at[axis] - shell) - grid.slack, real(0.0))
                nearest = wp.min(nearest, rest + before * before)
            if at[axis] + shell < grid.shape[axis] - 1:
                after = wp.max(face(grid, axis, at[axis] + shell + 1) - q[axis] - grid.slack, real(0.0))
                nearest = wp.min(nearest, rest + after * after)
        return nearest

    return Grid(GridStruct, load, along, cell_at, row, gap, clip, beyond)
