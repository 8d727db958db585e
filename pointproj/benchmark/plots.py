"""Pictures of the results, from a result file alone: ``python -m pointproj benchmark-plots FILE.csv``.

It writes ``FILE-workloads.png``: bars for the rows of W1 and W2 that the file has.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no window
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullFormatter

from pointproj import command_line
from pointproj.benchmark.cells import short
from pointproj.benchmark.results import OK, Row, read_rows, require_one_run, select
from pointproj.benchmark.table import NAMED

MODES = {"operator": "operator, forward and feature gradient", "step": "whole training step"}
OURS = ("#c2a200", "#d1495b", "#2e933c", "#8f5bb5", "#e08e1b", "#1b6ca8", "#7a4b2a", "#0f9d9d")
PEERS = ("#7d8597", "#a3865f", "#5c8a8a", "#b08bb0", "#8c9a4e", "#bf8080", "#6b7fb3", "#9a9a9a")
COLUMNS = 3
DOTS_PER_INCH = 110


def draw(path: Path) -> Path | None:
    """The picture of a result file, None if there is nothing to draw; ValueError for rows of several runs."""
    rows = select(read_rows(path), status=OK)
    require_one_run(rows)
    tasks = {
        f"{workload}\n{call}": select(rows, workload=name, mode=mode)
        for mode, call in MODES.items()
        for name, workload in NAMED.items()
    }
    return draw_tasks(path.with_name(f"{path.stem}-workloads.png"), tasks)


def draw_tasks(path: Path, tasks: Mapping[str, Sequence[Row]]) -> Path | None:
    """Draw bars of a few tasks beside each other, the slowest row first; all rows have a time."""
    filled = [(title, sorted(rows, key=lambda row: -row.p50_ms)) for title, rows in tasks.items() if rows]
    if not filled:
        return None
    grid = [filled[i : i + COLUMNS] for i in range(0, len(filled), COLUMNS)]
    heights = [max(len(rows) for _, rows in line) for line in grid]
    size = (4.6 * len(grid[0]), 0.27 * sum(heights) + 1.1 * len(grid))
    how = {"squeeze": False, "layout": "constrained", "gridspec_kw": {"height_ratios": heights}}
    figure, axes = plt.subplots(len(grid), len(grid[0]), figsize=size, **how)
    for ax in axes.flat[len(filled) :]:
        ax.set_axis_off()
    colours = _colours([row for _, rows in filled for row in rows])
    for ax, (title, rows) in zip(axes.flat, filled, strict=False):
        _draw_bars(ax, rows, colours)
        ax.set_title(title, fontsize=9)
    figure.suptitle(filled[0][1][0].device, fontsize=9, color="0.4")
    figure.savefig(path, dpi=DOTS_PER_INCH)
    plt.close(figure)
    return path


def _draw_bars(ax: Axes, rows: list[Row], colours: dict[str, str]) -> None:
    labels = [f"{row.implementation}, {row.execution}" for row in rows]
    ax.barh(labels, [row.p50_ms for row in rows], color=[colours[row.implementation] for row in rows])
    for place, row in enumerate(rows):
        ax.text(row.p50_ms, place, f" {short(row.p50_ms)}", va="center", fontsize=7)
    ax.set(xscale="log", xlim=(rows[-1].p50_ms / 2, rows[0].p50_ms * 4))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.set_xlabel("ms", fontsize=8)
    ax.tick_params(labelsize=7)


def _colours(rows: list[Row]) -> dict[str, str]:
    """The same colour for an implementation in all tasks: strong ones for ours."""
    colours = {}
    for kind, palette in (("backend", OURS), ("peer", PEERS)):
        names = sorted({row.implementation for row in rows if row.kind == kind})
        colours |= {name: palette[i % len(palette)] for i, name in enumerate(names)}
    return colours


def main(arguments: Sequence[str]) -> None:
    """Draw the pictures of the files named."""
    parser = argparse.ArgumentParser(
        prog="python -m pointproj benchmark-plots", description="Pictures of the benchmark's result files."
    )
    parser.add_argument("files", nargs="+", type=Path, help="CSV files of bench.py")
    for file in command_line.parse(parser, arguments).files:
        try:
            print(draw(file) or f"{file}: no times of W1 and W2")
        except ValueError as error:
            parser.error(str(error))
