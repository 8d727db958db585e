"""Searching outwards from a query, ring by ring of cells, until nothing closer can follow.

Distances to cells are shortened by a slack of a few rounding errors of the coordinates, because a point
and the border of its cell are computed in different ways.
"""

import functools
from typing import Any, NamedTuple

import torch
import warp as wp

from pointproj.backends.warp.common import CROWD, REALS, ROUNDINGS, cell_functions, subcells_along
from pointproj.backends.warp.lanes import Lanes, lowest_bit, run_visitor
from pointproj.backends.warp.scan import crowds_before, points_before

LARGEST_FIRST_RING = 3  # the first ring visited includes its inside
PLENTY = 3  # it should hold so many times the neighbours wanted


class Visitor(NamedTuple):
    """What a search does with the points it meets."""

    state: Any  # struct that travels through the search, with ``effort`` (int) and ``gave_up`` (bool)
    arrays: Any  # struct with arrays to read and write
    consider: wp.Function  # (state, q, grid, arrays, at, exists) -> state, one candidate a lane
    bound: wp.Function  # (state, arrays) -> squared distance beyond which nothing matters
    wanted: int  # neighbours searched for


@functools.cache
def grid_struct(dtype: torch.dtype) -> Any:
    """The cell list inside a kernel, and a function that makes it of the kernel's arguments."""
    real, _ = REALS[dtype]

    @wp.struct
    class Grid:
        frames: wp.array2d(dtype=real)
        dims: wp.array2d(dtype=wp.int32)
        cut: wp.array(dtype=wp.int32)
        subframes: wp.array2d(dtype=real)
        subdims: wp.array2d(dtype=wp.int32)
        start: wp.array(dtype=wp.int64)
        points: wp.array2d(dtype=real)

    @wp.func
    def grid_of(
        frames: wp.array2d(dtype=real),
        dims: wp.array2d(dtype=wp.int32),
        cut: wp.array(dtype=wp.int32),
        subframes: wp.array2d(dtype=real),
        subdims: wp.array2d(dtype=wp.int32),
        start: wp.array(dtype=wp.int64),
        points: wp.array2d(dtype=real),
    ):
        grid = Grid()
        grid.frames = frames
        grid.dims = dims
        grid.cut = cut
        grid.subframes = subframes
        grid.subdims = subdims
        grid.start = start
        grid.points = points
        return grid

    return Grid, grid_of


@functools.cache
def _frames(dtype: torch.dtype) -> Any:
    """One grid of cells, a cloud's or that inside one cell, and distances to its cells."""
    real, vec3 = REALS[dtype]
    Grid, _ = grid_struct(dtype)
    inverse, _, low_of, edge_of, _, _ = cell_functions(dtype)
    unit = torch.finfo(dtype).eps * ROUNDINGS

    @wp.struct
    class Frame:
        low: vec3  # corner of cell 0
        edge: vec3
        per_unit: vec3  # 1 / edge
        shape: wp.vec3i
        outer_low: vec3  # border cells reach out to here
        outer_high: vec3
        base: int  # number of cell 0 in the tables
        slack: real

    @wp.func
    def cloud_frame(grid: Grid, cloud: int, q: vec3):
        frame = Frame()
        frame.low = low_of(grid.frames, cloud)
        frame.edge = edge_of(grid.frames, cloud)
        frame.per_unit = inverse(frame.edge)
        frame.shape = wp.vec3i(grid.dims[cloud, 0], grid.dims[cloud, 1], grid.dims[cloud, 2])
        for axis in range(3):
            frame.outer_low[axis] = grid.frames[cloud, axis + 6]
            frame.outer_high[axis] = grid.frames[cloud, axis + 9]
        frame.base = grid.dims[cloud, 3]
        largest = wp.max(wp.max(wp.abs(frame.outer_low), wp.abs(frame.outer_high)), wp.abs(q))
        frame.slack = real(unit) * wp.max(largest)
        return frame

    @wp.func
    def crowd_frame(grid: Grid, parent: Frame, cell: int, x: int, y: int, z: int):
        """The sub-cells of a crowded cell."""
        frame = Frame()
        at = wp.vec3i(x, y, z)
        for axis in range(3):
            frame.outer_low[axis] = parent.outer_low[axis]
            frame.outer_high[axis] = parent.outer_high[axis]
            if at[axis] > 0:
                frame.outer_low[axis] = parent.low[axis] + real(at[axis]) * parent.edge[axis]
            if at[axis] < parent.shape[axis] - 1:
                frame.outer_high[axis] = parent.low[axis] + real(at[axis] + 1) * parent.edge[axis]
        crowd = grid.cut[cell]
        frame.low = low_of(grid.subframes, crowd)
        frame.edge = edge_of(grid.subframes, crowd)
        frame.shape = subcells_along(grid.subdims[crowd, 0])
        frame.per_unit = inverse(frame.edge)
        frame.base = grid.subdims[crowd, 1]
        frame.slack = parent.slack
        return frame

    @wp.func
    def gap(x: real, frame: Frame, axis: int, cell: int):
        """Distance along an axis from x to a cell's slab, never too large."""
        low = frame.outer_low[axis]
        high = frame.outer_high[axis]
        if cell > 0:
            low = frame.low[axis] + real(cell) * frame.edge[axis]
        if cell < frame.shape[axis] - 1:
            high = frame.low[axis] + real(cell + 1) * frame.edge[axis]
        return wp.max(wp.max(low - x, x - high) - frame.slack, real(0.0))

    @wp.func
    def beyond(q: vec3, frame: Frame, at: wp.vec3i, ring: int):
        """Squared distance to the nearest cell outside a ring around ``at``, never too large."""
        outside = vec3()
        for axis in range(3):
            away = wp.max(frame.outer_low[axis] - q[axis], q[axis] - frame.outer_high[axis])
            outside[axis] = wp.max(away - frame.slack, real(0.0))
        nearest = real(wp.inf)
        for axis in range(3):
            rest = real(0.0)
            for other in range(3):
                if other != axis:
                    rest += outside[other] * outside[other]
            if at[axis] - ring > 0:
                face = q[axis] - (frame.low[axis] + real(at[axis] - ring) * frame.edge[axis])
                face = wp.max(face - frame.slack, real(0.0))
                nearest = wp.min(nearest, rest + face * face)
            if at[axis] + ring < frame.shape[axis] - 1:
                face = frame.low[axis] + real(at[axis] + ring + 1) * frame.edge[axis] - q[axis]
                face = wp.max(face - frame.slack, real(0.0))
                nearest = wp.min(nearest, rest + face * face)
        return nearest

    return Frame, cloud_frame, crowd_frame, gap, beyond


def ring_search(
    dtype: torch.dtype, lanes: Lanes, visitor: Visitor, into_crowds: bool, patience: int
) -> wp.Function:
    """``search(state, q, grid, arrays, cloud) -> state`` through both levels of the cell list.

    With ``into_crowds`` false it stays on one level, for a query in a crowd that of the sub-cells, and sets
    ``state.gave_up`` where the other has to be seen: most queries never need it, and a thread needs far fewer
    registers then. So it does after looking at ``patience`` rows of cells, unless that is 0.
    """
    real, vec3 = REALS[dtype]
    Grid, _ = grid_struct(dtype)
    _, cloud_frame, crowd_frame, _, beyond = _frames(dtype)
    *_, cell_at, _ = cell_functions(dtype)
    State, Arrays, consider, bound, _ = visitor
    visit_runs = run_visitor(lanes, vec3, State, Grid, Arrays, consider)

    visit_crowds = None
    if into_crowds:
        search_crowd = _search_grid(dtype, lanes, visitor, visit_runs, patience, True)
        visit_crowds = _crowd_visitor(dtype, visitor, search_crowd)
    search_cells = _search_grid(dtype, lanes, visitor, visit_runs, patience, False, visit_crowds)

    @wp.func
    def search_both(state: State, q: vec3, grid: Grid, arrays: Arrays, cloud: int):
        return search_cells(state, q, grid, arrays, cloud_frame(grid, cloud, q))

    @wp.func
    def search_one(state: State, q: vec3, grid: Grid, arrays: Arrays, cloud: int):
        frame = cloud_frame(grid, cloud, q)
        at = cell_at(q, frame.low, frame.per_unit, frame.shape)
        cell = frame.base + (at[2] * frame.shape[1] + at[1]) * frame.shape[0] + at[0]
        outside = real(wp.inf)
        if crowds_before(grid.start[cell + 1] - grid.start[cell]) > 0:
            outside = beyond(q, frame, at, 0)
            frame = crowd_frame(grid, frame, cell, at[0], at[1], at[2])
        state = search_cells(state, q, grid, arrays, frame)
        if outside < real(wp.inf) and outside <= bound(state, arrays):
            state.gave_up = True
        return state

    return search_both if into_crowds else search_one


def _search_grid(
    dtype: torch.dtype,
    lanes: Lanes,
    visitor: Visitor,
    visit_runs: wp.Function,
    patience: int,
    is_lowest: bool,
    visit_crowds: wp.Function | None = None,
) -> wp.Function:
    """One level. Each lane takes a row of cells; crowded cells come after the others."""
    real, vec3 = REALS[dtype]
    Grid, _ = grid_struct(dtype)
    Frame, _, _, gap, beyond = _frames(dtype)
    _, axis_cell, _, _, cell_at, _ = cell_functions(dtype)
    State, Arrays, _, bound, wanted = visitor
    visits_crowds = visit_crowds is not None
    gives_up = not is_lowest and not visits_crowds
    lanes_count, lane, take, ballot = lanes.count, lanes.lane, lanes.take, lanes.ballot

    @wp.func
    def nearest_first(j: int, at: int, low: int, high: int):
        """The j-th of the numbers from ``low`` to ``high``, those nearest ``at`` first."""
        left = wp.max(at - low, 0)
        both = wp.min(left, wp.max(high - at, 0))
        if j <= 2 * both:
            return at + wp.where(j % 2 == 1, -(j + 1) / 2, j / 2)
        return wp.where(left > both, at - j + both, at + j - both)

    @wp.func
    def reach(q: vec3, frame: Frame, y: int, z: int, x0: int, x1: int, limit: real):
        """The part of a row that the bound can reach: first and last cell, none if they cross."""
        across_y = gap(q[1], frame, 1, y)
        across_z = gap(q[2], frame, 2, z)
        along = limit - (across_y * across_y + across_z * across_z)
        if along < real(0.0):
            return 0, -1
        first = wp.max(x0, 0)
        last = wp.min(x1, frame.shape[0] - 1)
        if along < real(wp.inf):
            far = wp.sqrt(along) + frame.slack
            first = wp.max(first, axis_cell(q[0] - far, frame.low[0], frame.per_unit[0], frame.shape[0]))
            last = wp.min(last, axis_cell(q[0] + far, frame.low[0], frame.per_unit[0], frame.shape[0]))
        return first, last

    @wp.func
    def first_ring(grid: Grid, frame: Frame, at: wp.vec3i):
        """So wide that the points around the query, if they go on as in its row, are plenty.

        Only its own cell if that is crowded, or holds plenty: the bound found there leaves little of others.
        """
        row = frame.base + (at[2] * frame.shape[1] + at[1]) * frame.shape[0]
        home = grid.start[row + at[0] + 1] - grid.start[row + at[0]]
        if crowds_before(home) > 0 or points_before(home) >= PLENTY * wanted:
            return 0
        around = grid.start[row + wp.min(at[0] + 2, frame.shape[0])] - grid.start[row + wp.max(at[0] - 1, 0)]
        points = points_before(around) + CROWD * crowds_before(around)
        ring = int(1)
        for larger in range(2, LARGEST_FIRST_RING + 1):
            side = 2 * ring + 1
            if points * side * side * side < 3 * PLENTY * wanted:
                ring = larger
        return ring

    @wp.func
    def visit_box(
        state: State,
        q: vec3,
        grid: Grid,
        arrays: Arrays,
        frame: Frame,
        at: wp.vec3i,
        low: wp.vec3i,
        high: wp.vec3i,
        inner: int,
    ):
        """Visit the cells from ``low`` to ``high``, but for those up to ring ``inner``, within the bound."""
        width = high[1] - low[1] + 1
        height = wp.where(width > 0, high[2] - low[2] + 1, 0)
        parts = wp.where(inner < 0, 1, 2)  # rows seen before have only their two new ends
        for part in range(parts):
            row_y = lane()
            row_z = int(0)
            for _first in range(0, width * height, lanes_count):
                limit = bound(state, arrays)
                while row_y >= width:
                    row_y -= width
                    row_z += 1
                # The rows nearest the query first: they tighten the bound.
                y = nearest_first(row_y, at[1], low[1], high[1])
                z = nearest_first(row_z, at[2], low[2], high[2])
                x0 = low[0]
                x1 = high[0]
                idle = row_z >= height
                row_y += lanes_count
                if wp.abs(z - at[2]) <= inner and wp.abs(y - at[1]) <= inner:
                    if part == 0:
                        x1 = wp.min(x1, at[0] - inner - 1)
                    else:
                        x0 = wp.max(x0, at[0] + inner + 1)
                elif part == 1:
                    idle = True
                begin = int(0)
                count = int(0)
                crowded = bool(False)
                first = int(0)
                last = int(-1)
                if not idle:
                    first, last = reach(q, frame, y, z, x0, x1, limit)
                if first <= last:
                    cell = frame.base + (z * frame.shape[1] + y) * frame.shape[0]
                    before = grid.start[cell + first]
                    inside = grid.start[cell + last + 1] - before
                    begin = points_before(before)
                    count = points_before(inside)
                    crowded = crowds_before(inside) > 0
                state = visit_runs(state, q, grid, arrays, begin, count)
                if wp.static(gives_up) and ballot(crowded) != 0:
                    state.gave_up = True
                if wp.static(visits_crowds):
                    waiting = ballot(crowded)
                    while waiting != 0:
                        source = lowest_bit(waiting)
                        waiting = waiting & (waiting - 1)
                        first_crowd = take(first, source)
                        last_crowd = take(last, source)
                        crowd_y = take(y, source)
                        crowd_z = take(z, source)
                        state = visit_crowds(
                            state, q, grid, arrays, frame, first_crowd, last_crowd, crowd_y, crowd_z
                        )
        return state

    @wp.func
    def search(state: State, q: vec3, grid: Grid, arrays: Arrays, frame: Frame):
        at = cell_at(q, frame.low, frame.per_unit, frame.shape)
        ring = first_ring(grid, frame, at)
        inner = int(-1)  # the ring up to which all has been visited
        searching = bool(True)
        while searching:
            limit = bound(state, arrays)
            low = wp.vec3i()
            high = wp.vec3i()
            for axis in range(3):
                low[axis] = wp.max(at[axis] - ring, 0)
                high[axis] = wp.min(at[axis] + ring, frame.shape[axis] - 1)
                if limit < real(wp.inf):  # enough is found: what can still be closer
                    far = wp.sqrt(limit) + frame.slack
                    unit = frame.per_unit[axis]
                    nearest = axis_cell(q[axis] - far, frame.low[axis], unit, frame.shape[axis])
                    farthest = axis_cell(q[axis] + far, frame.low[axis], unit, frame.shape[axis])
                    low[axis] = wp.max(low[axis], nearest)
                    high[axis] = wp.min(high[axis], farthest)
            if wp.static(patience > 0):
                state.effort += wp.max(high[1] - low[1] + 1, 0) * wp.max(high[2] - low[2] + 1, 0)
                state.gave_up = state.gave_up or state.effort > patience
            if not state.gave_up:
                state = visit_box(state, q, grid, arrays, frame, at, low, high, inner)
            following = beyond(q, frame, at, ring)
            searching = following < real(wp.inf) and following <= bound(state, arrays)
            searching = searching and not state.gave_up
            inner = ring
            ring += 1 + ring / 2
        return state

    return search


def _crowd_visitor(dtype: torch.dtype, visitor: Visitor, search_crowd: wp.Function) -> wp.Function:
    """The crowds in a run of cells: all lanes go through it together, cell by cell."""
    _, vec3 = REALS[dtype]
    Grid, _ = grid_struct(dtype)
    Frame, _, crowd_frame, gap, _ = _frames(dtype)
    State, Arrays, _, bound, _ = visitor

    @wp.func
    def visit_crowds(
        state: State, q: vec3, grid: Grid, arrays: Arrays, frame: Frame, first: int, last: int, y: int, z: int
    ):
        across_y = gap(q[1], frame, 1, y)
        across_z = gap(q[2], frame, 2, z)
        for x in range(first, last + 1):
            cell = frame.base + (z * frame.shape[1] + y) * frame.shape[0] + x
            if crowds_before(grid.start[cell + 1] - grid.start[cell]) > 0:
                along = gap(q[0], frame, 0, x)
                if along * along + across_y * across_y + across_z * across_z <= bound(state, arrays):
                    state = search_crowd(state, q, grid, arrays, crowd_frame(grid, frame, cell, x, y, z))
        return state

    return visit_crowds
