"""What only the cuML backend has: its algorithms, an index that is fitted once, and what it refuses."""

import importlib
from dataclasses import replace

import pytest
import torch

import pointproj
from pointproj.ops.backends import cuml
from tests.conftest import Where
from tests.ops.cases import by_id

GPU = Where("cuml", "cuda")


@pytest.fixture
def algorithm():
    """Sets the algorithm for one test."""
    GPU.skip_unless("knn")
    yield cuml.use_algorithm
    cuml.use_algorithm("auto")
    cuml.use_exact(True)


@pytest.fixture
def fits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the clouds that were fitted, as they are."""
    GPU.skip_unless("knn")
    sizes = []
    fit = cuml._FittedCloud.__init__

    def counted(self, reference_points: torch.Tensor) -> None:
        sizes.append(len(reference_points))
        fit(self, reference_points)

    monkeypatch.setattr(cuml._FittedCloud, "__init__", counted)
    return sizes


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_without_a_gpu_that_is_the_reason():
    assert "needs a CUDA GPU" in cuml.unavailable()


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    monkeypatch.setattr(cuml, "PACKAGES", ("cuml_of_nobody",))
    reason = cuml.unavailable()
    assert "the package cuml_of_nobody is missing" in reason
    assert 'pip install -e ".[rapids-cu12]"' in reason


def test_an_unknown_algorithm_is_refused():
    with pytest.raises(ValueError, match="one of auto, brute, rbc; got 'kd_tree'"):
        cuml.use_algorithm("kd_tree")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["auto", "brute", "rbc"])
@pytest.mark.parametrize("k", [1, 7, 100])
def test_every_algorithm_finds_the_same(name: str, k: int, algorithm):
    algorithm(name)
    generator = torch.Generator().manual_seed(0)
    query, points = (torch.randn(n, 3, generator=generator).cuda() for n in (3000, 9000))
    with importlib.import_module("cuml").using_output_type("numpy"):  # of the caller's own models
        _, rows = pointproj.knn(query, points, k, backend="cuml")
    assert torch.equal(rows, pointproj.knn(query, points, k, backend="torch")[1])


@pytest.mark.gpu
def test_without_exactness_rows_are_those_of_cuml(algorithm):
    import cupy
    from cuml.neighbors import NearestNeighbors

    algorithm("brute")
    generator = torch.Generator().manual_seed(0)
    query, points = (torch.rand(n, 3, generator=generator).cuda() + 1000 for n in (300, 900))
    exact = pointproj.build_index(points, backend="cuml")
    cuml.use_exact(False)
    distances, rows = pointproj.knn(query, points, 7, backend="cuml")
    model = NearestNeighbors(algorithm="brute", output_type="cupy").fit(cupy.from_dlpack(points))
    theirs = torch.from_dlpack(model.kneighbors(cupy.from_dlpack(query), 7, return_distance=False)).long()
    assert torch.equal(rows, theirs)
    torch.testing.assert_close(distances, (query[:, None] - points[rows]).norm(dim=-1))
    expected = pointproj.knn(query, points, 7, backend="torch")[1]
    assert not torch.equal(rows, expected)
    assert torch.equal(pointproj.knn(query, points, 7, index=exact)[1], expected)  # fitted before


@pytest.mark.gpu
def test_an_index_is_fitted_once(fits: list[int]):
    case = by_id("ragged")
    problem = case.problem("cuda")
    index = pointproj.build_index(
        problem.reference_points, backend="cuml", reference_offsets=problem.reference_offsets
    )
    sizes = [references for _, references in case.sizes]
    assert fits == sizes
    for _ in range(3):
        pointproj.knn(*problem[:2], case.k, index=index, **problem.offsets)
    assert fits == sizes
    pointproj.knn(*problem[:2], case.k, backend="cuml", **problem.offsets)
    assert fits == 2 * sizes


@pytest.mark.gpu
def test_an_index_ends_with_its_last_user(fits: list[int]):
    points = torch.rand(50, 3, device="cuda")
    index = pointproj.build_index(points, backend="cuml")
    address = index.tables["knn"][0].data_ptr()
    assert address in cuml._indices
    tables = {"knn": (index.tables["knn"][0].clone(),)}  # of another address: fitted again
    copied = replace(index, tables=tables)
    expected = pointproj.knn(points, points, 3, index=index)[1]
    del index
    later = pointproj.build_index(points + 1, backend="cuml")
    assert later.tables["knn"][0].data_ptr() in cuml._indices
    assert all(not kept.token.expired() for kept in cuml._indices.values())
    assert torch.equal(pointproj.knn(points, points, 3, index=copied)[1], expected)


@pytest.mark.gpu
def test_a_capture_is_refused_in_words():
    GPU.skip_unless("knn")
    points = torch.rand(50, 3, device="cuda")
    pointproj.knn(points, points, 3, backend="cuml")
    refusal = pytest.raises(cuml.CaptureImpossible, match="cannot be recorded in a CUDA graph: cuML waits")
    with refusal, torch.cuda.graph(torch.cuda.CUDAGraph()):
        pointproj.knn(points, points, 3, backend="cuml")
    torch.cuda.synchronize()
    assert pointproj.knn(points, points, 1, backend="cuml")[1].flatten().tolist() == [*range(50)]
