"""What rows compile is compiled ahead: for each of our rows its call, and nothing twice."""

import dataclasses
import pickle
from pathlib import Path

import pytest
import torch

from pointproj.benchmark import ahead
from pointproj.benchmark.config import BenchConfig
from pointproj.benchmark.contenders import entries
from pointproj.benchmark.display import Display
from pointproj.benchmark.workloads import workloads

CONFIG = BenchConfig(workloads=["w1", "host", "scaling", "lists"], backends=["torch", "warp"], sizes=[200])


def test_rows_of_our_backends_are_called_by_jobs():
    config = dataclasses.replace(CONFIG, peers=[])
    found = [job.args[2:] for job in ahead.jobs(config, "cpu")]
    calls = [(number, place, mode) for number, place, modes in found for mode in modes]
    assert len(calls) == len(set(calls))
    planned = {
        (number, place, mode)
        for number, workload in enumerate(workloads(config, "cpu"))
        for place, entry in enumerate(entries(config, workload, "cpu"))
        if entry.contender.name in ("warp", "pointproj") and workload.name not in ahead.SAME_KERNELS
        for mode, _ in entry.measurements
    }
    assert set(calls) == planned
    assert {mode for *_, mode in calls} >= {"knn", "step", "padded", "csr"}


def test_jobs_run_in_other_processes_and_call_what_rows_measure(monkeypatch: pytest.MonkeyPatch):
    called = []

    class Recorded:
        def __init__(self, contender, question) -> None:
            self.name = contender.name

        def make(self, mode: str, execution: str):
            return lambda: called.append((self.name, mode, execution))

    monkeypatch.setattr(ahead, "Calls", Recorded)
    config = dataclasses.replace(CONFIG, workloads=["host"], backends=["warp"])
    for job in ahead.jobs(config, "cpu"):
        pickle.loads(pickle.dumps(job))()
    assert sorted(called) == sorted([("warp", m, "eager") for m in ("aggregate", "operator", "step")] * 2)


def test_nothing_is_compiled_ahead_for_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ahead, "cache_dir", lambda: str(tmp_path))
    ahead.compile_ahead(CONFIG, torch.device("cpu"), Display(shown=False))
    assert not [*tmp_path.iterdir()]
