"""Searches in periodic boxes, on every backend."""

from collections.abc import Callable

import pytest
import torch

from pointproj import knn, radius_neighbors
from pointproj.benchmark.cases import Case, Problem
from tests.conftest import Where
from tests.ops.cases import by_id, uniform
from tests.oracle import assert_close


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.operators("radius")
def test_points_that_are_not_finite_in_a_periodic_box(bad: float, lists: Callable, where: Where):
    points = torch.tensor([[0.0, 0, 0], [bad, 0, 0]], device=where.device)
    found = lists(Problem(points, points, points), 0.3, capacity=None, box=(1.0, 1.0, 1.0))
    assert found.row_splits.tolist() == [0, 1, 1]
    assert found.indices.tolist() == [0]


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.operators("radius")
def test_periodic_box_equals_replicas(dims: int, lists: Callable, where: Where):
    case = Case("box", uniform(23, 61))
    problem = case.problem(where.device)
    box, radius = (1.5, 1.0, torch.inf)[:dims], 0.42
    query, points = (4 * t[:, :dims].contiguous() for t in problem[:2])  # far outside of the box
    problem = problem._replace(query_points=query, reference_points=points)
    inside = (query.new_tensor(box) if dims == 2 else query.new_tensor([*box[:2], 1e9])).view(1, -1)
    wrapped_query, wrapped = query.remainder(inside), points.remainder(inside)
    if dims == 3:  # not periodic along z
        wrapped_query[:, 2], wrapped[:, 2] = query[:, 2], points[:, 2]
    shifts = torch.cartesian_prod(torch.arange(-1, 2), torch.arange(-1, 2)).to(points) * inside[:, :2]
    shifts = torch.nn.functional.pad(shifts, (0, dims - 2))
    replicas = (wrapped + shifts[:, None]).flatten(0, 1)
    expected = radius_neighbors(wrapped_query, replicas, radius, capacity=None, backend="torch")
    copies = torch.stack([expected.query_indices, expected.indices % len(points)])
    expected_pairs = copies[:, (copies[0] * len(points) + copies[1]).argsort()]

    listed = lists(problem, radius, capacity=None, box=box, displacements=True)
    assert torch.equal(torch.stack([listed.query_indices, listed.indices]), expected_pairs)
    assert_close("lengths", listed.displacements.norm(dim=1), listed.distances)
    nearest = lists(problem, radius, max_neighbors=6, box=box)
    assert torch.equal(nearest.counts, expected.row_splits.diff().clamp(max=7))
    order = radius_neighbors(wrapped_query, replicas, radius, max_neighbors=6, backend="torch")
    assert torch.equal(nearest.indices, torch.where(order.indices >= 0, order.indices % len(points), -1))
    finite = order.distances.isfinite()
    assert torch.allclose(nearest.distances[finite], order.distances[finite], atol=1e-5)


def test_nearest_in_a_periodic_box(where: Where):
    problem = by_id("fp64").problem(where.device)
    query, points = problem[:2]
    box = (2.0, 2.5, 3.0)
    delta = query[:, None] - points
    delta -= query.new_tensor(box) * (delta / query.new_tensor(box)).round()
    expected = delta.norm(dim=-1).sort(dim=1)
    distances, rows = knn(query, points, 9, box=box, backend=where.backend)
    assert_close("distances", distances, expected.values[:, :9])
    assert torch.equal(rows, expected.indices[:, :9])
    few, rows = knn(query, points[:3], 3, box=box, backend=where.backend)  # an image may find one twice
    assert torch.equal(rows.sort(dim=1).values, torch.arange(3, device=rows.device).expand(len(query), 3))
    assert (few.diff(dim=1) >= 0).all()


def test_half_a_box_away_is_the_same_side_on_every_device(where: Where):
    """Both copies are as near; which of them gives the gradient must not depend on how a device divides."""
    box = (0.9375, 2.65625, 0.875)
    query = torch.zeros(1, 3, device=where.device)
    points = torch.diag(torch.tensor(box) / 2).to(where.device).requires_grad_()
    distances, rows = knn(query, points, 3, box=box, backend=where.backend)
    assert rows.tolist() == [[2, 0, 1]]
    gradient = torch.autograd.grad(distances.sum(), points)[0]
    assert torch.equal(gradient.cpu(), torch.eye(3))
