"""A run's folder: claimed by one run, metrics line by line, JSON files whole."""

import errno
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from pointproj.machine import environment
from pointproj.runtime import run_folder
from pointproj.runtime.run_folder import RunError, RunFolder, read_json, require_writable, run_token


def test_metrics_are_appended_as_json_lines(tmp_path):
    run = RunFolder(tmp_path / "new" / "run")
    run.log_metrics({"epoch": 0, "loss": torch.tensor(0.5), "lr": np.float32(0.25)})
    run.log_metrics(
        {"epoch": 1, "loss": float("nan"), "per_class": {"bed": np.float64(2.0), "desk": float("inf")}}
    )
    lines = (run.path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"epoch": 0, "loss": 0.5, "lr": 0.25},
        {"epoch": 1, "loss": None, "per_class": {"bed": 2.0, "desk": None}},
    ]


def test_json_is_written_whole_and_read_back(tmp_path):
    run = RunFolder(tmp_path)
    assert read_json(run.path / "metrics.json") is None
    run.write_json(
        "metrics.json", {"loss": 1.0, "shape": (2, 3), "at": Path("a/b"), "values": torch.arange(3)}
    )
    expected = {"loss": 1.0, "shape": [2, 3], "at": "a/b", "values": [0, 1, 2]}
    assert read_json(run.path / "metrics.json") == expected
    with pytest.raises(TypeError):
        run.write_json("metrics.json", {"loss": object()})
    assert read_json(run.path / "metrics.json") == expected
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.json"]


def test_pictures_have_a_folder(tmp_path):
    run = RunFolder(tmp_path)
    assert run.picture_path("loss") == tmp_path / "pictures" / "loss.png"
    assert run.picture_path("loss.png") == tmp_path / "pictures" / "loss.png"
    assert (tmp_path / "pictures").is_dir()


def test_a_folder_is_claimed_once(tmp_path):
    with RunFolder(tmp_path) as run:
        run.claim("seed: 0\n")
        run.write_json("status.json", {"status": "failed"})
    with RunFolder(tmp_path) as run:  # what a failed start left is used again
        run.claim("seed: 1\n")
        (tmp_path / "last.pt").touch()
    with pytest.raises(RunError, match=r"holds a run already.*hydra\.run\.dir=FOLDER.*resume="):
        RunFolder(tmp_path).claim("seed: 2\n")
    assert (tmp_path / "config.yaml").read_text() == "seed: 1\n"
    with RunFolder(tmp_path) as run:
        run.claim("seed: 3\n", continues=True)
    assert (tmp_path / "config.yaml").read_text() == "seed: 3\n"


def claims_and_waits(folder, forks):
    """Lock a folder, perhaps start a process that outlives this one, and wait to be killed."""
    run = RunFolder(folder)
    run.claim("seed: 1\n")
    if forks and os.fork() == 0:
        (folder / "forked").write_text(str(os.getpid()))
        time.sleep(60)
        os._exit(0)
    (folder / "claimed").touch()
    time.sleep(60)


@pytest.mark.parametrize("forks", [False, True])
def test_a_folder_in_use_is_refused_with_its_user_and_a_killed_one_leaves_no_lock(tmp_path, forks):
    process = multiprocessing.get_context("spawn").Process(target=claims_and_waits, args=(tmp_path, forks))
    process.start()
    awaited = tmp_path / "claimed", *([tmp_path / "forked"] if forks else [])
    while process.is_alive() and not all(path.exists() for path in awaited):
        time.sleep(0.01)
    words = rf"in use by process {process.pid} on .*, since 20.*hydra\.run\.dir=FOLDER"
    with pytest.raises(RunError, match=words):
        RunFolder(tmp_path).claim("seed: 1\n", continues=True)
    with pytest.raises(RunError, match=words):
        run_folder.require_idle(tmp_path)
    process.kill()
    process.join()
    run_folder.require_idle(tmp_path)
    with RunFolder(tmp_path) as run:
        run.claim("seed: 2\n")
    if forks:
        os.kill(int((tmp_path / "forked").read_text()), signal.SIGKILL)


def test_of_many_that_claim_at_once_one_succeeds(tmp_path):
    runs = [RunFolder(tmp_path) for _ in range(64)]

    def claimed(number):
        try:
            runs[number].claim(f"seed: {number}\n")
        except RunError:
            return False
        return True

    with ThreadPoolExecutor(16) as pool:
        assert sum(pool.map(claimed, range(64))) == 1
    for run in runs:
        run.release()


def test_tokens_of_processes_started_together_differ():
    code = "from pointproj.runtime.run_folder import run_token; print(run_token())"
    started = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    tokens = {process.communicate()[0] for process in started}
    assert len(tokens) == 4
    assert len({run_token() for _ in range(1000)}) == 1000


def test_environment_names_versions_commit_and_device():
    described = environment("cpu")
    assert described["versions"]["torch"] == torch.__version__
    assert described["python"] == ".".join(map(str, sys.version_info[:3]))
    assert described["device"] == "cpu"
    assert described["git"] is None or len(described["git"]["commit"]) == 40
    json.dumps(described)


def test_metrics_after_a_checkpoint_are_forgotten_and_a_line_cut_short_too(tmp_path):
    run = RunFolder(tmp_path)
    run.take_metrics(3)
    for step in (1, 2, 3, 4):
        run.log_metrics({"step": step})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": ')
    run.take_metrics(3)
    run.log_metrics({"step": 4, "again": True})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    steps = [{"step": 1}, {"step": 2}, {"step": 3}, {"step": 4, "again": True}]
    assert [json.loads(line) for line in lines] == steps


@pytest.mark.parametrize("below", ["file", "file/new/folder"])
def test_a_folder_below_a_file_is_refused_before_it_is_made(tmp_path, below):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"file is a file; name another folder"):
        require_writable(tmp_path / below)
    with pytest.raises(RunError, match="cannot be written"):
        RunFolder(tmp_path / below)


def test_a_folder_without_permission_or_space_is_refused(tmp_path, monkeypatch):
    require_writable(tmp_path / "new" / "folder")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(run_folder, "MIN_FREE_BYTES", 1 << 60)
    with pytest.raises(RunError, match=r"MiB left, expected at least \d+ MiB: make room"):
        require_writable(tmp_path / "new")
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(RunError, match="read-only here"):
        require_writable(tmp_path / "new")


def test_a_full_disk_is_an_error_and_leaves_the_old_file(tmp_path, monkeypatch):
    run = RunFolder(tmp_path)
    run.write_json("status.json", {"status": "running"})

    def full_disk(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full_disk)
        with pytest.raises(RunError, match=r"status\.json cannot be written \(No space left on device\)"):
            run.write_json("status.json", {"status": "ok"})
    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", full_disk)
        with pytest.raises(RunError, match=r"metrics\.jsonl cannot be written"):
            run.log_metrics({"step": 1})
    assert read_json(run.path / "status.json") == {"status": "running"}
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]
