"""The bridge: Warp launches as torch operators, and what their users do with them."""

from collections.abc import Callable

import pytest
import torch
import warp as wp
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

from pointproj.warp_op import ADJOINT, Launch, warp_op

LONG = 1_000_000_000  # clock cycles: about half a second, far more than launching anything takes

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
def _double_in_place(x: floats):
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


@warp_op(
    "pointproj_tests::rosenbrock",
    outputs=lambda xy, a, b: {"z": (xy.shape[:1], xy.dtype)},
    differentiable=["xy"],
    backward=ADJOINT,
)
def rosenbrock(launch: Launch, xy: Tensor, a: float, b: float, z: Tensor) -> None:
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


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def _points(device: str, count: int = 7) -> Tensor:
    return torch.linspace(-1.5, 2.0, 2 * count, device=device).view(count, 2).requires_grad_()


def _in_torch(xy: Tensor, a: float, b: float) -> Tensor:
    x, y = xy.unbind(-1)
    return (a - x) ** 2 + b * (y - x * x) ** 2


def _gradient(function: Callable, points: Tensor, *numbers: float) -> Tensor:
    """Gradient of a weighted sum of the values, by the points."""
    leaf = points.detach().requires_grad_()
    value = function(leaf, *numbers)
    weights = torch.arange(value.numel(), dtype=value.dtype, device=value.device).cos()
    value.backward(weights.view_as(value))
    return leaf.grad


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
    torch.library.opcheck(rosenbrock, (_points(device), 1.0, 2.0))
    x, scale = (torch.rand(4, dtype=torch.float64, device=device, requires_grad=True) for _ in range(2))
    torch.library.opcheck(cube, (x, scale))
    torch.library.opcheck(cube, (x, None))
    y = torch.rand(4, device=device, requires_grad=True)
    torch.library.opcheck(both_differentiable, (y, y.detach()))


def test_one_compilation_for_all_sizes(device: str):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(rosenbrock, fullgraph=True, dynamic=True, backend=counter)
    compilations = []
    for count in (5, 9, 17):
        xy = _points(device, count)
        expected = _gradient(_in_torch, xy, 1.0, 100.0)
        torch.testing.assert_close(_gradient(compiled, xy, 1.0, 100.0), expected)
        compilations.append(counter.frame_count)
    assert compilations == [compilations[0]] * 3


def test_compiled_with_other_strides(device: str):
    """The gradient is laid out as torch.compile was told it would be."""
    torch._dynamo.reset()
    x = torch.linspace(-1, 1, 15, device=device).view(3, 5).T.requires_grad_()
    d_x = _gradient(torch.compile(square, fullgraph=True), x)
    torch.testing.assert_close(d_x, _gradient(torch.square, x))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_forward_is_recomputed(use_reentrant: bool, device: str):
    xy = _points(device)

    def recomputed(xy: Tensor, a: float, b: float) -> Tensor:
        return checkpoint(lambda xy: rosenbrock(xy.sin(), a, b), xy, use_reentrant=use_reentrant)

    expected = _gradient(lambda xy, a, b: _in_torch(xy.sin(), a, b), xy, 1.0, 9.0)
    torch.testing.assert_close(_gradient(recomputed, xy, 1.0, 9.0), expected)


def test_two_graphs_alive_and_a_retained_one(device: str):
    one, two = _points(device), _points(device, 3)
    z_one, z_two = rosenbrock(one, 1.0, 9.0), rosenbrock(two, 2.0, 4.0)
    expected = torch.autograd.grad(_in_torch(one, 1.0, 9.0).sum(), one)[0]
    torch.testing.assert_close(torch.autograd.grad(z_one.sum(), one, retain_graph=True)[0], expected)
    expected_two = torch.autograd.grad(_in_torch(two, 2.0, 4.0).sum(), two)[0]
    torch.testing.assert_close(torch.autograd.grad(z_two.sum(), two)[0], expected_two)
    torch.testing.assert_close(torch.autograd.grad(z_one.sum(), one)[0], expected)


def test_warp_writes_into_torch_memory(device: str):
    whole = torch.arange(12.0, device=device).view(6, 2)
    Launch(torch.device(device))(_double_in_place, 3, whole[::2, 1])
    expected = torch.arange(12.0).view(6, 2)
    expected[::2, 1] *= 2
    assert torch.equal(whole.cpu(), expected)


def test_torch_sees_the_memory_of_a_warp_array(device: str):
    array = wp.array([1.0, 2.0, 3.0], dtype=wp.float32, device="cuda:0" if device == "cuda" else device)
    tensor = wp.to_torch(array)
    assert square(tensor.view(1, 3)).tolist() == [[1.0, 4.0, 9.0]]
    Launch(tensor.device)(_double_in_place, 3, tensor)
    tensor += 1
    if device == "cuda":
        torch.cuda.synchronize()  # Warp copies to the host on a stream of its own
    assert array.numpy().tolist() == [3.0, 5.0, 7.0]


def test_no_gradient_is_allocated_for_inputs(device: str):
    leaf = torch.ones(2, 3, device=device, requires_grad=True)
    z = square(leaf)
    assert leaf.grad is None
    torch.autograd.grad(z.sum(), leaf)
    assert leaf.grad is None
    flat = torch.ones(3, device=device, requires_grad=True)
    Launch(flat.device)(_double_in_place, 3, flat)
    assert flat.grad is None


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


@pytest.mark.gpu
def test_fresh_tensors_that_require_grad_do_not_wait_and_take_no_memory():
    values = torch.rand(1024, 1024, device="cuda")

    def step() -> Tensor:
        leaf = values.detach().requires_grad_()
        return torch.autograd.grad(square(leaf), leaf, values)[0]

    expected = step()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(LONG)
        other_work = torch.cuda.Event()
        other_work.record()
    got = step()
    assert not other_work.query(), "something waited for the whole device"
    assert torch.equal(got, expected)

    leaf = values.detach().requires_grad_()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    square(leaf)
    taken = torch.cuda.max_memory_allocated() - before
    assert values.nbytes <= taken < 1.1 * values.nbytes  # the output alone, rounded up by the allocator


@pytest.mark.gpu
def test_launches_follow_torchs_stream():
    xy, late = _points("cuda"), torch.zeros(7, 2, device="cuda")
    expected = rosenbrock(xy, 1.0, 9.0)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)
        late.copy_(xy.detach())
        z = rosenbrock(late, 1.0, 9.0)  # elsewhere it would read zeros
        doubled = 2 * z
    stream.synchronize()
    assert torch.equal(doubled, 2 * expected)


@pytest.mark.gpu
def test_a_stream_of_warps_is_torchs_stream():
    values, late = torch.rand(2, 3, device="cuda"), torch.zeros(2, 3, device="cuda")
    expected = square(values)
    torch.cuda.synchronize()
    stream = wp.Stream("cuda:0")
    with torch.cuda.stream(wp.stream_to_torch(stream)):
        torch.cuda._sleep(LONG)
        late.copy_(values)
        z = square(late)
    wp.synchronize_stream(stream)
    assert torch.equal(z, expected)


@pytest.mark.gpu
def test_one_cuda_graph_of_torch_and_warp_work():
    xy = _points("cuda")

    def step() -> tuple[Tensor, Tensor]:
        z = rosenbrock(torch.tanh(xy), 1.0, 9.0)
        return z.sin(), torch.autograd.grad(z.sin().sum(), xy)[0]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for factor in (-0.5, 3.0):
        with torch.no_grad():
            xy.mul_(factor)
        for result in captured:
            result.detach().fill_(torch.nan)
        graph.replay()
        for got, expected in zip(captured, step(), strict=True):
            torch.testing.assert_close(got, expected)
