"""At the ends of a dtype every call ends, and every backend gives the answer of the specification."""

import re
import subprocess
import sys

import pytest
import torch
from torch import Tensor

import pointproj
from pointproj.ops.specification import reference
from tests.conftest import Where
from tests.oracle import INPUTS
from tests.processes import PROJECT

LEAST_SIGMA, LARGEST_SIGMA = reference.sigma_range(torch.float32)
operators = pytest.mark.parametrize("operator", ["knn", "radius"])


def test_searches_end_and_are_right(device: str):
    run = subprocess.run(
        [sys.executable, "-m", "tests.ops.extremes", device], cwd=PROJECT, capture_output=True, text=True
    )
    wrong = [line for line in run.stdout.splitlines() if line.startswith("WRONG")]
    last = run.stdout.splitlines()[-1:]
    assert not wrong, "\n".join(wrong)
    assert run.returncode == 0, f"ended with {run.returncode} in {last}\n{run.stderr}"


def _problem(device: str, twice: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """With each reference point twice there are equal distances; a query is on one of them.

    The weights of two points at equal distance from a query turn with a gaussian's slope, which overflows.
    """
    generator = torch.Generator().manual_seed(0)
    points = torch.rand(20, 3, generator=generator).repeat(2 if twice else 1, 1) * 4
    queries = torch.cat([torch.rand(6, 3, generator=generator) * 4, points[:1]])
    features = torch.randn(len(points), 3, generator=generator)
    return queries.to(device), points.to(device), features.to(device)


def _aggregate(operator: str, *tensors: Tensor, **others: object) -> Tensor:
    if operator == "knn":
        return pointproj.knn_aggregate(*tensors, 4, **others)
    return pointproj.radius_aggregate(*tensors, 3.0, **others)


@operators
@pytest.mark.parametrize("kernel", ["exponential", "gaussian"])
def test_sigma_tensors_without_a_meaning(operator: str, kernel: str, where: Where):
    """0, negative, subnormal: the nearest alone, in equal parts; no gradient for sigma, and NaN in none."""
    inputs = [t.requires_grad_() for t in _problem(where.device, twice=kernel == "exponential")]
    queries, points, features = (t.detach().cpu() for t in inputs)
    far = torch.cdist(queries.double(), points.double())
    nearest = (far == far.amin(1, keepdim=True)).float()
    for sigma in (0.0, -1.0, 1e-46, 1e-40, 1e-30, LEAST_SIGMA, 1e-15, LARGEST_SIGMA, torch.inf):
        given = torch.tensor(sigma, device=where.device, requires_grad=True)
        got = _aggregate(operator, *inputs, sigma=given, kernel=kernel, backend=where.backend)
        expected = _specified(operator, queries, points, features, torch.tensor(sigma), kernel)
        torch.testing.assert_close(got.cpu(), expected, msg=lambda m, s=sigma: f"sigma {s}: {m}")
        if sigma < 1:
            torch.testing.assert_close(expected, nearest @ features / nearest.sum(1, keepdim=True))
        gradients = torch.autograd.grad(got.square().sum(), (*inputs, given))
        for name, gradient in zip(INPUTS, gradients, strict=True):
            assert not gradient.isnan().any(), (name, sigma)
        if sigma < LEAST_SIGMA:
            assert gradients[3] == 0


@operators
@pytest.mark.parametrize("kernel", ["exponential", "gaussian"])
def test_sigma_that_is_nan_gives_nan(operator: str, kernel: str, where: Where):
    queries, points, features = _problem(where.device)
    queries[0] += 100  # within the radius of nobody
    sigma = torch.tensor(torch.nan, device=where.device)
    options = {"sigma": sigma, "kernel": kernel, "backend": where.backend}
    got = _aggregate(operator, queries, points, features, **options)
    assert got[1:].isnan().all()
    assert got[0].isnan().all() if operator == "knn" else (got[0] == 0).all()


@pytest.mark.parametrize("sigma", [0.0, -1.0, 1e-40, torch.nan])
def test_sigma_tensors_without_a_meaning_over_lists(sigma: float):
    queries, points, features = _problem("cpu")
    given = torch.tensor(sigma)
    padded = pointproj.radius_neighbors(queries, points, 3.0, max_neighbors=40, backend="torch")
    pairs = pointproj.radius_neighbors(queries, points, 3.0, capacity=None, backend="torch")
    expected = _specified("radius", queries, points, features, given, "exponential")
    for neighbors in (padded, pairs):
        got = pointproj.aggregate(features, neighbors, sigma=given)
        torch.testing.assert_close(got, expected, equal_nan=True)


def _specified(
    operator: str, queries: Tensor, points: Tensor, features: Tensor, sigma: Tensor, kernel: str
) -> Tensor:
    weighting = reference.Weighting(kernel)
    if operator == "knn":
        return reference.knn_aggregate(queries, points, features, 4, sigma, weighting)
    return reference.radius_aggregate(queries, points, features, 3.0, sigma, weighting)


@pytest.mark.parametrize(
    ("name", "ends"),
    [("sigma", "1.08e-19 to 8.51e+37"), *((n, "1.18e-38 to 3.4e+38") for n in ("power", "eps"))],
)
@pytest.mark.parametrize("value", [1e-46, 1e-40, 1e39])
def test_numbers_that_sums_cannot_hold_are_refused(name: str, ends: str, value: float):
    message = re.escape(f"{name} must be from {ends}, as sums run in torch.float32; got {value}")
    queries, points, features = _problem("cpu")
    neighbors = pointproj.radius_neighbors(queries, points, 3.0, max_neighbors=4, backend="torch")
    for operator in ("knn", "radius"):
        with pytest.raises(ValueError, match=message):
            _aggregate(operator, queries, points, features, backend="torch", **{name: value})
        wide = _aggregate(operator, queries, points, features.double(), backend="torch", **{name: value})
        assert wide.isfinite().all()
    with pytest.raises(ValueError, match=message):
        pointproj.aggregate(features, neighbors, **{name: value})


@pytest.mark.parametrize("length", [1e-46, 1e39])
def test_boxes_that_positions_cannot_hold_are_refused(length: float):
    queries, points, _ = _problem("cpu")
    with pytest.raises(ValueError, match=r"normal numbers of torch\.float32"):
        pointproj.knn(queries, points, 1, box=(4.0, 4.0, length), backend="torch")
