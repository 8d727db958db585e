"""Mesh arrays, normalisation, surface samples, the query grid."""

import pickle

import numpy as np
import pytest
import trimesh

from pointproj.geometry.meshes import (
    Mesh,
    MeshError,
    normalize,
    query_grid,
    sample_surface,
)

SQUARE = np.array([[0, 0, 0], [4, 0, 0], [4, 3, 0], [0, 3, 0]], dtype=float)


def test_error_survives_the_way_back_from_a_worker_process():
    error = pickle.loads(pickle.dumps(MeshError("a.off", "is empty")))
    assert (error.source, error.reason, str(error)) == ("a.off", "is empty", "a.off: is empty")


def test_mesh_checks_its_arrays():
    with pytest.raises(MeshError, match=r"hand-made: vertices must have shape \(n, 3\), got \(4, 2\)"):
        Mesh(np.zeros((4, 2)), np.zeros((1, 3)), "hand-made")
    with pytest.raises(MeshError, match="outside 0 to 3"):
        Mesh(SQUARE, [[0, 1, 4]], "hand-made")


def test_normalize_centres_the_box_and_scales_its_longest_side():
    vertices = np.array([[10, 20, 30], [14, 20, 30], [14, 22, 30], [10, 22, 31]], dtype=float)
    mesh = normalize(Mesh(vertices, [[0, 1, 2], [0, 2, 3]], "box"))
    np.testing.assert_allclose(mesh.vertices.min(0), [-0.9, -0.45, -0.225], atol=1e-15)
    np.testing.assert_allclose(mesh.vertices.max(0), [0.9, 0.45, 0.225], atol=1e-15)


def test_normalize_ignores_vertices_that_no_face_uses():
    stray = np.vstack([SQUARE, [[1e6, 0, 0]]])
    mesh = normalize(Mesh(stray, [[0, 1, 2], [0, 2, 3]], "stray"))
    np.testing.assert_allclose(mesh.vertices[:4], (SQUARE - [2, 1.5, 0]) * 0.45, atol=1e-15)


def test_normalize_survives_the_ends_of_the_number_range():
    for scale in (1e-300, 1e307, 1.7e308):
        mesh = normalize(Mesh((SQUARE / 4 * 2 - 1) * scale, [[0, 1, 2], [0, 2, 3]], "extreme"))
        np.testing.assert_allclose(mesh.vertices, (SQUARE - [2, 1.5, 0]) * 0.45, rtol=1e-9, atol=1e-9)


def test_normalize_refuses_what_has_no_extent():
    with pytest.raises(MeshError, match="no faces"):
        normalize(Mesh(SQUARE, np.empty((0, 3)), "bare"))
    with pytest.raises(MeshError, match="no extent"):
        normalize(Mesh(SQUARE, [[1, 1, 1]], "dot"))


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


def test_query_grid_runs_z_fastest():
    grid = query_grid(3)
    assert grid.dtype == np.float32
    np.testing.assert_array_equal(grid[:4], [[-1, -1, -1], [-1, -1, 0], [-1, -1, 1], [-1, 0, -1]])
    np.testing.assert_array_equal(grid.reshape(3, 3, 3, 3)[2, 0, 1], [1, -1, 0])
    with pytest.raises(ValueError, match=r"at least 2 points a side, got 1: raise data\.grid"):
        query_grid(1)
