"""Attention over neighbours: what is measured beside it, and that a wrong result gets no time."""

import dataclasses
from pathlib import Path

import pytest
import torch

from pointproj.benchmark import peers, selection
from pointproj.benchmark.calls import Calls
from pointproj.benchmark.config import BenchConfig
from pointproj.benchmark.implementations import Implementation
from pointproj.benchmark.parity import Expected
from pointproj.benchmark.results import OK
from pointproj.benchmark.run import run_benchmark
from pointproj.benchmark.workloads import attention_inputs, workloads
from tests.benchmark.test_run import bench_config
from tests.compat.physicsnemo_library import import_physicsnemo

CPU = torch.device("cpu")
MODES = ("aggregate", "operator")
SMALL = {"workloads": ["attend"], "sizes": [300], "execution": ["eager"], "backends": ["torch"]}
WRITTEN = ("gather + SDPA", "gather + einsum")


def peer_named(name: str) -> Implementation:
    return next(p for p in peers.PEERS if (p.name, p.operator) == (name, "attend"))


def test_backends_and_what_users_write_agree_and_are_timed(tmp_path: Path):
    rows = run_benchmark(bench_config(tmp_path, **SMALL, peers=[*WRITTEN]))
    names = ("torch", *WRITTEN)
    assert [(r.implementation, r.mode, r.status) for r in rows] == [(n, m, OK) for n in names for m in MODES]
    assert all(r.parity_error < 1e-5 and r.p50_ms > 0 for r in rows)
    assert {(r.queries, r.references, r.k, r.channels) for r in rows} == {(300, 300, 16, 64)}
    assert {r.kind for r in run_benchmark(bench_config(tmp_path, **SMALL, peers=[]))} == {"backend"}


def test_every_gradient_is_compared():
    (workload,) = workloads(BenchConfig(**SMALL), "cpu")
    inputs = workload.make_inputs(CPU)
    expected, calls = Expected(workload, inputs), Calls(peer_named("gather + SDPA"), inputs)
    expected.fill_upstream(calls.upstream, checked_only=True)
    values, *gradients = calls.make("operator", "eager")()
    assert expected.sums_error("operator", values, *gradients) < 1e-5
    for place in range(3):
        changed = [g * 1.01 if i == place else g for i, g in enumerate(gradients)]
        assert expected.sums_error("operator", values, *changed) == pytest.approx(0.01, rel=1e-2)


def test_executions_are_those_that_say_something():
    def rows(**of: object) -> list[int]:
        config = dataclasses.replace(BenchConfig(workloads=["attend"], backends=["torch"]), **of)
        made = (selection.entries(config, workload, "cuda") for workload in workloads(config, "cuda"))
        return [sum(len(entry.measurements) for entry in entries) for entries in made]

    assert rows() == [12, 12]  # torch and einsum in two executions each, the others in one
    assert rows(peers=[]) == [4, 4]
    assert rows(peers=[], execution=["compiled"]) == [2, 2]


@pytest.mark.peers
def test_physicsnemos_attention_gives_what_has_the_shape_of_ours():
    import_physicsnemo()
    inputs = attention_inputs(100, CPU)
    found = Calls(peer_named("PhysicsNeMo"), inputs).make("operator", "eager")()
    assert [part.shape for part in found[:3]] == [(100, 64)] * 3
