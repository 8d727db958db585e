"""What Warp and torch share on the way: memory, streams, graphs."""

import pytest
import torch
import warp as wp
from torch import Tensor

from pointproj.ops.bridge.warp_op import Launch
from tests.ops.warp_operators import double_in_place, rosenbrock, some_points, square

LONG = 1_000_000_000  # clock cycles: about half a second, far more than launching anything takes


def test_warp_writes_into_torch_memory(device: str):
    whole = torch.arange(12.0, device=device).view(6, 2)
    Launch(torch.device(device))(double_in_place, 3, whole[::2, 1])
    assert whole.flatten().tolist() == [0, 2, 2, 3, 4, 10, 6, 7, 8, 18, 10, 11]


def test_torch_sees_the_memory_of_a_warp_array(device: str):
    array = wp.array([1.0, 2.0, 3.0], dtype=wp.float32, device="cuda:0" if device == "cuda" else device)
    tensor = wp.to_torch(array)
    assert square(tensor.view(1, 3)).tolist() == [[1.0, 4.0, 9.0]]
    Launch(tensor.device)(double_in_place, 3, tensor)
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
    Launch(flat.device)(double_in_place, 3, flat)
    assert flat.grad is None


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
    xy, late = some_points("cuda"), torch.zeros(7, 2, device="cuda")
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
    xy = some_points("cuda")

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
