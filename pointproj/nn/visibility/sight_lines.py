"""Lines of sight: points between a sample and the sensor that saw it are outside. Warp kernels."""

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
    """Find how close lines of sight pass by points: (B, Q, 2), without gradients.

    Lines begin at ``samples`` and go along the unit vectors ``sensors``, which are 0 for a sample without a
    line. ``beyond`` is a length for each cloud; with 0 the cloud is skipped. The result has two distances
    from each point: to the nearest line that passes it after its beginning, and to the nearest line that
    passes it at a distance of more than ``beyond`` from its beginning. They are 1000 if there is no such
    line, and NaN for a point that is not finite.
    """
    return _nearest(*for_kernels(points, samples, sensors, beyond)).to(points.dtype)


@kernel
def nearest_kernel(
    points: Vectors, samples: Vectors, sensors: Vectors, beyond: Scales, nearest: wp.array2d(dtype=wp.vec2)
):
    """One thread a point, launched over (B, Q): try every line."""
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
