"""Tiles that gather the gradient of features within a radius, for 32 reference points at a time on a GPU."""

import functools
import math

import torch
import warp as wp
from torch import Tensor

from pointproj.ops.backends.warp.common import OPTIONS, Batch, BatchStruct, cloud_of, packed_point
from pointproj.ops.backends.warp.hash_grid import SearchedGrid, searched_struct
from pointproj.ops.backends.warp.lanes import lanes
from pointproj.ops.backends.warp.radius_pairs import RadiusProblem, problem_struct
from pointproj.ops.backends.warp.tile_sums import WARPS_AT_HAND, is_careful, tile_search
from pointproj.ops.backends.warp.tiles import (
    ADD_ALL,
    DISTANCE,
    FOUR,
    LANES,
    NUMBERS,
    OWN,
    STAGE,
    TYPE,
    WRITE_ROWS,
    Tiles,
    queue_functions,
    tile_names,
    tile_shape,
)
from pointproj.ops.backends.warp.weighting import TILE_WEIGHTS, weight_functions
from pointproj.ops.bridge.warp_op import Launch


@wp.struct
class GradientTask:
    """What all lanes read."""

    careful: bool  # whether levels are rounded as in the functions of weightings
    decay: wp.float32  # of the logarithm of a weight, to the base of 2
    limit: wp.float32
    values: wp.array2d(dtype=wp.float32)  # upstream gradients of the queries
    softmax: wp.array2d(dtype=wp.float32)
    chunk: int


_SAVED = "float2 saved[32];  // of candidates: level, inverse of the total weight"
_SAVE = "own.saved[lane] = reinterpret_cast<const float2*>(task.softmax.data)[row];"
# What is not within the radius must be left out, not weighted with 0: it may be infinite.
_ADD = """
    #pragma unroll 1
    for (int first = 0; first < size; first += {ahead}) {{
        bool within[{ahead}];
        float weight[{ahead}];
        #pragma unroll
        for (int j = 0; j < {ahead}; ++j) {{
            const float* from = own.point[first + j];
            {distance}
            within[j] = square <= largest_square;
            const float2 saved = own.saved[first + j];
            {weight}
            weight[j] *= saved.y;
        }}
        #pragma unroll
        for (int j = 0; j < {ahead}; ++j) {{
            if (!within[j]) continue;
            const Four* from = reinterpret_cast<const Four*>(own.values + (first + j) * {channels});
            #pragma unroll
            for (int c = 0; c < {channels}; c += 4) {{
                const Four four = from[c / 4];
                #pragma unroll
                for (int i = 0; i < 4; ++i) state[c + i] = fma(weight[j], four.x[i], state[c + i]);
            }}
        }}
    }}
"""
_WRITE = """
    #pragma unroll
    for (int c = 0; c < {channels}; ++c) own.values[c * 33 + lane] = state[c];
    __syncthreads();
    const Tile* all = &own - threadIdx.x / 32;
    const float scale = 1;
"""


@functools.cache
def gradient_tiles(channels: int, warps: int, kernel: str) -> tuple[Tiles, wp.Function]:
    """For ``channels`` and ``warps`` of a block, and ``write(state, address, row, chunk, output)``."""
    State = wp.types.vector(length=channels, dtype=wp.float32)
    names = {**tile_names(channels, warps), "saved": _SAVED, "save": _SAVE, "seek": ""}
    level, quick_level, weight = TILE_WEIGHTS[kernel]
    names["weight"] = weight.format(base="saved.x")
    names["add_carefully"] = _ADD.format(**{**names, "distance": DISTANCE.format(level=level)})
    names["add"] = _ADD.format(**{**names, "distance": DISTANCE.format(level=quick_level)})
    reserve, push = queue_functions(names)

    def snippet(*parts: str) -> str:
        return "".join(parts).format(**names)

    @wp.func_native(snippet(TYPE, FOUR, OWN, NUMBERS, STAGE, ADD_ALL))
    def flush(
        state: State,
        address: wp.uint64,
        size: int,
        q: wp.vec3f,
        largest_square: wp.float32,
        task: GradientTask,
    ) -> State: ...

    @wp.func_native(snippet(TYPE, OWN, _WRITE, WRITE_ROWS))
    def write(
        state: State, address: wp.uint64, row: int, chunk: int, output: wp.array2d(dtype=wp.float32)
    ): ...

    return Tiles(State, GradientTask, reserve, push, flush), write


def launch_gradient_tiles(
    launch: Launch,
    sorted_points: Tensor,
    batch: Batch,
    searched: SearchedGrid,
    problem: RadiusProblem,
    kernel: str,
    sparse: Tensor,
    d_features: Tensor,
) -> None:
    """Fill the gradient of the features, in float32; ``sparse`` says which tiles are left to lanes."""
    shape = tile_shape(batch.rows, problem.features.shape[1])
    compiled = gradient_tiles_kernel(shape.channels, shape.warps, kernel)
    values = sorted_points, batch, searched, problem, sparse, d_features
    launch(compiled, shape.dim, shape.searches, *values, block_dim=shape.block)


@functools.cache
def gradient_tiles_kernel(channels: int, warps: int, kernel: str) -> wp.Kernel:
    """Gradient of the features, of 32 reference points a block."""
    SearchedStruct = searched_struct(torch.float32)
    ProblemStruct = problem_struct(torch.float32, torch.float32)
    load_point, _, row_of = packed_point(torch.float32)
    tile, write = gradient_tiles(channels, warps, kernel)
    State, reserve = tile.State, tile.reserve
    search = tile_search(tile, warps)
    lane = lanes(LANES).lane
    rate_of, *_ = weight_functions(kernel, torch.float32)
    careful = is_careful(kernel)
    unit = 1.0 / math.log(2.0)

    @wp.kernel(**OPTIONS, launch_bounds=(LANES * warps, WARPS_AT_HAND // warps))
    def gather(
        searches: int,
        sorted_points: wp.array2d(dtype=wp.float32),
        batch: BatchStruct,
        searched: SearchedStruct,
        problem: ProblemStruct,
        sparse: wp.array(dtype=wp.int32),
        d_features: wp.array2d(dtype=wp.float32),
    ):
        block, _ = wp.tid()
        if sparse[block / searches] != 0:
            return
        task = GradientTask()
        task.chunk = block % searches
        task.decay = rate_of(float(unit), problem.sigma[0], problem.power, problem.limit)
        task.limit = problem.limit
        task.careful = careful(problem, task.decay)
        task.softmax = problem.softmax
        task.values = problem.grad
        at = block / searches * LANES + lane()
        q = wp.vec3f(float(wp.nan))
        row = int(-1)
        if at < batch.rows:  # the last block may have fewer points than lanes
            point = load_point(sorted_points, at)
            q = wp.vec3f(point[0], point[1], point[2])
            row = row_of(point)
        cloud = cloud_of(wp.max(row, 0), batch)
        state = search(State(), q, cloud, searched, problem, task)
        write(state, reserve(), row, task.chunk, d_features)

    return gather
