"""Ours beside what is installed: a table and a picture of few rows."""

import subprocess

import torch

from pointproj.benchmark import league, quick, quick_command
from pointproj.benchmark.config import BenchConfig
from pointproj.benchmark.results import SKIPPED, Row
from pointproj.benchmark.run import plan
from pointproj.benchmark.standings import standings
from tests.benchmark.rows import row

ROWS = [
    row(implementation="scipy cKDTree", kind="peer", mode="knn", execution="eager", p50_ms=43.4),
    row(implementation="native", mode="knn", execution="eager", p50_ms=9.5),
    row(implementation="native", mode="knn", execution="captured", p50_ms=8.8),
    row(
        implementation="native", mode="step", status=SKIPPED, p50_ms=None, note="would take about 9 s a call"
    ),
    row(implementation="native", workload="w2", mode="forward", p50_ms=1.0),
]


def test_the_fastest_execution_of_each_implementation_is_shown():
    first, _, step, *_ = quick.TASKS
    assert quick.table(ROWS) == [
        "| milliseconds | **native** | scipy cKDTree |",
        "| --- | ---: | ---: |",
        f"| {first} | 8.8 | 43.4 |",
        f"| {step} | too slow |  |",
    ]


def test_the_command_measures_what_is_installed(tmp_path, monkeypatch, capsys):
    configs = []

    def measured(config: BenchConfig, *, interleaved: list[str]) -> list[Row]:
        configs.append(config)
        parts = [part.workload for part in plan(config, "cpu", interleaved=interleaved)]
        shown = ["w1", "lists_uniform", "w2"]
        assert parts[:6] == shown * 2  # the first implementation of each task, then the second
        assert {*parts} == {*shown}
        return ROWS

    monkeypatch.setattr(quick, "run_benchmark", measured)
    assert quick_command.main(["--device", "cpu", "--output", str(tmp_path), "--minutes", "3"]) == 0
    (config,) = configs
    assert (config.execution, config.minutes) == (["eager"], 3.0)
    assert "scipy cKDTree" in config.peers
    assert not {"cuML", "no such library"} & {*config.peers}
    assert "native" in config.backends
    assert "triton" not in config.backends
    shown = capsys.readouterr().out
    assert "8.8" in shown
    assert "All results agree with the reference: the largest error is 1.5e-07" in shown
    assert (tmp_path / "benchmark.png").read_bytes()[:4] == b"\x89PNG"
    monkeypatch.setattr(quick, "run_benchmark", lambda config, interleaved: ROWS[3:4])
    assert quick_command.main(["--device", "cpu", "--output", str(tmp_path)]) == 1


def test_the_league_begins_with_what_we_lose():
    lost = row(implementation="scipy cKDTree", kind="peer", mode="step", p50_ms=0.07)
    alone = row(implementation="native", workload="w2", p50_ms=1.0)
    rows = [*ROWS, row(mode="step"), lost, alone]
    heads = ["| measurement | ours, ms | fastest other, ms | theirs / ours |", "| --- | ---: | ---: | ---: |"]
    of = "27,000 among 10^5, k = 7"
    loses = f"| `w1` step, captured, {of} | warp 0.28 | scipy cKDTree 0.07 | 0.25 |"
    wins = f"| `w1` knn, eager, {of} | native 9.5 | scipy cKDTree 43.4 | 4.57 |"
    assert standings(rows) == [*heads, loses, wins]
    assert standings(rows, losses=True) == [*heads, loses]
    assert standings([alone]) == []
    assert "- native, `w1` step: skipped, would take about 9 s a call" in league.page(rows)


def test_libraries_are_installed_one_by_one_and_only_if_the_user_agrees(monkeypatch, capsys):
    commands = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess:
        commands.append(command)
        failed = "broken" in command
        return subprocess.CompletedProcess(command, int(failed), "", "no wheel" if failed else "")

    monkeypatch.setattr(league.subprocess, "run", run)
    league.install(["one", "broken"], lambda text: False)
    assert commands == []
    league.install(["one", "broken"], lambda text: "one, broken" in text)
    assert [command[5] for command in commands] == ["one", "broken"]
    assert f"torch=={torch.__version__}" in commands[0]
    assert capsys.readouterr().out == "one: installed\nbroken: not installed: no wheel\n"
