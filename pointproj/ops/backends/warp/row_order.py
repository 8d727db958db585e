"""Rows of values in the order of the sorted points, on a GPU: what is near in space then lies together.

Gradients of positions within a radius read a row for each pair. A neighbour's place tells which one before
its point has been read. Gradients of features alone gain less by it than the copy takes.
"""

import functools

import torch
import warp as wp

from pointproj.ops.backends.warp.common import OPTIONS, REALS, packed_point
from pointproj.ops.backends.warp.hash_grid import Side
from pointproj.ops.backends.warp.queue import FEW_LANES
from pointproj.ops.backends.warp.radius_pairs import RadiusProblem
from pointproj.ops.bridge.warp_op import Launch

AT_ONCE = 4  # numbers of a row that a thread copies


def rows_in_order(launch: Launch, problem: RadiusProblem, queries: Side, references: Side) -> RadiusProblem:
    """The problem with upstream gradients, softmax and empty means in the order of the queries, and features
    in the order of the references.

    Rows are padded with zeros, so that few lanes read them 16 bytes at a time.
    """
    grad, softmax, features = problem.grad, problem.softmax, problem.features
    columns = _padded(grad.shape[1], grad.element_size())
    near = problem._replace(
        grad=grad.new_empty(grad.shape[0], columns),
        softmax=torch.empty_like(softmax),
        features=features.new_empty(features.shape[0], columns),
        means=grad.new_empty(grad.shape[0]),
    )
    shape = grad.shape[0] + features.shape[0], -(-columns // AT_ONCE)
    of_queries = queries.in_order(), grad, softmax, near.grad, near.softmax
    kernel = _kernel(queries.points.dtype, grad.dtype)
    launch(kernel, shape, *of_queries, references.in_order(), features, near.features)
    return near


def _padded(channels: int, size: int) -> int:
    """Columns of rows that are whole lines of the cache, unless that makes them much longer."""
    if channels <= FEW_LANES:
        return channels
    wide, line = 16 // size, 128 // size
    least, lines = (-(-channels // step) * step for step in (wide, line))
    return lines if 4 * lines <= 5 * least else least


@functools.cache
def _kernel(positions: torch.dtype, sums: torch.dtype) -> wp.Kernel:
    place, (real, _) = REALS[positions][0], REALS[sums]
    sorted_points, matrix = wp.array2d(dtype=place), wp.array2d(dtype=real)
    load_point, _, row_of = packed_point(positions)
    Numbers = wp.types.vector(length=AT_ONCE, dtype=real)

    @wp.func
    def copy(values: matrix, row: int, made: matrix, at: int, lane: int):
        """Loads first, and stores then: all are on their way at once."""
        stride = (made.shape[1] + wp.static(AT_ONCE - 1)) / wp.static(AT_ONCE)
        numbers = Numbers()
        for i in range(AT_ONCE):
            column = i * stride + lane
            if column < values.shape[1]:
                numbers[i] = values[row, column]
        for i in range(AT_ONCE):
            column = i * stride + lane
            if column < made.shape[1]:
                made[at, column] = numbers[i]

    @wp.kernel(**OPTIONS)
    def sort_rows(
        points: sorted_points,
        grad: matrix,
        softmax: matrix,
        sorted_grad: matrix,
        sorted_softmax: matrix,
        other_points: sorted_points,
        features: matrix,
        sorted_features: matrix,
    ):
        at, lane = wp.tid()
        if at < points.shape[0]:
            row = row_of(load_point(points, at))
            copy(grad, row, sorted_grad, at, lane)
            if lane == 0:
                base = softmax[row, 0]
                inverse = softmax[row, 1]
                sorted_softmax[at, 0] = base
                sorted_softmax[at, 1] = inverse
        else:
            at -= points.shape[0]
            copy(features, row_of(load_point(other_points, at)), sorted_features, at, lane)

    return sort_rows
