"""On two GPUs, as the README starts them: torchrun over NCCL, and jobs side by side."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from pointproj.training import checkpoint
from tests.processes import PROJECT, TWO_GPUS

pytestmark = TWO_GPUS

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]

# Process 1 meets an error in its twelfth step, while the other waits for its gradients.
FAILS_IN_ONE = """
import os, runpy, sys
from pointproj.training.step import TrainingStep
sys.path.insert(0, os.getcwd())
plain, taken = TrainingStep.__call__, []
def step(self, batch):
    taken.append(1)
    if os.environ["RANK"] == "1" and len(taken) == 12:
        raise ValueError("this batch cannot be")
    plain(self, batch)
TrainingStep.__call__ = step
runpy.run_path("train.py", run_name="__main__")
"""


def arguments(data):
    """Random targets, whose meshes need no compiler; 57 shapes leave one for the last of batches of 8."""
    return [
        *("data=furniture", "target=random", "projector.context=true", "device=cuda"),
        *("data.classes=[chair,table,bed]", "data.train_meshes=19", "data.test_meshes=1", "data.grid=12"),
        "data.validation=0",
        *("data.points=500", "training.log_every=1", "training.pictures=0", "training.validate_every=1000"),
        *(f"data.root={data}/meshes", f"data.cache={data}/cache"),
    ]


def started(command, folder):
    return subprocess.Popen(
        [*command, f"hydra.run.dir={folder}"],
        cwd=PROJECT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def train_lines(folder):
    path = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [row for row in rows if row["split"] == "train"]


def wait_for_steps(process, folder, count):
    while process.poll() is None and len(train_lines(folder)) < count:
        time.sleep(0.05)
    assert process.poll() is None, process.communicate()[0]


def test_two_gpus_train_what_one_does_captured(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    commands = {one: [sys.executable, "train.py", "training.batch_size=8"], two: [*TORCHRUN, "train.py"]}
    options = "compile=true", "training.epochs=4"
    runs = [
        started([*command, *options, *arguments(tmp_path / f"{folder.name}-data")], folder)
        for folder, command in commands.items()
    ]
    for process in runs:
        printed = process.communicate(timeout=240)[0]
        assert process.returncode == 0, printed
    assert json.loads((two / "metrics.json").read_text())["mode"] == "captured"
    alone, together = ([row["loss"] for row in train_lines(folder)] for folder in (one, two))
    assert len(alone) == len(together) == 32
    assert together == pytest.approx(alone, rel=1e-4)


def test_an_error_in_one_process_ends_both_soon(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text(FAILS_IN_ONE)
    folder = tmp_path / "run"
    process = started([*TORCHRUN, str(script), *arguments(tmp_path), "training.epochs=100000"], folder)
    wait_for_steps(process, folder, 11)
    since = time.monotonic()
    printed = process.communicate(timeout=120)[0]
    assert process.returncode != 0
    assert time.monotonic() - since < 30
    assert "process 1 of this run has failed" in printed
    assert "this batch cannot be" in printed


def test_sigterm_to_torchrun_leaves_a_checkpoint(tmp_path):
    folder = tmp_path / "run"
    process = started([*TORCHRUN, "train.py", *arguments(tmp_path), "training.epochs=100000"], folder)
    wait_for_steps(process, folder, 5)
    process.send_signal(signal.SIGTERM)
    printed = process.communicate(timeout=60)[0]
    assert process.returncode != 0
    assert f"continue with resume={folder}/last.pt" in printed
    assert json.loads((folder / "status.json").read_text())["status"] == "stopped"
    assert checkpoint.load(folder / "last.pt")["position"]["step"] >= 5


def test_jobs_side_by_side_take_a_gpu_each(tmp_path):
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher", reason="needs the extra sweep")
    command = [sys.executable, "train.py", "-m", "seed=0,1", *arguments(tmp_path), "training.epochs=60"]
    command += ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2", f"hydra.sweep.dir={tmp_path}/sweep"]
    ended = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    metrics = [json.loads(path.read_text()) for path in (tmp_path / "sweep").rglob("metrics.json")]
    assert {row["device"] for row in metrics} == {"cuda:0", "cuda:1"}
