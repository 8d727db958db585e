"""Warp's cell list where small clouds do not take it: dense cells, many queries, sums over many cells."""

import pytest
import torch
from torch import Tensor

import pointproj
from pointproj.ops import reference
from pointproj.ops.backends.warp import knn_search
from pointproj.ops.backends.warp.cell_list import build_cell_list
from pointproj.ops.backends.warp.common import DENSE
from pointproj.ops.backends.warp.knn_search import Stage
from pointproj.ops.backends.warp.scan import MANY, running_sum, states_of
from pointproj.ops.bridge.warp_op import Launch
from pointproj.ops.cases import clustered
from pointproj.ops.registry import Clouds

K = 8


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


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
    points[: 2 * DENSE] = torch.nan  # so many in no cell
    return points


@pytest.mark.usefixtures("anew")
@pytest.mark.parametrize("together", [False, True], ids=["threads", "lanes"])
@pytest.mark.parametrize("kind", ["clustered", "coincident", "lattice", "two-balls", "not-finite"])
def test_dense_cells(kind: str, together: bool, device: str, monkeypatch: pytest.MonkeyPatch):
    if not together:  # on a GPU; on a CPU it is always so
        monkeypatch.setattr(knn_search, "FEW_QUERIES", 0)
    points = _cloud(kind).to(device)
    cells = build_cell_list(points, None, 1)
    assert cells.start[-1].item() >> 32 > 0, "no dense cell"
    assert cells.start[-1].item() % 2**32 == len(points)
    queries = torch.cat([points[:300], points[-60:] + 0.01, torch.rand(100, 3, device=device) * 3 - 1])
    _, rows = pointproj.knn(queries, points, K, backend="warp")
    assert torch.equal(rows, reference.knn_search(queries, points, K))
    _, rows = pointproj.knn(points, points, K, backend="warp")
    some = torch.arange(0, len(points), 17, device=device)
    assert torch.equal(rows[some], reference.knn_search(points[some], points, K))


@pytest.mark.usefixtures("anew")
def test_searches_with_small_budgets(device: str, monkeypatch: pytest.MonkeyPatch):
    """What a kernel has left is finished by the next: here the first two leave much."""
    points = _cloud("clustered").to(device)
    queries = torch.cat([points[:300], torch.rand(300, 3, device=device) * 0.1 + 0.25])
    clouds = Clouds(queries, None, points, None, 1)
    small_budgets = Stage(1, 1, False, 12, 4), Stage(1, 1, True, 40, 4)
    left = []
    for stages in (small_budgets[:1], small_budgets, (*small_budgets, Stage(1, 1, True, 0, 4))):
        monkeypatch.setattr(knn_search, "_stages", lambda *_, stages=stages: stages)
        rows = knn_search.search(clouds, build_cell_list(points, None, 1), K)
        left.append((rows[:, 0] == knn_search.UNFINISHED).sum().item())
    assert left[0] > left[1] > left[2] == 0
    assert torch.equal(rows.long(), reference.knn_search(queries, points, K))


def test_dense_cells_of_several_clouds(device: str):
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


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("size", [1, 5, 4095, 4097, 300_001, MANY + 3])
def test_running_sum(size: int, dtype: torch.dtype, device: str):
    g = torch.Generator().manual_seed(size)
    occupancy = torch.randint(0, 5, (size,), generator=g, dtype=torch.int32)
    cells = size * 2 // 3 if dtype == torch.int64 else 0
    occupancy[::50] *= DENSE if dtype == torch.int64 else 1
    counted = occupancy.long()
    counted[:cells][counted[:cells] >= DENSE] = 2**32
    start = torch.full((size + 1,), -1, dtype=dtype, device=device)
    states = torch.zeros(states_of(size), dtype=torch.int64, device=device)
    running_sum(Launch(start.device), occupancy.to(device), cells, states, start)
    assert start[0] == 0
    assert torch.equal(start[1:].cpu().long(), counted.cumsum(0))
