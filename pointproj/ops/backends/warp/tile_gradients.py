"""Gradients of the sums within a radius on a GPU, gathered for 32 points at a time."""

import functools
import math

import torch
import warp as wp
from torch import Tensor

from pointproj.ops.backends.warp.common import OPTIONS, Batch, BatchStruct, cloud_of, packed_point
from pointproj.ops.backends.warp.gradient_tiles import Gathered, GradientTask, gradient_tiles
from pointproj.ops.backends.warp.hash_grid import SearchedGrid, searched_struct
from pointproj.ops.backends.warp.lanes import lanes
from pointproj.ops.backends.warp.radius_pairs import RadiusProblem, problem_struct
from pointproj.ops.backends.warp.tile_sums import WARPS_AT_HAND, is_careful, tile_search
from pointproj.ops.backends.warp.tiles import LANES, tile_shape
from pointproj.ops.backends.warp.weighting import weight_functions
from pointproj.ops.bridge.warp_op import Launch


def launch_gradient_tiles(
    launch: Launch,
    sorted_points: Tensor,
    batch: Batch,
    searched: SearchedGrid,
    problem: RadiusProblem,
    weighting: tuple[str, str],
    means: Tensor | None,
    sparse: Tensor | None,
    *,
    from_query: bool,
    d_features: Tensor | None = None,
    d_points: Tensor | None = None,
    d_sigma: Tensor | None = None,
) -> None:
    """Fill the gradients of one side that are given; ``d_sigma`` row by row, all in float32.

    ``sparse`` says which tiles are left to lanes.
    """
    shape = tile_shape(batch.rows, problem.features.shape[1])
    gathered = Gathered(from_query, d_features is not None, d_points is not None)
    compiled = gradient_tiles_kernel(shape.channels, shape.warps, *weighting, gathered)
    made = d_features, None if d_points is None else d_points.view(-1), d_sigma
    own = sorted_points, batch
    values = *own, searched, problem, means, sparse, *made
    launch(compiled, shape.dim, shape.searches, *values, block_dim=shape.block)


@functools.cache
def gradient_tiles_kernel(
    channels: int, warps: int, kernel: str, reduce: str, gathered: Gathered
) -> wp.Kernel:
    """Gradients that belong to queries, or to references."""
    SearchedStruct = searched_struct(torch.float32)
    ProblemStruct = problem_struct(torch.float32, torch.float32)
    load_point, _, row_of = packed_point(torch.float32)
    tile, begin, write = gradient_tiles(channels, warps, kernel, reduce, gathered)
    reserve = tile.reserve
    search = tile_search(tile, warps)
    lane = lanes(LANES).lane
    rate_of, *_, sigma_unit = weight_functions(kernel, torch.float32)
    careful = is_careful(kernel)
    unit = 1.0 / math.log(2.0)
    from_query = gathered.from_query

    @wp.kernel(**OPTIONS, launch_bounds=(LANES * warps, WARPS_AT_HAND // warps))
    def gather(
        searches: int,
        sorted_points: wp.array2d(dtype=wp.float32),
        batch: BatchStruct,
        searched: SearchedStruct,
        problem: ProblemStruct,
        means: wp.array(dtype=wp.float32),
        sparse: wp.array(dtype=wp.int32),
        d_features: wp.array2d(dtype=wp.float32),
        d_points: wp.array(dtype=wp.float32),
        d_sigma: wp.array(dtype=wp.float32),
    ):
        block, _ = wp.tid()
        task = GradientTask()
        task.chunk = block % searches
        task.decay = rate_of(float(unit), problem.sigma[0], problem.power, problem.limit)
        task.rate = rate_of(float(1.0), problem.sigma[0], problem.power, problem.limit)
        task.limit = problem.limit
        task.careful = careful(problem, task.decay)
        task.softmax = problem.softmax
        task.means = means
        at = block / searches * LANES + lane()
        q = wp.vec3f(float(wp.nan))
        row = int(-1)
        if at < batch.rows:  # the last block may have fewer points than lanes
            point = load_point(sorted_points, at)
            q = wp.vec3f(point[0], point[1], point[2])
            row = row_of(point)
        cloud = cloud_of(wp.max(row, 0), batch)
        # Means of queries are there for all references, also those of tiles that are left.
        own_rows = problem.features
        task.values = problem.grad
        unit_of_share = float(1.0)
        if wp.static(from_query):
            own_rows = problem.grad
            task.values = problem.features
            unit_of_share = sigma_unit(problem.sigma[0])
        state = begin(task, own_rows, problem.aggregated, row)
        if sparse and sparse[block / searches] != 0:
            return
        state = search(state, q, cloud, searched, problem, task)
        write(state, reserve(), row, task.chunk, unit_of_share, d_features, d_points, d_sigma)

    return gather
