"""Farthest points by the names of torch-cluster, PyTorch Geometric and PyTorch3D, with values by hand."""

import pytest
import torch
from torch import Tensor

from pointproj.compat import pytorch3d, torch_cluster, torch_geometric

LINE = torch.tensor([0.0, 1.0, 2.0, 3.0, 10.0])  # chosen from row 0: 4 (10), 3 (3), then 1 or 2: the lower
BATCH = torch.tensor([0] * 5 + [2] * 3)  # the second cloud is empty
CLOUDS = torch.cat([LINE, torch.tensor([5.0, 6.0, 9.0])])


@pytest.mark.parametrize("dims", [1, 2, 3, 5])
def test_rows_of_each_cloud(dims: int):
    src = torch.zeros(8, dims)
    src[:, -1] = CLOUDS
    expected = [0, 4, 3, 5, 7]  # ceil(0.5 * 5), ceil(0.5 * 3)
    assert torch_cluster.fps(src, BATCH, random_start=False).tolist() == expected
    assert torch_geometric.fps(src, BATCH, random_start=False, batch_size=3).tolist() == expected
    for ptr in ([0, 5, 5, 8], torch.tensor([0, 5, 5, 8])):
        assert torch_cluster.fps(src, ratio=0.5, random_start=False, ptr=ptr).tolist() == expected
    assert torch_cluster.fps(src[:5], None, 0.8, False).tolist() == [0, 4, 3, 1]


def test_ratios_and_dtypes():
    for dtype in (torch.float16, torch.float32, torch.float64, torch.int64):
        assert torch_cluster.fps(LINE.to(dtype), None, torch.tensor(0.5), False).tolist() == [0, 4, 3]
    each = torch.tensor([0.2, 0.5, 1.0])
    assert torch_cluster.fps(CLOUDS, BATCH, each, False).tolist() == [0, 5, 7, 6]
    assert torch_cluster.fps(LINE[:0], None, 0.5, False).tolist() == []
    with pytest.raises(AssertionError, match="cloud of each of the 8 points; got 7"):
        torch_cluster.fps(CLOUDS, BATCH[1:])


def test_every_call_is_scripted_and_compiled():
    def of_batch(src: Tensor, batch: Tensor | None, ratio: Tensor) -> Tensor:
        return torch_cluster.fps(src, batch, ratio, False)

    def of_list(src: Tensor, ptr: list[int]) -> Tensor:
        return torch_cluster.fps(src, ptr=ptr, ratio=0.5, random_start=False)

    def of_tensor(src: Tensor, ptr: Tensor | None, ratio: float | None) -> Tensor:
        return torch_cluster.fps(src, ptr=ptr, ratio=ratio, random_start=False)

    def library(x: Tensor, batch: Tensor) -> Tensor:
        return torch_geometric.fps(x, batch, 0.5, False)

    ptr = [0, 5, 5, 8]
    calls = (of_batch, BATCH, torch.tensor(0.5)), (of_list, ptr), (of_tensor, torch.tensor(ptr), None)
    for function, *given in (*calls, (library, BATCH)):
        for made in (torch.jit.script(function), torch.compile(function, fullgraph=True, backend="eager")):
            assert made(CLOUDS, *given).tolist() == [0, 4, 3, 5, 7]


def test_random_starts_are_of_their_cloud():
    firsts = {tuple(torch_cluster.fps(CLOUDS, BATCH, 0.1).tolist()) for _ in range(100)}
    assert {a for a, _ in firsts} == set(range(5))
    assert {b for _, b in firsts} == {5, 6, 7}


def test_padded_clouds_and_their_gradient():
    points = torch.zeros(3, 5, 3)
    points[0, :, 0], points[1, :, 1] = LINE, LINE
    points.requires_grad_()
    lengths = torch.tensor([5, 3, 0])
    for count in (4, [4, 4, 4], torch.tensor([4, 4, 4])):
        found, rows = pytorch3d.sample_farthest_points(points, lengths, count)
        assert rows.tolist() == [[0, 4, 3, 1], [0, 2, 1, -1], [-1] * 4]
        assert found[0, :, 0].tolist() == [0, 10, 3, 1]
        assert found[1, :, 1].tolist() == [0, 2, 1, 0]
    (gradient,) = torch.autograd.grad(found.sum(), points)
    assert gradient[..., 0].tolist() == [[1, 1, 0, 1, 1], [1, 1, 1, 0, 0], [0] * 5]
    rows = pytorch3d.sample_farthest_points(points, None, [1, 2, 0])[1]
    assert rows.tolist() == [[0, -1], [0, 4], [-1, -1]]
    assert pytorch3d.sample_farthest_points(points)[1].shape == (3, 50)
    starts = {
        tuple(pytorch3d.sample_farthest_points(points, lengths, 1, True)[1][:, 0].tolist())
        for _ in range(100)
    }
    assert {b for _, b, _ in starts} == {0, 1, 2}
    with pytest.raises(ValueError, match="K and points must have the same batch dimension"):
        pytorch3d.sample_farthest_points(points, K=[1, 2])


@pytest.mark.peers
def test_the_installed_library_samples_with_it():
    nn = pytest.importorskip("torch_geometric.nn", reason="torch-geometric is not installed")
    torch_geometric.install()
    assert nn.fps(CLOUDS[:, None], BATCH, random_start=False).tolist() == [0, 4, 3, 5, 7]
