"""Which cells are visited: those of a cube around a query's own cell, row by row.

The cells of a row along x are adjacent in the tables, and so are their points. So a row of the cube is one
run of sorted points, or two where the inner part of the cube has been visited before. Each lane of a program
visits the runs of its own query.

The cell number is a monotonic function of the coordinate, also with rounding. So the cells at the ends of an
interval enclose the cells of all points in the interval, and no point is missed.
"""

import triton
import triton.language as tl

from pointproj.ops.backends.triton.arithmetic import is_finite, load_points, rounded_root

SLACK = tl.constexpr(1.00001)  # the factor by which a distance may exceed the root of its rounded square
SHORTEST = tl.constexpr(1e-18)  # squares of shorter distances lose digits, or vanish


@triton.jit
def load_queries(query_points, clouds, query, exists, BATCHED: tl.constexpr):
    """Positions and clouds of queries, and which of them exist and are finite."""
    x, y, z = load_points(query_points, query, exists, float("nan"))
    cloud = tl.zeros_like(query).to(tl.int32)
    if BATCHED:
        cloud = tl.load(clouds + query, mask=exists, other=0)
    return x, y, z, cloud, exists & is_finite(x, y, z)


@triton.jit
def cell_along(x, frame, axis: tl.constexpr, side):
    """Number of a coordinate's cell along one axis; 0 for NaN, which comes from a frame that overflows."""
    cell = (x - tl.load(frame + axis)) * tl.load(frame + 3)
    cell = tl.where(cell > 0, cell, 0.0)
    return tl.minimum(cell, side - 1.0).to(tl.int32)


@triton.jit
def cell_of(x, y, z, frame, side):
    """Numbers of points' cells along x, y, z."""
    return cell_along(x, frame, 0, side), cell_along(y, frame, 1, side), cell_along(z, frame, 2, side)


@triton.jit
def cells_between(x, cell, distance, frame, axis: tl.constexpr, side):
    """How many cells away along an axis a point within this distance can be."""
    before = cell - cell_along(x - distance, frame, axis, side)
    return tl.maximum(before, cell_along(x + distance, frame, axis, side) - cell)


@triton.jit
def cube_within(x, y, z, cx, cy, cz, squared, frame, side):
    """How many cells the cube extends to each side of a query's cell, to contain a squared distance."""
    distance = tl.maximum(rounded_root(squared) * SLACK, SHORTEST)
    size = cells_between(x, cx, distance, frame, 0, side)
    size = tl.maximum(size, cells_between(y, cy, distance, frame, 1, side))
    return tl.maximum(size, cells_between(z, cz, distance, frame, 2, side))


@triton.jit
def span_along(cell, size, side):
    """First cell of a cube along an axis, and the number of its cells that are in the grid."""
    low = tl.maximum(cell - size, 0)
    return low, tl.minimum(cell + size, side - 1) - low + 1


@triton.jit
def runs_of(cy, cz, size, side):
    """How many runs the cubes have: two a row."""
    _, height = span_along(cy, size, side)
    _, depth = span_along(cz, size, side)
    return 2 * height * depth


@triton.jit
def run_of(number, cx, cy, cz, size, inner, cloud, active, first, side):
    """Where the points of a run begin and end; both are 0 if the cube has no such run.

    An even number is a row, up to the cube of size ``inner``, which is left out. An odd number is the rest
    of the row behind that cube.
    """
    left, width = span_along(cx, size, side)
    low, height = span_along(cy, size, side)
    front, depth = span_along(cz, size, side)
    row = number // 2
    y, z = low + row % height, front + row // height
    right = left + width - 1
    is_split = (tl.abs(y - cy) <= inner) & (tl.abs(z - cz) <= inner)
    if number % 2 == 0:
        right = tl.where(is_split, cx - inner - 1, right)
    else:
        left = tl.where(is_split, cx + inner + 1, side)
    exists = active & (row < height * depth) & (left <= right)
    at = first + ((cloud * side + z) * side + y) * (side + 1)
    begin = tl.load(at + left, mask=exists, other=0)
    return begin, tl.load(at + right + 1, mask=exists, other=0)
