"""Matrix products with the precision of their operands, of rows that are found by number."""

import triton
import triton.language as tl

from pointproj.ops.backends.triton.tiles import INTERPRETED

_INTERPRETED = tl.constexpr(INTERPRETED)


def channel_block(channels: int) -> int:
    """How many channels a program holds: a power of two that wastes little."""
    if channels <= 16:
        return 16
    return 32 if channels <= 32 else 64


@triton.jit
def row_begin(row, channels):
    """Where rows of a matrix begin: the product of two numbers of 32 bits has 64."""
    if _INTERPRETED:
        begin = row.to(tl.int64) * channels
    else:
        width = tl.cast(channels, tl.int32)
        begin = tl.inline_asm_elementwise(
            "mul.wide.s32 $0, $1, $2;", "=l,r,r", [row, width], tl.int64, True, 1
        )
    return begin


@triton.jit
def load_rows(values, row, exists, begin, channels, BLOCK: tl.constexpr):
    """Some channels of the rows of a matrix."""
    channel = begin + tl.arange(0, BLOCK)
    at = values + row_begin(row, channels)[:, None] + channel[None, :]
    return tl.load(at, mask=exists[:, None] & (channel < channels)[None, :], other=0.0)


@triton.jit
def halves(x):
    """The closest number that a TF32 product takes whole, and what is left."""
    closest = ((x.to(tl.int32, bitcast=True) + 2**12) & -(2**13)).to(tl.float32, bitcast=True)
    return closest, x - closest


@triton.jit
def add_product(sums, left, right, SHORT: tl.constexpr = False):
    """Add a matrix product to sums; SHORT if TF32 has all digits of the right side."""
    if left.dtype == tl.float64:
        sums = tl.dot(left, right, sums, out_dtype=tl.float64)
    else:  # Tensor cores cut off what they add up, so small numbers come first and sums are added last.
        left, left_rest = halves(left)
        if SHORT:
            part = tl.dot(left_rest, right, input_precision="tf32")
        else:
            right, right_rest = halves(right)
            part = tl.dot(left_rest, right, input_precision="tf32")
            part = tl.dot(left, right_rest, part, input_precision="tf32")
        sums += tl.dot(left, right, part, input_precision="tf32")
    return sums
