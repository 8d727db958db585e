"""Planes that are spread over faces, against plain torch and against the faces themselves."""

import pytest
import torch

from pointproj import knn
from pointproj.nn.visibility import plain
from pointproj.nn.visibility.constants import FacePlane
from pointproj.nn.visibility.face_planes import _propagate, propagate_planes
from pointproj.nn.visibility.local_planes import local_planes

DEVIATION = 0.01


def noisy_box(clouds=2, points=701, seed=0):
    """Samples of a box with noise; sensors that saw two thirds of them from outside."""
    generator = torch.Generator().manual_seed(seed)
    outwards = torch.nn.functional.normalize(torch.randn(clouds, points, 3, generator=generator), dim=-1)
    on_box = 0.8 * outwards / outwards.abs().amax(-1, keepdim=True)
    aside = torch.randn(clouds, points, 3, generator=generator)
    sensors = torch.nn.functional.normalize(outwards + 0.3 * aside, dim=-1)
    sensors[:, ::3] = 0
    return on_box + DEVIATION * torch.randn(clouds, points, 3, generator=generator), sensors


def searched(points, k=25):
    _, rows = knn(points, points, k, backend="torch")
    return rows, local_planes(points, rows)


@pytest.mark.parametrize(
    ("k", "rounds", "last", "votes", "share"),
    [(25, 8, 0, 8, 1), (17, 1, 1, 2000, 1), (17, 1, 1, 8, 0.99), (25, 12, 2, 8, 0.95)],
)
def test_planes_are_those_of_plain_torch(device, k, rounds, last, votes, share, monkeypatch):
    monkeypatch.setattr(FacePlane, "ROUNDS", rounds)
    monkeypatch.setattr(FacePlane, "LAST_ROUNDS", last)
    monkeypatch.setattr(FacePlane, "VOTES", votes)
    points, sensors = (tensor.to(device) for tensor in noisy_box())
    rows, planes = searched(points, k)
    inputs = points, rows, sensors, torch.tensor([0.011, 0.009], device=device), planes.normals
    got = _propagate(*inputs)
    expected = plain.propagate_planes(*(one.double() if one.is_floating_point() else one for one in inputs))
    for one, other in zip(got, expected, strict=True):
        difference = (one.double() - other).norm(dim=-1)
        # Of planes that are equally good, rounding chooses, and planes spread.
        assert (difference < 2e-4).double().mean() >= share
        assert difference.median() < 1e-5


def test_planes_are_those_of_the_faces():
    points, sensors = noisy_box(1, 1500)
    rows, planes = searched(points)
    normals, shift = propagate_planes(points, rows, planes.normals, planes.noise, sensors)

    def off(by):
        return ((points + by).abs().amax(-1) - 0.8).abs().median()

    assert off(shift) < 0.25 * off(0)

    def directed(normals):
        return (normals.abs().amax(-1) > 0.9986).double().mean()  # three degrees

    assert directed(normals) > 0.97
    assert directed(planes.normals) < 0.9
    assert (shift.norm(dim=-1) <= 1.001 * FacePlane.FARTHEST * planes.noise[..., 0]).all()
    torch.testing.assert_close((shift * normals).sum(-1).abs(), shift.norm(dim=-1), atol=1e-6, rtol=1e-5)


def test_sensors_keep_the_sides_of_a_board_apart_that_is_as_thin_as_the_noise():
    generator = torch.Generator().manual_seed(3)
    points = torch.rand(1, 1200, 3, generator=generator)
    points[..., 2] = DEVIATION * torch.randn(1, 1200, generator=generator)
    upper = torch.arange(1200) % 2 == 0
    points[:, upper, 2] += DEVIATION
    sensors = torch.tensor([0.6, 0.0, 0.8]) * torch.where(upper, 1.0, -1.0)[:, None].expand(1, -1, 3)
    rows, planes = searched(points)
    height = {
        known: points[..., 2] + propagate_planes(points, rows, planes.normals, planes.noise, seen)[1][..., 2]
        for known, seen in (("sensors", sensors), ("nothing", None))
    }
    apart = {known: one[:, upper].median() - one[:, ~upper].median() for known, one in height.items()}
    assert 0.7 * DEVIATION < apart["sensors"] < 1.3 * DEVIATION
    assert apart["nothing"] < 0.6 * DEVIATION


def test_narrow_faces_take_directions_of_wide_ones(monkeypatch):
    generator = torch.Generator().manual_seed(5)
    board = torch.rand(900, 3, generator=generator) * torch.tensor([1.6, 0.15, 0.6]) - 0.3
    number = torch.arange(900) % 10
    board[:, 1] = torch.where(number < 5, -0.3, -0.15)
    narrow = number % 5 == 0  # the upper side, 0.15 wide and 1.6 long
    board[narrow, 1] = 0.15 * torch.rand(180, generator=generator) - 0.3
    board[narrow, 2] = 0.3
    wall = torch.rand(600, 3, generator=generator) * torch.tensor([1.0, 1.0, 0.0]) - 0.9
    cloud = torch.cat([board, wall]) + DEVIATION * torch.randn(1500, 3, generator=generator)
    rows, planes = searched(cloud[None])

    def right():
        normals, _ = propagate_planes(cloud[None], rows, planes.normals, planes.noise)
        return (normals[0, :900, 2][narrow].abs() > 0.99).float().mean()

    with_directions = right()
    monkeypatch.setattr(FacePlane, "VOTES", FacePlane.VOTES * 10**4)
    assert with_directions > right() + 0.1
    assert with_directions > 0.9


def test_clouds_without_noise_stay_and_points_that_are_not_finite_hurt_no_others(device):
    points, sensors = (tensor.to(device) for tensor in noisy_box(2, 300))
    rows, planes = searched(points)
    noise = torch.tensor([0.0, 0.01], device=device).view(2, 1, 1)
    normals, shift = propagate_planes(points, rows, planes.normals, noise, sensors)
    assert torch.equal(normals[0], planes.normals[0])
    assert not shift[0].any()
    assert shift[1].any()
    few, without = rows.clone(), planes.normals.clone()
    few[1, 7] = -1
    few[rows == 7] = -1
    without[1, 9] = 0
    others = torch.arange(300, device=device) != 7
    points[1, 7] = torch.nan
    got = [one[1:, others] for one in propagate_planes(points, few, without, noise, sensors)]
    kept = few[1:, others]
    points, without, sensors = (one[1:, others] for one in (points, without, sensors))
    expected = propagate_planes(points, torch.where(kept > 7, kept - 1, kept), without, noise[1:], sensors)
    torch.testing.assert_close(got, list(expected), atol=1e-6, rtol=1e-4)


def test_the_dtype_is_that_of_the_points_and_nothing_has_gradients():
    points, sensors = (tensor.double().requires_grad_() for tensor in noisy_box(1, 100))
    rows, planes = searched(points)
    for result in propagate_planes(points, rows, planes.normals, planes.noise, sensors):
        assert result.dtype == torch.float64
        assert not result.requires_grad
