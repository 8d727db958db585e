"""Two result files are compared row by row."""

import subprocess
from pathlib import Path

import pytest

from pointproj.benchmark import compare, revisions
from pointproj.benchmark.results import FAILED, OK, write_rows
from tests.benchmark.rows import row

W2 = {"workload": "w2", "operator": "radius", "k": None, "radius": 0.1, "implementation": "native"}
BEFORE = [
    row(p50_ms=1.0),
    row(mode="forward", p50_ms=2.0),
    row(**W2, p50_ms=4.0),
    row(mode="knn", p50_ms=0.5),
    row(mode="build", p50_ms=0.1),
    row(mode="search", status=FAILED, p50_ms=None),
]
AFTER = [
    row(**{"commit": "def", "date": "2026-02-03T00:00:00+00:00", **of})
    for of in (
        {**W2, "p50_ms": 2.0},
        {"mode": "forward", "p50_ms": 2.06},
        {"p50_ms": 1.1},
        {"mode": "knn", "status": FAILED, "p50_ms": None, "note": "OutOfMemoryError"},
        {"mode": "operator", "p50_ms": 0.2},
    )
]


def test_the_slowest_row_comes_first_and_rows_that_lost_their_time_are_listed():
    text = compare.compared(BEFORE, AFTER).text
    shown, _, lost = text.partition("| row |")[2].partition("Timed before, but not after:")
    assert shown.strip().splitlines()[2:] == [
        "| w1 knn, 100,000 points, warp, step, captured | 1 | 1.1 | 1.100 | slower |",
        "| w1 knn, 100,000 points, warp, forward, captured | 2 | 2.06 | 1.030 |  |",
        "| w2 radius, 100,000 points, native, step, captured | 4 | 2 | 0.500 |  |",
    ]
    assert lost.strip().splitlines() == [
        "- w1 knn, 100,000 points, warp, knn, captured (failed: OutOfMemoryError)",
        "- w1 knn, 100,000 points, warp, build, captured (no such row)",
    ]
    for line in (
        *("| w1, warp | 2 | 1.064 | 1.100 | 1 |", "| w2, native | 1 | 0.500 | 0.500 | 0 |"),
        *("| all | 3 | 0.827 | 1.100 | 1 |", "Before: NVIDIA H200, commit abc, 2026"),
        "After: NVIDIA H200, commit def, 2026",
    ):
        assert line in text


def test_rows_differ_by_every_size_and_are_of_one_commit():
    for change in ({"references": 10}, {"queries": 10}, {"k": 8}, {"dtype": "float64"}, {"channels": 3}):
        with pytest.raises(
            ValueError, match="expected rows with a time in both files; of 1 before and 1 after"
        ):
            compare.compared([row()], [row(**change)])
    with pytest.raises(ValueError, match="expected results of one run, got those of commit abc"):
        compare.compared([row(), row(mode="knn", commit="def")], [row()])


def test_the_command_prints_the_comparison(tmp_path: Path, capsys: pytest.CaptureFixture):
    files = [str(tmp_path / name) for name in ("before.csv", "after.csv")]
    write_rows(files[0], BEFORE)
    write_rows(files[1], AFTER)
    assert compare.main(files) == 1
    assert compare.main(files[:1] * 2) == 0
    capsys.readouterr()
    compare.main(files)
    assert capsys.readouterr().out == compare.compared(BEFORE, AFTER).text + "\n"
    with pytest.raises(SystemExit):
        compare.main([files[0], str(tmp_path / "absent.csv")])
    assert "absent.csv" in capsys.readouterr().err


def test_a_commit_is_measured_in_a_folder_and_compared(tmp_path: Path, monkeypatch, capsys):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    bench = "import shutil, sys; shutil.copy({!r}, sys.argv[-1].removeprefix('output='))"
    subprocess.run([*git, "init", "-q"], check=True)
    for name, rows in (("before", BEFORE), ("after", AFTER)):
        write_rows(str(tmp_path / name), rows)
        (tmp_path / "bench.py").write_text(bench.format(str(tmp_path / name)))
        subprocess.run([*git, "add", "bench.py"], check=True)
        subprocess.run([*git, "commit", "-qm", name], check=True)
    monkeypatch.setattr(revisions, "PROJECT", tmp_path)
    assert compare.main(["base=HEAD~1", "workloads=[w1]"]) == 1
    assert capsys.readouterr().out == compare.compared(BEFORE, AFTER).text + "\n"
    assert compare.main(["--base", "HEAD"]) == 0
    with pytest.raises(revisions.RevisionError, match="there is no commit 'none'"):
        compare.main(["--base", "none"])
    with pytest.raises(SystemExit):
        compare.main(["one.csv"])


def test_of_two_runs_of_a_commit_the_lesser_times_count(capsys):
    first = [row(p50_ms=1.0), row(mode="knn", p50_ms=3.0), row(mode="build", status=FAILED, p50_ms=None)]
    later = {"date": "2026-02-03T00:00:00+00:00"}
    second = [row(p50_ms=1.5, **later), row(mode="knn", p50_ms=2.0, **later), row(mode="build", p50_ms=4.0)]
    least = revisions.least(first, second)
    assert [(of.mode, of.status, of.p50_ms) for of in least] == [
        ("step", OK, 1),
        ("knn", OK, 2),
        ("build", OK, 4),
    ]
    assert {of.date for of in least} == {row().date}
    assert "differ by up to 50%" in capsys.readouterr().err
