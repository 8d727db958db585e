"""``compat.torch_geometric``, ``torch_cluster``, ``pyg_lib`` against all pairs and against the libraries."""

import sys

import pytest
import torch
from torch import Tensor

from pointproj.compat import edges, pyg_lib, torch_cluster, torch_geometric
from tests.compat.comparison import assert_same_call, assert_same_derivatives, points, squared_distances

SEARCHES = ("knn", "knn_graph", "radius", "radius_graph")
SPLIT = [slice(0, 20), slice(20, 20), slice(20, 23), slice(23, 61)]  # clouds of x; the second is empty
QUERY_SPLIT = [slice(0, 4), slice(4, 9), slice(9, 20), slice(20, 37)]


def _batch(split: list[slice]) -> Tensor:
    return torch.cat([torch.full((s.stop - s.start,), cloud) for cloud, s in enumerate(split)])


def _all_pairs(x: Tensor, y: Tensor, batch_x: Tensor | None, batch_y: Tensor | None) -> Tensor:
    """Squared distances (M, N), inf between clouds."""
    squared = squared_distances(y, x)
    if batch_x is None:
        return squared
    return squared.masked_fill(batch_y[:, None] != batch_x, torch.inf)


def _nearest(squared: Tensor, k: int, limit: float = torch.inf) -> Tensor:
    """Edges to the k nearest below the limit, nearest first."""
    order = squared.argsort(dim=1, stable=True)[:, :k]
    queries = torch.arange(len(squared))[:, None].expand_as(order)
    kept = squared.gather(1, order) < limit
    return torch.stack([queries[kept], order[kept]])


def _within(squared: Tensor, r: float) -> Tensor:
    """Edges to all that are nearer than r."""
    return (squared < torch.tensor(r * r, dtype=squared.dtype)).nonzero().T


def _ascending(edges: Tensor) -> Tensor:
    """Edges by their first row, then by their second."""
    return edges.unique(dim=1)


def _clouds(dims: int, batched: bool, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    clouds = {"x": points(61, dims, seed=1, dtype=dtype), "y": points(37, dims, seed=2, dtype=dtype)}
    return clouds | ({"batch_x": _batch(SPLIT), "batch_y": _batch(QUERY_SPLIT)} if batched else {})


def _pairs_of(clouds: dict[str, Tensor]) -> Tensor:
    return _all_pairs(clouds["x"], clouds["y"], clouds.get("batch_x"), clouds.get("batch_y"))


@pytest.mark.parametrize("batched", [False, True], ids=["one-cloud", "clouds"])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_edges_are_those_of_all_pairs(dims: int, batched: bool):
    clouds = _clouds(dims, batched)
    squared = _pairs_of(clouds)
    assert torch.equal(torch_geometric.knn(k=5, **clouds), _nearest(squared, 5))
    for r, most in ((0.3, {}), (1.5, {}), (0.5, {"max_num_neighbors": 3})):  # 32 without, as GAOT calls it
        got = torch_geometric.radius(r=r, **most, **clouds)
        expected = _nearest(squared, *most.values() or [32], torch.tensor(r * r, dtype=squared.dtype))
        assert torch.equal(got, _ascending(expected))
    every = torch_geometric.radius(r=0.5, max_num_neighbors=None, **clouds)
    assert torch.equal(every, _within(squared, 0.5))


@pytest.mark.parametrize("loop", [False, True], ids=["others", "loops"])
def test_many_neighbors_are_cut_to_the_same_ones(loop: bool, monkeypatch: pytest.MonkeyPatch):
    x = points(61, 2, seed=1).mul(8).floor() / 8  # many of equal distance
    for most in (1, 5, 50):
        padded = torch_geometric.radius_graph(x, 0.4, _batch(SPLIT), loop, most)
        with monkeypatch.context() as patch:
            patch.setattr(edges, "MOST_PADDED", 0)
            listed = torch_geometric.radius_graph(x, 0.4, _batch(SPLIT), loop, most)
        assert torch.equal(listed, padded)


@pytest.mark.parametrize("loop", [False, True], ids=["others", "loops"])
def test_graphs_of_both_libraries_differ_by_what_flow_means(loop: bool):
    x, batch = _clouds(3, True)["x"], _batch(SPLIT)
    squared = _all_pairs(x, x, batch, batch)
    if not loop:
        squared.fill_diagonal_(torch.inf)
    nearest = _nearest(squared, 4)
    within = _ascending(_nearest(squared, 6, 0.16))
    ptr = torch.tensor([0, 20, 20, 23, 61])
    for flow, flipped in (("source_to_target", True), ("target_to_source", False)):
        graphs = {
            "knn": torch_geometric.knn_graph(x, 4, batch, loop, flow, batch_size=4),
            "radius": torch_geometric.radius_graph(x, 0.4, batch, loop, 6, flow),
        }
        assert torch.equal(graphs["knn"], nearest.flip(0) if flipped else nearest)
        assert torch.equal(graphs["radius"], within.flip(0) if flipped else within)
        assert torch.equal(pyg_lib.knn_graph(x, 4, ptr, loop, flow), graphs["knn"].flip(0))
        assert torch.equal(pyg_lib.radius_graph(x, 0.4, ptr, loop, 6, flow), graphs["radius"].flip(0))


def test_many_coincident_points_have_no_more_than_k_others():
    x = torch.zeros(9, 3)
    for graph in (torch_geometric.knn_graph(x, 4), torch_geometric.radius_graph(x, 0.1, max_num_neighbors=4)):
        assert (graph[0] != graph[1]).all()
        assert torch.equal(graph[1].bincount(), torch.full((9,), 4))


def test_cosine_finds_the_smallest_angles():
    x, y = points(40, 3, seed=3) - 0.5, points(12, 3, seed=4) - 0.5
    x[7], y[5] = 0.0, 0.0  # without a direction
    angles = 1 - torch.nn.functional.cosine_similarity(y[:, None], x, dim=-1, eps=0)
    expected = _nearest(angles.nan_to_num(nan=torch.inf), 3, torch.inf)
    assert torch.equal(torch_geometric.knn(x, y, 3, cosine=True), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, torch.float64])
def test_every_dtype_of_positions(dtype: torch.dtype):
    x, y = (points(50, 2, seed=s) * 100 for s in (5, 6))
    x, y = x.to(dtype), y.to(dtype)
    exact = squared_distances(y.double(), x.double())
    assert torch.equal(torch_geometric.knn(x, y, 4), _nearest(exact, 4))
    assert torch.equal(torch_geometric.radius(x, y, 17.5), _within(exact, 17.5))


def test_nothing_in_nothing_out_and_fewer_points_than_k():
    x, y = torch.rand(3, 3), torch.rand(5, 3)
    for found in (torch_geometric.knn(x[:0], y, 2), torch_geometric.radius(x, y[:0], 1.0)):
        assert found.shape == (2, 0)
        assert found.dtype == torch.int64
    assert torch_geometric.knn(x, y, 7).shape == (2, 15)
    assert torch_geometric.knn_graph(x, 2, batch_size=4).shape == (2, 6)  # without a batch vector: one cloud
    y[2] = torch.nan
    assert torch_geometric.knn(x, y, 2)[0].tolist() == [0, 0, 1, 1, 3, 3, 4, 4]


def test_errors():
    x, batch = torch.rand(6, 3), torch.tensor([0, 0, 0, 1, 1, 1])
    with pytest.raises(AssertionError, match="batch_x must name the cloud of each of the 6 points; got 5"):
        torch_geometric.knn(x, x, 2, batch[1:], batch)
    with pytest.raises(AssertionError, match="batch_y is missing"):
        torch_geometric.radius(x, x, 0.2, batch)
    with pytest.raises(AssertionError, match="flow must be"):
        torch_geometric.knn_graph(x, 2, flow="sideways")
    for search in (torch_geometric.knn, lambda *points: torch_geometric.radius(*points[:2], 1.0)):
        with pytest.raises(ValueError, match="x and y must have equally many coordinates"):
            search(x[:, :1], x[:, :2], 2)
        with pytest.raises(TypeError, match="y must be real; got complex data"):
            search(x, x + 1j, 2)
    with pytest.raises(ValueError, match="neighbours k must be at least 1; got 0"):
        torch_geometric.knn(x, x, 0)


@pytest.mark.parametrize("batched", [False, True], ids=["one-cloud", "clouds"])
def test_interpolation_and_all_its_derivatives(batched: bool):
    clouds = _clouds(3, batched, torch.float64)
    batches = {name: clouds[name] for name in clouds if name.startswith("batch")}
    if batched:  # no query in the empty cloud
        batches["batch_y"] = torch.tensor([0, 2, 2, 3])[batches["batch_y"]]
    squared = _all_pairs(clouds["x"], clouds["y"], batches.get("batch_x"), batches.get("batch_y"))
    found = squared.topk(3, largest=False)
    exists = found.values.isfinite()

    def by_definition(x: Tensor, pos_x: Tensor, pos_y: Tensor) -> Tensor:
        apart = (pos_y[:, None] - pos_x[found.indices]).square().sum(-1)
        weights = torch.where(exists, 1 / apart.clamp(min=1e-16), 0.0)[..., None]
        return (weights * x[found.indices]).sum(1) / weights.sum(1)

    def ours(x: Tensor, pos_x: Tensor, pos_y: Tensor) -> Tensor:
        return torch_geometric.knn_interpolate(x, pos_x, pos_y, **batches)

    inputs = {"x": points(61, 5, seed=7), "pos_x": clouds["x"], "pos_y": clouds["y"]}
    assert_same_derivatives(ours, by_definition, inputs)


def test_interpolation_at_a_point_is_its_feature_and_half_precision_is_widened():
    pos, x = points(30, 3, dtype=torch.float32), points(30, 4, seed=1, dtype=torch.float16)
    got = torch_geometric.knn_interpolate(x, pos, pos[:7])
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, x[:7].float())


def test_torch_cluster_has_the_same_functions():
    assert all(getattr(torch_cluster, name) is getattr(torch_geometric, name) for name in SEARCHES)


@pytest.mark.peers
@pytest.mark.parametrize("name", [*SEARCHES, "knn_interpolate"])
def test_signatures_of_torch_geometric(name: str):
    theirs = pytest.importorskip("torch_geometric.nn", reason="torch-geometric is not installed")
    assert_same_call(getattr(torch_geometric, name), getattr(theirs, name))


@pytest.mark.peers
@pytest.mark.parametrize("batched", [False, True], ids=["one-cloud", "clouds"])
def test_interpolation_of_torch_geometric(batched: bool, monkeypatch: pytest.MonkeyPatch):
    """Its own function and its gradient, with our search in place of the one that it needs pyg-lib for."""
    pytest.importorskip("torch_geometric.nn", reason="torch-geometric is not installed")
    module = sys.modules["torch_geometric.nn.unpool.knn_interpolate"]
    monkeypatch.setattr(module, "knn", torch_geometric.knn)
    clouds = _clouds(3, batched, torch.float64)
    pos_x, pos_y, x = clouds.pop("x"), clouds.pop("y"), points(61, 5, seed=7).requires_grad_()
    theirs = module.knn_interpolate(x, pos_x, pos_y, **clouds)
    ours = torch_geometric.knn_interpolate(x, pos_x, pos_y, **clouds)
    alone = theirs.isnan()  # in clouds without points
    assert alone.any() == batched
    assert torch.equal(ours == 0, alone)
    torch.testing.assert_close(ours[~alone], theirs[~alone])
    grads = [torch.autograd.grad(y[~alone].square().sum(), x)[0] for y in (ours, theirs)]
    torch.testing.assert_close(*grads, msg=lambda text: f"d_x: {text}")


@pytest.mark.peers
class TestTorchCluster:
    """Results of torch-cluster on the CPU, edge for edge."""

    @pytest.fixture(autouse=True)
    def theirs(self):
        reason = "torch-cluster is not installed: build it, pip install --no-build-isolation torch-cluster"
        return pytest.importorskip("torch_cluster", reason=reason)

    @pytest.mark.parametrize("name", SEARCHES)
    def test_signatures(self, name: str, theirs):
        ours, other = getattr(torch_cluster, name), getattr(theirs, name)
        assert_same_call(ours, other)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("batched", [False, True], ids=["one-cloud", "clouds"])
    @pytest.mark.parametrize("dims", [1, 2, 3])
    def test_searches(self, dims: int, batched: bool, dtype: torch.dtype, theirs):
        clouds = _clouds(dims, batched, dtype)
        for k in (1, 5, 50):
            assert torch.equal(torch_cluster.knn(k=k, **clouds), theirs.knn(k=k, **clouds))
        for r in (0.05, 0.3):
            got, expected = (m.radius(r=r, max_num_neighbors=61, **clouds) for m in (torch_cluster, theirs))
            assert torch.equal(got, _ascending(expected))
        few, expected = (m.radius(r=0.5, max_num_neighbors=4, **clouds) for m in (torch_cluster, theirs))
        assert torch.equal(few[0], expected[0])  # as many of each query; which of them, only we say

    @pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
    @pytest.mark.parametrize("loop", [False, True], ids=["others", "loops"])
    def test_graphs(self, loop: bool, flow: str, theirs):
        x, batch = _clouds(3, True)["x"], _batch(SPLIT)
        same = {"batch": batch, "loop": loop, "flow": flow}
        assert torch.equal(torch_cluster.knn_graph(x, 5, **same), theirs.knn_graph(x, 5, **same))
        same |= {"r": 0.3, "max_num_neighbors": 60}
        got, expected = (module.radius_graph(x, **same) for module in (torch_cluster, theirs))
        rows = [1, 0] if flow == "source_to_target" else [0, 1]
        assert torch.equal(got[rows], _ascending(expected[rows]))

    @pytest.mark.parametrize("r", [0.1, 0.2, 0.3, 0.1732050807, 0.0])
    def test_points_at_the_radius_itself(self, r: float, theirs):
        """A lattice, where rounding decides: theirs compares squares, and so do we."""
        axis = torch.arange(6) * 0.1
        x = torch.cartesian_prod(axis, axis, axis)
        got, expected = (m.radius_graph(x, r, max_num_neighbors=216) for m in (torch_cluster, theirs))
        assert torch.equal(got.flip(0), _ascending(expected.flip(0)))

    def test_integers_and_nothing(self, theirs):
        x = (points(40, 2, seed=8) * 64).long()
        assert torch.equal(torch_cluster.knn(x[:0], x, 3), theirs.knn(x[:0], x, 3))
        got, expected = (m.radius(x, x[:9], 20.0, max_num_neighbors=40) for m in (torch_cluster, theirs))
        assert torch.equal(got, _ascending(expected))
