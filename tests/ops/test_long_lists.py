"""Searches by kernels: long lists, long rows, and radii of any size."""

import pytest
import torch
from torch import Tensor

from pointproj.benchmark.cases import clustered
from pointproj.ops.registry import Backend, functions_of, load
from pointproj.ops.specification import reference
from pointproj.ops.specification.clouds import Clouds

COUNTS = (1, 16, 17, 31, 32, 33, 64, 65, 128, 129, 256, 257)  # they are kept in different ways


@pytest.fixture(params=["native", "warp"])
def backend(request: pytest.FixtureRequest) -> Backend:
    if reason := load(request.param).unavailable():
        pytest.skip(reason)
    return functions_of(request.param)


def _points(kind: str) -> Tensor:
    g = torch.Generator().manual_seed(0)
    if kind == "lattice":  # most distances are equal
        return torch.randint(0, 4, (900, 3), generator=g).float()
    if kind == "fp64":
        return torch.rand(900, 3, generator=g, dtype=torch.float64)
    return clustered(900)(g).float()


def _assert_distances(distances: Tensor, queries: Tensor, points: Tensor, rows: Tensor) -> None:
    """As those of the reference, but for what torch's root on a CPU is off."""
    expected = reference.rounded_length(queries - points[rows]).masked_fill(rows < 0, torch.inf)
    torch.testing.assert_close(distances, expected, rtol=2 * torch.finfo(points.dtype).eps, atol=0)


@pytest.mark.parametrize("kind", ["lattice", "clustered", "fp64"])
def test_long_lists_and_many_of_the_nearest(kind: str, device: str, backend: Backend):
    points = _points(kind).to(device)
    radius = 1.5 if kind == "lattice" else 0.4
    for queries in (points, points[:77] + 0.01):  # themselves in the order of their cells, and others
        tables = backend.build_index(points, None, 1, radius)
        clouds = Clouds(queries, None, points, None, 1)
        within, all_within = reference.radius_search(queries, points, radius, max(COUNTS))
        nearest = reference.knn_search(queries, points, max(COUNTS))
        for k in COUNTS:
            distances, rows, counts = backend.radius_search(clouds, tables, radius, k)
            assert torch.equal(counts, all_within.clamp(max=k + 1))
            found = [(distances, rows, within)]
            if k >= 16:
                found.append((*backend.nearest(clouds, None, k, torch.int64), nearest))
            for distances, rows, expected in found:
                assert torch.equal(rows, expected[:, :k]), k
                _assert_distances(distances, queries[:, None], points, rows)


@pytest.mark.parametrize("length", [1, 32, 33, 64, 65, 128, 129, 300, 900])
def test_rows_are_sorted_and_cut(length: int, device: str, backend: Backend):
    """Of three equal rows the capacity cuts the second, or ends with it."""
    points = _points("clustered")[:length].to(device)
    clouds = Clouds(points[:1].expand(3, 3).contiguous(), None, points, None, 1)
    for capacity in (3 * length + 5, 2 * length, length + length // 2, length // 3):
        row_splits, rows, distances = backend.radius_list(clouds, None, 9.0, capacity)
        _assert_distances(distances, points[:1], points, rows)
        expected = torch.arange(length, device=device).repeat(3)[:capacity]
        assert torch.equal(row_splits, length * torch.arange(4, device=device))
        assert torch.equal(rows[: len(expected)], expected)
        assert (rows[len(expected) :] == -1).all()


@pytest.mark.parametrize("radius", [0.0, 1e-30, 1e-6, 0.3, 1e6, 1e30, torch.finfo(torch.float32).max])
def test_radii_of_any_size(radius: float, device: str, backend: Backend):
    """Those that the cells were built for, and beside them others."""
    points = _points("clustered").to(device)
    points[100:110] = points[:10]
    queries = points[:150] + 0.0
    radii = queries.new_full((150,), radius)
    for built_for in (None, 0.3, radii.amax()):
        tables = None if built_for is None else backend.build_index(points, None, 1, built_for)
        _, rows, counts = backend.radius_search(Clouds(queries, None, points, None, 1), tables, radii, 16)
        expected, all_within = reference.radius_search(queries, points, radii, 16)
        assert torch.equal(rows, expected)
        assert torch.equal(counts, all_within.clamp(max=17))


@pytest.mark.gpu
def test_many_queries(backend: Backend):
    """Of so many each may have a thread, and of fewer several; half of them are in dense cells."""
    points = clustered(3000)(torch.Generator().manual_seed(0)).float().cuda()
    for size in (2**14 + 1, 2**17 + 1):
        queries = torch.rand(size, 3, device="cuda")
        queries[::2] = points[torch.arange(size // 2 + 1, device="cuda") % 3000] + 1e-3
        clouds, some = Clouds(queries, None, points, None, 1), slice(None, None, 37)
        expected, all_within = reference.radius_search(queries[some], points, 0.4, 50)
        nearest = reference.knn_search(queries[some], points, 50)
        for k in (5, 12, 20, 50):
            _, rows, counts = backend.radius_search(clouds, None, 0.4, k)
            assert torch.equal(rows[some], expected[:, :k])
            assert torch.equal(counts[some], all_within.clamp(max=k + 1))
            assert torch.equal(backend.nearest(clouds, None, k, torch.int64)[1][some], nearest[:, :k])


@pytest.mark.gpu
def test_more_pairs_than_32_bits_count(backend: Backend):
    size, beyond = 50_000, 2**31 + 999
    points = torch.full((size, 3), 0.25, device="cuda")
    row_splits, rows, _ = backend.radius_list(Clouds(points, None, points, None, 1), None, 0.1, beyond)
    assert torch.equal(row_splits, size * torch.arange(size + 1, device="cuda"))
    for slots in (slice(0, 10), slice(2**31 - 20, 2**31 + 20), slice(beyond - 10, beyond)):
        expected = torch.arange(slots.start, slots.stop, device="cuda") % size
        assert torch.equal(rows[slots], expected)


def test_lists_among_millions(device: str, backend: Backend, request: pytest.FixtureRequest):
    """Tables of so many points have fewer slots for each."""
    g, many = torch.Generator().manual_seed(0), 2**18 if "warp" in request.node.name else 2**22
    points, query = (torch.rand(size, 3, generator=g).to(device) for size in (many + 77, 7))
    clouds = Clouds(query, None, points, None, 1)
    row_splits, rows, _ = backend.radius_list(clouds, None, 0.01, 1000)
    within = reference.within(query, points, 0.01)
    assert torch.equal(row_splits.diff(), within.sum(1))
    assert torch.equal(rows[: row_splits[-1]], within.nonzero()[:, 1])
