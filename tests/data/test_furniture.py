"""Procedural furniture: closed, distinct, repeatable, and written without touching what is there."""

import functools
import json

import numpy as np
import pytest
import trimesh

from pointproj.data.errors import DataError
from pointproj.data.furniture import CLASSES, GENERATOR_VERSION, MARKER, make_furniture, write_furniture
from pointproj.data.layout import find_meshes
from pointproj.geometry.files import read_mesh
from pointproj.geometry.interior import inside
from pointproj.geometry.meshes import face_areas, normalize

made = functools.cache(make_furniture)


def as_trimesh(mesh):
    return trimesh.Trimesh(mesh.vertices, mesh.faces, process=False)


def closed(mesh):
    surface = as_trimesh(mesh)
    assert surface.is_watertight
    assert surface.is_winding_consistent
    assert surface.volume > 0
    return surface


def top_height(mesh, x, y):
    """Height of the uppermost surface over (x, y), all three as shares of the bounding box."""
    low, high = mesh.bounds
    corners = (mesh.triangles - low) / (high - low)
    a, b, c = np.moveaxis(corners, 1, 0)

    def area(p, q):  # twice the signed area that p, q and (x, y) span
        return (q[:, 0] - p[:, 0]) * (y - p[:, 1]) - (q[:, 1] - p[:, 1]) * (x - p[:, 0])

    weights = np.stack([area(b, c), area(c, a), area(a, b)], axis=1)
    over = ((weights > 0).all(axis=1) | (weights < 0).all(axis=1)).nonzero()[0]
    weights = weights[over] / weights[over].sum(axis=1, keepdims=True)
    return (weights * corners[over, :, 2]).sum(axis=1).max()


@pytest.mark.parametrize("class_name", CLASSES)
def test_every_piece_is_one_closed_surface_facing_outwards(class_name):
    for seed in range(12):
        mesh = made(class_name, seed)
        surface = closed(mesh)
        assert surface.body_count == 1
        assert len(np.unique(mesh.vertices, axis=0)) == len(mesh.vertices)
        low, high = surface.bounds
        assert 15 <= (high - low).max() <= 2000
        assert low[2] == 0


@pytest.mark.parametrize("class_name", CLASSES)
def test_seeds_fix_the_mesh_and_tell_meshes_apart(class_name):
    one, again = made(class_name, 3), make_furniture(class_name, 3)
    assert np.array_equal(one.vertices, again.vertices)
    assert np.array_equal(one.faces, again.faces)
    sizes = {
        tuple(np.round(np.ptp(normalize(made(class_name, seed)).vertices, axis=0), 4)) for seed in range(15)
    }
    assert len(sizes) == 15


@pytest.mark.parametrize("class_name", CLASSES)
def test_varied_pieces_are_closed_and_all_different(class_name):
    pieces = [made(class_name, seed, varied=True) for seed in range(40)]
    for mesh in pieces:
        surface = closed(mesh)
        assert np.ptp(mesh.vertices, axis=0).max() == pytest.approx(surface.extents.max())
        assert mesh.vertices[:, 2].min() == 0
    topologies = {(len(mesh.vertices), len(mesh.faces)) for mesh in pieces}
    assert len(topologies) > 25  # other parts, not only other measures
    sizes = {tuple(np.round(np.ptp(normalize(mesh).vertices, axis=0), 4)) for mesh in pieces}
    assert len(sizes) == 40
    assert make_furniture(class_name, 5, varied=True).vertices.tobytes() == pieces[5].vertices.tobytes()


@pytest.mark.parametrize("class_name", CLASSES)
def test_defects_change_the_surface_and_not_what_is_inside(class_name):
    for seed in range(2):
        clean = made(class_name, seed, varied=True)
        defective = make_furniture(class_name, seed, varied=True, defects=True)
        assert np.allclose(np.ptp(clean.vertices, axis=0), np.ptp(defective.vertices, axis=0), rtol=1e-3)
        expected, found = (inside(normalize(mesh), 30) for mesh in (clean, defective))
        # where few directions escape, other faces may hide some of them
        assert (expected != found).sum() <= 0.005 * expected.sum()


def test_defects_are_those_of_real_files():
    seen = set()
    for seed in range(12):
        mesh = make_furniture("desk", seed, varied=True, defects=True)
        area = face_areas(normalize(mesh))
        _, counts = np.unique(np.sort(mesh.faces, axis=1), axis=0, return_counts=True)
        surface = as_trimesh(mesh)
        seen |= {"twice"} if (counts > 1).any() else set()
        seen |= {"no area"} if (area < 1e-12).any() else set()
        seen |= {"not shared"} if len(np.unique(mesh.vertices, axis=0)) < len(mesh.vertices) else set()
        seen |= {"turned"} if not surface.is_winding_consistent else set()
        seen |= {"open"} if not surface.is_watertight else set()
    assert seen == {"twice", "no area", "not shared", "turned", "open"}


def test_tubs_are_open_and_tables_are_not():
    for seed in range(6):
        tub = as_trimesh(make_furniture("bathtub", seed))
        assert top_height(tub, 0.553, 0.507) < 0.5
        table = as_trimesh(make_furniture("table", seed))
        assert top_height(table, 0.553, 0.507) > 0.99
        # a table is mostly air below its top
        assert table.volume < 0.6 * table.bounding_box.volume


def test_dressers_are_solid_and_chairs_have_a_back():
    for seed in range(6):
        dresser = as_trimesh(make_furniture("dresser", seed))
        assert dresser.volume > 0.3 * dresser.bounding_box.volume
        chair = as_trimesh(make_furniture("chair", seed))
        upper = chair.vertices[chair.vertices[:, 2] > 0.75 * chair.bounds[1, 2]]
        assert upper[:, 1].mean() > chair.bounds[:, 1].mean()


def test_an_unknown_class_is_named():
    with pytest.raises(DataError, match=r"bathtub, bed.*got 'lamp'"):
        make_furniture("lamp", 0)
    with pytest.raises(DataError, match="got lamp"):
        write_furniture("never-made", ["chair", "lamp"])


def test_files_read_back_to_what_was_made(tmp_path):
    files = write_furniture(tmp_path, ["chair", "sofa"], train=2, test=1, seed=7)
    assert [str(path.relative_to(tmp_path)) for path in files] == [
        "chair/train/chair_0001.off",
        "chair/train/chair_0002.off",
        "chair/test/chair_5001.off",
        "sofa/train/sofa_0001.off",
        "sofa/train/sofa_0002.off",
        "sofa/test/sofa_5001.off",
    ]
    assert sorted(file.path for file in find_meshes(tmp_path)) == sorted(files)
    made, read = make_furniture("chair", (7, 0, 2)), read_mesh(files[1])
    assert np.array_equal(made.vertices, read.vertices)
    assert np.array_equal(made.faces, read.faces)
    assert as_trimesh(read).is_watertight


def test_writing_again_only_adds_what_is_missing(tmp_path):
    files = write_furniture(tmp_path, ["table"], train=2, test=1)
    before = {path: path.read_bytes() for path in files}
    files[0].write_bytes(b"edited by hand")
    files[1].unlink()
    again = write_furniture(tmp_path, ["table"], train=3, test=1)
    assert (again[0].read_bytes(), again[1].read_bytes()) == (b"edited by hand", before[files[1]])
    assert again[3].read_bytes() == before[files[2]]
    in_folder = sorted(path.name for path in (tmp_path / "table" / "train").iterdir())
    assert in_folder == [f"table_{number:04d}.off" for number in (1, 2, 3)]


def test_another_seed_or_generator_replaces_the_pieces(tmp_path):
    one = write_furniture(tmp_path, ["table"], train=2, test=1, seed=1)
    content = one[0].read_bytes()
    two = write_furniture(tmp_path, ["table"], train=1, test=1, seed=2)
    assert two[0].read_bytes() != content
    assert not one[1].exists()
    older = {**json.loads((tmp_path / MARKER).read_text()), "generator": GENERATOR_VERSION - 1}
    (tmp_path / MARKER).write_text(json.dumps(older))
    two[0].write_text("made by an older generator")
    write_furniture(tmp_path, ["table"], train=1, test=1, seed=2)
    content = two[0].read_bytes()
    assert content != b"made by an older generator"
    write_furniture(tmp_path, ["table"], train=1, test=1, seed=2, varied=True, defects=True)
    assert two[0].read_bytes() != content


def test_a_folder_with_other_meshes_is_left_alone(tmp_path):
    foreign = tmp_path / "bed" / "train" / "bed_0001.off"
    foreign.parent.mkdir(parents=True)
    foreign.write_text("OFF")
    with pytest.raises(DataError, match=r"bed_0001\.off.*data=modelnet10"):
        write_furniture(tmp_path, ["chair"], train=1, test=1)
    assert foreign.read_text() == "OFF"
    assert not (tmp_path / "chair").exists()
