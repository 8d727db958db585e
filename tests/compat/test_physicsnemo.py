"""``compat.physicsnemo`` against the library's own functions, in whose place it stands."""

import functools
from collections.abc import Iterator
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from pointproj.compat import physicsnemo as ours
from tests.compat.physicsnemo_library import import_physicsnemo

pytestmark = pytest.mark.peers

RADIUS = 0.3
NAMES = "indices", "points", "distances"


@pytest.fixture(scope="module")
def library() -> SimpleNamespace:
    """What is used of the library, which takes seconds to import."""
    import_physicsnemo()
    modules = {
        "physicsnemo.models.geotransolver": ["GeoTransolver"],
        "physicsnemo.nn": ["BQWarp"],
        "physicsnemo.nn.functional": ["knn", "radius_search"],
        "physicsnemo.nn.functional.neighbors.knn": ["KNN"],
        "physicsnemo.nn.functional.neighbors.radius_search": ["RadiusSearch"],
    }
    used = {name: getattr(import_module(module), name) for module, names in modules.items() for name in names}
    # By its own name: its package does not know it where an earlier import of the library has failed midway.
    return SimpleNamespace(**used, ball_query=import_module("physicsnemo.nn.module.ball_query"))


@pytest.fixture
def installed(library) -> Iterator[None]:
    """With ours in the library, for one test."""
    assert ours.NAME not in library.RadiusSearch.implementations()
    ours.install()
    yield
    ours.uninstall()
    assert ours.NAME not in (*library.RadiusSearch.implementations(), *library.KNN.implementations())


def _clouds(batch: int | None, points: int = 67, queries: int = 41, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = [[batch] * (batch is not None) + [count, 3] for count in (points, queries)]
    clouds = [torch.rand(size, generator=generator) for size in sizes]
    clouds[1][..., 3, :] = 7.0  # a query without neighbours
    return tuple(clouds)


def _with_gradients(function, points: Tensor, queries: Tensor, *arguments, **settings) -> dict[str, Tensor]:
    """Results by name, and the gradients of a sum over them."""
    leaves = {"points": points.clone().requires_grad_(), "queries": queries.clone().requires_grad_()}
    found = dict(zip(NAMES, function(*leaves.values(), *arguments, **settings), strict=True))
    total = found["points"].sin().sum() + found["distances"].cos().sum()
    gradients = torch.autograd.grad(total, leaves.values(), allow_unused=True)
    return found | {f"gradient of {name}": g for name, g in zip(leaves, gradients, strict=True)}


def _assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, of in expected.items():
        torch.testing.assert_close(got[name], of.to(got[name].dtype), msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("batch", [None, 2])
@pytest.mark.parametrize("max_points", [3, 20])
def test_nearest_within_are_those_of_their_torch_implementation(library, batch: int | None, max_points: int):
    arguments = *_clouds(batch), RADIUS, max_points, True, True
    expected = _with_gradients(library.radius_search, *arguments, implementation="torch")
    _assert_same(_with_gradients(ours.radius_search, *arguments), expected)


@pytest.mark.parametrize("batch", [None, 2])
def test_padding_and_dtypes_are_those_of_their_warp_implementation(library, batch: int | None):
    points, queries = _clouds(batch, points=13)
    arguments = points, queries, RADIUS, 16, True, True  # more slots than points
    theirs = dict(zip(NAMES, library.radius_search(*arguments, implementation="warp"), strict=True))
    mine = dict(zip(NAMES, ours.radius_search(*arguments), strict=True))
    order = torch.where(theirs["points"].any(-1), theirs["distances"], torch.inf).argsort(dim=-1, stable=True)
    for name, found in theirs.items():  # in the order in which it met them
        of = order if name != "points" else order[..., None].expand_as(found)
        torch.testing.assert_close(
            mine[name], found.gather(-1 if name != "points" else -2, of), msg=lambda t, n=name: f"{n}: {t}"
        )
    assert not mine["indices"][..., 3, :].any()  # padding is index 0


@pytest.mark.parametrize("batch", [None, 2])
@pytest.mark.parametrize("implementation", ["warp", "torch"])
def test_all_within_are_theirs(library, batch: int | None, implementation: str):
    arguments = *_clouds(batch), RADIUS, None, True, True
    results = []
    for function in (
        functools.partial(library.radius_search, implementation=implementation),
        ours.radius_search,
    ):
        found = _with_gradients(function, *arguments)
        *higher, lowest = found["indices"].long()
        order = (functools.reduce(lambda key, row: key * 100 + row, higher) * 100 + lowest).argsort()
        found["indices"] = found["indices"][:, order]
        results.append(found | {name: found[name][order] for name in ("points", "distances")})
    theirs, mine = results
    assert mine["indices"].dtype == torch.int32
    if implementation == "warp":  # a loss on distances trains nothing there
        assert theirs["gradient of queries"] is None
        theirs, mine = ({name: found[name] for name in NAMES} for found in (theirs, mine))
    _assert_same(mine, theirs)


def test_gradient_of_returned_points_is_theirs(library):
    points, queries = _clouds(2)
    gradients = []
    for function in (functools.partial(library.radius_search, implementation="warp"), ours.radius_search):
        leaf = points.clone().requires_grad_()
        _, found = function(leaf, queries, RADIUS, 32, return_points=True)
        gradients.append(torch.autograd.grad(found.sin().sum(), leaf)[0])
    torch.testing.assert_close(gradients[1], gradients[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_results_have_the_dtype_of_the_points(dtype: torch.dtype):
    points, queries = (cloud.to(dtype) for cloud in _clouds(None))
    indices, found, distances = ours.radius_search(points, queries, RADIUS, 4, True, True)
    assert (indices.dtype, found.dtype, distances.dtype) == (torch.int32, dtype, dtype)
    assert ours.knn(points, queries, 2)[1].dtype == dtype
    assert isinstance(ours.radius_search(points, queries, RADIUS, 4), Tensor)
    assert len(ours.radius_search(points, queries, RADIUS, 4, return_dists=True)) == 2


@pytest.mark.parametrize("implementation", ["torch", "scipy"])
def test_knn_is_theirs(library, implementation: str):
    results = []
    for function in (functools.partial(library.knn, implementation=implementation), ours.knn):
        points, queries = (cloud.requires_grad_() for cloud in _clouds(None))
        indices, distances = function(points, queries, 5)
        found = {"indices": indices, "distances": distances}
        if implementation == "torch":  # the other has none
            gradients = torch.autograd.grad(distances.sin().sum(), (points, queries))
            found |= dict(zip(("points", "queries"), gradients, strict=True))
        results.append(found)
    _assert_same(results[1], results[0])
    assert results[1]["indices"].dtype == results[0]["indices"].dtype


def test_errors_are_theirs(library):
    points, queries = _clouds(2)
    for function in (functools.partial(library.radius_search, implementation="warp"), ours.radius_search):
        with pytest.raises(ValueError, match="must be 2D"):
            function(points, queries[0], RADIUS, 4)
        with pytest.raises(ValueError, match="Batch dimensions must match"):
            function(points, queries[:1], RADIUS, 4)
    for function in (functools.partial(library.knn, implementation="torch"), ours.knn):
        with pytest.raises(ValueError, match="dtype"):
            function(points[0], queries[0].double(), 4)
    for layer in (library.BQWarp(), ours.BQWarp()):
        with pytest.raises(ValueError, match="must be 3"):
            layer(points[..., :2], queries)
        with pytest.raises(ValueError, match="p_grid must"):
            layer(points, queries[0])


@pytest.mark.parametrize("reverse", [True, False])
@pytest.mark.parametrize("grid", [(24,), (4, 6), (2, 3, 4)], ids=str)
def test_ball_query_layer_is_theirs(library, installed, reverse: bool, grid: tuple[int, ...]):
    points, queries = _clouds(2, queries=24)
    theirs = library.BQWarp(RADIUS, 6)(points, queries.view(2, *grid, 3), reverse)  # on ours
    mine = ours.BQWarp(RADIUS, 6)(points, queries.view(2, *grid, 3), reverse)
    assert all(torch.equal(*pair) for pair in zip(mine, theirs, strict=True))
    expected = library.radius_search(
        *((points, queries) if reverse else (queries, points)), RADIUS, 6, False, True
    )
    assert all(torch.equal(*pair) for pair in zip(mine, expected, strict=True))


def test_the_library_chooses_ours_once_installed(library, installed):
    ours.install()  # again
    assert library.RadiusSearch.implementations() == ("pointproj", "warp", "torch")
    points, queries = _clouds(None)
    assert library.knn(points.requires_grad_(), queries, 3)[1].requires_grad  # scipy's are not
    in_five = torch.cat([points, points[:, :2]], 1).detach()
    indices, _ = library.knn(in_five, in_five, 1)
    assert torch.equal(indices[:, 0], torch.arange(len(points)))
    named = library.knn(in_five, in_five, 1, implementation="pointproj")
    assert torch.equal(named[0], indices)


@pytest.mark.parametrize("batch", [None, 2])
def test_figconvnet_searches_with_ours_once_installed(library, installed, batch: int | None):
    package = "physicsnemo.models.figconvnet."
    name = "radius_search_warp" if batch is None else "batched_radius_search_warp"
    search, theirs = (
        getattr(import_module(package + of), name) for of in ("neighbor_ops", "warp_neighbor_search")
    )
    assert search is ours.radius_search_warp
    points, queries = _clouds(batch)
    index, distance, split = theirs(points, queries, RADIUS)
    queries_of = torch.arange(len(split) - 1).repeat_interleave(split.diff())
    order = (queries_of * 1000 + index).argsort()
    for got, expected in zip(
        search(points, queries, RADIUS), (index[order], distance[order], split), strict=True
    ):
        torch.testing.assert_close(got, expected)


def test_model_gives_the_same_output_and_gradients(library, installed, monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    model = library.GeoTransolver(
        **{"functional_dim": 5, "out_dim": 2, "geometry_dim": 3, "n_layers": 1, "n_hidden": 16, "n_head": 2},
        **{
            "slice_num": 4,
            "include_local_features": True,
            "radii": [0.1, RADIUS],
            "neighbors_in_radius": [3, 8],
        },
    )
    points, _ = _clouds(1)
    features = torch.randn(1, points.shape[1], 5, generator=torch.Generator().manual_seed(1))
    results = []
    for replaced in (False, True):
        if not replaced:  # its Warp implementation takes the neighbours that it meets first
            nearest = functools.partial(library.radius_search, implementation="torch")
            monkeypatch.setattr(library.ball_query, "radius_search", nearest)
        positions = points.clone().requires_grad_()
        values = model(features, local_positions=positions, geometry=positions)
        leaves = {"positions": positions, **dict(model.named_parameters())}
        gradients = torch.autograd.grad(values.square().mean(), leaves.values(), allow_unused=True)
        found = {"output": values, **dict(zip(leaves, gradients, strict=True))}
        results.append({name: value for name, value in found.items() if value is not None})
        monkeypatch.undo()
    _assert_same(results[1], results[0])
