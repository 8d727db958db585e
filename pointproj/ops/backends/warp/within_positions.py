"""Kernels of the gradients of positions and sigma within a radius."""

import functools
from typing import Any

import torch
import warp as wp

from pointproj.ops.backends.warp.common import BLOCK, OPTIONS, REALS, cloud_of, packed_point
from pointproj.ops.backends.warp.lanes import lanes
from pointproj.ops.backends.warp.pair_sums import waiting_pairs
from pointproj.ops.backends.warp.within_pairs import pair_functions
from pointproj.ops.backends.warp.wrapped import ball_search, wrapped_struct

AT_HAND = (BLOCK, 3)  # so many blocks at a time


def _pair_search(positions: torch.dtype, sums: torch.dtype, count: int, from_query: bool) -> Any:
    """A point's state, and ``search`` that adds up in it what all pairs with points near it do.

    ``from_query`` says whether the point is a query, and the points near it are references.
    """
    place, vec3 = REALS[positions]
    vec4 = wp.types.vector(length=4, dtype=place)
    real, _ = REALS[sums]
    Wrapped, _ = wrapped_struct(positions)
    Arrays, _, meet = pair_functions(positions, sums)
    load_point, _, row_of = packed_point(positions)
    Factors, capacity, room_of, put, add_all = waiting_pairs(sums, from_query)

    @wp.struct
    class State:
        row: int  # of the point itself
        nearest: real  # of the query of a pair, as the forward kept it
        inverse: real
        shares: Factors  # along x, y, z, and of sigma
        waiting: int

    @wp.func
    def settle(state: State, arrays: Arrays):
        """Add up the pairs that wait."""
        shares = state.shares
        state.shares = add_all(
            shares, arrays.features, arrays.grad, arrays.aggregated, state.row, room_of(), state.waiting
        )
        state.waiting = 0
        return state

    @wp.func
    def query_and_reference(own: int, other: int):
        if wp.static(from_query):
            return own, other
        return other, own

    @wp.func
    def factors_of(state: State, p: vec3, point: vec4, far: real, per_sigma: real):
        weight = wp.exp((state.nearest - far) * per_sigma) * state.inverse
        factors = Factors()
        if far > real(0.0):
            scale = weight * per_sigma / far
            for axis in range(3):
                factors[axis] = scale * real(point[axis] - p[axis])
        factors[3] = weight * far
        return factors

    @wp.func
    def consider(state: State, p: vec3, wrapped: Wrapped, arrays: Arrays, at: int, exists: bool):
        far = real(-1.0)
        row = int(0)
        factors = Factors()
        if exists:
            point = load_point(wrapped.points, at)
            far = meet(arrays, p, point)
            if far >= real(0.0):
                row = row_of(point)
                if wp.static(not from_query):
                    state.nearest = arrays.softmax[row, 0]
                    state.inverse = arrays.softmax[row, 1]
                factors = factors_of(state, p, point, far, arrays.per_sigma)
        if wp.static(count == 1):
            if far >= real(0.0):
                query, reference = query_and_reference(state.row, row)
                product = real(0.0)
                for channel in range(arrays.grad.shape[1]):
                    excess = arrays.features[reference, channel] - arrays.aggregated[query, channel]
                    product += arrays.grad[query, channel] * excess
                state.shares += product * factors
        else:
            state.waiting = put(room_of(), state.waiting, far >= real(0.0), factors, row)
            if state.waiting > capacity - count:
                state = settle(state, arrays)
        return state

    ball = ball_search(positions, lanes(count), State, Arrays, consider)
    total_of = lanes(count).total

    @wp.func
    def search(state: State, p: vec3, wrapped: Wrapped, arrays: Arrays, cloud: int):
        if wp.isfinite(p):
            state = ball(state, p, wrapped, arrays, cloud, arrays.radius)
            if wp.static(count > 1):
                state = settle(state, arrays)
        for i in range(4):
            state.shares[i] = total_of(state.shares[i])
        return state

    return State, search


@functools.cache
def position_kernel(positions: torch.dtype, sums: torch.dtype, count: int, from_query: bool) -> wp.Kernel:
    """Gradient of the query points and of sigma, or that of the reference points.

    Each is gathered over the pairs of its own points, in the dtype ``sums``, at least as wide as that of the
    positions, by ``count`` lanes a point.
    """
    place, vec3 = REALS[positions]
    real, wide3 = REALS[sums]
    _, wrapped_of = wrapped_struct(positions)
    _, arrays_of, _ = pair_functions(positions, sums)
    State, search = _pair_search(positions, sums, count, from_query)
    item, lane = lanes(count).item, lanes(count).lane

    @wp.kernel(**OPTIONS, launch_bounds=AT_HAND)
    def gather(
        own_points: wp.array(dtype=vec3),
        own_offsets: wp.array(dtype=wp.int32),
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
        d_points: wp.array(dtype=wide3),
        d_sigma: wp.array(dtype=real),
    ):
        first, _ = wp.tid()
        own = item(first)
        wrapped = wrapped_of(width, start, points, first_place, rows, searched_offsets, clouds)
        arrays = arrays_of(radius, reach, sigma, features, grad, softmax, aggregated)
        p = own_points[own]
        cloud = cloud_of(own, own_offsets, own_points.shape[0], clouds)
        state = State()
        state.row = own
        if wp.static(from_query):
            state.nearest = softmax[own, 0]
            state.inverse = softmax[own, 1]
        state = search(state, p, wrapped, arrays, cloud)
        if lane() == 0:
            d_points[own] = wide3(state.shares[0], state.shares[1], state.shares[2])
            if wp.static(from_query):
                d_sigma[own] = state.shares[3] / (sigma[0] * sigma[0])

    return gather
