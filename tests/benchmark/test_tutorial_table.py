"""The tutorial's table: its lines can be measured, and stand in the README's tables."""

import pytest
import torch

from pointproj.benchmark import table
from pointproj.benchmark.config import WITH_RMM, BenchConfig
from pointproj.benchmark.recorder import Recorder
from pointproj.benchmark.results import ResultsFile
from pointproj.benchmark.run import run_benchmark
from pointproj.benchmark.selection import entries, executions
from pointproj.benchmark.tutorial import LINES, command
from pointproj.benchmark.workloads import workloads
from pointproj.runtime.rmm_memory import AllocatorUnavailable
from tests.benchmark.rows import row
from tests.configs import bench_config_of


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.label)
def test_every_line_is_one_implementation_in_one_execution(line, tmp_path):
    program, *arguments = command(line, ["output=x.csv"])[1:]
    assert program.endswith("bench.py")
    config = bench_config_of(*arguments)
    assert (config.output, config.gpu_memory) == ("x.csv", line.gpu_memory)
    (workload,) = workloads(config, "cuda")
    (entry,) = entries(config, workload, "cuda")
    assert entry.implementation.name == line.implementation
    recorder = Recorder(config, torch.device("cpu"), {}, ResultsFile(tmp_path / "x.csv"))
    of = {"workload": "w1", "operator": "knn", "mode": "step", "queries": 1, "references": 1}
    blank = recorder.blank(**of, implementation=line.implementation)
    assert blank.implementation == line.implementation + (WITH_RMM if line.gpu_memory == "rmm" else "")
    assert entry.measurements == (("forward", line.execution), ("step", line.execution))


def test_in_rmms_memory_graphs_are_captured_if_asked_for():
    assert executions(BenchConfig(gpu_memory="rmm"), "cuda") == ("eager", "compiled")
    assert executions(BenchConfig(gpu_memory="rmm", execution=["captured"]), "cuda") == ("captured",)


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_rmm_without_a_gpu_is_refused_before_anything_is_measured(tmp_path):
    with pytest.raises(AllocatorUnavailable, match="finds no GPU"):
        run_benchmark(BenchConfig(gpu_memory="rmm", output=str(tmp_path / "x.csv")))
    assert not any(tmp_path.iterdir())


def test_lines_stand_in_the_tutorials_order():
    peer = {"implementation": "cuML + RMM", "kind": "peer", "execution": "eager"}
    rows = [
        row(implementation="cuml + RMM", execution="compiled", mode="step", p50_ms=11.5, peak_mib=99.0),
        row(implementation="cuML", kind="peer", execution="eager", mode="forward", p50_ms=9.9),
        row(**peer, mode="step", p50_ms=10.5, peak_mib=77.0),
    ]
    text = table.tables(rows)
    section = text.partition("reproduced, and ours below it\n")[2].partition("\n\n### Network")[0]
    assert section.strip().splitlines()[2:] == [
        "| cuML | 9.9 |  |  |",
        "| cuML + RMM |  | 10.5 | 77 |",
        "| **`backend=cuml allocator=rmm compile=true`** |  | 11.5 | 99 |",
    ]
    assert "reproduced" not in table.tables([row(device="some CPU", driver="", execution="eager")])
