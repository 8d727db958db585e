"""What the Warp kernels of this folder share: options, arrays, and displacements of neighbours."""

from functools import partial

import warp as wp
from jaxtyping import Float
from torch import Tensor

# No fused multiply-add, so that CPU and CUDA give equal results; the kernels have no gradients.
kernel = partial(wp.kernel, module="unique", module_options={"fuse_fp": False, "enable_backward": False})

Scales = wp.array(dtype=wp.float32)  # (b,)
Numbers = wp.array2d(dtype=wp.float32)  # (b, n)
Vectors = wp.array2d(dtype=wp.vec3)  # (b, n)
Fours = wp.array2d(dtype=wp.vec4)  # (b, n)
Around = wp.array3d(dtype=wp.vec3)  # (b, n, k)
Rows = wp.array3d(dtype=wp.int64)  # (b, n, k)


def for_kernels(*tensors: Tensor) -> list[Tensor]:
    """Return tensors as kernels need them: without gradients, contiguous, in single precision."""
    return [tensor.detach().float().contiguous() for tensor in tensors]


@kernel
def around_kernel(points: Vectors, rows: Rows, around: Around):
    """One thread a neighbour, launched over (B, k, N): its displacement from the point."""
    cloud, place, row = wp.tid()
    neighbor = int(rows[cloud, row, place])
    away = wp.vec3(wp.NAN, wp.NAN, wp.NAN)
    if neighbor >= 0:
        away = points[cloud, neighbor] - points[cloud, row]
    around[cloud, row, place] = away


def displacements(launch, points: Tensor, rows: Tensor) -> Float[Tensor, "b n k 3"]:
    """Return displacements from points to their neighbours, which include the points; NaN for row -1.

    On a GPU, the displacements to the j-th neighbours of all points are adjacent in memory, as threads read
    them.
    """
    clouds, size, k = rows.shape
    if points.is_cuda:
        around = points.new_empty(clouds, k, size, 3).transpose(1, 2)
    else:
        around = points.new_empty(clouds, size, k, 3)
    launch(around_kernel, (clouds, k, size), points, rows, around)
    return around


@wp.func
def adjugate_power(x: wp.vec3, y: wp.vec3, z: wp.vec3, squared: int):
    """Return the adjugate of a matrix with these rows, squared ``squared`` times, and scaled."""
    power = wp.matrix_from_rows(wp.cross(y, z), wp.cross(z, x), wp.cross(x, y))
    for _ in range(squared):
        power = power / wp.max(power[0, 0] + power[1, 1] + power[2, 2], 1.0e-30)
        power = power * power
    return power
