"""Numbers that go wrong easily: non-finite points, extreme temperatures, low precision, odd layouts."""

import pytest
import torch
from torch import Tensor

import pointproj
from pointproj.benchmark.cases import Case, Problem
from tests.conftest import Where
from tests.ops.cases import by_id, uniform
from tests.oracle import INPUTS, Probe, assert_close, derivatives, exact, neighbors, probe, run, specified

operators = pytest.mark.parametrize("operator", ["knn", "radius"])
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


def _strided(t: Tensor) -> Tensor:
    wide = torch.full((*t.shape[:-1], 2 * t.shape[-1]), torch.nan, dtype=t.dtype, device=t.device)
    wide[..., ::2] = t
    return wide[..., ::2]


def _transposed(t: Tensor) -> Tensor:
    return t.mT.contiguous().mT


def _sliced(t: Tensor) -> Tensor:
    padded = torch.full((t.shape[0] + 4, t.shape[1] + 3), torch.nan, dtype=t.dtype, device=t.device)
    padded[3:-1, 2:-1] = t
    return padded[3:-1, 2:-1]


def _every_other_row(t: Tensor) -> Tensor:
    return t.repeat_interleave(2, dim=0)[::2]


def _misaligned(t: Tensor) -> Tensor:
    """Contiguous, but one element off the start of its memory: wide loads must not assume alignment."""
    flat = torch.full((t.numel() + 1,), torch.nan, dtype=t.dtype, device=t.device)
    flat[1:] = t.flatten()
    return flat[1:].view(t.shape)


@operators
@pytest.mark.parametrize("name", ["plain", "channels-33", "ragged"])
def test_memory_layout_changes_nothing(operator: str, name: str, where: Where):
    case = by_id(name)
    problem = case.problem(where.device)
    at = probe(problem, case.sigma)
    expected = _derivatives(operator, problem, case, where, at)
    neighborhood = case.neighborhood(operator)
    for layout in (_strided, _transposed, _sliced, _every_other_row, _misaligned):
        leaves = [layout(t).detach().requires_grad_() for t in problem[:3]]
        laid_out = problem._replace(**dict(zip(INPUTS[:3], leaves, strict=True)))
        aggregated = run(operator, laid_out, neighborhood, at.sigma, backend=where.backend)
        gradients = torch.autograd.grad(aggregated, leaves, layout(at.grad))
        assert_close(f"aggregated, {layout.__name__}", aggregated, expected["aggregated"])
        for n, got in zip(INPUTS, gradients, strict=False):
            assert_close(f"d_{n}, {layout.__name__}", got, expected[f"d_{n}"])


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
