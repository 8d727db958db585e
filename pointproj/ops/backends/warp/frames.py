"""The cell list inside a kernel, and how far away cells are.

Distances to cells are shortened by a slack of a few rounding errors of the coordinates, because a point
and the border of its cell are computed in different ways.
"""

import functools
from typing import Any, NamedTuple

import torch
import warp as wp

from pointproj.ops.backends.warp.common import REALS, ROUNDINGS, cell_functions, subcells_along


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


class Frames(NamedTuple):
    """One grid of cells, a cloud's or that inside one cell, and distances to its cells."""

    struct: Any
    of_cloud: wp.Function
    of_crowd: wp.Function
    gap: wp.Function
    narrow: wp.Function
    beyond: wp.Function


@functools.cache
def frames(dtype: torch.dtype) -> Frames:
    """Struct and functions for positions of one dtype."""
    real, vec3 = REALS[dtype]
    Grid, _ = grid_struct(dtype)
    inverse, axis_cell, low_of, edge_of, _, _ = cell_functions(dtype)
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
    def of_cloud(grid: Grid, cloud: int, q: vec3):
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
    def of_crowd(grid: Grid, parent: Frame, cell: int, x: int, y: int, z: int):
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
    def narrow(x: real, frame: Frame, axis: int, square: real, first: int, last: int):
        """Of cells along an axis those that may be within a squared distance; none if that is negative."""
        if square < real(0.0):
            return first, first - 1
        if square < real(wp.inf):
            far = wp.sqrt(square) + frame.slack
            low = axis_cell(x - far, frame.low[axis], frame.per_unit[axis], frame.shape[axis])
            high = axis_cell(x + far, frame.low[axis], frame.per_unit[axis], frame.shape[axis])
            first = wp.max(first, low)
            last = wp.min(last, high)
        return first, last

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

    return Frames(Frame, of_cloud, of_crowd, gap, narrow, beyond)
