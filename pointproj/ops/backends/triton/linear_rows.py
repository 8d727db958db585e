"""Linear layers of rows, one kernel each way: bound by reading and writing the rows.

Rows that are not finite give NaN, and nothing to gradients of the layer: 0 times NaN is NaN. Places, which
may be none, have columns of their own, whose products are not rounded to TF32. A program of the backward
takes every so many tiles of rows, and has a part of the gradients of the layer for itself, so the same bits
come out each time.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pointproj.ops.backends.triton.arithmetic import load_points
from pointproj.ops.backends.triton.pairs import precision, shared_memory, width_of
from pointproj.ops.bridge.torch_op import signed
from pointproj.ops.bridge.triton_op import INTERPRETED, cdiv, launch, runs_kernels, triton_op
from pointproj.ops.specification.clouds import finite_rows
from pointproj.ops.specification.records import OptionalTensors, Saved, Tensors

# Products of more are for a library; exact ones, which are three of TF32, would not fit the registers.
MOST_CHANNELS, MOST_EXACT = 128, 32
LAUNCH = {"TILE": 64, "num_warps": 4, "num_stages": 2}
PROGRAMS = 264  # of the backward: two for each multiprocessor of an H200
DIFFERENTIABLE = ("rows", "weight", "bias", "places", "of_places")
PARAMETERS = dict.fromkeys((*DIFFERENTIABLE, "counts"), Tensor)
OF_PLACES = tl.constexpr(4)  # rows of a layer's gradients: the bias and three coordinates
_INTERPRETED = tl.constexpr(INTERPRETED)


def linear_of_rows(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    places: Tensor | None = None,
    of_places: Tensor | None = None,
    *,
    counts: Tensor | None = None,
) -> Tensor | None:
    """See :attr:`pointproj.ops.registry.Backend.linear_of_rows`."""
    if not runs_kernels(rows) or torch.is_autocast_enabled(rows.device.type):
        return None
    sizes = rows.shape[1], weight.shape[0]
    if places is None:
        places, of_places = rows.new_empty(rows.shape[0], 0), rows.new_empty(weight.shape[0], 0)
    if places.shape[1] not in (0, 3) or not _serves(rows, *map(width_of, sizes)):
        return None
    bias, counts = (rows.new_empty(0) if given is None else given for given in (bias, counts))
    return _linear(*(t.contiguous() for t in (rows, weight, bias, places, of_places, counts)))


def _serves(rows: Tensor, width: int, other: int) -> bool:
    """Whether a layer and two tiles of rows of both widths fit the shared memory of a multiprocessor."""
    is_exact = rows.dtype == torch.float64 or (rows.dtype == torch.float32 and precision() != "tf32")
    numbers = width * other + 2 * LAUNCH["TILE"] * (width + other)
    fits = numbers * max(4, rows.element_size()) <= shared_memory(rows)
    return fits and max(width, other) <= (MOST_EXACT if is_exact else MOST_CHANNELS)


def _outputs(*args: Any) -> tuple:
    inputs = dict(zip(PARAMETERS, args, strict=True))
    dtypes = (inputs[name].dtype for name in ("rows", "bias", "places"))
    dtype = functools.reduce(torch.promote_types, dtypes)
    return (((inputs["rows"].shape[0], inputs["weight"].shape[0]), dtype),)


def _forward(*args: Any) -> tuple[Tensor]:
    inputs = dict(zip(PARAMETERS, args, strict=True))
    ((shape, dtype),) = _outputs(*args)
    made = inputs["rows"].new_empty(shape, dtype=dtype)
    _launch(linear_kernel, cdiv(shape[0], LAUNCH["TILE"]), inputs, made)
    return (made,)


def _launch(kernel: Any, programs: int, inputs: dict[str, Any], *args: Any, **constants: Any) -> None:
    (count, n_in), n_out = inputs["rows"].shape, inputs["weight"].shape[0]
    widths = width_of(n_in), width_of(n_out)
    options = LAUNCH if widths[0] * widths[1] <= 64 * 64 else {**LAUNCH, "num_warps": 8}
    launch(
        kernel, (programs,), *(inputs[name] for name in PARAMETERS), *args, count, n_in,
        n_out, programs, BIAS=inputs["bias"].numel() > 0, COUNTED=inputs["counts"].numel() > 0,
        PLACES=inputs["places"].shape[1] > 0, ANY=n_in > 0, PRECISION=precision(),
        IN=widths[0], OUT=widths[1], **constants, **options,
    )  # fmt: skip


def _backward(grads: Tensors, needs: dict[str, bool], saved: Saved) -> OptionalTensors:
    """Gradients of all differentiable inputs, None where not needed."""
    inputs = saved.inputs
    (count, n_in), n_out = inputs["rows"].shape, inputs["weight"].shape[0]
    programs = torch.sym_min(PROGRAMS, cdiv(count, LAUNCH["TILE"]))
    made = {
        name: inputs[name].new_empty(inputs[name].shape if needs[name] else 0) for name in ("rows", "places")
    }
    dtype = torch.promote_types(inputs["rows"].dtype, torch.float32)
    of_layer = grads[0].new_empty(programs, n_in + OF_PLACES.value, n_out, dtype=dtype)
    _launch(
        linear_gradient_kernel, programs, inputs, *grads, *made.values(), of_layer,
        OF_ROWS=needs["rows"] and n_in > 0, OF_POINTS=needs["places"] and inputs["places"].shape[1] > 0,
        OF_LAYER=needs["weight"] or needs["bias"] or needs["of_places"],
    )  # fmt: skip
    total = of_layer.sum(0)
    of_layer = {"weight": total[:n_in].t(), "bias": total[n_in, : inputs["bias"].shape[0]]}
    of_layer["of_places"] = total[n_in + 1 :][: inputs["places"].shape[1]].t()
    contiguous = {"copy": True, "memory_format": torch.contiguous_format}
    made |= {name: part.to(inputs[name].dtype, **contiguous) for name, part in of_layer.items()}
    return tuple(made[name] if needs[name] else None for name in DIFFERENTIABLE)


def _second_backward(directions: Tensors, grads: Tensors, saved: Saved) -> Tensors:
    """Of ``<direction, gradient>``; these are g W of rows, g^T rows and g^T counts of the layer."""
    (grad,), inputs = grads, saved.inputs
    value = {name: inputs[name].to(grad.dtype) for name in DIFFERENTIABLE}
    by = {name: given.to(grad.dtype) for name, given in zip(DIFFERENTIABLE, directions, strict=True)}
    is_finite = finite_rows(value["rows"])[1] + finite_rows(value["places"])[1] == 0
    counts = inputs["counts"]
    of_grad = torch.zeros_like(grad)
    if inputs["bias"].numel():
        of_grad += (counts.to(grad.dtype) if counts.numel() else grad.new_ones(grad.shape[0]))[:, None] * by[
            "bias"
        ]
    made = {"bias": torch.zeros_like(value["bias"])}
    for rows, layer in (("rows", "weight"), ("places", "of_places")):
        by_rows = torch.where(is_finite, by[rows], 0.0)
        of_grad += by_rows @ value[layer].t() + torch.where(is_finite, value[rows], 0.0) @ by[layer].t()
        made[rows] = torch.where(is_finite, grad @ by[layer], 0.0)
        made[layer] = grad.t() @ by_rows
    return of_grad, *(made[name].to(inputs[name].dtype) for name in DIFFERENTIABLE)


@triton.jit
def block_of(rows, row, count, column, columns):
    """A block of a matrix (count, columns), zeros beyond it."""
    there = (row < count)[:, None] & (column < columns)[None, :]
    block = tl.load(rows + row[:, None] * columns + column[None, :], mask=there, other=0.0)
    return (
        block.to(tl.float32) if _INTERPRETED and block.dtype == tl.bfloat16 else block
    )  # the interpreter multiplies bits of bfloat16


@triton.jit
def scale_of(counts, row, count, real: tl.constexpr, COUNTED: tl.constexpr):
    """How often the bias counts."""
    scale = tl.full(row.shape, 1.0, real)
    if COUNTED:
        scale = tl.load(counts + row, mask=row < count, other=0.0)
    return scale


@triton.jit
def linear_kernel(
    rows, weight, bias, places, of_places, counts, made, count, n_in, n_out, programs,
    BIAS: tl.constexpr, COUNTED: tl.constexpr, PLACES: tl.constexpr, ANY: tl.constexpr,
    PRECISION: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """``rows @ weight.T + places @ of_places.T + counts * bias`` of a tile of rows."""
    real: tl.constexpr = tl.float64 if rows.dtype.element_ty == tl.float64 else tl.float32
    row = (tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)
    i, o = tl.arange(0, IN), tl.arange(0, OUT)
    inside = o < n_out
    total = tl.zeros([TILE, OUT], real)
    if ANY:
        values = block_of(rows, row, count, i, n_in)
        layer = tl.trans(block_of(weight, o, n_out, i, n_in))
        total = tl.dot(values, layer, input_precision=PRECISION, out_dtype=real)
        total += tl.sum(values.to(real) * 0.0, 1)[:, None]  # NaN if not finite
    if PLACES:
        x, y, z = load_points(places, row, row < count, 0.0)
        wx, wy, wz = load_points(of_places, o, inside, 0.0)
        total += ((x + y + z) * 0.0)[:, None] + x[:, None] * wx[None, :]
        total += y[:, None] * wy[None, :] + z[:, None] * wz[None, :]
    if BIAS:
        own = tl.load(bias + o, mask=inside, other=0.0).to(real)
        total += scale_of(counts, row, count, real, COUNTED)[:, None] * own[None, :]
    there = (row < count)[:, None] & inside[None, :]
    tl.store(made + row[:, None] * n_out + o[None, :], total, mask=there)


@triton.jit
def linear_gradient_kernel(
    rows, weight, bias, places, of_places, counts, grad, d_rows, d_places, d_layer,
    count, n_in, n_out, programs,
    OF_ROWS: tl.constexpr, OF_POINTS: tl.constexpr, OF_LAYER: tl.constexpr,
    BIAS: tl.constexpr, COUNTED: tl.constexpr, PLACES: tl.constexpr, ANY: tl.constexpr,
    PRECISION: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Gradients of rows and places, and a part of those of the layer (n_in + OF_PLACES, n_out)."""
    real: tl.constexpr = tl.float64 if rows.dtype.element_ty == tl.float64 else tl.float32
    i, o = tl.arange(0, IN), tl.arange(0, OUT)
    inside = o < n_out
    d_weight, d_bias = tl.zeros([IN, OUT], real), tl.zeros([OUT], real)
    dx, dy, dz = d_bias, d_bias, d_bias
    if OF_ROWS:
        layer = block_of(weight, o, n_out, i, n_in)
    if OF_POINTS:
        wx, wy, wz = load_points(of_places, o, inside, 0.0)
    for tile in range(tl.program_id(0), tl.cdiv(count, TILE), programs):
        row = (tile * TILE + tl.arange(0, TILE)).to(tl.int64)
        upstream = block_of(grad, row, count, o, n_out)
        exact = upstream.to(real)
        is_missing = tl.zeros([TILE], real)
        if ANY:
            values = block_of(rows, row, count, i, n_in)
            is_missing += tl.sum(values.to(real) * 0.0, 1)
            upstream = upstream.to(values.dtype)
        if PLACES:
            x, y, z = load_points(places, row, row < count, 0.0)
            is_missing += (x + y + z) * 0.0
        is_finite = is_missing == 0
        if OF_ROWS:
            own = tl.dot(upstream, layer, input_precision=PRECISION, out_dtype=real)
            there = (row < count)[:, None] & (i < n_in)[None, :]
            own = tl.where(is_finite[:, None], own, 0.0)
            tl.store(d_rows + row[:, None] * n_in + i[None, :], own, mask=there)
        if OF_POINTS:
            for column in tl.static_range(0, 3):
                of_column = wx if column == 0 else (wy if column == 1 else wz)
                own = tl.sum(exact * of_column[None, :], 1)
                tl.store(d_places + 3 * row + column, tl.where(is_finite, own, 0.0), mask=row < count)
        if OF_LAYER:
            if ANY:
                values = tl.where(is_finite[:, None], values, 0.0).to(values.dtype)
                turned = tl.trans(values)
                d_weight = tl.dot(turned, upstream, d_weight, input_precision=PRECISION, out_dtype=real)
            if BIAS:
                d_bias += tl.sum(exact * scale_of(counts, row, count, real, COUNTED)[:, None], 0)
            if PLACES:
                dx += tl.sum(exact * tl.where(is_finite, x, 0.0)[:, None], 0)
                dy += tl.sum(exact * tl.where(is_finite, y, 0.0)[:, None], 0)
                dz += tl.sum(exact * tl.where(is_finite, z, 0.0)[:, None], 0)
    if OF_LAYER:
        target = d_layer + tl.program_id(0) * (n_in + OF_PLACES) * n_out + o
        there = (i < n_in)[:, None] & inside[None, :]
        tl.store(target[None, :] + i[:, None] * n_out, d_weight, mask=there)
        target += n_in * n_out
        tl.store(target, d_bias, mask=inside)
        tl.store(target + n_out, dx, mask=inside)
        tl.store(target + 2 * n_out, dy, mask=inside)
        tl.store(target + 3 * n_out, dz, mask=inside)


_linear = triton_op(
    "pointproj::triton_linear_of_rows",
    signed(_forward, PARAMETERS, tuple[Tensor]),
    _outputs,
    differentiable=DIFFERENTIABLE,
    backward=_backward,
    second_backward=_second_backward,
)
