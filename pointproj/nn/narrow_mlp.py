"""Three narrow linear layers with ReLU between them: one kernel forward, two backward.

Layers of 25 channels on 100,000 points are too narrow for the matrix products of a library. Each of its
products reads and writes activations, and the slowest is the gradient of a weight, a product of (25, 100,000)
and (100,000, 25). Here a tile of rows passes through all layers in one kernel. Hidden activations are not
stored; the backward computes them again. Gradients of the parameters are summed tile by tile in a fixed
order, without atomics.

Each product is computed as three TF32 products, with numbers split into two halves of 11 bits. Its error is
close to that of fp32.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from pointproj.ops.bridge.torch_op import signed
from pointproj.ops.bridge.triton_op import cdiv, launch, runs_kernels, triton_op
from pointproj.ops.specification.records import OptionalTensors, Saved, Tensors

TILE = 64  # rows that pass through the layers together
# For the backward. With more rows there are too few registers.
BACKWARD_TILE, BACKWARD_WARPS = 32, 2
PROGRAMS = 512  # each writes a partial sum of every gradient; more would write too many

PARAMETERS = ("weight_1", "bias_1", "weight_2", "bias_2", "weight_3", "bias_3")


def _forward(rows: Tensor, *parameters: Tensor) -> tuple[Tensor]:
    if not runs_kernels(rows):
        return (torch.addmm(parameters[5], _hidden(rows, *parameters)[1], parameters[4].T),)
    count = rows.shape[0]
    result = rows.new_empty(count, parameters[4].shape[0])
    launch(forward_kernel, (cdiv(count, TILE),), rows, *parameters, result, count, *_widths(parameters), TILE)
    return (result,)


signed(_forward, dict.fromkeys(("rows", *PARAMETERS), Tensor), tuple[Tensor])


def _backward(grads: Tensors, needs: dict[str, bool], saved: Saved) -> OptionalTensors:
    rows, *parameters = saved.inputs.values()
    grad = grads[0]
    if not runs_kernels(rows):
        return _gradients(grad, rows, *parameters)
    count = rows.shape[0]
    d_rows = torch.empty_like(rows) if needs["rows"] else rows.new_empty(0)
    partial = rows.new_empty(PROGRAMS, sum(p.numel() for p in parameters))
    widths = _widths(parameters)
    tensors = rows, *parameters, grad, d_rows, partial
    ones = widths[0] < widths[3] and widths[1] < widths[4]
    settings = *widths, needs["rows"], ones, PROGRAMS, BACKWARD_TILE
    launch(backward_kernel, (PROGRAMS,), *tensors, count, *settings, num_warps=BACKWARD_WARPS)
    sums = torch.split_with_sizes_copy(partial.sum(0), [p.numel() for p in parameters])
    gradients = (part.view_as(p) for part, p in zip(sums, parameters, strict=True))
    return d_rows if needs["rows"] else None, *gradients


def _second_backward(directions: Tensors, grads: Tensors, saved: Saved) -> Tensors:
    def along(grad: Tensor, *inputs: Tensor) -> Tensor:
        gradients = _gradients(grad, *inputs)
        return sum((one * other).sum() for one, other in zip(directions, gradients, strict=True))

    inputs = grads[0], *saved.inputs.values()
    return torch.func.grad(along, argnums=tuple(range(len(inputs))))(*inputs)


def _widths(parameters: Sequence[Tensor]) -> tuple[int, ...]:
    """Return the widths in, hidden and out, then each rounded up to a power of two, at least 16 (tl.dot)."""
    widths = parameters[0].shape[1], parameters[2].shape[0], parameters[4].shape[0]
    return *widths, *(max(16, triton.next_power_of_2(width)) for width in widths)


def _hidden(rows: Tensor, *parameters: Tensor) -> tuple[Tensor, Tensor]:
    weight_1, bias_1, weight_2, bias_2, *_ = parameters
    hidden_1 = torch.addmm(bias_1, rows, weight_1.T).relu()
    return hidden_1, torch.addmm(bias_2, hidden_1, weight_2.T).relu()


def _gradients(grad: Tensor, rows: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
    """Of the rows and of each parameter. (torch.func.vjp would import the compiler.)"""
    hidden_1, hidden_2 = _hidden(rows, *parameters)
    grad_2 = torch.where(hidden_2 <= 0, 0.0, grad @ parameters[4])
    grad_1 = torch.where(hidden_1 <= 0, 0.0, grad_2 @ parameters[2])
    layers = (grad_1, rows), (grad_2, hidden_1), (grad, hidden_2)
    of_parameters = (part for upstream, seen in layers for part in (upstream.T @ seen, upstream.sum(0)))
    return grad_1 @ parameters[0], *of_parameters


@triton.jit
def product(a, b):
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def relu(x):
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def table(start, rows, columns, stride_row, stride_column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Load a matrix, padded with zeros."""
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < columns)
    return tl.load(start + row * stride_row + column * stride_column, mask=inside, other=0.0)


@triton.jit
def tile_of(start, first, count, channels, TILE: tl.constexpr, CHANNELS: tl.constexpr):
    """Load the rows of a tile, padded with zeros; return them, their offsets, and a mask of the entries."""
    row = (first + tl.arange(0, TILE)).to(tl.int64)[:, None]
    channel = tl.arange(0, CHANNELS)[None, :]
    inside = (row < count) & (channel < channels)
    at = row * channels + channel
    return tl.load(start + at, mask=inside, other=0.0), at, inside


@triton.jit
def row_of(bias, channels, CHANNELS: tl.constexpr):
    channel = tl.arange(0, CHANNELS)
    return tl.load(bias + channel, mask=channel < channels, other=0.0)[None, :]


@triton.jit
def layer(x, weight, bias, ins, outs, INS: tl.constexpr, OUTS: tl.constexpr):
    return product(x, table(weight, ins, outs, 1, ins, INS, OUTS)) + row_of(bias, outs, OUTS)


@triton.jit
def forward_kernel(
    rows, weight_1, bias_1, weight_2, bias_2, weight_3, bias_3, result, count, ins, hidden, outs,
    INS: tl.constexpr, HIDDEN: tl.constexpr, OUTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Apply all layers to a tile of rows."""
    first = tl.program_id(0) * TILE
    x, _, _ = tile_of(rows, first, count, ins, TILE, INS)
    hidden_1 = relu(layer(x, weight_1, bias_1, ins, hidden, INS, HIDDEN))
    hidden_2 = relu(layer(hidden_1, weight_2, bias_2, hidden, hidden, HIDDEN, HIDDEN))
    y = layer(hidden_2, weight_3, bias_3, hidden, outs, HIDDEN, OUTS)
    row = (first + tl.arange(0, TILE)).to(tl.int64)[:, None]
    channel = tl.arange(0, OUTS)[None, :]
    tl.store(result + row * outs + channel, y, mask=(row < count) & (channel < outs))


@triton.jit
def ones_at(x, at, CHANNELS: tl.constexpr):
    """Set column ``at`` of ``x``, which holds no channel, to 1: its product is the gradient of the bias."""
    return tl.where(tl.arange(0, CHANNELS)[None, :] == at, 1.0, x)


@triton.jit
def store_partial(
    partial, sums, bias_sums, outs, ins, OUTS: tl.constexpr, INS: tl.constexpr, ONES: tl.constexpr
):
    """Store the partial gradients of one layer: that of its weight, then that of its bias."""
    out, column = tl.arange(0, OUTS)[:, None], tl.arange(0, INS)[None, :]
    tl.store(partial + out * ins + column, sums, mask=(out < outs) & (column < ins))
    if ONES:
        tl.store(partial + outs * ins + out + column * 0, sums, mask=(out < outs) & (column == ins))
    else:
        tl.store(partial + outs * ins + tl.arange(0, OUTS), bias_sums, mask=tl.arange(0, OUTS) < outs)


@triton.jit
def backward_kernel(
    rows, weight_1, bias_1, weight_2, bias_2, weight_3, bias_3, grad, d_rows, partial, count,
    ins, hidden, outs, INS: tl.constexpr, HIDDEN: tl.constexpr, OUTS: tl.constexpr,
    NEEDS_ROWS: tl.constexpr, ONES: tl.constexpr, PROGRAMS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of rows, and those of the parameters summed over every ``PROGRAMS``-th tile.

    With ``ONES`` there is a column beyond the channels, which is set to 1, so that the products give the
    gradients of the biases too. Without it they are sums over the rows of each tile, which is slower.
    """
    program = tl.program_id(0)
    sums_1 = tl.zeros([HIDDEN, INS], tl.float32)
    sums_2 = tl.zeros([HIDDEN, HIDDEN], tl.float32)
    sums_3 = tl.zeros([OUTS, HIDDEN], tl.float32)
    bias_sums_1 = tl.zeros([HIDDEN], tl.float32)
    bias_sums_2 = tl.zeros([HIDDEN], tl.float32)
    bias_sums_3 = tl.zeros([OUTS], tl.float32)
    into_1 = table(weight_1, ins, hidden, 1, ins, INS, HIDDEN)
    into_2 = table(weight_2, hidden, hidden, 1, hidden, HIDDEN, HIDDEN)
    back_1 = table(weight_1, hidden, ins, ins, 1, HIDDEN, INS)
    back_2 = table(weight_2, hidden, hidden, hidden, 1, HIDDEN, HIDDEN)
    back_3 = table(weight_3, outs, hidden, hidden, 1, OUTS, HIDDEN)
    for tile in tl.range(program, tl.cdiv(count, TILE), PROGRAMS, num_stages=1):
        x, at, inside = tile_of(rows, tile * TILE, count, ins, TILE, INS)
        hidden_1 = relu(product(x, into_1) + row_of(bias_1, hidden, HIDDEN))
        hidden_2 = relu(product(hidden_1, into_2) + row_of(bias_2, hidden, HIDDEN))
        upstream, _, _ = tile_of(grad, tile * TILE, count, outs, TILE, OUTS)
        grad_2 = product(upstream, back_3)
        if ONES:
            sums_3 += product(tl.trans(upstream), ones_at(hidden_2, hidden, HIDDEN))
        else:
            sums_3 += product(tl.trans(upstream), hidden_2)
            bias_sums_3 += tl.sum(upstream, 0)
        grad_2 = tl.where(hidden_2 <= 0, 0.0, grad_2)
        grad_1 = tl.where(hidden_1 <= 0, 0.0, product(grad_2, back_2))
        if NEEDS_ROWS:
            tl.store(d_rows + at, product(grad_1, back_1), mask=inside)
        if ONES:
            sums_1 += product(tl.trans(grad_1), ones_at(x, ins, INS))
            sums_2 += product(tl.trans(grad_2), ones_at(hidden_1, hidden, HIDDEN))
        else:
            sums_1 += product(tl.trans(grad_1), x)
            sums_2 += product(tl.trans(grad_2), hidden_1)
            bias_sums_1 += tl.sum(grad_1, 0)
            bias_sums_2 += tl.sum(grad_2, 0)
    # Offsets are computed here. If a helper returned them, torch would assume that it writes to all tensors.
    second = hidden * (ins + 1)
    third = second + hidden * (hidden + 1)
    mine = partial + program * (third + outs * (hidden + 1))
    store_partial(mine, sums_1, bias_sums_1, hidden, ins, HIDDEN, INS, ONES)
    store_partial(mine + second, sums_2, bias_sums_2, hidden, hidden, HIDDEN, HIDDEN, ONES)
    store_partial(mine + third, sums_3, bias_sums_3, outs, hidden, OUTS, HIDDEN, ONES)


narrow_mlp = triton_op(
    "pointproj::narrow_mlp",
    _forward,
    lambda rows, *parameters: (((rows.shape[0], parameters[-1].shape[0]), rows.dtype),),
    differentiable=("rows", *PARAMETERS),
    backward=_backward,
    second_backward=_second_backward,
)
"""``narrow_mlp(rows, weight_1, bias_1, ..., bias_3)``: three linear layers with ReLU between them.

``rows`` are (R, in), weights (out, in), biases (out,) and the result (R, out). All are contiguous and fp32.
No width exceeds 32.
"""
