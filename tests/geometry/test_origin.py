"""Coordinates of a survey stay exact through every format that is written, and stale origins are refused."""

import json

import numpy as np
import pytest
import trimesh

from pointproj.geometry.files import WRITERS, read_mesh, write_mesh
from pointproj.geometry.files.origin import origin_file
from pointproj.geometry.meshes import Mesh, MeshError

BALL = trimesh.creation.icosphere(2)
FAR = Mesh(BALL.vertices * 0.5 + [500_000, 4_649_776, 100], BALL.faces, "ball")


@pytest.mark.parametrize("suffix", WRITERS)
@pytest.mark.parametrize("size", [0.5, 1000.0])
def test_a_mesh_of_a_survey_is_read_back(tmp_path, suffix, size):
    written = Mesh(BALL.vertices * size + [-733_111.25, 5_649_776, 100], BALL.faces, "ball")
    path = tmp_path / f"ball{suffix}"
    write_mesh(written, path)
    read = read_mesh(path)
    error = np.abs(read.vertices[read.faces] - written.vertices[written.faces]).max()
    assert error <= (1e-7 * size if suffix in (".stl", ".glb") else 0)
    assert origin_file(path).exists() == (suffix == ".stl")


def test_other_programs_read_the_place_of_a_glb_file(tmp_path):
    write_mesh(FAR, tmp_path / "ball.glb")
    scene = trimesh.load_scene(tmp_path / "ball.glb")
    np.testing.assert_allclose(scene.bounds, [FAR.vertices.min(axis=0), FAR.vertices.max(axis=0)], atol=1e-6)


def test_the_origin_is_logged_and_belongs_to_one_content(tmp_path, caplog):
    path = tmp_path / "ball.stl"
    write_mesh(FAR, path)
    beside = origin_file(path)
    assert f"{path} has single precision" in caplog.text
    assert beside.name in caplog.text
    said = json.loads(beside.read_text())
    np.testing.assert_allclose(said["origin"], [500_000, 4_649_776, 100], atol=1)
    path.write_bytes(b"edited" + path.read_bytes()[6:])
    with pytest.raises(MeshError, match=r"was changed since ball\.stl\.origin\.json was written: remove"):
        read_mesh(path)
    beside.write_text(json.dumps({"origin": [1, 2]}))
    with pytest.raises(MeshError, match="is not three numbers"):
        read_mesh(path)
    write_mesh(Mesh(BALL.vertices, BALL.faces, "ball"), path)  # near zero
    assert not beside.exists()
    assert np.abs(read_mesh(path).vertices).max() == pytest.approx(1)
