"""Every kernel and reduction on every backend: values, gradients and second gradients, by name."""

import functools

import pytest
from torch import Tensor

from pointproj.ops.cases import Case, by_id
from pointproj.ops.reference import KERNELS, Weighting
from tests.conftest import Where
from tests.oracle import assert_close, derivatives, exact, neighbors, probe, run, specified

NAMES = (
    "odd-sizes",
    "lattice-radius-root-3-half",  # some queries have all their neighbours where the compact kernel ends
    "all-coincident",
    "ragged-with-empty-clouds",
    "fp64-features",
    "ragged-fp64",
    "dense-bf16",
)
INVERSE = {"power": 1.5, "eps": 0.2}  # so that some distances are below eps, and some above
ONLY_DEFAULT = ("warp", "triton")  # backends that have no other weights as yet

operators = pytest.mark.parametrize("operator", ["knn", "radius"])
kernels = pytest.mark.parametrize("kernel", KERNELS)
reductions = pytest.mark.parametrize("reduce", ["mean", "sum"])


@pytest.fixture
def backend(where: Where) -> Where:
    where.skip_unless("knn")
    if where.backend in ONLY_DEFAULT:
        pytest.skip(f"{where.backend} has no other weights as yet")
    return where


@reductions
@kernels
@operators
@pytest.mark.parametrize("name", NAMES)
def test_values_and_gradients(name: str, operator: str, kernel: str, reduce: str, backend: Where):
    backend.skip_unless(operator)
    case = by_id(name)
    expected, plain = _truth(case, operator, kernel, reduce)
    at = probe(problem := case.problem(backend.device), case.sigma)
    options = {"kernel": kernel, "reduce": reduce, "backend": backend.backend, **INVERSE}
    if operator == "knn" and kernel == "compact":
        options["max_radius"] = case.radius
    got = derivatives(
        lambda p, sigma: run(operator, p, case.neighborhood(operator), sigma, **options), problem, at
    )
    for of, value in got.items():
        assert_close(of, value, expected[of], plain[of])
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
