"""Tiles of a GPU warp: 32 own points, one a lane, meet 32 candidates at a time.

Points side by side have nearly the same neighbours. So a warp collects candidates in shared memory, with
their rows of values, and every lane goes through all of them and adds up what is within its radius, in
registers: nothing is loaded for one pair alone. The warps of a block share the same 32 points, take different
candidates, and add up their sums in the end. All numbers are single.
"""

import functools
from typing import Any, NamedTuple

import warp as wp

from pointproj.ops.backends.warp.weighting import EXP, TILE_WEIGHTS, is_relative

LANES = 32
MOST_CHANNELS = 32  # what fits into registers and shared memory
FEW_GROUPS, MANY_WARPS, FEW_WARPS = 4096, 4, 2
MOST_DECAY = 40.0  # of a weight's logarithm within a radius: exp(40) is a number, also when multiplied


class TileShape(NamedTuple):
    """How one block sums up rows of values for its 32 points."""

    channels: int  # of one search
    searches: int  # that it takes to cover all channels
    warps: int  # that share the 32 points
    tiles: int

    @property
    def block(self) -> int:
        """Threads of a block."""
        return LANES * self.warps

    @property
    def dim(self) -> tuple[int, int]:
        """Of a launch: a block for each tile and search."""
        return self.tiles * self.searches, self.block


def tile_shape(rows: int, channels: int) -> TileShape:
    """For so many own points; where there are few, more warps share them."""
    searches = max(1, -(-channels // MOST_CHANNELS))
    of_search = max(4, -(-channels // searches) + 3 & ~3)
    tiles = -(-rows // LANES)
    return TileShape(of_search, searches, MANY_WARPS if tiles <= FEW_GROUPS else FEW_WARPS, tiles)


class Tiles(NamedTuple):
    """Functions that all lanes of a warp, or of a block, call together."""

    State: Any  # what a lane adds up for its point
    Task: Any  # struct that says what to do, the same in all lanes
    reserve: wp.Function  # () -> address of this warp's queue of candidates
    push: wp.Function  # (address, size, exists, point) -> size; every lane may bring one
    flush: wp.Function  # (state, address, size, q, largest_square, task) -> state with all that wait


TYPE = """
    struct alignas(16) Tile {{
        float point[32][4];  // the last is the bits of the row
        float number[32];  // of the lanes' points
        float values[{channels} * 33];
        {saved}
    }};
"""
_RESERVE = """
    __shared__ Tile all_tiles[{warps}];
    return reinterpret_cast<unsigned long long>(all_tiles + threadIdx.x / 32);
"""
OWN = """
    Tile& own = *reinterpret_cast<Tile*>(address);
    const int lane = threadIdx.x & 31;
"""
_PUSH = """
    const unsigned present = __ballot_sync(0xffffffffu, exists);
    if (exists) {{
        const int at = size + __popc(present & ((1u << lane) - 1u));
        *reinterpret_cast<float4*>(own.point[at]) = make_float4(point[0], point[1], point[2], point[3]);
    }}
    return size + __popc(present);
"""
# Rows come from memory several at a time, a lane for each channel, or in vain; the list ends in points that
# are nowhere, with any row. Levels are rounded as they should be where a fast decay magnifies their error.
STAGE = """
    if (size == 0) return state;
    __syncwarp();
    int row = 0;
    if (lane < size) {{
        row = __float_as_int(own.point[lane][3]);
        {save}
    }} else {{
        own.point[lane][0] = NAN;
    }}
    const int column = lane % {per_row}, last = task.values.shape[1] - 1;
    const int channel = task.chunk * {channels} + column < last ? task.chunk * {channels} + column : last;
    const unsigned long long begin =
        reinterpret_cast<unsigned long long>(task.values.data + static_cast<size_t>(row) * (last + 1));
    #pragma unroll 1
    for (int first = 0; first < size && {staging}; first += {staged}) {{
        float value[{steps}];
        #pragma unroll
        for (int step = 0; step < {steps}; ++step) {{
            const int i = first + step * {rows} + lane / {per_row};
            const unsigned long long from = __shfl_sync(0xffffffffu, begin, i);
            value[step] = __ldg(reinterpret_cast<const float*>(from) + channel);
        }}
        #pragma unroll
        for (int step = 0; step < {steps}; ++step) {{
            const int i = first + step * {rows} + lane / {per_row};
            if (column < {channels}) own.values[i * {channels} + column] = value[step];
        }}
    }}
    __syncwarp();
"""
ADD_ALL = """
    {seek}
    if (task.careful) {{
        {add_carefully}
    }} else {{
        {add}
    }}
    __syncwarp();
    return state;
"""
_SEEK = """
    if (task.seeking) {{
        #pragma unroll 2
        for (int i = 0; i < size; ++i) {{
            const float* from = own.point[i];
            {distance}
            if (square <= largest_square && level < {base}) {base} = level;
        }}
        __syncwarp();
        return state;
    }}
"""
NUMBERS = "const float decay = task.decay, limit = task.limit;"
# What is not within the radius must be left out, not weighted with 0: it may be infinite.
_ADD = """
    #pragma unroll 1
    for (int first = 0; first < size; first += {ahead}) {{
        bool within[{ahead}];
        float weight[{ahead}];
        #pragma unroll
        for (int j = 0; j < {ahead}; ++j) {{
            const float* from = own.point[first + j];
            {distance}
            within[j] = square <= largest_square;
            {base_at_first}
            {weight}
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
DISTANCE = """
            const float4 p = *reinterpret_cast<const float4*>(from);
            const float dx = q[0] - p.x, dy = q[1] - p.y, dz = q[2] - p.z;
            const float square = dx * dx + dy * dy + dz * dz;
            {level}"""
_BASE_AT_FIRST = "if (within[j] && {base} == INFINITY) {base} = level;"
FOUR = "struct alignas(16) Four {{ float x[4]; }};"
_LEAST_OF_BLOCK = """
    own.number[lane] = {base};
    __syncthreads();
    const Tile* all = &own - threadIdx.x / 32;
    float least = all[0].number[lane];
    #pragma unroll
    for (int warp = 1; warp < {warps}; ++warp) {{
        least = all[warp].number[lane] < least ? all[warp].number[lane] : least;
    }}
    __syncthreads();
    return least;
"""
_RESCALE = """
    float rescale = 0;
    if ({base} < INFINITY) {{
        const float power = (base - {base}) * decay;
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
WRITE_ROWS = """
    const int channel = chunk * {channels} + lane;
    #pragma unroll 1
    for (int i = threadIdx.x / 32; i < 32; i += {warps}) {{
        const int to = __shfl_sync(0xffffffffu, row, i);
        const float factor = __shfl_sync(0xffffffffu, scale, i);
        if (to < 0 || lane >= {channels} || channel >= output.shape[1]) continue;
        float sum = 0;
        #pragma unroll
        for (int warp = 0; warp < {warps}; ++warp) sum += all[warp].values[lane * 33 + i];
        output.data[static_cast<size_t>(to) * output.shape[1] + channel] = sum * factor;
    }}
"""
_INVERSE = """
    float total = 0;
    #pragma unroll
    for (int warp = 0; warp < {warps}; ++warp) total += all[warp].number[lane];
    {scale}
    if (!finite) scale = NAN;
    if (chunk == 0 && threadIdx.x < 32 && row >= 0) {{
        softmax.data[2 * static_cast<size_t>(row)] = base;
        softmax.data[2 * static_cast<size_t>(row) + 1] = scale;
    }}
"""
_SCALES = {"mean": "float scale = 0; if (total > 0) scale = 1 / total;", "sum": "float scale = 1;"}
AHEAD = 2  # candidates whose weights are on their way


def tile_names(channels: int, warps: int) -> dict[str, Any]:
    """What snippets for ``channels`` and ``warps`` that share 32 points have in common."""
    per_row = 1 << (channels - 1).bit_length()
    rows = LANES // per_row  # that all lanes load at once
    steps = min(8, per_row)
    shape = {"channels": channels, "warps": warps, "ahead": AHEAD}
    loads = {"per_row": per_row, "rows": rows, "steps": steps, "staged": steps * rows}
    return {**shape, **loads, "saved": "", "save": "", "staging": "true"}


def queue_functions(names: dict[str, Any]) -> tuple[wp.Function, wp.Function]:
    """``reserve`` and ``push`` of :class:`Tiles`."""

    @wp.func_native((TYPE + _RESERVE).format(**names))
    def reserve() -> wp.uint64: ...

    @wp.func_native((TYPE + OWN + _PUSH).format(**names))
    def push(address: wp.uint64, size: int, exists: bool, point: wp.vec4f) -> int: ...

    return reserve, push


@wp.struct
class SumTask:
    """How weighted rows are summed up."""

    seeking: bool  # whether it is only the nearest that is looked for
    careful: bool  # whether levels are rounded as in the functions of weightings
    decay: wp.float32  # of the logarithm of a weight, to the base of 2
    limit: wp.float32
    values: wp.array2d(dtype=wp.float32)
    chunk: int


class SumTiles(NamedTuple):
    """Tiles for weighted sums of rows.

    The state holds sums of the channels, total weight, and the level that weights are relative to.
    """

    tiles: Tiles
    least_of_block: wp.Function  # (state, address) -> smallest of all warps' last number in the state
    write_rows: wp.Function  # (state, address, that, ...): from all warps' sums, relative to that level


@functools.cache
def sum_tiles(channels: int, warps: int, kernel: str, reduce: str) -> SumTiles:
    """For ``channels`` and ``warps`` that share 32 points."""
    State = wp.types.vector(length=channels + 2, dtype=wp.float32)
    matrix = wp.array2d(dtype=wp.float32)
    names = {
        **tile_names(channels, warps),
        "base": f"state[{channels + 1}]",
        "rescale": EXP.format(to="rescale"),
        "scale": _SCALES[reduce],
        "staging": "!task.seeking",
    }
    level, quick_level, weight = TILE_WEIGHTS[kernel]
    relative = is_relative(kernel, reduce)
    names["base_at_first"] = _BASE_AT_FIRST.format(**names) if relative else ""
    names["weight"] = weight.format(**names)
    names["distance"] = DISTANCE.format(level=level)
    names["seek"] = _SEEK.format(**names) if relative else ""
    names["add_carefully"] = _ADD.format(**names)
    names["add"] = _ADD.format(**{**names, "distance": DISTANCE.format(level=quick_level)})
    reserve, push = queue_functions(names)

    def snippet(*parts: str) -> str:
        return "".join(parts).format(**names)

    @wp.func_native(snippet(TYPE, FOUR, OWN, NUMBERS, STAGE, ADD_ALL))
    def flush(
        state: State, address: wp.uint64, size: int, q: wp.vec3f, largest_square: wp.float32, task: SumTask
    ) -> State: ...

    @wp.func_native(snippet(TYPE, OWN, _LEAST_OF_BLOCK))
    def least_of_block(state: State, address: wp.uint64) -> wp.float32: ...

    @wp.func_native(snippet(TYPE, OWN, _RESCALE, _ADD_UP, _INVERSE, WRITE_ROWS))
    def write_rows(
        state: State,
        address: wp.uint64,
        base: wp.float32,
        decay: wp.float32,
        row: int,
        finite: bool,
        chunk: int,
        output: matrix,
        softmax: matrix,
    ): ...

    return SumTiles(Tiles(State, SumTask, reserve, push, flush), least_of_block, write_rows)
