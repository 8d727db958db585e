"""Mesh arrays, normalisation, the query grid."""

import pickle

import numpy as np
import pytest

from pointproj.geometry.meshes import Mesh, MeshError, normalize, query_grid

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


def test_query_grid_runs_z_fastest():
    grid = query_grid(3)
    assert grid.dtype == np.float32
    np.testing.assert_array_equal(grid[:4], [[-1, -1, -1], [-1, -1, 0], [-1, -1, 1], [-1, 0, -1]])
    np.testing.assert_array_equal(grid.reshape(3, 3, 3, 3)[2, 0, 1], [1, -1, 0])
    with pytest.raises(ValueError, match=r"at least 2 points a side, got 1: raise data\.grid"):
        query_grid(1)
