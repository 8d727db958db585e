"""Cutouts: what is left of the surface, that targets follow, and that files of variants are written once."""

import numpy as np
import pytest

from pointproj.data.cutouts import LEAST_LEFT, _ball, _flat_piece, _part, with_cutouts, write_variants
from pointproj.data.furniture import write_furniture
from pointproj.data.layout import MeshFile
from pointproj.geometry.files import read_mesh
from pointproj.geometry.interior import inside_at
from pointproj.geometry.meshes import Mesh, face_areas
from pointproj.runtime import helpers
from pointproj.runtime.helpers import HelperProcesses
from tests.geometry.test_interior import BOX_FACES, box


def two_boxes():
    """Two boxes beside each other, the second one with vertices of its own for every face."""
    first, second = box((0.2, 0.3, 0.4)), box((0.1, 0.1, 0.1))
    loose = (second.vertices + np.array([0.6, 0, 0]))[BOX_FACES].reshape(-1, 3)
    faces = np.concatenate([BOX_FACES, 8 + np.arange(36).reshape(12, 3)])
    return Mesh(np.concatenate([first.vertices, loose]), faces, "two")


def test_a_flat_piece_is_one_side_of_the_box_with_all_copies():
    mesh = box((0.2, 0.3, 0.4))
    doubled = Mesh(mesh.vertices, np.concatenate([mesh.faces, mesh.faces[:, ::-1]]), "doubled")
    taken = _flat_piece(doubled, 0, None)
    corners = doubled.vertices[doubled.faces[taken]]
    assert taken.sum() == 4
    assert np.ptp(corners[..., 0]) == 0


@pytest.mark.parametrize(("start", "expected"), [(0, slice(0, 12)), (15, slice(12, 24))])
def test_a_part_is_connected_by_place_not_by_index(start, expected):
    taken = _part(two_boxes(), start, None)
    assert taken[expected].all()
    assert taken.sum() == 12


def test_a_ball_takes_what_is_near():
    mesh = two_boxes()
    taken = _ball(mesh, 3, np.random.default_rng(0))
    centres = mesh.vertices[mesh.faces].mean(axis=1)
    away = np.linalg.norm(centres - centres[3], axis=1)
    assert taken[3]
    assert away[taken].max() < away[~taken].min()


def test_some_surface_is_gone_and_enough_is_left():
    mesh = two_boxes()
    areas = []
    for seed in range(20):
        variant = with_cutouts(mesh, np.random.default_rng(seed))
        kept = {tuple(face) for face in variant.faces}
        assert kept <= {tuple(face) for face in mesh.faces}
        areas.append(face_areas(variant).sum() / face_areas(mesh).sum())
    assert min(areas) >= LEAST_LEFT
    assert np.mean(np.array(areas) < 1) >= 0.75


def test_a_box_without_a_side_is_outside():
    mesh = box((0.5, 0.5, 0.5))
    middle = np.zeros((1, 3), np.float32)
    assert inside_at(mesh, middle).all()
    open_box = Mesh(mesh.vertices, mesh.faces[~_flat_piece(mesh, 0, None)], "open")
    assert not inside_at(open_box, middle).any()


def test_variants_follow_from_content_and_are_written_once(tmp_path):
    paths = write_furniture(tmp_path / "made", ["table"], train=1, test=0)
    files = [MeshFile(path, "table", "train") for path in paths]
    broken = tmp_path / "broken.off"
    broken.write_text("OFF\n")
    written = write_variants([*files, MeshFile(broken, "table", "train")], tmp_path / "variants", 3)
    assert len({file.path for file in written}) == 3
    assert {file.path.parent for file in written} == {tmp_path / "variants" / "table" / "train"}
    before = [file.path.stat().st_mtime_ns for file in written]
    assert write_variants(files, tmp_path / "variants", 3) == written
    assert [file.path.stat().st_mtime_ns for file in written] == before
    faces = [len(read_mesh(file.path).faces) for file in written]
    assert min(faces) < len(read_mesh(paths[0]).faces)
    assert write_variants(files, tmp_path / "variants", 0) == []


def test_several_processes_write_the_same_furniture_and_variants(tmp_path, monkeypatch):
    monkeypatch.setattr(helpers, "FEWEST_JOBS", 2)
    made = {}
    for count in (1, 2):
        with HelperProcesses(count) as some:
            root = tmp_path / str(count)
            paths = write_furniture(root / "made", ["table", "bed"], 1, 1, defects=True, helpers=some)
            files = [MeshFile(path, path.parents[1].name, path.parent.name) for path in paths]
            variants = write_variants(files, root / "variants", 2, some)
        written = [*paths, *(file.path for file in variants)]
        made[count] = [(path.relative_to(root), path.read_bytes()) for path in written]
    assert (made[1], len(made[1])) == (made[2], 4 + 8)
