"""Drop-ins give the same neighbours on a GPU as on the CPU, also where a pair is at the radius itself."""

from collections.abc import Callable

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
from tests.compat.comparison import points

pytestmark = pytest.mark.gpu
R = 0.2  # a multiple of the lattice's spacing


def _lattice() -> Tensor:
    axis = torch.arange(7) * 0.1
    return torch.cartesian_prod(axis, axis, axis)


def _flat(found: object) -> list[Tensor]:
    """All tensors of a result, in order."""
    if isinstance(found, Tensor):
        return [found]
    return [tensor for part in found if part is not None for tensor in _flat(part)]


CALLS = {
    "knn": lambda x, y, batch: torch_geometric.knn(x, y, 6, batch, batch[: len(y)]),
    "knn_graph": lambda x, y, batch: torch_geometric.knn_graph(x, 6, batch),
    "knn-cosine": lambda x, y, batch: torch_geometric.knn(points(90, 3).to(x), y, 4, cosine=True),
    "radius": lambda x, y, batch: torch_geometric.radius(x, y, R, batch, batch[: len(y)], 16),
    "radius_graph": lambda x, y, batch: torch_geometric.radius_graph(x, R, batch, batch_size=3),
    "every": lambda x, y, batch: torch_geometric.radius(x, y, R, max_num_neighbors=None),
    "pyg_lib": lambda x, y, batch: pyg_lib.radius(x, y, R, max_num_neighbors=9),
    "interpolate": lambda x, y, batch: torch_geometric.knn_interpolate(
        x.sin(), x, y + 0.03, batch, batch[: len(y)]
    ),
    "knn_points": lambda x, y, batch: pytorch3d.knn_points(y[None], x[None], K=8, return_nn=True),
    "ball_query": lambda x, y, batch: pytorch3d.ball_query(y[None], x[None], K=8, radius=R),
    "three_nn": lambda x, y, batch: pointnet2.three_nn(y[None], x[None]),
    "pointnet2-ball": lambda x, y, batch: pointnet2.ball_query(R, 8, x[None], y[None]),
    "query": lambda x, y, batch: scipy.cKDTree(x, boxsize=0.7).query(y, 5, distance_upper_bound=R),
    "query_ball_point": lambda x, y, batch: scipy.cKDTree(x).query_ball_point(y, R),
    "radius_search": lambda x, y, batch: physicsnemo.radius_search(x, y, R, 12, True, True),
    "radius_search-all": lambda x, y, batch: physicsnemo.radius_search(x[None], y[None], R, None, True, True),
    "NeighborSearch": lambda x, y, batch: neuraloperator.NeighborSearch(return_norm=True)(x, y, R).values(),
    "kneighbors": lambda x, y, batch: sklearn.NearestNeighbors().fit(x).kneighbors(),
    "radius_neighbors": lambda x, y, batch: sklearn.NearestNeighbors(radius=R).fit(x).radius_neighbors(y),
}


@pytest.mark.parametrize("name", CALLS)
def test_as_on_the_cpu(name: str):
    x = _lattice()
    batch = torch.arange(len(x)) // 115
    call: Callable = CALLS[name]
    expected = _flat(call(x, x[:60], batch))
    got = _flat(call(x.cuda(), x[:60].cuda(), batch.cuda()))
    for number, (one, other) in enumerate(zip(got, expected, strict=True)):
        assert one.device.type == "cuda"
        torch.testing.assert_close(one.cpu(), other, msg=lambda text, number=number: f"{number}: {text}")
