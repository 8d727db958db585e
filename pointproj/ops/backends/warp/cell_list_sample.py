"""A sample of each cloud, and its quantiles, which say where the cloud is crowded."""

import torch
import warp as wp

from pointproj.ops.backends.warp import common
from pointproj.ops.backends.warp.cell_list import KNOTS
from pointproj.ops.backends.warp.common import OPTIONS, REALS, Points, once, struct_of
from pointproj.ops.backends.warp.lanes import lanes

SAMPLE = 256  # points of a cloud


@once
def point_function(dtype: torch.dtype) -> wp.Function:
    """``random_point(points, cloud, section)``."""
    real, vec3, _ = REALS[dtype]
    PointsStruct = struct_of(Points, dtype)

    @wp.func
    def random_point(points: PointsStruct, cloud: int, section: int):
        """A point of one of SAMPLE sections of a cloud; infinite if it is not finite, or there is none."""
        begin = common.first_row_of(cloud, points.batch)
        end = common.first_row_of(cloud + 1, points.batch)
        length = wp.max((end - begin) / SAMPLE, 1)
        row = begin + section * length + wp.randi(wp.rand_init(1, section), 0, length)
        p = vec3(real(wp.inf))
        if row < end and wp.isfinite(points.positions[row]):
            p = points.positions[row]
        return p

    return random_point


@once
def rank_kernel(dtype: torch.dtype) -> wp.Kernel:
    """Sorted coordinates of the sample of each cloud: each thread counts how many come before its own."""
    real, *_ = REALS[dtype]

    @wp.kernel(**OPTIONS)
    def rank(sample: wp.array2d(dtype=real), quantiles: wp.array2d(dtype=real)):
        """Launched over (3 clouds, SAMPLE), as are both tables; fills ``quantiles``."""
        line, own = wp.tid()
        x = sample[line, own]
        before = int(0)
        for number in range(SAMPLE):
            other = sample[line, number]
            if other < x or (other == x and number < own):
                before += 1
        quantiles[line, before] = x

    return rank


@once
def quantile_functions(dtype: torch.dtype, count: int) -> tuple[wp.Function, wp.Function]:
    """``knot_of(quantiles, line, number, intervals)``, and ``crowding_of(cloud, extent, quantiles)``."""
    real, vec3, _ = REALS[dtype]
    intervals, group = KNOTS // 2, lanes(count)  # that crowding is measured with

    @wp.func
    def knot_of(quantiles: wp.array2d(dtype=real), line: int, number: int, intervals: int):
        finite = int(SAMPLE)
        while finite > 1 and quantiles[line, finite - 1] == real(wp.inf):
            finite -= 1
        return quantiles[line, number * (finite - 1) / intervals]

    @wp.func
    def crowding_of(cloud: int, extent: vec3, quantiles: wp.array2d(dtype=real)):
        """How many times as near as in a uniform cloud points are to each other, along each axis."""
        crowding = vec3(real(1.0))
        for axis in range(3):
            sum = real(0.0)
            for number in range(group.lane(), intervals, count):
                begin = knot_of(quantiles, 3 * cloud + axis, number, intervals)
                end = knot_of(quantiles, 3 * cloud + axis, number + 1, intervals)
                sum += extent[axis] / wp.max(end - begin, extent[axis] * real(1.0e-6))
            sum = group.total(sum) / real(intervals * intervals)
            if sum > real(1.0):  # not if the cloud has no extent
                crowding[axis] = sum
        return crowding

    return knot_of, crowding_of
