"""Sweeps: failing jobs are rows, the others run, and the program's end tells the truth."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pointproj.__main__ import main
from pointproj.runtime import sweep
from pointproj.runtime.run_folder import RunFolder

PROJECT = Path(__file__).resolve().parents[2]

# Python reads this when it starts, in the jobs' processes too: training that takes no time, told by the seed.
QUICK_TRAINING = """
import logging, os, signal, sys, types

def train(config, run):
    from pointproj.config import ConfigError

    logging.getLogger("pointproj.training.loop").info("training with seed %d", config.seed)
    if config.seed == 1:
        raise ConfigError("seed 1 cannot be")
    if config.seed == 2:
        raise ZeroDivisionError("seed 2 divides by zero")
    if config.seed == 3:
        sys.exit("seed 3 gives up")
    if config.seed == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    run.write_json("named.json", {"named": run.named})
    metrics = {"backend": config.backend.name, "device": "cpu", "loss": 0.5 + config.seed, "metric": "mae"}
    run.write_json("metrics.json", metrics | {"metric_value": 0.25, "ms_per_step": 2.0})

sys.modules["pointproj.training.loop"] = types.ModuleType("pointproj.training.loop")
sys.modules["pointproj.training.loop"].train = train
"""


@pytest.fixture
def program(tmp_path):
    """Start train.py in an empty folder, with quick training."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(QUICK_TRAINING)

    def start(*arguments, wait=True):
        command = [sys.executable, str(PROJECT / "train.py"), *arguments]
        started = subprocess.Popen(
            command,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{site}{os.pathsep}{PROJECT}"},
        )
        if not wait:
            return started
        out, err = started.communicate()
        return subprocess.CompletedProcess(command, started.returncode, out, err)

    return start


def summary(tmp_path):
    (file,) = tmp_path.glob("outputs/sweeps/*/*/summary.csv")
    with file.open(newline="") as opened:
        return list(csv.DictReader(opened))


def test_failing_jobs_are_recorded_and_the_others_run(program, tmp_path):
    ended = program("-m", "seed=0,1,2,3,5", "backend=torch")
    assert ended.returncode == 1
    rows = summary(tmp_path)
    assert [row["status"] for row in rows] == ["ok", "failed", "failed", "failed", "ok"]
    assert [row["overrides"] for row in rows] == [f"seed={seed} backend=torch" for seed in (0, 1, 2, 3, 5)]
    assert [row["loss"] for row in rows] == ["0.5", "", "", "", "5.5"]
    errors = ("ConfigError: seed 1 cannot be", "ZeroDivisionError: seed 2 divides by zero")
    assert [row["error"] for row in rows] == ["", *errors, "SystemExit: seed 3 gives up", ""]
    assert rows[0]["backend"] == "torch"
    assert "5 jobs, 3 failed" in ended.stdout
    assert errors[1] in ended.stdout
    job = next(tmp_path.glob("outputs/sweeps/*/*/1"))
    assert "training with seed 1" in (job / "train.log").read_text()
    assert "Traceback" not in (job / "train.log").read_text()
    assert "Traceback" in (job.with_name("2") / "train.log").read_text()
    assert not named(job.with_name("0"))


def test_a_sweep_without_failure_ends_with_0(program, tmp_path):
    ended = program("-m", "seed=0,5", "hydra.sweep.dir=mine")
    assert ended.returncode == 0, ended.stderr
    assert {path.name for path in (tmp_path / "mine").iterdir()} == {"0", "1", "multirun.yaml", "summary.csv"}
    assert named(tmp_path / "mine/0")
    environment = json.loads((tmp_path / "mine/0/environment.json").read_text())
    assert "seed=0,5" in environment["command"]
    again = program("-m", "seed=7,8", "hydra.sweep.dir=mine")
    assert again.returncode == 1
    assert "holds a run already" in again.stderr
    assert json.loads((tmp_path / "mine/0/status.json").read_text())["overrides"] == ["seed=0"]


def test_jobs_in_other_processes_are_summarised(program, tmp_path):
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher", reason="needs the extra sweep")
    ended = program("-m", "seed=0,5", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2")
    assert ended.returncode == 0, ended.stderr
    assert [row["loss"] for row in summary(tmp_path)] == ["0.5", "5.5"]


def test_a_killed_job_is_a_failed_row(program, tmp_path):
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher", reason="needs the extra sweep")
    ended = program("-m", "seed=4", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2")
    assert ended.returncode == 1
    (row,) = summary(tmp_path)
    assert row["status"] == "failed"
    assert "ended without an error message" in row["error"]


def test_runs_started_together_have_folders_of_their_own(program, tmp_path):
    started = [program("seed=5", wait=False) for _ in range(2)]
    assert [process.wait() for process in started] == [0, 0], started[0].stderr.read()
    folders = [file.parent for file in tmp_path.glob("outputs/*/*/status.json")]
    assert len(folders) == 2
    assert all(json.loads((folder / "status.json").read_text())["status"] == "ok" for folder in folders)
    assert not any(map(named, folders))


@pytest.mark.parametrize(("seed", "traceback"), [(1, False), (2, True)])
def test_a_run_alone_fails_with_the_words_of_its_error(program, tmp_path, seed, traceback):
    ended = program(f"seed={seed}")
    assert ended.returncode == 1
    assert {1: "seed 1 cannot be", 2: "seed 2 divides by zero"}[seed] in ended.stderr
    assert ("Traceback" in ended.stderr) == traceback
    (status,) = tmp_path.glob("outputs/*/*/status.json")
    assert json.loads(status.read_text())["status"] == "failed"


def named(folder):
    """Whether a job was told that its folder was named by the caller."""
    return json.loads((folder / "named.json").read_text())["named"]


def test_a_run_knows_that_its_folder_was_named(program, tmp_path):
    ended = program("hydra.run.dir=mine", "seed=5")
    assert ended.returncode == 0, ended.stderr
    assert named(tmp_path / "mine")


def job(folder, number, **status):
    RunFolder(folder / str(number)).write_json("status.json", {"job": number, "overrides": [], **status})
    return RunFolder(folder / str(number))


def test_rows_come_in_the_jobs_order_with_all_columns(tmp_path):
    for number in (10, 2, 1):
        job(tmp_path, number, status="ok", seconds=1.5).write_json(
            "metrics.json", {"loss": number, "other": 1}
        )
    rows = sweep.collect(tmp_path)
    assert [(row["job"], row["loss"], row["folder"]) for row in rows] == [(n, n, str(n)) for n in (1, 2, 10)]
    assert all(tuple(row) == sweep.COLUMNS for row in rows)


def test_a_sweep_without_any_record_has_failed(tmp_path, capsys):
    assert sweep.report(tmp_path) is False
    assert "no job" in capsys.readouterr().err


def test_the_table_is_made_again_from_the_folder(tmp_path, capsys):
    job(tmp_path, 0, status="ok", overrides=["data.fields=[pressure]"])
    for folder, reason in ((tmp_path, "it has no multirun.yaml"), (tmp_path / "none", "it does not exist")):
        with pytest.raises(SystemExit, match="2"):
            main(["sweep", str(folder)])
        assert f"{folder} is not the folder of a sweep ({reason})" in capsys.readouterr().err
    assert not (tmp_path / "summary.csv").exists()
    (tmp_path / sweep.MARK).touch()
    assert main(["sweep", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert all(words in shown for words in ("1 jobs, 0 failed", "data.fields=[pressure]"))
    assert (tmp_path / "summary.csv").read_text().startswith("job,status,overrides,backend,device,loss")
