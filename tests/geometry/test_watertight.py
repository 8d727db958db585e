"""Watertight copies of meshes, and what they enclose."""

import numpy as np
import pytest
import trimesh

from pointproj.geometry.baselines import BaselineUnavailable
from pointproj.geometry.meshes import Mesh, query_grid
from pointproj.geometry.watertight import require_alpha_wrap, watertight_truth


def test_a_box_with_a_wall_inside_becomes_its_outer_surface():
    pytest.importorskip("pymeshlab", reason='needs the extra "baselines"', exc_type=ImportError)
    box, wall = trimesh.creation.box((1.8, 1.2, 0.6)), trimesh.creation.box((0.1, 1.2, 0.6))
    faces = np.concatenate([box.faces, len(box.vertices) + wall.faces[:, ::-1]])
    truth = watertight_truth(Mesh(np.concatenate([box.vertices, wall.vertices]), faces, "box"), 30)
    made = trimesh.Trimesh(truth.mesh.vertices, truth.mesh.faces, process=False)
    assert made.is_watertight
    assert made.volume == pytest.approx(box.volume, rel=0.02)
    for points, inside in ((query_grid(30), truth.grid_inside), (truth.points, truth.points_inside)):
        assert (inside == (np.abs(points) < [0.9, 0.6, 0.3]).all(axis=1)).mean() > 0.995
    beyond = np.abs(truth.surface[0]) - [0.9, 0.6, 0.3]
    assert np.abs(beyond.max(axis=1)).max() < 0.01


def test_without_pymeshlab_the_command_that_installs_it_is_named(monkeypatch):
    reason = "pymeshlab cannot be imported"
    monkeypatch.setattr("pointproj.geometry.watertight.baselines", lambda: {"flood": None, "poisson": reason})
    with pytest.raises(BaselineUnavailable, match="watertight meshes: pymeshlab cannot"):
        require_alpha_wrap()
