"""Steps of whole models: which rows there are, and what a process answers."""

import textwrap
from pathlib import Path

import pytest

from pointproj.benchmark import geotransolver, gino, models, processes
from pointproj.benchmark.config import BenchConfig
from pointproj.benchmark.model_process import PreparedStep, Request
from pointproj.benchmark.processes import Prepared
from pointproj.benchmark.results import MISSING, OK, SKIPPED, WRONG
from pointproj.benchmark.run import run
from tests.benchmark.test_run import bench_config
from tests.compat.physicsnemo_library import import_physicsnemo

CONFIG = {"workloads": ["gino"], "slowest_call_s": 1000.0}
TIMES = '"p20_ms": 1, "p50_ms": 2, "p80_ms": 3, "repetitions": 4'
ANSWER = f'{{{TIMES}, "error": %s, "before": 1048576, "peak": 3145728}}'


def asked_for(config: BenchConfig, device: str) -> list[tuple]:
    """(workload, contender, execution, points) of each row."""
    rows = models.requests(config, device)
    return [
        (r.workload, "pointproj" if r.replaced else models.MODELS[r.workload].PACKAGE, r.execution, r.points)
        for r in rows
    ]


def test_every_model_has_rows_with_its_own_search_and_with_ours():
    rows = asked_for(BenchConfig(), "cpu")
    assert ("gino", "neuraloperator", "eager", 10**4) in rows
    assert ("gino", "pointproj", "eager", 10**6) in rows
    for asked, executions in ((None, ["eager", "compiled"]), (["eager"], ["eager"])):
        rows = asked_for(BenchConfig(execution=asked), "cpu")
        assert [row[2] for row in rows if row[:2] == ("geotransolver", "pointproj")] == executions
    assert not asked_for(BenchConfig(modes=["knn"]), "cpu")
    assert not asked_for(BenchConfig(workloads=["w1"]), "cpu")
    assert {row[1] for row in asked_for(BenchConfig(peers=[]), "cpu")} == {"pointproj"}


def test_rows_without_a_time_say_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Prepared, "ask", lambda *_: '{"missing": "neuralop cannot be imported"}')
    rows = run(bench_config(tmp_path, **CONFIG))
    assert [(row.status, row.note) for row in rows] == [(MISSING, "neuralop cannot be imported")] * 3
    rows = run(bench_config(tmp_path, workloads=["gino"]))
    assert {row.status for row in rows} == {SKIPPED}
    assert "more than slowest_call_s=2" in rows[0].note


@pytest.mark.parametrize(("error", "status"), [("1e-6", OK), ("null", OK), ("0.1", WRONG)])
def test_what_a_process_answers_is_a_row(
    error: str, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Prepared, "ask", lambda *_: ANSWER % error)
    row, *_ = run(bench_config(tmp_path, **CONFIG))
    assert (row.contender, row.queries, row.references, row.status) == (
        "neuraloperator",
        32**3,
        10**4,
        status,
    )
    if status == OK:
        assert (row.p50_ms, row.repetitions, row.peak_mib) == (2, 4, 3)
        assert row.note == "1 MiB before the first step"


def test_processes_prepare_wait_and_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    program = """
        import os, pathlib, sys
        name = sys.argv[1]
        begun = pathlib.Path(name)
        if name == "fails beside others" and not begun.exists():
            begun.touch()
            sys.exit("no memory")
        if name == "fails":
            sys.exit("a line\\nno such library")
        print("the library prints too\\n\\nready to measure", flush=True)
        if sys.stdin.readline():
            print(f"{name} in {os.getpid()}")
    """
    (tmp_path / "answers.py").write_text(textwrap.dedent(program))
    monkeypatch.setattr(processes, "PROJECT", tmp_path)
    with Prepared("answers") as prepared:
        prepared.begin(["a", "b", "fails beside others", "fails"])
        prepared.until_ready()
        begun = {request: each.process for request, each in prepared._waiting.items()}
        assert prepared.ask("a", 60) == f"a in {begun['a'].pid}"
        again = prepared.ask("a", 60)  # a process answers once
        assert again.startswith("a in ")
        assert again != f"a in {begun['a'].pid}"
        assert prepared.ask("fails beside others", 60).startswith("fails beside others in ")
        with pytest.raises(RuntimeError, match="the process failed: no such library"):
            prepared.ask("fails", 60)
    assert all(process.poll() is not None for process in begun.values())


@pytest.mark.peers
@pytest.mark.parametrize("module", [gino, geotransolver], ids=["gino", "geotransolver"])
def test_a_small_model_agrees_and_is_timed(module, monkeypatch: pytest.MonkeyPatch):
    if module is gino:
        pytest.importorskip("neuralop", reason="neuraloperator is not installed: extra peers")
    else:
        import_physicsnemo()
    few = lambda replaced, points, device: module.make_small(replaced, device)  # noqa: E731
    monkeypatch.setattr(module, "make", few)
    name = module.__name__.rpartition(".")[2]
    try:
        found = PreparedStep(Request(name, True, "eager", 0, "cpu", 0.01)).answer()
    finally:
        if module is geotransolver:
            from pointproj.compat import physicsnemo

            physicsnemo.uninstall()
    assert found["error"] < models.TOLERANCE
    assert 0 < found["p20_ms"] <= found["p50_ms"] <= found["p80_ms"]
    assert found["peak"] >= found["before"] > 0
