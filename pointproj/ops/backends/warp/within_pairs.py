"""What the kernels of the aggregation within a radius share: what they read, and who is a neighbour.

Each thread, or GPU warp, owns one point, visits the points of the other set within the radius, and writes its
own rows only. Weights are a_ij = exp((nearest_i - d_ij) / sigma) / total_i; the forward keeps nearest_i and
1 / total_i for the backward, apart, because their logarithm would round away what is small next to
nearest_i / sigma. Formulas are in :mod:`pointproj.ops.gradients`.
"""

import functools
from typing import Any

import torch
import warp as wp

from pointproj.ops.backends.warp.common import REALS


@functools.cache
def pair_functions(positions: torch.dtype, sums: torch.dtype) -> Any:
    """What all four searches read, and the test that decides who is a neighbour."""
    place, vec3 = REALS[positions]
    vec4 = wp.types.vector(length=4, dtype=place)
    real, _ = REALS[sums]
    matrix = wp.array2d(dtype=real)

    @wp.struct
    class Arrays:
        radius: place
        reach: place  # largest squared distance that counts as within the radius
        per_sigma: real  # 1 / sigma
        features: matrix  # of the reference points
        grad: matrix  # upstream gradients of the queries' sums
        softmax: matrix  # of the queries: nearest distance, and 1 / total weight relative to it
        aggregated: matrix  # results of the queries

    @wp.func
    def arrays_of(
        radius: wp.float64,
        reach: wp.float64,
        sigma: wp.array(dtype=real),
        features: matrix,
        grad: matrix,
        softmax: matrix,
        aggregated: matrix,
    ):
        arrays = Arrays()
        arrays.radius = place(radius)
        arrays.reach = place(reach)
        arrays.per_sigma = real(1.0) / sigma[0]
        arrays.features = features
        arrays.grad = grad
        arrays.softmax = softmax
        arrays.aggregated = aggregated
        return arrays

    @wp.func
    def meet(arrays: Arrays, q: vec3, p: vec4):
        """Distance if within the radius, decided with the rounding of the reference; else -1."""
        dx = q[0] - p[0]
        dy = q[1] - p[1]
        dz = q[2] - p[2]
        if not (dx * dx + dy * dy + dz * dz <= arrays.reach):
            return real(-1.0)
        x = real(dx)
        y = real(dy)
        z = real(dz)
        return wp.sqrt(x * x + y * y + z * z)

    return Arrays, arrays_of, meet
