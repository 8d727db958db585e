"""From fields to solids: surfaces that are closed and where they should be, memory that does not grow."""

import numpy as np
import pytest
import trimesh

from pointproj.reconstruction import dense_values, extract_surface, grid_field, in_parts, reconstruct

CENTRE, RADIUS = np.array([0.1, 0.0, -0.05]), 0.55


def ball(points):
    return np.linalg.norm(points - CENTRE, axis=1) - RADIUS


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


def test_dense_values_are_in_the_order_of_x_y_z_whatever_the_parts():
    def place(points):
        return points @ np.array([1.0, 10.0, 100.0])

    axis = np.linspace(-1, 1, 5, dtype=np.float32)
    expected = axis[:, None, None] + 10 * axis[None, :, None] + 100 * axis[None, None, :]
    for chunk in (1000, 125, 7):
        assert np.allclose(dense_values(place, 5, chunk), expected, rtol=1e-6)
    with pytest.raises(ValueError, match="at least 2 points a side, got 1"):
        dense_values(place, 1)


def test_no_more_points_are_asked_at_once_than_the_chunk_holds():
    asked = []

    def field(points):
        asked.append(len(points))
        assert points.dtype == np.float32
        return points[:, 0]

    dense_values(field, 21, chunk=1000)
    assert max(asked) == 1000
    assert sum(asked) == 21**3
    points = np.random.default_rng(0).uniform(-1, 1, (2500, 3))
    assert np.array_equal(in_parts(field, points, chunk=1000), points[:, 0].astype(np.float32))
    assert asked[-3:] == [1000, 1000, 500]


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


def test_grid_field_interpolates():
    field = grid_field(dense_values(lambda points: points @ np.array([1.0, 2.0, -3.0]), 9))
    points = np.random.default_rng(2).uniform(-1, 1, (50, 3))
    assert np.allclose(field(points), points @ [1.0, 2.0, -3.0], atol=1e-6)


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
