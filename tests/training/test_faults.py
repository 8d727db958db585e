"""Faults: processes killed, stopped and failing, memory and workers that are gone; nothing is lost."""

import dataclasses
import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch

from pointproj.config import Config
from pointproj.runtime import distributed, failures
from pointproj.runtime.failures import WorkerDied, ending_together
from pointproj.runtime.memory import OutOfMemory
from pointproj.runtime.run_folder import RunFolder, read_json
from pointproj.runtime.signals import StopAtOnce, Stopped, StopRequest
from pointproj.training import checkpoint
from pointproj.training.loop import train
from tests.processes import FORKS, PROJECT, environment, free_port
from tests.training.test_loop import GRID, lines, losses, prepared, small_config


@pytest.fixture
def config():
    return small_config()


@pytest.fixture
def data(monkeypatch):
    made = prepared()
    monkeypatch.setattr("pointproj.training.loop.prepare", lambda *_: made)
    return made


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing happened to; tests leave it as it is."""
    run = RunFolder(tmp_path_factory.mktemp("whole"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pointproj.training.loop.prepare", prepared)
        train(small_config(), run)
    return run


def train_in_a_process(config: Config, folder: str) -> None:
    torch.set_num_threads(1)
    from pointproj.training import loop

    loop.prepare = prepared
    train(config, RunFolder(folder))


def started(config, folder):
    process = FORKS.Process(target=train_in_a_process, args=(config, str(folder)))
    process.start()
    return process


def test_a_run_killed_at_any_moment_and_resumed_has_the_losses_of_one_left_alone(config, tmp_path, data):
    """Killed again and again, in one folder, until it gets through."""
    config.training.epochs, config.training.pictures, config.training.validate_every = 20, 0, 5
    whole, killed = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "outputs" / "killed")
    train(config, whole)

    config.resume = "auto"
    rng = np.random.default_rng(0)
    kills = 0
    while not (killed.path / "metrics.json").exists():
        process = started(config, killed.path)
        before = train_lines(killed.path)
        while process.is_alive() and train_lines(killed.path) == before:
            time.sleep(0.002)
        process.join(rng.uniform(0, 0.1 * (1 + kills)))
        kills += process.is_alive()
        process.kill()
        process.join()
        assert kills < 30
    assert kills >= 3
    assert losses(killed) == losses(whole)
    steps = [json.loads(line)["step"] for line in (killed.path / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(steps)
    ours, theirs = (checkpoint.load(run.path / "last.pt")["model"] for run in (killed, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_run_killed_before_its_first_checkpoint_begins_anew(config, tmp_path, data, whole):
    killed = RunFolder(tmp_path / "outputs" / "killed")
    for step in range(4):
        killed.log_metrics({"split": "train", "step": step, "loss": 9.0})
    config.resume = "auto"
    train(config, killed)
    assert losses(killed) == losses(whole)
    assert 9.0 not in [row["loss"] for row in lines(killed, "train")]


def test_of_a_checkpoint_cut_in_half_the_one_before_continues_to_the_same_losses(
    config, tmp_path, data, whole, caplog
):
    first, half = shutil.copytree(whole.path, tmp_path / "first"), RunFolder(tmp_path / "half")
    content = (first / "last.pt").read_bytes()
    (first / "last.pt").write_bytes(content[: len(content) // 2])
    config.resume = str(first)
    metrics = train(config, half)
    assert any("taking previous.pt" in text for text in caplog.messages)
    assert metrics["metric_value"] == read_json(whole.path / "metrics.json")["metric_value"]
    assert set(losses(half).items()) <= set(losses(whole).items())


def train_lines(folder):
    path = folder / "metrics.jsonl"
    return path.read_text().count('"train"') if path.exists() else 0


def test_a_signal_ends_the_program_with_a_checkpoint_a_hint_and_its_exit_code(tmp_path):
    number = signal.SIGUSR1
    folder = tmp_path / "outputs" / "run"
    arguments = ["data=gaussian", "target=random", "data.points=50", "data.grid=4", "device=cpu"]
    arguments += ["backend=torch", "training.epochs=1000000", "training.log_every=1"]
    process = subprocess.Popen(
        [sys.executable, str(PROJECT / "train.py"), *arguments, f"hydra.run.dir={folder}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    while process.poll() is None and not train_lines(folder):
        time.sleep(0.02)
    process.send_signal(number)
    printed = process.communicate(timeout=60)[0]
    assert process.returncode == 128 + number, printed
    assert f"continue with resume={folder}/last.pt" in printed
    assert printed.endswith(f"stopped by {number.name}\n")
    assert json.loads((folder / "status.json").read_text())["status"] == "stopped"
    assert checkpoint.load(folder / "last.pt")["position"]["step"] > 0


def test_signals_are_a_request_between_steps_and_an_exception_elsewhere():
    with StopAtOnce():
        with pytest.raises(Stopped, match="stopped by SIGUSR1"):
            os.kill(os.getpid(), signal.SIGUSR1)
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert stop.made is signal.SIGUSR1
            with pytest.raises(Stopped):
                os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Stopped) as caught:
            os.kill(os.getpid(), signal.SIGINT)
    assert caught.value.exit_code == 130


def test_memory_that_runs_out_says_what_to_lower(config, tmp_path, data, monkeypatch):
    def allocates_too_much(*_):
        torch.empty(1 << 60)

    monkeypatch.setattr("pointproj.training.step.TrainingStep.__call__", allocates_too_much)
    words = rf"cpu has not enough memory: .*batch_size \(now 2\), data\.points \(60\), data\.grid \({GRID}\)"
    with pytest.raises(OutOfMemory, match=words):
        train(config, RunFolder(tmp_path))


class Deadly:
    """Points of a sphere, until the helper that draws them is killed."""

    def __init__(self, sphere, draws):
        self.sphere, self.draws = sphere, draws

    def draw(self, count, generator):
        self.draws -= 1
        if self.draws < 0 and torch.utils.data.get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.sphere.draw(count, generator)


def test_a_helper_that_dies_ends_the_run_with_the_way_on(config, tmp_path, data, whole):
    first, second = (RunFolder(tmp_path / name) for name in ("first", "second"))
    shapes = data.train.shapes
    # Three steps an epoch, and a helper samples two ahead: from its third epoch on there is a checkpoint.
    plain, shapes[2] = shapes[2], dataclasses.replace(shapes[2], source=Deadly(shapes[2].source, draws=2))
    config.data.workers = 1
    words = rf"DataLoader worker .*resume={first.path}/last\.pt and .*data\.workers \(now 1"
    with pytest.raises(WorkerDied, match=words):
        train(config, first)
    shapes[2] = plain
    config.data.workers, config.resume = 0, str(first.path)
    train(config, second)
    assert {**losses(first), **losses(second)} == losses(whole)


class Oversized(Deadly):
    """Points of a sphere, until the helper may make no larger file in memory, as where /dev/shm is full."""

    def draw(self, count, generator):
        if torch.utils.data.get_worker_info() is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))
        return self.sphere.draw(count, generator)


def test_full_shared_memory_ends_the_run_and_says_what_to_do(config, tmp_path, data):
    data.train.shapes[2] = dataclasses.replace(
        data.train.shapes[2], source=Oversized(data.train.shapes[2].source, draws=0)
    )
    config.data.workers = 1
    words = r"shared memory \(/dev/shm\) is full.*--shm-size=8g.*data\.workers \(now 1; 0 needs none"
    with pytest.raises(WorkerDied, match=words):
        train(config, RunFolder(tmp_path))


def test_locks_that_find_no_shared_memory_are_told_from_a_full_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(failures, "SHARED_MEMORY", str(tmp_path / "none"))
    with pytest.raises(WorkerDied, match="is full"), failures.explained_dead_worker(2, tmp_path / "last.pt"):
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(OSError, match=r"some\.csv"), failures.explained_dead_worker(2, tmp_path / "last.pt"):
        raise OSError(errno.ENOSPC, "No space left on device", "some.csv")


def fails_in_one(rank: int, port: int, how: str, folder: Path) -> None:
    """Process 1 fails; process 0 waits for it, in a sum over both or where Python is not asked."""
    os.environ.update(environment(rank, 2, port))
    processes = distributed.join()
    failures.EXIT_TIMEOUT = 0.2
    try:
        with ending_together(folder, processes):
            processes.gather(None)
            if rank == 1:
                raise ValueError("this batch cannot be")
            if how == "sum":
                processes.gather(None)
            time.sleep(300)
    except Exception as error:
        (folder / f"raised in {rank}").write_text(f"{type(error).__name__}: {error}")
        sys.exit(3)


@pytest.mark.parametrize("how", ["sum", "elsewhere"])
def test_one_process_that_fails_ends_all_soon_and_with_its_error(tmp_path, how):
    port = free_port()
    started = [FORKS.Process(target=fails_in_one, args=(rank, port, how, tmp_path)) for rank in range(2)]
    for process in started:
        process.start()
    for process in started:
        process.join(60)
    # Process 0 raises what the connection tells it; where it waits in silence it is ended.
    assert [process.exitcode for process in started] == [3 if how == "sum" else 1, 3]
    assert (tmp_path / "raised in 1").read_text() == "ValueError: this batch cannot be"
    if how == "sum":
        words = (
            "PeerFailed: process 1 of this run has failed, and this one ended with it: ValueError: this batch"
        )
        assert (tmp_path / "raised in 0").read_text().startswith(words)


def waits_for_nobody(port: int, folder: Path) -> None:
    os.environ.update(environment(0, 2, port))
    distributed.JOIN_TIMEOUT = timedelta(seconds=1)
    try:
        distributed.join()
    except distributed.LaunchError as error:
        (folder / "words").write_text(str(error))


def test_a_process_that_never_comes_is_not_waited_for_for_ever(tmp_path):
    process = FORKS.Process(target=waits_for_nobody, args=(free_port(), tmp_path))
    process.start()
    process.join(60)
    words = (tmp_path / "words").read_text()
    assert "the 2 processes of this run did not all connect within 0:00:01" in words
