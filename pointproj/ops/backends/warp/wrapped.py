"""Cells for a known radius: a table of fixed size that the plane of cells wraps around, again and again.

Cells are about half as wide as the radius wherever the points are, so no bounding box is needed and one
level does for every density. Cells that share a place in the table only cost a few distance tests in vain.
Along x the table is contiguous: a row of cells is one run of points, or two where it wraps.
"""

import functools
from typing import Any, NamedTuple

import torch
import warp as wp
from torch import Tensor

from pointproj.ops.backends.warp.cell_kernels import INT_ROWS, INTS, scatter_kernel
from pointproj.ops.backends.warp.cells import stable_ranks
from pointproj.ops.backends.warp.common import OPTIONS, REALS, ROUNDINGS, cloud_of, first_row_of
from pointproj.ops.backends.warp.lanes import Lanes, floor_log2, run_visitor
from pointproj.ops.backends.warp.scan import running_sum, states_of
from pointproj.ops.bridge.warp_op import Launch, warp_op

# Edge of the cells, in radii: a little more than a half, so that rounding does not make a ball reach further.
EDGE = 65 / 128
PLACES_PER_POINT = 4
FARTHEST = 2.0**28  # cells from the origin; what lies beyond counts as there


class WrappedCells(NamedTuple):
    """The table of a cloud's points as tensors, or of two: then the other's places and rows follow.

    The last place of each is for points that are not finite.
    """

    width: Tensor  # () real: edge of the cells
    start: Tensor  # (places + 1,) int32: first sorted row of each place
    points: Tensor  # (N, 4) real: positions, sorted, and the bits of their row in the cloud as given


def build_wrapped_cells(
    points: Tensor,
    offsets: Tensor | None,
    clouds: int,
    radius: float,
    others: Tensor | None = None,
    other_offsets: Tensor | None = None,
) -> WrappedCells:
    """Sort ``points`` (N, 3), packed clouds, for searches within about ``radius``; and ``others`` (M, 3)."""
    return WrappedCells(*_build(points, offsets, others, other_offsets, clouds, radius))


def places_of(rows: int, clouds: int) -> int:
    """Places that a table has for so many points, with the one for points that are not finite."""
    return PLACES_PER_POINT * rows + clouds + 1


def _specs(
    points: Tensor, offsets: Any, others: Tensor | None, other_offsets: Any, clouds: int, radius: float
) -> dict:
    places, rows, dtype = places_of(points.shape[0], clouds), points.shape[0], points.dtype
    if others is not None:
        places += places_of(others.shape[0], clouds)
        rows += others.shape[0]
    return {"width": ((), dtype), "start": ((places + 1,), torch.int32), "sorted_points": ((rows, 4), dtype)}


@warp_op("pointproj::warp_build_wrapped_cells", outputs=_specs)
def _build(
    launch: Launch,
    points: Tensor,
    offsets: Tensor | None,
    others: Tensor | None,
    other_offsets: Tensor | None,
    clouds: int,
    radius: float,
    width: Tensor,
    start: Tensor,
    sorted_points: Tensor,
) -> None:
    rows, places = sorted_points.shape[0], start.shape[0] - 1
    lengths = [2 * states_of(places), places]
    counters = start.new_empty(sum(lengths))
    states, occupancy = counters.split(lengths)
    place = start.new_empty(rows, 2)
    launch(_clear_kernel(points.dtype), counters.shape[0], counters, width, radius * EDGE)
    both = (points, offsets, others, other_offsets, clouds)
    launch(_place_kernel(points.dtype), rows, *both, width, occupancy, place)
    running_sum(launch, occupancy, 0, states.view(torch.int64), start)
    if points.is_cuda and torch.are_deterministic_algorithms_enabled():
        place[:, 1] = stable_ranks(place[:, 0], start)
    launch(scatter_kernel(points.dtype, start.dtype), rows, points, others, place, start, sorted_points)


@functools.cache
def _clear_kernel(dtype: torch.dtype) -> wp.Kernel:
    real, _ = REALS[dtype]

    @wp.kernel(**OPTIONS)
    def clear(counters: INTS, width: wp.array(dtype=real), value: wp.float64):
        i = wp.tid()
        counters[i] = 0
        if i == 0:
            width[0] = real(value)

    return clear


@functools.cache
def table_functions(dtype: torch.dtype) -> Any:
    """Each cloud's part of the table, and the place of a cell in it."""
    real, _ = REALS[dtype]

    @wp.struct
    class Table:
        base: int  # first place
        bits: wp.vec3i  # places along x, y, z, as powers of two

    @wp.func
    def table_of(cloud: int, offsets: INTS, rows: int, clouds: int, first_place: int):
        begin = first_row_of(cloud, offsets, rows, clouds)
        size = first_row_of(cloud + 1, offsets, rows, clouds) - begin
        bits = floor_log2(wp.max(PLACES_PER_POINT * size, 1))
        table = Table()
        table.base = first_place + PLACES_PER_POINT * begin + cloud
        table.bits = wp.vec3i((bits + 2) / 3, (bits + 1) / 3, bits / 3)
        return table

    @wp.func
    def axis_cell(x: real, per_unit: real):
        return int(wp.floor(wp.clamp(x * per_unit, real(-FARTHEST), real(FARTHEST))))

    @wp.func
    def first_place_of(table: Table, y: int, z: int):
        """First place of a row of cells."""
        row = ((z & ((1 << table.bits[2]) - 1)) << table.bits[1]) | (y & ((1 << table.bits[1]) - 1))
        return table.base + (row << table.bits[0])

    @wp.func
    def along(table: Table, x: int):
        """Place in a row. Around the origin, where clouds mostly are, rows do not wrap."""
        return (x + (1 << table.bits[0]) / 2) & ((1 << table.bits[0]) - 1)

    return Table, table_of, axis_cell, first_place_of, along


@functools.cache
def _place_kernel(dtype: torch.dtype) -> wp.Kernel:
    real, vec3 = REALS[dtype]
    _, table_of, axis_cell, first_place_of, along = table_functions(dtype)

    @wp.func
    def home(p: vec3, row: int, offsets: INTS, rows: int, clouds: int, first_place: int, per_unit: real):
        """Place of a point; the last of all is for points that are not finite."""
        if not wp.isfinite(p):
            return first_place + PLACES_PER_POINT * rows + clouds
        table = table_of(cloud_of(row, offsets, rows, clouds), offsets, rows, clouds, first_place)
        x = axis_cell(p[0], per_unit)
        y = axis_cell(p[1], per_unit)
        z = axis_cell(p[2], per_unit)
        return first_place_of(table, y, z) + along(table, x)

    @wp.kernel(**OPTIONS)
    def place(
        points: wp.array(dtype=vec3),
        offsets: INTS,
        others: wp.array(dtype=vec3),
        other_offsets: INTS,
        clouds: int,
        width: wp.array(dtype=real),
        occupancy: INTS,
        placed: INT_ROWS,
    ):
        """Place of each point and its rank of arrival there."""
        i = wp.tid()
        rows = points.shape[0]
        per_unit = real(1.0) / width[0]
        at = int(0)
        if i < rows:
            at = home(points[i], i, offsets, rows, clouds, 0, per_unit)
        else:
            row = i - rows
            first_place = PLACES_PER_POINT * rows + clouds + 1
            size = others.shape[0]
            at = home(others[row], row, other_offsets, size, clouds, first_place, per_unit)
        placed[i, 0] = at
        placed[i, 1] = wp.atomic_add(occupancy, at, 1)

    return place


@functools.cache
def wrapped_struct(dtype: torch.dtype) -> Any:
    """The table inside a kernel, and a function that makes it of the kernel's arguments."""
    real, _ = REALS[dtype]

    @wp.struct
    class Wrapped:
        width: real
        start: INTS
        points: wp.array2d(dtype=real)
        first_place: int  # of the points searched, where the table is that of two clouds
        rows: int  # of theirs
        offsets: INTS
        clouds: int

    @wp.func
    def wrapped_of(
        width: wp.array(dtype=real),
        start: INTS,
        points: wp.array2d(dtype=real),
        first_place: int,
        rows: int,
        offsets: INTS,
        clouds: int,
    ):
        wrapped = Wrapped()
        wrapped.width = width[0]
        wrapped.start = start
        wrapped.points = points
        wrapped.first_place = first_place
        wrapped.rows = rows
        wrapped.offsets = offsets
        wrapped.clouds = clouds
        return wrapped

    return Wrapped, wrapped_of


def ball_search(
    dtype: torch.dtype, lanes: Lanes, state: Any, arrays: Any, consider: wp.Function
) -> wp.Function:
    """``search(state, q, wrapped, arrays, cloud, radius) -> state``: meet everything within the radius.

    ``consider(state, q, wrapped, arrays, at, exists)`` sees one candidate a lane; some are farther away.
    """
    real, vec3 = REALS[dtype]
    Wrapped, _ = wrapped_struct(dtype)
    _, table_of, axis_cell, first_place_of, along = table_functions(dtype)
    visit_runs = run_visitor(lanes, vec3, state, Wrapped, arrays, consider)
    unit = torch.finfo(dtype).eps * ROUNDINGS
    count, lane = lanes.count, lanes.lane

    @wp.func
    def gap(x: real, cell: int, width: real, slack: real):
        """Distance along an axis from x to a cell's slab, never too large."""
        x = wp.clamp(x, real(-FARTHEST) * width, real(FARTHEST) * width)
        low = real(cell) * width
        return wp.max(wp.max(low - x, x - (low + width)) - slack, real(0.0))

    @wp.func
    def search(state: state, q: vec3, wrapped: Wrapped, arrays: arrays, cloud: int, radius: real):
        table = table_of(cloud, wrapped.offsets, wrapped.rows, wrapped.clouds, wrapped.first_place)
        slack = real(unit) * (wp.max(wp.abs(q)) + radius)
        per_unit = real(1.0) / wrapped.width
        first = wp.vec3i()
        size = wp.vec3i()
        whole = bool(False)  # the ball reaches around the table: no row can be left out by its distance
        for axis in range(3):
            first[axis] = axis_cell(q[axis] - radius - slack, per_unit)
            size[axis] = axis_cell(q[axis] + radius + slack, per_unit) - first[axis] + 1
            if size[axis] >= (1 << table.bits[axis]):
                size[axis] = 1 << table.bits[axis]
                whole = True
        places = 1 << table.bits[0]
        begin_x = along(table, first[0])
        split = wp.where(begin_x + size[0] > places, 1, 0)  # whether the row wraps, and comes in two parts
        row_part = int(lane())
        row_z = int(0)
        along_y = size[1] << split
        for _first in range(0, along_y * size[2], count):
            while row_part >= along_y:
                row_part -= along_y
                row_z += 1
            begin = int(0)
            run = int(0)
            if row_z < size[2]:
                y = first[1] + (row_part >> split)
                z = first[2] + row_z
                across_y = gap(q[1], y, wrapped.width, slack)
                across_z = gap(q[2], z, wrapped.width, slack)
                across = across_y * across_y + across_z * across_z
                limit = (radius + slack) * (radius + slack)
                x0 = begin_x
                x1 = begin_x + size[0]
                if not whole:  # only what the ball reaches in this row
                    half = wp.sqrt(wp.max(limit - across, real(0.0))) + slack
                    x0 += wp.max(axis_cell(q[0] - half, per_unit) - first[0], 0)
                    x1 = wp.min(x1, begin_x + axis_cell(q[0] + half, per_unit) - first[0] + 1)
                if (row_part & split) == 0:
                    x1 = wp.min(x1, places)
                else:
                    x0 = wp.max(x0 - places, 0)
                    x1 -= places
                if (whole or across <= limit) and x0 < x1:
                    place = first_place_of(table, y, z)
                    begin = wrapped.start[place + x0]
                    run = wrapped.start[place + x1] - begin
            row_part += count
            state = visit_runs(state, q, wrapped, arrays, begin, run)
        return state

    return search
