"""torch.compile(fullgraph=True): no graph break, the eager numbers, and no recompiling for every size."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import pointproj
from pointproj.benchmark.cases import Case, Problem
from pointproj.ops.registry import modules
from tests.conftest import Where
from tests.ops.cases import by_id, uniform
from tests.oracle import INPUTS, assert_close, run

operators = pytest.mark.parametrize("operator", ["knn", "radius"])


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@operators
@pytest.mark.parametrize("name", ["dense-bf16", "ragged", "fp64-positions"])
def test_compiled_equals_eager(operator: str, name: str, where: Where):
    case = by_id(name)
    function = _loss(operator, case, where)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    _assert_same_step(compiled, function, case.problem(where.device), case.sigma)
    assert counter.frame_count == 1


@operators
def test_inductor(operator: str, where: Where):
    case = by_id("odd-sizes")
    function = _loss(operator, case, where)
    compiled = torch.compile(function, fullgraph=True)
    _assert_same_step(compiled, function, case.problem(where.device), case.sigma)


@operators
@pytest.mark.parametrize(("dynamic", "until"), [(True, 2), (None, 3)])
def test_other_sizes_do_not_recompile(operator: str, dynamic: bool | None, until: int, where: Where):
    """At most one graph for small clouds and one for large; by default torch first tries one for one size."""
    sizes = ((20, 40), (5, 200), (33, 57), (64, 16), (47, 48), (90, 301), (7, 128))
    cases = [Case("sizes", uniform(*size)) for size in sizes]
    compilations = _compilations(operator, cases, where, dynamic)
    assert compilations[until - 1 :] == [compilations[until - 1]] * (len(sizes) - until + 1)


@operators
def test_other_ragged_sizes_do_not_recompile(operator: str, where: Where):
    batches = (
        ((5, 9), (4, 8), (3, 3)),
        ((7, 3), (2, 14), (6, 11)),
        ((1, 5), (30, 6), (0, 4), (2, 0)),
        ((3, 3), (4, 9), (0, 5), (8, 1), (7, 7)),
    )
    totals = [[sum(s) for s in zip(*sizes, strict=True)] for sizes in batches]
    cases = [
        Case("sizes", uniform(*total), sizes=sizes) for total, sizes in zip(totals, batches, strict=True)
    ]
    compilations = _compilations(operator, cases, where, dynamic=True)
    assert compilations == [compilations[0]] * len(batches)


@operators
def test_exported_for_any_number_of_rows(operator: str, where: Where):
    case, other = (Case("sizes", uniform(*size)) for size in ((47, 48), (23, 61)))
    neighborhood = case.neighborhood(operator)

    class Operator(torch.nn.Module):
        def forward(self, *tensors: Tensor) -> Tensor:
            return run(operator, Problem(*tensors), neighborhood, case.sigma, backend=where.backend)

    queries, references = torch.export.Dim("queries"), torch.export.Dim("references", min=16)
    shapes = {"tensors": tuple({0: rows} for rows in (queries, references, references))}
    given, others = (c.problem(where.device)[:3] for c in (case, other))
    exported = torch.export.export(Operator(), others, dynamic_shapes=shapes)
    actual, expected = exported.module()(*given), Operator()(*given)
    assert_close("aggregated", actual, expected)


LAYERS = [[(torch.ones(4, width) + torch.eye(4, width), torch.ones(4))] for width in (3, 4, 7)]
NETWORKS = {"position_layers": LAYERS[0], "score_layers": LAYERS[1]}
ON_LISTS = {
    "aggregate": lambda q, r, f, lists: pointproj.aggregate(f, lists),
    "attend": lambda q, r, f, lists: pointproj.attend(q @ torch.ones(3, 4), f, f, lists),
    "edge_mlp": lambda q, r, f, lists: pointproj.edge_mlp(f, q, r, lists, LAYERS[2]),
    "vector_attend": lambda q, r, f, lists: pointproj.vector_attend(
        f[..., :1, :] + q[..., :1],
        f,
        f,
        q,
        r,
        lists,
        groups=4,
        position_layers=LAYERS[0],
        score_layers=LAYERS[1],
    ),
    "farthest_points": lambda q, r, f, lists: pointproj.farthest_points(r, 3).float(),
}


@pytest.mark.parametrize("form", [{"max_neighbors": 3}, {"capacity": 60}])
@pytest.mark.parametrize("name", ON_LISTS)
def test_operators_on_lists_exported_for_any_number_of_rows(name: str, form: dict[str, int]):
    class Operator(torch.nn.Module):
        def forward(self, q: Tensor, r: Tensor, f: Tensor) -> Tensor:
            return ON_LISTS[name](q, r, f, pointproj.radius_neighbors(q, r, 0.5, **form))

    def given(queries: int, references: int) -> tuple[Tensor, ...]:
        batch = [2] if "max_neighbors" in form else []
        sizes = (queries, 3), (references, 3), (references, 4)
        return tuple(torch.rand(*batch, *size) for size in sizes)

    queries, references = (torch.export.Dim(name, min=4) for name in ("queries", "references"))
    shapes = tuple({given(1, 1)[0].ndim - 2: rows} for rows in (queries, references, references))
    program = torch.export.export(Operator(), given(11, 17), dynamic_shapes=shapes, strict=False).module()
    others = given(5, 29)
    assert_close(name, program(*others), Operator()(*others))


@operators
def test_index_passed_in(operator: str, where: Where):
    case = by_id("plain")
    problem = case.problem(where.device)
    radius = case.radius if operator == "radius" else None
    index = pointproj.build_index(problem.reference_points, radius=radius, backend=where.backend)

    def function(problem: Problem, sigma: Tensor, index: pointproj.ops.index.Index) -> Tensor:
        aggregated = run(operator, problem, case.neighborhood(operator), sigma, index=index)
        return aggregated.square().mean()

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    _assert_same_step(
        lambda problem, sigma: compiled(problem, sigma, index),
        lambda problem, sigma: function(problem, sigma, index),
        problem,
        case.sigma,
    )


@operators
def test_index_built_inside(operator: str, where: Where):
    case = by_id("plain")

    def function(problem: Problem, sigma: Tensor) -> Tensor:
        radius = case.radius if operator == "radius" else None
        index = pointproj.build_index(problem.reference_points, radius=radius, backend=where.backend)
        once = run(operator, problem, case.neighborhood(operator), sigma, index=index)
        twice = run(operator, problem, case.neighborhood(operator), 2 * sigma, index=index)
        return (once * twice).mean()

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    _assert_same_step(compiled, function, case.problem(where.device), case.sigma)


@pytest.mark.operators("lists")
def test_one_graph_for_all_radii(where: Where):
    """The first is compiled as a constant; the second finds that it is none."""
    case = by_id("plain")

    def step(problem: Problem, radius: float) -> Tensor:
        points, settings = problem[:2], {"backend": where.backend}
        index = pointproj.build_index(points[1], radius=radius, **settings)
        scales = (radius, 2 * radius)
        lists = pointproj.radius_neighbors(*points, scales, max_neighbors=(3, 4), index=index, **settings)
        csr = pointproj.radius_neighbors(*points, radius, capacity=300, **settings)
        box = 7 * radius, 8 * radius, torch.inf
        periodic = pointproj.radius_neighbors(*points, radius, max_neighbors=3, box=box, **settings)
        inverse = {"kernel": "inverse_distance", "power": 3 * radius, "eps": radius / 9}
        parts = [pointproj.aggregate(problem.features, part, kernel="compact") for part in (*lists, csr)]
        parts += [pointproj.aggregate(problem.features, part, **inverse) for part in (periodic, csr)]
        parts += [
            pointproj.radius_aggregate(*problem[:3], radius, kernel="compact", index=index, **settings),
            pointproj.knn_aggregate(*problem[:3], 4, max_radius=radius, **inverse, **settings),
        ]
        return sum(part.square().mean() for part in parts)

    problem, counter = case.problem(where.device), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for i in range(5):
        radius = case.radius * (1 + i / 10)
        both = [lambda p, s, f=f, r=radius: s * f(p, r) for f in (compiled, step)]
        _assert_same_step(*both, problem, case.sigma)
    assert counter.frame_count <= 2


@pytest.mark.operators("knn", "radius")
def test_one_graph_for_all_radii_of_indices_that_only_knn_reads(where: Where):
    points, settings = by_id("plain").problem(where.device)[:2], {"backend": where.backend}

    def search(radius: float) -> Tensor:
        index = pointproj.build_index(points[1], radius=radius, **settings)
        return pointproj.knn(*points, 4, index=index, **settings)[1]

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(search, fullgraph=True, backend=counter)
    assert all(torch.equal(compiled(radius), search(radius)) for radius in (0.3, 0.4, 0.5))
    assert counter.frame_count <= 2


def test_auto_chooses_inside_the_graph():
    case = by_id("plain")
    problem = case.problem()

    def function(problem: Problem) -> Tensor:
        return run("knn", problem, case.k, case.sigma)

    compiled = torch.compile(function, fullgraph=True, backend="eager")
    assert_close("aggregated", compiled(problem), function(problem))


def test_a_backend_is_loaded_inside_the_graph(monkeypatch: pytest.MonkeyPatch):
    problem = by_id("plain").problem()

    def function(problem: Problem) -> Tensor:
        points = problem[:2]
        found = pointproj.knn(*points, 4, backend="native")
        lists = pointproj.Neighbors(found[1], found[0])
        return pointproj.aggregate(problem.features, lists, sigma=0.1, backend="torch")

    expected = function(problem)
    monkeypatch.delattr(modules, "torch")
    assert_close("aggregated", torch.compile(function, fullgraph=True, backend="eager")(problem), expected)


def _compilations(operator: str, cases: list[Case], where: Where, dynamic: bool | None) -> list[int]:
    """How often the compiler had been called after each of the cases, checked against eager."""
    function = _loss(operator, cases[0], where)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, backend=counter, dynamic=dynamic)
    counts = []
    for case in cases:
        _assert_same_step(compiled, function, case.problem(where.device), case.sigma)
        counts.append(counter.frame_count)
    return counts


def _loss(operator: str, case: Case, where: Where) -> Callable[[Problem, Tensor], Tensor]:
    """A little network around the operator, so that there is something to fuse on both sides."""
    neighborhood, backend = case.neighborhood(operator), where.backend

    def function(problem: Problem, sigma: Tensor) -> Tensor:
        carried = problem._replace(features=(problem.features * 2).tanh())
        aggregated = run(operator, carried, neighborhood, sigma, backend=backend)
        return (aggregated.float().sin() + 1).square().mean()

    return function


def _assert_same_step(compiled: Callable, function: Callable, problem: Problem, sigma: float) -> None:
    """Same loss and same gradients."""
    results = []
    for step in (compiled, function):
        sigma_of = torch.tensor(sigma, device=problem.query_points.device)
        leaves = [t.clone().requires_grad_() for t in (*problem[:3], sigma_of)]
        value = step(problem._replace(**dict(zip(INPUTS[:3], leaves[:3], strict=True))), leaves[3])
        results.append((value, *torch.autograd.grad(value, leaves)))
    for name, got, expected in zip(("loss", *INPUTS), *results, strict=True):
        assert_close(name, got, expected)
