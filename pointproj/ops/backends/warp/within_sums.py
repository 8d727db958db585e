"""Sums of rows within a radius, point by point: features near a query, and upstream gradients near a point.

Features are summed up here on a CPU only; :mod:`pointproj.ops.backends.warp.within_tiles` does it on a GPU.
"""

import functools

import torch
import warp as wp

from pointproj.ops.backends.warp.common import BLOCK, OPTIONS, REALS, cloud_of, packed_point
from pointproj.ops.backends.warp.lanes import lanes
from pointproj.ops.backends.warp.row_sums import Division, row_sum, waiting_rows
from pointproj.ops.backends.warp.within_pairs import pair_functions
from pointproj.ops.backends.warp.wrapped import ball_search, wrapped_struct

AT_HAND = (BLOCK, 4)  # so many blocks at a time: latency is what the gather waits for


@functools.cache
def aggregate_kernel(positions: torch.dtype, sums: torch.dtype, division: Division) -> wp.Kernel:
    """Running softmax over the reference points near a query, one thread a query."""
    place, vec3 = REALS[positions]
    real, _ = REALS[sums]
    Wrapped, wrapped_of = wrapped_struct(positions)
    Arrays, arrays_of, meet = pair_functions(positions, sums)
    load_point, _, row_of = packed_point(positions)
    Channels, channel_of, add_row = row_sum(sums, *division[:2])
    _, held, searches = division

    @wp.struct
    class State:
        chunk: int
        nearest: real  # weights are relative to the nearest neighbour so far
        total: real  # of the weights
        sums: Channels

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
    def consider(state: State, q: vec3, wrapped: Wrapped, arrays: Arrays, at: int, exists: bool):
        point = load_point(wrapped.points, at)
        far = meet(arrays, q, point)
        if far >= real(0.0):
            state = approach(state, arrays, far)
            weight = wp.exp((state.nearest - far) * arrays.per_sigma)
            state.total += weight
            state.sums = add_row(state.sums, arrays.features, state.chunk, weight, row_of(point))
        return state

    search = ball_search(positions, lanes(1), State, Arrays, consider)

    @wp.kernel(**OPTIONS)
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
        query = wp.tid() / searches
        chunk = wp.tid() % searches
        wrapped = wrapped_of(width, start, points, first_place, rows, searched_offsets, clouds)
        arrays = arrays_of(radius, reach, sigma, features, features, features, features)
        q = query_points[query]
        cloud = cloud_of(query, query_offsets, query_points.shape[0], clouds)
        state = State()
        state.chunk = chunk
        state.nearest = real(wp.inf)
        if wp.isfinite(q):
            state = search(state, q, wrapped, arrays, cloud, arrays.radius)
        inverse = real(0.0)
        if state.total > real(0.0):
            inverse = real(1.0) / state.total
        if not wp.isfinite(q):
            inverse = real(wp.nan)
        for i in range(held):
            channel = channel_of(chunk, i)
            if channel < features.shape[1]:
                aggregated[query, channel] = state.sums[i] * inverse
        if chunk == 0:
            softmax[query, 0] = state.nearest
            softmax[query, 1] = inverse

    return aggregate


@functools.cache
def gather_kernel(positions: torch.dtype, sums: torch.dtype, division: Division) -> wp.Kernel:
    """Gradient of the features: weighted sum of upstream gradients near a point."""
    place, vec3 = REALS[positions]
    real, _ = REALS[sums]
    count, held, searches = division
    Wrapped, wrapped_of = wrapped_struct(positions)
    Arrays, arrays_of, meet = pair_functions(positions, sums)
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
        arrays = arrays_of(radius, reach, sigma, grad, grad, softmax, grad)
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
