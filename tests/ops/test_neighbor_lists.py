"""Lists of neighbours within a radius: the specification bit for bit, on every backend."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from pointproj import NeighborList, Neighbors, radius_neighbors
from pointproj.benchmark.cases import Case, Problem
from pointproj.ops.specification import clouds, reference
from tests.conftest import Where
from tests.ops.cases import CASES, by_id
from tests.oracle import assert_close

pytestmark = pytest.mark.operators("radius", "lists")
RADIUS_CASES = [pytest.param(case, id=case.id) for case in CASES if case.radius]
BATCHES = ("odd-sizes", "dense", "ragged-with-empty-clouds", "fp64")
forms = pytest.mark.parametrize("form", [{"max_neighbors": 4}, {"capacity": 900}], ids=["padded", "csr"])


@pytest.mark.parametrize("case", RADIUS_CASES)
def test_lists_are_the_specification(case: Case, lists: Callable, where: Where):
    problem = case.problem(where.device)
    k = case.k or 3
    expected, counts = _specified_nearest(case.problem(), case.radius, k)
    nearest = lists(problem, case.radius, max_neighbors=k)
    assert nearest.indices.dtype == nearest.counts.dtype == torch.int64
    assert torch.equal(nearest.indices.cpu(), expected.view(nearest.indices.shape))
    assert torch.equal(nearest.counts.cpu(), counts.view(nearest.counts.shape))
    _assert_distances(nearest, problem)

    row_splits, indices = _specified_list(case.problem(), case.radius)
    spare = 3
    listed = lists(problem, case.radius, capacity=len(indices) + spare)
    assert torch.equal(listed.row_splits.cpu(), row_splits)
    assert torch.equal(listed.indices.cpu(), torch.cat([indices, indices.new_full((spare,), -1)]))
    assert listed.total == len(indices)
    assert listed.distances[-spare:].isinf().all()

    few = lists(problem, case.radius, capacity=len(indices) // 2)
    assert few.total == len(indices)
    assert torch.equal(few.indices.cpu(), indices[: len(indices) // 2])
    assert torch.equal(few.row_splits.cpu(), row_splits.clamp(max=len(indices) // 2))


@pytest.mark.parametrize("name", BATCHES)
def test_several_scales_are_one_list_each(name: str, lists: Callable, where: Where):
    problem = by_id(name).problem(where.device)
    for radii, most in (((0.1, 0.5, 1.2), (2, 4, 9)), ((1.2, 0.3, 0.3), (3, 5, 1)), ([0.7], [4])):
        found = lists(problem, radii, max_neighbors=most, displacements=True)
        assert len(found) == len(radii)
        for scale, radius, k in zip(found, radii, most, strict=True):
            alone = lists(problem, radius, max_neighbors=k, displacements=True)
            assert scale.radius == alone.radius
            for part, expected in zip(scale[:4], alone[:4], strict=True):
                torch.testing.assert_close(part, expected, rtol=0, atol=0, equal_nan=True)


def test_a_ball_of_many_more_points_than_places(lists: Callable, where: Where):
    generator = torch.Generator().manual_seed(4)
    points = torch.rand(2000, 3, generator=generator)
    points[:900] *= 0.01
    query = torch.cat([points[::50], 3 * points[:20], points.new_full((1, 3), torch.nan)])
    for radius in (0.3, 40.0, torch.linspace(0.001, 3.0, len(query))):
        for k in (1, 9, 40, 150):
            expected, counts = reference.radius_search(query, points, radius, k)
            here = radius.to(where.device) if isinstance(radius, Tensor) else radius
            problem = Problem(query.to(where.device), points.to(where.device), None)
            found = lists(problem, here, max_neighbors=k)
            assert torch.equal(found.indices.cpu(), expected)
            assert torch.equal(found.counts.cpu(), counts)


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0), (0, 0)])
def test_no_points(sizes: tuple[int, int], lists: Callable, where: Where):
    query, points = (torch.rand(n, 3, device=where.device) for n in sizes)
    problem = Problem(query, points, points)
    nearest = lists(problem, 0.3, max_neighbors=4, displacements=True)
    assert nearest.displacements.shape == (sizes[0], 4, 3)
    assert nearest.indices.shape == (sizes[0], 4)
    assert (nearest.indices == -1).all()
    assert (nearest.counts == 0).all()
    listed = lists(problem, 0.3, capacity=None)
    assert len(listed.indices) == 0
    assert torch.equal(listed.row_splits.cpu(), torch.zeros(sizes[0] + 1, dtype=torch.int64))


def test_points_that_are_not_finite(lists: Callable, where: Where):
    problem = by_id("plain").problem(where.device)
    query, points = problem.query_points.clone(), problem.reference_points.clone()
    query[3, 1], points[7, 0], points[11, 2] = torch.nan, torch.inf, torch.nan
    nearest = lists(problem._replace(query_points=query, reference_points=points), 0.9, max_neighbors=50)
    assert not torch.isin(nearest.indices, torch.tensor([7, 11], device=where.device)).any()
    assert (nearest.indices[3] == -1).all()
    assert nearest.distances[3].isnan().all()
    assert nearest.counts[3] == 0
    listed = lists(problem._replace(query_points=query, reference_points=points), 0.9, capacity=None)
    assert torch.equal(listed.row_splits.diff().clamp(max=51), nearest.counts)


def test_no_points_in_an_odd_layout(lists: Callable, where: Where):
    points = torch.rand(5, 3, device=where.device)
    none = torch.empty(3, 0, device=where.device).T
    for query, others in ((none, points), (points, none)):
        assert len(lists(Problem(query, others, others), 0.3, capacity=None).indices) == 0


@pytest.mark.parametrize("k", [9, 40, 150])
@pytest.mark.parametrize("references", [0, 5])
def test_more_neighbors_than_points(references: int, k: int, lists: Callable, where: Where):
    query = torch.rand(5, 3, device=where.device)
    points, missing = query[:references], k - references
    nearest = lists(Problem(query, points, points), 9.0, max_neighbors=k)
    assert nearest.counts.tolist() == [references] * 5
    assert nearest.indices.sort(1).values.tolist() == [[-1] * missing + list(range(references))] * 5
    assert torch.equal(nearest.distances.isinf(), nearest.indices == -1)


@forms
def test_gradients_in_chunks(form: dict, monkeypatch: pytest.MonkeyPatch):
    points = [p.clone().requires_grad_() for p in by_id("fp64").problem()[:2]]

    def gradients() -> list[torch.Tensor]:
        found = radius_neighbors(*points, 1.05, backend="torch", **form)
        loss = torch.where(found.indices >= 0, found.distances, 0.0).square().sum()
        first = torch.autograd.grad(loss, points, create_graph=True)
        return [*first, *torch.autograd.grad(sum(f.sin().sum() for f in first), points)]

    at_once = gradients()
    monkeypatch.setattr(clouds, "VALUES_AT_ONCE", 3 * 50)
    for whole, in_chunks in zip(at_once, gradients(), strict=True):
        assert_close("gradient", in_chunks, whole)


@forms
@pytest.mark.parametrize("name", ["plain", "dense", "ragged"])
def test_compiled_equals_eager(form: dict, name: str, lists: Callable, where: Where):
    torch._dynamo.reset()
    case = by_id(name)
    problem = case.problem(where.device)

    def loss(query: Tensor) -> tuple[Tensor, Tensor]:
        found = lists(problem._replace(query_points=query), case.radius, displacements=True, **form)
        return torch.where(found.indices >= 0, found.distances, 0.0).square().sum(), found.indices

    query = problem.query_points.clone().requires_grad_()
    expected, indices = loss(query)
    value, got = torch.compile(loss, fullgraph=True, backend="aot_eager")(query)
    assert torch.equal(got, indices)
    assert_close("loss", value, expected)
    for_both = [torch.autograd.grad(v, query)[0] for v in (value, expected)]
    assert_close("d_query_points", *for_both)


@pytest.mark.gpu
@pytest.mark.parametrize("box", [None, (2.0, 2.0, 2.0)], ids=["open", "box"])
def test_inductor_on_a_gpu(box: tuple | None, on_gpu: Where):
    torch._dynamo.reset()
    problem = by_id("plain").problem("cuda")

    def search(query: Tensor) -> tuple[Tensor, ...]:
        found = radius_neighbors(
            query, problem.reference_points, 0.4, capacity=900, box=box, backend=on_gpu.backend
        )
        return *found[:3], found.query_indices

    compiled = torch.compile(search, fullgraph=True)(problem.query_points)
    names = ("row_splits", "indices", "distances", "query_indices")
    for name, got, expected in zip(names, compiled, search(problem.query_points), strict=True):
        if name == "distances":
            assert_close(name, got.nan_to_num(posinf=0.0), expected.nan_to_num(posinf=0.0))
        else:
            assert torch.equal(got, expected), name


@pytest.mark.gpu
@pytest.mark.parametrize("form", [{"max_neighbors": 4}, {"capacity": 2000}], ids=["padded", "csr"])
def test_captured_in_a_cuda_graph(form: dict, on_gpu: Where):
    case = by_id("ragged")
    problems = [case.problem("cuda", seed=seed) for seed in (0, 1)]
    static = problems[0]._replace(query_points=problems[0].query_points.clone())

    def search(problem: Problem) -> Neighbors | NeighborList:
        return radius_neighbors(
            problem.query_points,
            static.reference_points,
            0.4,
            backend=on_gpu.backend,
            **static.offsets,
            **form,
        )

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        search(static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = search(static)
    for problem in problems:
        static.query_points.copy_(problem.query_points)
        graph.replay()
        expected = search(problem)
        assert torch.equal(captured.indices, expected.indices)
        assert torch.equal(captured.distances, expected.distances)


@pytest.mark.gpu
def test_many_pairs_on_a_gpu(on_gpu: Where):
    """Rows of very different lengths, in the order of indices, against the torch backend."""
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(20_000, 3, generator=generator).cuda()
    points[:3000] *= 0.02
    found = radius_neighbors(points[::3].contiguous(), points, 0.15, capacity=None, backend=on_gpu.backend)
    expected = radius_neighbors(points[::3].contiguous(), points, 0.15, capacity=None, backend="torch")
    assert torch.equal(found.row_splits, expected.row_splits)
    assert torch.equal(found.indices, expected.indices)
    nearest, expected = (
        radius_neighbors(points, points, 0.15, max_neighbors=33, backend=name)
        for name in (on_gpu.backend, "torch")
    )
    assert torch.equal(nearest.indices, expected.indices)
    assert torch.equal(nearest.counts, expected.counts)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give either max_neighbors=K .* or capacity=M"),
        ({"max_neighbors": 3, "capacity": 9}, "give either max_neighbors=K .* or capacity=M"),
        ({"max_neighbors": 0}, "max_neighbors must be at least 1; got 0"),
        ({"max_neighbors": 2**31}, "max_neighbors must be at most 2147483646; got 2147483648"),
        ({"capacity": -1}, "capacity must be at least 0; got -1"),
        ({"max_neighbors": 3, "radius": 0.0}, "radius must be positive and finite; got 0"),
        (
            {"max_neighbors": 3, "radius": torch.ones(3)},
            r"one for each query; got torch.float32 of shape \(3,\)",
        ),
        ({"max_neighbors": 3, "radius": -torch.ones(9)}, "every radius must be positive and finite; got -1"),
        ({"max_neighbors": (3, 4)}, r"several scales need .* got radius=0.4 and max_neighbors=\(3, 4\)"),
        ({"max_neighbors": (3,), "radius": (0.1, 0.2)}, "one for each radius; got"),
        ({"max_neighbors": (3, 0), "radius": (0.1, 0.2)}, "max_neighbors must be at least 1; got 0"),
        ({"max_neighbors": 3, "box": (1.0, 1.0)}, "box must be a tuple of 3 lengths"),
        ({"max_neighbors": 3, "box": (1.0, 1.0, 0.0)}, "box must hold positive lengths"),
        ({"max_neighbors": 3, "box": (0.8, 1.0, 2.0)}, "less than half of every length of the box"),
    ],
)
def test_refusals(options: dict, message: str):
    arguments = {"query_points": torch.rand(9, 3), "reference_points": torch.rand(20, 3), "radius": 0.4}
    with pytest.raises((ValueError, TypeError), match=message):
        radius_neighbors(**(arguments | options), backend="torch")


def _specified_nearest(problem: Problem, radius: float | Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Rows within each cloud (dense) or packed (ragged), and counts, of the packed queries."""
    rows, counts = [], []
    for query, points, radii, first in _clouds(problem, radius):
        found = query.new_full((len(query), k), -1, dtype=torch.int64)
        count = found.new_zeros(len(query))
        if len(points) and len(query):
            nearest, count = reference.radius_search(query, points, radii, k)
            found[:, : nearest.shape[1]] = torch.where(nearest >= 0, nearest + first, -1)
        rows.append(found)
        counts.append(count)
    return torch.cat(rows), torch.cat(counts)


def _specified_list(problem: Problem, radius: float | Tensor) -> tuple[Tensor, Tensor]:
    counts, indices = [], []
    for query, points, radii, first in _clouds(problem, radius):
        row_splits, rows = reference.radius_list(query, points, radii)
        counts.append(row_splits.diff())
        indices.append(rows + first)
    return torch.nn.functional.pad(torch.cat(counts).cumsum(0), (1, 0)), torch.cat(indices)


def _clouds(problem: Problem, radius: float | Tensor) -> Iterator[tuple]:
    query, points = (t.reshape(-1, t.shape[-1]) for t in problem[:2])
    for q, r in problem.ranges():
        rows = slice(q.start, q.stop)
        radii = radius.reshape(-1)[rows] if isinstance(radius, Tensor) else radius
        yield query[rows], points[r.start : r.stop], radii, r.start if problem.offsets else 0


def _assert_distances(nearest: Neighbors, problem: Problem) -> None:
    query, points = (t.reshape(-1, 3).double() for t in problem[:2])
    size = problem.reference_points.shape[-2]
    rows = nearest.indices.reshape(-1, nearest.indices.shape[-1])
    cloud = 0
    if problem.query_points.ndim == 3:
        cloud = torch.arange(len(rows), device=rows.device)[:, None] // problem.query_points.shape[1]
    packed = torch.where(rows >= 0, rows + cloud * size, 0)
    expected = (query[:, None] - points[packed]).norm(dim=-1)
    distances = nearest.distances.reshape(rows.shape)
    assert distances.dtype == problem.query_points.dtype
    assert torch.equal(distances.isfinite(), rows >= 0)
    assert_close("distances", distances[rows >= 0], expected[rows >= 0].to(distances.dtype))
