"""The benchmark: rows are kept, and wrong results get no time."""

import dataclasses
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pointproj import knn
from pointproj.benchmark import peers, start
from pointproj.benchmark.calls import Calls
from pointproj.benchmark.cases import Case, Problem, gaussian
from pointproj.benchmark.config import BenchConfig
from pointproj.benchmark.implementations import Implementation, Nearest
from pointproj.benchmark.parity import Expected, relative_error
from pointproj.benchmark.peers import PEERS
from pointproj.benchmark.recorder import Limits, NoTime, time_limit
from pointproj.benchmark.results import MISSING, OK, WRONG, Row, read_rows
from pointproj.benchmark.run import run_benchmark
from pointproj.benchmark.selection import backend_implementation, entries, missing_backend
from pointproj.benchmark.timing import ISSUED_IN_A_ROW, measure, measure_host, percentiles
from pointproj.benchmark.workloads import Inputs, Workload, of_case, workloads
from pointproj.ops.registry import names
from tests.benchmark.rows import row

CPU = torch.device("cpu")
PROJECT = Path(__file__).parents[2]
SMALL = Case("small", gaussian(60, 200), k=5, radius=0.8)
KNN = Workload("small", "knn", ("knn", "operator", "step"), of_case(SMALL, "knn"))
RADIUS = Workload("small", "radius", ("operator", "step"), of_case(SMALL, "radius"))


def peer_named(name: str, operator: str = "knn") -> Implementation:
    return next(peer for peer in PEERS if (peer.name, peer.operator) == (name, operator))


def here(peer: Implementation) -> bool:
    return "cpu" in peer.devices and not peer.not_installed()


def without_package(name: str, function: Callable) -> Implementation:
    """A peer with another function, for which nothing is imported."""
    return dataclasses.replace(peer_named(name), find={"knn": function}, imports=())


def bench_config(tmp_path: Path, **values: object) -> BenchConfig:
    """A config for the CPU with few repetitions, writing below ``tmp_path``."""
    few = {"device": "cpu", "budget_s": 0.01, "workloads": ["w1"], "output": str(tmp_path / "r.csv")}
    return BenchConfig(**{**few, **values})


def measure_small(monkeypatch: pytest.MonkeyPatch, config: BenchConfig, *made: Workload) -> list[Row]:
    """Run with these workloads in place of the named ones."""
    monkeypatch.setattr("pointproj.benchmark.run.workloads", lambda *_: iter(made))
    return run_benchmark(config)


def test_rows_of_two_implementations_are_measured_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = bench_config(tmp_path, execution=["eager"], backends=["torch"], peers=["scipy cKDTree"])
    rows = measure_small(monkeypatch, config, KNN)
    measured = [(r.implementation, r.mode, r.status) for r in rows if r.workload == "small"]
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


def test_wrong_result_gets_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    right = peer_named("scipy cKDTree")

    def beyond(inputs: Inputs) -> Nearest:
        return Nearest(None, right.find["knn"](inputs._replace(k=inputs.k + 1)).indices[:, 1:])

    monkeypatch.setattr(peers, "PEERS", [dataclasses.replace(right, name="wrong", find={"knn": beyond})])
    rows = measure_small(monkeypatch, bench_config(tmp_path, execution=["eager"], backends=[]), KNN)
    assert [(r.mode, r.status, r.p50_ms) for r in rows] == [
        (mode, WRONG, None) for mode in ("knn", "operator", "step")
    ]
    assert all(r.parity_error > 1e-2 for r in rows)
    assert "not the reference's result: neighbours" in capsys.readouterr().out


def test_peer_that_raises_or_is_missing_is_a_row_that_says_so(tmp_path, monkeypatch: pytest.MonkeyPatch):
    def broken(*_):
        raise MemoryError("no room for the pairs")

    absent = dataclasses.replace(peer_named("pykdtree"), imports=("no_such_package",))
    missing = "no_such_package cannot be imported: ModuleNotFoundError: No module named 'no_such_package'"
    for peer, modes, expected in (
        (
            without_package("pykdtree", broken),
            ["knn"],
            ("knn", "failed", "MemoryError: no room for the pairs"),
        ),
        (absent, BenchConfig().modes, ("-", MISSING, missing)),
    ):
        monkeypatch.setattr(peers, "PEERS", [peer])
        config = bench_config(tmp_path, execution=["eager"], modes=modes, backends=[])
        (only,) = measure_small(monkeypatch, config, KNN)
        assert (only.implementation, only.p50_ms) == ("pykdtree", None)
        assert (only.mode, only.status, only.note) == expected


def test_clouds_that_cannot_be_made_are_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def too_large(device: torch.device) -> Inputs:
        raise MemoryError("no room for the points")

    config = bench_config(tmp_path, execution=["eager"], backends=["torch"], peers=[])
    made = measure_small(monkeypatch, config, dataclasses.replace(KNN, make_inputs=too_large), KNN)
    assert [(r.implementation, r.mode, r.status) for r in made] == [
        ("torch", "knn", "failed"),
        *[("torch", mode, OK) for mode in ("knn", "operator", "step")],
    ]
    assert made[0].note == "MemoryError: no room for the points"


def test_interrupted_run_keeps_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    config = bench_config(tmp_path, execution=["eager"], backends=["torch"], modes=["knn"])
    monkeypatch.setattr(peers, "PEERS", [without_package("pykdtree", interrupted)])
    with pytest.raises(KeyboardInterrupt):
        measure_small(monkeypatch, config, KNN)
    assert [r.implementation for r in read_rows(tmp_path / "r.csv")] == ["torch"]


def test_a_run_that_was_cut_off_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    only = {"execution": ["eager"], "backends": ["torch"], "peers": [], "started": "2026-01-02"}
    first = measure_small(monkeypatch, bench_config(tmp_path, modes=["knn"], **only), KNN)
    again = measure_small(monkeypatch, bench_config(tmp_path, **only), KNN)
    assert [[row.mode for row in rows] for rows in (first, again)] == [["knn"], ["operator", "step"]]
    assert [row.mode for row in read_rows(tmp_path / "r.csv")] == ["knn", "operator", "step"]
    only["started"] = "2026-01-03"
    assert len(measure_small(monkeypatch, bench_config(tmp_path, **only), KNN)) == 3


def test_workloads_are_measured_in_the_order_asked_for(tmp_path: Path):
    few = {"peers": [], "sizes": [200], "modes": ["aggregate", "knn"], "backends": ["torch"]}
    order = ["host", "scaling"]  # not that of the config's default
    rows = run_benchmark(bench_config(tmp_path, workloads=order, execution=["eager"], **few))
    assert list(dict.fromkeys(row.workload.partition("_")[0] for row in rows)) == order


def test_what_the_minutes_do_not_hold_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    assert run_benchmark(bench_config(tmp_path, workloads=["import", "start"], minutes=1e-9)) == []
    left_out = [message.partition(": ")[2] for message in caplog.messages]
    assert left_out == ["1 rows of import are left out", "6 rows of start are left out"]


def test_time_of_the_import_is_a_row_and_one_that_fails_too(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(start, "IMPORTS", 1)
    (only,) = run_benchmark(bench_config(tmp_path, workloads=["import"]))
    assert (only.implementation, only.mode, only.status, only.repetitions, only.peak_mib) == (
        *("pointproj", "import", OK),
        *(1, None),
    )
    assert 0 < only.p20_ms <= only.p50_ms <= only.p80_ms < 60_000
    monkeypatch.setattr(start, "IMPORT_PROGRAM", "import no_such_package")
    (only,) = run_benchmark(bench_config(tmp_path, workloads=["import"]))
    assert (only.status, only.p50_ms) == ("failed", None)
    assert "the process failed: ModuleNotFoundError: No module named 'no_such_package'" in only.note


# What a call does not return, a compiler does not compute: times would be of less than users get.


@pytest.mark.parametrize("backend", names())
@pytest.mark.parametrize("mode", ["knn", "search"])
def test_compiled_and_eager_calls_return_both_distances_and_indices(backend: str, mode: str, monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    if missing_backend(backend, "cpu", "knn") or (backend == "torch" and mode == "search"):
        pytest.skip("not on this machine")
    inputs = KNN.make_inputs(CPU)
    calls = Calls(backend_implementation(backend, KNN), inputs)
    expected = knn(*inputs.points, 5, backend="torch")
    for execution in ("eager", "compiled"):
        distances, indices = calls.make(mode, execution)()
        torch.testing.assert_close(distances, expected[0], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(indices, expected[1], rtol=0, atol=0)


@pytest.mark.parametrize("peer", [p for p in PEERS if "knn" in p.find], ids=lambda p: p.name)
def test_peers_return_what_they_find(peer: Implementation):
    if not here(peer):
        pytest.skip("not on this machine")
    found = peer.find["knn"](KNN.make_inputs(CPU))
    assert found.indices.shape == found.distances.shape == (60, 5)


@pytest.mark.parametrize("workload", [KNN, RADIUS], ids=lambda w: w.operator)
def test_backends_and_peers_agree_with_the_reference(workload: Workload):
    inputs = workload.make_inputs(CPU)
    expected = Expected(workload, inputs)
    implementations = [p for p in PEERS if p.operator == workload.operator and p.aggregate and here(p)]
    assert {"tutorial torch", "scipy cKDTree"} <= {implementation.name for implementation in implementations}
    for implementation in [backend_implementation("torch", workload), *implementations]:
        calls = Calls(implementation, inputs)
        expected.fill_upstream(calls.upstream, checked_only=True)
        error = expected.error(calls, "operator", "eager", calls.make("operator", "eager")())
        assert error < 1e-5, implementation.name


@pytest.mark.parametrize("workload", [KNN, RADIUS], ids=lambda w: w.operator)
@pytest.mark.parametrize("backend", names())
def test_all_gradients_agree_with_the_reference(workload: Workload, backend: str):
    if missing_backend(backend, "cpu", workload.operator):
        pytest.skip("not on this machine")
    inputs = workload.make_inputs(CPU)
    expected = Expected(workload, inputs)
    calls = Calls(backend_implementation(backend, workload), inputs)
    expected.fill_upstream(calls.upstream, checked_only=True)
    values, *gradients = calls.make("gradients", "eager")()
    assert expected.sums_error("operator", values, *gradients) < 1e-5
    for place, name in enumerate(("features", "query_points", "reference_points", "sigma")):
        changed = [g * 1.01 if i == place else g for i, g in enumerate(gradients)]
        assert expected.sums_error("operator", values, *changed) == pytest.approx(0.01, rel=1e-2), name
    second = calls.make("second", "eager")()
    assert expected.error(calls, "second", "eager", second) < 1e-5
    assert expected.error(calls, "second", "eager", second * 1.01) == pytest.approx(0.01, rel=1e-2)


def test_error_is_that_of_the_changed_value_or_gradient():
    inputs = KNN.make_inputs(CPU)
    expected = Expected(KNN, inputs)
    calls = Calls(backend_implementation("torch", KNN), inputs)
    expected.fill_upstream(calls.upstream, checked_only=True)
    values, gradient = calls.make("operator", "eager")()
    assert expected.sums_error("operator", values * 1.01, gradient) == pytest.approx(0.01, rel=1e-3)
    assert expected.sums_error("operator", values, gradient * 0.98) == pytest.approx(0.02, rel=1e-3)
    assert expected.sums_error("operator", values.masked_fill(values > 1, torch.nan)) == float("inf")


def test_neighbours_may_tie_but_not_repeat_or_be_absent():
    inputs = KNN.make_inputs(CPU)
    expected = Expected(KNN, inputs)
    distances, indices = backend_implementation("torch", KNN).find["knn"](inputs)

    def error(indices: Tensor, distances: Tensor | None = None) -> float:
        found = Nearest(distances, indices)
        return expected.neighbors_error(found, check_distances=distances is not None)

    assert error(indices.flip(1)) == 0.0  # in any order
    for wrong in (indices[3, 0], -1):  # repeated, absent
        changed = indices.clone()
        changed[3, 1] = wrong
        assert error(changed) == float("inf")
    assert error(indices, distances) < 1e-6
    farther = distances.clone()
    farther[3, 4] *= 1.01
    assert error(indices, farther) == pytest.approx(0.01, rel=1e-3)
    assert error(indices, distances * float("nan")) == float("inf")


def test_only_checked_queries_send_a_gradient_to_the_check():
    case = Case("large", gaussian(900, 16_000), k=2, radius=None)
    workload = Workload("large", "knn", ("operator",), of_case(case, "knn"))
    expected = Expected(workload, workload.make_inputs(CPU))
    assert len(expected.checked) == 2**23 // 16_000
    upstream = torch.empty(900, 3)
    expected.fill_upstream(upstream, checked_only=True)
    assert int((upstream != 0).any(1).sum()) == len(expected.checked)
    checked = upstream.clone()
    expected.fill_upstream(upstream, checked_only=False)
    assert int((upstream != 0).any(1).sum()) == 900
    torch.testing.assert_close(upstream[checked != 0], checked[checked != 0], rtol=0, atol=0)


def test_relative_error():
    assert relative_error(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])) == pytest.approx(0.1)
    assert relative_error(torch.ones(2), torch.ones(3)) == float("inf")


def test_all_pairs_that_do_not_fit_into_memory_are_refused():
    problem = of_case(Case("huge", gaussian(1, 1)), "knn")(CPU).problem
    points = problem.reference_points.expand(3_000_000, 3)
    inputs = Inputs(problem._replace(query_points=points, reference_points=points), 4)
    implementation = peer_named("tutorial torch")
    with pytest.raises(NoTime, match=r"would need about 1[\d.e+]+ GiB"):
        Limits(BenchConfig(), CPU).check_pairs(implementation, inputs)


def test_a_call_that_takes_too_long_is_given_up():
    with pytest.raises(NoTime, match=r"given up after 0.05 s"), time_limit(0.05):
        time.sleep(60)
    with time_limit(0.05):
        pass
    time.sleep(0.1)


def test_slow_calls_are_foreseen_from_smaller_clouds_and_other_executions():
    limits = Limits(BenchConfig(slowest_call_s=2.0), CPU)
    limits.remember(row(references=1000, p50_ms=300.0))
    limits.check_growth(row(references=5000))
    limits.check_growth(row(references=10_000, implementation="another"))
    with pytest.raises(NoTime, match="would take about 3 s a call, more than slowest_call_s=2"):
        limits.check_growth(row(references=10_000))
    limits.remember(row(references=10_000, p50_ms=2500.0, execution="eager"))
    limits.check_growth(row(references=10_000, operator="another"))
    with pytest.raises(NoTime, match="would take about 2 s a call"):
        limits.check_growth(row(references=10_000, execution="captured"))


def test_percentiles_are_milliseconds_a_call():
    timing = percentiles([0.001 * i for i in range(1, 12)], calls=3)
    assert timing == pytest.approx((3.0, 6.0, 9.0, 33))


def test_the_hosts_time_has_no_wait_for_the_device_in_it(monkeypatch: pytest.MonkeyPatch):
    now, order = [0.0], []

    def call(what: str, seconds: float) -> None:
        order.append(what)
        now[0] += seconds

    monkeypatch.setattr("pointproj.benchmark.timing.time.perf_counter", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: call("wait", 7.0))
    timing = measure_host(lambda: call("issue", 0.25), torch.device("cuda"), 2.6)
    assert timing == pytest.approx((250.0, 250.0, 250.0, 15))
    assert order == ["wait", *["issue"] * ISSUED_IN_A_ROW] * 3 + ["wait"]
    now[0] = 0.0
    assert measure_host(lambda: call("issue", 0.25), CPU, 0.4).p50_ms == pytest.approx(250.0)


def test_long_calls_are_made_a_few_times_only(monkeypatch: pytest.MonkeyPatch):
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


def test_rows_of_any_library_are_checked_point_by_point():
    workload, batch, *_ = workloads(BenchConfig(workloads=["farthest"]), "cpu")
    points = torch.randn(3, 50, 3, generator=torch.Generator().manual_seed(0))
    inputs = Inputs(Problem(points, points, points), 20)
    expected = Expected(batch, inputs)
    rows = backend_implementation("torch", workload).find["farthest"](inputs)
    assert expected.farthest_error(rows) < 1e-6
    exchanged = rows.clone()
    exchanged[1, [4, 15]] = exchanged[1, [15, 4]]
    assert 0.01 < expected.farthest_error(exchanged) < 1
    repeated = rows.clone()
    repeated[2, 7] = repeated[2, 3]
    assert expected.farthest_error(repeated) == 1.0


def test_a_row_for_each_that_chooses_exactly():
    config = BenchConfig(workloads=["farthest"], backends=["torch", "native", "warp"])
    found = {
        (len(w.make_inputs(CPU).problem.ranges()), e.implementation.name)
        for w in workloads(config, "cuda")
        for e in entries(config, w, "cuda")
    }
    measured = ("torch", "native", "torchbvh", "torch-cluster", "torch-fps")
    assert found == {(n, name) for n in (1, 16) for name in measured}
