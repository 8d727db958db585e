"""Reconstructions without training: solid where a cloud encloses something."""

import sys

import numpy as np
import pytest

from pointproj.data.furniture import make_furniture
from pointproj.geometry import baselines as module
from pointproj.geometry.baselines import (
    BaselineUnavailable,
    baseline,
    baselines,
    flooded_distance,
    oriented_normals,
)
from pointproj.geometry.meshes import normalize
from pointproj.geometry.metrics import intersection_over_union, measure, truth_of
from pointproj.geometry.sampling import SurfaceSampler


@pytest.fixture(scope="module")
def dresser():
    mesh = normalize(make_furniture("dresser", 0))
    points, normals = SurfaceSampler(mesh.vertices, mesh.faces).draw(4096, np.random.default_rng(0))
    return points, normals, truth_of(mesh, 24, samples=20_000)


def ball(count=3000, radius=0.7):
    normals = np.random.default_rng(0).standard_normal((count, 3))
    normals /= np.linalg.norm(normals, axis=1, keepdims=True)
    return radius * normals, normals


def test_flooded_distance_of_a_ball_is_signed():
    points, _ = ball()
    values = flooded_distance(points, side=33)
    axis = np.linspace(-1, 1, 33)
    radius = np.sqrt(axis[:, None, None] ** 2 + axis[None, :, None] ** 2 + axis[None, None, :] ** 2)
    inside = radius < 0.7
    assert intersection_over_union(values < 0, inside) > 0.9
    assert values[16, 16, 16] == pytest.approx(-0.7, abs=0.01)
    assert values[0, 0, 0] == pytest.approx(3**0.5 - 0.7, abs=0.05)


def test_flood_reconstructs_a_dresser(dresser):
    points, _, truth = dresser
    measured = measure(baseline("flood")(points), truth)
    assert measured["iou"] > 0.85
    assert measured["f_score"] > 0.7


def test_normals_of_a_ball_point_outwards():
    points, normals = ball()
    assert ((oriented_normals(points) * normals).sum(axis=1) > 0.9).mean() > 0.99


def test_poisson_reconstructs_a_dresser(dresser):
    pytest.importorskip("pymeshlab", reason='needs the extra "baselines"', exc_type=ImportError)
    points, _, truth = dresser
    measured = measure(baseline("poisson")(points), truth)
    assert measured["iou"] > 0.8


def test_few_points_are_no_reason_to_fail():
    solid = baseline("flood")(ball(count=6)[0])
    assert solid.inside(np.zeros((1, 3), np.float32)).shape == (1,)


def test_unknown_and_missing_baselines_are_named(monkeypatch):
    with pytest.raises(ValueError, match="expected a baseline of flood, poisson; got 'magic'"):
        baseline("magic")
    monkeypatch.setitem(sys.modules, "pymeshlab", None)
    assert baselines()["flood"] is None
    with pytest.raises(BaselineUnavailable, match=r"poisson: pymeshlab.*\[baselines\]"):
        module.baseline("poisson")
