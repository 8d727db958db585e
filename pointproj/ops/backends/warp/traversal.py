"""What all searches share: a visitor of points, and how the lanes of a warp go through runs of points.

A search, by :mod:`pointproj.ops.backends.warp.shells` for the nearest or by
:mod:`pointproj.ops.backends.warp.hash_grid` within a radius, finds runs of sorted points; a visitor says what
to do with each point. Each lane looks up its own run; together the lanes then go through all runs, one
candidate a lane. With one lane (on a CPU, or where each thread has a query) the same code is a plain loop.
"""

from typing import Any, NamedTuple

import torch
import warp as wp

from pointproj.ops.backends.warp.common import BLOCK, REALS
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


# With all 32 lanes: the runs that hold anything line up in shared memory. Of 32 candidates in a row, a bit
# says where a run starts; the bits up to a lane count the runs before its candidate.
_LINE_UP = f"""
    __shared__ int all[{BLOCK}];
    int* bases = all + (threadIdx.x & ~31u);
    const unsigned present = __ballot_sync(0xffffffffu, count > 0);
    __syncwarp();  // all have read what stood there before
    if (count > 0) bases[__popc(present & ((1u << (threadIdx.x & 31u)) - 1u))] = base;
    __syncwarp();
    return reinterpret_cast<unsigned long long>(bases);
"""
_STARTS = """
    const int at = offset - first;
    const unsigned bit = count > 0 && at >= 0 && at < 32 ? 1u << at : 0u;
#if __CUDA_ARCH__ >= 800
    return __reduce_or_sync(0xffffffffu, bit);
#else
    unsigned bits = bit;
    for (int step = 16; step > 0; step >>= 1) bits |= __shfl_xor_sync(0xffffffffu, bits, step);
    return bits;
#endif
"""


@wp.func_native(_LINE_UP)
def line_up(base: int, count: int) -> wp.uint64:
    """Store the bases of the runs that are not empty, in the order of their lanes; returns where."""
    ...


@wp.func_native(_STARTS)
def starts(offset: int, count: int, first: int) -> int:
    """A bit for each candidate, from ``first``, with which a run starts."""
    ...


@wp.func_native("return __popc(bits & (0xffffffffu >> (31u - (threadIdx.x & 31u))));")
def bits_up_to_lane(bits: int) -> int: ...


@wp.func_native("const int* bases = reinterpret_cast<const int*>(address); return bases[i];")
def base_at(address: wp.uint64, i: int) -> int: ...


def run_visitor(dtype: torch.dtype, lanes: Lanes, visitor: Visitor) -> wp.Function:
    """``visit_runs(state, q, points, data, begin, count) -> state``: every lane brings a run of sorted
    points.

    All 32 lanes of a warp share the points of all runs; fewer lanes go through their runs side by side.
    """
    real, vec3 = REALS[dtype]
    sorted_points = wp.array2d(dtype=real)
    State, Data, visit = visitor.State, visitor.Data, visitor.visit
    width, lane, take, sum_before = lanes.count, lanes.lane, lanes.take, lanes.sum_before
    ballot = lanes.ballot

    @wp.func
    def visit_run(state: State, q: vec3, points: sorted_points, data: Data, begin: int, count: int):
        for at in range(begin, begin + count):
            state = visit(state, q, data, points, at, True)
        return state

    @wp.func
    def visit_own_runs(state: State, q: vec3, points: sorted_points, data: Data, begin: int, count: int):
        i = int(0)
        while ballot(i < count) != 0:
            state = visit(state, q, data, points, begin + i, i < count)
            i += 1
        return state

    @wp.func
    def visit_runs(state: State, q: vec3, points: sorted_points, data: Data, begin: int, count: int):
        offset = sum_before(count)
        candidates = take(offset + count, width - 1)
        bases = line_up(begin - offset, count)
        before = int(-1)
        for first in range(0, candidates, width):
            begun = starts(offset, count, first)
            candidate = first + lane()
            at = base_at(bases, before + bits_up_to_lane(begun)) + candidate
            before += bit_count(begun)
            state = visit(state, q, data, points, at, candidate < candidates)
        return state

    if width == 1:
        return visit_run
    return visit_runs if width == 32 else visit_own_runs
