"""Every kernel and reduction on every backend: values, gradients and second gradients, by name."""

import functools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import pointproj
from pointproj.benchmark.cases import Case, Problem
from pointproj.ops.specification.reference import FINITE_SUPPORT, KERNELS, Weighting
from tests.conftest import Where
from tests.ops.cases import FP64, by_id, is_compiled, uniform
from tests.oracle import assert_close, derivatives, exact, neighbors, probe, run, specified

CASES = (
    by_id("odd-sizes"),
    by_id("lattice-radius-root-3-half"),  # the compact kernel is 0 at all neighbours of some
    by_id("all-coincident"),
    by_id("fp64-features"),
    by_id("dense-bf16"),
    replace(by_id("ragged-with-empty-clouds"), **FP64),
)
INVERSE = {"power": 1.5, "eps": 0.2}  # so that some distances are below eps, and some above
operators = pytest.mark.parametrize("operator", ["knn", "radius"])
kernels = pytest.mark.parametrize("kernel", KERNELS)


@pytest.fixture
def backend(where: Where, monkeypatch: pytest.MonkeyPatch) -> Where:
    if where == ("warp", "cpu"):  # half of the time went into it; kernels of other tests are optimised
        monkeypatch.setattr("warp.config.optimization_level", 0)
    return where


@kernels
@operators
@pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in CASES])
def test_values_and_gradients(case: Case, operator: str, kernel: str, backend: Where):
    options = {"kernel": kernel, "backend": backend.backend, **INVERSE}
    if operator == "knn" and kernel in FINITE_SUPPORT:
        options["max_radius"] = case.radius
    reductions = ["mean", "sum"]
    if backend == ("warp", "cpu"):
        case = replace(case, channels=3)
        reductions = [r for r in reductions if is_compiled(kernel, r, case.positions, case.features)]
    problem, neighborhood = case.problem(backend.device), case.neighborhood(operator)
    at = probe(problem, case.sigma)
    for reduce in reductions:
        expected, plain = _truth(case, operator, kernel, reduce)
        options["reduce"] = reduce
        got = derivatives(lambda p, sigma: run(operator, p, neighborhood, sigma, **options), problem, at)
        for of, value in got.items():
            assert_close(f"{of} of a {reduce}", value, expected[of], plain[of])
        if kernel not in ("exponential", "gaussian"):
            assert got["d_sigma"] == 0


@functools.cache
def _truth(
    case: Case, operator: str, kernel: str, reduce: str
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The derivatives in fp64, and those of the specification in the dtypes of the case."""
    weighting = Weighting(kernel, reduce, **INVERSE, support=case.radius)
    problem, neighborhood = case.problem(), case.neighborhood(operator)
    at = probe(problem, case.sigma)
    near = neighbors(operator, problem, neighborhood)
    expected = derivatives(lambda p, s: exact(p, near, s, weighting), problem, at, double=True)
    plain = derivatives(lambda p, s: specified(operator, p, neighborhood, s, weighting), problem, at)
    return expected, plain


@operators
@pytest.mark.parametrize("kernel", ["exponential", "gaussian", "inverse_distance"])
def test_mean_of_weights_that_all_vanish_in_rounding(kernel: str, operator: str, backend: Where):
    """Far from every point, the weights are 0 in fp64; their ratios are not."""
    case = Case("far", uniform(5, 40), radius=61.0, sigma=0.05, **FP64)
    weighting = Weighting(kernel, power=200.0)

    def moved(problem: Problem) -> Problem:
        return problem._replace(query_points=problem.query_points + 35)

    problem = moved(case.problem())
    assert torch.exp(-problem.query_points.norm(dim=1) / case.sigma).max() == 0
    at, near = probe(problem, case.sigma), neighbors(operator, problem, case.neighborhood(operator))
    expected = derivatives(lambda p, s: exact(p, near, s, weighting), problem, at)
    options = {"kernel": kernel, "power": 200.0, "backend": backend.backend}
    problem = moved(case.problem(backend.device))
    got = derivatives(
        lambda p, s: run(operator, p, case.neighborhood(operator), s, **options),
        problem,
        probe(problem, case.sigma),
    )
    for name, value in expected.items():  # a logit of 10^6 has an error of 10^-10
        assert (got[name].cpu() - value).norm() <= 1e-8 * value.norm(), name


@operators
def test_gradients_where_one_neighbor_has_nearly_all_the_weight(operator: str, backend: Where):
    """Little remains of its feature less the mean, and a steep kernel magnifies the rounding error."""
    case, weighting = Case("steep", uniform(9, 150), channels=2), Weighting("inverse_distance", power=200.0)
    options, neighborhood = {"kernel": "inverse_distance", "power": 200.0}, case.neighborhood(operator)
    problem, on_device = (
        p._replace(features=p.features + 3) for p in (case.problem(), case.problem(backend.device))
    )
    near, at = neighbors(operator, problem, neighborhood), probe(problem, case.sigma)
    expected = derivatives(lambda p, s: exact(p, near, s, weighting), problem, at, double=True)
    plain = derivatives(lambda p, s: specified(operator, p, neighborhood, s, weighting), problem, at)
    got = derivatives(
        lambda p, s: run(operator, p, neighborhood, s, backend=backend.backend, **options),
        on_device,
        probe(on_device, case.sigma),
    )
    for of, value in got.items():
        assert_close(of, value, expected[of], plain[of])


@operators
def test_inverse_distance_interpolates(operator: str, backend: Where):
    """Where a query lies on a reference point, its feature is the result."""
    points, features = by_id("plain").problem(backend.device)[1:3]
    neighborhood = 4 if operator == "knn" else 0.5
    problem = Problem(points, points, features)
    aggregated = run(operator, problem, neighborhood, 0.1, kernel="inverse_distance", backend=backend.backend)
    assert_close("aggregated", aggregated, features)


@operators
def test_inverse_distances_below_an_eps_of_more_than_one(operator: str, backend: Where):
    """A sum is not relative to anything: each weight is eps^-power."""
    points, features = by_id("plain").problem(backend.device)[1:3]
    problem = Problem(points[:1], points, features)
    options = {"kernel": "inverse_distance", "reduce": "sum", "eps": 100.0, "backend": backend.backend}
    aggregated = run(operator, problem, len(points) if operator == "knn" else 50.0, 0.1, **options)
    assert_close("aggregated", aggregated * 1e4, features.sum(0, keepdim=True))


@operators
@pytest.mark.parametrize(
    ("power", "eps", "distances"),
    [
        (2.0, 0.5, (0.5, 1.0, 0.25)),  # at exactly eps the gradient is that of the distance
        (
            3.5,
            1e-10,
            (0.0, 3e-11, 1e-9, 0.5),
        ),  # gradients of logits overflow below eps, where none is passed on
        (4.0, 1e-9, (5e-10, 2e-9, 2e-9, 0.5)),
    ],
)
def test_inverse_distances_at_the_ends(power, eps, distances, operator, backend):
    """Every gradient is the specification's in the same dtype, also where that is infinite."""
    reference_points = torch.tensor([[d, 0.0, 0.0] for d in distances])
    features = torch.arange(1.0, len(distances) + 1)[:, None] * torch.tensor([[1.0, -3.0]])
    options = {"kernel": "inverse_distance", "power": power, "eps": eps}
    for reduce in ("mean", "sum"):
        found = []
        for name, device in (("torch", "cpu"), backend):
            leaves = torch.zeros(1, 3), reference_points, features, torch.tensor(0.1)
            query, points, values, sigma = (t.to(device).requires_grad_() for t in leaves)
            size = {"knn": len(distances), "radius": 2.0}[operator]
            call = getattr(pointproj, f"{operator}_aggregate")
            out = call(query, points, values, size, sigma=sigma, reduce=reduce, backend=name, **options)
            gradients = torch.autograd.grad(out.sum() * 1e5, (query, points, values, sigma))
            found.append([g.cpu() for g in (out.detach(), *gradients)])
        for of, expected, got in zip(("out", "query", "points", "features", "sigma"), *found, strict=True):
            message = f"{of} of a {reduce}"
            torch.testing.assert_close(
                got,
                expected,
                rtol=1e-4,
                atol=1e5 * 1e-6,
                equal_nan=True,
                msg=lambda m, of=message: f"{of}: {m}",
            )
