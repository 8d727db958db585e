"""The cell list as kernels see it, and how far away its cells are.

Distances to cells are shortened by a slack of a few rounding errors of the coordinates, because a point
and the border of its cell are computed in different ways.
"""

import functools
from typing import Any, NamedTuple

import torch
import warp as wp
from torch import Tensor

from pointproj.ops.backends.warp.common import (
    LEAST_DISTANCE,
    REALS,
    ROUNDINGS,
    cell_functions,
    subcells_along,
)


class CellList(NamedTuple):
    """The two-level cell list of :mod:`pointproj.ops.backends.warp.cell_list`, as tensors.

    An operator that builds its own has arrays of one allocation in their place, see
    :mod:`pointproj.ops.bridge.scratch`.
    """

    frames: Tensor  # (clouds, 12) real: each grid's corner and cell edges, each cloud's two corners
    dims: Tensor  # (clouds, 4) int32: cells along x, y, z; number of the first cell
    subgrid: Tensor  # (cells,) int32: of a dense cell, its row in the next two tables; of others, 0
    subframes: Tensor  # (subgrids, 6) real: lowest corner and edges of the sub-cells
    subdims: Tensor  # (subgrids, 2) int32: sub-cells along x, y, z, AXIS_BITS bits each; number of the first
    start: Tensor  # (subcells + 2,) int64: points and dense cells before each cell, as scan.py sums them up
    points: Tensor  # (N, 4) real: positions, sorted, and the bits of their row in the cloud as given


@functools.cache
def cell_list_struct(dtype: torch.dtype) -> Any:
    """:class:`CellList` inside a kernel."""
    real, _ = REALS[dtype]

    @wp.struct
    class CellListStruct:
        frames: wp.array2d(dtype=real)
        dims: wp.array2d(dtype=wp.int32)
        subgrid: wp.array(dtype=wp.int32)
        subframes: wp.array2d(dtype=real)
        subdims: wp.array2d(dtype=wp.int32)
        start: wp.array(dtype=wp.int64)
        points: wp.array2d(dtype=real)

    return CellListStruct


class Grids(NamedTuple):
    """One grid of cells, a cloud's or that inside a dense cell, and distances to its cells."""

    struct: Any
    of_cloud: wp.Function
    of_dense_cell: wp.Function
    gap: wp.Function
    narrow: wp.Function
    beyond: wp.Function


@functools.cache
def grids(dtype: torch.dtype) -> Grids:
    """Struct and functions for positions of one dtype."""
    real, vec3 = REALS[dtype]
    CellListStruct = cell_list_struct(dtype)
    inverse, axis_cell, low_of, edge_of, _, _ = cell_functions(dtype)
    unit, least = torch.finfo(dtype).eps * ROUNDINGS, LEAST_DISTANCE[dtype]

    @wp.struct
    class Grid:
        low: vec3  # corner of cell 0
        edge: vec3
        per_unit: vec3  # 1 / edge
        shape: wp.vec3i
        outer_low: vec3  # border cells extend to here
        outer_high: vec3
        base: int  # number of cell 0 in the tables
        slack: real

    @wp.func
    def of_cloud(cells: CellListStruct, cloud: int, q: vec3):
        grid = Grid()
        grid.low = low_of(cells.frames, cloud)
        grid.edge = edge_of(cells.frames, cloud)
        grid.per_unit = inverse(grid.edge)
        grid.shape = wp.vec3i(cells.dims[cloud, 0], cells.dims[cloud, 1], cells.dims[cloud, 2])
        for axis in range(3):
            grid.outer_low[axis] = cells.frames[cloud, axis + 6]
            grid.outer_high[axis] = cells.frames[cloud, axis + 9]
        grid.base = cells.dims[cloud, 3]
        largest = wp.max(wp.max(wp.abs(grid.outer_low), wp.abs(grid.outer_high)), wp.abs(q))
        grid.slack = real(unit) * wp.max(largest) + real(least)
        return grid

    @wp.func
    def of_dense_cell(cells: CellListStruct, parent: Grid, cell: int, x: int, y: int, z: int):
        """The sub-cells of a dense cell."""
        grid = Grid()
        at = wp.vec3i(x, y, z)
        for axis in range(3):
            grid.outer_low[axis] = parent.outer_low[axis]
            grid.outer_high[axis] = parent.outer_high[axis]
            if at[axis] > 0:
                grid.outer_low[axis] = parent.low[axis] + real(at[axis]) * parent.edge[axis]
            if at[axis] < parent.shape[axis] - 1:
                grid.outer_high[axis] = parent.low[axis] + real(at[axis] + 1) * parent.edge[axis]
        row = cells.subgrid[cell]
        grid.low = low_of(cells.subframes, row)
        grid.edge = edge_of(cells.subframes, row)
        grid.shape = subcells_along(cells.subdims[row, 0])
        grid.per_unit = inverse(grid.edge)
        grid.base = cells.subdims[row, 1]
        grid.slack = parent.slack
        return grid

    @wp.func
    def gap(x: real, grid: Grid, axis: int, cell: int):
        """Distance along an axis from x to a cell's slab, never too large."""
        low = grid.outer_low[axis]
        high = grid.outer_high[axis]
        if cell > 0:
            low = grid.low[axis] + real(cell) * grid.edge[axis]
        if cell < grid.shape[axis] - 1:
            high = grid.low[axis] + real(cell + 1) * grid.edge[axis]
        return wp.max(wp.max(low - x, x - high) - grid.slack, real(0.0))

    @wp.func
    def narrow(x: real, grid: Grid, axis: int, square: real, first: int, last: int):
        """Of cells along an axis those that may be within a squared distance; none if that is negative."""
        if square < real(0.0):
            return first, first - 1
        if square < real(wp.inf):
            far = wp.sqrt(square) + grid.slack
            low = axis_cell(x - far, grid.low[axis], grid.per_unit[axis], grid.shape[axis])
            high = axis_cell(x + far, grid.low[axis], grid.per_unit[axis], grid.shape[axis])
            first = wp.max(first, low)
            last = wp.min(last, high)
        return first, last

    @wp.func
    def beyond(q: vec3, grid: Grid, at: wp.vec3i, shell: int):
        """Squared distance to the nearest cell outside a shell around ``at``, never too large."""
        outside = vec3()
        for axis in range(3):
            away = wp.max(grid.outer_low[axis] - q[axis], q[axis] - grid.outer_high[axis])
            outside[axis] = wp.max(away - grid.slack, real(0.0))
        nearest = real(wp.inf)
        for axis in range(3):
            rest = real(0.0)
            for other in range(3):
                if other != axis:
                    rest += outside[other] * outside[other]
            if at[axis] - shell > 0:
                face = q[axis] - (grid.low[axis] + real(at[axis] - shell) * grid.edge[axis])
                face = wp.max(face - grid.slack, real(0.0))
                nearest = wp.min(nearest, rest + face * face)
            if at[axis] + shell < grid.shape[axis] - 1:
                face = grid.low[axis] + real(at[axis] + shell + 1) * grid.edge[axis] - q[axis]
                face = wp.max(face - grid.slack, real(0.0))
                nearest = wp.min(nearest, rest + face * face)
        return nearest

    return Grids(Grid, of_cloud, of_dense_cell, gap, narrow, beyond)
