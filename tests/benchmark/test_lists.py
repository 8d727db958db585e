"""The workload of neighbour lists: what libraries return is read as it is, and wrong lists get no time."""

import dataclasses
from pathlib import Path

import pytest
import torch

from pointproj import knn, radius_neighbors
from pointproj.benchmark import list_contenders, lists, table
from pointproj.benchmark.config import BenchConfig
from pointproj.benchmark.list_parity import ExpectedPairs
from pointproj.benchmark.list_peers import LIST_PEERS, ListPeer, Pairs, Question, padded_pairs
from pointproj.benchmark.results import MISSING, OK, WRONG, Row
from pointproj.benchmark.run import run
from pointproj.ops.cases import itself
from tests.benchmark.rows import row

CPU = torch.device("cpu")
SMALL = {
    "lists_uniform": lambda size: itself(lists.uniform(size)),
}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BenchConfig:
    """Few and small clouds, on the CPU, measured shortly."""
    monkeypatch.setattr(lists, "CLOUDS", SMALL)
    few = {"device": "cpu", "workloads": ["lists"], "sizes": [200], "budget_s": 0.01}
    return BenchConfig(**few, execution=["eager"], backends=["torch"], output=str(tmp_path / "r.csv"))


@pytest.fixture
def asked() -> Question:
    """The eight nearest within a radius that holds about as many."""
    points = lists.uniform(150)(torch.Generator().manual_seed(3)).float()
    return Question(points, points, 8, 0.45, 4000)


def padded(asked: Question) -> Pairs:
    found = radius_neighbors(
        asked.query_points, asked.reference_points, asked.radius, max_neighbors=asked.k, backend="torch"
    )
    return padded_pairs(found.indices, found.indices >= 0, found.distances, found.counts)


def peers_of_the_cpu() -> list:
    """Those that are imported quickly, and the others for ``pytest -m peers``."""
    quick = ("scipy cKDTree", "pykdtree")
    return [
        pytest.param(p, id=f"{p.name}-{p.mode}", marks=[] if p.name in quick else pytest.mark.peers)
        for p in LIST_PEERS
        if "cpu" in p.devices
    ]


class TestRun:
    def test_rows_say_what_was_asked_and_what_was_returned(self, config: BenchConfig):
        rows = run(dataclasses.replace(config, peers=["scipy cKDTree"]))
        assert [(r.workload, r.contender, r.mode, r.status) for r in rows] == [
            ("lists_uniform", "torch", "padded", OK),
            ("lists_uniform", "scipy cKDTree", "padded", OK),
            ("lists_uniform", "torch", "csr", OK),
            ("lists_uniform", "scipy cKDTree", "csr", OK),
            ("lists_uniform", "pointproj", "aggregate_padded", OK),
            ("lists_uniform", "pointproj", "aggregate_csr", OK),
        ], [r.note for r in rows]
        assert all(r.parity_error < 1e-5 and r.p50_ms > 0 for r in rows)
        assert [(r.operator, r.queries, r.k, r.channels) for r in rows[::2]] == [
            ("radius", 200, 32, 1),
            ("radius", 200, None, 1),
            ("radius", 200, 32, 25),
        ]
        assert rows[0].radius == rows[5].radius > 0
        assert [r.note for r in rows[:2]] == ["", "no counts"]

    def test_wrong_list_gets_no_time(self, config: BenchConfig, monkeypatch: pytest.MonkeyPatch):
        right = next(p for p in LIST_PEERS if (p.name, p.mode) == ("scipy cKDTree", "padded"))
        wrong = dataclasses.replace(right, function=lambda asked: right.function(asked._replace(k=31)))
        monkeypatch.setattr(list_contenders, "LIST_PEERS", [wrong])
        only = {"backends": [], "modes": ["padded"]}
        (result,) = run(dataclasses.replace(config, **only))
        assert (result.status, result.p50_ms, result.parity_error) == (WRONG, None, float("inf"))

    def test_missing_peer_is_a_row_that_says_so(self, config: BenchConfig, monkeypatch: pytest.MonkeyPatch):
        absent = dataclasses.replace(LIST_PEERS[0], imports=("no_such_package",))
        monkeypatch.setattr(list_contenders, "LIST_PEERS", [absent])
        only = {"backends": [], "modes": ["padded"]}
        (result,) = run(dataclasses.replace(config, **only))
        assert (result.mode, result.execution, result.status) == ("padded", "-", MISSING)
        assert "No module named 'no_such_package'" in result.note

    def test_brute_force_that_takes_too_long_is_foreseen(self, config: BenchConfig):
        only = {"peers": [], "modes": ["csr"], "sizes": [7000], "slowest_call_s": 1e-3}
        (result,) = run(dataclasses.replace(config, **only))
        assert (result.status, result.p50_ms) == ("skipped", None)
        assert "more than slowest_call_s=0.001" in result.note


class TestPlan:
    def test_sizes_and_executions_are_those_of_the_device(self):
        config = BenchConfig(workloads=["lists"], backends=["torch"], peers=[])
        on_cpu, on_cuda = (lists.planned(config, device) for device in ("cpu", "cuda"))
        assert {row.size for row in on_cpu} == {10**4, 10**5}
        assert {row.size for row in on_cuda} == {10**5}
        assert {row.execution for row in on_cpu} == {"eager"}
        assert {row.execution for row in on_cuda} == {"eager", "captured"}
        assert {row.execution for row in on_cuda if row.workload == "lists_surface"} == {"eager"}
        named = lists.planned(dataclasses.replace(config, execution=["captured"]), "cuda")
        assert {row.execution for row in named if row.workload == "lists_surface"} == {"captured"}

    def test_other_workloads_and_modes_plan_nothing(self):
        assert lists.planned(BenchConfig(workloads=["w1"]), "cpu") == []
        assert lists.planned(BenchConfig(workloads=["lists"], modes=["step"]), "cpu") == []

    def test_the_radius_holds_about_as_many_as_are_asked_for(self):
        points = lists.surface(3000)(torch.Generator().manual_seed(0)).float()
        counts = (torch.cdist(points, points) <= lists.radius_of(points)).sum(1)
        assert 29 <= counts.median() <= 35


class TestParity:
    @pytest.mark.parametrize("peer", peers_of_the_cpu())
    def test_peers_agree_with_the_reference(self, asked: Question, peer: ListPeer):
        if peer.missing():
            pytest.skip(peer.missing())
        found = peer.read(peer.function(asked))
        most = None if peer.mode == "csr" else asked.k
        within = {"radius": asked.radius, "most": most}
        assert ExpectedPairs(asked).error(found, **within, nearest=peer.nearest, itself=peer.itself) < 1e-5

    def test_error_is_that_of_the_changed_list(self, asked: Question):
        expected, found = ExpectedPairs(asked), padded(asked)
        within = {"radius": asked.radius, "most": asked.k}
        assert expected.error(found, **within) < 1e-6
        row = int(expected.rows[0])
        place = (found.queries == row).nonzero()[:, 0]
        one_less = torch.arange(len(found.queries)) != place[0]
        assert expected.error(Pairs(*(part[one_less] for part in found[:3])), **within) == float("inf")
        repeated = found.indices.clone()
        repeated[place[0]] = repeated[place[1]]
        assert expected.error(found._replace(indices=repeated), **within) == float("inf")
        absent = found.indices.clone()
        absent[place[0]] = 150
        assert expected.error(found._replace(indices=absent), **within) == float("inf")
        farther = found.distances.clone()
        farther[place[1]] += 0.045
        assert expected.error(found._replace(distances=farther), **within) == pytest.approx(0.1, rel=1e-4)
        miscounted = found.counts.clone()
        miscounted[row] -= 1
        assert expected.error(found._replace(counts=miscounted), **within) == float("inf")

    def test_the_first_met_need_not_be_the_nearest_but_within_the_radius(self, asked: Question):
        expected = ExpectedPairs(asked)
        every = padded(asked._replace(k=150))
        rank = torch.arange(len(every.queries)) - torch.searchsorted(every.queries, every.queries)
        counts = every.counts[every.queries]
        farthest = Pairs(*(part[rank >= counts - asked.k] for part in every[:3]))
        within = {"radius": asked.radius, "most": asked.k}
        assert expected.error(farthest, **within, nearest=False) < 1e-6
        assert expected.error(farthest, **within) > 0.05
        distances, indices = knn(asked.query_points, asked.reference_points, asked.k, backend="torch")
        beyond = padded_pairs(indices, distances < torch.inf, distances)
        assert expected.error(beyond, radius=0.2, most=asked.k, nearest=False) == float("inf")

    def test_a_library_may_leave_out_the_point_itself(self, asked: Question):
        expected, every = ExpectedPairs(asked), padded(asked._replace(k=150))
        others = every.queries != every.indices
        without = Pairs(*(part[others] for part in every[:3]), every.counts - 1)
        all_within = {"radius": asked.radius, "most": None}
        assert expected.error(without, **all_within, itself=False) < 1e-6
        assert expected.error(without, **all_within) == float("inf")
        assert expected.error(every, **all_within, itself=False) == float("inf")


class TestTable:
    def rows(self) -> list[Row]:
        uniform = {"workload": "lists_uniform", "operator": "radius", "radius": 0.08, "queries": 10**5}
        return [
            row(**uniform, mode="padded", k=32, execution="eager", p50_ms=0.45),
            row(**uniform, mode="padded", k=32, p50_ms=0.2),
            row(**uniform, mode="csr", k=None, execution="eager", p50_ms=0.6),
            row(
                **uniform,
                **{"mode": "padded", "k": 32, "execution": "eager", "p50_ms": 9.0},
                **{"contender": "PhysicsNeMo", "kind": "peer", "note": "the first met"},
            ),
            row(
                **uniform, mode="aggregate_csr", k=None, execution="eager", contender="pointproj", p50_ms=1.5
            ),
        ]

    def test_lists_and_what_they_are(self):
        text = table.tables(self.rows())
        assert "|  | uniform 10^5, 32 nearest | uniform 10^5, all |" in text
        assert "| **warp**, captured | 0.2 |  |" in text
        assert "| **warp**, eager | 0.45 | 0.6 |" in text
        assert "| PhysicsNeMo, eager | 9 |  |" in text
        assert "|  | uniform 10^5, CSR |" in text
        assert "| **pointproj**, eager | 1.5 |" in text
        assert "- PhysicsNeMo, 32 nearest: the first met" in text
