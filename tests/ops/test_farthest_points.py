"""Farthest-point sampling: the rows of every backend are those of comparing all points."""

import numpy as np
import pytest
import torch

from pointproj import farthest_points
from tests.conftest import Where

pytestmark = pytest.mark.operators("farthest_points")


def by_hand(points, count, start=0):
    """Rows of one cloud, with numpy in the points' own dtype."""
    points = points.cpu().numpy()
    nearest = np.where(np.isfinite(points).all(-1), np.inf, -1).astype(points.dtype)
    rows = [start]
    with np.errstate(all="ignore"):
        while len(rows) < count:
            delta = points - points[rows[-1]]
            squared = (delta[:, 0] ** 2 + delta[:, 1] ** 2) + delta[:, 2] ** 2
            nearest = np.where(squared < nearest, squared, nearest)
            rows.append(int(nearest.argmax()))
    return torch.tensor(rows[:count])


def points_of(kind, size, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(size, 3, generator=generator, dtype=torch.float64)
    if kind == "grid":  # many are equally far
        points = points.mul(2).round()
    if kind == "sphere":
        points = torch.nn.functional.normalize(points, dim=-1)
    if kind == "clusters":
        points = 1e-3 * points + torch.arange(size).remainder(3)[:, None]
    if kind == "one-far":
        points[size // 3] = torch.tensor([1e7, -1e4, 1e6])
    return points.to(dtype)


@pytest.mark.parametrize("kind", ["normal", "grid", "sphere", "clusters", "one-far"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_are_those_of_comparing_all(kind, dtype, where: Where):
    for size, count in ((1, 1), (7, 7), (33, 20), (1000, 300), (2500, 40)):
        points = points_of(kind, size, dtype)
        got = farthest_points(points.to(where.device), count, start=size // 2, backend=where.backend)
        assert torch.equal(got.cpu(), by_hand(points, count, size // 2)), size


def test_clouds_of_a_batch_are_on_their_own(where: Where):
    points = torch.stack([points_of("normal", 90, seed=i) for i in range(3)])
    start = torch.tensor([5, 0, 89])
    got = farthest_points(points.to(where.device), 31, start=start.to(where.device), backend=where.backend)
    expected = [by_hand(own, 31, int(row)) for own, row in zip(points, start, strict=True)]
    assert torch.equal(got.cpu(), torch.stack(expected))


def test_ragged_clouds_have_counts_of_their_own(where: Where):
    sizes, counts = [40, 0, 3, 77], [9, 2, 5, 77]
    points = points_of("normal", sum(sizes))
    offsets = torch.tensor([0, *np.cumsum(sizes)])
    options = {"offsets": offsets.to(where.device), "backend": where.backend}
    parts = farthest_points(points.to(where.device), counts, **options).cpu().split(counts)
    for own, first, part in zip(points.split(sizes), offsets, parts, strict=False):
        expected = by_hand(own, len(part)) + first if len(own) else torch.tensor([-1, -1])
        assert torch.equal(part, expected)


@pytest.mark.parametrize("start", [3, -2, [0, 3, 0], [4, 0, 0], [-1, 0, 0]])
def test_a_start_is_of_its_own_cloud(start, where: Where):
    """Values on a GPU are not read: the nearest row of the cloud is taken."""
    points, offsets = points_of("normal", 7).to(where.device), torch.tensor([0, 4, 7, 7]).to(where.device)
    given = torch.tensor(start, device=where.device) if isinstance(start, list) else start
    options = {"start": given, "offsets": offsets, "backend": where.backend}
    if where.device == "cpu" or start == -2:
        with pytest.raises(ValueError, match="start must be"):
            farthest_points(points, 2, **options)
    else:
        rows = torch.tensor(start).expand(3).clamp(torch.tensor(0), torch.tensor([3, 2, 0]))
        expected = (rows + torch.tensor([0, 4, 0])).tolist()
        assert farthest_points(points, 1, **options).tolist() == [*expected[:2], -1]


def test_points_that_are_not_finite_come_last(where: Where):
    points = points_of("normal", 60)
    points[::7, 1] = torch.nan
    points[3, 0] = torch.inf
    got = farthest_points(points.to(where.device), 60, start=1, backend=where.backend).cpu()
    finite = points.isfinite().all(-1)
    assert finite[got[: int(finite.sum())]].all()
    assert torch.equal(got[: int(finite.sum())].sort().values, finite.nonzero()[:, 0])


def test_points_in_the_plane_and_a_compiled_call(where: Where):
    points = points_of("normal", 50)[:, :2].to(where.device)
    torch._dynamo.reset()
    compiled = torch.compile(farthest_points, fullgraph=True, backend="aot_eager")
    got = compiled(points, 8, backend=where.backend)
    assert torch.equal(got.cpu(), by_hand(torch.nn.functional.pad(points.cpu(), (0, 1)), 8))


@pytest.mark.parametrize(
    ("count", "start", "words"),
    [
        (6, 0, r"at most the 5 points.*got 6"),
        ([2, 3], 0, "must be an integer"),
        (-1, 0, "count must be at least 0; got -1"),
        (1.5, 0, "count must be an int; got float"),
        (True, 0, "count must be an int; got bool"),
        (2, 5, "start must be a row of 5 points; got 5"),
        (2, -1, "start must be at least 0; got -1"),
        (2, 1.5, "start must be an int; got float"),
        (2, torch.tensor([1.0]), "an int32 or int64 tensor; got torch.float32"),
        (2, torch.tensor([0, 1]), r"shape \(1,\), .* got \(2,\)"),
    ],
)
def test_wrong_arguments_are_named(count, start, words, where: Where):
    points = points_of("normal", 5).to(where.device)
    start = start.to(where.device) if isinstance(start, torch.Tensor) else start
    with pytest.raises((TypeError, ValueError), match=words):
        farthest_points(points, count, start=start, backend=where.backend)
    assert farthest_points(points, 0, backend=where.backend).shape == (0,)
