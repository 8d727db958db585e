"""Warp launches as torch operators: values, derivatives, compilation."""

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import gradcheck, gradgradcheck
from torch.fx.experimental.proxy_tensor import make_fx

import pointproj
from pointproj.ops.bridge.warp_op import Launch, warp_op
from tests.ops.warp_operators import (
    both_differentiable,
    cube,
    cube_never,
    cube_once,
    first_differentiable,
    gradient_of,
    in_torch,
    on_line,
    rosenbrock,
    some_points,
    square,
    sum_exp_fourth_power,
)
from tests.oracle import INPUTS, assert_close


def test_values_and_gradient_through_warps_reverse_mode(device: str):
    xy = torch.tensor([[-1.0, 2.0], [1.0, 1.0], [0.0, 0.5]], device=device, requires_grad=True)
    z = rosenbrock(xy, 1.0, 100.0)
    torch.testing.assert_close(z.cpu(), torch.tensor([104.0, 0.0, 26.0]))
    z.sum().backward()
    torch.testing.assert_close(xy.grad.cpu(), torch.tensor([[396.0, 200.0], [0.0, 0.0], [-2.0, 100.0]]))


def test_intermediate_tensors_and_outputs_that_accumulate(device: str):
    x = torch.linspace(-1, 1, 6, device=device).view(2, 3).requires_grad_()
    for _ in range(2):  # what one run leaves must not enter the next
        total = sum_exp_fourth_power(x)
        torch.testing.assert_close(total, (x**4).exp().sum()[None])
        (d_x,) = torch.autograd.grad(total, x)
        torch.testing.assert_close(d_x, (4 * x**3 * (x**4).exp()).detach())


def test_several_outputs(device: str):
    x = torch.tensor([1.0, -2.0], device=device, requires_grad=True)
    y = torch.tensor([3.0, 5.0], device=device, requires_grad=True)
    total, product = both_differentiable(x, y)
    assert (total.tolist(), product.tolist()) == ([4.0, 3.0], [3.0, -10.0])
    d_x, d_y = torch.autograd.grad((2 * total + 10 * product).sum(), (x, y))
    assert (d_x.tolist(), d_y.tolist()) == ([32.0, 52.0], [12.0, -18.0])
    (d_x,) = torch.autograd.grad(both_differentiable(x, y)[1].sum(), x)  # the other one is not used
    assert d_x.tolist() == [3.0, 5.0]


def test_inputs_that_share_memory(device: str):
    """Each has a gradient of its own, and an expanded one a gradient for each of its entries."""
    x = torch.tensor([1.0, -2.0], device=device, requires_grad=True)
    (d_x,) = torch.autograd.grad(both_differentiable(x, x)[1].sum(), x)
    assert d_x.tolist() == [2.0, -4.0]
    (d_x,) = torch.autograd.grad(both_differentiable(x[:1], x[1:])[1].sum(), x)
    assert d_x.tolist() == [-2.0, 1.0]
    (d_x,) = torch.autograd.grad(both_differentiable(x[:1].expand(3), x[1:].expand(3))[1].sum(), x)
    assert d_x.tolist() == [-6.0, 3.0]


def test_outputs_without_gradient(device: str):
    x, y = (torch.ones(2, device=device, requires_grad=True) for _ in range(2))
    total, product = first_differentiable(x, y)
    assert total.requires_grad
    assert not product.requires_grad
    (d_x,) = torch.autograd.grad(total.sum(), x)
    assert d_x.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("with_scale", [True, False])
def test_optional_tensors_and_both_derivatives(with_scale: bool, device: str):
    x = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64, device=device, requires_grad=True)
    scale = torch.tensor([3.0, 0.0, -1.0], dtype=torch.float64, device=device, requires_grad=True)
    inputs = (x, scale) if with_scale else (x,)

    def function(x: Tensor, scale: Tensor | None = None) -> Tensor:
        return cube(x, scale)

    expected = x**3 * scale if with_scale else x**3
    torch.testing.assert_close(function(*inputs), expected)
    assert gradcheck(function, inputs)
    assert gradgradcheck(function, inputs)


@pytest.mark.parametrize("with_offset", [True, False])
def test_structs_and_arguments_by_name(with_offset: bool, device: str):
    x = torch.tensor([0.5, -1.0], device=device, requires_grad=True)
    offset = torch.tensor([1.0, 2.0], device=device) if with_offset else None
    z = on_line(x, offset, 3.0)
    assert z.tolist() == ([2.5, -1.0] if with_offset else [1.5, -3.0])
    (d_x,) = torch.autograd.grad(z, x, torch.tensor([1.0, 10.0], device=device))
    assert d_x.tolist() == [3.0, 30.0]
    torch.library.opcheck(on_line, (x, offset, 3.0))


def test_only_the_gradients_asked_for(device: str):
    x = torch.tensor([0.5, -1.0], dtype=torch.float64, device=device)
    scale = torch.tensor([3.0, 4.0], dtype=torch.float64, device=device, requires_grad=True)
    (d_scale,) = torch.autograd.grad(cube_once(x, scale).sum(), scale)
    assert d_scale.tolist() == [0.125, -1.0]


def test_create_graph_without_second_backward_says_so(device: str):
    x = torch.tensor([0.5], dtype=torch.float64, device=device, requires_grad=True)
    (d_x,) = torch.autograd.grad(cube_once(x, None).sum(), x, create_graph=True)
    assert d_x.tolist() == [0.75]  # the gradient itself is fine: only differentiating it is not
    with pytest.raises(NotImplementedError, match=r"pointproj_tests::cube_once .*without a second backward"):
        d_x.sum().backward()


def test_backward_of_what_has_none_says_so(device: str):
    x = torch.tensor([0.5], dtype=torch.float64, device=device, requires_grad=True)
    with pytest.raises(NotImplementedError, match="pointproj_tests::cube_never was declared without a back"):
        cube_never(x, None).sum().backward()


def test_third_derivative_says_so(device: str):
    x = torch.tensor([0.5], dtype=torch.float64, device=device, requires_grad=True)
    (d_x,) = torch.autograd.grad(cube(x, None).sum(), x, create_graph=True)
    (dd_x,) = torch.autograd.grad(d_x.sum(), x, create_graph=True)
    assert dd_x.tolist() == [3.0]
    with pytest.raises(NotImplementedError, match="pointproj_tests::cube has no third derivative"):
        dd_x.sum().backward()


def test_opcheck(device: str):
    torch.library.opcheck(rosenbrock, (some_points(device), 1.0, 2.0))
    x, scale = (torch.rand(4, dtype=torch.float64, device=device, requires_grad=True) for _ in range(2))
    torch.library.opcheck(cube, (x, scale))
    torch.library.opcheck(cube, (x, None))
    y = torch.rand(4, device=device, requires_grad=True)
    torch.library.opcheck(both_differentiable, (y, y.detach()))


def test_one_compilation_for_all_sizes_and_numbers(device: str):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(rosenbrock, fullgraph=True, dynamic=True, backend=counter)
    compilations = []
    for count, b in ((5, 100.0), (9, 50.0), (17, 25.0), (18, 12.5)):
        xy = some_points(device, count)
        expected = gradient_of(in_torch, xy, 1.0, b)
        torch.testing.assert_close(gradient_of(compiled, xy, 1.0, b), expected)
        compilations.append(counter.frame_count)
    assert compilations[1:] == [compilations[1]] * 3


def test_compiled_with_other_strides(device: str):
    """The gradient is laid out as torch.compile was told it would be."""
    torch._dynamo.reset()
    x = torch.linspace(-1, 1, 15, device=device).view(3, 5).T.requires_grad_()
    d_x = gradient_of(torch.compile(square, fullgraph=True), x)
    torch.testing.assert_close(d_x, gradient_of(torch.square, x))


def test_declarations_that_do_not_fit():
    def launcher(launch: Launch, x: Tensor, z: Tensor) -> None: ...

    with pytest.raises(TypeError, match=r"must begin with those of `outputs`, \['y'\]; got \['x', 'z'\]"):
        warp_op("pointproj_tests::other_input", outputs=lambda y: {"z": (y.shape, y.dtype)})(launcher)
    with pytest.raises(TypeError, match=r"differentiable names no argument of forward: \['w'\]"):
        warp_op(
            "pointproj_tests::other_gradient",
            outputs=lambda x: {"z": (x.shape, x.dtype)},
            differentiable=["w"],
        )(launcher)
    misnamed = warp_op("pointproj_tests::other_output", outputs=lambda x: {"y": (x.shape, x.dtype)})(launcher)
    with pytest.raises(TypeError, match=r"launcher fills \['z'\]; declared are \['y'\]"):
        misnamed(torch.ones(2))


@pytest.mark.filterwarnings("ignore:.*:torch.jit.TracerWarning", "ignore:.*jit.trace.*:DeprecationWarning")
@pytest.mark.parametrize("tracer", ["make_fx", "jit", "export"])
def test_traced_without_gradients_and_then_differentiated(tracer: str, device: str):
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.rand(n, 3, generator=generator).to(device) for n in (70, 90, 90)]

    def within(*inputs: Tensor) -> Tensor:
        return pointproj.radius_aggregate(*inputs, 0.4, backend="warp")

    class Module(torch.nn.Module):
        def forward(self, *inputs: Tensor) -> Tensor:
            return within(*inputs)

    if tracer == "make_fx":
        traced = make_fx(within)(*inputs)
    elif tracer == "jit":
        traced = torch.jit.trace(within, inputs, check_trace=False)
    else:
        traced = torch.export.export(Module(), tuple(inputs)).module()
    leaves = [t.clone().requires_grad_() for t in inputs]
    upstream = torch.randn(70, 3, device=device)
    expected = torch.autograd.grad(within(*leaves), leaves, upstream)
    got = torch.autograd.grad(traced(*leaves), leaves, upstream)
    for name, one, want in zip(INPUTS[:3], got, expected, strict=True):
        assert_close(name, one, want)
