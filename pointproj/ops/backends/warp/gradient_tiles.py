"""Tiles that gather gradients: of the features, and of positions and sigma, for 32 points at a time.

A lane keeps the row of its own point in registers: the feature of a reference, or the upstream gradient of a
query. A candidate's row, in shared memory, is of the other kind, so one pass over it gives both the product
that positions need and what is added to the gradient of the feature.
"""

import functools
from typing import Any, NamedTuple

import warp as wp

from pointproj.ops.backends.warp.tiles import (
    ADD_ALL,
    DISTANCE,
    FOUR,
    NUMBERS,
    OWN,
    STAGE,
    TYPE,
    WRITE_ROWS,
    Tiles,
    queue_functions,
    tile_names,
)
from pointproj.ops.backends.warp.weighting import TILE_PULLS, TILE_WEIGHTS


class Gathered(NamedTuple):
    """Whose gradients a kernel gathers: those of queries, or of references, whose features may have one."""

    from_query: bool
    features: bool
    positions: bool


@wp.struct
class GradientTask:
    """What all lanes read."""

    careful: bool  # whether levels are rounded as in the functions of weightings
    decay: wp.float32  # of the logarithm of a weight, to the base of 2
    rate: wp.float32  # the same, to the base of e
    limit: wp.float32
    values: wp.array2d(dtype=wp.float32)  # rows of the candidates
    softmax: wp.array2d(dtype=wp.float32)
    means: wp.array(dtype=wp.float32)  # of each query, upstream gradient times result; 0 for sums
    chunk: int


class GradientTiles(NamedTuple):
    """Tiles for gradients."""

    tiles: Tiles
    begin: wp.Function  # (task, own rows, aggregated, row) -> state with a lane's own row and numbers
    write: wp.Function  # (state, address, row, chunk, unit of sigma, d_features, d_points, d_sigma)


_SAVED = "float4 saved[32];  // of candidates that are queries: level, inverse of the total weight, mean"
_SAVE = """
        const float2 pair = reinterpret_cast<const float2*>(task.softmax.data)[row];
        own.saved[lane] = make_float4(pair.x, pair.y, {mean}, 0);
"""
_OF_CANDIDATE = "const float4 saved = own.saved[first + j];"
_BEGIN = """
    wp::vec_t<{size}, wp::float32> state;
    #pragma unroll
    for (int c = 0; c < {size}; ++c) state[c] = 0;
    if (row < 0) return state;
    const int columns = values.shape[1];
    const float* from = values.data + static_cast<size_t>(row) * columns;
    #pragma unroll
    for (int c = 0; c < {own}; ++c) state[{first_own} + c] = c < columns ? from[c] : 0.0f;
    {own_numbers}
    return state;
"""
_OWN_NUMBERS = """
    state[{base}] = task.softmax.data[2 * static_cast<size_t>(row)];
    state[{base} + 1] = task.softmax.data[2 * static_cast<size_t>(row) + 1];
    {mean}
"""
# In the order of the products: of a neighbour that outweighs all others nothing remains then.
_OWN_MEAN = """
    const float* of = aggregated.data + static_cast<size_t>(row) * columns;
    float mean[4] = {{0, 0, 0, 0}};
    #pragma unroll
    for (int c = 0; c < {own}; ++c) {{
        mean[c % 4] = fma(state[{first_own} + c], c < columns ? of[c] : 0.0f, mean[c % 4]);
    }}
    state[{base} + 2] = (mean[0] + mean[1]) + (mean[2] + mean[3]);
    if (threadIdx.x < 32) task.means.data[row] = state[{base} + 2];
"""
# What is not within the radius must be left out, not weighted with 0: it may be infinite.
_ADD = """
    #pragma unroll 1
    for (int first = 0; first < size; first += {ahead}) {{
        bool within[{ahead}];
        float weight[{ahead}], scale[{ahead}], share[{ahead}], mean[{ahead}];
        float x[{ahead}], y[{ahead}], z[{ahead}];
        #pragma unroll
        for (int j = 0; j < {ahead}; ++j) {{
            const float* from = own.point[first + j];
            {distance}
            within[j] = square <= largest_square;
            {of_candidate}
            {weight}
            weight[j] *= {inverse};
            {pull}
        }}
        #pragma unroll
        for (int j = 0; j < {ahead}; ++j) {{
            if (!within[j]) continue;
            const Four* from = reinterpret_cast<const Four*>(own.values + (first + j) * {channels});
            float product[4] = {{0, 0, 0, 0}};
            #pragma unroll
            for (int c = 0; c < {channels}; c += 4) {{
                const Four four = from[c / 4];
                #pragma unroll
                for (int i = 0; i < 4; ++i) {{
                    {add_feature}
                    {multiply}
                }}
            }}
            {add_position}
        }}
    }}
"""
_PULL = """
            {scale}
            share[j] = weight[j] * {share};
            x[j] = -dx; y[j] = -dy; z[j] = -dz; mean[j] = {mean};
"""
_ADD_FEATURE = "state[c + i] = fma(weight[j], four.x[i], state[c + i]);"
_MULTIPLY = "product[i] = fma(state[{first_own} + c + i], four.x[i], product[i]);"
_ADD_POSITION = """
            const float rest = (product[0] + product[1]) + (product[2] + product[3]) - mean[j];
            state[{along}] = fma(rest, scale[j] * x[j], state[{along}]);
            state[{along} + 1] = fma(rest, scale[j] * y[j], state[{along} + 1]);
            state[{along} + 2] = fma(rest, scale[j] * z[j], state[{along} + 2]);
            {add_share}
"""
_ADD_SHARE = "state[{along} + 3] = fma(rest, share[j], state[{along} + 3]);"
_ADD_UP = """
    #pragma unroll
    for (int c = 0; c < {features}; ++c) own.values[c * 33 + lane] = state[c];
    #pragma unroll
    for (int c = 0; c < {shares}; ++c) own.values[({features} + c) * 33 + lane] = state[{along} + c];
    __syncthreads();
    const Tile* all = &own - threadIdx.x / 32;
"""
_WRITE_POSITIONS = """
    if (threadIdx.x < 32 && row >= 0) {{
        float sums[{shares}];
        #pragma unroll
        for (int c = 0; c < {shares}; ++c) {{
            sums[c] = 0;
            #pragma unroll
            for (int warp = 0; warp < {warps}; ++warp) {{
                sums[c] += all[warp].values[({features} + c) * 33 + lane];
            }}
        }}
        for (int c = 0; c < 3; ++c) d_points.data[3 * static_cast<size_t>(row) + c] = sums[c];
        {write_share}
    }}
"""
_WRITE_SHARE = "d_sigma.data[row] = sums[3] / unit;"
_WRITE_FEATURES = "const float scale = 1; const wp::array_t<wp::float32>& output = d_features;"


@functools.cache
def gradient_tiles(channels: int, warps: int, kernel: str, reduce: str, gathered: Gathered) -> GradientTiles:
    """For ``channels`` and ``warps`` that share 32 points."""
    _, features, positions = gathered
    matrix, vector = wp.array2d(dtype=wp.float32), wp.array(dtype=wp.float32)
    names = _layout(channels, warps, reduce, gathered)
    State = wp.types.vector(length=names["size"], dtype=wp.float32)
    level, quick_level, weight = TILE_WEIGHTS[kernel]
    scale, quick_scale, share = TILE_PULLS[kernel]
    names["weight"] = weight.format(base=names["level_of_query"])
    names["share"] = share

    def added(level: str, scale: str) -> str:
        pull = _PULL.format(**{**names, "scale": scale}) if positions else ""
        return _ADD.format(**{**names, "distance": DISTANCE.format(level=level), "pull": pull})

    names["add_carefully"], names["add"] = added(level, scale), added(quick_level, quick_scale)
    reserve, push = queue_functions(names)

    def snippet(*parts: str) -> str:
        return "".join(parts).format(**names)

    @wp.func_native(snippet(TYPE, FOUR, OWN, NUMBERS, STAGE, ADD_ALL))
    def flush(
        state: State,
        address: wp.uint64,
        size: int,
        q: wp.vec3f,
        largest_square: wp.float32,
        task: GradientTask,
    ) -> State: ...

    @wp.func_native(snippet(_BEGIN))
    def begin(task: GradientTask, values: matrix, aggregated: matrix, row: int) -> State: ...

    write_features = _WRITE_FEATURES + WRITE_ROWS if features else ""
    write_positions = _WRITE_POSITIONS if positions else ""

    @wp.func_native(snippet(TYPE, OWN, _ADD_UP, write_positions, write_features))
    def write(
        state: State,
        address: wp.uint64,
        row: int,
        chunk: int,
        unit: wp.float32,
        d_features: matrix,
        d_points: vector,
        d_sigma: vector,
    ): ...

    return GradientTiles(Tiles(State, GradientTask, reserve, push, flush), begin, write)


def _layout(channels: int, warps: int, reduce: str, gathered: Gathered) -> dict[str, Any]:
    """Where numbers are in a state: sums of features, own row, shares of positions and sigma, own numbers."""
    from_query, features, positions = gathered
    names: dict[str, Any] = tile_names(channels, warps)
    names["features"] = channels if features else 0
    names["first_own"], names["own"] = names["features"], channels if positions else 0
    names["along"] = names["first_own"] + names["own"]
    names["shares"] = (4 if from_query else 3) if positions else 0
    names["base"] = names["along"] + names["shares"]
    names["size"] = names["base"] + (3 if from_query else 0)
    names["columns"] = channels + 3
    divides = reduce == "mean" and positions
    if from_query:
        own_mean = _OWN_MEAN.format(**names) if divides else ""
        names["own_numbers"] = _OWN_NUMBERS.format(**names, mean=own_mean)
        names["level_of_query"], names["inverse"], names["mean"] = (
            f"state[{names['base'] + i}]" for i in range(3)
        )
    else:
        names["own_numbers"] = ""
        names["level_of_query"], names["inverse"], names["mean"] = "saved.x", "saved.y", "saved.z"
        names["saved"] = _SAVED
        names["save"] = _SAVE.format(mean="task.means.data[row]" if divides else "0")
    names["of_candidate"] = "" if from_query else _OF_CANDIDATE
    names["add_share"] = _ADD_SHARE.format(**names) if from_query else ""
    names["write_share"] = _WRITE_SHARE if from_query else ""
    names["add_feature"] = _ADD_FEATURE if features else ""
    names["multiply"] = _MULTIPLY.format(**names) if positions else ""
    names["add_position"] = _ADD_POSITION.format(**names) if positions else ""
    names["seek"] = ""
    return names
