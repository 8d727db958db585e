"""Dense and ragged batches are the loop over their clouds, and clouds never see each other."""

import pytest
import torch
from torch import Tensor

import pointproj
from pointproj.benchmark.cases import Case, Problem
from pointproj.ops.specification import pairs
from tests.conftest import Where
from tests.ops.cases import CASES, by_id
from tests.oracle import INPUTS, assert_close, derivatives, probe, run

operators = pytest.mark.parametrize("operator", ["knn", "radius"])
BATCHES = [pytest.param(c, id=c.id) for c in CASES if (c.batch or c.sizes) and c.k and c.radius]


@operators
def test_what_happens_in_one_cloud_stays_there(operator: str, where: Where):
    """NaN features, NaN points and huge values of one cloud leave values and gradients of others alone."""
    case = by_id("ragged")
    clean = case.problem(where.device)
    q, r = clean.ranges()[2]
    dirty = clean._replace(features=clean.features.clone(), reference_points=clean.reference_points.clone())
    dirty.features[r.start : r.start + 9] = torch.nan
    dirty.reference_points[r.start + 20 : r.start + 30] = torch.nan
    dirty.reference_points[r.start + 30 : r.stop] *= 1e30
    others_q = torch.ones(len(clean.query_points), dtype=torch.bool)
    others_q[q.start : q.stop] = False
    others_r = torch.ones(len(clean.reference_points), dtype=torch.bool)
    others_r[r.start : r.stop] = False
    upstream = torch.randn(len(others_q), 3, generator=torch.Generator().manual_seed(2))
    upstream = (upstream * others_q[:, None]).to(where.device)

    results = []
    for problem in (clean, dirty):
        leaves = [t.clone().requires_grad_() for t in problem[:3]]
        problem = problem._replace(**dict(zip(INPUTS[:3], leaves, strict=True)))
        aggregated = run(operator, problem, case.neighborhood(operator), 0.1, backend=where.backend)
        results.append((aggregated, *torch.autograd.grad(aggregated, leaves, upstream)))
    rows = others_q, others_q, others_r, others_r
    for name, got, expected, row in zip(("aggregated", *INPUTS), *reversed(results), rows, strict=False):
        row = row.to(where.device)
        assert_close(name, got[row], expected[row])


@operators
def test_shared_points_may_be_expanded(operator: str, where: Where):
    """One query grid for all clouds, without a copy of it for each: its gradient is the sum."""
    case = by_id("dense")
    problem = case.problem(where.device)
    grid = problem.query_points[0].clone().requires_grad_()
    shared = problem._replace(query_points=grid.expand(3, -1, -1))
    aggregated = run(operator, shared, case.neighborhood(operator), 0.1, backend=where.backend)
    (got,) = torch.autograd.grad(aggregated.square().sum(), grid)
    copies = grid.detach().repeat(3, 1, 1).requires_grad_()
    copied = run(
        operator,
        problem._replace(query_points=copies),
        case.neighborhood(operator),
        0.1,
        backend=where.backend,
    )
    (expected,) = torch.autograd.grad(copied.square().sum(), copies)
    assert_close("aggregated", aggregated, copied)
    assert_close("d_query_points", got, expected.sum(0))


def test_one_packed_cloud_is_the_cloud(where: Where):
    problem = by_id("plain").problem(where.device)
    offsets = {
        "query_offsets": torch.tensor([0, 64], device=where.device),
        "reference_offsets": torch.tensor([0, 128], device=where.device),
    }
    packed = pointproj.knn(*problem[:2], 4, backend=where.backend, **offsets)
    plain = pointproj.knn(*problem[:2], 4, backend=where.backend)
    assert torch.equal(packed[0], plain[0])
    assert torch.equal(packed[1], plain[1])


@operators
@pytest.mark.parametrize("case", [c for c in BATCHES if c.id.startswith("ragged")])
def test_torch_without_reading_offsets(operator: str, case: Case, monkeypatch: pytest.MonkeyPatch):
    """The way it goes on a GPU, where reading offsets would wait for the device."""
    problem = case.problem()
    at, neighborhood = probe(problem, case.sigma), case.neighborhood(operator)

    def function(p: Problem, sigma: Tensor) -> Tensor:
        return run(operator, p, neighborhood, sigma, backend="torch")

    expected = derivatives(function, problem, at)
    monkeypatch.setattr(pairs, "_can_be_read", lambda *_: False)
    for name, got in derivatives(function, problem, at).items():
        assert_close(name, got, expected[name])
