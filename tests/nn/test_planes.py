import torch

from pointproj import knn
from pointproj.nn.planes import local_planes


def planes_of(points, unit=0.05, k=16):
    points = points[None]
    _, rows = knn(points, points, k, backend="torch")
    normals, fit = local_planes(points, rows, unit)
    return normals[0], fit[0, :, 0]


def flat(count=600, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, 2, generator=generator, dtype=torch.float64)


def test_a_board_thinner_than_its_samples_are_apart_has_the_planes_of_its_sides():
    sheet = torch.cat([flat(), torch.zeros(600, 1, dtype=torch.float64)], dim=1)
    sheet[::2, 2] = 0.01  # samples are 0.04 apart
    rotation = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(1)).double()).Q
    normals, fit = planes_of(sheet @ rotation.mT)
    right = (normals @ rotation[:, 2]).abs() > 0.9999
    assert right.double().mean() > 0.97
    assert fit[right].mean() > 0.4  # about half of the neighbours are on the other side
    upwards = normals @ torch.tensor([0.37, 0.52, 0.77], dtype=torch.float64)
    assert (upwards > 0).all()


def test_beside_an_edge_the_plane_is_that_of_one_face():
    faces = flat(), flat(seed=1)
    zeros = torch.zeros(600, 1, dtype=torch.float64)
    points = torch.cat([torch.cat([faces[0], zeros], dim=1), torch.cat([zeros, faces[1]], dim=1)])
    normals, _ = planes_of(points)
    of_own_face = torch.cat([normals[:600, 2], normals[600:, 0]]).abs()
    assert (of_own_face > 0.9999).double().mean() > 0.97


def test_planes_of_noisy_samples_are_those_of_least_squares():
    generator = torch.Generator().manual_seed(2)
    sheet = torch.cat([flat(), 0.01 * torch.randn(600, 1, generator=generator, dtype=torch.float64)], dim=1)
    rotation = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(1)).double()).Q
    sheet = sheet @ rotation.mT
    normals, fit = planes_of(sheet)
    _, rows = knn(sheet, sheet, 16, backend="torch")
    away = sheet[rows[:, 1:]] - sheet[:, None]
    centred = away - away.mean(1, keepdim=True)
    expected = torch.linalg.eigh(centred.mT @ centred).eigenvectors[..., 0]
    noisy = (fit < 0.25) & (fit > 0.05)
    assert noisy.double().mean() > 0.6
    aligned = (normals * expected).sum(1).abs()
    torch.testing.assert_close(aligned[noisy], torch.ones_like(aligned[noisy]), atol=1e-3, rtol=0)
    assert (normals @ rotation[:, 2]).abs().mean() > 0.95


def test_where_neighbours_span_no_plane_there_is_none():
    line = torch.linspace(-1, 1, 40, dtype=torch.float64)[:, None] * torch.tensor([[1.0, 2.0, 2.0]]).double()
    for points in (line, line[:1].expand(40, 3)):
        normals, fit = planes_of(points)
        assert normals.isfinite().all()
        assert fit.max() < 1e-3


def test_planes_have_no_gradient():
    points = torch.rand(1, 40, 3, requires_grad=True)
    normals, fit = local_planes(points, torch.arange(8).expand(1, 40, 8), 0.05)
    assert not normals.requires_grad
    assert not fit.requires_grad
