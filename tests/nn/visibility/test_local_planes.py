import pytest
import torch

from pointproj import knn
from pointproj.nn.visibility import plain
from pointproj.nn.visibility.local_planes import local_planes


def all_of(points):
    points = points[None]
    _, rows = knn(points, points, 25, backend="torch")
    return local_planes(points, rows)


def planes_of(points):
    planes = all_of(points)
    return planes.normals[0], planes.fit[0, :, 0]


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
    planes = all_of(points)
    normals = planes.normals[0]
    of_own_face = torch.cat([normals[:600, 2], normals[600:, 0]]).abs()
    assert (of_own_face > 0.9999).double().mean() > 0.97
    assert planes.noise.item() < 1e-6


def turned(sheet):
    rotation = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(1)).double()).Q
    return sheet @ rotation.mT, rotation[:, 2]


def noisy_sheet(deviation, count=600):
    generator = torch.Generator().manual_seed(2)
    height = deviation * torch.randn(count, 1, generator=generator, dtype=torch.float64)
    return torch.cat([flat(count), height], dim=1)


@pytest.mark.parametrize("deviation", [0.003, 0.01])
def test_points_with_noise_have_planes_of_least_squares(deviation):
    points, normal = turned(noisy_sheet(deviation))
    planes = all_of(points)
    assert 0.6 * deviation < planes.noise.item() < 1.4 * deviation
    assert ((planes.normals[0] @ normal).abs() > 0.95).double().mean() > 0.95


def test_a_curved_surface_has_planes_of_least_squares():
    generator = torch.Generator().manual_seed(3)
    ball = torch.nn.functional.normalize(torch.randn(600, 3, generator=generator).double(), dim=1)
    planes = all_of(0.6 * ball)
    assert ((planes.normals[0] * ball).sum(1).abs() > 0.95).double().mean() > 0.95


def test_where_neighbours_span_no_plane_there_is_none():
    line = torch.linspace(-1, 1, 40, dtype=torch.float64)[:, None] * torch.tensor([[1.0, 2.0, 2.0]]).double()
    for points in (line, line[:1].expand(40, 3)):
        normals, fit = planes_of(points)
        assert normals.isfinite().all()
        assert fit.max() < 1e-3


def test_planes_have_no_gradient():
    points = torch.rand(1, 40, 3, requires_grad=True)
    for found in local_planes(points, torch.arange(25).expand(1, 40, 25)):
        assert not found.requires_grad


def in_single(kind, count):
    """A cloud of which single precision and double tell the same planes."""
    if kind == "line":
        return torch.linspace(-1, 1, count)[:, None] * torch.tensor([[0.0, 1.0, 0.0]])
    if kind == "ball":
        generator = torch.Generator().manual_seed(3)
        return 0.6 * torch.nn.functional.normalize(torch.randn(count, 3, generator=generator), dim=1)
    if kind == "sheets":
        return torch.cat([noisy_sheet(0, count), flat(count, 1) @ torch.eye(3).double()[1:]]).float()
    return noisy_sheet(0.01, count).float()


@pytest.mark.parametrize(("kind", "count"), [("noise", 301), ("sheets", 77), ("ball", 129), ("line", 33)])
def test_kernels_find_the_planes_of_operators_of_torch(device, kind, count):
    points = torch.stack([in_single(kind, count), 0.7 * in_single(kind, count).flip(0)])
    _, rows = knn(points, points, 25, backend="torch")
    found = [tensor.cpu() for tensor in local_planes(points.to(device), rows.to(device))]
    expected = plain.local_planes(points.double(), rows)
    normals, fit, noise = (tensor.double() for tensor in found)
    torch.testing.assert_close(noise, expected[2], atol=1e-7, rtol=1e-4)
    torch.testing.assert_close(fit, expected[1], atol=1e-4, rtol=0)
    same = (normals - expected[0]).norm(dim=-1) < 1e-3  # of equally good planes either may be found
    assert same.double().mean() > 0.98


def test_a_point_that_is_not_finite_leaves_other_planes_as_they_are(device):
    points = noisy_sheet(0, 200).float()[None].to(device)
    spoilt = torch.cat([points, torch.full((1, 1, 3), torch.nan, device=device)], dim=1)
    whole, beside = (local_planes(each, knn(each, each, 25)[1]) for each in (points, spoilt))
    for one, other in zip(whole[:2], beside[:2], strict=True):
        torch.testing.assert_close(other[:, :-1], one)
    assert beside.noise.isfinite().all()


def test_the_operator_passes_opcheck():
    points = noisy_sheet(0.01, 40).float()[None]
    rows = knn(points, points, 25, backend="torch")[1]
    torch.library.opcheck(torch.ops.pointproj.local_planes.default, (points, rows))
