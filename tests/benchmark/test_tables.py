"""Tables and plots of the benchmark need its file alone."""

import re
from pathlib import Path

import pytest

from pointproj.benchmark import plots, table
from pointproj.benchmark.results import MISSING, WRONG, Row, write_rows
from tests.benchmark.rows import row

ROWS = [
    row(),
    row(mode="forward", p50_ms=0.123456),
    row(workload="w2", operator="radius", k=None, radius=0.1, execution="eager", p50_ms=123.4),
    row(implementation="tutorial torch", kind="peer", execution="eager", p50_ms=87.65, peak_mib=40_960.2),
    row(implementation="cuML", kind="peer", status=WRONG, p50_ms=None, execution="eager"),
    row(
        **{"implementation": "KeOps", "kind": "peer", "mode": "-", "execution": "-"},
        **{"status": MISSING, "p50_ms": None, "note": "no"},
    ),
    row(workload="scaling_uniform", mode="knn", references=10_000, p50_ms=0.5, execution="eager"),
    row(workload="scaling_uniform", mode="knn", references=10_000, p50_ms=0.05),
    row(workload="scaling_surface", mode="knn", references=10_000_000, p50_ms=9.87),
    row(workload="scaling_uniform", mode="knn", references=10**5, status="failed", note="OutOfMemoryError"),
    row(workload="scaling_batch", mode="knn", references=160_000, clouds=16, p50_ms=0.23),
]


def test_cells():
    text = table.tables(ROWS)
    for line in (
        "| **warp**, captured | 0.123 | 0.28 |  |  | 123 |",
        "| **warp**, eager |  |  | 123 |  |  |",
        "| tutorial torch, eager |  | 87.7 |  |  | 40,960 |",
        "| cuML, eager |  | wrong |",
        "|  | uniform 10^4 | uniform 10^5 | surface 10^7 | 16 of 10^4 |",
        "| **warp**, captured | 0.05 | out of memory | 9.87 | 0.23 |",
        "| **warp**, eager | 0.5 |  |  |  |",
        "Not measured here: KeOps (no).",
        ": torch 2.11, cuda 13.0, warp 1.19, python 3.12.3, driver 580.1\n",
    ):
        assert line in text
    assert text.startswith("## NVIDIA H200\n\n- commit abc, 2026-01-02 ")
    blocks = re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE)
    assert len(blocks) == 3
    for block in blocks:  # as many cells in every line
        assert len({line.count("|") for line in block.splitlines()}) == 1


def test_the_page_begins_with_what_another_library_does_faster():
    lost = row(implementation="cuML", kind="peer", mode="forward", p50_ms=0.1)
    of = "`w1` forward, captured, 27,000 among 10^5, k = 7"
    page = table.page([*ROWS, lost])
    assert f"| {of} | warp 0.123 | cuML 0.1 | 0.81 |" in page[: page.index("\n## NVIDIA H200")]
    newer = {"commit": "def", "date": "2026-02-03T00:00:00+00:00"}
    won = [row(mode="forward", p50_ms=0.05, **newer), row(**{**vars(lost), **newer})]
    assert of not in table.page([*ROWS, lost], won)  # the newest run counts


def test_the_page_is_printed_or_written(tmp_path: Path, capsys: pytest.CaptureFixture):
    write_rows(tmp_path / "r.csv", ROWS)
    table.main([str(tmp_path / "r.csv")])
    assert capsys.readouterr().out == table.page(ROWS)
    table.main([str(tmp_path / "r.csv"), "--output", str(tmp_path / "tables.md")])
    assert (tmp_path / "tables.md").read_text() == table.page(ROWS)


def test_rows_of_two_commits_are_not_shown_together(tmp_path: Path, capsys: pytest.CaptureFixture):
    two = [row(), row(mode="forward", commit="def")]
    write_rows(tmp_path / "r.csv", two)
    write_rows(tmp_path / "tables.md", [])
    before = (tmp_path / "tables.md").read_bytes()
    for show in (table.main, plots.main):
        with pytest.raises(SystemExit):
            show([str(tmp_path / "r.csv")])
        assert "expected results of one run, got those of commit abc" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        table.main([str(tmp_path / "r.csv"), "--output", str(tmp_path / "tables.md")])
    assert (tmp_path / "tables.md").read_bytes() == before
    assert table.tables([row(), row(commit="def", device="another GPU")]).count("commit") == 2


def test_a_device_has_one_table_of_a_kind_with_the_newest_runs():
    newer = {"commit": "def", "date": "2026-02-03T04:05:06+00:00"}
    old = [row(p50_ms=1.0), row(execution="eager", p50_ms=2.0), row(implementation="native", p50_ms=3.0)]
    new = [row(**newer, p50_ms=4.0), row(**newer, workload="import", mode="import", p50_ms=5.0)]
    text = table.tables(old, new)
    assert text.count("### Network, milliseconds") == 1
    assert "| **warp**, captured |  | 4 |  |  | 123 |" in text
    assert "| **native**, captured |  | 3 |  |  | 123 |" in text
    assert "**warp**, eager" not in text  # of the older run, which has warp's other execution too
    assert "Results of commit def, 2026-02-03 04:05; native of commit abc, 2026-01-02 " in text
    assert text.index("- commit def") < text.index("- commit abc")
    assert text == table.tables(new, old)


def test_devices_with_the_newest_results_come_first():
    def run_of(device: str, day: int, **columns: str) -> list[Row]:
        return [row(device=device, date=f"2026-01-0{day}T00:00:00+00:00", **columns)]

    text = table.tables(
        run_of("4 x NVIDIA H100", 4), run_of("a CPU", 5, driver=""), run_of("H200", 2), run_of("H100", 3)
    )
    headings = [line for line in text.splitlines() if line.startswith("## ")]
    assert headings == ["## H100", "## H200", "## 4 x NVIDIA H100", "## a CPU"]


def test_the_hosts_time_all_gradients_and_the_first_step_are_tables():
    host = {"workload": "host_64", "execution": "eager", "mode": "operator"}
    start = {"workload": "start", "implementation": "default", "mode": "first_step"}
    text = table.tables(
        [
            row(mode="gradients", p50_ms=0.574),
            row(mode="knn", p50_ms=0.1),
            row(mode="search", execution="eager", p50_ms=0.2),
            row(**host, p50_ms=0.3),
            row(**host, operator="radius", p50_ms=0.4),
            row(**start, execution="cold", p50_ms=20_123.0),
            row(**start, execution="warm", p50_ms=9_876.0),
            row(
                workload="gino", implementation="pointproj", references=10**4, execution="eager", p50_ms=20.0
            ),
            row(workload="import", implementation="pointproj", mode="import", p50_ms=34.42),
        ]
    )
    assert "| **warp**, captured |  |  | 0.574 |" in text
    assert "| **warp**, captured | 0.1 |  |" in text
    assert "| **warp**, eager |  | 0.2 |" in text
    assert "| **warp** |  | 0.3 |  |  | 0.4 |  |  |  |  |" in text
    assert "| **default** | 20.1 | 9.9 |" in text
    assert "|  | GINO, 10^4 points |" in text
    assert "`from pointproj import knn` in a new process" in text
    assert "| **pointproj** | 34.4 |" in text


def test_the_readmes_table_is_written_as_a_whole(tmp_path: Path, capsys: pytest.CaptureFixture):
    write_rows(tmp_path / "r.csv", ROWS)
    page = tmp_path / "README.md"
    page.write_text(f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n")
    for _ in range(2):
        table.main([str(tmp_path / "r.csv"), "--readme", str(page)])
    text = page.read_text()
    assert "| **pointproj**, `backend=warp` |  | 0.28 | 123 | 123 |  |  | 123 MiB |" in text
    assert "| plain torch, brute force | 87.7 | 87.7 |  |  |  |  | 40,960 MiB |" in text
    assert "One NVIDIA H200; all rows are of one run (torch 2.11, commit abc, 2026-01-02)." in text
    assert "old" not in text
    assert (text[:7], text[-7:], text.count(table.END)) == ("before\n", "\nafter\n", 1)
    page.write_text("no place\n")
    with pytest.raises(SystemExit):
        table.main([str(tmp_path / "r.csv"), "--readme", str(page)])
    assert "expected the lines" in capsys.readouterr().err
    assert page.read_text() == "no place\n"


def test_attention_is_a_table_with_its_memory():
    of = {"workload": "attend", "operator": "attend", "k": 16, "channels": 64, "execution": "eager"}
    peer = {"implementation": "gather + SDPA", "kind": "peer"}
    text = table.tables(
        [
            row(**of, implementation="native", mode="aggregate", p50_ms=0.4),
            row(**of, implementation="native", mode="operator", p50_ms=1.2, peak_mib=300.0),
            row(**of, **peer, mode="operator", p50_ms=9.0, peak_mib=2400.0),
        ]
    )
    assert "|  | 10^5, forward | 10^5, with gradients | 10^5, with gradients, peak MiB |" in text
    assert "| **native**, eager | 0.4 | 1.2 | 300 |" in text
    assert "| gather + SDPA, eager |  | 9 | 2,400 |" in text


def test_a_plot_is_a_small_picture(tmp_path: Path):
    write_rows(tmp_path / "h200.csv", ROWS)
    picture = plots.draw(tmp_path / "h200.csv")
    assert picture.name == "h200-workloads.png"
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert 2_000 < picture.stat().st_size < 200_000
    write_rows(tmp_path / "none.csv", [row(workload="host_64")])
    assert plots.draw(tmp_path / "none.csv") is None
