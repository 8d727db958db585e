"""Attention over neighbours: what is measured beside it, and that a wrong result gets no time."""

import dataclasses
from pathlib import Path

import pytest
import torch

from pointproj.benchmark import attention
from pointproj.benchmark.config import BenchConfig
from pointproj.benchmark.results import OK, WRONG
from pointproj.benchmark.run import run
from tests.benchmark.test_run import bench_config
from tests.compat.physicsnemo_library import import_physicsnemo

CPU = torch.device("cpu")
SMALL = {"workloads": ["attend"], "sizes": [300], "execution": ["eager"], "backends": ["torch"]}


def test_backends_and_what_users_write_agree_and_are_timed(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(attention, "OTHERS", attention.OTHERS[:2])
    rows = run(bench_config(tmp_path, **SMALL))
    names = ("torch", "gather + SDPA", "gather + einsum")
    assert [(r.contender, r.mode, r.status) for r in rows] == [
        (name, mode, OK) for name in names for mode in attention.MODES
    ]
    assert all(r.parity_error < 1e-5 and r.p50_ms > 0 for r in rows)
    assert {(r.queries, r.references, r.k, r.channels) for r in rows} == {(300, 300, 16, 64)}
    assert {r.kind for r in run(bench_config(tmp_path, **SMALL, peers=[]))} == {"backend"}


def test_a_wrong_value_or_gradient_gets_no_time(tmp_path: Path, monkeypatch):
    def other(query, keys, values):
        return attention.by_einsum(query * 1.01, keys, values)

    wrong = attention.OTHERS[1]._replace(make=lambda device: attention.gathered(other, device))
    monkeypatch.setattr(attention, "OTHERS", [wrong])
    rows = run(bench_config(tmp_path, **{**SMALL, "backends": []}))
    assert [(r.mode, r.status, r.p50_ms) for r in rows] == [(m, WRONG, None) for m in attention.MODES]


def test_executions_are_those_that_say_something():
    def rows(**of: object) -> list[int]:
        config = dataclasses.replace(BenchConfig(workloads=["attend"], backends=["torch"]), **of)
        return [part.rows for part in attention.parts(config, "cuda")]

    assert rows() == [12, 12]  # torch and einsum in two executions each, the others in one
    assert rows(peers=[]) == [4, 4]
    assert rows(peers=[], execution=["compiled"]) == [2, 2]
    assert rows(workloads=["w1"]) == []


@pytest.mark.peers
def test_physicsnemos_attention_gives_what_has_the_shape_of_ours():
    import_physicsnemo()
    asked = attention.question(100, CPU)
    call = attention._call(attention.physicsnemo(CPU), asked, torch.ones(100, 64), "operator", "eager")
    assert [part.shape for part in call()[:3]] == [(100, 64)] * 3
