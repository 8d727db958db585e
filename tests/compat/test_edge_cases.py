"""What every drop-in takes: clouds without points, every radius, arrays and dtypes; and how it refuses."""

import numpy as np
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
from tests.compat.comparison import points, squared_distances
from tests.compat.test_many_coordinates import NEAREST, WITHIN, X, Y, dense, edges, nearest_order
from tests.oracle import assert_close

NONE, SOME = torch.rand(0, 3), torch.rand(5, 3)


def test_nothing_to_find():
    assert (scipy.cKDTree(NONE).query(SOME, 2)[1] == 0).all()  # n
    assert scipy.cKDTree(NONE).query(SOME, 2)[0].isinf().all()
    assert [len(rows) for rows in scipy.cKDTree(NONE).query_ball_point(SOME, 1.0)] == [0] * 5
    for found in (dense(pytorch3d.knn_points, SOME, NONE, K=2, return_nn=True),):
        assert not found.dists.any()
        assert not found.idx.any()
        assert found.knn.shape == (1, 5, 2, 3)
    ball = dense(pytorch3d.ball_query, SOME, NONE, K=2)
    assert (ball.idx == -1).all()
    assert not ball.knn.any()
    dist, idx = dense(pointnet2.three_nn, SOME, NONE)
    assert dist.isinf().all()
    assert not idx.any()
    assert not pointnet2.ball_query(1.0, 4, NONE[None], SOME[None]).any()
    assert torch.equal(torch_geometric.knn_interpolate(torch.rand(0, 4), NONE, SOME), torch.zeros(5, 4))
    assert torch.equal(torch_geometric.nearest(SOME, NONE), torch.full((5,), -1))
    found = neuraloperator.NeighborSearch(return_norm=True)(NONE, SOME, 0.5)
    assert [len(found[name]) for name in ("neighbors_index", "neighbors_row_splits", "weights")] == [0, 6, 0]
    for batch in ((), (None,)):
        clouds = NONE[batch], SOME[batch]
        indices, near, distances = physicsnemo.radius_search(*clouds, 0.5, 4, True, True)
        assert (indices.shape[-2:], near.shape[-2:], distances.shape[-1]) == ((5, 4), (4, 3), 4)
        assert physicsnemo.radius_search(*clouds, 0.5).shape == (2 + len(batch), 0)
    assert physicsnemo.knn(NONE, SOME, 2)[1].isinf().all()
    assert physicsnemo.BQWarp()(NONE[None], SOME[None])[0].shape == (1, 5, 10)


RADII = [0.7, torch.tensor(0.7), np.float64(0.7), np.array(0.7)]


@pytest.mark.parametrize("radius", RADII, ids=["float", "tensor", "number", "array"])
def test_forms_of_a_radius(radius: object):
    expected = (squared_distances(Y, X) < 0.49).nonzero().T
    for name in ("query_ball_point", "radius_neighbors", "NeighborSearch", "radius_search"):
        assert torch.equal(WITHIN[name](X, Y, radius), expected), name


def test_a_radius_for_each():
    radii = points(11, seed=9)
    expected = (squared_distances(Y, X) <= (radii * radii)[:, None]).nonzero().T
    for form in (radii, radii.tolist(), radii.numpy()):
        assert torch.equal(edges(scipy.cKDTree(X).query_ball_point(Y, form)), expected)
        rows = sklearn.NearestNeighbors().fit(X).radius_neighbors(Y, form, return_distance=False)
        assert torch.equal(edges(rows), expected)
    with pytest.raises(ValueError, match="r must be a number, or have shape"):
        scipy.cKDTree(X).query_ball_point(Y, radii[:3])


def test_a_radius_of_0_finds_coincident_points_and_a_negative_one_is_refused():
    x = torch.tensor([[0.0, 0, 0], [1, 0, 0], [0, 0, 0]])
    found = neuraloperator.NeighborSearch()(x, x, 0)
    assert found["neighbors_index"].tolist() == [0, 2, 1, 0, 2]
    assert physicsnemo.radius_search(x, x, 0.0).tolist() == [[0, 0, 1, 2, 2], [0, 2, 1, 0, 2]]
    rows = sklearn.NearestNeighbors().fit(x).radius_neighbors(x, 0.0, return_distance=False)
    assert [found.tolist() for found in rows] == [[0, 2], [1], [0, 2]]
    for search in (
        lambda: neuraloperator.NeighborSearch()(x, x, -1.0),
        lambda: physicsnemo.radius_search(x, x, -1.0),
        lambda: sklearn.NearestNeighbors().fit(x).radius_neighbors(x, -0.5),
        lambda: scipy.cKDTree(x).query_ball_point(x, -1.0),
    ):
        with pytest.raises(ValueError, match="must not be negative"):
            search()


def test_points_on_a_line():
    x, y = points(30, 1), points(9, 1, seed=1)
    expected = ((y - x.T).abs() <= 0.1).nonzero().T
    found = neuraloperator.NeighborSearch(return_norm=True)(x, y, 0.1)
    assert torch.equal(found["neighbors_index"], expected[1])
    assert_close("weights", found["weights"], (y[expected[0]] - x[expected[1]])[:, 0] ** 2)


SEARCHES = {
    "torch_geometric": lambda x, y: torch_geometric.knn(x, y, 1),
    "pyg_lib": lambda x, y: pyg_lib.radius(x, y, 1.0),
    "pytorch3d": lambda x, y: dense(pytorch3d.knn_points, y, x),
    "pointnet2": lambda x, y: dense(pointnet2.three_nn, y, x),
    "scipy": lambda x, y: scipy.cKDTree(x).query(y),
    "sklearn": lambda x, y: sklearn.NearestNeighbors(n_neighbors=1).fit(x).kneighbors(y),
    "neuraloperator": lambda x, y: neuraloperator.NeighborSearch()(x, y, 1.0),
    "physicsnemo": lambda x, y: physicsnemo.radius_search(x, y, 1.0),
}


@pytest.mark.parametrize("name", SEARCHES)
def test_points_that_do_not_go_together(name: str):
    own = "x must consist of vectors of length|features, but|must have the same point dimension|equally many"
    for one, other in ((1, 2), (2, 3), (3, 5)):
        with pytest.raises(ValueError, match=own) as error:
            SEARCHES[name](torch.rand(8, one), torch.rand(4, other))
        assert "reference_points" not in str(error.value)
    with pytest.raises(TypeError, match="must be real; got complex data"):
        SEARCHES[name](torch.rand(8, 3) + 1j, torch.rand(4, 3))


@pytest.mark.parametrize("name", ["scipy", "sklearn"])
def test_arrays_and_lists(name: str):
    x, y = points(9, 3), points(4, 3, seed=1)
    expected = SEARCHES[name](x, y)
    for form in (Tensor.numpy, Tensor.tolist, lambda values: values.numpy()[:, ::-1][:, ::-1]):
        for one, other in zip(SEARCHES[name](form(x), form(y)), expected, strict=True):
            assert torch.equal(one, other)
    with pytest.raises(TypeError, match="must be a tensor, an array or a list of numbers; got list"):
        SEARCHES[name]([["one"]], y)


def test_two_precisions():
    x, y = points(50, 3, dtype=torch.float32), points(9, 3, seed=1)
    order = nearest_order(x.double(), y)[:, :4]
    assert torch.equal(scipy.cKDTree(x).query(y, 4)[1], order)
    assert torch.equal(sklearn.NearestNeighbors().fit(x).kneighbors(y, 4)[1], order)
    indices, distances = physicsnemo.radius_search(x, y, 0.9, 4, return_dists=True)
    assert torch.equal(indices.long(), order)
    assert distances.dtype == torch.float32


def test_messages_for_users_of_scikit_learn():
    fitted = sklearn.NearestNeighbors().fit(torch.rand(9, 3))
    for call, message in (
        (lambda: fitted.fit(torch.rand(4)), r"Expected X of shape \(samples, features\), got \(4,\)"),
        (lambda: fitted.fit(torch.rand(0, 4)), "Found array with 0 sample"),
        (lambda: fitted.kneighbors(torch.rand(2, 3), 0), "Expected n_neighbors > 0. Got 0"),
        (lambda: sklearn.NearestNeighbors(n_neighbors=0), "Expected n_neighbors > 0. Got 0"),
        (lambda: sklearn.NearestNeighbors(metric_params={"w": [1, 2, 3]}), "without metric_params"),
        (lambda: scipy.cKDTree(torch.rand(9, 3)).query(torch.rand(2, 3), None), "k must be an integer, or"),
        (lambda: scipy.cKDTree(torch.rand(9, 4), boxsize=1.0), "boxsize is for up to 3 coordinates"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match="n_neighbors must be an integer; got float"):
        fitted.kneighbors(torch.rand(2, 3), 2.0)
    sklearn.NearestNeighbors(metric="euclidean", p=1)  # p is of another metric


def test_gathering_what_was_not_found():
    x = points(2, 5, 3)
    idx = torch.tensor([[[0, -1]], [[4, -1]]])
    expected = torch.stack([x[0, 0], x[1, 4]])[:, None]
    gathered = pytorch3d.knn_gather(x, idx)
    assert torch.equal(gathered[:, :, 0], expected)
    assert not gathered[:, :, 1].any()


def test_more_neighbors_than_points_are_padded():
    x, y = points(3, 3), points(4, 3, seed=1)
    indices, distances = physicsnemo.knn(x, y, 5)
    assert torch.equal(indices[:, :3], nearest_order(x, y))
    assert (indices[:, 3:] == 3).all()
    assert distances[:, 3:].isinf().all()
    assert distances[:, :3].isfinite().all()


def test_names_of_implementations_are_taken():
    x = points(9, 3)
    for name in (None, "warp", "torch"):
        assert torch.equal(physicsnemo.knn(x, x, 2, implementation=name)[0], physicsnemo.knn(x, x, 2)[0])
        assert physicsnemo.radius_search(x, x, 0.1, 2, implementation=name).shape == (9, 2)


def test_all_neighbors_in_one_graph():
    def search(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return physicsnemo.radius_search(x, y, 0.4, None, return_dists=True, return_points=True)

    x, y = points(40, 3).requires_grad_(), points(9, 3, seed=1)
    torch._dynamo.reset()
    found = torch.compile(search, fullgraph=True, backend="aot_eager")(x, y), search(x, y)
    for name, one, other in zip(("indices", "points", "distances"), *found, strict=True):
        torch.testing.assert_close(one, other, msg=lambda text, name=name: f"{name}: {text}")
    gradients = [torch.autograd.grad(results[2].sin().sum(), x)[0] for results in found]
    assert_close("d_points", *gradients)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_interpolation_in_half_precision_stays_there(dtype: torch.dtype):
    x, pos = points(20, 4).to(dtype), points(20, 3, seed=1).to(dtype)
    got = torch_geometric.knn_interpolate(x, pos, pos[:5] + 0.05)
    assert got.dtype == dtype
    wide = torch_geometric.knn_interpolate(x.float(), pos.float(), (pos[:5] + 0.05).float())
    torch.testing.assert_close(got.float(), wide, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", ["knn", "knn_graph", "radius", "radius_graph"])
def test_searches_are_scripted_and_compiled(name: str):
    function, x = getattr(torch_geometric, name), points(30, 3)
    batch = torch.arange(30) // 15
    number = 3 if name.startswith("knn") else 0.3
    clouds, batches = ((x,), (batch,)) if name.endswith("graph") else ((x, x), (batch, batch))
    torch._dynamo.reset()
    for made in (torch.jit.script(function), torch.compile(function, fullgraph=True, backend="aot_eager")):
        assert torch.equal(made(*clouds, number), function(*clouds, number))
        assert torch.equal(made(*clouds, number, *batches), function(*clouds, number, *batches))


def test_nearest_point_of_another_cloud():
    x, y = points(40, 3), points(12, 3, seed=1)
    squared = squared_distances(x, y)
    assert torch.equal(torch_geometric.nearest(x, y), squared.argmin(1))
    batch_x, batch_y = torch.arange(40) // 25, torch.arange(12) // 7
    apart = squared.masked_fill(batch_x[:, None] != batch_y, torch.inf)
    assert torch.equal(torch_geometric.nearest(x, y, batch_x, batch_y), apart.argmin(1))
    ptr_x, ptr_y = torch.tensor([0, 25, 40]), torch.tensor([0, 7, 12])
    assert torch.equal(pyg_lib.nearest(x, y, ptr_x, ptr_y), apart.argmin(1))
    with pytest.raises(ValueError, match="batch_x must be in ascending order"):
        torch_geometric.nearest(x, y, batch_x.flip(0), batch_y)
    with pytest.raises(ValueError, match="must name the same clouds"):
        torch_geometric.nearest(x, y, batch_x)


@pytest.mark.peers
def test_layers_of_torch_geometric_search_with_ours():
    nn = pytest.importorskip("torch_geometric.nn", reason="torch-geometric is not installed")
    torch_geometric.install()
    torch_geometric.install()
    x, pos, batch = points(40, 8).float(), points(40, 3, seed=1).float(), torch.arange(40) // 20
    torch.manual_seed(0)
    layers = {
        "DynamicEdgeConv": (nn.DynamicEdgeConv(torch.nn.Linear(16, 5), k=4), (x, batch)),
        "GravNetConv": (nn.GravNetConv(8, 5, 3, 4, k=4), (x, batch)),
        "XConv": (nn.XConv(8, 5, dim=3, kernel_size=4, hidden_channels=4), (x, pos, batch)),
    }
    for name, (layer, inputs) in layers.items():
        values = layer(*inputs)
        assert values.shape == (40, 5), name
        values.sum().backward()
    layer = layers["DynamicEdgeConv"][0]
    edges = torch_geometric.knn_graph(x, 4, batch, loop=True)
    expected = nn.EdgeConv(layer.nn)(x, edges)
    assert_close("DynamicEdgeConv", layer(x, batch), expected)
    assert torch.equal(nn.knn(x, x, 3, batch, batch), torch_geometric.knn(x, x, 3, batch, batch))
    assert torch.equal(nn.radius_graph(pos, 0.4, batch), torch_geometric.radius_graph(pos, 0.4, batch))
    some = pos, pos[:20], batch, batch[10:30]
    assert torch.equal(nn.nearest(*some), torch_geometric.nearest(*some))


@pytest.mark.parametrize("dtype", [">f8", ">f4", ">i4", np.longdouble, object, "reversed"])
def test_arrays_of_every_kind_are_taken(dtype):
    given = np.random.default_rng(0).permutation(30).reshape(10, 3)
    array = given[::-1].copy()[::-1] if dtype == "reversed" else given.astype(dtype)
    expected = torch.cdist(*[torch.from_numpy(given).double()] * 2).sort(dim=1, stable=True)
    found = (
        scipy.cKDTree(array).query(array, 2),
        sklearn.NearestNeighbors(n_neighbors=2).fit(array).kneighbors(array),
    )
    for distances, rows in found:
        assert torch.equal(rows, expected.indices[:, :2])
        torch.testing.assert_close(distances.double(), expected.values[:, :2])
    with pytest.raises(TypeError, match="data must be a tensor, an array or a list of numbers; got ndarray"):
        scipy.cKDTree(np.array([[None, "a"]]))


def test_distances_are_in_the_dtype_of_the_points():
    x = points(9, 3).half()
    for found in (
        pytorch3d.knn_points(x[None], x[None], K=2).dists,
        pytorch3d.ball_query(x[None], x[None], K=2).dists,
        scipy.cKDTree(x).query(x, 2)[0],
        sklearn.NearestNeighbors(n_neighbors=2).fit(x).kneighbors(x)[0],
        pointnet2.three_nn(x[None], x[None])[0],
        physicsnemo.knn(x, x, 2)[1],
    ):
        assert found.dtype == torch.float16


BESIDES = {
    "query_ball_point": lambda x, y: scipy.cKDTree(x).query_ball_point(y, 0.8, return_length=True),
    "radius_neighbors": lambda x, y: sklearn.NearestNeighbors(radius=0.8).fit(x).radius_neighbors(y)[1][0],
    "ball_query": lambda x, y: pytorch3d.ball_query(y[None], x[None], K=9, radius=0.8).idx,
    "pointnet2.ball_query": lambda x, y: pointnet2.ball_query(0.8, 9, x[None], y[None]),
    "radius": lambda x, y: torch_geometric.radius(x, y, 0.8),
    "radius_search": lambda x, y: physicsnemo.radius_search(x, y, 0.8, 5),
    "NeighborSearch": lambda x, y: neuraloperator.NeighborSearch()(x, y, 0.8)["neighbors_index"],
    "fps": lambda x, y: torch_geometric.fps(x, random_start=False),
    **{name: lambda x, y, call=call: call(x, y, 3) for name, call in NEAREST.items()},
}


@pytest.mark.parametrize("name", BESIDES)
def test_a_default_device_is_not_taken_for_that_of_the_points(name: str):
    """A tensor that is made without a device would be on "meta", and have no values."""
    x, y = X[:, :3].contiguous(), Y[:, :3].contiguous()
    with torch.device("meta"):
        got = BESIDES[name](x, y)
    assert torch.equal(got, BESIDES[name](x, y))


@pytest.mark.parametrize("most", [4, 80, None])
def test_returned_points_of_a_radius_search_have_their_own_gradient(most: int | None):
    x, y = (p[:, :3].contiguous().requires_grad_() for p in (X, Y))
    found, distances = physicsnemo.radius_search(x, y, 0.8, most, return_dists=True)
    chosen = found[1] if most is None else found[distances > 0]
    neighbors = physicsnemo.radius_search(x, y, 0.8, most, return_points=True)[1]
    gradients = torch.autograd.grad(neighbors.sum(), (x, y), allow_unused=True)
    counts = torch.bincount(chosen.flatten().long(), minlength=len(x)).to(x.dtype)
    assert torch.equal(gradients[0], counts[:, None].expand(-1, 3))
    assert gradients[1] is None


@pytest.mark.parametrize("padding", [torch.nan, torch.inf, 0.0])
@pytest.mark.parametrize("dims", [3, 5])
@pytest.mark.parametrize("search", [pytorch3d.knn_points, pytorch3d.ball_query])
def test_padding_has_the_gradient_zero(search, dims: int, padding: float):
    x, y = (torch.rand(2, 6, dims, dtype=torch.float64) for _ in range(2))
    x[0, 4:], y[1, 3:] = padding, padding
    x.requires_grad_(), y.requires_grad_()
    found = search(x, y, torch.tensor([4, 6]), torch.tensor([6, 3]), K=5)
    gradients = torch.autograd.grad(found.dists.sum(), (x, y), create_graph=True)
    seconds = torch.autograd.grad(sum(g.square().sum() for g in gradients), (x, y))
    for of_x, of_y in (gradients, seconds):
        assert (of_x[0, 4:] == 0).all()
        assert (of_y[1, 3:] == 0).all()
        assert of_x.isfinite().all()
        assert of_y.isfinite().all()
