"""Several processes train what one would: the same losses, one folder, every test mesh once."""

import json
import logging
import os
import subprocess
import sys
import tempfile
import time

import pytest
import torch
from omegaconf import OmegaConf

from pointproj.data.batches import batches
from pointproj.data.clouds import Sampling
from pointproj.data.dataset import ShapeDataset
from pointproj.data.shapes import Shape
from pointproj.runtime import distributed, tensor_file
from pointproj.runtime.devices import own_gpu
from pointproj.runtime.distributed import (
    SINGLE_PROCESS,
    LaunchError,
    Processes,
    StopTogether,
    agree_on_run,
    log_errors_only,
)
from pointproj.runtime.run_folder import RunFolder
from pointproj.training.checkpoint import CheckpointError
from pointproj.training.loop import train
from tests.configs import config_of
from tests.processes import PROJECT, environment, free_port, run_together


@pytest.fixture
def arguments(tmp_path):
    """Three classes of three training and one test piece; 9 shapes leave one for the last of batches of 4."""
    return [
        *("experiment=smoke", "data.classes=[chair,table,bed]", "data.validation=0"),
        *("data.train_meshes=3", "data.test_meshes=1"),
        *("data.grid=6", "data.points=60", "training.log_every=1", "device=cpu", "training.pictures=0"),
        *("training.epochs=2", "training.validate_every=1", "optimizer.clip=0.1"),
        *(f"data.root={tmp_path}/meshes", f"data.cache={tmp_path}/cache"),
    ]


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def start(folder, arguments, count=2):
    """Processes of one run, as torchrun starts them."""
    command = [sys.executable, str(PROJECT / "train.py"), *arguments, f"hydra.run.dir={folder}"]
    port = free_port()
    shared = {"cwd": PROJECT, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    environments = [{**os.environ, **environment(rank, count, port)} for rank in range(count)]
    return [subprocess.Popen(command, env=env, **shared) for env in environments]


def test_two_processes_train_what_one_does_on_batches_twice_as_large(arguments, tmp_path):
    config = config_of(*arguments, "training.batch_size=4")
    alone = RunFolder(tmp_path / "alone")
    expected = train(config, alone)

    together = tmp_path / "together"
    started = start(together, [*arguments, "training.batch_size=2"])
    printed = [process.communicate(timeout=120)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], printed
    metrics = json.loads((together / "metrics.json").read_text())

    for one, other in zip(lines(alone.path), lines(together), strict=True):
        assert (one["split"], one["step"]) == (other["split"], other["step"])
        key = "loss" if one["split"] == "train" else "mean_absolute_error"
        assert other[key] == pytest.approx(one[key], rel=1e-5)
    assert metrics["processes"] == 2
    assert metrics["steps"] == expected["steps"] == 6
    assert metrics["metric_value"] == pytest.approx(expected["metric_value"], rel=1e-5)
    meshes = {name: row["meshes"] for name, row in metrics["classes"].items()}
    assert meshes == {"bed": 1, "chair": 1, "table": 1}
    # One log, from one process; the other says nothing but what Warp prints.
    assert "batches of 2 x 2 in 2 processes" in printed[0]
    assert "epoch" not in printed[1]
    assert (together / "train.log").read_text().count("epoch 2/2 100%") == 1
    weights = [tensor_file.load(folder / "last.pt")["model"] for folder in (alone.path, together)]
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, rtol=1e-3, atol=1e-5, msg=name)

    config.resume, config.training.batch_size = str(together), 2
    with pytest.raises(CheckpointError, match=r"written by 2 process.*start 2"):
        train(config, RunFolder(tmp_path / "continued"))


def exchange(processes, folder):
    rank, count = processes.rank, processes.count
    assert (count, processes.is_first, processes.is_single) == (2, rank == 0, False)
    assert processes.gather(rank * 10) == [0, 10]
    tensor = torch.tensor([1.0, rank])
    processes.all_reduce(tensor)
    assert tensor.tolist() == [2.0, 1.0]
    with processes.first_process_first():
        found = (folder / "made").exists()
        assert found == (rank == 1)
        time.sleep(0.2)
        (folder / "made").touch()
    stop = StopTogether(processes)
    # Asked in process 1 after the second step, both know it after the third.
    assert [stop(rank == 1 and step == 1) for step in range(4)] == [False, False, True, False]
    stop.close()


def test_what_processes_tell_each_other(tmp_path):
    run_together(exchange, tmp_path)


def test_alone_nothing_is_exchanged():
    tensor = torch.ones(2)
    SINGLE_PROCESS.all_reduce(tensor)
    assert tensor.tolist() == [1, 1]
    assert SINGLE_PROCESS.gather("a") == ["a"]
    stop = StopTogether(SINGLE_PROCESS)
    assert [stop(False), stop(True)] == [False, True]
    assert distributed.join() is SINGLE_PROCESS


class Point:
    def draw(self, count, generator):
        points = generator.standard_normal((count, 3)).astype("float32")
        return points, points


def shapes(count):
    grid = torch.zeros(1, 3)
    made = [Shape(f"s{i}", "c", i, Point(), torch.zeros(1)) for i in range(count)]
    return ShapeDataset(made, grid, samplings=[Sampling("area", 1)], seed=0, resample=True)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("size", [4, 7, 8, 10, 13])
def test_parts_of_batches_make_the_whole(size, count):
    dataset = shapes(size)
    order = {"shuffle": True, "seed": 3, "epoch": 1, "epochs": 2, "start": 1}
    whole = list(batches(dataset, 2 * count, **order))
    parts = [list(batches(dataset, 2, processes=Processes(r, count), **order)) for r in range(count)]
    assert {len(part) for part in parts} == {len(whole)}
    for number, batch in enumerate(whole):
        names, shares = [], []
        for part in parts:
            share = float(part[number].get("share", 1.0))
            assert 1 <= len(part[number]["name"]) <= 2
            names += part[number]["name"] if share else []
            shares.append(share)
        assert names == batch["name"]
        assert sum(shares) == pytest.approx(1)


def test_processes_deal_alike_and_alone_the_order_stays():
    dataset = shapes(13)
    order = {"shuffle": True, "seed": 3}
    whole = [batch["name"] for batch in batches(dataset, 4, **order)]
    parts = [list(batches(dataset, 2, processes=Processes(rank, 2), **order)) for rank in range(2)]
    for number, names in enumerate(whole):
        given = [part[number] for part in parts if part[number]["share"]]
        assert sorted(name for part in given for name in part["name"]) == sorted(names)
    assert whole == [batch["name"] for batch in batches(dataset, 4, **order)]


def test_epochs_in_one_stream_are_the_epochs_one_by_one():
    dataset = shapes(5)
    stream = [batch["reference_points"] for batch in batches(dataset, 2, shuffle=True, epochs=3, workers=2)]
    one_by_one = (batches(dataset, 2, shuffle=True, epoch=epoch) for epoch in range(3))
    singly = [batch["reference_points"] for epoch in one_by_one for batch in epoch]
    assert all(torch.equal(one, other) for one, other in zip(stream, singly, strict=True))


def test_a_sweep_is_not_started_by_a_launcher(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(LaunchError, match="hydra/launcher=joblib"):
        agree_on_run("name", ["-m", "seed=0,1"])


def test_more_processes_than_gpus_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    distributed.join.cache_clear()
    with pytest.raises(LaunchError, match=r"3 processes .* 2 GPU.*nproc_per_node"):
        distributed.join()


def test_processes_beside_the_first_speak_of_errors_only(capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", list(logging.getLogger().handlers))
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    log_errors_only(3)
    logging.getLogger("pointproj.x").warning("not this")
    logging.getLogger("pointproj.x").error("but this")
    assert capsys.readouterr().err.endswith("process 3: but this\n")


class Gpu:
    def __init__(self, number):
        self.uuid = f"test-{os.getpid()}-{number}"


def test_jobs_side_by_side_take_a_gpu_each(monkeypatch, tmp_path, caplog):
    taken = []
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", Gpu)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    with own_gpu():
        with own_gpu(), own_gpu():
            assert taken == [0, 1, 0]
            assert "all 2 GPUs are in use" in caplog.text
        with own_gpu():
            assert taken == [0, 1, 0, 1]
    with own_gpu():
        assert taken == [0, 1, 0, 1, 0]


def test_slurm_is_asked_for_as_many_processes_as_gpus():
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="needs the extra slurm")
    asked = [f"hydra.launcher.{key}_per_node=4" for key in ("gpus", "tasks")]
    command = [sys.executable, "train.py", "hydra/launcher=submitit_slurm", *asked]
    command += ["--cfg", "hydra", "-p", "hydra.launcher"]
    answer = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True)
    launcher = OmegaConf.create(answer.stdout)
    assert (launcher.gpus_per_node, launcher.tasks_per_node, launcher.nodes) == (4, 4, 1)
    assert launcher._target_.endswith("SlurmLauncher")
