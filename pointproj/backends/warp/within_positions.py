"""Kernels of the gradients of positions and sigma within a radius."""

import torch
import warp as wp

from pointproj.backends.warp.common import OPTIONS, REALS, cloud_of, packed_point
from pointproj.backends.warp.lanes import lanes
from pointproj.backends.warp.within_pairs import pair_functions
from pointproj.backends.warp.wrapped import ball_search, wrapped_struct


def pull_kernel(positions: torch.dtype, sums: torch.dtype, count: int) -> wp.Kernel:
    """Gradients of the query points and of sigma."""
    place, vec3 = REALS[positions]
    real, wide3 = REALS[sums]
    Wrapped, wrapped_of = wrapped_struct(positions)
    item, lane, total_of = lanes(count).item, lanes(count).lane, lanes(count).total
    Arrays, arrays_of, meet = pair_functions(positions, sums)
    load_point, _, row_of = packed_point(positions)
    vec4 = wp.types.vector(length=4, dtype=place)

    @wp.struct
    class State:
        query: int
        nearest: real
        inverse: real
        mean: real
        along: wide3
        spread: real

    @wp.func
    def consider(state: State, q: vec3, wrapped: Wrapped, arrays: Arrays, at: int, exists: bool):
        far = real(-1.0)
        point = vec4()
        if exists:
            point = load_point(wrapped.points, at)
            far = meet(arrays, q, point)
        if far >= real(0.0):
            row = row_of(point)
            product = real(0.0)
            for channel in range(arrays.features.shape[1]):
                product += arrays.grad[state.query, channel] * arrays.features[row, channel]
            weight = wp.exp((state.nearest - far) * arrays.per_sigma) * state.inverse
            grad_logit = weight * (product - state.mean)
            state.spread += grad_logit * far
            if far > real(0.0):
                delta = wide3(real(q[0] - point[0]), real(q[1] - point[1]), real(q[2] - point[2]))
                state.along += (grad_logit * arrays.per_sigma / far) * delta
        return state

    search = ball_search(positions, lanes(count), State, Arrays, consider)

    @wp.kernel(**OPTIONS)
    def pull(
        query_points: wp.array(dtype=vec3),
        query_offsets: wp.array(dtype=wp.int32),
        clouds: int,
        width: wp.array(dtype=place),
        start: wp.array(dtype=wp.int32),
        points: wp.array2d(dtype=place),
        first_place: int,
        rows: int,
        searched_offsets: wp.array(dtype=wp.int32),
        features: wp.array2d(dtype=real),
        aggregated: wp.array2d(dtype=real),
        softmax: wp.array2d(dtype=real),
        grad: wp.array2d(dtype=real),
        sigma: wp.array(dtype=real),
        radius: wp.float64,
        reach: wp.float64,
        means: wp.array(dtype=real),
        d_query: wp.array(dtype=wide3),
        d_sigma: wp.array(dtype=real),
    ):
        first, _ = wp.tid()
        query = item(first)
        wrapped = wrapped_of(width, start, points, first_place, rows, searched_offsets, clouds)
        arrays = arrays_of(radius, reach, sigma, features, grad, softmax, means)
        q = query_points[query]
        cloud = cloud_of(query, query_offsets, query_points.shape[0], clouds)
        state = State()
        state.query = query
        state.nearest = softmax[query, 0]
        state.inverse = softmax[query, 1]
        for channel in range(grad.shape[1]):
            state.mean += grad[query, channel] * aggregated[query, channel]
        if wp.isfinite(q):
            state = search(state, q, wrapped, arrays, cloud, arrays.radius)
        spread = total_of(state.spread)
        along = wide3(total_of(state.along[0]), total_of(state.along[1]), total_of(state.along[2]))
        if lane() == 0:
            means[query] = state.mean
            d_query[query] = -along
            d_sigma[query] = spread / (sigma[0] * sigma[0])

    return pull


def push_kernel(positions: torch.dtype, sums: torch.dtype, count: int) -> wp.Kernel:
    """Gradient of the reference points, gathered over the queries near each."""
    place, vec3 = REALS[positions]
    real, wide3 = REALS[sums]
    Wrapped, wrapped_of = wrapped_struct(positions)
    item, lane, total_of = lanes(count).item, lanes(count).lane, lanes(count).total
    Arrays, arrays_of, meet = pair_functions(positions, sums)
    load_point, _, row_of = packed_point(positions)
    vec4 = wp.types.vector(length=4, dtype=place)

    @wp.struct
    class State:
        reference: int
        along: wide3

    @wp.func
    def consider(state: State, p: vec3, wrapped: Wrapped, arrays: Arrays, at: int, exists: bool):
        far = real(-1.0)
        point = vec4()
        if exists:
            point = load_point(wrapped.points, at)
            far = meet(arrays, p, point)
        if far > real(0.0):
            query = row_of(point)
            product = real(0.0)
            for channel in range(arrays.features.shape[1]):
                product += arrays.grad[query, channel] * arrays.features[state.reference, channel]
            weight = wp.exp((arrays.softmax[query, 0] - far) * arrays.per_sigma) * arrays.softmax[query, 1]
            grad_logit = weight * (product - arrays.means[query])
            delta = wide3(real(point[0] - p[0]), real(point[1] - p[1]), real(point[2] - p[2]))
            state.along += (grad_logit * arrays.per_sigma / far) * delta
        return state

    search = ball_search(positions, lanes(count), State, Arrays, consider)

    @wp.kernel(**OPTIONS)
    def push(
        reference_points: wp.array(dtype=vec3),
        reference_offsets: wp.array(dtype=wp.int32),
        clouds: int,
        width: wp.array(dtype=place),
        start: wp.array(dtype=wp.int32),
        points: wp.array2d(dtype=place),
        first_place: int,
        rows: int,
        searched_offsets: wp.array(dtype=wp.int32),
        features: wp.array2d(dtype=real),
        means: wp.array(dtype=real),
        softmax: wp.array2d(dtype=real),
        grad: wp.array2d(dtype=real),
        sigma: wp.array(dtype=real),
        radius: wp.float64,
        reach: wp.float64,
        d_reference: wp.array(dtype=wide3),
    ):
        first, _ = wp.tid()
        reference = item(first)
        wrapped = wrapped_of(width, start, points, first_place, rows, searched_offsets, clouds)
        arrays = arrays_of(radius, reach, sigma, features, grad, softmax, means)
        p = reference_points[reference]
        cloud = cloud_of(reference, reference_offsets, reference_points.shape[0], clouds)
        state = State()
        state.reference = reference
        if wp.isfinite(p):
            state = search(state, p, wrapped, arrays, cloud, arrays.radius)
        along = wide3(total_of(state.along[0]), total_of(state.along[1]), total_of(state.along[2]))
        if lane() == 0:
            d_reference[reference] = along

    return push
