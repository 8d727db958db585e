"""What drop-ins of fixed shapes promise: they compile as one graph, and nothing waits for the device."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from pointproj.compat import physicsnemo, pointnet2, pytorch3d, scipy, sklearn, torch_cluster, torch_geometric
from tests.compat.comparison import points
from tests.ops.test_gpu import waiting_is_an_error


def _propagated(x: Tensor, y: Tensor, features: Tensor) -> Tensor:
    dist, idx = pointnet2.three_nn(y[None], x[None])
    weight = 1 / (dist + 1e-8)
    return pointnet2.three_interpolate(features.T[None], idx, weight / weight.sum(2, keepdim=True))


def _padded(x: Tensor, y: Tensor, features: Tensor) -> Tensor:
    lengths = torch.full((1,), 30, device=x.device)
    found = pytorch3d.knn_points(y[None], x[None], lengths2=lengths, K=3, return_nn=True)
    return found.dists.sum() + found.knn.sum() + pytorch3d.knn_gather(features[None], found.idx).sum()


def _ball(x: Tensor, y: Tensor, features: Tensor) -> Tensor:
    _, neighbors, distances = physicsnemo.radius_search(x, y, 0.4, 50, return_dists=True, return_points=True)
    return neighbors.sum() + distances.square().sum()


@pytest.fixture(params=["torch_geometric", "pointnet2", "pytorch3d", "physicsnemo", "scipy", "sklearn"])
def call(request: pytest.FixtureRequest) -> Callable[[torch.device], tuple[Callable, tuple[Tensor, ...]]]:
    """A function of a library and its arguments on a device; trees are built before."""

    def on(device: str) -> tuple[Callable, tuple[Tensor, ...]]:
        x, y, features = (points(*shape).float().to(device) for shape in ((40, 3), (9, 3), (40, 4)))
        inputs = tuple(tensor.requires_grad_() for tensor in (x, y, features))
        tree, fitted = scipy.cKDTree(x), sklearn.NearestNeighbors(n_neighbors=3).fit(x)
        functions = {
            "torch_geometric": lambda x, y, features: torch_geometric.knn_interpolate(features, x, y),
            "pointnet2": _propagated,
            "pytorch3d": _padded,
            "physicsnemo": _ball,
            "scipy": lambda x, y, features: tree.query(y, 3)[0],
            "sklearn": lambda x, y, features: fitted.kneighbors(y)[0],
        }
        return functions[request.param], inputs

    return on


def test_one_graph(call: Callable):
    torch._dynamo.reset()
    function, inputs = call("cpu")
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*inputs), function(*inputs))


@pytest.mark.parametrize(
    "of", [pytorch3d, pointnet2, torch_cluster, torch_geometric], ids=lambda of: of.__name__
)
def test_a_radius_that_changes(of: object):
    """What torch.compile takes for a variable from the second radius on gives the same pairs."""
    torch._dynamo.reset()
    x, y = points(40, 3), points(30, 3, seed=1)
    calls = {
        pytorch3d: lambda r: pytorch3d.ball_query(y[None], x[None], K=4, radius=r).idx,
        pointnet2: lambda r: pointnet2.ball_query(r, 4, x[None], y[None]),
        torch_cluster: lambda r: torch_cluster.radius(x, y, r),
        torch_geometric: lambda r: torch_geometric.radius_graph(x, r),
    }
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(calls[of], fullgraph=True, backend=counter)
    for radius in (0.3, 0.5, 0.7, 0.9):
        assert torch.equal(compiled(radius), calls[of](radius))
    assert counter.frame_count <= 2


@pytest.mark.gpu
def test_nothing_waits(call: Callable):
    function, inputs = call("cuda")
    function(*inputs).square().sum().backward()
    with waiting_is_an_error():
        function(*inputs).square().sum().backward()
