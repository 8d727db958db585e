"""Tables and plots of the benchmark need its file alone."""

import re
from pathlib import Path

import pytest

from pointproj.benchmark import table
from pointproj.benchmark.plots import draw
from pointproj.benchmark.results import MISSING, RED, ResultsFile
from tests.benchmark.test_run import row


class TestTable:
    ROWS = (
        row(),
        row(mode="forward", p50_ms=0.123456),
        row(workload="w2", operator="radius", k=None, radius=0.1, execution="eager", p50_ms=123.4),
        row(contender="tutorial torch", kind="peer", execution="eager", p50_ms=87.65, peak_mib=40_960.2),
        row(contender="cuML", kind="peer", status=RED, p50_ms=None, execution="eager"),
        row(contender="KeOps", kind="peer", mode="-", execution="-", status=MISSING, p50_ms=None, note="no"),
        row(workload="scaling_uniform", mode="knn", references=10_000, p50_ms=0.5, execution="eager"),
        row(workload="scaling_uniform", mode="knn", references=10_000, p50_ms=0.05),
        row(workload="scaling_surface", mode="knn", references=10_000_000, p50_ms=9.87),
        row(workload="memory", execution="eager", references=100_000, peak_mib=55.5),
        row(workload="memory", execution="eager", references=10**6, status="failed", note="OutOfMemoryError"),
    )

    def test_cells(self):
        text = table.tables([*self.ROWS])
        assert "| **warp**, captured | 0.123 | 0.28 |  |  |  |  | 123 |" in text
        assert "| **warp**, eager |  |  |  | 123 |  |  |  |" in text
        assert "| tutorial torch, eager |  | 87.7 |  |  |  |  | 40,960 |" in text
        assert "| cuML, eager |  | wrong |" in text
        assert "|  | uniform 10^4 | surface 10^7 |" in text
        assert "| **warp** | 0.05 | 9.87 |" in text
        assert "| **warp** | 56 | out of memory |" in text
        assert "Not measured here: KeOps (no)." in text
        assert (
            "**NVIDIA H200** (torch 2.11, cuda 13.0, warp 1.19, python 3.12.3, driver 580.1; commit abc"
            in text
        )

    def test_every_line_of_a_table_has_as_many_cells(self):
        blocks = re.findall(r"(?:^\|.*\n?)+", table.tables([*self.ROWS]), re.MULTILINE)
        assert len(blocks) == 4
        for block in blocks:
            assert len({line.count("|") for line in block.splitlines()}) == 1

    def test_only_what_is_between_the_marks_is_replaced(self, tmp_path: Path):
        readme = tmp_path / "README.md"
        for mark, names in (("all", None), ("memory scaling", ["memory", "scaling"])):
            begin, new = table.BEGIN.format(mark), table.tables([*self.ROWS], names)
            readme.write_text(f"before\n{begin}\nold\n{table.END}\nafter\n")
            table.update(readme, [*self.ROWS])
            assert readme.read_text() == f"before\n{begin}\n{new}\n{table.END}\nafter\n"
        assert table.tables([*self.ROWS], ["memory", "scaling"]).count("\n|  |") == 2
        assert table.tables([*self.ROWS], ["interop"]) == ""

    def test_a_file_without_marks_is_left_alone(self, tmp_path: Path):
        readme = tmp_path / "README.md"
        marks = f"{table.BEGIN}\n{table.END}\n"
        pages = {
            "no marks\n": "expected one line <!-- benchmark: begin all",
            marks.format("all") * 2: "one line",
        }
        for page, reason in (
            pages | {marks.format("all speed"): "no table all; expected all, or some"}
        ).items():
            readme.write_text(page)
            with pytest.raises(ValueError, match=reason):
                table.update(readme, [*self.ROWS])
            assert readme.read_text() == page

    def test_plots_are_small_pictures(self, tmp_path: Path):
        file = ResultsFile(tmp_path / "h200.csv")
        for r in self.ROWS:
            file.add(r)
        drawn = draw(tmp_path / "h200.csv")
        assert [p.name for p in drawn] == ["h200-scaling.png", "h200-workloads.png", "h200-memory.png"]
        for picture in drawn:
            assert picture.read_bytes()[:4] == b"\x89PNG"
            assert 2_000 < picture.stat().st_size < 200_000
