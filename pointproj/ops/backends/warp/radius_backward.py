"""Which kernels fill the gradients of the aggregation within a radius."""

from typing import NamedTuple

import torch
from torch import Tensor

from pointproj.ops.backends.warp.gradient_tiles import launch_gradient_tiles
from pointproj.ops.backends.warp.hash_grid import Side
from pointproj.ops.backends.warp.point_gradients import Gathered, point_gradient_kernel
from pointproj.ops.backends.warp.queue import divide, few_lanes
from pointproj.ops.backends.warp.radius_gradients import (
    feature_gradient_kernel,
    position_gradient_kernel,
    sparse_shape,
)
from pointproj.ops.backends.warp.radius_pairs import RadiusProblem
from pointproj.ops.backends.warp.row_order import rows_in_order
from pointproj.ops.backends.warp.sparse_tiles import mark_sparse
from pointproj.ops.bridge.warp_op import Launch
from pointproj.ops.reference import Weighting


class Wanted(NamedTuple):
    """The gradients to fill, None where one is not needed."""

    query_points: Tensor | None
    reference_points: Tensor | None
    features: Tensor | None
    sigma: Tensor | None


def fill_gradients(
    launch: Launch,
    queries: Side,
    references: Side,
    problem: RadiusProblem,
    weighting: Weighting,
    wanted: Wanted,
) -> None:
    """Each point gathers its own, by lanes on a GPU, by one thread on a CPU.

    On a GPU rows of values are sorted for gradients of positions, as their points are. Where a point's lanes
    have all channels at once, a reference gathers that of its features with that of its position: both read
    the same rows.
    """
    sums, d_points, d_features = problem.softmax, wanted.reference_points, wanted.features
    of_queries = wanted.query_points is not None or wanted.sigma is not None
    near = problem  # as gradients of positions read it
    if sums.is_cuda and (of_queries or d_points is not None):
        near = rows_in_order(launch, problem, queries, references)
    if of_queries or near.means is not None:
        made, of_sigma = _made_for(wanted.query_points, queries, sums), sums.new_empty(sums.shape[0])
        _of_positions(launch, queries, references, near, weighting, made, of_sigma, None)
        if wanted.query_points is not None and made is not wanted.query_points:
            wanted.query_points.copy_(made)
        if wanted.sigma is not None:
            wanted.sigma.copy_(of_sigma.sum())
    if d_points is not None:
        at_once = sums.is_cuda and few_lanes(near.features, near.grad).searches == 1
        made = _made_for(d_points, references, sums)
        _of_positions(
            launch, references, queries, near, weighting, made, None, d_features if at_once else None
        )
        if made is not d_points:
            d_points.copy_(made)
        if at_once:
            return
    if d_features is not None:
        _of_features(launch, queries, references, problem, weighting, d_features)


def _made_for(d_points: Tensor | None, side: Side, sums: Tensor) -> Tensor:
    """Where kernels write: the gradient itself if it is wanted, and in the dtype of sums."""
    fits = d_points is not None and d_points.dtype == sums.dtype
    return d_points if fits else sums.new_empty(side.batch.rows, 3)


def _of_features(
    launch: Launch,
    queries: Side,
    references: Side,
    problem: RadiusProblem,
    weighting: Weighting,
    d_features: Tensor,
) -> None:
    """By lanes; of many points in float32 by tiles, and by lanes where those are sparse.

    Of few points lanes are quicker, of 10^8 they take 43 ms, and tiles 37.
    """
    own, sparse = (references.in_order(), references.batch), None
    division = divide(d_features.shape[1], d_features.device.type, most_lanes=32)
    shape = references.batch.rows * division.searches, division.lanes
    if d_features.is_cuda and d_features.dtype == torch.float32:
        sparse = mark_sparse(launch, *own, queries.searched, problem.radius)
    if sparse is not None:
        launch_gradient_tiles(launch, *own, queries.searched, problem, weighting.kernel, sparse, d_features)
        division = few_lanes(problem.grad)
        shape = sparse_shape(references.batch.rows, division)
    dtypes = references.points.dtype, d_features.dtype
    kernel = feature_gradient_kernel(*dtypes, division, weighting.kernel, of_sparse=sparse is not None)
    launch(kernel, shape, *own, queries.searched, problem, sparse, d_features, block_dim=division.block)


def _of_positions(
    launch: Launch,
    side: Side,
    others: Side,
    problem: RadiusProblem,
    weighting: Weighting,
    d_points: Tensor,
    d_sigma: Tensor | None,
    d_features: Tensor | None,
) -> None:
    """Of queries if ``d_sigma`` is to be filled, else of references."""
    problem = problem._replace(first=others.first_sorted)
    dtypes, named = (side.points.dtype, d_points.dtype), (weighting.kernel, weighting.reduce)
    from_query = d_sigma is not None
    if not d_points.is_cuda:
        kernel = position_gradient_kernel(*dtypes, *named, from_query=from_query)
        own = side.points, side.batch
        launch(kernel, side.batch.rows, *own, others.searched, problem, d_points, d_sigma)
        return
    division = few_lanes(problem.features, problem.grad)
    kernel = point_gradient_kernel(*dtypes, division, *named, Gathered(from_query, d_features is not None))
    own, made = (side.in_order(), side.batch), (d_points, d_sigma, d_features)
    shape = side.batch.rows, division.lanes
    launch(kernel, shape, *own, others.searched, problem, *made, block_dim=division.block)
