"""Lines of sight: what lies between a sample and the sensor that saw it is outside. Warp kernels."""

import torch
import warp as wp
from jaxtyping import Float
from torch import Tensor

from pointproj.nn.visibility.constants import SightLine
from pointproj.nn.visibility.kernels import Scales, Vectors, for_kernels, kernel
from pointproj.ops.bridge.warp_op import warp_op


def nearest_sight_lines(
    points: Float[Tensor, "b q 3"],
    samples: Float[Tensor, "b n 3"],
    sensors: Float[Tensor, "b n 3"],
    beyond: Float[Tensor, " b"],
) -> Float[Tensor, "b q 2"]:
    """Find how close to points lines of sight pass by: (B, Q, 2), without gradients.

    Lines begin at ``samples`` and go along unit vectors to ``sensors``, 0 for a sample that has none.
    ``beyond`` is a length for each cloud; 0 for a cloud without lines, which takes no time then. The result
    is the distance of the nearest line that begins before it passes the point, and of the nearest one that
    has come as far as ``beyond`` by then: 1000 where there is none, NaN for a point that is not finite.
    """
    return _nearest(*for_kernels(points, samples, sensors, beyond)).to(points.dtype)


@kernel
def nearest_kernel(
    points: Vectors, samples: Vectors, sensors: Vectors, beyond: Scales, nearest: wp.array2d(dtype=wp.vec2)
):
    """One thread a point; launched over (B, Q). Every line is tried."""
    cloud, number = wp.tid()
    point = points[cloud, number]
    least = beyond[cloud]
    near = float(SightLine.NONE * SightLine.NONE)
    far = float(SightLine.NONE * SightLine.NONE)
    if least > 0.0:
        for row in range(samples.shape[1]):
            way = sensors[cloud, row]
            away = point - samples[cloud, row]
            ahead = wp.dot(away, way)
            if ahead > 0.0:
                squared = wp.max(wp.dot(away, away) - ahead * ahead, 0.0)
                near = wp.min(near, squared)
                if ahead > least:
                    far = wp.min(far, squared)
    if not wp.isfinite(point):
        near = wp.NAN
        far = wp.NAN
    nearest[cloud, number] = wp.vec2(wp.sqrt(near), wp.sqrt(far))


@warp_op(
    "pointproj::nearest_sight_lines",
    outputs=lambda points, **_: {"nearest": ((*points.shape[:2], 2), torch.float32)},
)
def _nearest(
    launch, points: Tensor, samples: Tensor, sensors: Tensor, beyond: Tensor, *, nearest: Tensor
) -> None:
    launch(nearest_kernel, points.shape[:2], points, samples, sensors, beyond, nearest)
