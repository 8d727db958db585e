"""Visiting the points near a query, cell by cell: the code that every search here shares.

:func:`ring_search` starts at the query's cell and widens ring by ring until nothing closer can follow
(k nearest). :func:`box_search` visits what a fixed radius can reach. Both take what happens at a run of
points as functions, and go down into crowded cells by themselves.

Distances to cells are shortened by a slack of a few rounding errors of the coordinates, because a point
and the border of its cell are computed in different ways.
"""

import functools
from typing import Any, NamedTuple

import torch
import warp as wp

from pointproj.backends.warp.cells import AXIS_BITS, REALS, cell_functions

ROUNDINGS = 16.0  # rounding errors, in units of the largest coordinate, that a distance to a cell can have


class Visitor(NamedTuple):
    """What a search does with points: all Warp types and functions of one position dtype."""

    state: Any  # struct that travels through the search
    arrays: Any  # struct with the arrays that ``scan`` reads and writes
    scan: wp.Function  # (state, q, grid, arrays, begin, end) -> state: rows of sorted points
    bound: wp.Function  # (state, arrays) -> squared distance beyond which nothing matters


@functools.cache
def grid_struct(dtype: torch.dtype) -> Any:
    """The cell list inside a kernel, for positions of one dtype."""
    real, vec3 = REALS[dtype]

    @wp.struct
    class Grid:
        frames: wp.array2d(dtype=real)
        dims: wp.array2d(dtype=wp.int32)
        subframes: wp.array2d(dtype=real)
        subdims: wp.array(dtype=wp.int32)
        first: wp.array(dtype=wp.int32)
        start: wp.array(dtype=wp.int32)
        points: wp.array(dtype=vec3)
        order: wp.array(dtype=wp.int32)

    return Grid


@functools.cache
def grid_maker(dtype: torch.dtype) -> wp.Function:
    """A function that puts a kernel's cell list arguments together."""
    real, vec3 = REALS[dtype]
    Grid = grid_struct(dtype)

    @wp.func
    def grid_of(
        frames: wp.array2d(dtype=real),
        dims: wp.array2d(dtype=wp.int32),
        subframes: wp.array2d(dtype=real),
        subdims: wp.array(dtype=wp.int32),
        first: wp.array(dtype=wp.int32),
        start: wp.array(dtype=wp.int32),
        points: wp.array(dtype=vec3),
        order: wp.array(dtype=wp.int32),
    ):
        grid = Grid()
        grid.frames = frames
        grid.dims = dims
        grid.subframes = subframes
        grid.subdims = subdims
        grid.first = first
        grid.start = start
        grid.points = points
        grid.order = order
        return grid

    return grid_of


@functools.cache
def geometry(dtype: torch.dtype) -> Any:
    """Distances between a query and cells."""
    real, vec3 = REALS[dtype]
    unit = torch.finfo(dtype).eps * ROUNDINGS

    @wp.struct
    class Frame:
        """One grid of cells: a cloud's, or the sub-cells of one cell."""

        low: vec3  # corner of cell 0
        edge: vec3
        shape: wp.vec3i
        outer_low: vec3  # border cells reach out to here
        outer_high: vec3
        base: int  # number of cell 0 in the tables

    @wp.func
    def slack_of(q: vec3, frame: Frame):
        reach = wp.max(wp.max(wp.abs(frame.outer_low), wp.abs(frame.outer_high)), wp.abs(q))
        return real(unit) * wp.max(reach)

    @wp.func
    def gap(x: real, frame: Frame, axis: int, cell: int, slack: real):
        """Distance along an axis from x to a cell's slab, never too large."""
        low = frame.outer_low[axis]
        high = frame.outer_high[axis]
        if cell > 0:
            low = frame.low[axis] + real(cell) * frame.edge[axis]
        if cell < frame.shape[axis] - 1:
            high = frame.low[axis] + real(cell + 1) * frame.edge[axis]
        return wp.max(wp.max(low - x, x - high) - slack, real(0.0))

    @wp.func
    def beyond(q: vec3, frame: Frame, at: wp.vec3i, ring: int, slack: real):
        """Squared distance to the nearest cell outside a ring around ``at``, never too large."""
        outside = vec3()
        for axis in range(3):
            away = wp.max(frame.outer_low[axis] - q[axis], q[axis] - frame.outer_high[axis])
            outside[axis] = wp.max(away - slack, real(0.0))
        nearest = real(wp.inf)
        for axis in range(3):
            rest = wp.length_sq(outside) - outside[axis] * outside[axis]
            if at[axis] - ring > 0:
                face = q[axis] - (frame.low[axis] + real(at[axis] - ring) * frame.edge[axis])
                face = wp.max(face - slack, real(0.0))
                nearest = wp.min(nearest, rest + face * face)
            if at[axis] + ring < frame.shape[axis] - 1:
                face = frame.low[axis] + real(at[axis] + ring + 1) * frame.edge[axis] - q[axis]
                face = wp.max(face - slack, real(0.0))
                nearest = wp.min(nearest, rest + face * face)
        return nearest

    return Frame, slack_of, gap, beyond


@functools.cache
def frames(dtype: torch.dtype) -> Any:
    """The grid of a cloud, and the grid of sub-cells in one cell."""
    real, vec3 = REALS[dtype]
    Grid = grid_struct(dtype)
    Frame, *_ = geometry(dtype)
    _, low_of, edge_of, _, _ = cell_functions(dtype)

    @wp.func
    def cloud_frame(grid: Grid, cloud: int):
        frame = Frame()
        frame.low = low_of(grid.frames, cloud)
        frame.edge = edge_of(grid.frames, cloud)
        frame.shape = wp.vec3i(grid.dims[cloud, 0], grid.dims[cloud, 1], grid.dims[cloud, 2])
        frame.outer_low = frame.low
        frame.outer_high = frame.low + wp.cw_mul(
            vec3(real(frame.shape[0]), real(frame.shape[1]), real(frame.shape[2])), frame.edge
        )
        frame.base = grid.dims[cloud, 3]
        return frame

    @wp.func
    def subcell_frame(grid: Grid, parent: Frame, cell: int, x: int, y: int, z: int):
        frame = Frame()
        frame.low = low_of(grid.subframes, cell)
        frame.edge = edge_of(grid.subframes, cell)
        packed = grid.subdims[cell]
        mask = (1 << AXIS_BITS) - 1
        frame.shape = wp.vec3i(packed & mask, (packed >> AXIS_BITS) & mask, packed >> (2 * AXIS_BITS))
        frame.outer_low = parent.low + wp.cw_mul(vec3(real(x), real(y), real(z)), parent.edge)
        frame.outer_high = parent.low + wp.cw_mul(vec3(real(x + 1), real(y + 1), real(z + 1)), parent.edge)
        frame.base = grid.first[cell]
        return frame

    return cloud_frame, subcell_frame


def ring_search(dtype: torch.dtype, visitor: Visitor) -> wp.Function:
    """Search outwards from the query until the visitor's bound is inside what has been seen."""
    return _two_levels(dtype, visitor, _ring)


def box_search(dtype: torch.dtype, visitor: Visitor) -> wp.Function:
    """Visit every cell that the visitor's bound, which must not change, can reach."""
    return _two_levels(dtype, visitor, _box)


def _two_levels(dtype: torch.dtype, visitor: Visitor, over_rows: Any) -> wp.Function:
    """``search(state, q, grid, arrays, cloud) -> state``."""
    Grid = grid_struct(dtype)
    Frame, slack_of, gap, _ = geometry(dtype)
    cloud_frame, subcell_frame = frames(dtype)
    real, vec3 = REALS[dtype]
    State, Arrays, scan, bound = visitor

    @wp.func
    def visit_subcells(
        state: State,
        q: vec3,
        grid: Grid,
        arrays: Arrays,
        frame: Frame,
        y: int,
        z: int,
        x0: int,
        x1: int,
        slack: real,
        across: real,
    ):
        row = frame.base + (z * frame.shape[1] + y) * frame.shape[0]
        return scan(state, q, grid, arrays, grid.start[row + x0], grid.start[row + x1 + 1])

    search_subcells = over_rows(dtype, visitor, visit_subcells)

    @wp.func
    def visit_cells(
        state: State,
        q: vec3,
        grid: Grid,
        arrays: Arrays,
        frame: Frame,
        y: int,
        z: int,
        x0: int,
        x1: int,
        slack: real,
        across: real,
    ):
        row = frame.base + (z * frame.shape[1] + y) * frame.shape[0]
        first = grid.first[row + x0]
        last = grid.first[row + x1 + 1]
        if last - first == x1 - x0 + 1:  # none of them is cut: one run
            return scan(state, q, grid, arrays, grid.start[first], grid.start[last])
        for x in range(x0, x1 + 1):
            cell = row + x
            first = grid.first[cell]
            last = grid.first[cell + 1]
            if last - first == 1:
                state = scan(state, q, grid, arrays, grid.start[first], grid.start[last])
            else:
                along = gap(q[0], frame, 0, x, slack)
                if along * along + across <= bound(state, arrays):
                    subframe = subcell_frame(grid, frame, cell, x, y, z)
                    state = search_subcells(state, q, grid, arrays, subframe, slack)
        return state

    search_cells = over_rows(dtype, visitor, visit_cells)

    @wp.func
    def search(state: State, q: vec3, grid: Grid, arrays: Arrays, cloud: int):
        frame = cloud_frame(grid, cloud)
        return search_cells(state, q, grid, arrays, frame, slack_of(q, frame))

    return search


def _row_visitor(dtype: torch.dtype, visitor: Visitor, visit: wp.Function) -> Any:
    """Visit the part of one row of cells, along x, that the bound can reach."""
    real, vec3 = REALS[dtype]
    Grid = grid_struct(dtype)
    Frame, _, gap, _ = geometry(dtype)
    axis_cell, *_ = cell_functions(dtype)
    State, Arrays, _, bound = visitor

    @wp.func
    def visit_row(
        state: State,
        q: vec3,
        grid: Grid,
        arrays: Arrays,
        frame: Frame,
        y: int,
        z: int,
        x0: int,
        x1: int,
        slack: real,
    ):
        across_y = gap(q[1], frame, 1, y, slack)
        across_z = gap(q[2], frame, 2, z, slack)
        across = across_y * across_y + across_z * across_z
        limit = bound(state, arrays)
        if across <= limit:
            first = x0
            last = x1
            if limit < real(wp.inf):
                reach = wp.sqrt(limit - across) + slack
                first = wp.max(first, axis_cell(q[0] - reach, frame.low[0], frame.edge[0], frame.shape[0]))
                last = wp.min(last, axis_cell(q[0] + reach, frame.low[0], frame.edge[0], frame.shape[0]))
            if first <= last:
                state = visit(state, q, grid, arrays, frame, y, z, first, last, slack, across)
        return state

    return visit_row


def _ring(dtype: torch.dtype, visitor: Visitor, visit: wp.Function) -> wp.Function:
    """Rows in growing rings around the query's cell; the first ring includes its inside."""
    real, vec3 = REALS[dtype]
    Grid = grid_struct(dtype)
    Frame, _, _, beyond = geometry(dtype)
    axis_cell, *_ = cell_functions(dtype)
    State, Arrays, _, bound = visitor
    visit_row = _row_visitor(dtype, visitor, visit)

    @wp.func
    def outward(i: int):
        """0, -1, 1, -2, 2, ...: the rows nearest the query first, they tighten the bound."""
        return wp.where(i % 2 == 1, -(i + 1) / 2, i / 2)

    @wp.func
    def search(state: State, q: vec3, grid: Grid, arrays: Arrays, frame: Frame, slack: real):
        at = wp.vec3i(
            axis_cell(q[0], frame.low[0], frame.edge[0], frame.shape[0]),
            axis_cell(q[1], frame.low[1], frame.edge[1], frame.shape[1]),
            axis_cell(q[2], frame.low[2], frame.edge[2], frame.shape[2]),
        )
        ring = int(1)
        searching = bool(True)
        while searching:
            x0 = wp.max(at[0] - ring, 0)
            x1 = wp.min(at[0] + ring, frame.shape[0] - 1)
            for i in range(2 * ring + 1):
                z = at[2] + outward(i)
                if z >= 0 and z < frame.shape[2]:
                    for j in range(2 * ring + 1):
                        y = at[1] + outward(j)
                        if y >= 0 and y < frame.shape[1]:
                            if ring == 1 or i >= 2 * ring - 1 or j >= 2 * ring - 1:
                                state = visit_row(state, q, grid, arrays, frame, y, z, x0, x1, slack)
                            else:  # inner rows were seen before, but for their new ends
                                if at[0] - ring >= 0:
                                    state = visit_row(state, q, grid, arrays, frame, y, z, x0, x0, slack)
                                if at[0] + ring < frame.shape[0]:
                                    state = visit_row(state, q, grid, arrays, frame, y, z, x1, x1, slack)
            next_distance = beyond(q, frame, at, ring, slack)
            searching = next_distance < real(wp.inf) and next_distance <= bound(state, arrays)
            ring += 1
        return state

    return search


def _box(dtype: torch.dtype, visitor: Visitor, visit: wp.Function) -> wp.Function:
    """All rows that a fixed bound reaches."""
    real, vec3 = REALS[dtype]
    Grid = grid_struct(dtype)
    Frame, _, _, _ = geometry(dtype)
    axis_cell, *_ = cell_functions(dtype)
    State, Arrays, _, bound = visitor
    visit_row = _row_visitor(dtype, visitor, visit)

    @wp.func
    def search(state: State, q: vec3, grid: Grid, arrays: Arrays, frame: Frame, slack: real):
        reach = wp.sqrt(bound(state, arrays)) + slack
        y0 = axis_cell(q[1] - reach, frame.low[1], frame.edge[1], frame.shape[1])
        y1 = axis_cell(q[1] + reach, frame.low[1], frame.edge[1], frame.shape[1])
        z0 = axis_cell(q[2] - reach, frame.low[2], frame.edge[2], frame.shape[2])
        z1 = axis_cell(q[2] + reach, frame.low[2], frame.edge[2], frame.shape[2])
        for z in range(z0, z1 + 1):
            for y in range(y0, y1 + 1):
                state = visit_row(state, q, grid, arrays, frame, y, z, 0, frame.shape[0] - 1, slack)
        return state

    return search
