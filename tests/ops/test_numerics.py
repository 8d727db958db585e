"""Numbers that go wrong easily: not finite, at the ends of a dtype, of low precision, in odd layouts."""

import re
import subprocess
import sys

import pytest
import torch
from torch import Tensor

import pointproj
from pointproj.benchmark.cases import Case, Problem
from pointproj.ops.specification import reference
from tests.conftest import Where
from tests.ops.cases import by_id, uniform
from tests.oracle import INPUTS, Probe, assert_close, derivatives, exact, neighbors, probe, run, specified
from tests.processes import PROJECT

operators = pytest.mark.parametrize("operator", ["knn", "radius"])
LEAST_SIGMA, LARGEST_SIGMA = reference.SIGMA_RANGE[torch.float32]
BAD = (torch.nan, torch.inf, -torch.inf)


@operators
@pytest.mark.parametrize("features", [0.0, torch.nan, torch.inf], ids=["finite", "nan", "inf"])
def test_non_finite_reference_points_are_nobodys_neighbors(operator: str, features: float, where: Where):
    """As if they were not there, in values and both derivatives, whatever features they carry."""
    case = by_id("plain")
    problem = case.problem(where.device)
    bad = torch.tensor([0, 17, 18, 127], device=where.device)
    kept = torch.ones(128, dtype=torch.bool, device=where.device)
    kept[bad] = False
    dirty = problem._replace(
        reference_points=problem.reference_points.clone(), features=problem.features.clone()
    )
    for row, axis, value in zip(bad.tolist(), (0, 1, 2, 0), (*BAD, torch.nan), strict=True):
        dirty.reference_points[row, axis] = value
    dirty.features[bad] += features
    clean = problem._replace(reference_points=problem.reference_points[kept], features=problem.features[kept])
    at = probe(dirty, case.sigma)
    query_direction, *of_references, sigma_direction = at.directions
    at_clean = at._replace(directions=(query_direction, *(d[kept] for d in of_references), sigma_direction))

    got = _derivatives(operator, dirty, case, where, at)
    for name, expected in _derivatives(operator, clean, case, where, at_clean).items():
        if name.endswith(("reference_points", "features")):
            assert not got[name][bad].any(), f"{name} of points that are nobody's neighbours"
            got[name] = got[name][kept]
        assert_close(name, got[name], expected)


@operators
def test_non_finite_queries_are_rows_of_nan_and_touch_nothing_else(operator: str, where: Where):
    case = by_id("plain")
    problem = case.problem(where.device)
    bad = torch.tensor([0, 31, 63], device=where.device)
    kept = torch.ones(64, dtype=torch.bool, device=where.device)
    kept[bad] = False
    dirty = problem._replace(query_points=problem.query_points.clone())
    for row, axis, value in zip(bad.tolist(), (0, 1, 2), BAD, strict=True):
        dirty.query_points[row, axis] = value
    clean = problem._replace(query_points=problem.query_points[kept])
    at = probe(dirty, case.sigma)
    at_clean = at._replace(grad=at.grad[kept], directions=(at.directions[0][kept], *at.directions[1:]))

    got = _derivatives(operator, dirty, case, where, at)
    for name, expected in _derivatives(operator, clean, case, where, at_clean).items():
        if name.endswith(("aggregated", "query_points", "grad")):
            rows = got[name][bad]
            assert (rows.isnan() if name == "aggregated" else rows == 0).all(), name
            got[name] = got[name][kept]
        assert_close(name, got[name], expected)


@operators
def test_weighted_means_of_non_finite_queries_have_second_derivatives(operator: str, where: Where):
    case = by_id("plain")
    problem = case.problem(where.device)
    problem.query_points[5] = torch.nan
    weights = problem.features[:, 0].abs() + 0.1
    got = derivatives(
        lambda p, sigma: run(
            operator, p, case.neighborhood(operator), sigma, reference_weights=weights, backend=where.backend
        ),
        problem,
        probe(problem, case.sigma),
    )
    assert got.pop("aggregated")[5].isnan().all()
    for name, gradient in got.items():
        assert gradient.isfinite().all(), name


def test_given_neighbors_far_away_behind_a_hole(where: Where):
    """Weights are relative to a neighbour, not to the place in the list where there is none."""
    points = torch.tensor([[0.0, 0, 0], [0, 0, 1]], device=where.device)
    features = torch.tensor([[1.0], [2.0]], device=where.device)
    rows = torch.tensor([[-1, 1]], device=where.device)
    query = torch.full((1, 3), 500.0, device=where.device)
    options = {"neighbor_indices": rows, "backend": where.backend}
    assert pointproj.knn_aggregate(query, points, features, 2, sigma=0.1, **options).item() == 2.0


@operators
def test_nan_loss_of_a_non_finite_query_does_not_reach_the_gradients(operator: str, where: Where):
    """A loss over all rows is NaN, and so is its gradient at such a row; it must end there."""
    case = by_id("plain")
    problem = case.problem(where.device)
    problem.query_points[5] = torch.nan
    leaves = [t.clone().requires_grad_() for t in problem[:3]]
    problem = problem._replace(**dict(zip(INPUTS[:3], leaves, strict=True)))
    aggregated = run(operator, problem, case.neighborhood(operator), 0.1, backend=where.backend)
    aggregated.square().sum().backward()
    for name, leaf in zip(INPUTS, leaves, strict=False):
        assert leaf.grad.isfinite().all(), f"d_{name}"


@pytest.mark.operators("knn", "radius")
def test_distances_that_overflow_are_no_neighbors(where: Where):
    points = torch.tensor([[0.0, 0, 0], [1e30, 0, 0], [1, 0, 0]], device=where.device)
    query = torch.tensor([[0.0, 0, 0], [0, -3e38, 0]], device=where.device)
    _, rows = pointproj.knn(query, points, 3, backend=where.backend)
    assert rows.tolist() == [[0, 2, -1], [-1, -1, -1]]
    features = torch.ones(3, 1, device=where.device)
    within = pointproj.radius_aggregate(query, points, features, 3e38, backend=where.backend)
    assert within.tolist() == [[1.0], [0.0]]


@operators
@pytest.mark.parametrize("which", ["all-references", "all-queries"])
def test_nothing_is_finite(operator: str, which: str, where: Where):
    case = by_id("plain")
    problem = case.problem(where.device)
    (problem.reference_points if which == "all-references" else problem.query_points).fill_(torch.nan)
    got = _derivatives(operator, problem, case, where, probe(problem, case.sigma))
    value = got.pop("aggregated")
    assert (value == 0).all() if which == "all-references" else value.isnan().all()
    for name, gradient in got.items():
        assert not gradient.any(), name


@operators
def test_nan_features_reach_only_who_has_them_as_neighbors(operator: str, where: Where):
    case = by_id("plain")
    problem = case.problem(where.device)
    problem.features[7] = torch.nan
    neighborhood = case.neighborhood(operator)
    aggregated = run(operator, problem, neighborhood, case.sigma, backend=where.backend).cpu()
    touched = neighbors(operator, case.problem(), neighborhood)[:, 7]
    assert touched.any()
    assert aggregated[touched].isnan().all()
    assert aggregated[~touched].isfinite().all()


@operators
@pytest.mark.parametrize("sigma", [1e-6, 1e-3, 1e3, 1e6])
def test_extreme_temperatures_are_still_the_softmax(operator: str, sigma: float, where: Where):
    """exp(-distance / sigma) alone is 0 for every neighbour at 1e-3 and below."""
    case = by_id("odd-sizes")
    problem, neighborhood = case.problem(), case.neighborhood(operator)
    is_neighbor = neighbors(operator, problem, neighborhood)
    aggregated = run(operator, case.problem(where.device), neighborhood, sigma, backend=where.backend).cpu()
    expected = exact(problem, is_neighbor, sigma)
    rounding = torch.finfo(torch.float32).eps * (4 + 8 / sigma)
    assert (aggregated - expected).abs().max() < max(1e-5, min(rounding, 0.05))
    on_device = case.problem(where.device)
    got = _derivatives(operator, on_device, case, where, probe(on_device, sigma))
    assert all(t.isfinite().all() for t in got.values())


@operators
@pytest.mark.parametrize("features", [torch.float32, torch.bfloat16])
def test_autocast_changes_nothing(operator: str, features: torch.dtype, where: Where):
    """Search in the positions' dtype, sums in fp32 or wider: also in a region of bf16."""
    case = Case("", uniform(50, 90), features=features)
    problem = case.problem(where.device)
    at = probe(problem, case.sigma)
    expected = _derivatives(operator, problem, case, where, at)
    with torch.autocast(where.device, dtype=torch.bfloat16):
        got = _derivatives(operator, problem, case, where, at)
    for name in expected:
        assert got[name].dtype == expected[name].dtype, name
        assert_close(name, got[name], expected[name])


@operators
def test_reduced_matmul_precision_changes_nothing(operator: str, where: Where):
    """TF32 (or its CPU counterpart) is for the network's layers, not for distances and weights."""
    case = Case("", uniform(80, 300), channels=25, radius=0.8)
    problem = case.problem(where.device)
    at = probe(problem, case.sigma)
    expected = _derivatives(operator, problem, case, where, at)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        got = _derivatives(operator, problem, case, where, at)
    finally:
        torch.set_float32_matmul_precision(before)
    for name in expected:
        assert_close(name, got[name], expected[name])


@operators
def test_inputs_are_left_as_they_were(operator: str, where: Where):
    case = by_id("plain")
    problem = case.problem(where.device)
    _derivatives(operator, problem, case, where, probe(problem, case.sigma))
    for name, tensor, untouched in zip(INPUTS[:3], problem[:3], case.problem(where.device)[:3], strict=True):
        assert torch.equal(tensor, untouched), name


@operators
@pytest.mark.parametrize("name", ["larger", "all-coincident", "ragged"])
def test_deterministic_bit_for_bit(operator: str, name: str, where: Where, deterministic: None):
    case = by_id(name)
    problem = case.problem(where.device)
    at = probe(problem, case.sigma)
    first = _derivatives(operator, problem, case, where, at)
    for _ in range(3):
        for what, again in _derivatives(operator, problem, case, where, at).items():
            assert torch.equal(again, first[what]), what


@operators
@pytest.mark.parametrize("name", ["plain", "ragged-with-empty-clouds", "channels-33"])
def test_uninitialised_memory_is_never_read(operator: str, name: str, where: Where):
    """torch fills every torch.empty with NaN (integers: the largest) in deterministic mode."""
    case = by_id(name)
    problem = case.problem(where.device)
    at = probe(problem, case.sigma)
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    try:
        got = _derivatives(operator, problem, case, where, at)
    finally:
        torch.use_deterministic_algorithms(False)
    problem, neighborhood = case.problem(), case.neighborhood(operator)
    at = probe(problem, case.sigma)
    plain = derivatives(lambda p, s: specified(operator, p, neighborhood, s), problem, at)
    is_neighbor = neighbors(operator, problem, neighborhood)
    expected = derivatives(lambda p, s: exact(p, is_neighbor, s), problem, at, double=True)
    for what in expected:
        assert_close(what, got[what], expected[what], plain[what])


def _derivatives(operator: str, problem: Problem, case: Case, where: Where, at: Probe) -> dict[str, Tensor]:
    neighborhood = case.neighborhood(operator)
    return derivatives(lambda p, s: run(operator, p, neighborhood, s, backend=where.backend), problem, at)


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
    for found in (padded, pairs):
        got = pointproj.aggregate(features, found, sigma=given)
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
