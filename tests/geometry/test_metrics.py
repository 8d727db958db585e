"""Metrics of solids: known values on simple shapes."""

import numpy as np
import pytest
import trimesh

from pointproj.data.furniture import make_furniture
from pointproj.geometry.fields import NoInterior
from pointproj.geometry.isosurfaces import Reconstruction, reconstruct
from pointproj.geometry.meshes import LONGEST_SIDE, Mesh, normalize
from pointproj.geometry.metrics import METRICS, intersection_over_union, measure, surface_agreement, truth_of


def cube(half, name="cube"):
    box = trimesh.creation.box([2 * half] * 3)
    return Mesh(box.vertices, box.faces, name)


def joined(*meshes):
    offsets = np.cumsum([0, *(len(mesh.vertices) for mesh in meshes[:-1])])
    faces = [mesh.faces + offset for mesh, offset in zip(meshes, offsets, strict=True)]
    return Mesh(np.concatenate([mesh.vertices for mesh in meshes]), np.concatenate(faces), "joined")


def flipped(mesh):
    return Mesh(mesh.vertices, mesh.faces[:, ::-1], mesh.name)


def solid_cube(half):
    return Reconstruction(cube(half), lambda points: (np.abs(points) < half).all(axis=1))


def test_intersection_over_union():
    one, other = np.array([1, 1, 0, 0], bool), np.array([1, 0, 1, 0], bool)
    assert (intersection_over_union(one, other), intersection_over_union(one, one)) == (1 / 3, 1)
    assert intersection_over_union(one & False, one & False) == 1


def test_a_perfect_reconstruction_of_a_cube():
    truth = truth_of(cube(0.3), 12, samples=20_000)
    measured = measure(solid_cube(0.3), truth)
    assert (list(measured), measured["iou_grid"], measured["iou"]) == (list(METRICS), 1, 1)
    assert measured["f_score"] > 0.99
    assert measured["normal_consistency"] > 0.98
    # what remains is the distance between two random samples: half of 1 / sqrt(density) on the average
    density = 20_000 / (6 * 0.6**2)
    assert measured["chamfer_l1"] == pytest.approx(0.5 / density**0.5 / (LONGEST_SIDE / 10), rel=0.05)


def test_a_smaller_cube_is_wrong_by_what_geometry_says():
    truth = truth_of(cube(0.9), 16, samples=20_000)
    measured = measure(solid_cube(0.6), truth)
    assert (measured["iou"], measured["f_score"]) == (pytest.approx((0.6 / 0.9) ** 3, rel=0.03), 0)
    assert measured["chamfer_l1"] > 0.3 / (LONGEST_SIDE / 10)


def test_an_empty_reconstruction_gets_the_worst_of_everything():
    truth = truth_of(cube(0.9), 8, samples=2000)
    measured = measure(reconstruct(lambda points: np.ones(len(points)), "nothing", 8), truth)
    assert {key: measured[key] for key in ("iou", "iou_grid", "f_score", "normal_consistency")} == {
        "iou": 0,
        "iou_grid": 0,
        "f_score": 0,
        "normal_consistency": 0,
    }
    assert measured["chamfer_l1"] == pytest.approx(10 * 3**0.5)


def test_agreement_of_parallel_planes():
    axis = np.linspace(-0.9, 0.9, 60)
    flat = np.stack(np.meshgrid(axis, axis, [0.0], indexing="ij"), axis=-1).reshape(-1, 3)
    normals = np.broadcast_to([0.0, 0.0, 1.0], flat.shape)
    lifted = flat + np.array([0, 0, 0.009])
    near = surface_agreement((lifted, -normals), (flat, normals))
    assert near["chamfer_l1"] == pytest.approx(0.05)  # 0.009 in tenths of 1.8
    assert near["f_score"] == 1
    assert near["normal_consistency"] == 1  # the sign of normals does not count
    half = surface_agreement((flat[flat[:, 0] < 0], normals[flat[:, 0] < 0]), (flat, normals))
    assert 0.5 < half["f_score"] < 0.7  # precision 1, recall about a half
    far = surface_agreement((flat + np.array([0, 0, 0.02]), normals), (flat, normals))
    assert far["f_score"] == 0


def test_walls_inside_a_solid_are_no_part_of_the_true_surface():
    outer, inner = cube(0.9), cube(0.5)
    truth = truth_of(joined(outer, flipped(outer), inner), 12, samples=5000)
    points, normals = truth.surface
    assert len(points) == 5000
    assert np.abs(points).max(axis=1) == pytest.approx(0.9)
    assert truth.points_inside.mean() == pytest.approx(0.9**3, abs=0.02)
    on_face = np.abs(points).argmax(axis=1)
    assert np.abs(normals[np.arange(5000), on_face]) == pytest.approx(1)


def test_sheets_outside_a_solid_are_no_part_of_the_true_surface():
    sheet = Mesh(
        np.array([[-0.9, -0.9, -0.7], [0.9, -0.9, -0.7], [0, 0.9, -0.7]]), np.array([[0, 1, 2]]), "x"
    )
    truth = truth_of(joined(cube(0.4), sheet), 12, samples=5000)
    assert len(truth.surface[0]) == 5000
    assert np.abs(truth.surface[0]).max(axis=1) == pytest.approx(0.4)


def test_truth_of_furniture_does_not_depend_on_defects():
    clean, broken = (normalize(make_furniture("desk", 4, varied=True, defects=d)) for d in (False, True))
    one, other = (truth_of(mesh, 24, samples=50_000) for mesh in (clean, broken))
    assert intersection_over_union(one.points_inside, other.points_inside) > 0.99
    agreement = surface_agreement(one.surface, other.surface)
    assert agreement["f_score"] > 0.98


def test_a_sheet_has_nothing_to_reconstruct():
    sheet = Mesh(np.array([[-0.9, -0.9, 0], [0.9, -0.9, 0], [0, 0.9, 0.0]]), np.array([[0, 1, 2]]), "sheet")
    with pytest.raises(NoInterior, match="sheet: encloses no point"):
        truth_of(sheet, 12)
