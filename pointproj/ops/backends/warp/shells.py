"""Searching outwards from a query, shell by shell of cells, until nothing closer can follow."""

import torch
import warp as wp

from pointproj.ops.backends.warp.boxes import Walk, box_visitor, plane_visitor, row_visitor, walk
from pointproj.ops.backends.warp.common import DENSE, REALS, cell_functions
from pointproj.ops.backends.warp.grids import cell_list_struct, grids
from pointproj.ops.backends.warp.lanes import Lanes
from pointproj.ops.backends.warp.scan import dense_cells_before, points_before
from pointproj.ops.backends.warp.traversal import Visitor

LARGEST_FIRST_SHELL = 3  # the first shell visited includes its inside
PLENTY = 3  # it should hold so many times the neighbours wanted
EVERYTHING = 2**20  # a shell around all cells, for what a bound leaves of a grid that may be large
UNCOUNTED = -(2**30)  # effort that never exceeds a budget


def shell_search(
    dtype: torch.dtype, lanes: Lanes, visitor: Visitor, into_dense_cells: bool, budget: int
) -> wp.Function:
    """``search(state, q, cells, data, cloud) -> state`` through both levels of the cell list.

    With ``into_dense_cells`` false it stays on one level, for a query in a dense cell that of the sub-cells,
    and sets ``state.gave_up`` where the other has to be seen: most queries never need it, and a thread needs
    far fewer registers then. So it does where a dense cell takes it more than ``budget``, unless that is 0.
    """
    real, vec3 = REALS[dtype]
    CellListStruct, State, Data = cell_list_struct(dtype), visitor.State, visitor.Data
    cloud_grid, dense_cell_grid = grids(dtype).of_cloud, grids(dtype).of_dense_cell
    beyond, bound = grids(dtype).beyond, visitor.bound
    *_, cell_at, _ = cell_functions(dtype)
    here = walk(dtype, lanes, visitor, budget)
    Place = here.Place

    visit_dense_cells = None
    if into_dense_cells:
        visit_dense_cells = _dense_cell_visitor(here, _grid_search(here, None, gives_up=False))
    search_grid = _grid_search(here, visit_dense_cells, gives_up=not into_dense_cells)

    @wp.func
    def search_both(state: State, q: vec3, cells: CellListStruct, data: Data, cloud: int):
        return search_grid(state, Place(q, cells, data, cloud_grid(cells, cloud, q)))

    @wp.func
    def search_one(state: State, q: vec3, cells: CellListStruct, data: Data, cloud: int):
        grid = cloud_grid(cells, cloud, q)
        at = cell_at(q, grid.low, grid.per_unit, grid.shape)
        cell = grid.base + (at[2] * grid.shape[1] + at[1]) * grid.shape[0] + at[0]
        outside = real(wp.inf)
        state.effort = UNCOUNTED
        if dense_cells_before(cells.start[cell + 1] - cells.start[cell]) > 0:
            outside = beyond(q, grid, at, 0)
            state.effort = 0
            grid = dense_cell_grid(cells, grid, cell, at[0], at[1], at[2])
        state = search_grid(state, Place(q, cells, data, grid))
        if outside < real(wp.inf) and outside <= bound(state, data):
            state.gave_up = True
        return state

    return search_both if into_dense_cells else search_one


def _grid_search(walk: Walk, visit_dense_cells: wp.Function | None, gives_up: bool) -> wp.Function:
    """One level. It visits the dense cells that it meets, or gives up, or knows that there are none."""
    real, _ = REALS[walk.dtype]
    CellListStruct, State, Place, Box = cell_list_struct(walk.dtype), walk.visitor.State, walk.Place, walk.Box
    Grid, beyond = grids(walk.dtype).struct, grids(walk.dtype).beyond
    _, axis_cell, _, _, cell_at, _ = cell_functions(walk.dtype)
    bound, wanted, budget = walk.visitor.bound, walk.visitor.wanted, walk.budget
    visit_row = row_visitor(walk, visit_dense_cells, gives_up)
    visit_box = box_visitor(walk, visit_row) if gives_up else plane_visitor(walk, visit_row)

    @wp.func
    def first_shell(cells: CellListStruct, grid: Grid, at: wp.vec3i):
        """So wide that the points around the query, if they go on as in its row, are plenty.

        Only its own cell if that is dense, or holds plenty: the bound found there leaves little of others.
        """
        row = grid.base + (at[2] * grid.shape[1] + at[1]) * grid.shape[0]
        home = cells.start[row + at[0] + 1] - cells.start[row + at[0]]
        if dense_cells_before(home) > 0 or points_before(home) >= PLENTY * wanted:
            return 0
        around = cells.start[row + wp.min(at[0] + 2, grid.shape[0])] - cells.start[row + wp.max(at[0] - 1, 0)]
        points = points_before(around) + DENSE * dense_cells_before(around)
        shell = int(1)
        for larger in range(2, LARGEST_FIRST_SHELL + 1):
            side = 2 * shell + 1
            if points * side * side * side < 3 * PLENTY * wanted:
                shell = larger
        return shell

    @wp.func
    def search(state: State, place: Place):
        q = place.q
        grid = place.grid
        box = Box()
        box.at = cell_at(q, grid.low, grid.per_unit, grid.shape)
        box.inner = -1  # the shell up to which all has been visited
        shell = first_shell(place.cells, grid, box.at)
        searching = bool(True)
        while searching:
            limit = bound(state, place.data)
            if wp.static(not gives_up) and limit < real(wp.inf):
                shell = EVERYTHING
            for axis in range(3):
                box.low[axis] = wp.max(box.at[axis] - shell, 0)
                box.high[axis] = wp.min(box.at[axis] + shell, grid.shape[axis] - 1)
                if limit < real(wp.inf):  # enough is found: what can still be closer
                    far = wp.sqrt(limit) + grid.slack
                    unit = grid.per_unit[axis]
                    nearest = axis_cell(q[axis] - far, grid.low[axis], unit, grid.shape[axis])
                    farthest = axis_cell(q[axis] + far, grid.low[axis], unit, grid.shape[axis])
                    box.low[axis] = wp.max(box.low[axis], nearest)
                    box.high[axis] = wp.min(box.high[axis], farthest)
            state = visit_box(state, place, box)
            following = beyond(q, grid, box.at, shell)
            searching = following < real(wp.inf) and following <= bound(state, place.data)
            if wp.static(budget > 0):
                state.gave_up = state.gave_up or state.effort > budget
            searching = searching and not state.gave_up
            box.inner = shell
            shell += 1 + shell / 2
        return state

    return search


def _dense_cell_visitor(walk: Walk, search_dense_cell: wp.Function) -> wp.Function:
    """The dense cells in a run of cells: all lanes go through it together, cell by cell."""
    State, Place, bound = walk.visitor.State, walk.Place, walk.visitor.bound
    dense_cell_grid, gap = grids(walk.dtype).of_dense_cell, grids(walk.dtype).gap

    @wp.func
    def visit_dense_cells(state: State, place: Place, first: int, last: int, y: int, z: int):
        grid = place.grid
        cells = place.cells
        across_y = gap(place.q[1], grid, 1, y)
        across_z = gap(place.q[2], grid, 2, z)
        for x in range(first, last + 1):
            cell = grid.base + (z * grid.shape[1] + y) * grid.shape[0] + x
            if dense_cells_before(cells.start[cell + 1] - cells.start[cell]) > 0 and not state.gave_up:
                along = gap(place.q[0], grid, 0, x)
                if along * along + across_y * across_y + across_z * across_z <= bound(state, place.data):
                    inside = dense_cell_grid(cells, grid, cell, x, y, z)
                    state = search_dense_cell(state, Place(place.q, cells, place.data, inside))
        return state

    return visit_dense_cells
