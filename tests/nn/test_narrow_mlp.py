"""The layers in one kernel, against the same in torch and fp64, by value and by every gradient.

Kernels run on a GPU, or on a CPU in Triton's interpreter, with ``TRITON_INTERPRET=1`` before ``pytest``.
Without either, the formulas in plain torch are what is tested.
"""

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pointproj.nn import mlp as mlp_module
from pointproj.nn.mlp import MLP

pytest.importorskip("triton")

from pointproj.nn import narrow_mlp as narrow_mlp_module
from pointproj.nn.narrow_mlp import PARAMETERS, narrow_mlp

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
NAMES = ("rows", *PARAMETERS)
WIDTHS = [(3, 25, 25), (25, 25, 1), (31, 32, 2), (1, 1, 1), (32, 17, 32)]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if INTERPRETED and request.param == "cpu":  # one program after another, of which most would have no tile
        monkeypatch.setattr(narrow_mlp_module, "PROGRAMS", 3)
    return request.param


def _problem(device: str, widths: tuple[int, int, int], count: int, dtype=torch.float32) -> list[Tensor]:
    """Rows and parameters, as leaves."""
    torch.manual_seed(0)
    mlp = MLP(*widths)
    tensors = [torch.randn(count, widths[0]), *mlp.parameters()]
    return [tensor.detach().to(device, dtype).requires_grad_() for tensor in tensors]


def _layers(rows: Tensor, *parameters: Tensor) -> Tensor:
    weight_1, bias_1, weight_2, bias_2, weight_3, bias_3 = parameters
    hidden = nn.functional.linear(rows, weight_1, bias_1).relu()
    hidden = nn.functional.linear(hidden, weight_2, bias_2).relu()
    return nn.functional.linear(hidden, weight_3, bias_3)


def _run(function: Callable, tensors: list[Tensor]) -> dict[str, Tensor]:
    """Result, first gradients, and the gradients of a penalty on the rows' gradient."""
    rows = tensors[0]
    result = function(*tensors)
    upstream = torch.linspace(-1, 2, result.numel(), device=rows.device, dtype=rows.dtype).view_as(result)
    gradients = torch.autograd.grad(result, tensors, upstream, create_graph=True)
    penalty = sum((gradient * gradient).sum() for gradient in gradients)
    second = torch.autograd.grad(penalty, tensors, allow_unused=True, materialize_grads=True)
    named = {"result": result.detach()}
    named |= {f"d_{name}": gradient.detach() for name, gradient in zip(NAMES, gradients, strict=True)}
    return named | {f"dd_{name}": gradient for name, gradient in zip(NAMES, second, strict=True)}


@pytest.mark.parametrize("count", [0, 1, 277])
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_result_and_every_gradient(device: str, widths: tuple[int, int, int], count: int):
    tensors = _problem(device, widths, count)
    made = _run(narrow_mlp, tensors)
    exact = _run(_layers, [tensor.detach().double().requires_grad_() for tensor in tensors])
    for name, expected in exact.items():
        error = (made[name] - expected).norm() / expected.norm().clamp(min=1e-30)
        assert error <= 2e-5 or expected.norm() == 0, f"{name}: {error:.1e}"


def test_many_tiles_for_each_program(device: str):
    if INTERPRETED and device == "cpu":
        pytest.skip("takes minutes in the interpreter")
    tensors = _problem(device, (3, 25, 25), 50_001)
    made, exact = (_run(f, t) for f, t in ((narrow_mlp, tensors), (_layers, [t.double() for t in tensors])))
    for name, expected in exact.items():
        assert (made[name] - expected).norm() <= 2e-5 * expected.norm(), name


def test_derivatives_by_differences(device: str):
    if INTERPRETED or device == "cuda":
        pytest.skip("kernels are for fp32; the formulas are checked on a CPU")
    tensors = _problem(device, (3, 5, 2), 7, torch.float64)
    torch.autograd.gradcheck(narrow_mlp, tensors)
    torch.autograd.gradgradcheck(narrow_mlp, tensors)


def test_a_row_that_is_not_finite_stays_alone(device: str):
    rows, *parameters = _problem(device, (3, 25, 25), 100)
    broken = rows.detach().clone()
    broken[41, 1] = torch.nan
    made = narrow_mlp(broken, *parameters)
    assert made[41].isnan().all()
    whole = torch.arange(100, device=device) != 41
    torch.testing.assert_close(made[whole], narrow_mlp(rows, *parameters)[whole])


def test_gradients_only_where_they_are_needed(device: str):
    rows, *parameters = _problem(device, (3, 9, 2), 20)
    expected = torch.autograd.grad(_layers(rows, *parameters).sum(), parameters)
    made = torch.autograd.grad(narrow_mlp(rows.detach(), *parameters).sum(), parameters)
    for name, one, other in zip(PARAMETERS, made, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, msg=name)


def test_where_triton_fails_products_take_over(monkeypatch: pytest.MonkeyPatch, caplog):
    def fails(rows: Tensor, *parameters: Tensor) -> Tensor:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(narrow_mlp_module, "narrow_mlp", fails)
    mlp_module._kernels_run.cache_clear()
    assert not mlp_module._kernels_run(torch.device("cpu"))
    assert "C compiler" in caplog.text
    mlp_module._kernels_run.cache_clear()


@pytest.mark.gpu
class TestMlp:
    """When the network takes the kernel, and under the compiler."""

    def test_the_network_takes_it_in_fp32_alone(self):
        mlp = MLP(3, 25, 25).cuda()
        rows = torch.randn(2, 50, 3, device="cuda")
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            mlp(rows)
        assert "forward_kernel" in [event.key for event in profile.key_averages()]
        with torch.autocast("cuda", torch.bfloat16):
            assert mlp(rows).dtype == torch.bfloat16
        assert mlp.double()(rows.double()).dtype == torch.float64

    def test_compiled_for_any_number_of_rows(self):
        mlp = MLP(3, 25, 25).cuda()
        compiled = torch.compile(mlp, fullgraph=True, dynamic=True)
        for count in (100, 333):
            rows = torch.randn(count, 3, device="cuda")
            made = torch.autograd.grad(compiled(rows).square().sum(), list(mlp.parameters()))
            expected = torch.autograd.grad(mlp(rows).square().sum(), list(mlp.parameters()))
            for name, one, other in zip(PARAMETERS, made, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4, msg=name)

    def test_the_same_bits_each_time(self):
        mlp = MLP(3, 25, 25).cuda()
        rows = torch.randn(30_000, 3, device="cuda")
        first, second = (torch.autograd.grad(mlp(rows).sum(), list(mlp.parameters())) for _ in range(2))
        assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
