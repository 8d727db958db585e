"""Nearest points and points within a radius of clouds of many coordinates, from every drop-in."""

import pytest
import torch
from torch import Tensor

from pointproj.compat import (
    neuraloperator,
    physicsnemo,
    pointnet2,
    pyg_lib,
    pytorch3d,
    scipy,
    sklearn,
    torch_geometric,
)
from tests.compat.comparison import assert_same_derivatives, points, squared_distances

X, Y = points(60, 6), points(11, 6, seed=1)


def nearest_order(x: Tensor = X, y: Tensor = Y) -> Tensor:
    return squared_distances(y, x).argsort(dim=-1, stable=True)


def dense(function, *clouds: Tensor, **options):
    return function(*(cloud[None] for cloud in clouds), **options)


NEAREST = {
    "knn": lambda x, y, k: torch_geometric.knn(x, y, k)[1].view(len(y), k),
    "pyg_lib": lambda x, y, k: pyg_lib.knn(x, y, k)[1].view(len(y), k),
    "knn_points": lambda x, y, k: dense(pytorch3d.knn_points, y, x, K=k).idx[0],
    "three_nn": lambda x, y, k: dense(pointnet2.three_nn, y, x)[1][0, :, :k].long(),
    "cKDTree": lambda x, y, k: scipy.cKDTree(x).query(y, k)[1],
    "kneighbors": lambda x, y, k: sklearn.NearestNeighbors().fit(x).kneighbors(y, k)[1],
    "physicsnemo": lambda x, y, k: physicsnemo.knn(x, y, k)[0],
}


@pytest.mark.parametrize("name", NEAREST)
def test_nearest_of_many_coordinates(name: str):
    assert torch.equal(NEAREST[name](X, Y, 3), nearest_order()[:, :3])
    many = points(3000, 40, seed=2), points(20, 40, seed=3)
    assert torch.equal(NEAREST[name](*many, 3), nearest_order(*many)[:, :3])


WITHIN = {
    "radius": lambda x, y, r: torch_geometric.radius(x, y, r, max_num_neighbors=None),
    "radius-200": lambda x, y, r: torch_geometric.radius(x, y, r, max_num_neighbors=200),
    "pyg_lib": lambda x, y, r: pyg_lib.radius(x, y, r, max_num_neighbors=200),
    "query_ball_point": lambda x, y, r: edges(scipy.cKDTree(x).query_ball_point(y, r)),
    "radius_neighbors": lambda x, y, r: edges(
        sklearn.NearestNeighbors(radius=r).fit(x).radius_neighbors(y)[1]
    ),
    "NeighborSearch": lambda x, y, r: edges_of_list(neuraloperator.NeighborSearch()(x, y, r)),
    "ball_query": lambda x, y, r: edges(dense(pytorch3d.ball_query, y, x, K=len(x), radius=r).idx[0]),
    "radius_search": lambda x, y, r: physicsnemo.radius_search(x, y, r).long(),
}


def edges(rows_of_each) -> Tensor:
    rows = [torch.as_tensor(rows) for rows in rows_of_each]
    queries = torch.arange(len(rows)).repeat_interleave(torch.tensor([len(r) for r in rows]))
    edges = torch.stack([queries, torch.cat(rows)])
    return edges[:, edges[1] >= 0]


def edges_of_list(found: dict[str, Tensor]) -> Tensor:
    queries = torch.arange(len(Y)).repeat_interleave(found["neighbors_row_splits"].diff())
    return torch.stack([queries, found["neighbors_index"]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", WITHIN)
def test_all_within_of_many_coordinates(name: str, dtype: torch.dtype):
    x, y = X.to(dtype), Y.to(dtype)
    squared = squared_distances(Y, X)
    for r in (0.5, 0.9, 1e30, 1e300, torch.inf):
        assert torch.equal(WITHIN[name](x, y, r), (squared < r * r).nonzero().T), r


def test_a_point_at_the_radius_with_many_coordinates():
    x = torch.cartesian_prod(*[torch.arange(3) * 0.1] * 5)
    squared = squared_distances(x, x)
    for r in (0.1, 0.2, 0.1 * 2**0.5, 0.3):
        limit = torch.tensor(r * r, dtype=x.dtype)
        assert torch.equal(WITHIN["query_ball_point"](x, x, r), (squared <= limit).nonzero().T)
        assert torch.equal(WITHIN["radius"](x, x, r), (squared < limit).nonzero().T)


def test_the_nearest_of_more_within_a_radius_of_many_coordinates():
    squared = squared_distances(X, X).fill_diagonal_(torch.inf)
    order = squared.argsort(dim=1, stable=True)[:, :4]
    near = squared.gather(1, order) < 0.8**2
    expected = torch.stack([torch.arange(60)[:, None].expand(-1, 4)[near], order[near]]).unique(dim=1)
    got = torch_geometric.radius_graph(X, 0.8, max_num_neighbors=4, flow="target_to_source")
    assert torch.equal(got, expected)


def test_first_of_many_coordinates():
    inside = squared_distances(Y, X) < 0.81
    for row, found in zip(inside, dense(pytorch3d.ball_query, Y, X, K=4, radius=0.9).idx[0], strict=True):
        first = row.nonzero()[:4, 0].tolist()
        assert found.tolist() == first + [-1] * (4 - len(first))


def interpolated(x: Tensor, pos_x: Tensor, pos_y: Tensor) -> Tensor:
    rows = nearest_order()[:, :3]
    weights = 1 / (pos_y[:, None] - pos_x[rows]).square().sum(-1, keepdim=True).clamp(min=1e-16)
    return (weights * x[rows]).sum(1) / weights.sum(1)


def test_derivatives_with_many_coordinates():
    rows = nearest_order()[:, :3]

    def squares(x: Tensor, y: Tensor) -> Tensor:
        return (y[:, None] - x[rows]).square().sum(-1)

    inputs = {"x": X, "y": Y}
    assert_same_derivatives(lambda x, y: dense(pytorch3d.knn_points, y, x, K=3).dists[0], squares, inputs)
    for ours in (
        lambda x, y: scipy.cKDTree(x).query(y, 3)[0],
        lambda x, y: sklearn.NearestNeighbors().fit(x).kneighbors(y, 3)[0],
        lambda x, y: physicsnemo.knn(x, y, 3)[1],
    ):
        assert_same_derivatives(ours, lambda x, y: squares(x, y).sqrt(), inputs)
    inputs = {"x": points(60, 2, seed=5), "pos_x": X, "pos_y": Y}
    assert_same_derivatives(torch_geometric.knn_interpolate, interpolated, inputs)
