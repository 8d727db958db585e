"""Warp's cell list where small clouds do not take it: crowded cells, empty ones, far points, many rows."""

import pytest
import torch
from torch import Tensor

import pointproj
from pointproj.benchmark.cases import clustered
from pointproj.ops.backends.warp import cell_list_build
from pointproj.ops.backends.warp.cell_list import FRAME, KNOTS
from pointproj.ops.backends.warp.cell_list_build import FEW_POINTS, build_cell_list
from pointproj.ops.specification import reference

K = 4


@pytest.fixture(autouse=True)
def least_graded(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The real numbers; here clouds of 2,048 points take the kernels of large ones on a GPU too."""
    given = cell_list_build.LEAST_GRADED
    monkeypatch.setattr(cell_list_build, "LEAST_GRADED", dict.fromkeys(given, 2048))
    return given


def _cloud(kind: str) -> Tensor:
    g = torch.Generator().manual_seed(0)
    if kind == "clustered":
        return clustered(5000)(g).float()
    if kind == "coincident":
        return torch.cat([torch.full((700, 3), 0.25), torch.rand(50, 3, generator=g)])
    if kind == "lattice":  # most distances are equal
        return torch.randint(0, 3, (9000, 3), generator=g).float()
    if kind == "two-balls":  # one in the corner, where cells extend to what is far away
        balls = torch.randn(3000, 3, generator=g) * 1e-3
        balls[:1500] += 5
        return torch.cat([balls, torch.rand(400, 3, generator=g), torch.tensor([[1e4, -1e4, 1e4]])])
    points = clustered(6000)(g).float()
    points[:512] = torch.nan  # so many in no cell
    return points


@pytest.mark.parametrize("kind", ["clustered", "coincident", "lattice", "two-balls", "not-finite"])
def test_crowded_cells(kind: str, device: str):
    points = _cloud(kind).to(device)
    queries = torch.cat([points[:300], points[-60:] + 0.01, torch.rand(100, 3, device=device) * 3 - 1])
    _, rows = pointproj.knn(queries, points, K, backend="warp")
    assert torch.equal(rows, reference.knn_search(queries, points, K))
    _, rows = pointproj.knn(points, points, K, backend="warp")
    some = torch.arange(0, len(points), 17, device=device)
    assert torch.equal(rows[some], reference.knn_search(points[some], points, K))


@pytest.mark.parametrize("radius", [None, 0.01, 10.0])
@pytest.mark.parametrize("kind", ["clustered", "two-balls", "not-finite"])
def test_every_finite_point_is_in_a_cell(kind: str, radius: float | None, device: str):
    """Sorted by cell, those that are not finite last; the cells count all of them."""
    points = _cloud(kind).to(device)
    cells = build_cell_list(points, None, 1, radius)
    finite = points.isfinite().all(1)
    rows = cells.points[:, 3].view(torch.int32).long()
    assert torch.equal(rows.sort().values, torch.arange(len(points), device=device))
    torch.testing.assert_close(cells.points[:, :3], points[rows], equal_nan=True, rtol=0, atol=0)
    assert torch.equal(rows[finite.sum() :].sort().values, (~finite).nonzero()[:, 0])
    start = cells.start
    assert start[0] == 0
    assert start[-1] == len(points)
    assert start[cells.shapes[0, 4]] == finite.sum()
    assert (start.diff() >= 0).all()


def _graded(count: int, g: torch.Generator) -> Tensor:
    """Half of the points from 1e-5 to 5 around a sphere, on a logarithmic scale, in a box of 80 x 40 x 40."""
    sphere = torch.nn.functional.normalize(torch.randn(count // 2, 3, generator=g), dim=1)
    distance = 1e-5 * (torch.rand(count // 2, 1, generator=g) * 13.1).exp()
    far = (torch.rand(count - count // 2, 3, generator=g) - 0.5) * torch.tensor([80.0, 40.0, 40.0])
    return torch.cat([sphere * (1 + distance), far])[torch.randperm(count, generator=g)]


@pytest.mark.parametrize("radius", [None, 1e-4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["graded", "clustered", "plane"])
def test_crowded_clouds_have_graded_cells(kind: str, dtype: torch.dtype, radius: float | None, device: str):
    """A point shares its cell with few others, and lies between its cell's ends."""
    g, count = torch.Generator().manual_seed(0), 30_000
    points = clustered(count)(g) if kind == "clustered" else _graded(count, g).double()
    if kind == "plane":
        points[:, 2] = 0.5
    points = points.to(device, dtype)
    cells = build_cell_list(points, None, 1, radius)
    occupancy = cells.start.diff().double()
    assert (occupancy**2).sum() / count < 30  # 3,000 and more in cells of equal width
    shape, between = cells.shapes[0, :3].tolist(), cells.shapes[0, 5:].tolist()
    assert all(b * min(n, KNOTS) <= n for b, n in zip(between, shape, strict=True))
    assert between[2 if kind == "plane" else 0] > 0
    knots = cells.frames[0, FRAME:].view(3, KNOTS + 1)
    for axis in range(3):
        assert (knots[axis, : shape[axis] // between[axis] + 1].diff() >= 0).all()
    queries = torch.cat([points[::97], points[::301] + 1e-4, points[::997] * 2])
    _, rows = pointproj.knn(queries, points, K, backend="warp")
    assert torch.equal(rows, reference.knn_search(queries, points, K))
    within = pointproj.radius_neighbors(queries, points, 1e-3, max_neighbors=5, backend="warp")
    expected = pointproj.radius_neighbors(queries, points, 1e-3, max_neighbors=5, backend="torch")
    assert torch.equal(within.indices, expected.indices)


def test_other_clouds_have_cells_of_equal_width(device: str):
    g = torch.Generator().manual_seed(0)
    for points in (torch.rand(30_000, 3, generator=g), torch.randn(30_000, 3, generator=g)):
        cells = build_cell_list(points.to(device), None, 1, None)
        assert cells.shapes[0, 5:].tolist() == [0, 0, 0]


def test_small_clouds_take_kernels_without_graded_grids(
    least_graded: dict[str, int], monkeypatch: pytest.MonkeyPatch, device: str
):
    monkeypatch.setattr(cell_list_build, "LEAST_GRADED", least_graded)
    points = _graded(least_graded[device], torch.Generator().manual_seed(0)).to(device)
    assert not cell_list_build.may_be_graded(build_cell_list(points[1:], None, 1, None))
    cells = build_cell_list(points, None, 1, None)
    assert cell_list_build.may_be_graded(cells)
    assert (cells.shapes[0, 5:] > 0).all()


def test_crowded_cells_of_several_clouds(device: str):
    clouds = [_cloud(kind).to(device) for kind in ("clustered", "coincident", "lattice")]
    offsets = torch.tensor([0, 5000, 5750, 14750], device=device)
    packed = torch.cat(clouds)
    given = {"query_offsets": offsets, "reference_offsets": offsets}
    _, rows = pointproj.knn(packed, packed, K, backend="warp", **given)
    begin = 0
    for points in clouds:
        some = torch.arange(0, len(points), 41, device=device)
        assert torch.equal(rows[begin + some] - begin, reference.knn_search(points[some], points, K))
        begin += len(points)


def _problem(kind: str) -> tuple[Tensor, Tensor, float, float]:
    """Queries, reference points, radius and sigma."""
    g = torch.Generator().manual_seed(0)
    if kind == "clustered":
        points = clustered(4000)(g).float()
        return points[:1500], points, 0.01, 0.01
    if kind == "sparse":
        points = torch.rand(3000, 3, generator=g) * 1000
        return points[:1000] + 1, points, 60.0, 20.0
    if kind == "not-finite":
        points = torch.randn(3000, 3, generator=g)
        points[::7], points[5] = torch.nan, torch.inf
        return points[:1100] + 0.01, points, 0.4, 0.1
    if kind == "beyond":  # most queries are in none of the references' cells
        points = torch.rand(2000, 3, generator=g)
        queries = torch.rand(1500, 3, generator=g) * 6 - 2
        return torch.cat([queries, queries[:300] * 1e4, points[:50]]), points, 0.2, 0.1
    if kind == "few":  # queries
        points = torch.rand(3000, 3, generator=g)
        return points[:100] + 0.01, points, 0.2, 0.1
    radius, sigma = {"wide": (1.5, 0.3), "small-sigma": (0.5, 2e-3), "dense": (0.3, 0.1)}[kind]
    return torch.rand(1100, 3, generator=g) * 2 - 1, torch.randn(3000, 3, generator=g), radius, sigma


def _derivatives(inputs: tuple[Tensor, ...], radius: float, backend: str) -> list[Tensor]:
    leaves = [t.clone().requires_grad_() for t in inputs]
    aggregated = pointproj.radius_aggregate(*leaves[:3], radius, sigma=leaves[3], backend=backend)
    upstream = torch.sin(torch.arange(aggregated.numel(), device=aggregated.device)).view_as(aggregated)
    gradients = torch.autograd.grad(aggregated, leaves, upstream.to(aggregated.dtype))
    return [aggregated.detach(), *gradients]


@pytest.mark.parametrize(
    ("kind", "channels"),
    [
        *(("clustered", 25), ("sparse", 8), ("not-finite", 3), ("wide", 25), ("small-sigma", 25)),
        *(("dense", 33), ("few", 8), ("beyond", 3)),
    ],
)
def test_sums_over_many_cells(kind: str, channels: int, device: str):
    queries, points, radius, sigma = _problem(kind)
    features = torch.randn(len(points), channels, generator=torch.Generator().manual_seed(1))
    inputs = tuple(t.to(device) for t in (queries, points, features, torch.tensor(sigma)))
    truth = _derivatives(tuple(t.double() for t in inputs), radius, "torch")
    plain, made = (_derivatives(inputs, radius, backend) for backend in ("torch", "warp"))
    for got, by_torch, expected in zip(made, plain, truth, strict=True):
        assert torch.equal(got.isnan(), expected.isnan())
        size = expected.nan_to_num().norm().clamp(min=torch.finfo(torch.float32).tiny)
        errors = [(t - expected).nan_to_num().norm() / size for t in (got, by_torch)]
        floor = 2e-5 if expected.numel() > 1 else 2e-4  # the terms of one sum may cancel
        assert errors[0] < floor + 3 * errors[1]


def test_a_table_of_many_points(device: str):
    """It has fewer cells for each."""
    g = torch.Generator().manual_seed(0)
    points = torch.rand(FEW_POINTS + 3, 3, generator=g).to(device)
    features = points[:, :2].contiguous()
    queries = points[::8001] + 1e-3
    got, expected = (
        pointproj.radius_aggregate(queries, points, features, 0.03, sigma=0.03, backend=b)
        for b in ("warp", "torch")
    )
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_infinite_features_reach_their_neighbors_alone(device: str):
    queries, points, radius, sigma = _problem("dense")
    features = torch.ones(len(points), 9)
    central = points.norm(dim=1).argsort()
    features[central[0]], features[central[1], 2] = torch.inf, torch.nan
    inputs = tuple(t.to(device) for t in (queries, points, features, torch.tensor(sigma)))
    got, expected = (
        pointproj.radius_aggregate(*inputs[:3], radius, sigma=sigma, backend=b) for b in ("warp", "torch")
    )
    assert torch.equal(got.isfinite(), expected.isfinite())
    assert not got.isfinite().all()


SHAPES = {"structured-grid": (64, 64, 32), "long-columns": (24, 24, 128)}


@pytest.mark.parametrize("order", ["by-x", *SHAPES])
def test_the_grid_spans_a_cloud_in_any_order(order: str, device: str):
    """Points in the order of a coordinate or of a structured grid get cells over the whole cloud."""
    if order == "by-x":
        points = torch.rand(70_000, 3, generator=torch.Generator().manual_seed(0))
        points = points[points[:, 0].argsort()]
    else:
        points = torch.cartesian_prod(*[torch.linspace(0, 1, n) for n in SHAPES[order]])
    cells = build_cell_list(points.to(device), None, 1, None)
    spans = cells.frames[0, 3:6] * cells.shapes[0, :3]
    assert (spans > 0.95).all(), spans
