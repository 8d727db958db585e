"""Kernels of the aggregation within a radius, and of its gradients; formulas in :mod:`pointproj.pairwise`.

Each thread owns one point (or a few channels of it), visits the points of the other set within the radius,
and writes its own rows only. Weights are a_ij = exp(-d_ij / sigma - normalizer_i), where the forward keeps
``normalizer_i = log sum_j exp(-d_ij / sigma)`` for the backward.
"""

import functools
from typing import Any, NamedTuple

import torch
import warp as wp

from pointproj.backends.warp.cells import MODULE_OPTIONS, REALS, cloud_of
from pointproj.backends.warp.traversal import Visitor, box_search, grid_maker, grid_struct

OPTIONS = {"module": "unique", "module_options": MODULE_OPTIONS}


class WithinKernels(NamedTuple):
    width: int  # channels a thread holds
    aggregate: wp.Kernel
    gather: wp.Kernel
    pull: wp.Kernel
    push: wp.Kernel


@functools.cache
def within_kernels(positions: torch.dtype, sums: torch.dtype, width: int) -> WithinKernels:
    """Kernels for positions of one dtype and sums in another, at least as wide."""
    return WithinKernels(
        width,
        _aggregate_kernel(positions, sums, width),
        _gather_kernel(positions, sums, width),
        _pull_kernel(positions, sums),
        _push_kernel(positions, sums),
    )


@functools.cache
def _shared(positions: torch.dtype, sums: torch.dtype) -> Any:
    """What all four searches read, and the test that decides who is a neighbour."""
    place, vec3 = REALS[positions]
    real, _ = REALS[sums]
    matrix = wp.array2d(dtype=real)
    roundings = 8.0 * torch.finfo(positions).eps

    @wp.struct
    class Arrays:
        radius: place
        limit: place  # the radius squared, and a little more
        sigma: real
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
        arrays.limit = arrays.radius * arrays.radius * place(1.0 + roundings)
        arrays.sigma = sigma[0]
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
        squared = dx * dx + dy * dy + dz * dz
        if squared > arrays.limit or wp.sqrt(squared) > arrays.radius:
            return real(-1.0)
        x = real(dx)
        y = real(dy)
        z = real(dz)
        return wp.sqrt(x * x + y * y + z * z)

    return Arrays, arrays_of, meet


def _fixed_bound(state: Any, arrays: Any) -> wp.Function:
    @wp.func
    def bound(state: state, arrays: arrays):
        return arrays.limit

    return bound


def _aggregate_kernel(positions: torch.dtype, sums: torch.dtype, width: int) -> wp.Kernel:
    """Running softmax over the reference points near a query."""
    place, vec3 = REALS[positions]
    real, _ = REALS[sums]
    Grid, grid_of = grid_struct(positions), grid_maker(positions)
    Arrays, arrays_of, meet = _shared(positions, sums)
    Channels = wp.types.vector(length=width, dtype=real)

    @wp.struct
    class State:
        channel: int  # first of the thread's channels
        nearest: real  # weights are relative to the nearest neighbour so far
        total: real
        sums: Channels

    @wp.func
    def scan(state: State, q: vec3, grid: Grid, arrays: Arrays, begin: int, end: int):
        channels = wp.min(arrays.features.shape[1] - state.channel, width)
        for at in range(begin, end):
            far = meet(arrays, q, grid.points[at])
            if far >= real(0.0):
                if far < state.nearest:
                    rescale = wp.exp((far - state.nearest) / arrays.sigma)
                    state.total *= rescale
                    state.sums *= rescale
                    state.nearest = far
                weight = wp.exp((state.nearest - far) / arrays.sigma)
                state.total += weight
                row = grid.order[at]
                for c in range(width):
                    if c < channels:
                        state.sums[c] += weight * arrays.features[row, state.channel + c]
        return state

    search = box_search(positions, Visitor(State, Arrays, scan, _fixed_bound(State, Arrays)))

    @wp.kernel(**OPTIONS)
    def aggregate(
        query_points: wp.array(dtype=vec3),
        query_offsets: wp.array(dtype=wp.int32),
        clouds: int,
        frames: wp.array2d(dtype=place),
        dims: wp.array2d(dtype=wp.int32),
        subframes: wp.array2d(dtype=place),
        subdims: wp.array(dtype=wp.int32),
        first: wp.array(dtype=wp.int32),
        start: wp.array(dtype=wp.int32),
        points: wp.array(dtype=vec3),
        order: wp.array(dtype=wp.int32),
        features: wp.array2d(dtype=real),
        sigma: wp.array(dtype=real),
        radius: wp.float64,
        aggregated: wp.array2d(dtype=real),
        normalizer: wp.array(dtype=real),
    ):
        query, chunk = wp.tid()
        grid = grid_of(frames, dims, subframes, subdims, first, start, points, order)
        arrays = arrays_of(radius, sigma, features, features, sigma, sigma)
        q = query_points[query]
        cloud = cloud_of(query, query_offsets, query_points.shape[0], clouds)
        state = State()
        state.channel = chunk * width
        state.nearest = real(wp.inf)
        if wp.isfinite(q) and frames[cloud, 0] < place(wp.inf):
            state = search(state, q, grid, arrays, cloud)
        log_total = real(wp.inf)  # without neighbours all weights are exp(-inf)
        inverse = real(0.0)
        if state.total > real(0.0):
            inverse = real(1.0) / state.total
            log_total = wp.log(state.total) - state.nearest / sigma[0]
        if not wp.isfinite(q):
            inverse = real(wp.nan)
        for c in range(width):
            if state.channel + c < features.shape[1]:
                aggregated[query, state.channel + c] = state.sums[c] * inverse
        if chunk == 0:
            normalizer[query] = log_total

    return aggregate


def _gather_kernel(positions: torch.dtype, sums: torch.dtype, width: int) -> wp.Kernel:
    """Gradient of the features: weighted sum of upstream gradients over the queries near a point."""
    place, vec3 = REALS[positions]
    real, _ = REALS[sums]
    Grid, grid_of = grid_struct(positions), grid_maker(positions)
    Arrays, arrays_of, meet = _shared(positions, sums)
    Channels = wp.types.vector(length=width, dtype=real)

    @wp.struct
    class State:
        channel: int
        sums: Channels

    @wp.func
    def scan(state: State, p: vec3, grid: Grid, arrays: Arrays, begin: int, end: int):
        channels = wp.min(arrays.grad.shape[1] - state.channel, width)
        for at in range(begin, end):
            far = meet(arrays, p, grid.points[at])
            if far >= real(0.0):
                query = grid.order[at]
                weight = wp.exp(-far / arrays.sigma - arrays.normalizer[query])
                for c in range(width):
                    if c < channels:
                        state.sums[c] += weight * arrays.grad[query, state.channel + c]
        return state

    search = box_search(positions, Visitor(State, Arrays, scan, _fixed_bound(State, Arrays)))

    @wp.kernel(**OPTIONS)
    def gather(
        reference_points: wp.array(dtype=vec3),
        reference_offsets: wp.array(dtype=wp.int32),
        clouds: int,
        frames: wp.array2d(dtype=place),
        dims: wp.array2d(dtype=wp.int32),
        subframes: wp.array2d(dtype=place),
        subdims: wp.array(dtype=wp.int32),
        first: wp.array(dtype=wp.int32),
        start: wp.array(dtype=wp.int32),
        points: wp.array(dtype=vec3),
        order: wp.array(dtype=wp.int32),
        normalizer: wp.array(dtype=real),
        grad: wp.array2d(dtype=real),
        sigma: wp.array(dtype=real),
        radius: wp.float64,
        d_features: wp.array2d(dtype=real),
    ):
        reference, chunk = wp.tid()
        grid = grid_of(frames, dims, subframes, subdims, first, start, points, order)
        arrays = arrays_of(radius, sigma, grad, grad, normalizer, sigma)
        p = reference_points[reference]
        cloud = cloud_of(reference, reference_offsets, reference_points.shape[0], clouds)
        state = State()
        state.channel = chunk * width
        if wp.isfinite(p) and frames[cloud, 0] < place(wp.inf):
            state = search(state, p, grid, arrays, cloud)
        for c in range(width):
            if state.channel + c < grad.shape[1]:
                d_features[reference, state.channel + c] = state.sums[c]

    return gather


def _pull_kernel(positions: torch.dtype, sums: torch.dtype) -> wp.Kernel:
    """Gradients of the query points and of sigma."""
    place, vec3 = REALS[positions]
    real, wide3 = REALS[sums]
    Grid, grid_of = grid_struct(positions), grid_maker(positions)
    Arrays, arrays_of, meet = _shared(positions, sums)

    @wp.struct
    class State:
        query: int
        normalizer: real
        mean: real
        along: wide3
        spread: real

    @wp.func
    def scan(state: State, q: vec3, grid: Grid, arrays: Arrays, begin: int, end: int):
        for at in range(begin, end):
            p = grid.points[at]
            far = meet(arrays, q, p)
            if far >= real(0.0):
                row = grid.order[at]
                product = real(0.0)
                for channel in range(arrays.features.shape[1]):
                    product += arrays.grad[state.query, channel] * arrays.features[row, channel]
                weight = wp.exp(-far / arrays.sigma - state.normalizer)
                grad_logit = weight * (product - state.mean)
                state.spread += grad_logit * far
                if far > real(0.0):
                    delta = wide3(real(q[0] - p[0]), real(q[1] - p[1]), real(q[2] - p[2]))
                    state.along += (grad_logit / (arrays.sigma * far)) * delta
        return state

    search = box_search(positions, Visitor(State, Arrays, scan, _fixed_bound(State, Arrays)))

    @wp.kernel(**OPTIONS)
    def pull(
        query_points: wp.array(dtype=vec3),
        query_offsets: wp.array(dtype=wp.int32),
        clouds: int,
        frames: wp.array2d(dtype=place),
        dims: wp.array2d(dtype=wp.int32),
        subframes: wp.array2d(dtype=place),
        subdims: wp.array(dtype=wp.int32),
        first: wp.array(dtype=wp.int32),
        start: wp.array(dtype=wp.int32),
        points: wp.array(dtype=vec3),
        order: wp.array(dtype=wp.int32),
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
        query = wp.tid()
        grid = grid_of(frames, dims, subframes, subdims, first, start, points, order)
        arrays = arrays_of(radius, sigma, features, grad, normalizer, means)
        q = query_points[query]
        cloud = cloud_of(query, query_offsets, query_points.shape[0], clouds)
        state = State()
        state.query = query
        state.normalizer = normalizer[query]
        for channel in range(grad.shape[1]):
            state.mean += grad[query, channel] * aggregated[query, channel]
        if wp.isfinite(q) and frames[cloud, 0] < place(wp.inf):
            state = search(state, q, grid, arrays, cloud)
        means[query] = state.mean
        d_query[query] = -state.along
        d_sigma[query] = state.spread / (sigma[0] * sigma[0])

    return pull


def _push_kernel(positions: torch.dtype, sums: torch.dtype) -> wp.Kernel:
    """Gradient of the reference points, gathered over the queries near each."""
    place, vec3 = REALS[positions]
    real, wide3 = REALS[sums]
    Grid, grid_of = grid_struct(positions), grid_maker(positions)
    Arrays, arrays_of, meet = _shared(positions, sums)

    @wp.struct
    class State:
        reference: int
        along: wide3

    @wp.func
    def scan(state: State, p: vec3, grid: Grid, arrays: Arrays, begin: int, end: int):
        for at in range(begin, end):
            q = grid.points[at]
            far = meet(arrays, q, p)
            if far > real(0.0):
                query = grid.order[at]
                product = real(0.0)
                for channel in range(arrays.features.shape[1]):
                    product += arrays.grad[query, channel] * arrays.features[state.reference, channel]
                weight = wp.exp(-far / arrays.sigma - arrays.normalizer[query])
                grad_logit = weight * (product - arrays.means[query])
                delta = wide3(real(q[0] - p[0]), real(q[1] - p[1]), real(q[2] - p[2]))
                state.along += (grad_logit / (arrays.sigma * far)) * delta
        return state

    search = box_search(positions, Visitor(State, Arrays, scan, _fixed_bound(State, Arrays)))

    @wp.kernel(**OPTIONS)
    def push(
        reference_points: wp.array(dtype=vec3),
        reference_offsets: wp.array(dtype=wp.int32),
        clouds: int,
        frames: wp.array2d(dtype=place),
        dims: wp.array2d(dtype=wp.int32),
        subframes: wp.array2d(dtype=place),
        subdims: wp.array(dtype=wp.int32),
        first: wp.array(dtype=wp.int32),
        start: wp.array(dtype=wp.int32),
        points: wp.array(dtype=vec3),
        order: wp.array(dtype=wp.int32),
        features: wp.array2d(dtype=real),
        means: wp.array(dtype=real),
        normalizer: wp.array(dtype=real),
        grad: wp.array2d(dtype=real),
        sigma: wp.array(dtype=real),
        radius: wp.float64,
        d_reference: wp.array(dtype=wide3),
    ):
        reference = wp.tid()
        grid = grid_of(frames, dims, subframes, subdims, first, start, points, order)
        arrays = arrays_of(radius, sigma, features, grad, normalizer, means)
        p = reference_points[reference]
        cloud = cloud_of(reference, reference_offsets, reference_points.shape[0], clouds)
        state = State()
        state.reference = reference
        if wp.isfinite(p) and frames[cloud, 0] < place(wp.inf):
            state = search(state, p, grid, arrays, cloud)
        d_reference[reference] = state.along

    return push
