"""Which rows a config asks for, and what is answered to one that cannot be."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from pointproj.benchmark import selection, workloads
from pointproj.benchmark.config import BenchConfig, to_bench_config
from pointproj.benchmark.run import plan
from pointproj.config import ConfigError
from tests.benchmark.test_run import KNN

CPU = torch.device("cpu")
PROJECT = Path(__file__).parents[2]


def test_workloads_are_those_asked_for():
    made = workloads.workloads(BenchConfig(workloads=["scaling", "w2"], sizes=[500, 200]), "cpu")
    names = [(w.name, w.make_inputs(CPU).points[1].shape[:-1].numel()) for w in made]
    kinds = ("scaling_uniform", "scaling_clustered", "scaling_surface")
    scaling = [(kind, size) for kind in kinds for size in (200, 500)]
    assert names == [*scaling, ("scaling_batch", 160_000), ("w2", 25_000)]


def test_sixteen_clouds_are_asked_of_whoever_takes_batches():
    config = BenchConfig(workloads=["scaling"], sizes=[200], backends=["torch"])
    first, *_, batch = workloads.workloads(config, "cuda")
    for workload, shape in ((first, (200, 3)), (batch, (16, 10_000, 3))):
        query_points, reference_points = workload.make_inputs(CPU).points
        assert query_points is reference_points  # a cloud that searches itself is one tensor
        assert reference_points.shape == shape
    names = [entry.implementation.name for entry in selection.entries(config, batch, "cuda")]
    assert names == ["torch", "torchbvh", "torch-cluster", "KeOps"]


def test_a_point_of_the_crystal_has_42_neighbours():
    inputs = workloads.crystal_inputs(2000, CPU)
    points = inputs.points[1]
    counts = (torch.cdist(points, points) <= inputs.radius).sum(1)
    assert counts.max() == inputs.k == 43
    assert inputs.capacity >= counts.sum()


def test_surfaces_hold_the_points_asked_for_side_by_side():
    points = workloads.surface(1003)(torch.Generator().manual_seed(0))
    assert points.shape == (1003, 3)
    assert points[:, 0].min() >= -1
    assert points[:, 0].max() <= 19
    assert points[:, 1:].abs().max() <= 1
    assert len(torch.unique((points[:, 0] + 1) // 2)) == 10


def test_captured_needs_cuda():
    with pytest.raises(ConfigError, match="captured needs a CUDA device, and this runs on cpu"):
        selection.executions(BenchConfig(execution=["captured"]), "cpu")
    assert selection.executions(BenchConfig(), "cpu") == ("eager", "compiled")
    assert selection.executions(BenchConfig(), "cuda") == ("eager", "compiled", "captured")


def test_scaling_is_compiled_only_where_asked_for():
    def chosen(**of):
        config = BenchConfig(workloads=["scaling"], sizes=[200], backends=["torch"], peers=[], **of)
        (entry,) = selection.entries(config, next(workloads.workloads(config, "cpu")), "cpu")
        return entry.measurements

    assert chosen() == (("knn", "eager"),)
    assert chosen(execution=["compiled"]) == (("knn", "compiled"),)


def test_rows_that_say_nothing_new_are_left_out_unless_named():
    def chosen(name: str, **of):
        config = BenchConfig(**{"workloads": ["w1"], "backends": [], "peers": [], **of})
        (entry,) = selection.entries(config, next(workloads.workloads(config, "cuda")), "cuda")
        assert entry.implementation.name == name
        return entry.measurements

    ours = chosen("warp", backends=["warp"])
    for mode in ("knn", "operator", "step"):
        assert [execution for of, execution in ours if of == mode] == ["eager", "compiled", "captured"]
    for mode in ("build", "search", "aggregate", "gradients", "forward"):
        assert [execution for of, execution in ours if of == mode] == ["eager", "captured"]
    assert {execution for _, execution in chosen("torch", backends=["torch"])} == {"eager"}
    assert ("aggregate", "compiled") in chosen("torch", backends=["torch"], execution=["compiled"])
    of_peer = chosen("tutorial torch", peers=["tutorial torch"])
    assert {mode for mode, execution in of_peer if execution == "compiled"} == {"forward", "step"}
    w2 = chosen("warp", workloads=["w2"], backends=["warp"])
    assert [m for m in w2 if m[0] == "step"] == [("step", "eager"), ("step", "captured")]
    assert [m for m in w2 if m[0] == "aggregate"] == [("aggregate", "eager")]
    assert ("step", "compiled") in chosen("tutorial torch", workloads=["w2"], peers=["tutorial torch"])
    assert chosen("warp", workloads=["batches"], backends=["warp"]) == (("operator", "eager"),)


def test_implementations_of_readmes_table_come_first():
    config = BenchConfig(workloads=["w1", "w2"])
    for workload in workloads.workloads(config, "cuda"):
        named = [entry.implementation.name for entry in selection.entries(config, workload, "cuda")]
        first = [name for name in selection.FIRST if name in named]
        assert named[: len(first)] == first
        assert {"native", "warp", "tutorial torch", "PhysicsNeMo"} <= {*first}
        assert {"triton", "torch", "torch-cluster"} <= {*named}


def test_what_takes_minutes_comes_last():
    config = BenchConfig(workloads=["scaling", "lists"], backends=["native", "warp"], peers=[])
    parts = plan(config, "cuda")
    assert [(part.workload, part.last) for part in parts if part.last] == [("scaling_clustered", True)]
    assert parts[-1].last


def test_the_hosts_time_is_asked_of_eager_calls():
    config = BenchConfig(workloads=["host"], backends=["warp", "torch"], peers=[])
    made = [*workloads.workloads(config, "cuda")]
    assert [(w.name, w.operator, w.host) for w in made] == [
        ("host_64", "knn", True),
        ("host_64", "radius", True),
        ("host_w1", "knn", True),
    ]
    assert [w.name for w in workloads.workloads(config, "cpu")] == ["host_64", "host_64"]
    rows = [
        (e.implementation.name, *m)
        for e in selection.entries(config, made[2], "cuda")
        for m in e.measurements
    ]
    assert rows == [("warp", mode, "eager") for mode in ("aggregate", "operator", "step")]
    captured = dataclasses.replace(config, execution=["captured"])
    assert [*selection.entries(captured, made[2], "cuda")] == []


def test_unknown_names_say_what_there_is():
    with pytest.raises(ConfigError, match="got wrap; did you mean warp"):
        [*selection.entries(BenchConfig(backends=["wrap"]), KNN, "cpu")]
    with pytest.raises(ConfigError, match="got pykdtre; did you mean pykdtree"):
        [*selection.entries(BenchConfig(peers=["pykdtre"]), KNN, "cpu")]


def test_config_is_checked_as_a_whole():
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
