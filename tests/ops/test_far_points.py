"""Points or queries far away from all others: they change no neighbour, and no search visits more cells."""

import pytest
import torch
from torch import Tensor

import pointproj
from pointproj.benchmark.cases import clustered
from pointproj.ops.specification import reference
from tests.conftest import Where

FAR = {
    "one": [[1e6, 1e6, 1e6]],
    "along-an-axis": [[0, -1e4, 0]],
    "six": [[1e3, 0, 0], [-1e5, 1, 0], [0, 1e7, 0], [0, -1e9, 3], [0.5, 0.5, 1e4], [0, 0, -1e6]],
    "huge": [[3e38, -3e38, 0], [-3e38, 3e38, 3e38]],
}


def _cloud(kind: str, far: str, size: int) -> Tensor:
    g = torch.Generator().manual_seed(0)
    points = clustered(size)(g) if kind == "clustered" else torch.rand(size, 3, generator=g).double()
    points[torch.randperm(size, generator=g)[: len(FAR[far])]] = torch.tensor(FAR[far], dtype=torch.float64)
    return points


@pytest.mark.parametrize("kind", ["uniform", "clustered"])
@pytest.mark.parametrize("far", FAR)
@pytest.mark.operators("knn")
def test_neighbors_are_those_of_all_pairs(far: str, kind: str, where: Where):
    lists = "auto" if where.backend in ("cuml", "triton") else where.backend
    for size, dtype, k in ((70, torch.float32, 70), (900, torch.float64, 4), (6000, torch.float32, 4)):
        points = _cloud(kind, far, size).to(where.device, dtype)
        outside = points[points.abs().amax(1) > 2]
        queries = torch.cat([points[::29], points[::57] * 3 - 1, outside, outside / 3 + 0.1])
        _, rows = pointproj.knn(queries, points, k, backend=where.backend)
        assert torch.equal(rows, reference.knn_search(queries, points, k))
        given = queries, points, 0.1
        within, expected = (
            pointproj.radius_neighbors(*given, max_neighbors=5, backend=b) for b in (lists, "torch")
        )
        assert torch.equal(within.indices, expected.indices)


@pytest.mark.parametrize("k", [1, 8, 40, 200])
@pytest.mark.operators("knn")
def test_queries_far_from_all_points(k: int, where: Where):
    """Among the faces of two cubes and a dense cluster, on a lattice: many distances are equal."""
    axis = 2.0 * torch.arange(12)
    lattice = torch.cartesian_prod(axis, axis, axis)
    faces = lattice[((lattice == 0) | (lattice == 22)).any(1)]
    cluster = torch.randint(64, (600, 3), generator=torch.Generator().manual_seed(0)) / 256 + 9
    points = torch.cat([faces, cluster, faces * 2 - 90, cluster]).to(where.device)
    queries = torch.cat([lattice[::17] * 9 - 88, lattice[::29] / 2 + 6, lattice[::61]]).to(where.device)
    searched = points.shape[0] - 300, points.shape[0], 2 * len(queries)
    offsets = {
        "query_offsets": torch.tensor([0, len(queries), searched[2]], device=where.device),
        "reference_offsets": torch.tensor([0, *searched[:2]], device=where.device),
    }
    given = queries.repeat(2, 1), points
    lists = "auto" if where.backend in ("cuml", "triton") else where.backend
    for options in ({}, {"max_radius": 60.0}):
        got, expected = (
            pointproj.knn(*given, k, backend=b, **offsets, **options) for b in (where.backend, "torch")
        )
        assert torch.equal(got[1], expected[1])
        assert torch.equal(got[0], expected[0])
    options = {"max_neighbors": k, **offsets}
    within, expected = (
        pointproj.radius_neighbors(*given, 100.0, backend=b, **options) for b in (lists, "torch")
    )
    assert torch.equal(within.indices, expected.indices)
    assert torch.equal(within.counts, expected.counts)


@pytest.mark.parametrize("backend", ["native", "warp"])
@pytest.mark.parametrize("far", FAR)
@pytest.mark.parametrize("size", [700, 5000])
def test_a_search_visits_cells_around_the_query(size: int, far: str, backend: str):
    """Points farther away take the query's place in the tables: a search that compares them finds them."""
    Where(backend, "cpu").skip_unless("knn")
    points = _cloud("uniform", far, size).float()
    queries = 0.5 + 0.02 * torch.randn(20, 3, generator=torch.Generator().manual_seed(1))
    index = pointproj.build_index(points, backend=backend)
    expected = pointproj.knn(queries, points, 3, index=index, backend=backend)[1]
    tables = index.tables["knn"]
    if backend == "warp":
        searched = tables[3][:, :3]
    else:  # x, y, z and row of all points, and of 16 that may be read behind them
        searched = tables[0].view(torch.float32)[: 4 * (size + 16)].view(4, -1)[:3, :size].T
    assert torch.equal(searched.sort(0).values, points.sort(0).values)
    beyond = (searched - 0.5).abs().amax(1) > 0.45
    assert beyond.sum() > size / 5
    searched[beyond] = 0.5
    assert torch.equal(pointproj.knn(queries, points, 3, index=index, backend=backend)[1], expected)
