"""Tiles of a GPU warp: 32 own points, one a lane, meet 32 candidates at a time.

Points side by side have nearly the same neighbours. So a warp collects candidates in shared memory, with
their rows of values, and every lane goes through all of them and adds up what is within its radius, in
registers: nothing is loaded for one pair alone. The warps of a block share the same 32 points, take different
candidates, and add up their sums in the end.
"""

import functools
import math
from typing import Any, NamedTuple

import torch
import warp as wp

from pointproj.ops.backends.warp.common import REALS

LANES = 32
MOST_CHANNELS = {torch.float32: 32, torch.float64: 16}  # what fits into registers and shared memory
FEW_GROUPS, MANY_WARPS, FEW_WARPS = 4096, 4, 2
MOST_SIGMAS = 40.0  # within a radius: exp(40) is a number, also when it is multiplied


class TileShape(NamedTuple):
    """How one block sums up rows of values for its 32 points."""

    channels: int  # of one search
    searches: int  # that it takes to cover all channels
    warps: int  # that share the 32 points


def tile_shape(rows: int, channels: int, sums: torch.dtype) -> TileShape:
    """For so many own points; where there are few, more warps share them."""
    searches = max(1, -(-channels // MOST_CHANNELS[sums]))
    of_search = max(4, -(-channels // searches) + 3 & ~3)
    return TileShape(of_search, searches, MANY_WARPS if rows <= FEW_GROUPS * LANES else FEW_WARPS)


class Tiles(NamedTuple):
    """Functions that all lanes of a warp, or of a block, call together."""

    State: Any  # sums of the channels, total weight, and the distance that weights are relative to
    reserve: wp.Function  # () -> address of this warp's queue of candidates
    push: wp.Function  # (address, size, exists, point) -> size; every lane may bring one
    flush: wp.Function  # (state, address, size, ...) -> state with all that wait
    least_of_block: wp.Function  # (state, address) -> smallest of all warps' last number in the state
    write_means: wp.Function  # (state, address, that, ...): from all warps' sums, relative to that distance


_TYPE = """
    struct alignas(16) Tile {{
        {place} point[32][4];  // the last is the bits of the row
        {real} number[32];  // of the lanes' points
        {real} values[{channels} * 33];
    }};
"""
_RESERVE = """
    __shared__ Tile all_tiles[{warps}];
    return reinterpret_cast<unsigned long long>(all_tiles + threadIdx.x / 32);
"""
_OWN = """
    Tile& own = *reinterpret_cast<Tile*>(address);
    const int lane = threadIdx.x & 31;
"""
_PUSH = """
    const unsigned present = __ballot_sync(0xffffffffu, exists);
    if (exists) {{
        {place}* to = own.point[size + __popc(present & ((1u << lane) - 1u))];
        {store_point}
    }}
    return size + __popc(present);
"""
# Rows come from memory several at a time, a lane for each channel, or in vain; the list ends in points that
# are nowhere, with any row. Roots are rounded as they should be where many sigmas would magnify their error.
_FLUSH = """
    if (size == 0) return state;
    __syncwarp();
    int row = 0;
    if (lane < size) {{
        {integer} bits;
        memcpy(&bits, &own.point[lane][3], sizeof(bits));
        row = static_cast<int>(bits);
    }} else {{
        own.point[lane][0] = NAN;
    }}
    const int column = lane % {per_row}, last = values.shape[1] - 1;
    const int channel = chunk * {channels} + column < last ? chunk * {channels} + column : last;
    const unsigned long long begin =
        reinterpret_cast<unsigned long long>(values.data + static_cast<size_t>(row) * values.shape[1]);
    #pragma unroll 1
    for (int first = 0; first < size && !seeking; first += {staged}) {{
        {real} value[{steps}];
        #pragma unroll
        for (int step = 0; step < {steps}; ++step) {{
            const int i = first + step * {rows} + lane / {per_row};
            const unsigned long long from = __shfl_sync(0xffffffffu, begin, i);
            value[step] = __ldg(reinterpret_cast<const {real}*>(from) + channel);
        }}
        #pragma unroll
        for (int step = 0; step < {steps}; ++step) {{
            const int i = first + step * {rows} + lane / {per_row};
            if (column < {channels}) own.values[i * {channels} + column] = value[step];
        }}
    }}
    __syncwarp();
    if (seeking) {{
        #pragma unroll 2
        for (int i = 0; i < size; ++i) {{
            const {place}* from = own.point[i];
            {distance}
            if (square <= largest_square && far < state[{channels} + 1]) state[{channels} + 1] = far;
        }}
        __syncwarp();
        return state;
    }}
    if (careful) {{
        {add_carefully}
    }} else {{
        {add}
    }}
    __syncwarp();
    return state;
"""
# What is not within the radius must be left out, not weighted with 0: it may be infinite.
_ADD = """
    #pragma unroll 1
    for (int first = 0; first < size; first += {ahead}) {{
        bool within[{ahead}];
        {real} weight[{ahead}];
        #pragma unroll
        for (int j = 0; j < {ahead}; ++j) {{
            const {place}* from = own.point[first + j];
            {distance}
            within[j] = square <= largest_square;
            if (within[j] && state[{channels} + 1] == INFINITY) state[{channels} + 1] = far;
            const {real} power = (state[{channels} + 1] - far) * decay;
            {exp}
        }}
        #pragma unroll
        for (int j = 0; j < {ahead}; ++j) {{
            if (!within[j]) continue;
            state[{channels}] += weight[j];
            const Four* from = reinterpret_cast<const Four*>(own.values + (first + j) * {channels});
            #pragma unroll
            for (int c = 0; c < {channels}; c += 4) {{
                const Four four = from[c / 4];
                #pragma unroll
                for (int i = 0; i < 4; ++i) state[c + i] = fma(weight[j], four.x[i], state[c + i]);
            }}
        }}
    }}
"""
# With the rounding of the reference, which decides who is a neighbour.
_DISTANCE = """{load_point}
            const {place} dx = q[0] - px, dy = q[1] - py, dz = q[2] - pz;
            const {place} square = dx * dx + dy * dy + dz * dz;
            {root}"""
_FOUR = "struct alignas(16) Four {{ {real} x[4]; }};"
_LEAST_OF_BLOCK = """
    own.number[lane] = state[{channels} + 1];
    __syncthreads();
    const Tile* all = &own - threadIdx.x / 32;
    {real} least = all[0].number[lane];
    #pragma unroll
    for (int warp = 1; warp < {warps}; ++warp) {{
        least = all[warp].number[lane] < least ? all[warp].number[lane] : least;
    }}
    __syncthreads();
    return least;
"""
_RESCALE = """
    {real} rescale = 0;
    if (state[{channels} + 1] < INFINITY) {{
        const {real} power = (base - state[{channels} + 1]) * decay;
        {rescale}
    }}
"""
_ADD_UP = """
    #pragma unroll
    for (int c = 0; c < {channels}; ++c) own.values[c * 33 + lane] = state[c] * rescale;
    own.number[lane] = state[{channels}] * rescale;
    __syncthreads();
    const Tile* all = &own - threadIdx.x / 32;
"""
# Of each row, one channel a lane.
_WRITE_ROWS = """
    const int channel = chunk * {channels} + lane;
    #pragma unroll 1
    for (int i = threadIdx.x / 32; i < 32; i += {warps}) {{
        const int to = __shfl_sync(0xffffffffu, row, i);
        const {real} factor = __shfl_sync(0xffffffffu, scale, i);
        if (to < 0 || lane >= {channels} || channel >= output.shape[1]) continue;
        {real} sum = 0;
        #pragma unroll
        for (int warp = 0; warp < {warps}; ++warp) sum += all[warp].values[lane * 33 + i];
        output.data[static_cast<size_t>(to) * output.shape[1] + channel] = sum * factor;
    }}
"""
_INVERSE = """
    {real} total = 0;
    #pragma unroll
    for (int warp = 0; warp < {warps}; ++warp) total += all[warp].number[lane];
    {real} scale = 0;
    if (total > 0) scale = 1 / total;
    if (!finite) scale = NAN;
    if (chunk == 0 && threadIdx.x < 32 && row >= 0) {{
        softmax.data[2 * static_cast<size_t>(row)] = base;
        softmax.data[2 * static_cast<size_t>(row) + 1] = scale;
    }}
"""
_EXP = {
    torch.float32: """asm("ex2.approx.ftz.f32 %0, %1;" : "=f"({to}) : "f"(power));""",
    torch.float64: "{to} = exp(power);",
}
BASE = {torch.float32: 2.0, torch.float64: math.e}  # of those powers
_ROOTS = {
    "single": "const float far = sqrtf(square);",
    "mixed": "const double x = dx, y = dy, z = dz, far = sqrt(x * x + y * y + z * z);",
    "double": "const double far = sqrt(square);",
}
_QUICK_ROOT = """float far; asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(far) : "f"(square));"""
_PLACES = {
    torch.float32: {
        "place": "float",
        "integer": "int",
        "load_point": "const float4 v = *reinterpret_cast<const float4*>(from);"
        " const float px = v.x, py = v.y, pz = v.z;",
        "store_point": "float4 v = make_float4(point[0], point[1], point[2], point[3]);"
        " *reinterpret_cast<float4*>(to) = v;",
    },
    torch.float64: {
        "place": "double",
        "integer": "long long",
        "load_point": "const double px = from[0], py = from[1], pz = from[2];",
        "store_point": "for (int i = 0; i < 4; ++i) to[i] = point[i];",
    },
}
AHEAD = 2  # candidates whose weights are on their way


@functools.cache
def tiles(positions: torch.dtype, sums: torch.dtype, channels: int, warps: int) -> Tiles:
    """For ``channels`` and ``warps`` that share 32 points."""
    place, vec3 = REALS[positions]
    real, _ = REALS[sums]
    vec4 = wp.types.vector(length=4, dtype=place)
    State = wp.types.vector(length=channels + 2, dtype=real)
    matrix = wp.array2d(dtype=real)
    per_row = 1 << (channels - 1).bit_length()
    rows = LANES // per_row  # that all lanes load at once
    steps = min(8, per_row)
    kind = "double" if positions == torch.float64 else "single" if sums == torch.float32 else "mixed"
    root = _ROOTS[kind]
    names = {
        **_PLACES[positions],
        "real": "float" if sums == torch.float32 else "double",
        "exp": _EXP[sums].format(to="weight[j]"),
        "rescale": _EXP[sums].format(to="rescale"),
        "distance": _DISTANCE.format(root=root, **_PLACES[positions]),
        "channels": channels,
        "warps": warps,
        "ahead": AHEAD,
        "per_row": per_row,
        "rows": rows,
        "steps": steps,
        "staged": steps * rows,
    }
    quick = _DISTANCE.format(root=_QUICK_ROOT if kind == "single" else root, **_PLACES[positions])
    names["add_carefully"] = _ADD.format(**names)
    names["add"] = _ADD.format(**{**names, "distance": quick})

    def snippet(*parts: str) -> str:
        return "".join(parts).format(**names)

    @wp.func_native(snippet(_TYPE, _RESERVE))
    def reserve() -> wp.uint64: ...

    @wp.func_native(snippet(_TYPE, _OWN, _PUSH))
    def push(address: wp.uint64, size: int, exists: bool, point: vec4) -> int: ...

    @wp.func_native(snippet(_TYPE, _FOUR, _OWN, _FLUSH))
    def flush(
        state: State,
        address: wp.uint64,
        size: int,
        seeking: bool,
        careful: bool,
        q: vec3,
        largest_square: place,
        decay: real,
        values: matrix,
        chunk: int,
    ) -> State: ...

    @wp.func_native(snippet(_TYPE, _OWN, _LEAST_OF_BLOCK))
    def least_of_block(state: State, address: wp.uint64) -> real: ...

    @wp.func_native(snippet(_TYPE, _OWN, _RESCALE, _ADD_UP, _INVERSE, _WRITE_ROWS))
    def write_means(
        state: State,
        address: wp.uint64,
        base: real,
        decay: real,
        row: int,
        finite: bool,
        chunk: int,
        output: matrix,
        softmax: matrix,
    ): ...

    return Tiles(State, reserve, push, flush, least_of_block, write_means)
