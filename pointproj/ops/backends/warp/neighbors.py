"""Where sums get their neighbours from: a search within a radius, or lists of neighbours."""

from typing import Any, NamedTuple

import torch
import warp as wp

from pointproj.ops.backends.warp import common
from pointproj.ops.backends.warp.common import REALS, IntRows, Vectors, struct_of
from pointproj.ops.backends.warp.lanes import lanes
from pointproj.ops.backends.warp.queue import Accumulator, Queue, queue_of
from pointproj.ops.backends.warp.traversal import Ball, Visitor, ball_search


class Lists(NamedTuple):
    """The neighbours of each query."""

    others: Vectors  # (N, 3) positions of the references
    rows: IntRows  # (Q, k), nearest first, -1 where there are fewer


NeighborSource = Ball | Lists


class Variant(NamedTuple):
    """What a kernel of sums is compiled for."""

    source: type[NeighborSource]
    positions: torch.dtype
    sums: torch.dtype
    lanes: int  # of a point
    channels: int  # of each lane
    vector: int  # of those, adjacent ones that are read as one word
    single: bool  # whether one search covers all channels
    kernel: str
    reduce: str
    graded: bool  # whether the grid of a ball may be


def each_neighbor(variant: Variant, accumulator: Accumulator) -> tuple[Any, wp.Function]:
    """The struct of the source, and the function that adds up all neighbours of a point.

    The function is ``add_neighbors(state, row of the point, q, cloud, source, problem) -> state``.
    """
    group = lanes(variant.lanes)
    queue = queue_of(accumulator, group, variant.sums)
    if variant.source is Ball:
        return struct_of(Ball, variant.positions), _within_radius(variant, accumulator, queue)
    return struct_of(Lists, variant.positions), _in_lists(variant, accumulator, queue)


def _within_radius(variant: Variant, accumulator: Accumulator, queue: Queue) -> wp.Function:
    _, vec3, vec4 = REALS[variant.positions]
    real, *_ = REALS[variant.sums]
    BallStruct = struct_of(Ball, variant.positions)
    State, Problem, QueueState = accumulator.State, accumulator.Problem, queue.State
    position_dtype, *_ = REALS[variant.positions]

    @wp.func
    def visit(
        state: QueueState, problem: Problem, q: vec3, point: vec4, squared: position_dtype, exists: bool
    ):
        in_sums_dtype = common.squared_distance(q, common.position_of(point), real(0.0))
        return queue.push(state, problem, exists, common.row_of(point), in_sums_dtype)

    visitor = Visitor(QueueState, Problem, visit, queue.flush_if_full)
    search = ball_search(variant.positions, lanes(variant.lanes), visitor, variant.graded)

    @wp.func
    def add_neighbors(state: State, own: int, q: vec3, cloud: int, ball: BallStruct, problem: Problem):
        queued = search(QueueState(0, state), own, q, cloud, ball, problem)
        queued = queue.flush(queued, problem)
        return queued.sums

    return add_neighbors


def _in_lists(variant: Variant, accumulator: Accumulator, queue: Queue) -> wp.Function:
    _, vec3, _ = REALS[variant.positions]
    real, *_ = REALS[variant.sums]
    ListsStruct, group = struct_of(Lists, variant.positions), lanes(variant.lanes)
    State, Problem, QueueState = accumulator.State, accumulator.Problem, queue.State

    @wp.func
    def add_neighbors(state: State, own: int, q: vec3, cloud: int, lists: ListsStruct, problem: Problem):
        queued = QueueState(0, state)
        k = lists.rows.shape[1]
        for first in range(0, k, group.count):
            row = int(-1)
            squared = real(0.0)
            if first + group.lane() < k:
                row = lists.rows[own, first + group.lane()]
            if row >= 0:
                squared = common.squared_distance(q, lists.others[row], squared)
            queued = queue.push(queued, problem, row >= 0, row, squared)
            queued = queue.flush_if_full(queued, problem)
        queued = queue.flush(queued, problem)
        return queued.sums

    return add_neighbors
