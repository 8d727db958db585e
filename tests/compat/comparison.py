"""How a drop-in is compared with what it stands for: values, and first and second derivatives by name."""

import inspect
from collections.abc import Callable

import torch
from torch import Tensor

from tests.oracle import assert_close

PADDING = 1e3  # in place of infinite distances, whose products with 0 would be NaN


def points(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random points in the unit cube."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def squared_distances(query_points: Tensor, reference_points: Tensor) -> Tensor:
    """Of all pairs, (..., Q, N), added up along the axes one after the other."""
    delta = query_points[..., :, None, :] - reference_points[..., None, :, :]
    total = delta[..., 0] * delta[..., 0]
    for axis in range(1, delta.shape[-1]):
        total = total + delta[..., axis] * delta[..., axis]
    return total


def derivatives(function: Callable[..., Tensor], inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The value, the gradient of each input, and that of a product of the gradients."""
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in inputs.items()}
    value = function(**leaves)
    generator = torch.Generator().manual_seed(5)

    def direction(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like)

    finite = value.masked_fill(value.detach().isinf(), PADDING)
    first = torch.autograd.grad((finite.sin() * direction(value)).sum(), leaves.values(), create_graph=True)
    product = sum((gradient * direction(gradient)).sum() for gradient in first)
    second = torch.autograd.grad(product, leaves.values())
    found = {"value": value}
    for name, once, twice in zip(leaves, first, second, strict=True):
        found |= {f"d_{name}": once, f"second d_{name}": twice}
    return found


def assert_same_derivatives(
    ours: Callable[..., Tensor], theirs: Callable[..., Tensor], inputs: dict[str, Tensor]
) -> None:
    """Compare :func:`derivatives` of two functions, by name."""
    expected = derivatives(theirs, inputs)
    for name, got in derivatives(ours, inputs).items():
        assert_close(name, got, expected[name])


def assert_same_call(ours: Callable, theirs: Callable) -> None:
    """Parameters of the same names, in the same order, with the same defaults."""

    def call(function: Callable) -> list[tuple]:
        parameters = inspect.signature(function).parameters.values()
        return [(p.name, p.kind, p.default) for p in parameters]

    assert call(ours) == call(theirs)
