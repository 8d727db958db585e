"""Operators made of Warp launches, for the tests of the bridge."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import warp as wp
from torch import Tensor

from pointproj.ops.bridge.warp_op import ADJOINT, Launch, warp_op

floats = wp.array(dtype=wp.float32)
doubles = wp.array(dtype=wp.float64)


@wp.kernel
def _rosenbrock(xy: wp.array(dtype=wp.vec2), a: float, b: float, z: floats):
    i = wp.tid()
    x, y = xy[i][0], xy[i][1]
    z[i] = (a - x) * (a - x) + b * (y - x * x) * (y - x * x)


@wp.kernel
def _square(x: wp.array2d(dtype=wp.float32), z: wp.array2d(dtype=wp.float32)):
    i, j = wp.tid()
    z[i, j] = x[i, j] * x[i, j]


@wp.kernel
def double_in_place(x: floats):
    i = wp.tid()
    x[i] = 2.0 * x[i]


@wp.kernel
def _add_up(x: floats, total: floats):
    wp.atomic_add(total, 0, wp.exp(x[wp.tid()]))


@wp.kernel
def _sum_and_product(x: floats, y: floats, total: floats, product: floats):
    i = wp.tid()
    total[i] = x[i] + y[i]
    product[i] = x[i] * y[i]


@wp.func
def _or_one(scale: doubles, i: int):
    s = wp.float64(1.0)
    if scale:
        s = scale[i]
    return s


@wp.func
def _or_zero(direction: doubles, i: int):
    d = wp.float64(0.0)
    if direction:
        d = direction[i]
    return d


@wp.kernel
def _cube(x: doubles, scale: doubles, z: doubles):
    i = wp.tid()
    z[i] = _or_one(scale, i) * x[i] * x[i] * x[i]


@wp.kernel
def _cube_backward(x: doubles, scale: doubles, grad: doubles, d_x: doubles, d_scale: doubles):
    i = wp.tid()
    if d_x:
        d_x[i] = wp.float64(3.0) * _or_one(scale, i) * x[i] * x[i] * grad[i]
    if d_scale:
        d_scale[i] = x[i] * x[i] * x[i] * grad[i]


@wp.kernel
def _cube_second(
    x: doubles,
    scale: doubles,
    grad: doubles,
    u: doubles,
    v: doubles,
    d_grad: doubles,
    d_x: doubles,
    d_scale: doubles,
):
    i = wp.tid()
    s, to_x, to_scale = _or_one(scale, i), _or_zero(u, i), _or_zero(v, i)
    three, six = wp.float64(3.0), wp.float64(6.0)
    d_grad[i] = three * s * x[i] * x[i] * to_x + x[i] * x[i] * x[i] * to_scale
    d_x[i] = grad[i] * (six * s * x[i] * to_x + three * x[i] * x[i] * to_scale)
    if d_scale:
        d_scale[i] = three * x[i] * x[i] * grad[i] * to_x


class Line(NamedTuple):
    """Fields of :class:`_LineStruct`."""

    slope: float
    offset: Tensor | None


@wp.struct
class _LineStruct:
    slope: float
    offset: floats


@wp.struct
class _NestedStruct:
    line: _LineStruct


class Nested(NamedTuple):
    """Fields of :class:`_NestedStruct`."""

    line: Line


@wp.kernel
def _on_line(x: floats, line: _LineStruct, nested: _NestedStruct, z: floats):
    i = wp.tid()
    z[i] = line.slope * x[i]
    if nested.line.offset:
        z[i] = z[i] + nested.line.offset[i]


def _on_line_backward(launch: Launch, **values: Any) -> None:
    line = Line(values["slope"], None)
    launch(_on_line, len(values["x"]), values["grad_z"], line, Nested(line), values["d_x"])


@warp_op(
    "pointproj_tests::on_line",
    outputs=lambda x, **_: {"z": (x.shape, x.dtype)},
    differentiable=["x"],
    backward=_on_line_backward,
)
def on_line(launch: Launch, x: Tensor, offset: Tensor | None, slope: float, *, z: Tensor) -> None:
    """Structs as arguments, one within the other, shared by two launches."""
    line = Line(slope, offset)
    nested = Nested(line)
    launch(_on_line, len(x), torch.zeros_like(x), line, nested, z)
    launch(_on_line, len(x), x, line, nested, z)


@warp_op(
    "pointproj_tests::rosenbrock",
    outputs=lambda xy, **_: {"z": (xy.shape[:1], xy.dtype)},
    differentiable=["xy"],
    backward=ADJOINT,
)
def rosenbrock(launch: Launch, xy: Tensor, a: float, b: float, *, z: Tensor) -> None:
    launch(_rosenbrock, len(xy), xy, a, b, z)


@warp_op(
    "pointproj_tests::square",
    outputs=lambda x: {"z": (x.shape, x.dtype)},
    differentiable=["x"],
    backward=ADJOINT,
)
def square(launch: Launch, x: Tensor, z: Tensor) -> None:
    launch(_square, x.shape, x, z)


@warp_op(
    "pointproj_tests::sum_exp_fourth_power",
    outputs=lambda x: {"total": ((1,), x.dtype)},
    differentiable=["x"],
    backward=ADJOINT,
)
def sum_exp_fourth_power(launch: Launch, x: Tensor, total: Tensor) -> None:
    """Three launches, two tensors in between, and an output that kernels add to."""
    squared, fourth = torch.empty_like(x), torch.empty_like(x)
    launch(_square, x.shape, x, squared)
    launch(_square, x.shape, squared, fourth)
    total.zero_()
    launch(_add_up, x.numel(), fourth.view(-1), total)


def _two_outputs(name: str, grad_outputs: int) -> Callable:
    @warp_op(
        f"pointproj_tests::{name}",
        outputs=lambda x, y: {"total": (x.shape, x.dtype), "product": (x.shape, x.dtype)},
        differentiable=["x", "y"],
        grad_outputs=grad_outputs,
        backward=ADJOINT,
    )
    def operator(launch: Launch, x: Tensor, y: Tensor, total: Tensor, product: Tensor) -> None:
        launch(_sum_and_product, len(x), x, y, total, product)

    return operator


both_differentiable = _two_outputs("both_differentiable", 2)
first_differentiable = _two_outputs("first_differentiable", 1)


def _fill_cube_gradient(launch, x, scale, grad_z, d_x, d_scale) -> None:
    launch(_cube_backward, len(x), x, scale, grad_z, d_x, d_scale)


def _fill_cube_second(launch, x, scale, grad_z, direction_x, direction_scale, d_grad_z, d_x, d_scale) -> None:
    launch(_cube_second, len(x), x, scale, grad_z, direction_x, direction_scale, d_grad_z, d_x, d_scale)


def _cube_operator(name: str, **derivatives: Callable) -> Callable:
    @warp_op(
        f"pointproj_tests::{name}",
        outputs=lambda x, scale: {"z": (x.shape, x.dtype)},
        differentiable=["x", "scale"],
        **derivatives,
    )
    def operator(launch: Launch, x: Tensor, scale: Tensor | None, z: Tensor) -> None:
        launch(_cube, len(x), x, scale, z)

    return operator


cube = _cube_operator("cube", backward=_fill_cube_gradient, second_backward=_fill_cube_second)
cube_once = _cube_operator("cube_once", backward=_fill_cube_gradient)
cube_never = _cube_operator("cube_never")


def some_points(device: str, count: int = 7) -> Tensor:
    return torch.linspace(-1.5, 2.0, 2 * count, device=device).view(count, 2).requires_grad_()


def in_torch(xy: Tensor, a: float, b: float) -> Tensor:
    x, y = xy.unbind(-1)
    return (a - x) ** 2 + b * (y - x * x) ** 2


def gradient_of(function: Callable, points: Tensor, *numbers: float) -> Tensor:
    """Gradient of a weighted sum of the values, by the points."""
    leaf = points.detach().requires_grad_()
    value = function(leaf, *numbers)
    weights = torch.arange(value.numel(), dtype=value.dtype, device=value.device).cos()
    value.backward(weights.view_as(value))
    return leaf.grad
