"""What rows compile is compiled ahead: for each of our rows its call, and nothing twice."""

import dataclasses
import pickle
from pathlib import Path

import pytest
import torch

from pointproj.benchmark import ahead, lists
from pointproj.benchmark.config import BenchConfig
from pointproj.benchmark.display import Display
from pointproj.benchmark.plan import entries
from pointproj.benchmark.workloads import workloads
from pointproj.ops.cases import itself

CONFIG = BenchConfig(workloads=["w1", "host", "scaling", "lists"], backends=["torch", "warp"])


def test_rows_of_our_backends_are_called_by_jobs():
    found = ahead.jobs(CONFIG, "cpu")
    rows = [job for job in found if job.func is ahead._call_rows]
    calls = [(job.args[2], job.args[3], *measurement) for job in rows for measurement in job.args[4]]
    assert len(calls) == len(set(calls))
    planned = [
        (number, entry.contender.name, *measurement)
        for number, workload in enumerate(workloads(CONFIG, "cpu"))
        for entry in entries(CONFIG, workload, "cpu")
        if entry.contender.name == "warp" and workload.name not in ahead.OTHER_CLOUDS
        for measurement in entry.measurements
    ]
    assert sorted(calls) == sorted(planned)
    searches = [job.args[2:] for job in found if job.func is ahead._search_lists]
    assert searches == [("warp", "padded"), ("warp", "csr")]


def test_jobs_run_in_other_processes_and_call_what_rows_measure(monkeypatch: pytest.MonkeyPatch):
    called = []
    monkeypatch.setattr(ahead, "calls_for", lambda mode, contender, problem: Recorded(contender.name, mode))
    config = dataclasses.replace(CONFIG, workloads=["host"], backends=["warp"])
    Recorded.made = called
    for job in ahead.jobs(config, "cpu"):
        pickle.loads(pickle.dumps(job))()
    assert called == [("warp", mode, "eager") for mode in ("aggregate", "operator", "step")] * 2


def test_lists_are_searched(monkeypatch: pytest.MonkeyPatch):
    asked = []
    monkeypatch.setattr(lists, "CLOUDS", {lists.UNIFORM: lambda size: itself(lists.uniform(200))})
    monkeypatch.setattr(ahead, "LIST_POINTS", 200)
    found = ahead.list_contenders(CONFIG, "cpu", ("csr",))
    contender = next(each for each in found if each.name == "warp")
    recorded = dataclasses.replace(contender, search=lambda question: asked.append(question))
    monkeypatch.setattr(ahead, "list_contenders", lambda *_: [recorded])
    ahead._search_lists(CONFIG, "cpu", "warp", "csr")
    assert [len(question.reference_points) for question in asked] == [200]


def test_nothing_is_compiled_ahead_for_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ahead, "cache_dir", lambda: str(tmp_path))
    ahead.compile_ahead(CONFIG, torch.device("cpu"), Display(shown=False))
    assert not [*tmp_path.iterdir()]


class Recorded:
    """Notes its calls."""

    made: list

    def __init__(self, name: str, mode: str) -> None:
        self.name, self.mode = name, mode

    def make(self, mode: str, execution: str):
        return lambda: self.made.append((self.name, mode, execution))
