"""Targets at any points, against solids whose inside is known by formula."""

import numpy as np
import pytest

from pointproj.data.furniture import make_furniture
from pointproj.geometry import visibility_cells
from pointproj.geometry.fields import field_at, target_field
from pointproj.geometry.interior import directions, inside, inside_at
from pointproj.geometry.meshes import SMALLEST_AREA, Mesh, face_areas, normalize, query_grid
from pointproj.geometry.sampling import SurfaceSampler, pool_points
from pointproj.geometry.visibility import count_escapes
from pointproj.geometry.visibility_cells import count_escapes_by_cells

BOX_FACES = np.array(
    [
        *([0, 1, 3], [0, 3, 2], [4, 7, 5], [4, 6, 7], [0, 5, 1], [0, 4, 5]),
        *([2, 3, 7], [2, 7, 6], [0, 2, 6], [0, 6, 4], [1, 5, 7], [1, 7, 3]),
    ]
)


def box(half):
    signs = np.array([[x, y, z] for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)], dtype=float)
    return Mesh(signs * np.asarray(half), BOX_FACES, "box")


def away_from(half, points, least=1e-4):
    """Points that lie clearly on one side of the box, and which."""
    beyond = (np.abs(points) - np.asarray(half)).max(axis=1)
    clear = np.abs(beyond) > least
    return points[clear], beyond[clear] < 0


@pytest.mark.parametrize("half", [(0.5, 0.31, 0.77), (0.8, 0.6, 0.002)], ids=["solid", "thin plate"])
def test_inside_of_a_box_at_random_points(half):
    rng = np.random.default_rng(0)
    points = rng.uniform(-1, 1, (4000, 3)) * np.minimum(np.asarray(half) * 2, 1)
    points, expected = away_from(half, points.astype(np.float32))
    assert 0.05 < expected.mean() < 0.95
    np.testing.assert_array_equal(inside_at(box(half), points), expected)


def test_orientation_and_copies_of_faces_change_nothing():
    half = (0.5, 0.4, 0.3)
    solid = box(half)
    faces = np.concatenate([solid.faces[:, ::-1], solid.faces[:5]])
    points, expected = away_from(half, np.random.default_rng(1).uniform(-1, 1, (2000, 3)).astype(np.float32))
    np.testing.assert_array_equal(inside_at(Mesh(solid.vertices, faces, "copies"), points), expected)


def test_a_single_sheet_has_no_inside():
    sheet = Mesh(np.array([[-0.8, -0.8, 0.01], [0.8, -0.8, 0.01], [0, 0.8, 0.01]]), [[0, 1, 2]], "sheet")
    assert not inside_at(sheet, np.random.default_rng(2).uniform(-1, 1, (2000, 3)).astype(np.float32)).any()


def test_no_points_and_no_faces_have_no_inside():
    solid = box((0.5, 0.4, 0.3))
    assert inside_at(solid, np.empty((0, 3), np.float32)).shape == (0,)
    point = np.zeros((1, 3), np.float32)
    assert inside_at(solid, point).all()
    needle = Mesh(solid.vertices, solid.faces[:, [0, 0, 1]], "needle")
    assert not inside_at(needle, point).any()
    assert not inside_at(Mesh(solid.vertices, np.empty((0, 3), int), "empty"), point).any()


def test_labels_of_the_grid_are_those_at_its_points():
    hollow = box((0.61, 0.43, 0.52))
    np.testing.assert_array_equal(inside_at(hollow, query_grid(12)[::-1]), inside(hollow, 12)[::-1])


@pytest.mark.parametrize("name", ["chair", "bathtub"])
def test_cells_and_tree_count_the_same_escapes(name):
    mesh = normalize(make_furniture(name, 6, varied=True, defects=True))
    corners = mesh.vertices[mesh.faces[face_areas(mesh) > SMALLEST_AREA]]
    points = np.random.default_rng(4).uniform(-1.1, 1.1, (1501, 3)).astype(np.float32)
    before = np.random.default_rng(5).integers(0, 4, len(points)).astype(np.int32)
    for most in (3, 12, 300):
        some = directions()[5:40]
        cells = count_escapes_by_cells(corners, points, some, before, most)
        tree = count_escapes(corners, points, some, before, most, device="cpu")
        np.testing.assert_array_equal(cells, tree)
        assert cells.max() <= most + 1
        assert (cells > before).any()


@pytest.mark.parametrize("width", [1e-2, 1e-4, 1e-6, 1e-8])
def test_cells_decide_exactly_beside_slivers_small_faces_and_edges(width):
    rng = np.random.default_rng(9)
    corners = rng.uniform(-0.9, 0.9, (300, 3, 3))
    slivers, small = corners[:100], corners[100:200]
    slivers[:, 2] = slivers[:, 0] + rng.uniform(0, 1, (100, 1)) * (slivers[:, 1] - slivers[:, 0])
    slivers[:, 2] += width * rng.standard_normal((100, 3))
    small[:, 1:] = small[:, :1] + width * rng.standard_normal((100, 2, 3))
    on_faces = np.einsum("nc,ncd->nd", rng.dirichlet(np.ones(3), 600), corners[rng.integers(0, 300, 600)])
    along = directions()[rng.integers(0, 40, 900)]
    place = corners[rng.integers(0, 300, 900)]
    start, end, share = place[:, 0], place[:, 1], rng.uniform(0, 1, (900, 1))
    behind_edges = start + share * (end - start) - rng.uniform(0, 0.5, (900, 1)) * along
    points = np.concatenate([on_faces, behind_edges]).astype(np.float32)
    none = np.zeros(len(points), np.int32)
    cells = count_escapes_by_cells(corners, points, directions()[:40], none, 40)
    tree = count_escapes(corners, points, directions()[:40], none, 40, device="cpu")
    np.testing.assert_array_equal(cells, tree)


def test_a_mesh_with_too_many_places_in_cells_is_left_to_the_tree(monkeypatch):
    mesh, grid = box((0.5, 0.4, 0.3)), query_grid(12)
    expected = inside_at(mesh, grid)
    monkeypatch.setattr(visibility_cells, "CAPACITY", 100)
    np.testing.assert_array_equal(inside_at(mesh, grid), expected)


def test_kinds_are_distance_sign_and_label():
    half = np.array([0.5, 0.4, 0.3])
    points, expected = away_from(half, np.random.default_rng(3).uniform(-1, 1, (500, 3)).astype(np.float32))
    beyond = np.abs(points) - half
    outside = np.linalg.norm(np.maximum(beyond, 0), axis=1)
    signed = outside + np.minimum(beyond.max(axis=1), 0)
    np.testing.assert_allclose(field_at(box(half), points, "udf"), np.abs(signed), atol=1e-6)
    np.testing.assert_allclose(field_at(box(half), points, "sdf"), signed, atol=1e-6)
    np.testing.assert_array_equal(field_at(box(half), points, "occupancy"), expected)


@pytest.mark.parametrize("kind", ["udf", "sdf", "occupancy"])
def test_points_beside_the_grid_have_the_values_that_they_have_alone(kind):
    mesh = box((0.61, 0.43, 0.52))
    points = np.random.default_rng(6).uniform(-1, 1, (77, 3)).astype(np.float32)
    expected = np.concatenate([target_field(mesh, 9, kind), field_at(mesh, points, kind)])
    np.testing.assert_array_equal(target_field(mesh, 9, kind, beside=points), expected)


def test_a_pool_is_fixed_by_its_seed_and_lies_half_near_the_surface():
    half = (0.9, 0.5, 0.4)
    mesh = box(half)
    sampler = SurfaceSampler(mesh.vertices, mesh.faces)
    points = pool_points(sampler, 3001, 7)
    assert (points.shape, points.dtype) == ((3001, 3), np.float32)
    assert np.abs(points).max() <= 1
    np.testing.assert_array_equal(points, pool_points(sampler, 3001, 7))
    assert (points != pool_points(sampler, 3001, 8)).any(axis=1).all()
    distance = field_at(mesh, points, "udf")
    assert 0.45 < (distance < 0.06).mean() < 0.7
    beyond = (np.abs(points) > np.asarray(half) + 0.35).any(axis=1)
    assert 0.02 < beyond.mean() < 0.12
    first, second = (distance[:1500] < 0.05).mean(), (distance[1500:] < 0.05).mean()
    assert abs(first - second) < 0.06  # in random order
