"""Points and lists of their neighbours, as the kernels of sums over lists take them."""

import functools
from typing import Any, NamedTuple

import torch
import warp as wp
from torch import Tensor

from pointproj.ops.backends.warp.common import REALS


class NeighborProblem(NamedTuple):
    """Points and their neighbours as kernels take them."""

    query_points: Tensor
    reference_points: Tensor
    sigma: Tensor
    neighbor_indices: Tensor  # (Q, k)
    power: float
    limit: float  # of the kernel: see the module of weightings


@functools.cache
def neighbor_struct(positions: torch.dtype, sums: torch.dtype) -> Any:
    """:class:`NeighborProblem` inside a kernel."""
    _, vec3 = REALS[positions]
    real, _ = REALS[sums]

    @wp.struct
    class ProblemStruct:
        query_points: wp.array(dtype=vec3)
        reference_points: wp.array(dtype=vec3)
        sigma: wp.array(dtype=real)
        neighbor_indices: wp.array2d(dtype=wp.int32)
        power: real
        limit: real

    return ProblemStruct


@functools.cache
def distance_function(positions: torch.dtype, sums: torch.dtype) -> wp.Function:
    _, vec3 = REALS[positions]
    real, _ = REALS[sums]

    @wp.func
    def distance(p: vec3, q: vec3):
        dx = real(p[0] - q[0])
        dy = real(p[1] - q[1])
        dz = real(p[2] - q[2])
        return wp.sqrt(dx * dx + dy * dy + dz * dz)

    return distance
