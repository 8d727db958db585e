"""Meshes are prepared once, by as many processes as help, and whatever changes the result makes it anew."""

import logging
from concurrent.futures.process import BrokenProcessPool

import numpy as np
import pytest
import torch

from pointproj.data import preparation
from pointproj.data.dataset import prepare
from pointproj.data.layout import find_meshes
from pointproj.geometry.fields import target_field
from pointproj.geometry.files import read_mesh
from pointproj.geometry.meshes import normalize, query_grid
from pointproj.runtime import helpers
from pointproj.runtime.helpers import HelperProcesses
from tests.data.samples import all_batches, assert_equal_batches, forbid_making, names


@pytest.mark.parametrize("target", ["udf", "sdf", "occupancy"])
def test_targets_are_those_of_the_files(config, furniture, target):
    data = prepare(config(target))
    assert names(data.train) == [
        f"{name}_{number:04d}" for name in ("dresser", "sofa") for number in (1, 2, 3)
    ]
    assert names(data.test) == ["dresser_5001", "dresser_5002", "sofa_5001", "sofa_5002"]
    assert data.left_out == []
    shape = data.train.shapes[4]
    mesh = normalize(read_mesh(furniture / "ModelNet10/sofa/train/sofa_0002.off"))
    assert np.array_equal(shape.target.numpy(), target_field(mesh, 6, target))
    assert shape.class_name == "sofa"
    assert torch.equal(data.train.query_points, torch.from_numpy(query_grid(6)))


def test_the_second_run_makes_nothing(config, monkeypatch):
    first = prepare(config("sdf"))
    forbid_making(monkeypatch)
    second = prepare(config("sdf"))
    assert_equal_batches(all_batches(first.train, 4), all_batches(second.train, 4))


@pytest.mark.parametrize("change", [{"grid": 7}, {"target": "occupancy"}, {"target": "random"}])
def test_a_changed_setting_reads_no_old_entry(config, monkeypatch, change):
    one = {"classes": ["sofa"], "limit": 1}
    prepare(config(**one))
    forbid_making(monkeypatch)
    prepare(config(**one))
    with pytest.raises(AssertionError, match="made again"):
        prepare(config(**(one | change)))


def test_changed_code_and_changed_content_read_no_old_entry(config, broken, monkeypatch):
    chosen = {"root": str(broken), "limit": 1}
    before = prepare(config(**chosen)).train.shapes[0]
    path = broken / "dresser/train/dresser_0001.off"
    path.write_bytes((broken / "dresser/train/dresser_0002.off").read_bytes())
    after = prepare(config(**chosen)).train.shapes[0]
    assert not torch.equal(before.target, after.target)
    assert before.identity != after.identity
    monkeypatch.setattr(preparation, "_code_digest", lambda: "other code")
    forbid_making(monkeypatch)
    with pytest.raises(AssertionError, match="made again"):
        prepare(config(**chosen))


def test_damaged_entries_are_rebuilt(config, tmp_path, caplog):
    first = prepare(config())
    entries = sorted((tmp_path / "cache").rglob("*.npz"))
    assert len(entries) == 10
    sound = [entry.read_bytes() for entry in entries]
    for number, entry in enumerate(entries):
        entry.write_bytes(sound[number][: 97 * number])
    with caplog.at_level(logging.WARNING):
        second = prepare(config())
    assert caplog.text.count("is damaged") == 10
    assert_equal_batches(all_batches(first.train, 4), all_batches(second.train, 4))
    assert [entry.read_bytes() for entry in entries] == sound


def test_a_mesh_that_is_not_in_the_cache_is_read_once(config, furniture, monkeypatch):
    read = []
    monkeypatch.setattr(preparation, "read_content", lambda path: read.append(path) or path.read_bytes())
    prepare(config("sdf", queries=4, pool=8))
    assert sorted(read) == sorted(file.path for file in find_meshes(furniture))


def test_several_processes_make_the_same_entries(furniture, tmp_path):
    files = find_meshes(furniture, limit=1)
    recipe = preparation.Recipe(grid=6, target="sdf")
    alone, two = HelperProcesses(1), HelperProcesses(2, fewest_jobs=2)
    with two:
        apart = dict(preparation.prepare_meshes(files, recipe, tmp_path / "two", helpers=two))
    alone = dict(preparation.prepare_meshes(files, recipe, tmp_path / "one", helpers=alone))
    assert apart.keys() == alone.keys() == set(files)
    for file in files:
        assert apart[file] == alone[file]
    stored = {
        folder: {path.name: path.read_bytes() for path in (tmp_path / folder).rglob("*.npz")}
        for folder in ("one", "two")
    }
    assert stored["one"] == stored["two"]


@pytest.mark.parametrize(("count", "expected"), [(1, "cuda:0"), (7, "cuda:0"), (8, "cpu")])
def test_few_processes_share_a_gpu(furniture, tmp_path, monkeypatch, count, expected):
    used = []
    made = preparation.PreparedMesh("", "", None)
    monkeypatch.setattr(preparation, "_make", lambda *arguments: used.append(arguments[-1]) or made)
    files = find_meshes(furniture, ["sofa"])
    recipe = preparation.Recipe(grid=6, target="udf")
    processes = HelperProcesses(count)
    monkeypatch.setattr(
        processes, "results", lambda title, jobs, unit: ((key, job()) for key, job in jobs.items())
    )
    assert (
        len(dict(preparation.prepare_meshes(files, recipe, tmp_path, helpers=processes, device="cuda:0")))
        == 5
    )
    assert used == [expected] * 5


def test_work_goes_on_alone_when_the_processes_die(furniture, tmp_path, monkeypatch, caplog):
    class DyingPool:
        def __init__(self, *arguments, **keywords):
            pass

        def submit(self, *arguments):
            raise BrokenProcessPool("killed")

        def shutdown(self, **keywords):
            pass

    monkeypatch.setattr(helpers, "ProcessPoolExecutor", DyingPool)
    files = find_meshes(furniture, ["dresser"])
    recipe = preparation.Recipe(grid=6, target="udf")
    with HelperProcesses(2, fewest_jobs=2) as two:
        prepared = dict(preparation.prepare_meshes(files, recipe, tmp_path, helpers=two))
    assert list(prepared) == files
    assert "this one makes the other 5 meshes" in caplog.text
