"""The large cloud of the benchmark: measured alone and in slabs, and compared with the reference in both."""

import torch

from pointproj.benchmark import large, table
from pointproj.benchmark.config import BenchConfig
from pointproj.benchmark.results import read_rows
from pointproj.benchmark.run import run_benchmark
from pointproj.runtime.distributed import SINGLE_PROCESS
from tests.processes import run_together


def measure(processes, folder):
    large.SIZES["cpu"] = (2000, 300)
    wanted = {"device": "cpu", "workloads": ["large"], "backends": ["warp"]}
    rows = run_benchmark(BenchConfig(**wanted, output=str(folder / "r.csv")))
    assert [(row.mode, row.status) for row in rows] == [("aggregate", "ok"), ("operator", "ok")], rows
    assert all(row.parity_error < 1e-5 for row in rows)
    assert {row.repetitions for row in rows} == {large.REPETITIONS}
    assert all(row.device.startswith("2 x ") == (processes.count == 2) for row in rows)


def find_a_wrong_gradient(processes):
    large.SIZES["cpu"] = (2000, 300)
    cloud = large.LargeCloud(processes, torch.device("cpu"), "warp")
    values, gradient = cloud.call("operator")()
    if processes.rank == 1:
        gradient[-1] += 1.0  # most likely near no query that is checked
    assert cloud.error((values, gradient)) > 1e-3


def measure_together(processes, folder):
    find_a_wrong_gradient(processes)
    measure(processes, folder)


def test_a_large_cloud_is_measured_alone_and_in_slabs(tmp_path, monkeypatch):
    monkeypatch.setitem(large.SIZES, "cpu", large.SIZES["cpu"])
    measure(SINGLE_PROCESS, tmp_path)
    alone = read_rows(tmp_path / "r.csv")
    run_together(measure_together, tmp_path)
    together = read_rows(tmp_path / "r.csv")
    assert [row.device.startswith("2 x") for row in (*alone, *together)] == [False, False, True, True]
    assert table.tables([*alone, *together]).count("One cloud of 10^8 points") == 2
