"""Which kernels fill the gradients of the aggregation within a radius."""

from functools import partial
from typing import NamedTuple

from torch import Tensor

from pointproj.ops.backends.warp.hash_grid import Side
from pointproj.ops.backends.warp.queue import divide
from pointproj.ops.backends.warp.radius_gradients import feature_gradient_kernel, position_gradient_kernel
from pointproj.ops.backends.warp.radius_pairs import RadiusProblem
from pointproj.ops.backends.warp.sparse_sums import SPARSE_LANES, sparse_division
from pointproj.ops.backends.warp.sparse_tiles import mark_sparse
from pointproj.ops.backends.warp.tile_gradients import launch_gradient_tiles
from pointproj.ops.backends.warp.tiles import MOST_CHANNELS
from pointproj.ops.bridge.warp_op import Launch
from pointproj.ops.reference import Weighting


class Wanted(NamedTuple):
    """The gradients to fill, None where one is not needed."""

    query_points: Tensor | None
    reference_points: Tensor | None
    features: Tensor | None
    sigma: Tensor | None

    @property
    def of_queries(self) -> bool:
        return self.query_points is not None or self.sigma is not None


def ball_backward(
    launch: Launch,
    queries: Side,
    references: Side,
    problem: RadiusProblem,
    weighting: Weighting,
    wanted: Wanted,
) -> None:
    """By lanes, or a thread on a CPU, that gather for one point: in float64, and on a CPU."""
    if wanted.features is not None:
        _features_by_lanes(launch, queries, references, problem, weighting, None, wanted.features)
    if wanted.of_queries:
        made = _made_for_queries(problem, wanted)
        _positions_by_lanes(launch, queries, references, problem, weighting, None, *made)
        _finish_queries(wanted, *made)
    if wanted.reference_points is not None:
        made = problem.features.new_empty(wanted.reference_points.shape)
        _positions_by_lanes(launch, references, queries, problem, weighting, None, made, None)
        wanted.reference_points.copy_(made)


def tile_backward(
    launch: Launch,
    queries: Side,
    references: Side,
    problem: RadiusProblem,
    weighting: Weighting,
    wanted: Wanted,
) -> None:
    """By tiles, and by lanes where those are sparse; in float32 on a GPU.

    Of few points the features' gradient alone is quicker by lanes; of 10^8 it takes 49 ms by lanes, 46 by
    tiles.
    """
    if problem.features.shape[1] > MOST_CHANNELS:  # products over all channels do not fit into a tile
        ball_backward(launch, queries, references, problem, weighting, wanted._replace(features=None))
        wanted = Wanted(None, None, wanted.features, None)
    gather = partial(launch_gradient_tiles, launch, problem=problem, weighting=weighting[:2])
    means = None
    if wanted.of_queries or wanted.reference_points is not None:
        means = problem.softmax.new_empty(queries.batch.rows)
        made = _made_for_queries(problem, wanted)
        own = queries.in_order(), queries.batch, references.searched
        sparse = mark_sparse(launch, *own, problem.radius)
        gather(*own, means=means, sparse=sparse, from_query=True, d_points=made[0], d_sigma=made[1])
        if sparse is not None:
            _positions_by_lanes(launch, queries, references, problem, weighting, sparse, *made)
        _finish_queries(wanted, *made)
    d_points, d_features = wanted.reference_points, wanted.features
    if d_points is None and d_features is None:
        return
    own = references.in_order(), references.batch, queries.searched
    sparse = mark_sparse(launch, *own, problem.radius)
    if d_points is None and sparse is None:
        _features_by_lanes(launch, queries, references, problem, weighting, None, d_features)
        return
    gather(*own, means=means, sparse=sparse, from_query=False, d_points=d_points, d_features=d_features)
    if sparse is None:
        return
    if d_features is not None:
        _features_by_lanes(launch, queries, references, problem, weighting, sparse, d_features)
    if d_points is not None:
        _positions_by_lanes(launch, references, queries, problem, weighting, sparse, d_points, None)


def _made_for_queries(problem: RadiusProblem, wanted: Wanted) -> tuple[Tensor, Tensor]:
    """Gradients of query points, in the dtype of sums, and of sigma, row by row."""
    rows = problem.softmax.shape[0]
    return problem.softmax.new_empty(rows, 3), problem.softmax.new_empty(rows)


def _finish_queries(wanted: Wanted, made: Tensor, of_sigma: Tensor) -> None:
    if wanted.query_points is not None:
        wanted.query_points.copy_(made)
    if wanted.sigma is not None:
        wanted.sigma.copy_(of_sigma.sum())


def _features_by_lanes(
    launch: Launch,
    queries: Side,
    references: Side,
    problem: RadiusProblem,
    weighting: Weighting,
    sparse: Tensor | None,
    d_features: Tensor,
) -> None:
    channels, dtypes = d_features.shape[1], (references.searched.points.dtype, d_features.dtype)
    division = divide(channels, d_features.device.type, most_lanes=32)
    if sparse is not None:
        division = sparse_division(problem.grad)
    shape = (references.batch.rows * division.searches, division.lanes)
    own = references.in_order(), references.batch
    kernel = feature_gradient_kernel(*dtypes, division, weighting.kernel)
    launch(kernel, shape, *own, queries.searched, problem, sparse, d_features, block_dim=division.block)


def _positions_by_lanes(
    launch: Launch,
    side: Side,
    others: Side,
    problem: RadiusProblem,
    weighting: Weighting,
    sparse: Tensor | None,
    d_points: Tensor,
    d_sigma: Tensor | None,
) -> None:
    lane_count = 1 if d_points.device.type == "cpu" else 32 if sparse is None else SPARSE_LANES
    dtypes = side.points.dtype, d_points.dtype
    kernel = position_gradient_kernel(
        *dtypes, lane_count, weighting.kernel, weighting.reduce, from_query=d_sigma is not None
    )
    shape = (side.batch.rows, lane_count)
    in_order = None if sparse is None else side.in_order()
    own = side.points, side.batch
    launch(kernel, shape, *own, others.searched, problem, in_order, sparse, d_points, d_sigma)
