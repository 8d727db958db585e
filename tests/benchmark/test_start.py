"""The time until a new process is ready: which rows there are, and what a run that fails becomes."""

import json
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from pointproj.benchmark import start
from pointproj.benchmark.config import BenchConfig
from pointproj.benchmark.results import FAILED, OK
from pointproj.benchmark.run import plan, run_benchmark
from tests.benchmark.test_run import bench_config


def test_each_job_starts_cold_and_then_warm():
    def rows(**of: object) -> list[int]:
        return [part.rows for part in plan(BenchConfig(**of), "cpu")]

    assert rows(workloads=["start"]) == [1] * 6
    assert rows(workloads=["start"], modes=["whole"]) == [1] * 2
    assert rows(workloads=["start"], execution=["captured"]) == []
    assert rows(workloads=["import"]) == [1]


def test_runs_are_rows_and_share_their_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    caches = []

    def trained(arguments: list[str], environment: Mapping[str, str]) -> str:
        caches.append(environment["WARP_CACHE_PATH"])
        folder = Path(arguments[-1].removeprefix("hydra.run.dir="))
        (folder / "metrics.json").write_text(json.dumps({"first_step_ended": time.time() + 3}))
        if "experiment=tutorial_knn" not in arguments:
            raise RuntimeError("the process failed: no such backend")
        return ""

    monkeypatch.setattr(start, "last_line_of", trained)
    rows = run_benchmark(bench_config(tmp_path, workloads=["start"]))
    assert [(row.implementation, row.mode, row.execution, row.status) for row in rows] == [
        *[("tutorial_knn", mode, of, OK) for of in ("cold", "warm") for mode in ("first_step", "whole")],
        *[("default", "first_step", of, FAILED) for of in ("cold", "warm")],
    ]
    assert 2900 < rows[0].p50_ms < 4000
    assert rows[1].p50_ms < 1000
    assert rows[4].note == "RuntimeError: the process failed: no such backend"
    assert [caches.count(folder) for folder in dict.fromkeys(caches)] == [2, 2]
