"""The workload of neighbour lists: what libraries return is read as it is, and wrong lists get no time."""

import dataclasses
from functools import partial
from pathlib import Path

import pytest
import torch

from pointproj import knn, radius_neighbors
from pointproj.benchmark import table
from pointproj.benchmark.cases import Problem
from pointproj.benchmark.config import BenchConfig
from pointproj.benchmark.implementations import FoundPairs, Implementation, padded_pairs
from pointproj.benchmark.parity import Expected
from pointproj.benchmark.peers import PEERS
from pointproj.benchmark.results import OK
from pointproj.benchmark.run import run_benchmark
from pointproj.benchmark.selection import entries
from pointproj.benchmark.workloads import (
    OF_LISTS,
    Inputs,
    Workload,
    list_inputs,
    radius_of,
    surface,
    uniform,
    workloads,
)
from tests.benchmark.rows import row

CPU = torch.device("cpu")
ANY = Implementation("any", "", {})


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BenchConfig:
    """Few and small clouds, on the CPU, measured shortly."""

    def small(config: BenchConfig, device_type: str):
        for size in config.sizes:
            yield Workload("lists_uniform", "radius", OF_LISTS, partial(list_inputs, uniform(size)))

    monkeypatch.setattr("pointproj.benchmark.run.workloads", small)
    few = {"device": "cpu", "workloads": ["lists"], "sizes": [200], "budget_s": 0.01}
    return BenchConfig(**few, execution=["eager"], backends=["torch"], output=str(tmp_path / "r.csv"))


@pytest.fixture
def inputs() -> Inputs:
    """The eight nearest within a radius that holds about as many."""
    points = uniform(150)(torch.Generator().manual_seed(3)).float()
    return Inputs(Problem(points, points, points), 8, 0.45, capacity=4000)


def expected_of(inputs: Inputs) -> Expected:
    return Expected(Workload("lists_uniform", "radius", ("padded",), lambda device: inputs), inputs)


def padded(inputs: Inputs) -> FoundPairs:
    found = radius_neighbors(*inputs.points, inputs.radius, max_neighbors=inputs.k, backend="torch")
    return padded_pairs(found.indices, found.indices >= 0, found.distances, found.counts)


def peers_of_the_cpu() -> list:
    """Those that are imported quickly, and the others for ``pytest -m peers``."""
    quick = ("scipy cKDTree", "pykdtree")
    return [
        pytest.param(p, id=f"{p.name}-{p.modes[0]}", marks=[] if p.name in quick else pytest.mark.peers)
        for p in PEERS
        if "cpu" in p.devices and p.read
    ]


def test_rows_say_what_was_asked_and_what_was_returned(config: BenchConfig):
    rows = run_benchmark(dataclasses.replace(config, peers=["scipy cKDTree"]))
    assert [(r.workload, r.implementation, r.mode, r.status) for r in rows] == [
        ("lists_uniform", *of, OK)
        for of in (
            *(("torch", "padded"), ("torch", "csr"), ("scipy cKDTree", "padded"), ("scipy cKDTree", "csr")),
            *(("pointproj", "aggregate_padded"), ("pointproj", "aggregate_csr")),
        )
    ], [r.note for r in rows]
    assert all(r.parity_error < 1e-5 and r.p50_ms > 0 for r in rows)
    assert [(r.operator, r.queries, r.k, r.channels) for r in rows[:2] + rows[4:5]] == [
        ("radius", 200, 32, 1),
        ("radius", 200, None, 1),
        ("radius", 200, 32, 25),
    ]
    assert rows[0].radius == rows[5].radius > 0
    assert [r.note for r in rows[1:3]] == ["", "no counts"]


def test_brute_force_that_takes_too_long_is_foreseen(config: BenchConfig):
    only = {"peers": [], "modes": ["csr"], "sizes": [7000], "slowest_call_s": 1e-3}
    (result,) = run_benchmark(dataclasses.replace(config, **only))
    assert (result.status, result.p50_ms) == ("skipped", None)
    assert "more than slowest_call_s=0.001" in result.note


def test_sizes_and_executions_are_those_of_the_device():
    config = BenchConfig(workloads=["lists"], backends=["torch", "native"], peers=[])

    def executions(config: BenchConfig, device: str, name: str) -> set[str]:
        of = next(w for w in workloads(config, device) if w.name == name)
        rows = [e.measurements for e in entries(config, of, device) if e.implementation.name == "native"]
        return {execution for measurements in rows for _, execution in measurements}

    assert [w.name for w in workloads(config, "cuda")] == [
        *("lists_uniform", "lists_surface", "lists_crowded", "lists_crowded"),
        *("lists_crystal", "lists_crystal", "lists_atoms"),
    ]
    assert executions(config, "cuda", "lists_uniform") == {"eager", "captured"}
    assert executions(config, "cuda", "lists_surface") == {"eager"}
    assert executions(config, "cpu", "lists_uniform") == {"eager"}
    named = dataclasses.replace(config, execution=["captured"])
    assert executions(named, "cuda", "lists_surface") == {"captured"}


def test_the_radius_holds_about_as_many_as_are_asked_for():
    points = surface(3000)(torch.Generator().manual_seed(0)).float()
    counts = (torch.cdist(points, points) <= radius_of(points)).sum(1)
    assert 29 <= counts.median() <= 35


@pytest.mark.parametrize("peer", peers_of_the_cpu())
def test_peers_agree_with_the_reference(inputs: Inputs, peer: Implementation):
    if peer.not_installed():
        pytest.skip(peer.not_installed())
    ((mode, find),) = peer.find.items()
    assert expected_of(inputs).pairs_error(mode, peer.read(find(inputs)), peer) < 1e-5


def test_error_is_that_of_the_changed_list(inputs: Inputs):
    expected, found = expected_of(inputs), padded(inputs)

    def error(found: FoundPairs) -> float:
        return expected.pairs_error("padded", found, ANY)

    assert error(found) < 1e-6
    row = int(expected.rows[0][0])
    one, other = (found.queries == row).nonzero()[:2, 0]
    one_less = torch.arange(len(found.queries)) != one
    assert error(FoundPairs(*(part[one_less] for part in found[:3]))) == float("inf")
    for wrong in (found.indices[other], 150):  # repeated, absent
        indices = found.indices.index_fill(0, one, int(wrong))
        assert error(found._replace(indices=indices)) == float("inf")
    farther = found.distances.clone()
    farther[other] += 0.045
    assert error(found._replace(distances=farther)) == pytest.approx(0.1, rel=1e-4)
    miscounted = found.counts.clone()
    miscounted[row] -= 1
    assert error(found._replace(counts=miscounted)) == float("inf")


def test_the_first_met_need_not_be_the_nearest_but_within_the_radius(inputs: Inputs):
    every = padded(inputs._replace(k=150))
    rank = torch.arange(len(every.queries)) - torch.searchsorted(every.queries, every.queries)
    counts = every.counts[every.queries]
    farthest = FoundPairs(*(part[rank >= counts - inputs.k] for part in every[:3]))
    any_within = dataclasses.replace(ANY, nearest=False)
    expected = expected_of(inputs)
    assert expected.pairs_error("padded", farthest, any_within) < 1e-6
    assert expected.pairs_error("padded", farthest, ANY) > 0.05
    distances, indices = knn(*inputs.points, inputs.k, backend="torch")
    beyond = padded_pairs(indices, distances < torch.inf, distances)
    nearer = expected_of(inputs._replace(radius=0.2))
    assert nearer.pairs_error("padded", beyond, any_within) == float("inf")


def test_a_library_may_leave_out_the_point_itself(inputs: Inputs):
    expected, every = expected_of(inputs), padded(inputs._replace(k=150))
    others = every.queries != every.indices
    without = FoundPairs(*(part[others] for part in every[:3]), every.counts - 1)
    leaves_out = dataclasses.replace(ANY, itself=False)
    assert expected.pairs_error("csr", without, leaves_out) < 1e-6
    assert expected.pairs_error("csr", without, ANY) == float("inf")
    assert expected.pairs_error("csr", every, leaves_out) == float("inf")


def test_lists_and_what_they_are():
    uniform = {"workload": "lists_uniform", "operator": "radius", "radius": 0.08, "queries": 10**5}
    physicsnemo = {"implementation": "PhysicsNeMo", "kind": "peer", "note": "the first met"}
    text = table.tables(
        [
            row(**uniform, mode="padded", k=32, execution="eager", p50_ms=0.45),
            row(**uniform, mode="padded", k=32, p50_ms=0.2),
            row(**uniform, mode="csr", k=None, execution="eager", p50_ms=0.6),
            row(**uniform, **physicsnemo, mode="padded", k=32, execution="eager", p50_ms=9.0),
            row(
                **{**uniform, "mode": "aggregate_csr", "k": None, "execution": "eager"},
                implementation="pointproj",
                p50_ms=1.5,
            ),
        ]
    )
    assert "|  | uniform 10^5, 32 nearest | uniform 10^5, all |" in text
    assert "| **warp**, captured | 0.2 |  |" in text
    assert "| **warp**, eager | 0.45 | 0.6 |" in text
    assert "| PhysicsNeMo, eager | 9 |  |" in text
    assert "|  | uniform 10^5, CSR |" in text
    assert "| **pointproj**, eager | 1.5 |" in text
    assert "- PhysicsNeMo, 32 nearest: the first met" in text
