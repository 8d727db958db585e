"""Kernels of the aggregation within a radius, and of its gradients; formulas in :mod:`pointproj.pairwise`.

Each thread owns one point (or a few channels of it), visits the points of the other set within the radius,
and writes its own rows only. Weights are a_ij = exp(-d_ij / sigma - normalizer_i), where the forward keeps
``normalizer_i = log sum_j exp(-d_ij / sigma)`` for the backward.
"""

import functools
from typing import Any, NamedTuple

import torch
import warp as wp

from pointproj.backends.warp.common import OPTIONS, REALS, cloud_of
from pointproj.backends.warp.lanes import lanes
from pointproj.backends.warp.row_sums import row_sum
from pointproj.backends.warp.wrapped import ball_search, wrapped_struct


class WithinKernels(NamedTuple):
    aggregate: wp.Kernel
    gather: wp.Kernel
    pull: wp.Kernel
    push: wp.Kernel


@functools.cache
def within_kernels(positions: torch.dtype, sums: torch.dtype, lanes: int, held: int) -> WithinKernels:
    """Kernels for positions of one dtype and sums in another, at least as wide."""
    return WithinKernels(
        _aggregate_kernel(positions, sums, lanes, held),
        _gather_kernel(positions, sums, lanes, held),
        _pull_kernel(positions, sums, lanes),
        _push_kernel(positions, sums, lanes),
    )


@functools.cache
def _shared(positions: torch.dtype, sums: torch.dtype) -> Any:
    """What all four searches read, and the test that decides who is a neighbour."""
    place, vec3 = REALS[positions]
    real, _ = REALS[sums]
    matrix = wp.array2d(dtype=real)

    @wp.struct
    class Arrays:
        radius: place
        per_sigma: real  # 1 / sigma
        features: matrix  # of the reference points
        grad: matrix  # upstream gradients of the queries' sums
        normalizer: wp.array(dtype=real)  # of the queries
        means: wp.array(dtype=real)  # of the queries: upstream gradient times result

    @wp.func
    def arrays_of(
        radius: wp.float64,
        sigma: wp.array(dtype=real),
        features: matrix,
        grad: matrix,
        normalizer: wp.array(dtype=real),
        means: wp.array(dtype=real),
    ):
        arrays = Arrays()
        arrays.radius = place(radius)
        arrays.per_sigma = real(1.0) / sigma[0]
        arrays.features = features
        arrays.grad = grad
        arrays.normalizer = normalizer
        arrays.means = means
        return arrays

    @wp.func
    def meet(arrays: Arrays, q: vec3, p: vec3):
        """Distance if within the radius, decided with the rounding of the reference; else -1."""
        dx = q[0] - p[0]
        dy = q[1] - p[1]
        dz = q[2] - p[2]
        if wp.sqrt(dx * dx + dy * dy + dz * dz) > arrays.radius:
            return real(-1.0)
        x = real(dx)
        y = real(dy)
        z = real(dz)
        return wp.sqrt(x * x + y * y + z * z)

    return Arrays, arrays_of, meet


def _aggregate_kernel(positions: torch.dtype, sums: torch.dtype, count: int, held: int) -> wp.Kernel:
    """Running softmax over the reference points near a query."""
    place, vec3 = REALS[positions]
    real, _ = REALS[sums]
    Wrapped, wrapped_of = wrapped_struct(positions)
    Arrays, arrays_of, meet = _shared(positions, sums)
    Channels, channel_of, add_rows = row_sum(sums, count, held)
    group = lanes(count)
    ballot, minimum, lane, total_of = group.ballot, group.minimum, group.lane, group.total

    @wp.struct
    class State:
        chunk: int
        nearest: real  # weights are relative to the nearest neighbour so far, the same in all lanes
        total: real  # of this lane's weights
        sums: Channels

    @wp.func
    def consider(state: State, q: vec3, wrapped: Wrapped, arrays: Arrays, at: int, exists: bool):
        far = real(-1.0)
        if exists:
            far = meet(arrays, q, wrapped.points[at])
        hit = far >= real(0.0)
        if ballot(hit and far < state.nearest) != 0:
            nearest = minimum(wp.where(hit, wp.min(far, state.nearest), state.nearest))
            rescale = wp.exp((nearest - state.nearest) * arrays.per_sigma)
            state.total *= rescale
            state.sums *= rescale
            state.nearest = nearest
        weight = real(0.0)
        row = int(0)
        if hit:
            weight = wp.exp((state.nearest - far) * arrays.per_sigma)
            row = wrapped.order[at]
            state.total += weight
        state.sums = add_rows(state.sums, arrays.features, state.chunk, weight, row, hit)
        return state

    search = ball_search(positions, lanes(count), State, Arrays, consider)

    @wp.kernel(**OPTIONS)
    def aggregate(
        query_points: wp.array(dtype=vec3),
        query_offsets: wp.array(dtype=wp.int32),
        clouds: int,
        width: wp.array(dtype=place),
        start: wp.array(dtype=wp.int32),
        points: wp.array(dtype=vec3),
        order: wp.array(dtype=wp.int32),
        searched_offsets: wp.array(dtype=wp.int32),
        features: wp.array2d(dtype=real),
        sigma: wp.array(dtype=real),
        radius: wp.float64,
        aggregated: wp.array2d(dtype=real),
        normalizer: wp.array(dtype=real),
    ):
        query, chunk, _ = wp.tid()
        wrapped = wrapped_of(width, start, points, order, searched_offsets, clouds)
        arrays = arrays_of(radius, sigma, features, features, sigma, sigma)
        q = query_points[query]
        cloud = cloud_of(query, query_offsets, query_points.shape[0], clouds)
        state = State()
        state.chunk = chunk
        state.nearest = real(wp.inf)
        if wp.isfinite(q):
            state = search(state, q, wrapped, arrays, cloud, arrays.radius)
        log_total = real(wp.inf)  # without neighbours all weights are exp(-inf)
        inverse = real(0.0)
        total = total_of(state.total)
        if total > real(0.0):
            inverse = real(1.0) / total
            log_total = wp.log(total) - state.nearest / sigma[0]
        if not wp.isfinite(q):
            inverse = real(wp.nan)
        for i in range(held):
            channel = channel_of(chunk, i)
            if channel < features.shape[1]:
                aggregated[query, channel] = state.sums[i] * inverse
        if chunk == 0 and lane() == 0:
            normalizer[query] = log_total

    return aggregate


def _gather_kernel(positions: torch.dtype, sums: torch.dtype, count: int, held: int) -> wp.Kernel:
    """Gradient of the features: weighted sum of upstream gradients over the queries near a point."""
    place, vec3 = REALS[positions]
    real, _ = REALS[sums]
    Wrapped, wrapped_of = wrapped_struct(positions)
    Arrays, arrays_of, meet = _shared(positions, sums)
    Channels, channel_of, add_rows = row_sum(sums, count, held)

    @wp.struct
    class State:
        chunk: int
        sums: Channels

    @wp.func
    def consider(state: State, p: vec3, wrapped: Wrapped, arrays: Arrays, at: int, exists: bool):
        far = real(-1.0)
        if exists:
            far = meet(arrays, p, wrapped.points[at])
        hit = far >= real(0.0)
        weight = real(0.0)
        row = int(0)
        if hit:
            row = wrapped.order[at]
            weight = wp.exp(-far * arrays.per_sigma - arrays.normalizer[row])
        state.sums = add_rows(state.sums, arrays.grad, state.chunk, weight, row, hit)
        return state

    search = ball_search(positions, lanes(count), State, Arrays, consider)

    @wp.kernel(**OPTIONS)
    def gather(
        reference_points: wp.array(dtype=vec3),
        reference_offsets: wp.array(dtype=wp.int32),
        clouds: int,
        width: wp.array(dtype=place),
        start: wp.array(dtype=wp.int32),
        points: wp.array(dtype=vec3),
        order: wp.array(dtype=wp.int32),
        searched_offsets: wp.array(dtype=wp.int32),
        normalizer: wp.array(dtype=real),
        grad: wp.array2d(dtype=real),
        sigma: wp.array(dtype=real),
        radius: wp.float64,
        d_features: wp.array2d(dtype=real),
    ):
        reference, chunk, _ = wp.tid()
        wrapped = wrapped_of(width, start, points, order, searched_offsets, clouds)
        arrays = arrays_of(radius, sigma, grad, grad, normalizer, sigma)
        p = reference_points[reference]
        cloud = cloud_of(reference, reference_offsets, reference_points.shape[0], clouds)
        state = State()
        state.chunk = chunk
        if wp.isfinite(p):
            state = search(state, p, wrapped, arrays, cloud, arrays.radius)
        for i in range(held):
            channel = channel_of(chunk, i)
            if channel < grad.shape[1]:
                d_features[reference, channel] = state.sums[i]

    return gather


def _pull_kernel(positions: torch.dtype, sums: torch.dtype, count: int) -> wp.Kernel:
    """Gradients of the query points and of sigma."""
    place, vec3 = REALS[positions]
    real, wide3 = REALS[sums]
    Wrapped, wrapped_of = wrapped_struct(positions)
    lane, total_of = lanes(count).lane, lanes(count).total
    Arrays, arrays_of, meet = _shared(positions, sums)

    @wp.struct
    class State:
        query: int
        normalizer: real
        mean: real
        along: wide3
        spread: real

    @wp.func
    def consider(state: State, q: vec3, wrapped: Wrapped, arrays: Arrays, at: int, exists: bool):
        far = real(-1.0)
        if exists:
            far = meet(arrays, q, wrapped.points[at])
        if far >= real(0.0):
            row = wrapped.order[at]
            product = real(0.0)
            for channel in range(arrays.features.shape[1]):
                product += arrays.grad[state.query, channel] * arrays.features[row, channel]
            weight = wp.exp(-far * arrays.per_sigma - state.normalizer)
            grad_logit = weight * (product - state.mean)
            state.spread += grad_logit * far
            if far > real(0.0):
                p = wrapped.points[at]
                delta = wide3(real(q[0] - p[0]), real(q[1] - p[1]), real(q[2] - p[2]))
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
        points: wp.array(dtype=vec3),
        order: wp.array(dtype=wp.int32),
        searched_offsets: wp.array(dtype=wp.int32),
        features: wp.array2d(dtype=real),
        aggregated: wp.array2d(dtype=real),
        normalizer: wp.array(dtype=real),
        grad: wp.array2d(dtype=real),
        sigma: wp.array(dtype=real),
        radius: wp.float64,
        means: wp.array(dtype=real),
        d_query: wp.array(dtype=wide3),
        d_sigma: wp.array(dtype=real),
    ):
        query, _ = wp.tid()
        wrapped = wrapped_of(width, start, points, order, searched_offsets, clouds)
        arrays = arrays_of(radius, sigma, features, grad, normalizer, means)
        q = query_points[query]
        cloud = cloud_of(query, query_offsets, query_points.shape[0], clouds)
        state = State()
        state.query = query
        state.normalizer = normalizer[query]
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


def _push_kernel(positions: torch.dtype, sums: torch.dtype, count: int) -> wp.Kernel:
    """Gradient of the reference points, gathered over the queries near each."""
    place, vec3 = REALS[positions]
    real, wide3 = REALS[sums]
    Wrapped, wrapped_of = wrapped_struct(positions)
    lane, total_of = lanes(count).lane, lanes(count).total
    Arrays, arrays_of, meet = _shared(positions, sums)

    @wp.struct
    class State:
        reference: int
        along: wide3

    @wp.func
    def consider(state: State, p: vec3, wrapped: Wrapped, arrays: Arrays, at: int, exists: bool):
        far = real(-1.0)
        if exists:
            far = meet(arrays, wrapped.points[at], p)
        if far > real(0.0):
            query = wrapped.order[at]
            product = real(0.0)
            for channel in range(arrays.features.shape[1]):
                product += arrays.grad[query, channel] * arrays.features[state.reference, channel]
            weight = wp.exp(-far * arrays.per_sigma - arrays.normalizer[query])
            grad_logit = weight * (product - arrays.means[query])
            q = wrapped.points[at]
            delta = wide3(real(q[0] - p[0]), real(q[1] - p[1]), real(q[2] - p[2]))
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
        points: wp.array(dtype=vec3),
        order: wp.array(dtype=wp.int32),
        searched_offsets: wp.array(dtype=wp.int32),
        features: wp.array2d(dtype=real),
        means: wp.array(dtype=real),
        normalizer: wp.array(dtype=real),
        grad: wp.array2d(dtype=real),
        sigma: wp.array(dtype=real),
        radius: wp.float64,
        d_reference: wp.array(dtype=wide3),
    ):
        reference, _ = wp.tid()
        wrapped = wrapped_of(width, start, points, order, searched_offsets, clouds)
        arrays = arrays_of(radius, sigma, features, grad, normalizer, means)
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
