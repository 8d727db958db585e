"""What the kernels in Warp take that is not as usual: traced without gradients, negated, moved in memory."""

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import pointproj
from tests.oracle import assert_close

RADIUS = 0.4


def _inputs(device: str, channels: int = 5) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    sizes = (70, 3), (90, 3), (90, channels)
    return [torch.rand(*size, generator=g).to(device) for size in sizes]


def _within(query_points: Tensor, reference_points: Tensor, features: Tensor) -> Tensor:
    return pointproj.radius_aggregate(query_points, reference_points, features, RADIUS, backend="warp")


def _nearest(query_points: Tensor, reference_points: Tensor, features: Tensor) -> Tensor:
    return pointproj.knn_aggregate(query_points, reference_points, features, 4, backend="warp")


@pytest.mark.filterwarnings("ignore:.*:torch.jit.TracerWarning", "ignore:.*jit.trace.*:DeprecationWarning")
@pytest.mark.parametrize("tracer", ["make_fx", "jit", "export"])
def test_traced_without_gradients_and_then_differentiated(tracer: str, device: str):
    inputs = _inputs(device)
    if tracer == "make_fx":
        traced = make_fx(_within)(*inputs)
    elif tracer == "jit":
        traced = torch.jit.trace(_within, inputs, check_trace=False)
    else:

        class Module(torch.nn.Module):
            def forward(self, *inputs: Tensor) -> Tensor:
                return _within(*inputs)

        traced = torch.export.export(Module(), tuple(inputs)).module()
    leaves = [t.clone().requires_grad_() for t in inputs]
    upstream = torch.randn(70, 5, device=device)
    expected = torch.autograd.grad(_within(*leaves), leaves, upstream)
    for name, got, want in zip(
        ("query_points", "reference_points", "features"),
        torch.autograd.grad(traced(*leaves), leaves, upstream),
        expected,
        strict=True,
    ):
        assert_close(name, got, want)


@pytest.mark.parametrize("function", [_within, _nearest])
def test_negated_views(function, device: str):
    inputs = _inputs(device)
    negated = [torch.complex(t, -t).conj().imag for t in inputs]
    assert all(t.is_neg() and t.equal(u) for t, u in zip(negated, inputs, strict=True))
    leaves = [t.clone().requires_grad_() for t in inputs]
    upstream = torch.complex(torch.zeros(70, 5), torch.rand(70, 5)).conj().imag.to(device)
    expected = torch.autograd.grad(function(*leaves), leaves, upstream.resolve_neg())
    views = [t.requires_grad_() for t in negated]
    made = function(*views)
    assert_close("aggregated", made, function(*inputs))
    for name, got, want in zip(
        ("query_points", "reference_points", "features"),
        torch.autograd.grad(made, views, upstream),
        expected,
        strict=True,
    ):
        assert_close(name, got, want)


@pytest.mark.parametrize("channels", [5, 8])
@pytest.mark.parametrize("function", [_within, _nearest])
def test_what_is_saved_comes_back_at_any_address(function, channels: int, device: str):
    """A hook that packs several tensors into one brings them back where they do not begin at 16 bytes."""

    def moved(saved: Tensor) -> Tensor:
        if not saved.is_floating_point() or not saved.numel():
            return saved
        whole = saved.new_empty(saved.numel() + 1)
        return whole[1:].view(saved.shape).copy_(saved)

    leaves = [t.requires_grad_() for t in _inputs(device, channels)]
    upstream = torch.rand(70, channels, device=device)
    expected = torch.autograd.grad(function(*leaves), leaves, upstream)
    with torch.autograd.graph.saved_tensors_hooks(moved, lambda saved: saved):
        made = function(*leaves)
    for name, got, want in zip(
        ("query_points", "reference_points", "features"),
        torch.autograd.grad(made, leaves, upstream),
        expected,
        strict=True,
    ):
        assert_close(name, got, want)


@pytest.mark.parametrize("sigma", [1e-14, 1e-6, 1e14])
def test_gradient_of_a_gaussians_sigma_at_any_size(sigma: float, device: str):
    """Its cube is no number of 32 bits at either end."""
    query_points, reference_points, features = (t.to(device) for t in _inputs("cpu"))

    def gradient(dtype: torch.dtype, backend: str) -> Tensor:
        temperature = torch.tensor(sigma, dtype=dtype, device=device, requires_grad=True)
        points = [(t * sigma).to(dtype) for t in (query_points, reference_points)]
        made = pointproj.radius_aggregate(
            *points, features.to(dtype), RADIUS * sigma, sigma=temperature, kernel="gaussian", backend=backend
        )
        return torch.autograd.grad(made.sum(), temperature)[0]

    made, truth = gradient(torch.float32, "warp"), gradient(torch.float64, "torch")
    assert truth != 0
    torch.testing.assert_close(made.double() * sigma, truth * sigma, rtol=1e-3, atol=1e-4)
