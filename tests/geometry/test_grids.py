"""Fields on grids: the order of values, bounded chunks, and evaluation only where a surface can be."""

import numpy as np
import pytest

from pointproj.geometry.grids import dense_values, evaluate, grid_field, hole_radius, values_near


class Asked:
    """A field that counts how often it is asked."""

    def __init__(self, field):
        self.field = field
        self.points = 0

    def __call__(self, points):
        assert points.dtype == np.float32
        self.points += len(points)
        return self.field(points)


MIDDLE, HALF = np.array([0.1, 0.0, 0.203]), np.array([0.6, 0.6, 0.01])


def board(points):
    """A lying board, thinner than a cell of any grid here."""
    return (np.abs(points - MIDDLE) - HALF).max(axis=1)


def on_board(count):
    places = np.random.default_rng(0).uniform(-1, 1, (count, 3))
    places[:, 2] = np.sign(places[:, 2])
    return MIDDLE + HALF * places


def test_dense_values_are_in_the_order_of_x_y_z_whatever_the_chunk():
    def place(points):
        return points @ np.array([1.0, 10.0, 100.0])

    axis = np.linspace(-1, 1, 5, dtype=np.float32)
    expected = axis[:, None, None] + 10 * axis[None, :, None] + 100 * axis[None, None, :]
    for chunk in (1000, 125, 7):
        assert np.allclose(dense_values(place, 5, chunk), expected, rtol=1e-6)
    with pytest.raises(ValueError, match="at least 2 points a side, got 1"):
        dense_values(place, 1)


def test_no_more_points_are_evaluated_at_once_than_the_chunk_holds():
    asked = []

    def field(points):
        asked.append(len(points))
        assert points.dtype == np.float32
        return points[:, 0]

    dense_values(field, 21, chunk=1000)
    assert max(asked) == 1000
    assert sum(asked) == 21**3
    points = np.random.default_rng(0).uniform(-1, 1, (2500, 3))
    assert np.array_equal(evaluate(field, points, chunk=1000), points[:, 0].astype(np.float32))
    assert asked[-3:] == [1000, 1000, 500]


def test_grid_field_interpolates():
    field = grid_field(dense_values(lambda points: points @ np.array([1.0, 2.0, -3.0]), 9))
    points = np.random.default_rng(2).uniform(-1, 1, (50, 3))
    assert np.allclose(field(points), points @ [1.0, 2.0, -3.0], atol=1e-6)


@pytest.mark.parametrize("side", [2, 3, 7, 33, 100])
def test_near_a_cloud_values_are_those_of_the_whole_grid(side):
    field, cloud = Asked(board), on_board(1500)
    near, whole = values_near(field, side, cloud), dense_values(board, side)
    assert (near.shape, near.dtype) == (whole.shape, np.float32)
    assert np.array_equal(near < 0, whole < 0)
    nodes = np.stack(np.meshgrid(*[np.linspace(-1, 1, side)] * 3, indexing="ij"), axis=-1)
    beside = (np.abs(nodes - MIDDLE) < HALF + np.array([0, 0, hole_radius(cloud)])).all(axis=-1)
    assert np.array_equal(near[beside], whole[beside])
    if side == 100:
        assert (whole < 0).any()
        assert field.points < 0.25 * side**3


def test_a_surface_far_from_the_cloud_is_found_too():
    def ball(points):
        return np.linalg.norm(points, axis=1) - 0.7

    below = np.random.default_rng(1).standard_normal((500, 3))
    below = 0.7 * below / np.linalg.norm(below, axis=1, keepdims=True)
    field = Asked(ball)
    near, whole = values_near(field, 64, below[below[:, 2] < 0]), dense_values(ball, 64)
    assert np.array_equal(near < 0, whole < 0)
    assert field.points < 0.6 * 64**3


@pytest.mark.parametrize("chunk", [10**6, 1000, 77])
def test_parts_change_nothing_near_a_cloud_either(chunk):
    cloud, asked = on_board(300), []

    def field(points):
        asked.append(len(points))
        return board(points)

    assert np.array_equal(values_near(field, 40, cloud, chunk), values_near(board, 40, cloud))
    assert max(asked) <= chunk


def test_the_radius_of_holes_follows_the_spacing():
    axis = np.linspace(-1, 1, 41)
    plane = np.stack([*(a.ravel() for a in np.meshgrid(axis, axis)), np.zeros(41 * 41)], axis=-1)
    assert hole_radius(plane) == pytest.approx(2 * 0.05, rel=0.2)  # the 12th neighbour is two steps away
    assert hole_radius(plane / 2) == pytest.approx(hole_radius(plane) / 2)
    assert hole_radius(plane[:3]) > 0
    assert hole_radius(plane[:1]) == 0
