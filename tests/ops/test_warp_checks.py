"""What a launcher must not do is refused at its first call; what it may do has the right gradient."""

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
import warp as wp
from torch import Tensor

from pointproj.ops.bridge.warp_launch import Launch
from pointproj.ops.bridge.warp_op import ADJOINT, warp_op

floats = wp.array(dtype=float)
numbers = count()


@wp.kernel
def _square(x: floats, z: floats):
    i = wp.tid()
    z[i] = x[i] * x[i]


@wp.kernel
def _double(x: floats):
    i = wp.tid()
    x[i] = 2.0 * x[i]


@wp.kernel
def _times(x: wp.array(dtype=Any), factor: Any, z: wp.array(dtype=Any)):
    i = wp.tid()
    z[i] = x[i] * type(x[i])(factor)


@wp.kernel
def _squared_norm(x: wp.array(dtype=wp.types.vector(length=Any, dtype=wp.Float)), z: wp.array(dtype=Any)):
    i = wp.tid()
    z[i] = wp.dot(x[i], x[i])


@wp.struct
class _TableStruct:
    table: floats


@wp.kernel
def _from_table(fields: _TableStruct, z: floats):
    i = wp.tid()
    z[i] = fields.table[i]


class _Table:
    def __init__(self, table: Tensor):
        self.table = table


@wp.kernel
def sum_of_near(grid: wp.uint64, x: wp.array(dtype=wp.vec3), z: floats):
    """Each point's sum of the x coordinates of those within 0.5."""
    i = wp.tid()
    for j in wp.hash_grid_query(grid, x[i], 0.5):
        if wp.length(x[i] - x[j]) <= 0.5:
            z[i] += x[j][0]


def _operator(launcher: Callable, **options: Any) -> Callable:
    given = {
        "outputs": lambda x, **_: {"z": (x.shape[:1], x.dtype)},
        "differentiable": ["x"],
        "backward": ADJOINT,
    }
    return warp_op(f"pointproj_tests::checked_{next(numbers)}", **given | options)(launcher)


def by_wp_launch(launch: Launch, x: Tensor, *, z: Tensor) -> None:
    wp.launch(_square, len(x), inputs=[wp.from_torch(x)], outputs=[wp.from_torch(z)])


def in_a_function(launch: Launch, x: Tensor, *, z: Tensor) -> None:
    by_wp_launch(launch, x, z=z)


def torch_before(launch: Launch, x: Tensor, *, z: Tensor) -> None:
    launch(_square, len(x), x.sin(), z)


def torch_after(launch: Launch, x: Tensor, *, z: Tensor) -> None:
    launch(_square, len(x), x, z)
    z.add_(1.0)


def torch_into_output(launch: Launch, x: Tensor, *, z: Tensor) -> None:
    squared = torch.empty_like(x)
    launch(_square, len(x), x, squared)
    torch.cumsum(squared, 0, out=z)


def a_copy(launch: Launch, x: Tensor, *, z: Tensor) -> None:
    launch(_square, len(x), x.flip(0).contiguous(), z)


def a_field(launch: Launch, x: Tensor, *, z: Tensor) -> None:
    launch(_from_table, len(x), _Table(x), z)


def into_input(launch: Launch, x: Tensor, *, z: Tensor) -> None:
    launch(_double, len(x), x)
    launch(_square, len(x), x, z)


@pytest.mark.parametrize(
    ("launcher", "error"),
    [
        (by_wp_launch, r"write launch\(_square, \(5,\), x, z\)"),
        (in_a_function, r"write launch\(_square, \(5,\), x, z\)"),
        (torch_before, "argument 'x' of _square has a value that torch computed"),
        (torch_after, "torch's add_ has a value that torch computed"),
        (torch_into_output, "torch's cumsum has a value that torch computed"),
        (a_copy, "argument 'x' of _square has a value that torch computed"),
        (a_field, "make 'table' an argument of _from_table"),
        (into_input, r'write mutates_args=\["x"\]'),
    ],
)
def test_refused(launcher: Callable, error: str, device: str):
    operator = _operator(launcher)
    for _ in range(2):  # a call that was refused is refused again
        with pytest.raises(TypeError, match=rf"{launcher.__name__ and 'checked_'}.*{error}"):
            operator(torch.ones(5, device=device))


def test_torch_between_launches_where_it_has_no_gradient(device: str):
    """Work on other inputs, indices, and fills."""

    def launcher(launch: Launch, x: Tensor, scale: Tensor, *, z: Tensor) -> None:
        scaled, order = torch.zeros_like(x), x.argsort()
        z.fill_(order.numel())
        launch(_square, len(x), x, scaled)
        launch(_times, len(x), scaled, float((2 * scale).item()), z)

    x = torch.arange(5.0, device=device, requires_grad=True)
    z = _operator(launcher)(x, torch.tensor(1.5))
    (d_x,) = torch.autograd.grad(z.sum(), x)
    assert d_x.tolist() == [6.0 * i for i in range(5)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [2, 5])
def test_generic_kernels(width: int, dtype: torch.dtype, device: str):
    def launcher(launch: Launch, x: Tensor, *, z: Tensor) -> None:
        launch(_squared_norm, len(x), x, z)

    x = torch.rand(3, width, dtype=dtype, device=device, requires_grad=True)
    z = _operator(launcher)(x)
    torch.testing.assert_close(z, x.square().sum(1))
    torch.testing.assert_close(torch.autograd.grad(z.sum(), x)[0], 2 * x.detach())
    with pytest.raises(TypeError, match="_times: x is of any dtype"):
        Launch(x.device)(_times, 3, None, 1.0, z)


def test_defaults_of_the_launcher(device: str):
    def launcher(launch: Launch, x: Tensor, factor: float = 3.0, *, z: Tensor) -> None:
        launch(_times, len(x), x, factor, z)

    operator, x = _operator(launcher), torch.ones(2, device=device, requires_grad=True)
    compiled = torch.compile(operator, fullgraph=True, backend="aot_eager")
    for call in (operator, compiled):
        assert call(x).tolist() == [3.0, 3.0]
        assert call(x, factor=2.0).tolist() == [2.0, 2.0]
        assert torch.autograd.grad(call(x).sum(), x)[0].tolist() == [3.0, 3.0]
    torch.library.opcheck(operator, (x,))
    with pytest.raises(TypeError, match=r"missing are the arguments \['x'\]"):
        operator(factor=1.0)
    with pytest.raises(TypeError, match=r"unknown are \['other'\]"):
        operator(x, other=1.0)


@pytest.mark.parametrize("outputs", [{}, {"z": ((5,), torch.float32)}])
def test_declared_mutation(outputs: dict, device: str):
    def without(launch: Launch, x: Tensor) -> None:
        launch(_double, len(x), x)

    def with_one(launch: Launch, x: Tensor, *, z: Tensor) -> None:
        into_input(launch, x, z=z)

    launcher = with_one if outputs else without
    given = {"outputs": lambda x, **_: outputs, "mutates_args": ["x"]}
    operator = _operator(launcher, **given, differentiable=(), backward=None)
    compiled = torch.compile(lambda x: (operator(x), x + 1), fullgraph=True, backend="aot_eager")
    x = torch.ones(5, device=device)
    assert (operator(x) is None) == (not outputs)
    assert x.tolist() == [2.0] * 5
    made, following = compiled(x)
    assert (x.tolist(), following.tolist()) == ([4.0] * 5, [5.0] * 5)
    assert made is None or made.tolist() == [16.0] * 5
    torch.library.opcheck(operator, (x,))
    with pytest.raises(TypeError, match="differentiates no operator that writes to its inputs"):
        _operator(launcher, **given)


def test_forward_mode_names_what_is_missing(device: str):
    def launcher(launch: Launch, x: Tensor, *, z: Tensor) -> None:
        launch(_square, len(x), x, z)

    x = torch.ones(3, device=device)
    with pytest.raises(NotImplementedError, match=r"without a second backward.*\(jvp.*second_backward="):
        torch.func.jvp(_operator(launcher), (x,), (x,))


@pytest.mark.parametrize("itself", [True, False])
def test_a_grid_made_by_the_launcher(itself: bool):
    def launcher(launch: Launch, x: Tensor, *, z: Tensor) -> None:
        grid = wp.HashGrid(8, 8, 8, device="cpu")
        grid.build(wp.from_torch(x, dtype=wp.vec3), 0.5)
        z.zero_()
        launch(sum_of_near, len(x), grid if itself else grid.id, x, z)

    x = torch.rand(40, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    operator = _operator(launcher)
    if not itself:
        with pytest.raises(TypeError, match=r"gone before the adjoint .*\.\.\., grid, \.\.\.\) in place of"):
            operator(x)
        return
    near = ((x[:, None] - x).norm(dim=2) <= 0.5).float()
    z = operator(x)
    torch.testing.assert_close(z, near @ x[:, 0])
    (d_x,) = torch.autograd.grad(z.sum(), x)
    torch.testing.assert_close(d_x[:, 0], near.sum(0))
    assert not d_x[:, 1:].any()
