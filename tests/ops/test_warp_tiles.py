"""Warp's sums within a radius where small clouds do not take them: many tiles, wrapping and dense cells."""

import pytest
import torch
from torch import Tensor

import pointproj
from pointproj.ops.backends.warp import sparse_tiles
from pointproj.ops.backends.warp.cell_width import THREADS, widen_kernel
from pointproj.ops.backends.warp.common import Batch
from pointproj.ops.backends.warp.hash_grid import SearchedGrid, Side, build_hash_grid
from pointproj.ops.backends.warp.hash_table import MANY_POINTS
from pointproj.ops.backends.warp.radius_pairs import RadiusProblem
from pointproj.ops.backends.warp.row_order import rows_in_order
from pointproj.ops.bridge.warp_op import Launch
from pointproj.ops.cases import W2, clustered
from pointproj.ops.reference import KERNELS


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def _clouds(kind: str) -> tuple[Tensor, Tensor, float, float]:
    """Queries, reference points, radius and sigma."""
    g = torch.Generator().manual_seed(0)
    if kind == "clustered":
        points = clustered(4000)(g).float()
        return points[:1500], points, 0.01, 0.01
    if kind == "sparse":  # far wider than the table of cells
        points = torch.rand(3000, 3, generator=g) * 1000
        return points[:1000] + 1, points, 60.0, 20.0
    if kind == "not-finite":
        points = torch.randn(3000, 3, generator=g)
        points[::7], points[5] = torch.nan, torch.inf
        return points[:1100] + 0.01, points, 0.4, 0.1
    if kind == "few":  # queries, whose cells are wide
        points = torch.rand(3000, 3, generator=g)
        return points[:100] + 0.01, points, 0.2, 0.1
    radius, sigma = {"wide": (1.5, 0.3), "small-sigma": (0.5, 2e-3), "dense": (0.3, 0.1)}[kind]
    return torch.rand(1100, 3, generator=g) * 2 - 1, torch.randn(3000, 3, generator=g), radius, sigma


def _derivatives(inputs: tuple[Tensor, ...], radius: float, **options) -> list[Tensor]:
    leaves = [t.clone().requires_grad_() for t in inputs]
    aggregated = pointproj.radius_aggregate(*leaves[:3], radius, sigma=leaves[3], **options)
    upstream = torch.sin(torch.arange(aggregated.numel(), device=aggregated.device)).view_as(aggregated)
    upstream = upstream.to(aggregated.dtype)
    gradients = torch.autograd.grad(aggregated, leaves, upstream, allow_unused=True, materialize_grads=True)
    return [aggregated.detach(), *gradients]


def _compare(inputs: tuple[Tensor, ...], radius: float, **options) -> None:
    truth = _derivatives(tuple(t.double() for t in inputs), radius, backend="torch", **options)
    plain = _derivatives(inputs, radius, backend="torch", **options)
    made = _derivatives(inputs, radius, backend="warp", **options)
    for got, by_torch, expected in zip(made, plain, truth, strict=True):
        assert torch.equal(got.isnan(), expected.isnan())
        size = expected.nan_to_num().norm().clamp(min=torch.finfo(torch.float32).tiny)
        errors = [(t - expected).nan_to_num().norm() / size for t in (got, by_torch)]
        floor = 2e-5 if expected.numel() > 1 else 2e-4  # the terms of one sum may cancel
        assert errors[0] < floor + 3 * errors[1]


CHANNELS = [("clustered", 25), ("sparse", 8), ("not-finite", 2), ("wide", 25), ("small-sigma", 25)]
CHANNELS += [("dense", 70), ("few", 12)]


@pytest.mark.parametrize(("kind", "channels"), CHANNELS)
def test_sums_of_many_tiles(kind: str, channels: int, device: str):
    queries, points, radius, sigma = _clouds(kind)
    features = torch.randn(len(points), channels, generator=torch.Generator().manual_seed(1))
    inputs = tuple(t.to(device) for t in (queries, points, features, torch.tensor(sigma)))
    _compare(inputs, radius)


@pytest.mark.usefixtures("anew")
@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "channels"), [*CHANNELS, ("sparse", 32), ("sparse", 40), ("clustered", 9)])
def test_sparse_tiles_are_left_to_lanes(kind: str, channels: int, monkeypatch: pytest.MonkeyPatch):
    """As of many points; in ``sparse`` all tiles are, in ``clustered`` some."""
    monkeypatch.setattr(sparse_tiles, "MANY", 1)
    test_sums_of_many_tiles(kind, channels, "cuda")


def test_a_table_of_many_points(device: str):
    """It has fewer buckets a point."""
    g = torch.Generator().manual_seed(0)
    points = torch.rand(MANY_POINTS + 3, 3, generator=g).to(device)
    features = points[:, :2].contiguous()
    queries = points[::800_001] + 1e-3
    got, expected = (
        pointproj.radius_aggregate(queries, points, features, 0.01, sigma=0.01, backend=b)
        for b in ("warp", "torch")
    )
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "sigma", "power"), [("dense", 0.1, 2.0), ("wide", 0.03, 4.0)])
@pytest.mark.parametrize("reduce", ["mean", "sum"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_of_many_tiles(kernel: str, reduce: str, kind: str, sigma: float, power: float):
    """Relative to the first neighbour met, and to the nearest where weights decay too fast for that."""
    queries, points, radius, _ = _clouds(kind)
    features = torch.randn(len(points), 9, generator=torch.Generator().manual_seed(1))
    inputs = tuple(t.to("cuda") for t in (queries, points, features, torch.tensor(sigma)))
    _compare(inputs, radius, kernel=kernel, reduce=reduce, power=power)


def test_infinite_features_reach_their_neighbors_alone(device: str):
    queries, points, radius, sigma = _clouds("dense")
    features = torch.ones(len(points), 9)
    central = points.norm(dim=1).argsort()
    features[central[0]], features[central[1], 2] = torch.inf, torch.nan
    inputs = tuple(t.to(device) for t in (queries, points, features, torch.tensor(sigma)))
    got, expected = (
        pointproj.radius_aggregate(*inputs[:3], radius, sigma=sigma, backend=b) for b in ("warp", "torch")
    )
    assert torch.equal(got.isfinite(), expected.isfinite())
    assert not got.isfinite().all()


@pytest.mark.parametrize(("channels", "columns"), [(1, 1), (9, 12), (25, 32), (33, 36)])
def test_rows_in_the_order_of_points(channels: int, columns: int, device: str):
    """As gradients read them: each at the place of its point, and padded with zeros."""
    g = torch.Generator().manual_seed(0)
    points = [torch.rand(n, 3, generator=g).to(device) for n in (37, 101)]
    grids = [build_hash_grid(p, None, 1, 0.1) for p in points]
    sides = [
        Side(p, SearchedGrid(*grid, 0, 0, Batch(None, len(p), 1)), 0)
        for p, grid in zip(points, grids, strict=True)
    ]
    values = [torch.randn(len(p), channels, generator=g).to(device) for p in points]
    softmax = torch.rand(37, 2, generator=g).to(device)
    problem = RadiusProblem(0.1, 0.01, softmax, 2.0, 0.0, values[1], values[0], softmax, grad=values[0])
    made = rows_in_order(Launch(points[0].device), problem, *sides)
    rows = [grid.points[:, 3].view(torch.int32).long() for grid in grids]
    assert torch.equal(made.softmax, softmax[rows[0]])
    padding = (0, columns - channels)
    assert torch.equal(made.grad, torch.nn.functional.pad(values[0][rows[0]], padding))
    assert torch.equal(made.features, torch.nn.functional.pad(values[1][rows[1]], padding))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("radius", "factor"), [(0.1, 2), (0.25, 1)])
def test_cells_are_wide_where_neighbors_are_few(radius: float, factor: int, dtype: torch.dtype, device: str):
    """Of the workload W2: 4 and 66 within the radius; where cells are wide already, they stay so."""
    problem = W2.problem(device)
    points, queries = problem.reference_points.to(dtype), problem.query_points.to(dtype)
    sets = points, Batch(None, len(points), 1), queries, Batch(None, len(queries), 1)
    for narrow in ((True, True), (True, False)):
        width = torch.ones(2, dtype=dtype, device=device)
        counters = torch.zeros(2, dtype=torch.int32, device=device)
        Launch(width.device)(widen_kernel(dtype), THREADS, *sets, radius, narrow, counters, width)
        assert width.tolist() == [factor, factor if narrow[1] else 1]
