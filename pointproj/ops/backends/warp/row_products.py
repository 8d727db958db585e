"""Products of a point's own row with those of its neighbours, by the lanes of a point on a GPU.

The lanes stand side by side over the channels, so that a row is read as whole lines of the cache. A few rows
are read at once, and sums over the lanes leave each with the product of one neighbour: a lane that multiplied
a row alone would read it from as many lines as there are lanes. The same pass adds up the rows times their
weights, or adds the own row times the weights to rows of the neighbours.
"""

import functools
from typing import Any, NamedTuple

import torch
import warp as wp

from pointproj.ops.backends.warp.common import REALS
from pointproj.ops.backends.warp.queue import Division, names_of

ROWS = 8  # on their way at once


class RowProducts(NamedTuple):
    """Functions that all threads of a GPU warp call together."""

    Sums: Any  # of a lane's channels, then the product
    product: wp.Function  # (values, row, others, other row), rounded alike; others may be narrower
    # (sums, own values, own row, values, weight, row, output) -> sums and the product with row ``row`` of
    # values, -1 for none; ``lanes / ROWS`` lanes side by side bring the same one.
    add_rows: wp.Function
    write: wp.Function  # (sums, output, row)


_CHANNELS = """
    struct alignas({together} * sizeof({real})) Some {{ {real} x[{together}]; }};
    constexpr int parts = {channels} / {together}, at_once = {channels} * {count};
    const int lane = threadIdx.x & {last}, columns = values.shape[1];
    const auto load = [&](const auto& matrix, int row, int begin, int part) {{
        const int channel = begin + (part * {count} + lane) * {together};
        Some some = {{}};
        if (row >= 0 && channel < columns) {{
            some = *reinterpret_cast<const Some*>(matrix.data + static_cast<size_t>(row) * columns + channel);
        }}
        return some;
    }};
"""
_PRODUCT = """
    {real} product = 0;
    for (int begin = 0; begin < columns; begin += at_once) {{
        #pragma unroll
        for (int part = 0; part < parts; ++part) {{
            const Some some = load(values, row, begin, part);
            #pragma unroll
            for (int i = 0; i < {together}; ++i) {{
                const int channel = begin + (part * {count} + lane) * {together} + i, width = others.shape[1];
                const size_t at = static_cast<size_t>(other_row) * width + channel;
                product = fma(some.x[i], channel < width ? others.data[at] : 0, product);
            }}
        }}
    }}
    #pragma unroll
    for (int step = {count} / 2; step > 0; step >>= 1) product += __shfl_xor_sync(0xffffffffu, product, step);
    return product;
"""
_ADD_ROWS = """
    {real} products[{rows}] = {{}};
    for (int begin = 0; begin < columns; begin += at_once) {{
        Some own[parts];
        #pragma unroll
        for (int part = 0; part < parts; ++part) own[part] = load(own_values, own_row, begin, part);
        #pragma unroll
        for (int j = 0; j < {rows}; ++j) {{
            const int source = j * ({count} / {rows});
            const int from = __shfl_sync(0xffffffffu, row, source, {count});
            const {real} factor = __shfl_sync(0xffffffffu, weight, source, {count});
            #pragma unroll
            for (int part = 0; part < parts; ++part) {{
                const Some some = load(values, from, begin, part);
                #pragma unroll
                for (int i = 0; i < {together}; ++i) {{
                    products[j] = fma(own[part].x[i], some.x[i], products[j]);
                    {add}
                }}
            }}
        }}
    }}
    int step = {count} / 2;
    #pragma unroll
    for (int half = {rows} / 2; half > 0; half >>= 1) {{
        const bool upper = (lane & step) != 0;
        #pragma unroll
        for (int j = 0; j < half; ++j) {{
            const {real} given = upper ? products[j] : products[j + half];
            const {real} kept = upper ? products[j + half] : products[j];
            products[j] = kept + __shfl_xor_sync(0xffffffffu, given, step);
        }}
        step >>= 1;
    }}
    #pragma unroll
    for (; step > 0; step >>= 1) products[0] += __shfl_xor_sync(0xffffffffu, products[0], step);
    sums[{channels}] = products[0];
    return sums;
"""
_WRITE = """
    const int lane = threadIdx.x & {last}, columns = output.shape[1];
    #pragma unroll
    for (int i = 0; i < {channels}; ++i) {{
        const int channel = (i / {together} * {count} + lane) * {together} + i % {together};
        if (channel < columns) output.data[static_cast<size_t>(row) * columns + channel] = sums[i];
    }}
"""
_ADDING = {
    "": "",
    "sums": "sums[part * {together} + i] = fma(factor, some.x[i], sums[part * {together} + i]);",
    "output": """
                    const int channel = begin + (part * {count} + lane) * {together} + i;
                    if (from >= 0 && channel < columns) {{
                        atomicAdd(output.data + static_cast<size_t>(from) * columns + channel,
                                  factor * own[part].x[i]);
                    }}""",
}


@functools.cache
def row_products(sums: torch.dtype, division: Division, into: str) -> RowProducts:
    """For sums in one dtype.

    ``into`` says where weighted rows are added: to the lane's ``"sums"``, of no more channels than the lanes
    have at once; by atomics to ``"output"``, which else nobody reads; or nowhere, ``""``.
    """
    real, _ = REALS[sums]
    matrix = wp.array2d(dtype=real)
    Sums = wp.types.vector(length=division.channels + 1, dtype=real)
    names = {**names_of(sums, division), "rows": ROWS}
    names["add"] = _ADDING[into].format(**names)

    @wp.func_native((_CHANNELS + _PRODUCT).format(**names))
    def product(values: matrix, row: int, others: matrix, other_row: int) -> real: ...

    @wp.func_native((_CHANNELS + _ADD_ROWS).format(**names))
    def add_rows(
        sums: Sums, own_values: matrix, own_row: int, values: matrix, weight: real, row: int, output: matrix
    ) -> Sums: ...

    @wp.func_native(_WRITE.format(**names))
    def write(sums: Sums, output: matrix, row: int): ...

    return RowProducts(Sums, product, add_rows, write)
