"""Searches in periodic boxes, on every backend."""

from collections.abc import Callable

import pytest
import torch

from pointproj import knn
from pointproj.benchmark.cases import Problem
from tests.conftest import Where
from tests.ops.cases import by_id
from tests.oracle import assert_close


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.operators("radius")
def test_points_that_are_not_finite_in_a_periodic_box(bad: float, lists: Callable, where: Where):
    points = torch.tensor([[0.0, 0, 0], [bad, 0, 0]], device=where.device)
    found = lists(Problem(points, points, points), 0.3, capacity=None, box=(1.0, 1.0, 1.0))
    assert found.row_splits.tolist() == [0, 1, 1]
    assert found.indices.tolist() == [0]


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
