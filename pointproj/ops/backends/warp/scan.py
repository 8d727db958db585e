"""Where each cell's points begin: a running sum over the cells in one launch.

The sum counts a dense cell instead of its points, which lie in its sub-cells. So it holds two numbers: points
in its low 32 bits, dense cells above. Two sums say at once which points a run of cells holds, and whether a
dense cell is among them.
"""

import functools

import torch
import warp as wp
from torch import Tensor

from pointproj.ops.backends.warp.common import DENSE, OPTIONS
from pointproj.ops.bridge.scratch import Part
from pointproj.ops.bridge.warp_op import Launch

ITEMS = 16  # cells that a thread of a GPU sums up
SMALL_BLOCK, LARGE_BLOCK = 256, 1024
MANY = 2**22  # from so many sizes on blocks are large

# A block sums up its tile, publishes the sum, and adds up those of all tiles before. It takes the next tile
# when it starts, so none waits for a block that cannot start. A lane holds four cells in a row, so that
# what a warp reads and writes lies together.
_SUM_UP = """
#if defined(__CUDA_ARCH__)
    typedef unsigned long long Sum;
    struct alignas(16) Four {{ {integer} x[4]; }};
    __shared__ Sum of_warps[32];
    __shared__ Sum before_tile;
    __shared__ int next_tile;
    const Sum known = Sum(1) << 63;  // tells a sum of 0 from none
    const int thread = threadIdx.x, lane = thread & 31, size = occupancy.shape[0];
    if (thread == 0) {{
        next_tile = atomicAdd(reinterpret_cast<int*>(states.data), 1);
        before_tile = 0;
    }}
    __syncthreads();
    const int tile = next_tile;
    volatile Sum* published = reinterpret_cast<Sum*>(states.data) + 1;

    const int first = (tile * blockDim.x + thread - lane) * {items} + 4 * lane;
    Sum before[{items}];  // each cell, in this warp
    Sum running = 0;
    #pragma unroll
    for (int strip = 0; strip < {items}; strip += 4) {{
        const int at = first + 32 * strip;
        int points[4] = {{0, 0, 0, 0}};
        if (at + 4 <= size) {{
            const int4 four = *reinterpret_cast<const int4*>(occupancy.data + at);
            points[0] = four.x; points[1] = four.y; points[2] = four.z; points[3] = four.w;
        }} else {{
            for (int i = 0; i < 4; ++i) if (at + i < size) points[i] = occupancy.data[at + i];
        }}
        Sum sum = 0;
        #pragma unroll
        for (int i = 0; i < 4; ++i) {{
            before[strip + i] = sum;
            sum += at + i < cells && points[i] >= {dense} ? Sum(1) << 32 : Sum(points[i]);
        }}
        Sum up_to = sum;
        #pragma unroll
        for (int step = 1; step < 32; step <<= 1) {{
            const Sum other = __shfl_up_sync(0xffffffffu, up_to, step);
            if (lane >= step) up_to += other;
        }}
        #pragma unroll
        for (int i = 0; i < 4; ++i) before[strip + i] += running + up_to - sum;
        running += __shfl_sync(0xffffffffu, up_to, 31);
    }}
    if (lane == 0) of_warps[thread / 32] = running;
    __syncthreads();
    Sum ahead = 0, total = 0;
    for (int warp = 0; warp < blockDim.x / 32; ++warp) {{
        if (warp < thread / 32) ahead += of_warps[warp];
        total += of_warps[warp];
    }}
    if (thread == 0) published[tile] = known | total;
    Sum tiles = 0;
    for (int other = thread; other < tile; other += blockDim.x) {{
        Sum word;
        do word = published[other]; while (word == 0);
        tiles += word ^ known;
    }}
    for (int step = 16; step > 0; step >>= 1) tiles += __shfl_xor_sync(0xffffffffu, tiles, step);
    if (lane == 0) atomicAdd(&before_tile, tiles);
    __syncthreads();
    ahead += before_tile;
    #pragma unroll
    for (int strip = 0; strip < {items}; strip += 4) {{
        const int at = first + 32 * strip;
        Four four;
        for (int i = 0; i < 4; ++i) four.x[i] = ahead + before[strip + i];
        if (at + 4 <= size) {{
            *reinterpret_cast<Four*>(start.data + at) = four;
        }} else {{
            for (int i = 0; i < 4; ++i) if (at + i < size) start.data[at + i] = four.x[i];
        }}
    }}
    if (thread == 0 && tile == gridDim.x - 1) start.data[size] = before_tile + total;
#else
    long long before = 0;
    start.data[0] = 0;
    for (int i = 0; i < occupancy.shape[0]; ++i) {{
        const int points = occupancy.data[i];
        before += i < cells && points >= {dense} ? 1ll << 32 : points;
        start.data[i + 1] = before;
    }}
#endif
"""


def states_of(sizes: int) -> int:
    """How many int64, all 0, :func:`running_sum` needs for so many sizes; an even number."""
    return 2 * (-(-sizes // (SMALL_BLOCK * ITEMS)) // 2 + 1)


def running_sum(
    launch: Launch, occupancy: Tensor | Part, cells: int, states: Tensor | Part, start: Tensor | Part
) -> None:
    """Fill ``start`` (S + 1,) with the running sums of ``occupancy`` (S,) int32, from 0.

    Dense cells are looked for among the first ``cells``; there must be none if ``start`` is int32. On a GPU
    both tensors begin at a multiple of 16 bytes.
    """
    block = SMALL_BLOCK if occupancy.shape[0] < MANY else LARGE_BLOCK
    threads = -(-occupancy.shape[0] // (block * ITEMS)) * block if launch.device.type == "cuda" else 1
    launch(_kernel(start.dtype), threads, occupancy, cells, states, start, block_dim=block)


@functools.cache
def _kernel(dtype: torch.dtype) -> wp.Kernel:
    sizes, counters = wp.array(dtype=wp.int32), wp.array(dtype=wp.int64)
    starts = wp.array(dtype=wp.dtype_from_torch(dtype))
    integer = "int" if dtype == torch.int32 else "long long"

    @wp.func_native(_SUM_UP.format(items=ITEMS, dense=DENSE, integer=integer))
    def sum_up(occupancy: sizes, cells: int, states: counters, start: starts): ...

    @wp.kernel(**OPTIONS, launch_bounds=LARGE_BLOCK)
    def scan(occupancy: sizes, cells: int, states: counters, start: starts):
        sum_up(occupancy, cells, states, start)

    return scan


@wp.func
def points_before(running: wp.int64):
    """Points in a running sum."""
    return int(running)


@wp.func
def points_before(running: wp.int32):
    return running


@wp.func
def dense_cells_before(running: wp.int64):
    """Dense cells in a running sum."""
    return int(running >> wp.int64(32))
