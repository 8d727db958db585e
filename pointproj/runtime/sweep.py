"""All jobs of a sweep in one table, made from the files in the folder of each job.

Only these files are needed: jobs may run in this process, in others, or on other machines.
``python -m pointproj sweep FOLDER`` makes the table again.
"""

import argparse
import csv
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from pointproj import command_line
from pointproj.runtime.run_folder import read_json, replace_text

MARK = "multirun.yaml"  # Hydra writes it to the folder of a sweep

COLUMNS = (
    *("job", "status", "overrides", "backend", "device", "loss", "metric", "metric_value", "baseline"),
    *("ms_per_step", "peak_memory_bytes", "seconds", "error", "folder"),
)

NUMBERS = ("loss", "metric_value", "baseline", "ms_per_step")

_started: list[Path] = []


class SweepFolder(Callback):
    """Records the folder of this process's sweep, for :func:`report_started` after Hydra has finished.

    The report is not made by a callback of Hydra, since Hydra turns errors of callbacks into warnings, and
    skips the last callback if a job fails.
    """

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        _started.append(Path(config.hydra.sweep.dir))


def report_started() -> bool:
    """Report the sweep that this process has started, if any; return whether all jobs succeeded."""
    succeeded = [report(folder) for folder in _started if folder.exists()]
    _started.clear()
    return all(succeeded)


def report(folder: Path) -> bool:
    """Write ``summary.csv`` into a sweep's folder and print its table; return whether all jobs succeeded."""
    rows = collect(folder)
    if not rows:
        print(f"no job of the sweep in {folder} has written a status.json", file=sys.stderr)
        return False
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS)
    writer.writeheader()
    writer.writerows(rows)
    replace_text(folder / "summary.csv", text.getvalue())
    _print_table(folder, rows)
    return all(row["status"] == "ok" for row in rows)


def collect(folder: Path) -> list[dict[str, Any]]:
    """Read one row for each job, with the keys of :data:`COLUMNS`, in the order of the jobs."""
    rows = []
    for status in folder.rglob("status.json"):
        recorded = {**(read_json(status.with_name("metrics.json")) or {}), **read_json(status)}
        row = {key: recorded.get(key) for key in COLUMNS}
        if row["status"] == "running":
            row["status"] = "failed"
            row["error"] = "the process ended without an error message (killed, or out of memory)"
        row["overrides"] = " ".join(row["overrides"] or [])
        row["folder"] = str(status.parent.relative_to(folder))
        rows.append(row)
    return sorted(rows, key=lambda row: (row["job"] is None, row["job"], row["folder"]))


def _print_table(folder: Path, rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(markup=False)  # overrides have brackets
    if not console.is_terminal:
        console.width = 160
    failed = sum(row["status"] != "ok" for row in rows)
    title = f"{len(rows)} jobs, {failed} failed: {folder / 'summary.csv'}"
    table = Table(title=title, title_justify="left", title_style="bold")
    for name in ("job", "status", "varied", "backend", "device"):
        table.add_column(name, overflow="fold")
    metrics = {row["metric"] for row in rows if row["metric"]}
    for name in ("loss", metrics.pop() if len(metrics) == 1 else "metric", "baseline", "ms/step", "peak MiB"):
        table.add_column(name, justify="right")
    common = set.intersection(*(set(row["overrides"].split()) for row in rows)) if len(rows) > 1 else set()
    for row in rows:
        varied = " ".join(word for word in row["overrides"].split() if word not in common)
        words = str(row["job"]), row["status"], varied, row["backend"], row["device"]
        numbers = ("" if row[key] is None else f"{row[key]:.4g}" for key in NUMBERS)
        peak = "" if row["peak_memory_bytes"] is None else f"{row['peak_memory_bytes'] / 2**20:.0f}"
        table.add_row(*words, *numbers, peak, style=None if row["status"] == "ok" else "red")
    console.print(table)
    for row in rows:
        if row["error"]:
            console.print(f"job {row['job']}: {row['error']}", style="red", highlight=False)


def main(arguments: Sequence[str]) -> int:
    """Make the table of a sweep again; return 0 if all of its jobs succeeded, else 1."""
    parser = argparse.ArgumentParser(
        prog="python -m pointproj sweep", description="Make the table of a sweep again."
    )
    parser.add_argument("folder", type=Path, help="of the sweep: outputs/sweeps/DATE/TIME-TOKEN")
    folder = command_line.parse(parser, arguments).folder
    if not (folder / MARK).exists():
        state = f"it has no {MARK}" if folder.is_dir() else "it does not exist"
        expected = "expected outputs/sweeps/DATE/TIME-TOKEN"
        parser.error(f"{folder} is not the folder of a sweep ({state}): {expected}")
    return 0 if report(folder) else 1
