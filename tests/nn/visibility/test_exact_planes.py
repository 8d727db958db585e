"""Exact planes: those of flat pieces, none where there is noise, and the same from kernels as from torch."""

import pytest
import torch

from pointproj import knn
from pointproj.nn.visibility import plain
from pointproj.nn.visibility.constants import ExactPlane
from pointproj.nn.visibility.exact_planes import exact_planes


def board(count=1100, thickness=0.01, seed=0):
    """A tilted board of 1.2 by 0.8, its faces' normals, and which samples are on its narrow sides."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.tensor([1.2, 0.8, thickness], dtype=torch.float64)
    areas = size.prod() / size
    axis = torch.multinomial(areas, count, replacement=True, generator=generator)
    on_box = torch.rand(count, 3, generator=generator, dtype=torch.float64) - 0.5
    end = torch.randint(0, 2, (count,), generator=generator).double() - 0.5
    on_box[torch.arange(count), axis] = end
    rotation = torch.linalg.qr(torch.randn(3, 3, generator=generator).double()).Q
    points = (on_box * size) @ rotation.mT
    return points.float(), rotation.mT[axis].float(), axis != 2


def search(points, k=1 + ExactPlane.NEIGHBORS, of=exact_planes):
    _, rows = knn(points[None], points[None], k, backend="torch")
    normals, support = of(points[None], rows)
    return normals[0], support[0, :, 0]


def test_faces_and_narrow_sides_of_a_board_have_their_planes(device):
    points, expected, narrow = board(thickness=0.05)
    normals, support = (result.cpu() for result in search(points.to(device)))
    found = support > 0
    assert found[~narrow].all()
    assert narrow.sum() > 10
    assert (
        found[narrow].float().mean() > 0.5
    )  # rows of samples, 0.05 apart: directions of the cloud do not help
    cosine = (normals * expected).sum(-1).abs()
    assert cosine[found].min() > 0.9999
    assert not normals[~found].any()
    assert 0.3 < support[~narrow].median() < 0.7  # about half of the neighbours are on the other face


def test_narrow_sides_take_directions_of_other_faces(device):
    points, expected, narrow = board(1500, 0.004)
    generator = torch.Generator().manual_seed(1)
    of_sides = expected[narrow].unique(dim=0)[:2]
    walls = []  # wide faces elsewhere, parallel to the narrow sides
    for normal in of_sides:
        across = torch.linalg.svd(normal[None])[2][1:]
        walls.append(0.3 * normal + 0.6 * (torch.rand(400, 2, generator=generator) - 0.5) @ across)
    alone = search(points.to(device))[1].cpu()[narrow]
    normals, support = (result.cpu() for result in search(torch.cat([points, *walls]).to(device)))
    found = support[: len(points)][narrow] > 0
    assert found.float().mean() > (alone > 0).float().mean() + 0.2
    assert ((normals[: len(points)] * expected).sum(-1).abs()[narrow][found] > 0.999).float().mean() > 0.9


def test_clouds_with_noise_and_curved_ones_have_none():
    points, _, _ = board()
    noisy = points + 1e-3 * torch.randn(points.shape, generator=torch.Generator().manual_seed(2))
    assert (search(noisy)[1] > 0).float().mean() < 0.01
    ball = torch.nn.functional.normalize(
        torch.randn(900, 3, generator=torch.Generator().manual_seed(3)), dim=-1
    )
    assert (search(ball)[1] > 0).float().mean() < 0.01


@pytest.mark.parametrize(("count", "k"), [(700, 33), (37, 33), (301, 20)])
def test_kernels_find_what_operators_of_torch_find(device, count, k):
    points, _, _ = board(count, thickness=0.03, seed=4)
    normals, support = search(points.to(device), k)
    plain_normals, plain_support = search(points.to(device), k, of=plain.exact_planes)
    assert (support != plain_support).float().mean() < 0.01  # at the limit, rounding decides
    cosine = (normals * plain_normals).sum(-1).abs()
    assert (cosine[(support > 0) & (plain_support > 0)] > 0.999).all()


def test_each_cloud_of_a_batch_is_searched_alone():
    clouds = torch.stack([board(seed=5)[0], board(seed=6)[0]])
    rows = torch.stack([knn(points, points, 33, backend="torch")[1] for points in clouds])
    together = exact_planes(clouds, rows)
    for place, points in enumerate(clouds):
        alone = exact_planes(points[None], rows[place][None])
        for one, other in zip(together, alone, strict=True):
            assert torch.equal(one[place], other[0])


def test_points_that_are_not_finite_have_no_plane_and_are_on_none():
    points, _, narrow = board()
    row = int((~narrow).nonzero()[3])
    points[row, 1] = torch.nan
    normals, support = search(points)
    assert support[row] == 0
    assert normals.isfinite().all()
    assert (support[~narrow] > 0).sum() == (~narrow).sum() - 1


def test_one_graph_holds_it_and_nothing_has_gradients():
    points = board(200)[0].double().requires_grad_()
    _, rows = knn(points[None].detach(), points[None].detach(), 33, backend="torch")
    compiled = torch.compile(exact_planes, fullgraph=True, backend="eager")
    found, expected = compiled(points[None], rows), exact_planes(points[None], rows)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert not found[0].requires_grad
