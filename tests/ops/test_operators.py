"""Every backend against the specification: values, gradients and second gradients, by name."""

import numpy as np
import pytest
import torch
from scipy.spatial import cKDTree

import pointproj
from pointproj.benchmark.cases import Case, Problem
from pointproj.ops.specification import reference
from tests.conftest import Where
from tests.ops.cases import CASES, WORKLOADS, calls
from tests.oracle import assert_close, derivatives, exact, neighbors, probe, run, specified

CALLS = [pytest.param(case, operator, id=name) for name, case, operator in calls()]
KNN_CASES = [pytest.param(case, id=case.id) for case in CASES if case.k]
KNN_IN_ONE_CLOUD = [pytest.param(c, id=c.id) for c in CASES if c.k and not c.batch and not c.sizes]


@pytest.mark.parametrize(("case", "operator"), CALLS)
def test_values_and_gradients(case: Case, operator: str, where: Where):
    problem, neighborhood = case.problem(), case.neighborhood(operator)
    at = probe(problem, case.sigma)
    is_neighbor = neighbors(operator, problem, neighborhood)
    expected = derivatives(lambda p, sigma: exact(p, is_neighbor, sigma), problem, at, double=True)
    plain = derivatives(lambda p, sigma: specified(operator, p, neighborhood, sigma), problem, at)

    problem = case.problem(where.device)
    at = probe(problem, case.sigma)
    got = derivatives(
        lambda p, sigma: run(operator, p, neighborhood, sigma, backend=where.backend), problem, at
    )
    for name in expected:
        assert_close(name, got[name], expected[name], plain[name])


@pytest.mark.parametrize("case", KNN_CASES)
def test_knn_is_the_specification_bit_for_bit(case: Case, where: Where):
    """Rows of either dtype; distances are rounded to nearest after every operation."""
    expected = _specified_rows(case.problem(), case.k)
    dx, dy, dz = _differences(case.problem(), expected).unbind(-1)
    squared = dx * dx + dy * dy + dz * dz
    nearest = torch.from_numpy(np.sqrt(squared.numpy()))  # torch's own root may be off by a bit
    problem = case.problem(where.device)
    options = {"backend": where.backend} | problem.offsets
    for index_dtype in (torch.int32, torch.int64):
        distances, rows = pointproj.knn(*problem[:2], case.k, index_dtype=index_dtype, **options)
        assert rows.dtype == index_dtype
        assert torch.equal(rows.cpu().long(), expected)
        assert torch.equal(distances.cpu(), nearest.masked_fill(expected < 0, torch.inf))


@pytest.mark.parametrize("case", KNN_IN_ONE_CLOUD)
def test_specified_search_finds_what_a_kd_tree_finds(case: Case):
    query, points = case.problem()[:2]
    expected, _ = cKDTree(points.double().numpy()).query(query.double().numpy(), case.k)
    found = reference.knn_search(query, points, case.k)
    distances = (query.double()[:, None] - points.double()[found]).norm(dim=-1)
    assert_close("distances", distances.to(query.dtype), torch.as_tensor(expected).view(distances.shape))


@pytest.mark.parametrize(
    ("case", "operator"), [pytest.param(case, *case.operators, id=name) for name, case in WORKLOADS.items()]
)
def test_workloads_in_part(case: Case, operator: str, where: Where):
    """The benchmark's clouds in full size, for some of the queries."""
    neighborhood = case.neighborhood(operator)

    def part(problem: Problem) -> Problem:
        return problem._replace(query_points=problem.query_points[::900].contiguous())

    problem = part(case.problem())
    at = probe(problem, case.sigma)
    is_neighbor = neighbors(operator, problem, neighborhood)
    near = is_neighbor.any(0)  # the others have no part in anything
    few = problem._replace(reference_points=problem.reference_points[near], features=problem.features[near])
    query_direction, *of_references, sigma_direction = at.directions
    at_few = at._replace(directions=(query_direction, *(d[near] for d in of_references), sigma_direction))
    expected = derivatives(lambda p, s: exact(p, is_neighbor[:, near], s), few, at_few, double=True)

    problem = part(case.problem(where.device))
    got = derivatives(
        lambda p, sigma: run(operator, p, neighborhood, sigma, backend=where.backend),
        problem,
        probe(problem, case.sigma),
    )
    for name in expected:
        if name.endswith(("reference_points", "features")):
            assert not got[name][~near.to(where.device)].any(), (
                f"{name} of points that are nobody's neighbours"
            )
            got[name] = got[name][near.to(where.device)]
        assert_close(name, got[name], expected[name])


def test_knn_on_a_lattice_takes_the_lower_indices(where: Where):
    corners = torch.cartesian_prod(*[torch.arange(3.0, device=where.device)] * 3)
    center = torch.ones(1, 3, device=where.device)
    _, rows = pointproj.knn(center, corners, 4, backend=where.backend)
    # The centre is row 13; its six face neighbours, all at distance 1, are rows 4, 10, 12, 14, 16, 22.
    assert rows.tolist() == [[13, 4, 10, 12]]


def _specified_rows(problem: Problem, k: int) -> torch.Tensor:
    """(Q, k), as `pointproj.knn` numbers them: in the cloud if dense, in the packed points if ragged."""
    query, points = (p.reshape(-1, 3) for p in problem[:2])
    rows = torch.full((len(query), k), -1)
    for q, r in problem.ranges():
        if len(r):
            found = reference.knn_search(query[q.start : q.stop], points[r.start : r.stop], k)
            first = 0 if problem.query_points.ndim == 3 else r.start
            rows[q.start : q.stop, : found.shape[1]] = found + first
    return rows.view(*problem.query_points.shape[:-1], k)


def _differences(problem: Problem, rows: torch.Tensor) -> torch.Tensor:
    """Query point minus reference point; the first for rows that do not exist."""
    query, points = problem[:2]
    if query.ndim == 3:
        points = points[torch.arange(len(points))[:, None, None], rows.clamp(min=0)]
    else:
        points = points[rows.clamp(min=0)]
    return query[..., None, :] - points
