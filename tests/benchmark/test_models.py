"""Steps of whole models: which rows there are, and what they are compared with."""

from pathlib import Path

import pytest
import torch

from pointproj.benchmark import models
from pointproj.benchmark.results import MISSING, OK, SKIPPED, WRONG
from pointproj.benchmark.run import run_benchmark
from tests.benchmark.test_run import bench_config
from tests.compat.physicsnemo_library import import_physicsnemo

CPU = torch.device("cpu")
CONFIG = {"workloads": ["gino"], "slowest_call_s": 1000.0}


def small(ours: bool, *_: object) -> models.Made:
    """A network in place of a library's, to which every search is the same."""
    network = torch.nn.Linear(3, 1)
    return network, {"input": torch.ones(5, 3)}


def test_every_model_has_rows_with_its_own_search_and_with_ours(tmp_path: Path):
    def rows(**of: object) -> list[tuple]:
        found = run_benchmark(bench_config(tmp_path, **{"workloads": ["gino", "geotransolver"], **of}))
        assert {row.status for row in found} <= {SKIPPED}  # foreseen to take longer than slowest_call_s
        return [(row.workload, row.implementation, row.references, row.execution) for row in found]

    assert ("gino", "neuraloperator", 10**4, "eager") in rows()
    assert ("gino", "pointproj", 10**6, "eager") in rows()
    for wanted, executions in ((None, ["eager", "compiled"]), (["eager"], ["eager"])):
        found = rows(execution=wanted)
        assert [row[3] for row in found if row[:2] == ("geotransolver", "pointproj")] == executions
    assert not rows(modes=["knn"])
    assert {row[1] for row in rows(peers=[])} == {"pointproj"}


def test_rows_without_a_time_say_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(models, "import_failure", lambda name: f"{name} cannot be imported")
    rows = run_benchmark(bench_config(tmp_path, **CONFIG))
    assert [(row.status, row.note) for row in rows] == [(MISSING, "neuralop.models cannot be imported")] * 3
    rows = run_benchmark(bench_config(tmp_path, workloads=["gino"]))
    assert {row.status for row in rows} == {SKIPPED}
    assert "more than slowest_call_s=2" in rows[0].note


@pytest.mark.parametrize(("error", "status"), [(1e-6, OK), (0.1, WRONG)])
def test_a_step_is_timed_if_the_small_model_agrees(error: float, status: str, tmp_path, monkeypatch):
    monkeypatch.setitem(models.MODELS, "gino", models.GINO._replace(make=small))
    monkeypatch.setattr(models, "import_failure", lambda name: None)
    monkeypatch.setattr(models, "disagreement", lambda *_: error)
    theirs, ours, _ = run_benchmark(bench_config(tmp_path, **CONFIG))
    assert (theirs.implementation, theirs.status) == ("neuraloperator", OK)
    assert (theirs.queries, theirs.references) == (32**3, 10**4)
    assert 0 < theirs.p20_ms <= theirs.p50_ms <= theirs.p80_ms
    assert theirs.parity_error is None
    assert "MiB before the first step" in theirs.note
    assert (ours.implementation, ours.status, ours.parity_error) == ("pointproj", status, error)


def test_another_output_or_gradient_is_a_disagreement():
    def made(ours: bool, *_: object) -> models.Made:
        network, inputs = small(ours)
        return network, {"input": inputs["input"] * (1.01 if ours else 1.0)}

    of = models.GINO._replace(make=small)
    assert models.disagreement(of, CPU) == 0.0
    assert models.disagreement(of._replace(make=made), CPU) > 1e-3


@pytest.mark.peers
@pytest.mark.parametrize("name", [*models.MODELS])
def test_a_small_model_agrees(name: str):
    if name == "gino":
        pytest.importorskip("neuralop", reason="neuraloperator is not installed: extra peers")
    else:
        import_physicsnemo()
    try:
        assert models.disagreement(models.MODELS[name], CPU) < 1e-4
    finally:
        if name == "geotransolver":
            models._use_our_search(False)
