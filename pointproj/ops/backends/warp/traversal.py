"""Which points a search meets: those of the cells in a box, row by row, as contiguous runs along x.

A search for the nearest goes outwards from the query, shell by shell, until nothing closer can follow; a
search within a radius visits the cells that the ball touches. A visitor says what to do with each point.

The lanes of a query take a row each, and all of them meet a candidate at a time, or none.
"""

from typing import Any, NamedTuple

import torch
import warp as wp
from torch import Tensor

from pointproj.ops.backends.warp import cell_list, common
from pointproj.ops.backends.warp.cell_list import CellList, grid_of
from pointproj.ops.backends.warp.common import REALS, Places, once, struct_of
from pointproj.ops.backends.warp.lanes import Lanes
from pointproj.ops.specification.rounding import largest_square_within, largest_squares_within

AT_ONCE = 2  # points that a lane reads before it looks at the first
LARGEST_FIRST_SHELL = 3  # the first shell visited includes its inside
PLENTY = 3  # it should hold so many times the neighbours wanted


class Visitor(NamedTuple):
    """What a search does with the points it meets."""

    State: Any  # struct that travels through the search
    Data: Any  # struct with what there is to read and write
    # (state, data, q, point, squared distance, exists) -> state; every lane brings a candidate, or none
    visit: wp.Function
    pause: wp.Function | None = None  # (state, data) -> state, after AT_ONCE of them
    limit: wp.Function | None = None  # of the nearest: (state, data) -> square beyond which none matters
    wanted: int = 0  # of the nearest: how many


@wp.func
def nearest_first(j: int, at: int, low: int, high: int):
    """The j-th of the numbers from ``low`` to ``high``, those nearest ``at``, one of them, first."""
    left = at - low
    both = wp.min(left, high - at)
    if j <= 2 * both:
        return at + wp.where(j % 2 == 1, -(j + 1) / 2, j / 2)
    return wp.where(left > both, at - j + both, at + j - both)


def _run_visitor(dtype: torch.dtype, lanes: Lanes, visitor: Visitor) -> wp.Function:
    """``visit_runs(state, q, points, data, begin, count) -> state``: every lane has a run of its own."""
    real, vec3, vec4 = REALS[dtype]
    sorted_points = wp.array2d(dtype=real)
    State, Data, visit = visitor.State, visitor.Data, visitor.visit
    any_of_warp, pause = lanes.any, visitor.pause
    Several = wp.types.matrix(shape=(AT_ONCE, 4), dtype=real)

    @wp.func
    def meet(state: State, q: vec3, point: vec4, data: Data, exists: bool):
        squared = common.squared_distance(q, common.position_of(point), q[0])
        return visit(state, data, q, point, squared, exists)

    @wp.func
    def visit_run(state: State, q: vec3, points: sorted_points, data: Data, begin: int, count: int):
        for at in range(begin, begin + count):
            state = meet(state, q, common.load_point(points, at), data, True)
        return state

    @wp.func
    def visit_runs(state: State, q: vec3, points: sorted_points, data: Data, begin: int, count: int):
        several = Several()
        i = int(0)
        while any_of_warp(i < count):
            for j in range(AT_ONCE):  # all on their way before the first is looked at
                if i + j < count:
                    several[j] = common.load_point(points, begin + i + j)
            for j in range(AT_ONCE):
                state = meet(state, q, several[j], data, i + j < count)
            if wp.static(pause is not None):
                state = pause(state, data)
            i += AT_ONCE
        return state

    return visit_run if lanes.count == 1 else visit_runs


@once
def _place_struct(dtype: torch.dtype, data: Any) -> Any:
    real, vec3, _ = REALS[dtype]
    CellListStruct, (GridStruct, _), Data = struct_of(CellList, dtype), grid_of(dtype), data

    @wp.struct
    class PlaceStruct:
        """The query, the tables, the visitor's data, the grid, and for a radius its square."""

        q: vec3
        cells: CellListStruct
        data: Data
        grid: GridStruct
        limit: real

    return PlaceStruct


def _box_visitor(dtype: torch.dtype, lanes: Lanes, visitor: Visitor) -> wp.Function:
    """``visit_box(state, place, searches, at, low, high, inner) -> state``: its cells within the limit, if it
    ``searches``, the nearest rows first.

    Cells up to shell ``inner`` around ``at`` are left out: of their rows only the two ends are new.
    """
    real, *_ = REALS[dtype]
    Place, State = _place_struct(dtype, visitor.Data), visitor.State
    visit_runs = _run_visitor(dtype, lanes, visitor)
    count, lane, any_of_warp, limit_of = lanes.count, lanes.lane, lanes.any, visitor.limit

    @wp.func
    def run_of(place: Place, y: int, z: int, x0: int, x1: int, limit: real):
        """First point and number of points of a row of cells, as far as the limit leaves it."""
        across_y = cell_list.gap(place.q[1], place.grid, 1, y)
        across_z = cell_list.gap(place.q[2], place.grid, 2, z)
        rest = limit - (across_y * across_y + across_z * across_z)
        first, last = cell_list.clip(place.q[0], place.grid, 0, rest, x0, x1)
        begin = int(0)
        size = int(0)
        if first <= last:
            cell = cell_list.first_cell(place.grid, y, z)
            begin = place.cells.start[cell + first]
            size = place.cells.start[cell + last + 1] - begin
        return begin, size

    @wp.func
    def visit_box(
        state: State, place: Place, searches: bool, at: wp.vec3i, low: wp.vec3i, high: wp.vec3i, inner: int
    ):
        width = high[1] - low[1] + 1
        rows = wp.where(searches, width * (high[2] - low[2] + 1), 0)
        row = int(lane())
        row_y = int(lane())
        row_z = int(0)
        while any_of_warp(row < rows):
            while row_y >= width:
                row_y -= width
                row_z += 1
            y = low[1] + row_y
            z = low[2] + row_z
            if wp.static(limit_of is not None):  # those that are near tighten the limit
                y = nearest_first(row_y, at[1], low[1], high[1])
                z = nearest_first(row_z, at[2], low[2], high[2])
            row_y += count
            seen = wp.abs(z - at[2]) <= inner and wp.abs(y - at[1]) <= inner
            parts = wp.where(seen, 2, 1)
            for part in range(parts):
                x0 = low[0]
                x1 = high[0]
                if seen and part == 0:
                    x1 = wp.min(x1, at[0] - inner - 1)
                if seen and part == 1:
                    x0 = wp.max(x0, at[0] + inner + 1)
                if row >= rows:
                    x1 = x0 - 1
                limit = place.limit
                if wp.static(limit_of is not None):
                    limit = limit_of(state, place.data)
                begin, size = run_of(place, y, z, x0, x1, limit)
                state = visit_runs(state, place.q, place.cells.points, place.data, begin, size)
            row += count
        return state

    return visit_box


class Ball(NamedTuple):
    """Where a search within a radius goes."""

    cells: CellList
    radius: float
    largest_square: float  # largest squared distance that counts as within the radius
    radii: Places = None  # (Q,) of each query, in place of one for all
    largest_squares: Places = None  # (Q,)


def new_ball(cells: CellList, radius: float, radii: Tensor | None = None) -> Ball:
    """The ball of one radius, or of one for each query."""
    if radii is None:
        return Ball(cells, radius, largest_square_within(radius, cells.points.dtype))
    return Ball(cells, 0.0, 0.0, radii, largest_squares_within(radii))


def ball_search(dtype: torch.dtype, lanes: Lanes, visitor: Visitor) -> wp.Function:
    """``search(state, query, q, cloud, ball, data) -> state``: meet everything within the radius.

    ``state.square`` becomes the largest squared distance within it: the visitor sees some points that are
    farther away. Of a ``q`` that is not finite it sees none.
    """
    real, vec3, _ = REALS[dtype]
    BallStruct, State, Data = struct_of(Ball, dtype), visitor.State, visitor.Data
    Place = _place_struct(dtype, Data)
    _, load = grid_of(dtype)
    visit_box = _box_visitor(dtype, lanes, visitor)

    @wp.func
    def search(state: State, query: int, q: vec3, cloud: int, ball: BallStruct, data: Data):
        radius = ball.radius
        state.square = ball.largest_square
        if ball.radii:
            radius = ball.radii[query]
            state.square = ball.largest_squares[query]
        # Of a negative radius, too, none.
        searches = wp.isfinite(q) and radius >= real(0.0) and ball.cells.frames[cloud, 0] < real(wp.inf)
        if not searches:
            q = vec3()
            radius = real(0.0)
        grid = load(ball.cells, cloud, q)
        reach = radius + grid.slack
        low = wp.vec3i()
        high = wp.vec3i()
        for axis in range(3):
            low[axis] = cell_list.cell_along(q[axis] - reach, grid, axis)
            high[axis] = cell_list.cell_along(q[axis] + reach, grid, axis)
        place = Place(q, ball.cells, data, grid, reach * reach)
        return visit_box(state, place, searches, cell_list.cell_at(q, grid), low, high, -1)

    return search


def shell_search(dtype: torch.dtype, lanes: Lanes, visitor: Visitor) -> wp.Function:
    """``search(state, query, q, cloud, cells, data) -> state``: meet the nearest, if ``q`` is finite."""
    real, vec3, _ = REALS[dtype]
    CellListStruct, State, Data = struct_of(CellList, dtype), visitor.State, visitor.Data
    Place = _place_struct(dtype, Data)
    (GridStruct, load), limit_of, wanted = grid_of(dtype), visitor.limit, visitor.wanted
    visit_box = _box_visitor(dtype, lanes, visitor)

    @wp.func
    def first_shell(cells: CellListStruct, grid: GridStruct, at: wp.vec3i):
        """So wide that the points around the query, if they go on as in its row, are plenty.

        Only its own cell if that holds plenty: the limit found there leaves little of others.
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

    @wp.func
    def search(state: State, query: int, q: vec3, cloud: int, cells: CellListStruct, data: Data):
        if wp.isfinite(q) and cells.frames[cloud, 0] < real(wp.inf):
            grid = load(cells, cloud, q)
            place = Place(q, cells, data, grid, real(0.0))
            at = cell_list.cell_at(q, grid)
            inner = int(-1)  # the shell up to which all has been visited
            shell = first_shell(cells, grid, at)
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
                state = visit_box(state, place, True, at, low, high, inner)
                following = cell_list.beyond(q, grid, at, shell)
                searching = following < real(wp.inf) and following <= limit_of(state, data)
                inner = shell
                shell += 1 + shell / 2
        return state

    return search
