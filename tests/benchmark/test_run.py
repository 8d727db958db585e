"""The benchmark: rows are kept, and wrong results get no time."""

import dataclasses
import gc
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch

from pointproj import machine
from pointproj.benchmark import import_time, interop, peers, plan, workloads
from pointproj.benchmark.calls import OperatorCalls
from pointproj.benchmark.config import BenchConfig, to_bench_config
from pointproj.benchmark.contenders import backend_contender, peer_contender
from pointproj.benchmark.parity import Expected, relative_error
from pointproj.benchmark.peer import Peer
from pointproj.benchmark.peers import PEERS
from pointproj.benchmark.projection import Projection, Unaffordable
from pointproj.benchmark.recorder import collect_only_new_garbage
from pointproj.benchmark.results import COLUMNS, MISSING, OK, SKIPPED, WRONG, ResultsFile, Row, read_rows
from pointproj.benchmark.run import run
from pointproj.benchmark.timing import measure, percentiles
from pointproj.benchmark.workloads import Workload
from pointproj.config import ConfigError
from pointproj.machine import slug
from pointproj.ops.cases import Case, gaussian

CPU = torch.device("cpu")
PROJECT = Path(__file__).parents[2]
KNN = Workload(
    "small", Case("small", gaussian(60, 200), k=5, radius=None), "knn", ("knn", "operator", "step")
)
RADIUS = Workload(
    "small", Case("small", gaussian(60, 200), k=None, radius=0.8), "radius", ("operator", "step")
)


def row(**changes: object) -> Row:
    """A row of W1 with a time."""
    made = Row(
        **{"workload": "w1", "operator": "knn", "contender": "warp", "kind": "backend", "mode": "step"},
        **{"execution": "captured", "queries": 27_000, "references": 100_000, "clouds": 1, "k": 7},
        **{"radius": None, "channels": 25, "dtype": "float32", "status": OK, "p20_ms": 0.25, "p50_ms": 0.28},
        **{"p80_ms": 0.3, "repetitions": 500, "peak_mib": 123.4, "parity_error": 1.5e-7},
        **{"device": "NVIDIA H200", "driver": "580.1", "torch": "2.11", "cuda": "13.0", "warp": "1.19"},
        **{"python": "3.12.3", "commit": "abc", "date": "2026-01-02T03:04:05+00:00"},
    )
    return dataclasses.replace(made, **changes)


def peer_named(name: str, operator: str = "knn") -> Peer:
    return next(peer for peer in PEERS if (peer.name, peer.operator) == (name, operator))


def bench_config(tmp_path: Path, **values: object) -> BenchConfig:
    """A config for the CPU with few repetitions, writing below ``tmp_path``."""
    few = {"device": "cpu", "budget_s": 0.01, "workloads": ["w1"], "output": str(tmp_path / "r.csv")}
    return BenchConfig(**{**few, **values})


def measure_small(monkeypatch: pytest.MonkeyPatch, config: BenchConfig, *made: Workload) -> list[Row]:
    """Run with these workloads in place of the named ones."""
    monkeypatch.setattr("pointproj.benchmark.run.workloads", lambda *_: iter(made))
    return run(config)


class TestRun:
    def test_rows_of_two_contenders_are_measured_and_kept(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        config = bench_config(tmp_path, execution=["eager"], backends=["torch"], peers=["scipy cKDTree"])
        rows = measure_small(monkeypatch, config, KNN)
        measured = [(r.contender, r.mode, r.status) for r in rows if r.workload == "small"]
        modes = ("knn", "operator", "step")
        assert measured == [(name, mode, OK) for name in ("torch", "scipy cKDTree") for mode in modes]
        for r in rows:
            assert 0 < r.p20_ms <= r.p50_ms <= r.p80_ms
            assert r.parity_error < 1e-5
            assert r.repetitions >= 1
            assert r.peak_mib > 0
        assert [(r.queries, r.references, r.k, r.channels) for r in rows[:1]] == [(60, 200, 5, 3)]
        kept = read_rows(tmp_path / "r.csv")
        assert [r.key for r in kept] == [r.key for r in rows]

    def test_wrong_result_gets_no_time(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
        right = peer_named("scipy cKDTree")
        wrong = dataclasses.replace(
            right, name="wrong", function=lambda q, r, k: right.function(q, r, k + 1)[:, 1:]
        )
        monkeypatch.setattr(plan, "PEERS", [wrong])
        monkeypatch.setattr(peers, "PEERS", [wrong])
        monkeypatch.setattr("pointproj.benchmark.contenders.PEERS", [wrong])
        rows = measure_small(monkeypatch, bench_config(tmp_path, execution=["eager"], backends=[]), KNN)
        assert [(r.mode, r.status, r.p50_ms) for r in rows] == [
            (mode, WRONG, None) for mode in ("knn", "operator", "step")
        ]
        assert all(r.parity_error > 1e-2 for r in rows)
        assert "not the reference's result: neighbours" in capsys.readouterr().out

    def test_peer_that_raises_is_a_row(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        def broken(*_):
            raise MemoryError("no room for the pairs")

        monkeypatch.setattr(
            plan, "PEERS", [dataclasses.replace(peer_named("pykdtree"), function=broken, imports=())]
        )
        config = bench_config(tmp_path, execution=["eager"], modes=["knn"], backends=[])
        (only,) = measure_small(monkeypatch, config, KNN)
        assert (only.status, only.note) == ("failed", "MemoryError: no room for the pairs")
        assert only.p50_ms is None

    def test_missing_peer_is_a_row_that_says_so(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        absent = dataclasses.replace(peer_named("pykdtree"), imports=("no_such_package",))
        monkeypatch.setattr(plan, "PEERS", [absent])
        config = bench_config(tmp_path, execution=["eager"], backends=[])
        (only,) = measure_small(monkeypatch, config, KNN)
        assert (only.contender, only.mode, only.status) == ("pykdtree", "-", MISSING)
        assert (
            only.note
            == "no_such_package cannot be imported: ModuleNotFoundError: No module named 'no_such_package'"
        )

    def test_interrupted_run_keeps_its_rows(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        def interrupted(*_):
            raise KeyboardInterrupt

        config = bench_config(tmp_path, execution=["eager"], backends=["torch"], modes=["knn"])
        peer = dataclasses.replace(peer_named("pykdtree"), function=interrupted, imports=())
        monkeypatch.setattr(plan, "PEERS", [peer])
        with pytest.raises(KeyboardInterrupt):
            measure_small(monkeypatch, config, KNN)
        assert [r.contender for r in read_rows(tmp_path / "r.csv")] == ["torch"]

    def test_time_of_the_import_is_a_row(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(import_time, "REPETITIONS", 3)
        (only,) = run(bench_config(tmp_path, workloads=["import"]))
        assert (only.contender, only.mode, only.status, only.repetitions) == ("pointproj", "import", OK, 3)
        assert 0 < only.p20_ms <= only.p50_ms <= only.p80_ms < 60_000
        assert only.peak_mib is None

    def test_import_that_fails_is_a_row(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(import_time, "PROGRAM", "import no_such_package")
        (only,) = run(bench_config(tmp_path, workloads=["import"]))
        assert (only.status, only.p50_ms) == ("failed", None)
        assert "the import failed: ModuleNotFoundError: No module named 'no_such_package'" in only.note

    def test_fresh_tensors_are_handed_to_warp(self, tmp_path: Path):
        rows = run(bench_config(tmp_path, workloads=["interop"], elements=1000))
        assert [(r.contender, r.status) for r in rows] == [(name, OK) for name in interop.CALLS]
        assert all(r.parity_error < 1e-6 for r in rows)


class TestParity:
    @pytest.mark.parametrize("workload", [KNN, RADIUS], ids=lambda w: w.operator)
    def test_backends_and_peers_agree_with_the_reference(self, workload: Workload):
        problem = workload.problem(CPU)
        expected = Expected(workload, problem)
        here = [p for p in PEERS if p.operator == workload.operator and "cpu" in p.devices]
        contenders = [peer_contender(p, workload) for p in here if not p.missing()]
        assert {"tutorial torch", "scipy cKDTree"} <= {contender.name for contender in contenders}
        for contender in [backend_contender("torch", workload), *contenders]:
            calls = OperatorCalls(contender, problem)
            expected.fill_upstream(calls.upstream, checked_only=True)
            error = expected.sums_error(*calls.make("operator", "eager")())
            assert error < 1e-5, contender.name

    def test_error_is_that_of_the_changed_value_or_gradient(self):
        problem = KNN.problem(CPU)
        expected = Expected(KNN, problem)
        calls = OperatorCalls(backend_contender("torch", KNN), problem)
        expected.fill_upstream(calls.upstream, checked_only=True)
        values, gradient = calls.make("operator", "eager")()
        assert expected.sums_error(values * 1.01, gradient) == pytest.approx(0.01, rel=1e-3)
        assert expected.sums_error(values, gradient * 0.98) == pytest.approx(0.02, rel=1e-3)
        assert expected.sums_error(values.masked_fill(values > 1, torch.nan)) == float("inf")

    def test_neighbours_may_tie_but_not_repeat_or_be_absent(self):
        problem = KNN.problem(CPU)
        expected = Expected(KNN, problem)
        rows = backend_contender("torch", KNN).knn(problem)
        assert expected.neighbors_error(rows.flip(1)) == 0.0  # in any order
        repeated = rows.clone()
        repeated[3, 1] = repeated[3, 0]
        assert expected.neighbors_error(repeated) == float("inf")
        absent = rows.clone()
        absent[3, 1] = -1
        assert expected.neighbors_error(absent) == float("inf")

    def test_only_checked_queries_send_a_gradient_to_the_check(self):
        workload = Workload(
            "large", Case("large", gaussian(900, 16_000), k=2, radius=None), "knn", ("operator",)
        )
        expected = Expected(workload, workload.problem(CPU))
        assert expected.checked_queries == 2**23 // 16_000
        upstream = torch.empty(900, 3)
        expected.fill_upstream(upstream, checked_only=True)
        assert int((upstream != 0).any(1).sum()) == expected.checked_queries
        checked = upstream.clone()
        expected.fill_upstream(upstream, checked_only=False)
        assert int((upstream != 0).any(1).sum()) == 900
        torch.testing.assert_close(upstream[checked != 0], checked[checked != 0], rtol=0, atol=0)

    def test_relative_error(self):
        assert relative_error(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])) == pytest.approx(0.1)
        assert relative_error(torch.ones(2), torch.ones(3)) == float("inf")


class TestProjection:
    def test_all_pairs_that_do_not_fit_into_memory_are_refused(self):
        size = 3_000_000
        huge = Workload("huge", Case("huge", gaussian(1, 1)), "knn", ("knn",))
        problem = huge.problem(CPU)
        points = problem.reference_points.expand(size, 3)
        problem = problem._replace(query_points=points, reference_points=points)
        contender = peer_contender(peer_named("tutorial torch"), huge)
        with pytest.raises(Unaffordable, match=r"would need about 1[\d.e+]+ GiB"):
            Projection(BenchConfig(), CPU).check_contender(contender, huge, problem)

    def test_slow_calls_are_foreseen_from_smaller_clouds(self):
        projection = Projection(BenchConfig(slowest_call_s=2.0), CPU)
        projection.learn(row(references=1000, p50_ms=300.0))
        projection.check_growth(row(references=5000))
        projection.check_growth(row(references=10_000, contender="another"))
        with pytest.raises(Unaffordable, match="would take about 3 s a call, more than slowest_call_s=2"):
            projection.check_growth(row(references=10_000))


class TestResults:
    def test_rows_survive_the_file(self, tmp_path: Path):
        rows = [row(), row(mode="knn", status=SKIPPED, p50_ms=None, note='a "quoted", note\nof two lines')]
        file = ResultsFile(tmp_path / "new" / "r.csv")
        for r in rows:
            file.add(r)
        assert read_rows(tmp_path / "new" / "r.csv") == rows
        assert [*tmp_path.rglob("*")] == [tmp_path / "new", tmp_path / "new" / "r.csv"]

    def test_measuring_again_replaces_a_row_and_keeps_the_others(self, tmp_path: Path):
        first = ResultsFile(tmp_path / "r.csv")
        first.add(row())
        first.add(row(mode="forward", p50_ms=0.1))
        ResultsFile(tmp_path / "r.csv").add(row(p50_ms=0.2, date="2026-02-03T00:00:00+00:00"))
        kept = {r.mode: r.p50_ms for r in read_rows(tmp_path / "r.csv")}
        assert kept == {"forward": 0.1, "step": 0.2}

    def test_another_commit_starts_a_new_file_and_keeps_the_old_one(self, tmp_path: Path, caplog):
        first = ResultsFile(tmp_path / "r.csv")
        first.add(row())
        first.add(row(mode="forward"))
        second = ResultsFile(tmp_path / "r.csv")
        second.add(row(mode="forward", commit="def"))
        second.add(row(mode="knn", commit="def"))
        assert [(r.mode, r.commit) for r in read_rows(tmp_path / "r.csv")] == [
            ("forward", "def"),
            ("knn", "def"),
        ]
        assert read_rows(tmp_path / "r.csv.old") == [row(), row(mode="forward")]
        (line,) = caplog.messages
        assert "r.csv has results of commit abc, this run is of def: a new file is started" in line

    def test_new_results_do_not_change_the_commit(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        def git(*arguments: str) -> None:
            author = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
            subprocess.run(["git", *author, *arguments], cwd=tmp_path, check=True, capture_output=True)

        (tmp_path / "benchmarks").mkdir()
        files = tmp_path / "code.py", tmp_path / "benchmarks" / "r.csv"
        for file in files:
            file.write_text("before")
        git("init")
        git("add", "--all")
        git("commit", "-m", "first")
        monkeypatch.setattr(machine, "PROJECT", tmp_path)
        commit = machine.machine_columns(CPU)["commit"]
        assert len(commit) == 12
        files[1].write_text("after")
        assert machine.machine_columns(CPU)["commit"] == commit
        files[0].write_text("after")
        assert machine.machine_columns(CPU)["commit"] == f"{commit}-dirty"

    def test_a_process_that_does_not_write_leaves_the_file_alone(self, tmp_path: Path):
        ResultsFile(tmp_path / "r.csv").add(row())
        ResultsFile(tmp_path / "r.csv", writes=False).add(row(commit="def"))
        assert read_rows(tmp_path / "r.csv") == [row()]

    def test_a_file_of_something_else_is_left_alone(self, tmp_path: Path):
        path = tmp_path / "r.csv"
        path.write_text("a,b\n1,2\n")
        with pytest.raises(ValueError, match=r"expected the columns workload, .*; got a, b"):
            ResultsFile(path)
        assert path.read_text() == "a,b\n1,2\n"

    def test_columns_name_machine_versions_commit_and_date(self):
        assert {"device", "driver", "torch", "cuda", "warp", "python", "commit", "date"} <= set(COLUMNS)
        assert slug("NVIDIA H200") == "nvidia-h200"


def test_only_what_was_made_within_is_looked_at_for_garbage():
    class Ring:
        def __init__(self):
            self.itself = self

    before = Ring()
    old = weakref.ref(before)
    with collect_only_new_garbage():
        young = weakref.ref(Ring())
        del before
        gc.collect()
        assert (old() is None, young() is None) == (False, True)
    gc.collect()
    assert old() is None


class TestTiming:
    def test_percentiles_are_milliseconds_a_call(self):
        timing = percentiles([0.001 * i for i in range(1, 12)], calls=3)
        assert timing == pytest.approx((3.0, 6.0, 9.0, 33))

    def test_long_calls_are_made_a_few_times_only(self, monkeypatch: pytest.MonkeyPatch):
        now = [0.0]
        monkeypatch.setattr("pointproj.benchmark.timing.time.perf_counter", lambda: now[0])

        def call(seconds: float) -> None:
            now[0] += seconds

        assert measure(lambda: call(3.0), CPU, 0.4) == pytest.approx((3000.0, 3000.0, 3000.0, 1))
        assert now == [3.0]
        assert measure(lambda: call(0.25), CPU, 0.4) == pytest.approx((250.0, 250.0, 250.0, 3))
        assert now == [4.0]
        now[0] = 0.0
        assert measure(lambda: call(0.04), CPU, 0.4) == pytest.approx((40.0, 40.0, 40.0, 10), rel=1e-6)
        assert measure(lambda: call(2**-20), CPU, 0.01).repetitions == 210 * 49  # 0.2 ms a sample


class TestPlan:
    def test_workloads_are_those_asked_for(self):
        made = workloads.workloads(BenchConfig(workloads=["scaling", "w2"], sizes=[500, 200]), "cpu")
        names = [(w.name, w.problem(CPU).reference_points.shape[0]) for w in made]
        kinds = ("scaling_uniform", "scaling_clustered", "scaling_surface")
        assert names == [*((kind, size) for kind in kinds for size in (200, 500)), ("w2", 25_000)]

    def test_a_cloud_that_searches_itself_is_one_tensor(self):
        (workload, *_) = workloads.workloads(BenchConfig(workloads=["scaling"], sizes=[200]), "cpu")
        problem = workload.problem(CPU)
        assert problem.query_points is problem.reference_points

    def test_surfaces_hold_the_points_asked_for_side_by_side(self):
        points = workloads.surface(1003)(torch.Generator().manual_seed(0))
        assert points.shape == (1003, 3)
        assert points[:, 0].min() >= -1
        assert points[:, 0].max() <= 19
        assert points[:, 1:].abs().max() <= 1
        assert len(torch.unique((points[:, 0] + 1) // 2)) == 10

    def test_captured_needs_cuda(self):
        with pytest.raises(ConfigError, match="captured needs a CUDA device, and this runs on cpu"):
            plan.executions(BenchConfig(execution=["captured"]), "cpu")
        assert plan.executions(BenchConfig(), "cpu") == ("eager", "compiled")
        assert plan.executions(BenchConfig(), "cuda") == ("eager", "compiled", "captured")

    def test_scaling_is_compiled_only_where_asked_for(self):
        def chosen(**of):
            config = BenchConfig(workloads=["scaling"], sizes=[200], backends=["torch"], peers=[], **of)
            (entry,) = plan.entries(config, next(workloads.workloads(config, "cpu")), "cpu")
            return entry.measurements

        assert chosen() == (("knn", "eager"),)
        assert chosen(execution=["compiled"]) == (("knn", "compiled"),)

    def test_unknown_names_say_what_there_is(self):
        with pytest.raises(ConfigError, match="got wrap; did you mean warp"):
            [*plan.entries(BenchConfig(backends=["wrap"]), KNN, "cpu")]
        with pytest.raises(ConfigError, match="got pykdtre; did you mean pykdtree"):
            [*plan.entries(BenchConfig(peers=["pykdtre"]), KNN, "cpu")]

    def test_config_is_checked_as_a_whole(self):
        from omegaconf import OmegaConf

        composed = OmegaConf.structured(BenchConfig(workloads=["w9"], modes=["stepp"], sizes=[5], budget_s=0))
        with pytest.raises(ConfigError) as raised:
            to_bench_config(composed)
        lines = str(raised.value).splitlines()
        assert len(lines) == 4
        assert "got stepp; did you mean step" in lines[1]


def test_misspelt_key_is_answered_with_the_nearest():
    command = [sys.executable, "bench.py", "workload=[w1]"]
    answer = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=60)
    assert answer.returncode == 2
    assert (
        "there is no workload; did you mean workloads? ('python bench.py --help' lists all)" in answer.stderr
    )


def test_command_line_answers_without_torch():
    command = [sys.executable, "-X", "importtime", "bench.py", "--cfg", "job"]
    answer = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=60, check=True)
    assert "slowest_call_s: 2.0" in answer.stdout
    imported = {line.rpartition("|")[2].strip() for line in answer.stderr.splitlines()}
    assert "pointproj.benchmark.config" in imported
    assert "torch" not in imported
