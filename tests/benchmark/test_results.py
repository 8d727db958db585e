"""The file of results: rows survive it, it is of one commit, and it is never half written."""

import subprocess
from pathlib import Path

import pytest
import torch

from pointproj import machine
from pointproj.benchmark.results import COLUMNS, SKIPPED, ResultsFile, read_rows, require_one_run
from tests.benchmark.rows import row

CPU = torch.device("cpu")


def test_rows_survive_the_file(tmp_path: Path):
    rows = [row(), row(mode="knn", status=SKIPPED, p50_ms=None, note='a "quoted", note\nof two lines')]
    file = ResultsFile(tmp_path / "new" / "r.csv")
    for r in rows:
        file.add(r)
    assert read_rows(tmp_path / "new" / "r.csv") == rows
    assert [*tmp_path.rglob("*")] == [tmp_path / "new", tmp_path / "new" / "r.csv"]


def test_processes_of_one_run_share_a_file_and_one_that_does_not_write_leaves_it(tmp_path: Path):
    first = ResultsFile(tmp_path / "r.csv")
    first.add(row())
    first.add(row(mode="forward", p50_ms=0.1))
    ResultsFile(tmp_path / "r.csv").add(row(p50_ms=0.2))
    ResultsFile(tmp_path / "r.csv", writes=False).add(row(commit="def"))
    kept = {(r.mode, r.commit): r.p50_ms for r in read_rows(tmp_path / "r.csv")}
    assert kept == {("forward", "abc"): 0.1, ("step", "abc"): 0.2}


@pytest.mark.parametrize("change", [{"commit": "def"}, {"date": "2026-02-03T00:00:00+00:00"}], ids=str)
def test_another_commit_or_run_starts_a_new_file_and_keeps_the_old_one(change, tmp_path, caplog):
    first = ResultsFile(tmp_path / "r.csv")
    first.add(row())
    first.add(row(mode="forward"))
    second = ResultsFile(tmp_path / "r.csv")
    second.add(row(mode="forward", **change))
    second.add(row(mode="knn", **change))
    assert read_rows(tmp_path / "r.csv") == [row(mode="forward", **change), row(mode="knn", **change)]
    assert read_rows(tmp_path / "r.csv.old") == [row(), row(mode="forward")]
    (line,) = caplog.messages
    assert "r.csv has results of commit abc at 2026-01-02" in line
    assert "a new file is started" in line


def test_rows_of_several_runs_are_not_shown_beside_each_other():
    require_one_run([row(), row(mode="knn"), row(device="another GPU", commit="def")])
    with pytest.raises(ValueError, match="NVIDIA H200: expected results of one run, got those of commit abc"):
        require_one_run([row(), row(mode="knn", date="2026-02-03T00:00:00+00:00")])
    with pytest.raises(ValueError, match=r"got those of commit abc at .*, commit def at"):
        require_one_run([row(), row(mode="knn", commit="def")])


def test_new_results_do_not_change_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
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


def test_a_file_of_something_else_is_left_alone(tmp_path: Path):
    path = tmp_path / "r.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"expected the columns workload, .*; got a, b"):
        ResultsFile(path)
    assert path.read_text() == "a,b\n1,2\n"


def test_columns_name_machine_versions_commit_and_date():
    assert {"device", "driver", "torch", "cuda", "warp", "python", "commit", "date"} <= set(COLUMNS)
    assert machine.slug("NVIDIA H200") == "nvidia-h200"
