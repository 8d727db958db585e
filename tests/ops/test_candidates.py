"""Exact neighbours out of a search that rounds badly, breaks ties at random and returns nonsense."""

import pytest
import torch
from torch import Tensor

from pointproj.benchmark.cases import W1, Case, clustered
from pointproj.ops.backends.cuml import candidates
from pointproj.ops.backends.cuml.candidates import candidates_of, exact_neighbors
from pointproj.ops.specification import reference
from pointproj.ops.specification.clouds import Clouds
from tests.ops.cases import CASES

ONE_CLOUD = [pytest.param(c, id=c.id) for c in CASES if c.k and not c.batch and not c.sizes]


def expanded(points: Tensor):
    """A search by |p|^2 + |q|^2 - 2 p.q in fp32, points in random order: ties and last digits are noise."""

    def search(query_points: Tensor, count: int) -> Tensor:
        shuffle = torch.randperm(len(points), generator=torch.Generator().manual_seed(3))
        some = points[shuffle]
        squared = (
            query_points.square().sum(1, keepdim=True) + some.square().sum(1) - 2 * query_points @ some.T
        )
        return shuffle[squared.topk(count, largest=False).indices]

    return search


def as_cuml(points: Tensor):
    """As cuML: of points with equal norms, squared distances below 1e-3 count as 0."""
    norms = points.square().sum(1)

    def search(query_points: Tensor, count: int) -> Tensor:
        own = query_points.square().sum(1, keepdim=True)
        squared = (own + norms - 2 * query_points @ points.T).clamp(min=0)
        squared[(squared.square() < 1e-6) & (own == norms)] = 0
        return squared.topk(count, largest=False).indices

    return search


def found(query_points: Tensor, points: Tensor, k: int, make=expanded) -> Tensor:
    prepared = candidates_of(points)
    return exact_neighbors(query_points, prepared, make(prepared.shifted), k)


@pytest.mark.parametrize("case", ONE_CLOUD)
def test_neighbors_are_the_specifications(case: Case):
    query, points = case.problem()[:2]
    assert torch.equal(found(query, points, case.k), reference.knn_search(query, points, case.k))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1e6, 1e15, 1e25])
@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_any_scale_and_place(dtype: torch.dtype, scale: float, offset: float):
    generator = torch.Generator().manual_seed(0)
    query, points = ((torch.rand(n, 3, generator=generator) + offset).to(dtype) * scale for n in (40, 300))
    assert torch.equal(found(query, points, 6), reference.knn_search(query, points, 6))


@pytest.mark.parametrize("scale", [1e-20, 1e-3, 1.0, 1e3])
def test_distances_that_cuml_takes_for_zero(scale: float):
    """Of a clump of 1,000 points many have equal norms, from the centre of a much larger cloud."""
    points = clustered(2000)(torch.Generator().manual_seed(0)).float() * scale
    assert torch.equal(found(points, points, 8, as_cuml), reference.knn_search(points, points, 8))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_points_that_are_not_finite(bad: float):
    generator = torch.Generator().manual_seed(0)
    query, points = (torch.rand(n, 3, generator=generator) for n in (20, 30))
    points[::4, 1] = bad
    query[3, 2] = bad
    rows = found(query, points, 25)
    assert torch.equal(rows, reference.knn_search(query, points, 25))
    assert (rows[3] == -1).all()
    assert (rows[:3, :22] >= 0).all()
    assert (rows[:, 22:] == -1).all()


def test_a_cloud_without_a_usable_point():
    query = torch.rand(4, 3)
    assert (found(query, torch.full((5, 3), torch.nan), 2) == -1).all()
    assert found(query, query.new_empty(0, 3), 2).shape == (4, 2)


@pytest.mark.parametrize("nonsense", [-1, 10**6, 0], ids=["negative", "beyond", "repeated"])
def test_nonsense_is_noticed(nonsense: int):
    generator = torch.Generator().manual_seed(0)
    query, points = (torch.rand(n, 3, generator=generator) for n in (20, 200))

    def broken(shifted: Tensor):
        search = expanded(shifted)

        def with_nonsense(query_points: Tensor, count: int) -> Tensor:
            rows = search(query_points, count)
            rows[::3, :2] = nonsense
            return rows

        return with_nonsense

    assert torch.equal(found(query, points, 5, broken), reference.knn_search(query, points, 5))


def test_few_rows_of_a_large_cloud_are_doubtful(monkeypatch: pytest.MonkeyPatch):
    """Searching among all points is for ties, not for every query."""
    asked = []

    def search_all(clouds: Clouds, tables: None, k: int) -> Tensor:
        asked.append(len(clouds.query_points))
        return reference.knn_search(clouds.query_points, clouds.reference_points, k)

    monkeypatch.setattr(candidates, "search_all", search_all)
    query, points = W1.problem()[:2]
    query = query[::90].contiguous()
    assert torch.equal(found(query, points, W1.k), reference.knn_search(query, points, W1.k))
    assert sum(asked) <= 1


def test_many_queries_go_in_parts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(candidates, "QUERIES_AT_ONCE", 7)
    generator = torch.Generator().manual_seed(0)
    query, points = (torch.rand(n, 3, generator=generator) for n in (30, 50))
    assert torch.equal(found(query, points, 5), reference.knn_search(query, points, 5))
