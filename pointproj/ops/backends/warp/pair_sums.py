"""What pairs do to positions and sigma, added up: the lanes of a point stand side by side over the channels.

A pair's share is its factors (one for each axis, one for sigma) times the sum over the channels of upstream
gradient times what the reference's feature exceeds the query's result by. The shares of a point's pairs are
summed up too, so each lane adds up all pairs for its own channels, and the lanes need a total only once.
Pairs wait in shared memory, as in :mod:`pointproj.ops.backends.warp.row_sums`.
"""

import functools
from typing import Any, NamedTuple

import torch
import warp as wp

from pointproj.ops.backends.warp.common import BLOCK, REALS
from pointproj.ops.backends.warp.row_sums import AT_A_TIME

PLACES_PER_LANE = 2


class WaitingPairs(NamedTuple):
    """The list in shared memory that the lanes of a point fill together."""

    Factors: Any
    capacity: int
    room: wp.Function  # () -> where it is
    put: wp.Function  # (room, size, exists, factors, row) -> size; every lane may bring one
    add_all: wp.Function  # (shares, features, grad, aggregated, own_row, room, size) -> shares of this lane


_ENTRY = """
    struct Entry {{ {real} factors[4]; unsigned row; }};
    Entry* list = reinterpret_cast<Entry*>(room);
"""
_ROOM = """
    struct Entry {{ {real} factors[4]; unsigned row; }};
    __shared__ Entry all[{block} / 32 * {places}];
    return reinterpret_cast<unsigned long long>(all + threadIdx.x / 32 * {places});
"""
_PUT = """
    const unsigned present = __ballot_sync(0xffffffffu, exists);
    const int at = size + __popc(present & ((1u << (threadIdx.x & 31u)) - 1u));
    if (exists) {{
        for (int i = 0; i < 4; ++i) list[at].factors[i] = factors[i];
        list[at].row = row;
    }}
    __syncwarp();
    return size + __popc(present);
"""
# The list ends in pairs without factors, and lanes beyond the last channel read it in vain: so no load waits
# for a condition.
_ADD_ALL = """
    const int lane = threadIdx.x & 31, channels = features.shape[1];
    if (size == 0) return shares;
    if (lane < {ahead}) list[size + lane] = {{{{0, 0, 0, 0}}, list[0].row}};
    __syncwarp();
    const auto read = [](const auto& table, size_t row, int channel) {{
        const char* there = reinterpret_cast<const char*>(table.data + channel);
        return *reinterpret_cast<const {real}*>(there + row * table.strides[0]);
    }};
    for (int first = 0; first < channels; first += 32) {{
        const int channel = min(first + lane, channels - 1);
        {own}
        {real} sums[4] = {{0, 0, 0, 0}};
        #pragma unroll 1
        for (int begin = 0; begin < size; begin += {ahead}) {{
            #pragma unroll
            for (int j = 0; j < {ahead}; ++j) {{
                const Entry entry = list[begin + j];
                {other}
                const {real} product = upstream * (feature - result);
                #pragma unroll
                for (int i = 0; i < 4; ++i) sums[i] = fma(entry.factors[i], product, sums[i]);
            }}
        }}
        if (first + lane < channels) {{
            for (int i = 0; i < 4; ++i) shares[i] += sums[i];
        }}
    }}
    __syncwarp();
    return shares;
"""
_OF_REFERENCE = "const {real} feature = read(features, {row}, channel);"
_OF_QUERY = """
        const {real} upstream = read(grad, {row}, channel);
        const {real} result = read(aggregated, {row}, channel);"""


@functools.cache
def waiting_pairs(sums: torch.dtype, from_query: bool) -> WaitingPairs:
    """The list, for all 32 lanes of a GPU warp; they call each function together.

    ``from_query`` says whether the point whose pairs these are is a query.
    """
    real, _ = REALS[sums]
    Factors = wp.types.vector(length=4, dtype=real)
    capacity = PLACES_PER_LANE * 32
    names = {
        "real": "float" if sums == torch.float32 else "double",
        "places": capacity + AT_A_TIME,
        "ahead": AT_A_TIME,
        "block": BLOCK,
    }
    own, other = (_OF_QUERY, _OF_REFERENCE) if from_query else (_OF_REFERENCE, _OF_QUERY)
    names["own"] = own.format(row="own_row", **names)
    names["other"] = other.format(row="entry.row", **names)
    matrix = wp.array2d(dtype=real)

    @wp.func_native(_ROOM.format(**names))
    def room() -> wp.uint64: ...

    @wp.func_native((_ENTRY + _PUT).format(**names))
    def put(room: wp.uint64, size: int, exists: bool, factors: Factors, row: int) -> int: ...

    @wp.func_native((_ENTRY + _ADD_ALL).format(**names))
    def add_all(
        shares: Factors,
        features: matrix,
        grad: matrix,
        aggregated: matrix,
        own_row: int,
        room: wp.uint64,
        size: int,
    ) -> Factors: ...

    return WaitingPairs(Factors, capacity, room, put, add_all)
