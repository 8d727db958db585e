"""A run's folder: claimed by one run, metrics line by line, JSON files whole."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from pointproj.runs import RunError, RunFolder, environment, run_token


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
    assert run.read_json("metrics.json") is None
    run.write_json(
        "metrics.json", {"loss": 1.0, "shape": (2, 3), "at": Path("a/b"), "values": torch.arange(3)}
    )
    assert run.read_json("metrics.json") == {"loss": 1.0, "shape": [2, 3], "at": "a/b", "values": [0, 1, 2]}
    with pytest.raises(TypeError):
        run.write_json("metrics.json", {"loss": object()})
    assert run.read_json("metrics.json")["loss"] == 1.0
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.json"]


def test_pictures_have_a_folder(tmp_path):
    run = RunFolder(tmp_path)
    assert run.picture_path("loss") == tmp_path / "pictures" / "loss.png"
    assert run.picture_path("loss.png") == tmp_path / "pictures" / "loss.png"
    assert (tmp_path / "pictures").is_dir()


def test_a_folder_is_claimed_once(tmp_path):
    run = RunFolder(tmp_path)
    run.claim("seed: 1\n")
    with pytest.raises(RunError, match=r"holds a run already.*hydra\.run\.dir=FOLDER.*resume=PATH"):
        RunFolder(tmp_path).claim("seed: 2\n")
    assert (tmp_path / "config.yaml").read_text() == "seed: 1\n"
    RunFolder(tmp_path).claim("seed: 3\n", continues=True)
    assert (tmp_path / "config.yaml").read_text() == "seed: 3\n"


def test_of_many_that_claim_at_once_one_succeeds(tmp_path):
    def claimed(number):
        try:
            RunFolder(tmp_path).claim(f"seed: {number}\n")
        except RunError:
            return False
        return True

    with ThreadPoolExecutor(16) as pool:
        assert sum(pool.map(claimed, range(64))) == 1


def test_tokens_of_processes_started_together_differ():
    code = "from pointproj.runs import run_token; print(run_token())"
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
