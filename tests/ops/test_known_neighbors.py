"""Neighbours that are known give what a search gives."""

import pytest
import torch

import pointproj
from pointproj.nn.projector import Projector
from tests.conftest import Where
from tests.ops.cases import by_id
from tests.oracle import assert_close, derivatives, probe, run


@pytest.mark.parametrize(
    "name", ["plain", "k-is-n", "clustered", "dense", "ragged-with-empty-clouds", "fp64", "bf16"]
)
def test_known_neighbors_change_no_result(name: str, where: Where):
    case = by_id(name)
    problem = case.problem(where.device)
    points = problem.query_points, problem.reference_points
    rows = pointproj.knn(*points, case.k, backend=where.backend, **problem.offsets)[1]
    at = probe(problem, case.sigma)

    def derived(rows: torch.Tensor | None):
        options = {"backend": where.backend, "neighbor_indices": rows}
        return derivatives(lambda p, sigma: run("knn", p, case.k, sigma, **options), problem, at)

    expected = derived(None)
    for known in (rows, rows.int()):
        for what, got in derived(known).items():
            assert_close(what, got, expected[what])


def test_rows_that_do_not_exist_are_no_neighbours(where: Where):
    """Wherever they stand in the list."""
    points = by_id("plain").problem(where.device)[:3]
    known = pointproj.knn(*points[:2], 4, backend=where.backend)[1]
    known[::2] = torch.nn.functional.pad(known[::2, :2], (0, 2), value=-1)[:, [0, 2, 1, 3]]
    aggregated = pointproj.knn_aggregate(*points, 4, backend=where.backend, neighbor_indices=known)
    for first, count in ((0, 2), (1, 4)):
        expected = pointproj.knn_aggregate(*points, count, backend=where.backend)
        assert_close(f"{count} neighbours", aggregated[first::2], expected[first::2])


def test_wrong_neighbors_are_refused():
    points = torch.rand(20, 3)

    def aggregate(rows):
        return pointproj.knn_aggregate(points, points, points, 3, backend="torch", neighbor_indices=rows)

    rows = pointproj.knn(points, points, 3, backend="torch")[1]
    with pytest.raises(TypeError, match=r"int32 or int64 tensor, as pointproj.knn gives; got torch.float32"):
        aggregate(rows.float())
    with pytest.raises(TypeError, match="got list"):
        aggregate(rows.tolist())
    with pytest.raises(ValueError, match=r"shape \(20, 3\), k = 3 for each query point; got \(20, 2\)"):
        aggregate(rows[:, :2])
    with pytest.raises(ValueError, match="from 0 to 19, or -1 for none; got 27: search these points again"):
        aggregate(rows.clone().fill_(27))
    with pytest.raises(ValueError, match="got -5"):
        aggregate(rows.clone().fill_(-5))
    with pytest.raises(ValueError, match="neighbor_indices are for kind='knn'"):
        Projector(kind="radius", radius=0.1)(points, points, neighbor_indices=rows)
