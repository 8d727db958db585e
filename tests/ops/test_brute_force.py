"""Neighbours of points with more than three coordinates against all pairs in float64."""

import pytest
import torch
from torch import Tensor

import pointproj
from pointproj.ops.backends.torch import brute_force
from tests.oracle import assert_close

DTYPES = (torch.float32, torch.float64)


def _points(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def _all_pairs(query_points: Tensor, reference_points: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Distances and rows, the lower row of equal ones first; of few queries at once."""
    parts = []
    for some in query_points.double().split(50, dim=-2):
        squared = (some[..., None, :] - reference_points.double()[..., None, :, :]).square().sum(-1)
        squared, rows = squared.nan_to_num(nan=torch.inf).sort(dim=-1, stable=True)
        parts.append((squared[..., :k].sqrt(), rows[..., :k].masked_fill(squared[..., :k].isinf(), -1)))
    return tuple(torch.cat(results, dim=-2) for results in zip(*parts, strict=True))


def _assert_exact(query_points: Tensor, reference_points: Tensor, k: int) -> None:
    distances, rows = pointproj.knn(query_points, reference_points, k)
    expected = _all_pairs(query_points, reference_points, k)
    assert torch.equal(rows.cpu(), expected[1].cpu())
    assert_close("distances", distances, expected[0].to(distances.dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", [4, 5, 64, 256])
def test_random_points(dims: int, dtype: torch.dtype):
    for m, n, k in ((3, 1, 1), (7, 50, 20), (200, 3000, 16), (9, 2500, 100), (40, 41, 41)):
        _assert_exact(_points(m, dims, dtype=dtype), _points(n, dims, seed=1, dtype=dtype), k)
    assert pointproj.knn(_points(0, dims), _points(5, dims), 2)[1].shape == (0, 2)


def _far_from_zero(seed: int) -> Tensor:
    return _points(2000, 12, seed=seed) + 1000


def _clusters(seed: int) -> Tensor:
    """Much nearer to each other than a product tells."""
    centre = torch.randint(12, (2000,), generator=torch.Generator().manual_seed(seed))
    return 100 * _points(12, 12)[centre] + 1e-4 * _points(2000, 12, seed=seed)


def _lattice(seed: int) -> Tensor:
    """Most distances are equal to others, most points to other points."""
    return torch.randint(2, (2000, 12), generator=torch.Generator().manual_seed(seed)).float()


def _of_all_sizes(seed: int) -> Tensor:
    return _points(2000, 12, seed=seed) * 10 ** (5 * _points(2000, 1, seed=seed + 9))


def _tiny(seed: int) -> Tensor:
    return _points(2000, 12, seed=seed) * 1e-15


def _one_point(seed: int) -> Tensor:
    return torch.full((2000, 12), 0.1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "of",
    [_far_from_zero, _clusters, _lattice, _of_all_sizes, _tiny, _one_point],
    ids=lambda of: of.__name__.strip("_"),
)
def test_points_that_a_product_cannot_tell_apart(of, dtype: torch.dtype):
    _assert_exact(of(2)[:100].to(dtype), of(3).to(dtype), 10)
    cloud = of(4).to(dtype)
    _assert_exact(cloud[:60], cloud, 10)  # a point is its own neighbour, or a lower one at the same place


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_torch_may_round_products_more(precision: str):
    points = _points(2000, 32)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            _assert_exact(points[:300], points, 16)
    finally:
        torch.set_float32_matmul_precision(before)


def test_points_that_are_not_finite():
    query_points, reference_points = _points(60, 5), _points(3000, 5, seed=1)
    reference_points[::3, 2] = torch.nan
    reference_points[1::3, 4] = -torch.inf
    query_points[7, 1] = torch.nan
    distances, rows = pointproj.knn(query_points, reference_points, 9)
    assert distances[7].isnan().all()
    assert (rows[7] == -1).all()
    others = torch.arange(60) != 7
    _, expected = _all_pairs(query_points[others], reference_points, 9)
    assert torch.equal(rows[others], expected)
    reference_points[6:] = torch.nan  # two are left
    distances, rows = pointproj.knn(query_points[others], reference_points, 4)
    assert (rows[:, 2:] == -1).all()
    assert distances[:, 2:].isinf().all()
    assert (rows[:, :2] >= 0).all()


def test_squares_that_overflow_are_no_neighbours():
    reference_points = torch.tensor([[0.0] * 5, [2e19] * 5, [1.0] * 5])
    distances, rows = pointproj.knn(reference_points[:1], reference_points, 3)
    assert rows.tolist() == [[0, 2, -1]]
    assert distances.isinf().tolist() == [[False, False, True]]


@pytest.mark.parametrize(
    "sizes", [([40, 40, 40], [300, 300, 300]), ([5, 0, 80, 9], [400, 30, 200, 12])], ids=str
)
def test_batches(sizes: tuple[list[int], list[int]]):
    query_points, reference_points = _points(sum(sizes[0]), 8), _points(sum(sizes[1]), 8, seed=1)
    offsets = [torch.tensor([0, *size]).cumsum(0) for size in sizes]
    distances, rows = pointproj.knn(
        query_points, reference_points, 12, query_offsets=offsets[0], reference_offsets=offsets[1]
    )
    for (q0, q1), (r0, r1) in zip(*(o.unfold(0, 2, 1).tolist() for o in offsets), strict=True):
        expected = _all_pairs(query_points[q0:q1], reference_points[r0:r1], 12)
        assert torch.equal(rows[q0:q1], expected[1] + r0)
        assert_close("distances", distances[q0:q1], expected[0].float())
    if len(sizes[0]) == 3:
        dense = query_points.view(3, 40, 8), reference_points.view(3, 300, 8)
        _assert_exact(*dense, 12)
        assert torch.equal(pointproj.knn(*dense, 12)[0].flatten(0, 1), distances)


def test_few_at_once(monkeypatch: pytest.MonkeyPatch):
    expected = pointproj.knn(_points(3, 70, 20), _points(3, 900, 20, seed=1), 5)
    monkeypatch.setitem(brute_force.VALUES_AT_ONCE, "cpu", 5000)
    for one, other in zip(
        pointproj.knn(_points(3, 70, 20), _points(3, 900, 20, seed=1), 5), expected, strict=True
    ):
        assert torch.equal(one, other)


def test_radius_and_int32():
    query_points, reference_points = _points(30, 6), _points(500, 6, seed=1)
    distances, rows = pointproj.knn(query_points, reference_points, 8)
    radius = distances[3, 4].item()
    near, of = pointproj.knn(query_points, reference_points, 8, max_radius=radius, index_dtype=torch.int32)
    assert of.dtype == torch.int32
    assert torch.equal(of, rows.int().masked_fill(distances > radius, -1))
    assert (of[3, :5] >= 0).all()
    assert torch.equal(near, distances.masked_fill(distances > radius, torch.inf))


def test_first_and_second_derivatives():
    leaves = [_points(6, 9, dtype=torch.float64).requires_grad_() for _ in range(2)]
    leaves[1] = _points(200, 9, seed=1, dtype=torch.float64).requires_grad_()
    with torch.no_grad():
        leaves[0][2] = leaves[1][5]  # a distance of 0
    rows = pointproj.knn(*leaves, 4)[1]

    def by_definition(query_points: Tensor, reference_points: Tensor) -> Tensor:
        squared = (query_points[:, None] - reference_points[rows]).square().sum(-1)
        return torch.where(squared > 0, torch.where(squared > 0, squared, 1.0).sqrt(), 0.0)

    found = []
    for function in (lambda *points: pointproj.knn(*points, 4)[0], by_definition):
        first = torch.autograd.grad(function(*leaves).sin().sum(), leaves, create_graph=True)
        found.append((*first, *torch.autograd.grad(sum(g.square().sum() for g in first), leaves)))
    names = "d_query", "d_reference", "second d_query", "second d_reference"
    for name, got, expected in zip(names, *found, strict=True):
        assert_close(name, got, expected)


def test_compiled():
    torch._dynamo.reset()
    points = _points(300, 10).requires_grad_()
    compiled = torch.compile(
        lambda points: pointproj.knn(points, points, 5), fullgraph=True, backend="aot_eager"
    )
    for one, other in zip(compiled(points), pointproj.knn(points, points, 5), strict=True):
        assert torch.equal(one, other)


def test_what_many_coordinates_do_not_go_with():
    points = _points(50, 5)
    with pytest.raises(ValueError, match="backend='native' is for points of 2 or 3"):
        pointproj.knn(points, points, 3, backend="native")
    with pytest.raises(ValueError, match="box is for points of 2 or 3"):
        pointproj.knn(points, points, 3, box=(1.0,) * 5)
    with pytest.raises(ValueError, match="k = 51 neighbours were asked for, but there are 50"):
        pointproj.knn(points, points, 51)
    with pytest.raises(ValueError, match="or 2 coordinates in the plane"):
        pointproj.radius_neighbors(points, points, 1.0, max_neighbors=3)
    assert pointproj.knn(points, points, 3, backend="torch")[1][:, 0].tolist() == list(range(50))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "of", [_far_from_zero, _clusters, _lattice, _of_all_sizes], ids=lambda of: of.__name__.strip("_")
)
def test_on_a_gpu(of, dtype: torch.dtype):
    query_points, reference_points = of(2).to(dtype), of(3).to(dtype)
    expected = pointproj.knn(query_points, reference_points, 10)
    got = pointproj.knn(query_points.cuda(), reference_points.cuda(), 10)
    assert torch.equal(got[1].cpu(), expected[1])
    assert_close("distances", got[0].cpu(), expected[0])


@pytest.mark.gpu
def test_memory_on_a_gpu_is_bounded():
    points = _points(40000, 64).cuda()
    pointproj.knn(points[:100], points, 16)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    pointproj.knn(points, points, 16)
    assert torch.cuda.max_memory_allocated() - before < 3 * 2**30  # all pairs are 6 GiB
