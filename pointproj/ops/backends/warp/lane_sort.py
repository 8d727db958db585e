"""Sorting networks: pairs of a number and a row across the lanes of a warp, and rows of integers in memory.

Every exchange puts the smaller of two in front, also in the first step of a merge, which compares the first
with the last, the second with the last but one and so on. So places behind the end need no memory: they count
as larger than everything and never move.
"""

import functools
from typing import Any, NamedTuple

import torch
import warp as wp

from pointproj.ops.backends.warp.common import REALS

# The bits of the row stand behind the number, as in :func:`pointproj.ops.backends.warp.common.packed_point`.
_ROW_OF = """
    {real} tail = pair[1];
    {integer} bits;
    memcpy(&bits, &tail, sizeof(bits));
"""
_PAIR = """
    {{
        {integer} bits = row;
        wp::vec_t<2, {real}> made;
        made[0] = number;
        memcpy(&made[1], &bits, sizeof(bits));
        return made;
    }}
"""
_OPEN = """
    int row = bits;
    {real} number = pair[0];
    const int lane = threadIdx.x & 31;
"""
_EXCHANGE = """
    const {real} other = __shfl_xor_sync(0xffffffffu, number, mask);
    const int other_row = __shfl_xor_sync(0xffffffffu, row, mask);
    if (({before}) != is_first) {{
        number = other;
        row = other_row;
    }}
"""
# In one comparison: without a sign, the bits of floats have their order.
_BEFORE_SINGLE = """
    (static_cast<unsigned long long>(__float_as_uint(number)) << 32 | static_cast<unsigned>(row))
    < (static_cast<unsigned long long>(__float_as_uint(other)) << 32 | static_cast<unsigned>(other_row))
"""
_BEFORE_DOUBLE = "number < other || (number == other && row < other_row)"
_SORT_DESCENDING = """
    #pragma unroll
    for (int size = 2; size <= 32; size <<= 1) {{
        if (size / 2 >= count) break;
        #pragma unroll
        for (int bit = size / 2; bit > 0; bit >>= 1) {{
            const int mask = bit == size / 2 ? size - 1 : bit;
            const bool is_first = lane & bit;
"""
_MERGE = """
    #pragma unroll
    for (int mask = 16; mask > 0; mask >>= 1) {{
        const bool is_first = ((lane & mask) == 0) == ascending;
"""


class PairSort(NamedTuple):
    """For pairs of a number and a row, none of them negative, one a lane; all 32 lanes sort together."""

    Pair: Any  # vector
    pair: wp.Function  # (number, row) -> pair
    row_of: wp.Function  # (pair)
    comes_before: wp.Function  # (pair, other): by the number, ties by the lower row
    sort_descending: (
        wp.Function
    )  # (pair, count) -> pair: those of the last ``count`` lanes, all others larger
    merge: wp.Function  # (pair, ascending) -> pair: sorted again, where two sorted halves have met


@functools.cache
def pair_sort(dtype: torch.dtype) -> PairSort:
    """For numbers of one dtype."""
    real, _ = REALS[dtype]
    Pair = wp.types.vector(length=2, dtype=real)
    single = dtype == torch.float32
    names = {
        "real": "float" if single else "double",
        "integer": "int" if single else "long long",
        "before": _BEFORE_SINGLE if single else _BEFORE_DOUBLE,
    }

    @wp.func_native(_PAIR.format(**names))
    def pair_of(number: real, row: int) -> Pair: ...

    @wp.func_native((_ROW_OF + "return bits;").format(**names))
    def row_of(pair: Pair) -> int: ...

    @wp.func
    def comes_before(pair: Pair, other: Pair):
        return pair[0] < other[0] or (pair[0] == other[0] and row_of(pair) < row_of(other))

    @wp.func_native((_ROW_OF + _OPEN + _SORT_DESCENDING + _EXCHANGE + "}}}}" + _PAIR).format(**names))
    def sort_descending(pair: Pair, count: int) -> Pair: ...

    @wp.func_native((_ROW_OF + _OPEN + _MERGE + _EXCHANGE + "}}" + _PAIR).format(**names))
    def merge(pair: Pair, ascending: bool) -> Pair: ...

    return PairSort(Pair, pair_of, row_of, comes_before, sort_descending, merge)


# A warp holds a chunk in registers: entry 32 i + lane is the i-th of its lane. ``from`` is the size of the
# first merge: 2 to sort, and all of a chunk to finish a merge of longer rows, by halves alone.
_CHUNK = """
    int entry[{registers}];
    #pragma unroll
    for (int i = 0; i < {registers}; ++i) {{
        const int at = 32 * i + lane;
        entry[i] = first + at < count ? static_cast<int>(rows[first + at]) : 0x7fffffff;
    }}
    #pragma unroll
    for (int size = {from}; size <= 32 * {registers}; size <<= 1) {{
        #pragma unroll
        for (int bit = size / 2; bit > 0; bit >>= 1) {{
            const int mask = {from} == 2 && bit == size / 2 ? size - 1 : bit;
            int merged[{registers}];
            #pragma unroll
            for (int i = 0; i < {registers}; ++i) {{
                int other = entry[i ^ (mask >> 5)];
                if (mask & 31) other = __shfl_xor_sync(0xffffffffu, other, mask & 31);
                merged[i] = (32 * i + lane) & bit ? max(entry[i], other) : min(entry[i], other);
            }}
            #pragma unroll
            for (int i = 0; i < {registers}; ++i) entry[i] = merged[i];
        }}
    }}
    #pragma unroll
    for (int i = 0; i < {registers}; ++i) {{
        const int at = 32 * i + lane;
        if (first + at < count) rows[first + at] = entry[i];
    }}
"""
CHUNK = 128  # entries
_SORT = """
    long long* rows = reinterpret_cast<long long*>(address);
#if defined(__CUDA_ARCH__)
    const int lane = threadIdx.x & 31;
    __syncwarp();
    if (count <= 32) {{
        const int first = 0;
        {sort_32}
    }} else if (count <= 64) {{
        const int first = 0;
        {sort_64}
    }} else {{
        for (int first = 0; first < count; first += {chunk}) {{
            {sort_chunk}
        }}
    }}
    for (long long size = 2 * {chunk}; size / 2 < count; size <<= 1) {{
        for (long long bit = size / 2; bit >= {chunk}; bit >>= 1) {{
            const long long mask = bit == size / 2 ? size - 1 : bit;
            __syncwarp();
            for (long long i = lane; ; i += 32) {{
                const long long at = (i & ~(bit - 1)) << 1 | (i & (bit - 1)), other = at ^ mask;
                if (at >= count) break;
                if (other < count && rows[other] < rows[at]) {{
                    const long long row = rows[at];
                    rows[at] = rows[other];
                    rows[other] = row;
                }}
            }}
        }}
        __syncwarp();
        for (int first = 0; first < count; first += {chunk}) {{
            {merge_chunk}
        }}
    }}
    __syncwarp();
#else
    int gap = 1;
    while (gap < count / 3) gap = 3 * gap + 1;
    for (; gap > 0; gap /= 3) {{
        for (int i = gap; i < count; ++i) {{
            const long long row = rows[i];
            int at = i;
            for (; at >= gap && rows[at - gap] > row; at -= gap) rows[at] = rows[at - gap];
            rows[at] = row;
        }}
    }}
#endif
"""


@wp.func_native(
    _SORT.format(
        chunk=CHUNK,
        sort_32=_CHUNK.format(**{"registers": 1, "from": 2}),
        sort_64=_CHUNK.format(**{"registers": 2, "from": 2}),
        sort_chunk=_CHUNK.format(**{"registers": CHUNK // 32, "from": 2}),
        merge_chunk=_CHUNK.format(**{"registers": CHUNK // 32, "from": CHUNK}),
    )
)
def sort_rows(address: wp.uint64, count: int):
    """Sort so many rows, int64, in ascending order: all lanes of a warp together, or one lane on a CPU."""
    ...
