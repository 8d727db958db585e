"""Data of a run: found, sampled repeatably, left out with a reason."""

from pathlib import Path

import numpy as np
import pytest
import torch

from pointproj.config import DataConfig
from pointproj.data.batches import batches
from pointproj.data.clouds import Sampling
from pointproj.data.dataset import Draw, prepare
from pointproj.data.errors import DataError
from pointproj.data.layout import find_meshes
from pointproj.data.sources import mesh_files
from pointproj.geometry.files import read_mesh
from pointproj.geometry.meshes import LONGEST_SIDE, MeshError, normalize
from tests.data.samples import SHEET, all_batches, assert_equal_batches, forbid_making, names

REAL = Path(__file__).parents[3] / "shared" / "modelnet10" / "ModelNet10"


def test_the_root_may_be_the_folder_above(furniture):
    below = find_meshes(furniture / "ModelNet10")
    assert find_meshes(furniture) == below
    assert [(file.class_name, file.split, file.name) for file in below[:4]] == [
        ("dresser", "train", "dresser_0001"),
        ("dresser", "train", "dresser_0002"),
        ("dresser", "train", "dresser_0003"),
        ("dresser", "test", "dresser_5001"),
    ]
    assert len(below) == 10


def test_classes_and_limit_choose(furniture):
    assert [file.name for file in find_meshes(furniture, ["sofa"], limit=1)] == ["sofa_0001", "sofa_5001"]
    with pytest.raises(DataError, match=r"data\.classes=\[bed\].*it has dresser, sofa"):
        find_meshes(furniture, ["sofa", "bed"])


def test_other_files_are_no_meshes(tmp_path):
    folder = tmp_path / "bed" / "train"
    folder.mkdir(parents=True)
    for name in ("bed_0001.off", "._bed_0001.off", ".DS_Store", "bed_0002.OFF", "notes.txt"):
        (folder / name).write_text(SHEET)
    (tmp_path / "__MACOSX" / "train").mkdir(parents=True)
    assert [file.path.name for file in find_meshes(tmp_path)] == ["bed_0001.off", "bed_0002.OFF"]


def test_missing_data_say_both_ways_forward(config, tmp_path):
    with pytest.raises(DataError, match=r"data\.download=true.*data\.root=FOLDER.*<class>/train"):
        prepare(config(root=str(tmp_path / "nowhere")))
    (tmp_path / "bed" / "train").mkdir(parents=True)
    with pytest.raises(DataError, match="no mesh file"):
        prepare(config(root=str(tmp_path)))


def test_unusable_meshes_are_named_and_left_out(config, broken, caplog, monkeypatch):
    for _ in range(2):  # the second time from the cache
        caplog.clear()
        data = prepare(config(root=str(broken)))
        assert names(data.train) == ["dresser_0001", "dresser_0002", "dresser_0003"]
        assert names(data.test) == ["dresser_0102", "dresser_5001", "dresser_5002"]
        reasons = {Path(file).name: reason for file, reason in data.left_out}
        assert reasons.keys() == {"dresser_0100.off", "dresser_0101.off"}
        assert reasons["dresser_0100.off"] == "is empty"
        assert "not finite" in reasons["dresser_0101.off"]
        assert f"left out {broken}/dresser/train/dresser_0100.off: is empty" in caplog.text
        forbid_making(monkeypatch)


def test_a_mesh_without_interior_is_for_udf_only(config, broken):
    data = prepare(config("sdf", root=str(broken)))
    assert names(data.test) == ["dresser_5001", "dresser_5002"]
    reasons = {Path(file).name: reason for file, reason in data.left_out}
    assert "only target=udf" in reasons["dresser_0102.off"]


def test_strict_stops_at_an_unusable_mesh(config, broken):
    with pytest.raises(MeshError, match=r"dresser_0100\.off: is empty .*data\.strict"):
        prepare(config(root=str(broken), strict=True))


def test_a_split_without_usable_mesh_is_an_error(config, broken, caplog):
    for path in (broken / "dresser" / "test").iterdir():
        path.write_text("OFF\n")
    with pytest.raises(DataError, match=r"split test, got none; 5 were left out, such as .*dresser_0100"):
        prepare(config(root=str(broken)))
    assert "off and 2 others: must declare its vertex and face counts" in caplog.text


def test_samples_are_in_the_cube_and_on_the_mesh(config, furniture):
    data = prepare(config(points=500, limit=1, classes=["sofa"]))
    sample = data.train[0]
    points = sample["reference_points"]
    assert points.shape == sample["normals"].shape == (500, 3)
    assert points.abs().max() <= LONGEST_SIDE / 2 + 1e-6
    mesh = normalize(read_mesh(furniture / "ModelNet10/sofa/train/sofa_0001.off"))
    corners = mesh.vertices[mesh.faces]
    normals = np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])
    normals /= np.linalg.norm(normals, axis=1, keepdims=True)
    offsets = (normals * corners[:, 0]).sum(axis=1)
    # Each point lies in the plane of a face that has its normal.
    gaps = np.abs(points.numpy() @ normals.T - offsets) + np.abs(sample["normals"].numpy() @ normals.T - 1)
    assert gaps.min(axis=1).max() < 1e-5


def test_points_are_fixed_by_seed_epoch_and_shape(config):
    data = prepare(config())
    again = prepare(config())

    def drawn(dataset, epoch, index=0):
        return dataset[Draw(epoch, index, Sampling("area", 64))]["reference_points"]

    assert torch.equal(drawn(data.train, 3), drawn(again.train, 3))
    assert not torch.equal(drawn(data.train, 3), drawn(data.train, 4))
    other = config()
    other.seed = 6
    other = prepare(other)
    assert not torch.equal(drawn(data.train, 3), drawn(other.train, 3))
    assert torch.equal(drawn(data.test, 3), drawn(other.test, 8))
    fixed = prepare(config(resample=False))
    assert torch.equal(drawn(fixed.train, 3), drawn(data.train, 0))


def test_shapes_are_known_by_content_not_by_place(config, broken, furniture):
    here = prepare(config(root=str(broken), limit=1)).train
    there = prepare(config(classes=["dresser"], limit=1)).train
    assert torch.equal(here[0]["reference_points"], there[0]["reference_points"])


def test_batches_stack_samples_and_share_the_queries(config):
    data = prepare(config())
    made = all_batches(data.train, 4, epoch=2)
    assert [len(batch["name"]) for batch in made] == [4, 2]
    assert (made[0]["reference_points"].shape, made[0]["target"].shape) == ((4, 64, 3), (4, 216))
    assert made[0]["query_points"] is data.train.query_points
    assert torch.equal(made[1]["normals"][1], data.train[Draw(2, 5, Sampling("area", 64))]["normals"])
    assert (made[1]["name"], made[1]["class_name"]) == (["sofa_0002", "sofa_0003"], ["sofa", "sofa"])


def test_shuffling_changes_with_the_epoch_and_resumes_in_the_middle(config):
    data = prepare(config())

    def order(**keywords):
        return [name for batch in batches(data.train, 2, shuffle=True, **keywords) for name in batch["name"]]

    assert order(seed=1, epoch=0) == order(seed=1, epoch=0)
    assert sorted(order(seed=1, epoch=0)) == names(data.train)
    assert len({tuple(order(seed=seed, epoch=epoch)) for seed in (1, 2) for epoch in (0, 1, 2)}) == 6
    whole = all_batches(data.train, 2, shuffle=True, seed=1, epoch=4)
    all_batches(data.train, 2, epoch=9)
    assert_equal_batches(whole[1:], all_batches(data.train, 2, shuffle=True, seed=1, epoch=4, start=1))
    assert all_batches(data.train, 2, start=3) == []


def test_workers_yield_the_same_batches_and_leave_random_states_alone(config):
    data = prepare(config())
    alone = all_batches(data.train, 2, shuffle=True, epoch=1)
    before = torch.random.get_rng_state(), np.random.get_state()[1].copy()
    apart = all_batches(data.train, 2, shuffle=True, epoch=1, workers=2)
    assert_equal_batches(alone, apart)
    assert torch.equal(torch.random.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])
    assert all_batches(data.train, 2, start=3, workers=2) == []


def test_gaussian_is_the_tutorials_workload(config):
    data = prepare(config("random", name="gaussian", points=20_000, grid=12, root=None))
    (batch,) = batches(data.train, 1)
    points, target = batch["reference_points"], batch["target"]
    assert points.shape == (1, 20_000, 3)
    assert target.shape == (1, 12**3)
    assert points.mean().item() == pytest.approx(0, abs=0.02)
    assert points.std().item() == pytest.approx(1, abs=0.02)
    assert target.std().item() == pytest.approx(1, abs=0.06)
    assert not batch["normals"].any()
    assert_equal_batches([batch], all_batches(data.test, 1, epoch=7))
    again = prepare(config("random", name="gaussian", points=20_000, grid=12, root=None))
    assert_equal_batches([batch], all_batches(again.train, 1))


def test_random_targets_differ_by_mesh_and_come_back(config, tmp_path):
    one = prepare(config("random")).train
    other = prepare(config("random", cache=str(tmp_path / "elsewhere"))).train
    targets = torch.stack([shape.target for shape in one.shapes])
    assert torch.equal(targets, torch.stack([shape.target for shape in other.shapes]))
    assert len(torch.unique(targets, dim=0)) == 6
    assert targets.std().item() == pytest.approx(1, abs=0.1)


def test_furniture_is_made_on_first_use(config, tmp_path):
    chosen = {"name": "furniture", "root": str(tmp_path / "made"), "classes": ["bed"], "train_meshes": 2}
    data = prepare(config(**chosen, test_meshes=1))
    assert (names(data.train), names(data.test)) == (["bed_0001", "bed_0002"], ["bed_5001"])
    # Fewer pieces than the folder holds: only those asked for.
    assert names(prepare(config(**chosen, test_meshes=1, limit=1)).train) == ["bed_0001"]


@pytest.mark.skipif(not REAL.is_dir(), reason=f"needs real meshes in {REAL}")
def test_real_meshes_are_prepared_and_sampled(config):
    data = prepare(config(root=str(REAL), classes=["bathtub", "toilet"], limit=1, grid=8))
    assert data.left_out == []
    assert names(data.train) == ["bathtub_0107", "toilet_0345"]
    for dataset in (data.train, data.test):
        (batch,) = batches(dataset, 2)
        assert torch.isfinite(batch["reference_points"]).all()
        assert (batch["normals"].norm(dim=-1) - 1).abs().max() < 1e-5
        # The query cube leaves a margin around the shape, so its corners are away from the surface.
        assert batch["target"][:, 0].min() > 0.17
        assert batch["target"].min() >= 0


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (None, "root does not exist"),
        ((), "root holds no class folders"),
        (("a.off", "b.ply"), "root holds 2 mesh files directly, and no class folders"),
        (("bed/a.off", "sofa/b.off"), r"\[bed,sofa\] in .*root hold mesh files directly, not in train/"),
        (("bed/train/a.off",), r"root holds 1 meshes, but none in <class>/test/"),
    ],
)
def test_what_is_wrong_with_a_folder_of_meshes_is_said(tmp_path, files, words):
    root = tmp_path / "root"
    for name in files or ():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    if files is not None:
        root.mkdir(exist_ok=True)
    with pytest.raises(DataError, match=words):
        mesh_files(DataConfig(name="modelnet10", root=str(root)))
