"""Which points a search visits: those of the cells in a box, row by row, as contiguous runs along x.

A search for the nearest visits shells of cells around the query, until no nearer point can follow. A search
within a radius visits the cells that the ball intersects. A visitor processes each point.

Each lane of a query takes a row of cells. All lanes call the visitor together, some of them without a point.
"""

from typing import Any, NamedTuple

import torch
import warp as wp
from torch import Tensor

from pointproj.ops.backends.warp import cell_list, common
from pointproj.ops.backends.warp.cell_list import CellList, grid_of
from pointproj.ops.backends.warp.common import REALS, Coordinates, once, struct_of
from pointproj.ops.backends.warp.lanes import Lanes
from pointproj.ops.specification.rounding import largest_square_within, largest_squares_within

AT_ONCE = 2  # points that a lane requests before it uses the first
LARGEST_FIRST_SHELL = 3  # the first visit is to all cells up to this shell at most
PLENTY = 3  # points that these cells should hold, for each neighbour that is searched for


class Visitor(NamedTuple):
    """What a search does with the points that it visits."""

    State: Any  # struct that the search passes from call to call
    Data: Any  # struct: what there is to read and write
    # (state, data, q, point, squared distance, exists) -> state; within a radius only neighbours exist
    visit: wp.Function
    flush_if_full: wp.Function | None = None  # (state, data) -> state, after AT_ONCE points
    limit: wp.Function | None = None  # of the nearest: (state, data) -> squared distance of the farthest
    wanted: int = 0  # of the nearest: how many


@wp.func
def nearest_first(j: int, at: int, low: int, high: int):
    """The j-th of the numbers from ``low`` to ``high``, sorted by their distance from ``at``."""
    left = at - low
    both = wp.min(left, high - at)
    if j <= 2 * both:
        return at + wp.where(j % 2 == 1, -(j + 1) / 2, j / 2)
    return wp.where(left > both, at - j + both, at + j - both)


@once
def _search_struct(dtype: torch.dtype, data: Any) -> Any:
    real, vec3, _ = REALS[dtype]
    CellListStruct, (GridStruct, _), Data = struct_of(CellList, dtype), grid_of(dtype), data

    @wp.struct
    class SearchStruct:
        """What stays the same during one search."""

        q: vec3
        cells: CellListStruct
        data: Data  # the visitor's
        grid: GridStruct
        limit: real  # within a radius: squared distance up to which cells are visited
        largest_square: real  # within a radius: squared distance up to which points are neighbours

    return SearchStruct


def _run_visitor(dtype: torch.dtype, lanes: Lanes, visitor: Visitor) -> wp.Function:
    """``visit_runs(state, search, begin, count) -> state``: each lane has its own run of sorted points."""
    real, _, vec4 = REALS[dtype]
    Search, State = _search_struct(dtype, visitor.Data), visitor.State
    visit, flush_if_full, within_radius = visitor.visit, visitor.flush_if_full, visitor.limit is None
    Several = wp.types.matrix(shape=(AT_ONCE, 4), dtype=real)

    @wp.func
    def visit_point(state: State, search: Search, point: vec4, exists: bool):
        squared = common.squared_distance(search.q, common.position_of(point), search.q[0])
        if wp.static(within_radius):
            exists = exists and squared <= search.largest_square
        return visit(state, search.data, search.q, point, squared, exists)

    @wp.func
    def visit_run(state: State, search: Search, begin: int, count: int):
        for at in range(begin, begin + count):
            state = visit_point(state, search, common.load_point(search.cells.points, at), True)
        return state

    @wp.func
    def visit_runs(state: State, search: Search, begin: int, count: int):
        several = Several()
        i = int(0)
        while lanes.any(i < count):
            for j in range(AT_ONCE):  # all points are requested before the first is used
                if i + j < count:
                    several[j] = common.load_point(search.cells.points, begin + i + j)
            for j in range(AT_ONCE):
                state = visit_point(state, search, several[j], i + j < count)
            if wp.static(flush_if_full is not None):
                state = flush_if_full(state, search.data)
            i += AT_ONCE
        return state

    return visit_run if lanes.count == 1 else visit_runs


@wp.func
def run_of(search: Any, y: int, z: int, x0: int, x1: int, limit: Any):
    """First point and number of points of a row of cells, as far as the cells are within the limit."""
    across_y = cell_list.gap(search.q[1], search.grid, 1, y)
    across_z = cell_list.gap(search.q[2], search.grid, 2, z)
    rest = limit - (across_y * across_y + across_z * across_z)
    first, last = cell_list.clip(search.q[0], search.grid, 0, rest, x0, x1)
    begin = int(0)
    size = int(0)
    if first <= last:
        cell = cell_list.first_cell(search.grid, y, z)
        begin = search.cells.start[cell + first]
        size = search.cells.start[cell + last + 1] - begin
    return begin, size


def _box_visitor(dtype: torch.dtype, lanes: Lanes, visitor: Visitor) -> wp.Function:
    """``visit_box(state, search, active, at, low, high, inner) -> state``: the box's cells within the limit.

    A search for the nearest visits the nearest rows of cells first. Cells up to shell ``inner`` around ``at``
    are left out: of their rows only the two ends are new.
    """
    Search, State = _search_struct(dtype, visitor.Data), visitor.State
    visit_runs, limit_of, count = _run_visitor(dtype, lanes, visitor), visitor.limit, lanes.count

    @wp.func
    def visit_box(
        state: State, search: Search, active: bool, at: wp.vec3i, low: wp.vec3i, high: wp.vec3i, inner: int
    ):
        width = high[1] - low[1] + 1
        rows = wp.where(active, width * (high[2] - low[2] + 1), 0)
        row = int(lanes.lane())
        row_y = int(lanes.lane())
        row_z = int(0)
        while lanes.any(row < rows):
            while row_y >= width:
                row_y -= width
                row_z += 1
            y = low[1] + row_y
            z = low[2] + row_z
            if wp.static(limit_of is not None):  # points of near rows tighten the limit
                y = nearest_first(row_y, at[1], low[1], high[1])
                z = nearest_first(row_z, at[2], low[2], high[2])
            row_y += count
            is_inner = wp.abs(z - at[2]) <= inner and wp.abs(y - at[1]) <= inner
            parts = wp.where(is_inner, 2, 1)
            for part in range(parts):
                x0 = low[0]
                x1 = high[0]
                if is_inner and part == 0:
                    x1 = wp.min(x1, at[0] - inner - 1)
                if is_inner and part == 1:
                    x0 = wp.max(x0, at[0] + inner + 1)
                if row >= rows:
                    x1 = x0 - 1
                limit = search.limit
                if wp.static(limit_of is not None):
                    limit = limit_of(state, search.data)
                begin, size = run_of(search, y, z, x0, x1, limit)
                state = visit_runs(state, search, begin, size)
            row += count
        return state

    return visit_box


class Ball(NamedTuple):
    """Where a search within a radius goes."""

    cells: CellList
    radius: float
    largest_square: float  # largest squared distance that counts as within the radius
    radii: Coordinates = None  # (Q,) of each query, in place of one for all
    largest_squares: Coordinates = None  # (Q,)


def new_ball(cells: CellList, radius: float, radii: Tensor | None = None) -> Ball:
    """The ball of one radius, or of one for each query."""
    if radii is None:
        return Ball(cells, radius, largest_square_within(radius, cells.points.dtype))
    return Ball(cells, 0.0, 0.0, radii, largest_squares_within(radii))


def ball_search(dtype: torch.dtype, lanes: Lanes, visitor: Visitor, graded: bool) -> wp.Function:
    """``search(state, query, q, cloud, ball, data) -> state``: visit all points within the radius.

    If ``q`` is not finite, or the radius is negative, there are none.
    """
    real, vec3, _ = REALS[dtype]
    BallStruct, State, Data = struct_of(Ball, dtype), visitor.State, visitor.Data
    Search = _search_struct(dtype, Data)
    _, load = grid_of(dtype)
    visit_box = _box_visitor(dtype, lanes, visitor)

    @wp.func
    def search(state: State, query: int, q: vec3, cloud: int, ball: BallStruct, data: Data):
        radius = ball.radius
        largest_square = ball.largest_square
        if ball.radii:
            radius = ball.radii[query]
            largest_square = ball.largest_squares[query]
        active = wp.isfinite(q) and radius >= real(0.0) and ball.cells.frames[cloud, 0] < real(wp.inf)
        if not active:
            q = vec3()
            radius = real(0.0)
        grid = load(ball.cells, cloud, q, graded)
        padded = radius + grid.slack
        low = wp.vec3i()
        high = wp.vec3i()
        for axis in range(3):
            low[axis] = cell_list.cell_along(q[axis] - padded, grid, axis)
            high[axis] = cell_list.cell_along(q[axis] + padded, grid, axis)
        made = Search(q, ball.cells, data, grid, padded * padded, largest_square)
        return visit_box(state, made, active, cell_list.cell_at(q, grid), low, high, -1)

    return search


@wp.func
def first_shell(cells: Any, grid: Any, at: wp.vec3i, wanted: int):
    """The shell that holds enough points, if all rows of cells are as dense as the query's own.

    It is the query's own cell if that holds enough: the limit found there leaves few other points.
    """
    row = cell_list.first_cell(grid, at[1], at[2])
    if cells.start[row + at[0] + 1] - cells.start[row + at[0]] >= PLENTY * wanted:
        return 0
    last, first = wp.min(at[0] + 2, grid.shape[0]), wp.max(at[0] - 1, 0)
    points = cells.start[row + last] - cells.start[row + first]
    shell = int(1)
    for larger in range(2, LARGEST_FIRST_SHELL + 1):
        side = 2 * shell + 1
        if points * side * side * side < 3 * PLENTY * wanted:
            shell = larger
    return shell


def shell_search(dtype: torch.dtype, lanes: Lanes, visitor: Visitor, graded: bool) -> wp.Function:
    """``search(state, query, q, cloud, cells, data) -> state``: visit the nearest if ``q`` is finite."""
    real, vec3, _ = REALS[dtype]
    CellListStruct, State, Data = struct_of(CellList, dtype), visitor.State, visitor.Data
    Search = _search_struct(dtype, Data)
    (_, load), limit_of, wanted = grid_of(dtype), visitor.limit, visitor.wanted
    visit_box = _box_visitor(dtype, lanes, visitor)

    @wp.func
    def search(state: State, query: int, q: vec3, cloud: int, cells: CellListStruct, data: Data):
        if wp.isfinite(q) and cells.frames[cloud, 0] < real(wp.inf):
            grid = load(cells, cloud, q, graded)
            made = Search(q, cells, data, grid, real(0.0), real(0.0))
            at = cell_list.cell_at(q, grid)
            inner = int(-1)  # all cells up to this shell have been visited
            shell = first_shell(cells, grid, at, wanted)
            searching = bool(True)
            while searching:
                low = wp.vec3i()
                high = wp.vec3i()
                limit = limit_of(state, data)
                for axis in range(3):
                    first = wp.max(at[axis] - shell, 0)
                    last = wp.min(at[axis] + shell, grid.shape[axis] - 1)
                    first, last = cell_list.clip(q[axis], grid, axis, limit, first, last)
                    low[axis] = first
                    high[axis] = last
                state = visit_box(state, made, True, at, low, high, inner)
                following = cell_list.squared_outside(q, grid, at, shell)
                searching = following < real(wp.inf) and following <= limit_of(state, data)
                inner = shell
                shell += 1 + shell / 2
        return state

    return search
