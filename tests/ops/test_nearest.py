"""kNN with both results: distances to the last bit, their derivatives by name, the dtype of the indices."""

import pytest
import torch
from torch import Tensor, func
from torch.autograd import forward_ad

import pointproj
from pointproj.benchmark.cases import Case, Problem
from tests.conftest import Where
from tests.ops.cases import FP64, by_id, uniform
from tests.oracle import assert_close

POINTS = ("query_points", "reference_points")
CASE = Case("nearest", uniform(3 * 7, 3 * 16), batch=3, **FP64)
GAP = 0.25  # of a lattice, where distances are equal and many are 0


def _knn(problem: Problem, k: int, where: Where, **options) -> tuple[Tensor, Tensor]:
    points = problem.query_points, problem.reference_points
    return pointproj.knn(*points, k, backend=where.backend, **problem.offsets, **options)


def _gathered(problem: Problem, rows: Tensor) -> Tensor:
    """Query point minus reference point of each pair, whatever stands for none."""
    points = problem.reference_points
    if points.ndim == 3:
        clouds = torch.arange(len(points), device=rows.device)[:, None, None]
        return problem.query_points[..., None, :] - points[clouds, rows.clamp(min=0).long()]
    return problem.query_points[:, None] - points[rows.clamp(min=0).long()]


def _plain(problem: Problem, rows: Tensor) -> Tensor:
    """Distances as autograd knows them, with subgradient 0 at 0, and inf where there is no neighbour."""
    squared = _gathered(problem, rows).square().sum(-1)
    apart = (squared > 0) & (rows >= 0)
    distances = torch.where(apart, torch.where(apart, squared, 1.0).sqrt(), 0.0)
    return distances.masked_fill(rows < 0, torch.inf)


def _lattice(device: str, dtype: torch.dtype = torch.float64) -> Problem:
    axis = torch.arange(4, dtype=dtype, device=device) * GAP
    points = torch.cartesian_prod(axis, axis, axis)
    return Problem(points[::3].clone(), points, points)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("needs_grad", [False, True])
def test_queries_that_are_not_finite_and_points_that_are_nobodys(dtype, needs_grad: bool, where):
    query = torch.tensor([[0.0, 0.0, 0.0], [0.0, torch.nan, 0.0], [torch.inf, 0.0, 0.0]], dtype=dtype)
    points = torch.tensor([[0.0, 0.0, 3.0], [torch.nan, 0.0, 0.0], [4.0, 0.0, 0.0]], dtype=dtype)
    leaves = [t.to(where.device).requires_grad_(needs_grad) for t in (query, points)]
    distances, rows = pointproj.knn(*leaves, 3, backend=where.backend)
    assert rows.tolist() == [[0, 2, -1], [-1] * 3, [-1] * 3]
    assert distances[0].tolist() == [3.0, 4.0, torch.inf]
    assert distances[1:].isnan().all()
    batch = [p.expand(2, -1, -1) for p in leaves]
    assert torch.equal(pointproj.knn(*batch, 3, backend=where.backend)[1], rows.expand(2, -1, -1))
    if needs_grad:
        by_query, by_points = torch.autograd.grad(distances.square().sum(), leaves)
        assert by_query.tolist() == [[-8.0, 0.0, -6.0], [0.0] * 3, [0.0] * 3]
        assert by_points.tolist() == [[0.0, 0.0, 6.0], [0.0] * 3, [8.0, 0.0, 0.0]]


@pytest.mark.parametrize("box", [None, (4.0, 4.0, 4.0)])
def test_max_radius_takes_index_dtype_too(box: tuple | None, where: Where):
    problem = _lattice(where.device, torch.float32)
    options = {"max_radius": GAP, "box": box}
    distances, rows = _knn(problem, 9, where, index_dtype=torch.int32, **options)
    expected = _knn(problem, 9, Where("torch", where.device), **options)
    assert rows.dtype == torch.int32
    assert torch.equal(rows.long(), expected[1])
    assert torch.equal(distances, expected[0])
    assert torch.equal(distances.isinf(), rows < 0)
    assert distances[rows >= 0].max() == GAP  # inclusive


def test_derivatives_where_distances_are_zero(where: Where):
    problem = _lattice(where.device)
    rows = _knn(problem, 9, where)[1]
    assert_derivatives(lambda p: _knn(p, 9, where)[0], lambda p: _plain(p, rows), problem, (*rows.shape,))
    leaf = problem.query_points.requires_grad_()
    nearest = _knn(problem._replace(query_points=leaf), 1, where)[0]
    assert not nearest.any()
    assert not torch.autograd.grad(nearest.log().sum(), leaf)[0].any()  # also for an infinite upstream


@pytest.mark.parametrize("alone", POINTS)
def test_one_set_of_points_needs_a_gradient(alone: str, where: Where):
    problem = CASE.problem(where.device)
    leaf = getattr(problem, alone).clone().requires_grad_()
    distances, rows = _knn(problem._replace(**{alone: leaf}), 4, where)
    plain = _plain(problem._replace(**{alone: leaf}), rows)
    got, expected = (torch.autograd.grad(d.square().sum(), leaf)[0] for d in (distances, plain))
    assert_close(f"d_{alone}", got, expected)
    with torch.no_grad():
        assert not _knn(problem._replace(**{alone: leaf}), 4, where)[0].requires_grad


def test_compiled_twice_differentiable(where: Where):
    problem = CASE.problem(where.device)
    rows = _knn(problem, 4, where)[1]

    def penalty(query_points: Tensor, reference_points: Tensor) -> tuple[Tensor, Tensor]:
        distances, rows = pointproj.knn(
            query_points, reference_points, 4, backend=where.backend, index_dtype=torch.int32
        )
        return (distances.square() + distances).sum(), rows

    leaves = [t.clone().requires_grad_() for t in problem[:2]]
    loss, found = torch.compile(penalty, fullgraph=True, backend="aot_eager")(*leaves)
    assert torch.equal(found, rows.int())
    expected = _plain(problem._replace(**dict(zip(POINTS, leaves, strict=True))), rows)
    expected = (expected.square() + expected).sum()
    assert_close("loss", loss, expected)
    wanted = torch.autograd.grad(expected, leaves)
    for name, got, want in zip(POINTS, torch.autograd.grad(loss, leaves), wanted, strict=True):
        assert_close(f"d_{name}", got, want)


def test_transforms(where: Where):
    problem = CASE.problem(where.device)
    query, points = (t[0] for t in problem[:2])
    rows = pointproj.knn(query, points, 4, backend=where.backend)[1]

    def of_query(query: Tensor) -> Tensor:
        return pointproj.knn(query, points, 4, backend=where.backend)[0]

    def plain(query: Tensor) -> Tensor:
        return (query[:, None] - points[rows]).norm(dim=-1)

    jacobian = torch.autograd.functional.jacobian(plain, query)
    assert_close("jacrev", func.jacrev(of_query)(query), jacobian)
    assert_close("jacfwd", func.jacfwd(of_query)(query), jacobian)
    hessian = torch.autograd.functional.hessian(lambda q: plain(q).square().square().sum(), query)
    got = func.hessian(lambda q: of_query(q).square().square().sum())(query)
    assert_close("hessian", got, hessian)
    batch = func.vmap(lambda q, p: pointproj.knn(q, p, 4, backend=where.backend)[0])(*problem[:2])
    assert_close("vmap", batch, _knn(problem, 4, where)[0])


def test_forward_mode_without_a_transform(where: Where):
    problem = CASE.problem(where.device)
    rows, tangent = _knn(problem, 4, where)[1], torch.rand_like(problem.query_points)
    with forward_ad.dual_level():
        dual = problem._replace(query_points=forward_ad.make_dual(problem.query_points, tangent))
        got = forward_ad.unpack_dual(_knn(dual, 4, where)[0]).tangent
        expected = forward_ad.unpack_dual(_plain(dual, rows)).tangent
    assert_close("tangent", got, expected)


@pytest.mark.gpu
def test_captured(waitless: Where):
    problem = by_id("odd-sizes").problem(waitless.device)
    leaves = [t.clone().requires_grad_() for t in problem[:2]]

    def step() -> list[Tensor]:
        distances, rows = pointproj.knn(*leaves, 4, backend=waitless.backend)
        return [distances, rows, *torch.autograd.grad(distances.square().sum(), leaves)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        expected = step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = step()
    graph.replay()
    assert torch.equal(made.pop(1), expected.pop(1))
    names = ("distances", *(f"d_{name}" for name in POINTS))
    for name, got, want in zip(names, made, expected, strict=True):
        assert_close(name, got, want)


def assert_derivatives(function, plain, problem: Problem, shape: tuple[int, ...]) -> None:
    """Value, first and second derivatives of one function are those of the other."""
    generator = torch.Generator().manual_seed(5)

    def random(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(problem.query_points)

    grad, directions = random(shape), [random(t.shape) for t in problem[:2]]
    results = []
    for distances, dtype in ((function, grad.dtype), (plain, torch.float64), (plain, grad.dtype)):
        leaves = [t.detach().to(dtype, copy=True).requires_grad_() for t in (*problem[:2], grad)]
        value = distances(problem._replace(**dict(zip(POINTS, leaves[:2], strict=True))))
        first = torch.autograd.grad(value, leaves[:2], leaves[2], create_graph=True)
        second = torch.autograd.grad(first, leaves, [d.to(dtype) for d in directions])
        results.append((value, *first, *second))
    names = ["distances", *(f"d_{n}" for n in POINTS), *(f"dd_{n}" for n in (*POINTS, "grad"))]
    for name, got, expected, in_torch in zip(names, *results, strict=True):
        finite = expected.isfinite()
        assert torch.equal(got.isfinite(), finite), name
        assert_close(name, got[finite], expected[finite], in_torch[finite])
