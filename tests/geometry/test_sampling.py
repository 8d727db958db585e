"""Points drawn from surfaces by area, and fixed clouds."""

import numpy as np
import pytest
import trimesh

from pointproj.geometry.meshes import Mesh
from pointproj.geometry.sampling import FixedCloud, SurfaceSampler, sample_surface

SQUARE = np.array([[0, 0, 0], [4, 0, 0], [4, 3, 0], [0, 3, 0]], dtype=float)


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


def test_samples_are_spread_by_area_and_carry_their_normals():
    box = trimesh.creation.box(extents=(1, 2, 4))
    mesh = Mesh(box.vertices, box.faces, "box")
    points, normals = sample_surface(mesh, 40_000, np.random.default_rng(3))
    assert points.dtype == normals.dtype == np.float32
    half = np.array([0.5, 1.0, 2.0])
    axis = np.abs(normals).argmax(axis=1)
    rows = np.arange(len(points))
    np.testing.assert_allclose(points[rows, axis], normals[rows, axis] * half[axis], atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(normals, axis=1), 1, atol=1e-6)
    share = np.bincount(axis, minlength=3) / len(points)
    np.testing.assert_allclose(share, np.array([8, 4, 2]) / 14, atol=0.01)
    np.testing.assert_allclose(points.mean(axis=0), 0, atol=0.03)
    # variance of z: uniform on the sides (4 ** 2 / 12), at +-2 on the two ends
    assert points[:, 2].var() == pytest.approx(12 / 14 * 16 / 12 + 2 / 14 * 4, rel=0.02)


def test_samples_follow_from_the_generator_alone():
    mesh = Mesh(SQUARE, [[0, 1, 2], [0, 2, 3]], "square")
    first, _ = sample_surface(mesh, 50, np.random.default_rng(7))
    again, _ = sample_surface(mesh, 50, np.random.default_rng(7))
    generator = np.random.default_rng(7)
    sample_surface(mesh, 50, generator)
    later, _ = sample_surface(mesh, 50, generator)
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, later)


def test_degenerate_faces_are_never_sampled():
    faces = [[0, 0, 0], [0, 1, 1], [0, 1, 2], [3, 3, 2]]
    points, normals = sample_surface(Mesh(SQUARE, faces, "mixed"), 500, np.random.default_rng(0))
    assert (points[:, 1] <= points[:, 0] * 0.75 + 1e-6).all()
    np.testing.assert_array_equal(normals, np.tile([0, 0, 1], (500, 1)))


def test_sampling_needs_a_count():
    with pytest.raises(ValueError, match=r"at least 1 point to sample, got 0: raise data\.points"):
        sample_surface(Mesh(SQUARE, [[0, 1, 2]], "square"), 0, np.random.default_rng(0))
