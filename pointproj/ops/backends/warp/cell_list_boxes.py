"""Boxes of clouds, of which their grids are made: of all points, and of most of them."""

import torch
import warp as wp

from pointproj.ops.backends.warp import common
from pointproj.ops.backends.warp.cell_list_sample import SAMPLE, point_function
from pointproj.ops.backends.warp.common import OPTIONS, REALS, Points, once, struct_of
from pointproj.ops.backends.warp.lanes import lanes

AT_ONCE = 8  # points that a lane requests before it uses the first
RUN = 4  # consecutive points of one part


@once
def bound_kernel(dtype: torch.dtype, count: int, graded: bool) -> wp.Kernel:
    """Lowest corner, and negated highest corner, of the finite points in each part of each cloud.

    A cloud's points, in their order, are divided into sections. Each part takes a short run, at a random
    place, of every section. So a part is as wide as most of the cloud, even if the points are in the order of
    a coordinate or of a structured grid.
    """
    real, vec3, _ = REALS[dtype]
    PointsStruct = struct_of(Points, dtype)
    group = lanes(count)
    length = min(count, RUN)  # of a run; a single lane takes one point
    Several = wp.types.matrix(shape=(AT_ONCE, 3), dtype=real)
    random_point = point_function(dtype)

    @wp.kernel(**OPTIONS)
    def bound(
        points: PointsStruct, parts: int, corners: wp.array2d(dtype=real), sample: wp.array2d(dtype=real)
    ):
        """Launched over parts of all clouds, and lanes; fills ``corners`` (parts of all clouds, 6).

        If grids may be graded, it also fills ``sample`` (3 clouds, SAMPLE).
        """
        number, _ = wp.tid()
        number = group.item(number)
        cloud = number / parts
        if wp.static(graded):
            for at in range(number % parts * count + group.lane(), SAMPLE, parts * count):
                p = random_point(points, cloud, at)
                for axis in range(3):
                    sample[3 * cloud + axis, at] = p[axis]
        end = common.first_row_of(cloud + 1, points.batch)
        section = group.lane() / length
        begin = common.first_row_of(cloud, points.batch) + section * parts * length
        low = vec3(real(wp.inf))
        high = vec3(real(wp.inf))
        several = Several()
        while begin < end:
            for i in range(AT_ONCE):  # all points are requested before the first is used
                shift = wp.randi(wp.rand_init(0, section), 0, parts)  # the same for all parts
                row = begin + (number + shift) % parts * length + group.lane() % length
                several[i] = wp.where(row < end, points.positions[wp.min(row, end - 1)], vec3(real(wp.inf)))
                begin += parts * count
                section += count / length
            for i in range(AT_ONCE):
                p = several[i]
                finite = wp.dot(p - p, vec3(real(1.0))) == real(0.0)
                low = wp.where(finite, wp.min(low, p), low)
                high = wp.where(finite, wp.min(high, -p), high)
        for axis in range(3):
            low[axis] = group.minimum(low[axis])
            high[axis] = group.minimum(high[axis])
            if group.lane() == 0:
                corners[number, axis] = low[axis]
                corners[number, axis + 3] = high[axis]

    return bound


@once
def boxes_function(dtype: torch.dtype, count: int) -> wp.Function:
    """``boxes_of(cloud, parts, corners)``: corners of a cloud's box, then of the box that holds most of it.

    The latter is the mean of the boxes of the parts. All parts share a box, if no outlier is in every part; a
    part's box counts as at most three times as wide, so outliers hardly move the mean.
    """
    real, vec3, _ = REALS[dtype]
    group = lanes(count)

    @wp.func
    def corner_of(corners: wp.array2d(dtype=real), part: int, first: int):
        return vec3(corners[part, first], corners[part, first + 1], corners[part, first + 2])

    @wp.func
    def boxes_of(cloud: int, parts: int, corners: wp.array2d(dtype=real)):
        low = vec3(real(wp.inf))
        high = vec3(real(wp.inf))
        shared_low = vec3(real(wp.inf))  # negated
        shared_high = vec3(real(wp.inf))
        for part in range(cloud * parts + group.lane(), (cloud + 1) * parts, count):
            if corners[part, 0] < real(wp.inf):
                low = wp.min(low, corner_of(corners, part, 0))
                high = wp.min(high, corner_of(corners, part, 3))
                shared_low = wp.min(shared_low, -corner_of(corners, part, 0))
                shared_high = wp.min(shared_high, -corner_of(corners, part, 3))
        for axis in range(3):
            low[axis] = group.minimum(low[axis])
            high[axis] = -group.minimum(high[axis])
            shared_low[axis] = -group.minimum(shared_low[axis])
            shared_high[axis] = group.minimum(shared_high[axis])
            width = shared_high[axis] - shared_low[axis]
            if width < real(0.0):
                width = real(wp.inf)
            shared_low[axis] -= width
            shared_high[axis] += width
        sum_low = vec3()
        sum_high = vec3()
        filled = real(0.0)  # parts with a finite point
        for part in range(cloud * parts + group.lane(), (cloud + 1) * parts, count):
            if corners[part, 0] < real(wp.inf):
                sum_low += wp.max(corner_of(corners, part, 0), shared_low)
                sum_high += wp.max(corner_of(corners, part, 3), -shared_high)
                filled += real(1.0)
        filled = group.total(filled)
        inner_low = vec3()
        inner_high = vec3()
        for axis in range(3):
            mean_low = group.total(sum_low[axis]) / filled
            mean_high = -group.total(sum_high[axis]) / filled
            are_finite = wp.isfinite(mean_low) and wp.isfinite(mean_high)
            inner_low[axis] = wp.where(are_finite, wp.max(low[axis], mean_low), low[axis])
            inner_high[axis] = wp.where(are_finite, wp.min(high[axis], mean_high), high[axis])
        return low, high, inner_low, inner_high

    return boxes_of
