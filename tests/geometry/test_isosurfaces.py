"""From fields to solids: surfaces that are closed and where they should be, memory that does not grow."""

import numpy as np
import pytest
import trimesh

from pointproj.geometry.isosurfaces import extract_surface, reconstruct, side_for
from pointproj.geometry.meshes import DEFAULT_SIDE, MeshError, piece_volumes

CENTRE, RADIUS = np.array([0.1, 0.0, -0.05]), 0.55


def ball(points):
    return np.linalg.norm(points - CENTRE, axis=1) - RADIUS


def directions(count):
    away = np.random.default_rng(0).standard_normal((count, 3))
    return away / np.linalg.norm(away, axis=1, keepdims=True)


def as_trimesh(mesh):
    return trimesh.Trimesh(mesh.vertices, mesh.faces, process=False)


def test_a_ball_comes_back_closed_and_oriented_outwards():
    solid = reconstruct(ball, "ball", side=48)
    surface = as_trimesh(solid.mesh)
    assert surface.is_watertight
    assert surface.is_winding_consistent
    assert surface.volume == pytest.approx(4 / 3 * np.pi * RADIUS**3, rel=5e-3)
    assert np.abs(ball(solid.mesh.vertices)).max() < 2e-3  # units of the cube, of cells of 0.043
    assert solid.mesh.name == "ball"
    points = np.array([CENTRE, [0.9, 0.9, 0.9], CENTRE * [1, 1, 0.5]], dtype=np.float32)
    assert solid.inside(points).tolist() == [True, False, True]


def test_what_reaches_the_cubes_wall_is_closed_there_and_nothing_is_no_surface():
    full = as_trimesh(extract_surface(np.full((9, 9, 9), -1.0), "full"))
    assert full.is_watertight
    assert 3 < full.volume < 8
    half = np.broadcast_to(np.linspace(-1, 1, 9)[:, None, None], (9, 9, 9))
    assert as_trimesh(extract_surface(half, "half")).is_watertight
    assert half[0, 0, 0] == -1  # the caller's values are left alone
    empty = extract_surface(np.ones((9, 9, 9)), "empty")
    assert empty.faces.shape == (0, 3)


def test_rough_fields_give_closed_surfaces_too():
    values = np.random.default_rng(1).standard_normal((24, 24, 24))
    surface = as_trimesh(extract_surface(values, "noise"))
    assert surface.is_watertight
    assert surface.is_winding_consistent


@pytest.mark.gpu
def test_the_surface_is_the_same_on_a_gpu():
    solid = reconstruct(ball, "ball", side=48, device="cuda")
    surface = as_trimesh(solid.mesh)
    assert surface.is_watertight
    assert surface.volume == pytest.approx(4 / 3 * np.pi * RADIUS**3, rel=5e-3)


def test_a_field_that_is_far_from_linear_gives_the_same_ball():
    def saturated(points):
        distance = ball(points)
        return np.where(distance < 0, 0.1 * distance, 0.2 + distance)  # a jump, as between logits

    solid = reconstruct(saturated, "ball", side=32)
    assert as_trimesh(solid.mesh).is_watertight
    assert np.abs(ball(solid.mesh.vertices)).max() < 2 / 31 / 32


def test_where_a_solid_is_cut_by_the_cube_it_stays_closed_there():
    solid = reconstruct(lambda points: points[:, 0] - 0.21, "half", side=16)
    surface = as_trimesh(solid.mesh)
    assert surface.is_watertight
    assert surface.bounds[1, 0] == pytest.approx(0.21, abs=2 / 15 / 32)


def test_a_field_evaluated_near_its_samples_gives_the_same_solid():
    cloud = CENTRE + RADIUS * directions(400)
    far, near = reconstruct(ball, "ball", side=48), reconstruct(ball, "ball", side=48, cloud=cloud)
    assert np.array_equal(near.mesh.vertices, far.mesh.vertices)
    assert np.array_equal(near.mesh.faces, far.mesh.faces)


@pytest.mark.parametrize("count", [50, 1500, 6000, 40_000])
def test_the_grid_is_twice_as_fine_as_the_spacing_of_random_points(count):
    area = 4 * np.pi * RADIUS**2
    side = side_for(RADIUS * directions(count))
    wanted = 1 + 2 * 2 / np.sqrt(area / count)
    assert side == pytest.approx(np.clip(wanted, DEFAULT_SIDE, 160), rel=0.06)
    assert side_for(RADIUS * directions(count), 256) == 256
    assert side_for(np.zeros((count, 3))) == DEFAULT_SIDE


def test_pieces_are_counted_by_their_volumes_and_a_cavity_is_negative():
    def field(points):
        shell = np.abs(np.linalg.norm(points - [-0.4, 0, 0], axis=1) - 0.3) - 0.15
        return np.minimum(shell, np.linalg.norm(points - [0.6, 0, 0], axis=1) - 0.2)

    volumes = piece_volumes(reconstruct(field, "three surfaces", 96).mesh)
    expected = 4 / 3 * np.pi * np.array([0.45**3, 0.2**3, -(0.15**3)])
    np.testing.assert_allclose(volumes, expected, rtol=0.02)


def test_a_field_that_is_not_finite_makes_no_surface():
    def broken(points):
        return np.where(points[:, 0] > 0.9, np.nan, ball(points))

    with pytest.raises(MeshError, match=r"ball: the field is NaN or infinite at [\d,]+ of 32,768 points"):
        reconstruct(broken, "ball", side=32)
