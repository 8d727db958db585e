"""The time to the first step: which rows there are, and what a run that fails becomes."""

import json
import subprocess
import time
from pathlib import Path

import pytest

from pointproj.benchmark import start
from pointproj.benchmark.config import BenchConfig
from pointproj.benchmark.results import FAILED, OK
from pointproj.benchmark.run import run
from tests.benchmark.test_run import bench_config


def test_each_job_starts_cold_and_then_warm():
    rows = start.planned(BenchConfig(), "cpu")
    assert rows == [
        *[("tutorial_knn", mode, of) for of in ("cold", "warm") for mode in ("first_step", "whole")],
        *[("default", "first_step", of) for of in ("cold", "warm")],
    ]
    assert not start.planned(BenchConfig(workloads=["w1"]), "cpu")
    assert not start.planned(BenchConfig(execution=["captured"]), "cpu")


def test_runs_are_rows_and_share_their_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    caches, others = [], subprocess.run

    def train(
        command: list[str], env: dict[str, str] | None = None, **options
    ) -> subprocess.CompletedProcess:
        if "train.py" not in command:
            return others(command, env=env, **options)
        folder = Path(command[-1].removeprefix("hydra.run.dir="))
        caches.append(env["WARP_CACHE_PATH"])
        (folder / "metrics.json").write_text(json.dumps({"first_step_ended": time.time() + 3}))
        failed = "experiment=tutorial_knn" not in command
        return subprocess.CompletedProcess(command, int(failed), "", "a line\nno such backend\n")

    monkeypatch.setattr(start.subprocess, "run", train)
    rows = run(bench_config(tmp_path, workloads=["start"]))
    assert [(row.contender, row.mode, row.execution, row.status) for row in rows] == [
        *[("tutorial_knn", mode, of, OK) for of in ("cold", "warm") for mode in ("first_step", "whole")],
        *[("default", "first_step", of, FAILED) for of in ("cold", "warm")],
    ]
    assert 2900 < rows[0].p50_ms < 4000
    assert rows[1].p50_ms < 1000
    assert rows[4].note == "RuntimeError: the run failed: no such backend"
    assert [caches.count(folder) for folder in dict.fromkeys(caches)] == [2, 2]
