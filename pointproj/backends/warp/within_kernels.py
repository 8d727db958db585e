"""Kernels of the aggregation within a radius, and of its gradients; formulas in :mod:`pointproj.pairwise`.

Each thread owns one point (or a few channels of it), visits the points of the other set within the radius,
and writes its own rows only. Weights are a_ij = exp((nearest_i - d_ij) / sigma) / total_i; the forward keeps
nearest_i and 1 / total_i for the backward, apart, because their logarithm would round away what is small
next to nearest_i / sigma.
"""

import functools
from typing import Any, NamedTuple

import torch
import warp as wp

from pointproj.backends.warp.common import BLOCK, OPTIONS, REALS, cloud_of, packed_point
from pointproj.backends.warp.lanes import lanes
from pointproj.backends.warp.row_sums import Division, row_sum, waiting_rows
from pointproj.backends.warp.wrapped import ball_search, wrapped_struct

AT_HAND = (BLOCK, 4)  # so many blocks at a time: latency is what these kernels wait for


class WithinKernels(NamedTuple):
    aggregate: wp.Kernel
    gather: wp.Kernel
    pull: wp.Kernel
    push: wp.Kernel


@functools.cache
def within_kernels(positions: torch.dtype, sums: torch.dtype, division: Division) -> WithinKernels:
    """Kernels for positions of one dtype and sums in another, at least as wide."""
    return WithinKernels(
        _aggregate_kernel(positions, sums, *division),
        _gather_kernel(positions, sums, *division),
        _pull_kernel(positions, sums, division.lanes),
        _push_kernel(positions, sums, division.lanes),
    )


@functools.cache
def _shared(positions: torch.dtype, sums: torch.dtype) -> Any:
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
        means: wp.array(dtype=real)  # of the queries: upstream gradient times result

    @wp.func
    def arrays_of(
        radius: wp.float64,
        reach: wp.float64,
        sigma: wp.array(dtype=real),
        features: matrix,
        grad: matrix,
        softmax: matrix,
        means: wp.array(dtype=real),
    ):
        arrays = Arrays()
        arrays.radius = place(radius)
        arrays.reach = place(reach)
        arrays.per_sigma = real(1.0) / sigma[0]
        arrays.features = features
        arrays.grad = grad
        arrays.softmax = softmax
        arrays.means = means
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


def _aggregate_kernel(
    positions: torch.dtype, sums: torch.dtype, count: int, held: int, searches: int
) -> wp.Kernel:
    """Running softmax over the reference points near a query."""
    place, vec3 = REALS[positions]
    real, _ = REALS[sums]
    Wrapped, wrapped_of = wrapped_struct(positions)
    Arrays, arrays_of, meet = _shared(positions, sums)
    load_point, _, row_of = packed_point(positions)
    Channels, channel_of, add_row = row_sum(sums, count, held)
    capacity, room_of, put, number_at, _, renumber, add_all = waiting_rows(sums, count, held)
    group = lanes(count)
    item, lane, minimum, total_of = group.item, group.lane, group.minimum, group.total

    @wp.struct
    class State:
        chunk: int
        nearest: real  # weights are relative to the nearest neighbour so far, the same in all lanes
        total: real  # of this lane's weights
        sums: Channels
        waiting: int  # neighbours whose distance waits in the list

    @wp.func
    def approach(state: State, arrays: Arrays, nearest: real):
        """Make weights relative to a neighbour that may be nearer."""
        if nearest < state.nearest:
            rescale = wp.exp((nearest - state.nearest) * arrays.per_sigma)
            state.total *= rescale
            state.sums *= rescale
            state.nearest = nearest
        return state

    @wp.func
    def settle(state: State, arrays: Arrays):
        """Add up the neighbours that wait."""
        room = room_of()
        nearest = state.nearest
        for i in range(lane(), state.waiting, count):
            nearest = wp.min(nearest, number_at(room, i))
        state = approach(state, arrays, minimum(nearest))
        for i in range(lane(), state.waiting, count):
            weight = wp.exp((state.nearest - number_at(room, i)) * arrays.per_sigma)
            state.total += weight
            renumber(room, i, weight)
        state.sums = add_all(state.sums, arrays.features, state.chunk, room, state.waiting)
        state.waiting = 0
        return state

    @wp.func
    def consider(state: State, q: vec3, wrapped: Wrapped, arrays: Arrays, at: int, exists: bool):
        far = real(-1.0)
        row = int(0)
        if exists:
            point = load_point(wrapped.points, at)
            far = meet(arrays, q, point)
            row = row_of(point)
        if wp.static(count == 1):
            if far >= real(0.0):
                state = approach(state, arrays, far)
                weight = wp.exp((state.nearest - far) * arrays.per_sigma)
                state.total += weight
                state.sums = add_row(state.sums, arrays.features, state.chunk, weight, row)
        else:
            state.waiting = put(room_of(), state.waiting, far >= real(0.0), far, row)
            if state.waiting > capacity - count:
                state = settle(state, arrays)
        return state

    search = ball_search(positions, lanes(count), State, Arrays, consider)

    @wp.kernel(**OPTIONS, launch_bounds=AT_HAND)
    def aggregate(
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
        sigma: wp.array(dtype=real),
        radius: wp.float64,
        reach: wp.float64,
        aggregated: wp.array2d(dtype=real),
        softmax: wp.array2d(dtype=real),
    ):
        first, _ = wp.tid()
        query = item(first) / searches
        chunk = item(first) % searches
        wrapped = wrapped_of(width, start, points, first_place, rows, searched_offsets, clouds)
        arrays = arrays_of(radius, reach, sigma, features, features, features, sigma)
        q = query_points[query]
        cloud = cloud_of(query, query_offsets, query_points.shape[0], clouds)
        state = State()
        state.chunk = chunk
        state.nearest = real(wp.inf)
        if wp.isfinite(q):
            state = search(state, q, wrapped, arrays, cloud, arrays.radius)
            if wp.static(count > 1):
                state = settle(state, arrays)
        inverse = real(0.0)
        total = total_of(state.total)
        if total > real(0.0):
            inverse = real(1.0) / total
        if not wp.isfinite(q):
            inverse = real(wp.nan)
        for i in range(held):
            channel = channel_of(chunk, i)
            if channel < features.shape[1]:
                aggregated[query, channel] = state.sums[i] * inverse
        if chunk == 0 and lane() == 0:
            softmax[query, 0] = state.nearest
            softmax[query, 1] = inverse

    return aggregate


def _gather_kernel(
    positions: torch.dtype, sums: torch.dtype, count: int, held: int, searches: int
) -> wp.Kernel:
    """Gradient of the features: weighted sum of upstream gradients near a point."""
    place, vec3 = REALS[positions]
    real, _ = REALS[sums]
    Wrapped, wrapped_of = wrapped_struct(positions)
    Arrays, arrays_of, meet = _shared(positions, sums)
    load_point, _, row_of = packed_point(positions)
    Channels, channel_of, add_row = row_sum(sums, count, held)
    capacity, room_of, put, number_at, row_at, renumber, add_all = waiting_rows(sums, count, held)
    item, lane = lanes(count).item, lanes(count).lane

    @wp.struct
    class State:
        chunk: int
        sums: Channels
        waiting: int  # queries whose distance waits in the list

    @wp.func
    def weight_of(arrays: Arrays, query: int, far: real):
        return wp.exp((arrays.softmax[query, 0] - far) * arrays.per_sigma) * arrays.softmax[query, 1]

    @wp.func
    def settle(state: State, arrays: Arrays):
        """Add up the queries that wait."""
        room = room_of()
        for i in range(lane(), state.waiting, count):
            renumber(room, i, weight_of(arrays, row_at(room, i), number_at(room, i)))
        state.sums = add_all(state.sums, arrays.grad, state.chunk, room, state.waiting)
        state.waiting = 0
        return state

    @wp.func
    def consider(state: State, p: vec3, wrapped: Wrapped, arrays: Arrays, at: int, exists: bool):
        far = real(-1.0)
        query = int(0)
        if exists:
            point = load_point(wrapped.points, at)
            far = meet(arrays, p, point)
            query = row_of(point)
        if wp.static(count == 1):
            if far >= real(0.0):
                weight = weight_of(arrays, query, far)
                state.sums = add_row(state.sums, arrays.grad, state.chunk, weight, query)
        else:
            state.waiting = put(room_of(), state.waiting, far >= real(0.0), far, query)
            if state.waiting > capacity - count:
                state = settle(state, arrays)
        return state

    search = ball_search(positions, lanes(count), State, Arrays, consider)

    @wp.kernel(**OPTIONS, launch_bounds=AT_HAND)
    def gather(
        reference_points: wp.array2d(dtype=place),
        references: int,
        reference_offsets: wp.array(dtype=wp.int32),
        clouds: int,
        width: wp.array(dtype=place),
        start: wp.array(dtype=wp.int32),
        points: wp.array2d(dtype=place),
        first_place: int,
        rows: int,
        searched_offsets: wp.array(dtype=wp.int32),
        softmax: wp.array2d(dtype=real),
        grad: wp.array2d(dtype=real),
        sigma: wp.array(dtype=real),
        radius: wp.float64,
        reach: wp.float64,
        d_features: wp.array2d(dtype=real),
    ):
        # In the order of the cells: threads side by side then read the same rows.
        first, _ = wp.tid()
        at = item(first) / searches
        chunk = item(first) % searches
        point = load_point(reference_points, at)
        p = vec3(point[0], point[1], point[2])
        reference = row_of(point)
        wrapped = wrapped_of(width, start, points, first_place, rows, searched_offsets, clouds)
        arrays = arrays_of(radius, reach, sigma, grad, grad, softmax, sigma)
        cloud = cloud_of(reference, reference_offsets, references, clouds)
        state = State()
        state.chunk = chunk
        if wp.isfinite(p):
            state = search(state, p, wrapped, arrays, cloud, arrays.radius)
            if wp.static(count > 1):
                state = settle(state, arrays)
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
    item, lane, total_of = lanes(count).item, lanes(count).lane, lanes(count).total
    Arrays, arrays_of, meet = _shared(positions, sums)
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


def _push_kernel(positions: torch.dtype, sums: torch.dtype, count: int) -> wp.Kernel:
    """Gradient of the reference points, gathered over the queries near each."""
    place, vec3 = REALS[positions]
    real, wide3 = REALS[sums]
    Wrapped, wrapped_of = wrapped_struct(positions)
    item, lane, total_of = lanes(count).item, lanes(count).lane, lanes(count).total
    Arrays, arrays_of, meet = _shared(positions, sums)
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
