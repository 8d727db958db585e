"""What all searches share: a visitor of points, and how the lanes of a warp go through runs of points.

A search, by :mod:`pointproj.ops.backends.warp.shells` for the nearest or by
:mod:`pointproj.ops.backends.warp.hash_grid` within a radius, finds runs of sorted points; a visitor says what
to do with each point. Each lane looks up its own run; together the lanes then go through all runs, one
candidate a lane. With one lane (on a CPU, or where each thread has a query) the same code is a plain loop.
"""

import functools
from typing import Any, NamedTuple

import torch
import warp as wp

from pointproj.ops.backends.warp.common import BLOCK, REALS, packed_point
from pointproj.ops.backends.warp.lanes import Lanes, bit_count


class Visitor(NamedTuple):
    """What a search does with the points it meets."""

    State: Any  # struct that travels through the search; for the nearest with ``effort``, ``gave_up``
    Data: Any  # struct with what there is to read and write
    visit: wp.Function  # (state, q, data, points, at, exists) -> state, one candidate a lane
    bound: wp.Function | None = (
        None  # of the nearest: (state, data) -> squared distance beyond which none matters
    )
    wanted: int = 0  # of the nearest: how many
    # Whether a single thread reads each point while it looks at the one before: ``visit`` is then
    # (state, q, data, point) -> state.
    ahead: bool = False


# The runs that hold anything line up in shared memory. Of as many candidates in a row as an item has lanes, a
# bit says where a run starts; the bits up to a lane count the runs before its candidate.
_LINE_UP = """
    __shared__ int all[{block}];
    int* bases = all + (threadIdx.x & ~{last}u);
    const unsigned present = __ballot_sync(0xffffffffu, count > 0) & {mask}u << (threadIdx.x & {others}u);
    __syncwarp();  // all have read what stood there before
    if (count > 0) bases[__popc(present & ((1u << (threadIdx.x & 31u)) - 1u))] = base;
    __syncwarp();
    return reinterpret_cast<unsigned long long>(bases);
"""
_STARTS = """
    const int at = offset - first;
    unsigned bits = count > 0 && at >= 0 && at < {lanes} ? 1u << (at + (threadIdx.x & {others}u)) : 0u;
#if __CUDA_ARCH__ >= 800
    bits = __reduce_or_sync(0xffffffffu, bits);
#else
    for (int step = 16; step > 0; step >>= 1) bits |= __shfl_xor_sync(0xffffffffu, bits, step);
#endif
    return bits >> (threadIdx.x & {others}u) & {mask}u;
"""
_UP_TO_LANE = "return __popc(bits & ({mask}u >> ({last}u - (threadIdx.x & {last}u))));"


class Line(NamedTuple):
    """Functions to line up the runs of all lanes of an item."""

    line_up: wp.Function  # (base, count) -> where the bases of runs that are not empty are, in their order
    starts: wp.Function  # (offset, count, first) -> a bit for each candidate from ``first`` that starts a run
    bits_up_to_lane: wp.Function  # (bits) -> how many there are
    base_at: wp.Function  # (where, i) -> the i-th base


@functools.cache
def line_of_runs(lane_count: int) -> Line:
    """For several lanes; all threads of a GPU warp call them together."""
    names = {"block": BLOCK, "lanes": lane_count, "last": lane_count - 1}
    names |= {"others": 32 - lane_count, "mask": 2**lane_count - 1}

    @wp.func_native(_LINE_UP.format(**names))
    def line_up(base: int, count: int) -> wp.uint64: ...

    @wp.func_native(_STARTS.format(**names))
    def starts(offset: int, count: int, first: int) -> int: ...

    @wp.func_native(_UP_TO_LANE.format(**names))
    def bits_up_to_lane(bits: int) -> int: ...

    @wp.func_native("const int* bases = reinterpret_cast<const int*>(address); return bases[i];")
    def base_at(address: wp.uint64, i: int) -> int: ...

    return Line(line_up, starts, bits_up_to_lane, base_at)


def run_visitor(dtype: torch.dtype, lanes: Lanes, visitor: Visitor) -> wp.Function:
    """``visit_runs(state, q, points, data, begin, count) -> state``: every lane brings a run of sorted
    points.

    The lanes of an item share the points of all their runs.
    """
    real, vec3 = REALS[dtype]
    sorted_points = wp.array2d(dtype=real)
    State, Data, visit = visitor.State, visitor.Data, visitor.visit
    width, lane, take, sum_before = lanes.count, lanes.lane, lanes.take, lanes.sum_before
    any_item = lanes.any_item
    load_point, _, _ = packed_point(dtype)

    @wp.func
    def visit_run(state: State, q: vec3, points: sorted_points, data: Data, begin: int, count: int):
        for at in range(begin, begin + count):
            state = visit(state, q, data, points, at, True)
        return state

    @wp.func
    def visit_run_ahead(state: State, q: vec3, points: sorted_points, data: Data, begin: int, count: int):
        last = begin + count - 1
        if count > 0:
            following = load_point(points, begin)
            for at in range(begin, begin + count):
                point = following
                following = load_point(points, wp.min(at + 1, last))
                state = visit(state, q, data, point)
        return state

    if width == 1:
        return visit_run_ahead if visitor.ahead else visit_run
    line_up, starts, bits_up_to_lane, base_at = line_of_runs(width)

    @wp.func
    def visit_runs(state: State, q: vec3, points: sorted_points, data: Data, begin: int, count: int):
        offset = sum_before(count)
        candidates = take(offset + count, width - 1)
        bases = line_up(begin - offset, count)
        before = int(-1)
        first = int(0)
        while any_item(first < candidates):
            begun = starts(offset, count, first)
            candidate = first + lane()
            # An item without candidates waits for the others of the warp.
            at = base_at(bases, wp.max(before + bits_up_to_lane(begun), 0)) + candidate
            before += bit_count(begun)
            state = visit(state, q, data, points, at, candidate < candidates)
            first += width
        return state

    return visit_runs
