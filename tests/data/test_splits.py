"""Training, validation and test meshes: chosen by a seed, apart from each other, of any folder."""

import itertools
from collections import Counter
from pathlib import Path

import pytest
import trimesh

from pointproj.config import DataConfig
from pointproj.data import cutouts
from pointproj.data.dataset import prepare
from pointproj.data.errors import DataError
from pointproj.data.layout import MeshFile
from pointproj.data.sources import held_out, mesh_files, unseen_meshes
from tests.data.samples import names


def listed(counts):
    """Training files: so many of each class."""
    return [
        MeshFile(Path(f"{name}_{number}.off"), name, "train")
        for name, count in counts.items()
        for number in range(count)
    ]


def moved(files, *given):
    return {file.name for file in held_out(files, *given) if file.split == "validation"}


def test_each_class_gives_about_its_share():
    chosen = moved(listed({"bed": 40, "sofa": 20, "lamp": 2}), 0.2, 0)
    counts = Counter(name.partition("_")[0] for name in chosen)
    assert (counts["bed"], counts["sofa"], counts["lamp"]) == (8, 4, 0)


def test_the_choice_follows_from_seed_class_and_name_alone():
    files = listed({"bed": 30, "sofa": 30})
    assert moved(files, 0.2, 0) == moved(files[::-1], 0.2, 0)
    assert moved(files, 0.2, 0) != moved(files, 0.2, 1)
    assert [file.path for file in held_out(files, 0.2, 0)] == [file.path for file in files]


@pytest.mark.parametrize(
    ("count", "share", "expected"), [(10, 0, 0), (10, 0.01, 1), (1, 0.5, 0), (2, 0.99, 1)]
)
def test_at_least_one_is_held_out_and_one_is_left(count, share, expected):
    assert len(moved(listed({"bed": count}), share, 0)) == expected


def test_test_meshes_are_never_held_out():
    files = [MeshFile(Path("a.off"), "a", "test"), *listed({"bed": 5})]
    assert held_out(files, 0.9, 0)[0].split == "test"


def test_held_out_meshes_are_prepared_like_test_meshes(config):
    without, data = prepare(config()), prepare(config(validation=0.2))
    assert without.validation is None
    assert len(names(data.validation)) == 1
    assert sorted(names(data.train) + names(data.validation)) == sorted(names(without.train))
    assert names(data.test) == names(without.test)
    one, again = (data.validation[0]["reference_points"] for _ in range(2))
    assert (one == again).all()


def test_nothing_is_made_of_a_held_out_mesh(furniture, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    used = []
    monkeypatch.setattr(cutouts, "write_variants", lambda files, *given: used.extend(files) or [])
    data = DataConfig(name="mixed", root=str(furniture), train_meshes=1, repeats=3, validation=0.4)
    files = mesh_files(data)
    kept = {file.path for file in files if file.split == "validation"}
    assert len(kept) == 2
    assert kept.isdisjoint(file.path for file in files if file.split == "train")
    assert kept.isdisjoint(file.path for file in used)
    assert len({file.path for file in used}) == 4 + 10  # real and generated training meshes


@pytest.fixture
def folder(tmp_path):
    """Spheres of several formats, two classes deep and shallow."""
    paths = "balls/a.stl balls/b.obj balls/more/c.ply balls/d.glb eggs/e.off eggs/f.off eggs/g.ply"
    for number, path in enumerate(paths.split()):
        target = tmp_path / "own" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        trimesh.creation.icosphere(subdivisions=1, radius=1 + number).export(target)
    (tmp_path / "own" / "eggs" / ".hidden.off").write_text("")
    (tmp_path / "own" / "eggs" / "notes.txt").write_text("")
    return tmp_path / "own"


def test_any_folder_of_meshes_is_split_and_said(folder, tmp_path, config, caplog):
    caplog.set_level("INFO")
    data = prepare(config("sdf", name="meshes", root=str(folder), test=0.3, validation=0.2))
    parts = [names(part) for part in (data.train, data.validation, data.test)]
    assert [len(part) for part in parts] == [4, 1, 2]
    assert sorted(itertools.chain(*parts)) == list("abcdefg")
    assert {shape.class_name for shape in data.train.shapes} == {"balls", "eggs"}
    assert "7 meshes (classes: balls, eggs), 4 for training, 1 for validation, 2 for tests" in caplog.text
    assert "data.test=0.3, data.split_seed=0" in caplog.text


def test_another_seed_splits_otherwise_and_classes_choose(folder):
    def tests(**given):
        files = mesh_files(DataConfig(name="meshes", root=str(folder), test=0.4, **given))
        return {file.name for file in files if file.split == "test"}

    assert tests() == tests()
    assert any(tests(split_seed=seed) != tests() for seed in (1, 2, 3))
    assert tests(classes=["balls"]) < set("abcd")


def test_meshes_beside_each_other_are_one_class(folder):
    files = mesh_files(DataConfig(name="meshes", root=str(folder / "eggs")))
    assert {file.class_name for file in files} == {"eggs"}
    assert sorted(file.split for file in files) == ["test", "train", "validation"]


def test_folders_without_enough_meshes_are_refused(folder, tmp_path, furniture, caplog):
    with pytest.raises(DataError, match=r"write data\.root=FOLDER"):
        mesh_files(DataConfig(name="meshes"))
    for root, words, given in (
        (tmp_path / "none", "no meshes in", {}),
        (folder / "balls" / "more", "expected 3 meshes or more.*got 1", {}),
        (folder, "has no such class; it has balls, eggs", {"classes": ["cups"]}),
    ):
        with pytest.raises(DataError, match=words):
            mesh_files(DataConfig(name="meshes", root=str(root), **given))
    mesh_files(DataConfig(name="meshes", root=str(furniture / "ModelNet10")))
    assert "data=modelnet10 uses them" in caplog.text


def test_files_of_other_kinds_are_named(folder, tmp_path, caplog):
    cad = tmp_path / "cad"
    cad.mkdir()
    for file in (cad / "a.step", cad / "b.STEP", folder / "balls" / "c.x_t", folder / "balls" / "d.x_t"):
        file.touch()
    with pytest.raises(DataError, match=r"found: 2 of \.step"):
        mesh_files(DataConfig(name="meshes", root=str(cad)))
    mesh_files(DataConfig(name="meshes", root=str(folder)))
    assert "files of other kinds are not read: 2 of .x_t" in caplog.text


def test_only_test_meshes_that_are_asked_for_are_generated(tmp_path):
    data = DataConfig(name="furniture", root=str(tmp_path), classes=["chair", "sofa"])
    assert [file.name for file in unseen_meshes(data, 1)] == ["chair_5001", "sofa_5001"]
    assert len([*tmp_path.rglob("*.off")]) == 2
