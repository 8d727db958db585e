"""Kernels of the triton backend where its contract tests are too small: cells of many points, long lists.

They run on a GPU, or on a CPU in Triton's interpreter, with ``TRITON_INTERPRET=1`` before ``pytest``.
"""

import os

import pytest
import torch
from torch import Tensor

import pointproj
from pointproj.benchmark.cases import clustered
from pointproj.ops.specification import reference
from tests.conftest import Where
from tests.ops import test_edge_mlp, test_vector_attention

pytest.importorskip("triton")

from pointproj.ops.backends.triton import linear_rows, pairs
from pointproj.ops.backends.triton.cell_list import CellList

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


@pytest.mark.parametrize("k", [9, 40], ids=["", "in-two-searches"])
def test_cells_of_many_points_and_cells_of_none(k: int, device: str):
    points = _clustered(140, device)
    query = torch.cat([points[:1] * 1.01, points[1:2] + 0.4, points[2:3] + 50.0])
    _, rows = pointproj.knn(query, points, k, backend="triton")
    assert torch.equal(rows, reference.knn_search(query, points, k))


@pytest.mark.parametrize("kind", [1e-30, 1e-12, 1e30, "not-finite"])
def test_grids_of_any_size_without_points_that_are_not_finite(kind: float | str, device: str):
    if kind == "not-finite":
        points = _clustered(300, device)
        points[::5], points[1::5, 2] = torch.nan, torch.inf
        query = points[:4].clone()
    else:
        points = torch.rand(80, 3, generator=torch.Generator().manual_seed(0)).to(device) * kind
        query = points[:3] * 1.1
    _, rows = pointproj.knn(query, points, 5, backend="triton")
    assert torch.equal(rows, reference.knn_search(query, points, 5))


def test_features_that_are_not_finite_reach_neighbors_only(device: str):
    points = _clustered(100, device)
    features = torch.ones(100, 3, device=device)
    broken = {1: (7, torch.nan), 2: (8, torch.inf)}
    for column, (row, value) in broken.items():
        features[row, column] = value
    aggregated = pointproj.radius_aggregate(points[:9], points, features, 0.3, backend="triton")
    for column, (row, _) in broken.items():
        is_neighbor = reference.within(points[:9], points, 0.3)[:, row]
        assert is_neighbor.any()
        assert not is_neighbor.all()
        assert torch.equal(~aggregated[:, column].isfinite(), is_neighbor)
    assert aggregated[:, 0].isfinite().all()


def test_a_cell_list_holds_every_point_once_and_cells_hold_their_points(device: str):
    points = _clustered(5000, device)
    points[17] = torch.nan
    cells = CellList(*pointproj.build_index(points, backend="triton").tables["knn"])
    rows = cells.rows.long()
    assert torch.equal(rows.sort().values, torch.arange(5000, device=device))
    assert torch.equal(cells.points.nan_to_num(5.0), points[rows].nan_to_num(5.0))
    assert rows[-1] == 17
    first, side = cells.first.long(), cells.side
    assert torch.equal(first[:-1, -1], first[1:, 0])
    assert (first[0, 0], first[-1, -1]) == (0, 4999)
    assert (first.diff(dim=1) >= 0).all()
    places = ((cells.points[:-1] - cells.frame[:3]) * cells.frame[3]).clamp(0, side - 1).int()
    x, y, z = places.unbind(1)
    numbers = torch.arange(side**3, device=device).repeat_interleave(first.diff(dim=1).flatten())
    assert torch.equal((z * side + y) * side + x, numbers)


def test_lists_within_a_radius_are_refused(device: str):
    points = _clustered(150, device)
    index = pointproj.build_index(points, radius=1.0, backend="triton")
    for options in ({"backend": "triton"}, {"index": index}):
        with pytest.raises(pointproj.BackendUnavailable, match="no lists operator; use one of native, torch"):
            pointproj.radius_neighbors(points, points, 1.0, max_neighbors=4, **options)


@pytest.mark.parametrize("sigma", [0.1, 1e-3], ids=["", "weights-that-vanish"])
def test_sums_of_many_points(sigma: float, device: str):
    generator = torch.Generator().manual_seed(0)
    query = torch.rand(3, 3, generator=generator).to(device)
    points = torch.rand(150, 3, generator=generator).to(device)
    features = torch.randn(150, 20, generator=generator).to(device).requires_grad_()
    upstream = torch.randn(3, 20, generator=generator).to(device)
    expected = reference.radius_aggregate(query, points, features, 0.6, sigma)
    aggregated = pointproj.radius_aggregate(query, points, features, 0.6, sigma=sigma, backend="triton")
    torch.testing.assert_close(aggregated, expected)
    (wanted,) = torch.autograd.grad(expected, features, upstream)
    (gradient,) = torch.autograd.grad(aggregated, features, upstream)
    torch.testing.assert_close(gradient, wanted)


@pytest.mark.parametrize(("form", "layers"), [("padded", "two"), ("csr", "two"), ("csr", "active")])
def test_attention_of_wide_layers_in_chunks(
    form: str, layers: str, device: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(pairs, "NARROW", 0)
    monkeypatch.setattr(pairs, "CHUNK_BYTES", 2**12)
    given = test_vector_attention.case(form, layers, device=device)
    got = test_vector_attention.apply(*given, Where("triton", device))
    of = test_vector_attention.named(given[0], given[2])
    if layers == "two":
        of.pop("score_layers.2.bias")
    test_edge_mlp.compare(got, test_vector_attention.by_hand(*given), of)


def test_layers_of_more_tiles_of_rows_than_programs(device: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(linear_rows, "PROGRAMS", 2)
    given = test_edge_mlp.case("largest-of-one-layer", device=device, references=170, with_distance=False)
    of = test_edge_mlp.named(given[0], given[2])
    test_edge_mlp.compare(
        test_edge_mlp.apply(*given, Where("triton", device)), test_edge_mlp.by_hand(*given), of
    )


@pytest.mark.parametrize("reduce", ["sum", "max"])
def test_gelu_in_single_precision(reduce: str, device: str):
    """As exact as torch's, whose error function is another."""
    inputs, *others = test_edge_mlp.case(
        "edge-convolution", dtype=torch.float32, device=device, reduce=reduce
    )
    got = test_edge_mlp.apply(inputs, *others, Where("triton", device))
    others[1].double()
    exact = {name: tensor.double() for name, tensor in inputs.items()}
    expected = test_edge_mlp.by_hand(exact, *others)
    torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=1e-6)


def test_layers_of_more_than_128_channels_in_tf32(device: str, monkeypatch: pytest.MonkeyPatch):
    """Results and gradients by their norms: TF32 has ten bits."""
    monkeypatch.setattr(pairs, "precision", lambda width: "tf32")
    options = {"widths": [20, 40, 140], "reduce": "sum", "ends": True, "device": device}
    inputs, *others = test_edge_mlp.case("edge-convolution", dtype=torch.float32, **options)
    single = test_edge_mlp.apply(inputs, *others, Where("triton", device))
    of = [*inputs.values(), *others[1].parameters()]
    got = [single, *torch.autograd.grad(single.square().sum(), of)]
    inputs, *others = test_edge_mlp.case("edge-convolution", **options)
    exact = test_edge_mlp.by_hand(inputs, *others)
    of = [*inputs.values(), *others[1].parameters()]
    for own, expected in zip(got, [exact, *torch.autograd.grad(exact.square().sum(), of)], strict=True):
        assert (own - expected).norm() < 5e-3 * expected.norm()
