"""An index built once gives what every call on its own gives, and is refused where it does not belong."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import pointproj
from pointproj.ops.index import Index
from pointproj.ops.registry import load
from tests.conftest import Where
from tests.ops.cases import by_id
from tests.oracle import assert_close, derivatives, probe, run

operators = pytest.mark.parametrize("operator", ["knn", "radius"])


@operators
@pytest.mark.parametrize("name", ["plain", "clustered", "dense", "ragged-with-empty-clouds", "fp64", "bf16"])
def test_index_changes_no_result(operator: str, name: str, where: Where):
    """Whatever it was built for: that only sizes its cells."""
    case = by_id(name)
    problem, neighborhood = case.problem(where.device), case.neighborhood(operator)
    at = probe(problem, case.sigma)
    options = {"backend": where.backend, "reference_offsets": problem.reference_offsets}
    expected = derivatives(
        lambda p, sigma: run(operator, p, neighborhood, sigma, backend=where.backend), problem, at
    )
    for radius in (None, 0.05, 3.0) if "radius" in load(where.backend).OPERATORS else (None,):
        index = pointproj.build_index(problem.reference_points, radius=radius, **options)
        for _ in range(2):  # a call must not use the index up
            got = derivatives(lambda p, s, i=index: run(operator, p, neighborhood, s, index=i), problem, at)
            for what in expected:
                assert_close(f"{what} with an index for radius {radius}", got[what], expected[what])


class _Operators(TorchDispatchMode):
    """Names of this library's operators, in the order in which they run."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "pointproj":
            self.names.append(function.__name__)
        return function(*args, **(kwargs or {}))


@operators
@pytest.mark.parametrize("name", ["plain", "dense", "ragged", "fp64"])
@pytest.mark.operators("radius")
def test_any_index_serves_both_searches(operator: str, name: str, on_cpu: Where):
    """With or without a radius: no call adds to an index, and all run the same operators."""
    case = by_id(name)
    problem, neighborhood = case.problem("cpu"), case.neighborhood(operator)
    runs = []
    for radius in (None, 0.05, 3.0):
        index = pointproj.build_index(
            problem.reference_points,
            radius=radius,
            backend=on_cpu.backend,
            reference_offsets=problem.reference_offsets,
        )
        tables = index.tables.copy()
        with _Operators() as called:
            run(operator, problem, neighborhood, 0.1, index=index)
        runs.append(called.names)
        assert index.tables == tables
    assert runs[0] == runs[1] == runs[2]
    builds = [name for name in runs[0] if "build" in name]
    assert len(builds) <= (operator == "radius")  # a radius search may still sort its queries


@operators
@pytest.mark.operators("radius")
def test_compiled_calls_share_an_index_built_for_the_other_search(operator: str, on_cpu: Where):
    case = by_id("plain")
    problem, neighborhood = case.problem("cpu"), case.neighborhood(operator)
    other = case.radius if operator == "knn" else None

    def function(index: Index) -> torch.Tensor:
        once = run(operator, problem, neighborhood, 0.1, index=index)
        return once + run(operator, problem, neighborhood, 0.2, index=index)

    def built() -> Index:
        return pointproj.build_index(problem.reference_points, radius=other, backend=on_cpu.backend)

    torch.compiler.reset()  # another backend's code is no recompilation of this one's
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    index = built()
    for _ in range(2):
        torch.testing.assert_close(compiled(index), function(built()))


def test_index_holds_no_graph(where: Where):
    points = torch.rand(20, 3, device=where.device, requires_grad=True)
    index = pointproj.build_index(points, backend=where.backend)
    assert not any(table.requires_grad for tables in index.tables.values() for table in tables)


def test_index_of_other_points_is_refused(where: Where):
    points = torch.rand(20, 3, device=where.device)
    index = pointproj.build_index(points, backend=where.backend)
    with pytest.raises(
        ValueError, match=r"built for points of shape \(20, 3\).*got \(19, 3\).*build one for these"
    ):
        pointproj.knn(points, points[:19], 2, index=index)
    with pytest.raises(ValueError, match=r"torch.float32; got \(20, 3\), torch.float64"):
        pointproj.knn(points.double(), points.double(), 2, index=index)
    with pytest.raises(ValueError, match=r"shape \(20, 3\).*got \(2, 10, 3\)"):
        pointproj.knn(points.view(2, 10, 3), points.view(2, 10, 3), 2, index=index)
    offsets = torch.tensor([0, 5, 20], device=where.device)
    with pytest.raises(
        ValueError, match=r"built for 1 cloud.*hold 2: give build_index the reference_offsets"
    ):
        pointproj.knn(points, points, 2, index=index, query_offsets=offsets, reference_offsets=offsets)


def test_index_of_another_backend_is_refused(where: Where):
    points = torch.rand(20, 3, device=where.device)
    index = pointproj.build_index(points, backend=where.backend)
    other = "torch" if where.backend != "torch" else "warp"
    Where(other, where.device).skip_unless("knn")
    with pytest.raises(ValueError, match=f"built by backend '{where.backend}'; this call runs '{other}'"):
        pointproj.knn(points, points, 2, index=index, backend=other)


def test_something_else_is_no_index():
    points = torch.rand(20, 3)
    with pytest.raises(TypeError, match=r"index must come from pointproj.build_index; got Tensor"):
        pointproj.knn(points, points, 2, index=points)


@pytest.mark.parametrize("size", [(0.01, 1, 1), (1, 0.01, 1), (1, 1, 0.01), (1, 1, 1)])
def test_cells_of_a_large_cloud_seldom_share_slots(size: tuple[float, ...]):
    """Pairs of points in one slot of the hash grid: at most twice those in one cell, also in a thin cloud."""
    if load("native").unavailable():
        pytest.skip(load("native").unavailable())
    generator = torch.Generator().manual_seed(0)
    radius, count = 0.015 if min(size) < 1 else 0.05, 9_001
    points, queries = (torch.rand(n, 3, generator=generator) * torch.tensor(size) for n in (count, 31))
    features = torch.randn(count, 5, generator=generator, requires_grad=True)
    made = []
    for backend in ("native", "torch"):
        values = pointproj.radius_aggregate(queries, points, features, radius, backend=backend)
        made.append((values, *torch.autograd.grad(values.square().sum(), features)))
    torch.testing.assert_close(*made)
    (table,) = pointproj.build_index(points, radius=radius, backend="native").tables["radius"]
    behind_points = 4 * (count + 16) + 2  # with what is read ahead, the width of cells, the bits of axes
    slots = table[behind_points:].clamp(max=count).diff()[: 4 * count + 2]
    _, cells = (points / radius).floor().unique(dim=0, return_counts=True)
    assert slots.sum() == count
    assert slots.square().sum() < 2 * cells.square().sum()
