"""Searching outwards from a query, ring by ring of cells, until nothing closer can follow."""

import torch
import warp as wp

from pointproj.ops.backends.warp.cell_rows import Visitor, box_visitor, plane_visitor, row_visitor
from pointproj.ops.backends.warp.common import CROWD, REALS, cell_functions
from pointproj.ops.backends.warp.frames import frames, grid_struct
from pointproj.ops.backends.warp.lanes import Lanes, run_visitor
from pointproj.ops.backends.warp.scan import crowds_before, points_before

LARGEST_FIRST_RING = 3  # the first ring visited includes its inside
PLENTY = 3  # it should hold so many times the neighbours wanted
EVERYTHING = 2**20  # a ring around all cells, for what a bound leaves of a grid that may be large
UNCOUNTED = -(2**30)  # effort that never reaches anybody's patience


def ring_search(
    dtype: torch.dtype, lanes: Lanes, visitor: Visitor, into_crowds: bool, patience: int
) -> wp.Function:
    """``search(state, q, grid, arrays, cloud) -> state`` through both levels of the cell list.

    With ``into_crowds`` false it stays on one level, for a query in a crowd that of the sub-cells, and sets
    ``state.gave_up`` where the other has to be seen: most queries never need it, and a thread needs far fewer
    registers then. So it does where a crowd takes it more than ``patience``, unless that is 0.
    """
    real, vec3 = REALS[dtype]
    Grid, _ = grid_struct(dtype)
    cloud_frame, crowd_frame, beyond = frames(dtype).of_cloud, frames(dtype).of_crowd, frames(dtype).beyond
    *_, cell_at, _ = cell_functions(dtype)
    State, Arrays, consider, bound, _ = visitor
    visit_runs = run_visitor(lanes, vec3, State, Grid, Arrays, consider)

    visit_crowds = None
    if into_crowds:
        search_crowd = _search_grid(dtype, lanes, visitor, visit_runs, patience, None, False)
        visit_crowds = _crowd_visitor(dtype, visitor, search_crowd)
    search_cells = _search_grid(
        dtype, lanes, visitor, visit_runs, patience, visit_crowds, gives_up=not into_crowds
    )

    @wp.func
    def search_both(state: State, q: vec3, grid: Grid, arrays: Arrays, cloud: int):
        return search_cells(state, q, grid, arrays, cloud_frame(grid, cloud, q))

    @wp.func
    def search_one(state: State, q: vec3, grid: Grid, arrays: Arrays, cloud: int):
        frame = cloud_frame(grid, cloud, q)
        at = cell_at(q, frame.low, frame.per_unit, frame.shape)
        cell = frame.base + (at[2] * frame.shape[1] + at[1]) * frame.shape[0] + at[0]
        outside = real(wp.inf)
        state.effort = UNCOUNTED
        if crowds_before(grid.start[cell + 1] - grid.start[cell]) > 0:
            outside = beyond(q, frame, at, 0)
            state.effort = 0
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
    visit_crowds: wp.Function | None,
    gives_up: bool,
) -> wp.Function:
    """One level. Of crowded cells it visits the crowds, or gives up, or knows that there are none."""
    real, vec3 = REALS[dtype]
    Grid, _ = grid_struct(dtype)
    Frame, beyond = frames(dtype).struct, frames(dtype).beyond
    _, axis_cell, _, _, cell_at, _ = cell_functions(dtype)
    State, Arrays, _, bound, wanted = visitor
    visit_row = row_visitor(dtype, lanes, visitor, visit_runs, visit_crowds, gives_up)
    if gives_up:
        visit_box = box_visitor(dtype, lanes, visitor, visit_row)
    else:
        visit_box = plane_visitor(dtype, lanes, visitor, visit_row, patience)

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
    def search(state: State, q: vec3, grid: Grid, arrays: Arrays, frame: Frame):
        at = cell_at(q, frame.low, frame.per_unit, frame.shape)
        ring = first_ring(grid, frame, at)
        inner = int(-1)  # the ring up to which all has been visited
        searching = bool(True)
        while searching:
            limit = bound(state, arrays)
            if wp.static(not gives_up) and limit < real(wp.inf):
                ring = EVERYTHING
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
            state = visit_box(state, q, grid, arrays, frame, at, low, high, inner)
            following = beyond(q, frame, at, ring)
            searching = following < real(wp.inf) and following <= bound(state, arrays)
            if wp.static(patience > 0):
                state.gave_up = state.gave_up or state.effort > patience
            searching = searching and not state.gave_up
            inner = ring
            ring += 1 + ring / 2
        return state

    return search


def _crowd_visitor(dtype: torch.dtype, visitor: Visitor, search_crowd: wp.Function) -> wp.Function:
    """The crowds in a run of cells: all lanes go through it together, cell by cell."""
    _, vec3 = REALS[dtype]
    Grid, _ = grid_struct(dtype)
    Frame, crowd_frame, gap = frames(dtype).struct, frames(dtype).of_crowd, frames(dtype).gap
    State, Arrays, _, bound, _ = visitor

    @wp.func
    def visit_crowds(
        state: State, q: vec3, grid: Grid, arrays: Arrays, frame: Frame, first: int, last: int, y: int, z: int
    ):
        across_y = gap(q[1], frame, 1, y)
        across_z = gap(q[2], frame, 2, z)
        for x in range(first, last + 1):
            cell = frame.base + (z * frame.shape[1] + y) * frame.shape[0] + x
            if crowds_before(grid.start[cell + 1] - grid.start[cell]) > 0 and not state.gave_up:
                along = gap(q[0], frame, 0, x)
                if along * along + across_y * across_y + across_z * across_z <= bound(state, arrays):
                    state = search_crowd(state, q, grid, arrays, crowd_frame(grid, frame, cell, x, y, z))
        return state

    return visit_crowds
