"""Evenly spread points out of a dense cloud: the next is always the one farthest from all chosen before.

Eldar et al., The farthest point strategy for progressive image sampling, 1997. A point that was just chosen
changes the distances near it alone. So points are sorted into buckets of neighbours, and those buckets are
passed over whose box is farther from it than each of their points is from the points chosen before. The
result is that of comparing all points, and the same on CPU and CUDA.
"""

import torch
import warp as wp
from jaxtyping import Float, Int
from torch import Tensor

from pointproj.ops.bridge.warp_op import warp_op

BUCKET = 16
"""Points of a bucket."""

THREADS = 512
"""Of a GPU, for one cloud."""

BITS = 10
"""Of each coordinate, for the order along a Morton curve."""

# A point's key holds its squared distance to the chosen points above its number, so that one maximum finds
# the farthest, and of equally far ones the first. Warps publish theirs in turn in two places, so that one
# barrier a point is enough.
_CHOOSE = """
    typedef unsigned long long Key;
    union Bits { float number; unsigned word; } bits;
#if defined(__CUDA_ARCH__)
    __shared__ Key of_warps[2][32];
    const int thread = threadIdx.x, threads = blockDim.x;
#else
    const int thread = 0, threads = 1;
#endif
    const int buckets = keys.shape[1], size = sorted_points.shape[1] / buckets;
    const auto* given = points.data + size_t(cloud) * points.shape[1];
    const auto* sorted = sorted_points.data + size_t(cloud) * sorted_points.shape[1];
    const int* numbers = sorted_numbers.data + size_t(cloud) * sorted_points.shape[1];
    float* nearest = distances.data + size_t(cloud) * sorted_points.shape[1];
    const auto* low = lower.data + size_t(cloud) * buckets;
    const auto* high = upper.data + size_t(cloud) * buckets;
    Key* key_of = reinterpret_cast<Key*>(keys.data) + size_t(cloud) * buckets;
    long long* result = chosen.data + size_t(cloud) * chosen.shape[1];

    int number = 0;
    for (int step = 0; step < chosen.shape[1]; ++step) {
        if (thread == 0) result[step] = number;
        const auto point = given[number];
        Key best = 0;
        for (int bucket = thread; bucket < buckets; bucket += threads) {
            float squared = 0.0f;
            for (int axis = 0; axis < 3; ++axis) {
                const float below = low[bucket][axis] - point[axis], above = point[axis] - high[bucket][axis];
                const float outside = below > above ? below : above, away = outside > 0.0f ? outside : 0.0f;
                squared += away * away;
            }
            Key key = key_of[bucket];
            bits.word = unsigned(key >> 32);
            if (step == 0 || squared < bits.number) {
                key = 0;
                for (int i = 0; i < size; ++i) {
                    const int at = i * buckets + bucket;
                    float distance = 0.0f;
                    for (int axis = 0; axis < 3; ++axis) {
                        const float away = sorted[at][axis] - point[axis];
                        distance += away * away;
                    }
                    if (step > 0 && nearest[at] < distance) distance = nearest[at];
                    nearest[at] = bits.number = distance;
                    const Key own = Key(bits.word) << 32 | (0xffffffffu - unsigned(numbers[at]));
                    if (own > key) key = own;
                }
                key_of[bucket] = key;
            }
            if (key > best) best = key;
        }
#if defined(__CUDA_ARCH__)
        for (int lanes = 16; lanes > 0; lanes >>= 1) {
            const Key other = __shfl_xor_sync(0xffffffffu, best, lanes);
            if (other > best) best = other;
        }
        if ((thread & 31) == 0) of_warps[step & 1][thread / 32] = best;
        __syncthreads();
        for (int warp = 0; warp < threads / 32; ++warp) {
            if (of_warps[step & 1][warp] > best) best = of_warps[step & 1][warp];
        }
#endif
        number = static_cast<int>(0xffffffffu - unsigned(best & 0xffffffffu));
    }
"""


@wp.func_native(_CHOOSE)
def choose(
    cloud: int,
    points: wp.array2d(dtype=wp.vec3f),
    sorted_points: wp.array2d(dtype=wp.vec3f),
    sorted_numbers: wp.array2d(dtype=wp.int32),
    lower: wp.array2d(dtype=wp.vec3f),
    upper: wp.array2d(dtype=wp.vec3f),
    distances: wp.array2d(dtype=wp.float32),
    keys: wp.array2d(dtype=wp.int64),
    chosen: wp.array2d(dtype=wp.int64),
):
    """Choose the points of one cloud, with all threads of a block."""
    ...


@wp.kernel(module="unique", module_options={"enable_backward": False, "fuse_fp": False})
def farthest_kernel(
    points: wp.array2d(dtype=wp.vec3f),
    sorted_points: wp.array2d(dtype=wp.vec3f),
    sorted_numbers: wp.array2d(dtype=wp.int32),
    lower: wp.array2d(dtype=wp.vec3f),
    upper: wp.array2d(dtype=wp.vec3f),
    distances: wp.array2d(dtype=wp.float32),
    keys: wp.array2d(dtype=wp.int64),
    chosen: wp.array2d(dtype=wp.int64),
):
    """One block a cloud; launched over (B, threads of a block). Writes all of the last three."""
    cloud, _ = wp.tid()
    choose(cloud, points, sorted_points, sorted_numbers, lower, upper, distances, keys, chosen)


def farthest_points(points: Float[Tensor, "B n 3"], count: int) -> Int[Tensor, "B count"]:
    """Choose points of each cloud, the first and then always the one farthest from all chosen before.

    Parameters
    ----------
    points : (B, n, 3) float32 tensor
        Finite.
    count : int
        Of each cloud, at most ``n``.

    Returns
    -------
    (B, count) int64 tensor
        Their numbers in the order in which they were chosen; of equally far points the first. Where fewer
        places than ``count`` are different, the first point of those left is repeated.

    Raises
    ------
    ValueError
        If ``count`` is not from 1 to ``n``.
    """
    clouds, size, _ = points.shape
    if not 1 <= count <= size:
        raise ValueError(f"expected to choose from 1 to {size} points of each cloud, got {count}")
    points = points.contiguous()
    order = _along_curve(points).argsort(dim=1, stable=True)
    order = torch.nn.functional.pad(order[:, None], (0, -size % BUCKET), mode="replicate")[:, 0]
    in_order = points.gather(1, order[..., None].expand(-1, -1, 3)).view(clouds, -1, BUCKET, 3)
    # The first points of all buckets come first, then the second: what threads side by side read together.
    turned = in_order.transpose(1, 2).reshape(clouds, -1, 3)
    numbers = order.int().view(clouds, -1, BUCKET).transpose(1, 2).reshape(clouds, -1)
    chosen, *_ = _choose(points, turned, numbers, in_order.amin(2), in_order.amax(2), count)
    return chosen


def _along_curve(points: Float[Tensor, "B n 3"]) -> Int[Tensor, "B n"]:
    """Places of points along a Morton curve through the box of their cloud."""
    low, high = points.amin(1, keepdim=True), points.amax(1, keepdim=True)
    longest = (high - low).amax(-1, keepdim=True).clamp(min=torch.finfo(points.dtype).tiny)
    cells = ((points - low) / longest * (2**BITS - 1)).long()
    bits = torch.arange(BITS, device=points.device)
    spaced = ((cells[..., None] >> bits & 1) << 3 * bits).sum(-1)
    return spaced[..., 0] | spaced[..., 1] << 1 | spaced[..., 2] << 2


@warp_op(
    "pointproj::farthest_points",
    outputs=lambda points, sorted_points, sorted_numbers, lower, upper, count: {
        "chosen": ((len(points), count), torch.int64),
        "distances": (sorted_numbers.shape, torch.float32),
        "keys": (lower.shape[:2], torch.int64),
    },
)
def _choose(
    launch,
    points: Tensor,
    sorted_points: Tensor,
    sorted_numbers: Tensor,
    lower: Tensor,
    upper: Tensor,
    count: int,
    chosen: Tensor,
    distances: Tensor,
    keys: Tensor,
):
    threads = THREADS if points.is_cuda else 1
    sizes = len(points), threads
    arrays = points, sorted_points, sorted_numbers, lower, upper, distances, keys, chosen
    launch(farthest_kernel, sizes, *arrays, block_dim=threads)
