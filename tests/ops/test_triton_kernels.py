"""Kernels of the triton backend where its contract tests are too small: many groups of leaves, long lists.

They run on a GPU, or on a CPU in Triton's interpreter, with ``TRITON_INTERPRET=1`` before ``pytest``.
"""

import os

import pytest
import torch
from torch import Tensor

import pointproj
from pointproj.ops import reference
from pointproj.ops.cases import clustered

pytest.importorskip("triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(
    params=[
        pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ]
)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def _clustered(count: int, device: str) -> Tensor:
    return clustered(count)(torch.Generator().manual_seed(0)).float().to(device)


@pytest.mark.usefixtures("anew")
def test_more_groups_than_are_looked_at_together(device: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pointproj.ops.backends.triton.tree.ENCODED", 8192)  # few programs to interpret
    points = _clustered(132_000, device)
    query = points[:4] * 1e-4 + 0.3  # one tile, in the cluster
    _, rows = pointproj.knn(query, points, 9, backend="triton")
    assert torch.equal(rows, reference.knn_search(query, points, 9))


def test_points_that_are_not_finite_lie_in_no_box(device: str):
    points = _clustered(3000, device)
    points[::5] = torch.nan
    points[1::5, 2] = torch.inf
    query = points[:40].clone()
    _, rows = pointproj.knn(query, points, 5, backend="triton")
    assert torch.equal(rows, reference.knn_search(query, points, 5))


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_features_that_are_not_finite_reach_neighbors_only(broken: float, device: str):
    points = _clustered(100, device)
    features = torch.ones(100, 3, device=device)
    features[7, 1] = broken
    aggregated = pointproj.radius_aggregate(points, points, features, 0.3, backend="triton")
    is_neighbor = (reference.squared_distances(points, points).sqrt() <= 0.3)[:, 7]
    assert is_neighbor.any()
    assert torch.equal(~aggregated[:, 1].isfinite(), is_neighbor)
    assert aggregated[:, [0, 2]].isfinite().all()
    assert not is_neighbor.all()


def test_a_tree_holds_every_point_once_and_boxes_hold_their_points(device: str):
    points = _clustered(5000, device)
    points[17] = torch.nan
    tree = pointproj.build_index(points, backend="triton").tables["knn"]
    rows = tree.rows[tree.rows >= 0].long()
    assert torch.equal(rows.sort().values, torch.arange(5000, device=device))
    assert torch.equal(tree.points.T[:5000].nan_to_num(5.0), points[rows].nan_to_num(5.0))
    leaves = tree.rows.shape[0] // 32
    low, high = tree.boxes[:3, :leaves], tree.boxes[3:, :leaves]
    by_leaf = tree.points.view(3, leaves, 32)
    finite = by_leaf.isfinite().all(0)
    assert torch.equal(torch.where(finite, by_leaf, torch.inf).amin(-1), low)
    assert torch.equal(torch.where(finite, by_leaf, -torch.inf).amax(-1), high)
    volume = (high - low)[:, finite.all(1)].prod(0).sum()
    assert volume < 2 * 8  # no more than twice the cube that the points fill


def test_lists_of_more_than_a_program_holds(device: str):
    points = _clustered(150, device)
    query = points[::40].clone()
    nearest = pointproj.radius_neighbors(query, points, 1.6, max_neighbors=40, backend="triton")
    rows, counts = reference.radius_search(query, points, 1.6, 40)
    assert torch.equal(nearest.indices, rows)
    assert torch.equal(nearest.counts, counts)
    assert 64 < counts.max() < len(points)
    listed = pointproj.radius_neighbors(query, points, 1.6, capacity=200, backend="triton")
    row_splits, rows = reference.radius_list(query, points, 1.6)
    assert torch.equal(listed.row_splits, row_splits.clamp(max=200))
    assert torch.equal(listed.indices, rows[:200])


@pytest.mark.usefixtures("anew")
@pytest.mark.parametrize(("sigma", "programs"), [(0.1, 2), (1e-3, 2048)], ids=["", "weights-that-vanish"])
def test_sums_of_more_points_than_wait_at_once(
    sigma: float, programs: int, device: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("pointproj.ops.backends.triton.radius_sums.MOST_PROGRAMS", programs)
    generator = torch.Generator().manual_seed(0)
    query = torch.rand(40, 3, generator=generator).to(device)
    points = torch.rand(1500, 3, generator=generator).to(device)
    features = torch.randn(1500, 20, generator=generator).to(device).requires_grad_()
    upstream = torch.randn(40, 20, generator=generator).to(device)
    expected = reference.radius_aggregate(query, points, features, 0.6, sigma)
    aggregated = pointproj.radius_aggregate(query, points, features, 0.6, sigma=sigma, backend="triton")
    torch.testing.assert_close(aggregated, expected)
    (wanted,) = torch.autograd.grad(expected, features, upstream)
    (gradient,) = torch.autograd.grad(aggregated, features, upstream)
    torch.testing.assert_close(gradient, wanted)
