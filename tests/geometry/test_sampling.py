"""Points drawn from surfaces, by area, and clouds that are given."""

import numpy as np
import pytest

from pointproj.geometry.sampling import FixedCloud, SurfaceSampler


def test_points_lie_on_faces_in_proportion_to_their_areas():
    # A rectangle 1 x 1 in z = 0 and one 3 x 1 in z = 1, facing apart; a face without area between them.
    vertices = np.array(
        [[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0], [0, 0, 1], [3, 0, 1], [3, 1, 1], [0, 1, 1]]
    )
    faces = np.array([[0, 2, 1], [0, 3, 2], [0, 0, 1], [4, 5, 6], [4, 6, 7], [4, 5, 5]])
    points, normals = SurfaceSampler(vertices.astype(float), faces).draw(40_000, np.random.default_rng(0))
    assert points.dtype == normals.dtype == np.float32
    low = points[:, 2] == 0
    assert low.mean() == pytest.approx(0.25, abs=0.01)
    assert np.array_equal(normals[low], np.tile([0, 0, -1.0], (low.sum(), 1)))
    assert np.array_equal(normals[~low], np.tile([0, 0, 1.0], ((~low).sum(), 1)))
    high = points[~low] / [3, 1, 1]
    counts, _, _ = np.histogram2d(high[:, 0], high[:, 1], bins=4, range=[[0, 1], [0, 1]])
    assert counts / len(high) == pytest.approx(np.full((4, 4), 1 / 16), abs=0.008)


def test_the_last_possible_draw_chooses_a_face_with_area():
    class Highest:
        def random(self, shape):
            return np.full(shape, 1.0)  # beyond what a generator returns, as rounding can make it

    vertices = np.array([[0.0, 0, 0], [1, 0, 0], [0, 1, 0]])
    points, normals = SurfaceSampler(vertices, np.array([[0, 1, 2], [0, 0, 1]])).draw(1, Highest())
    assert np.array_equal(normals, [[0, 0, 1]])
    assert np.isfinite(points).all()
    with pytest.raises(ValueError, match="none of the 1 faces"):
        SurfaceSampler(vertices, np.array([[0, 0, 1]]))


def test_a_fixed_cloud_is_always_the_same():
    cloud = FixedCloud(np.arange(12, dtype=np.float32).reshape(4, 3))
    points, normals = cloud.draw(4, np.random.default_rng(0))
    assert np.array_equal(points, cloud.points)
    assert not normals.any()
