"""Pictures of the results, from a result file alone: ``python -m pointproj benchmark-plots FILE.csv``.

Beside the file: ``-scaling.png`` (time against points) and ``-workloads.png`` (bars for W1 and W2), for as
much as the file holds.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no window
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from pointproj.benchmark.results import OK, Row, fastest, read_rows, require_one_run, select
from pointproj.benchmark.table import NAMED, SCALING

MODES = {"operator": "operator, forward and feature gradient", "step": "whole training step"}
OURS = ("#c2a200", "#d1495b", "#2e933c", "#8f5bb5", "#e08e1b", "#1b6ca8", "#7a4b2a", "#0f9d9d")
PEERS = ("#7d8597", "#a3865f", "#5c8a8a", "#b08bb0", "#8c9a4e", "#bf8080", "#6b7fb3", "#9a9a9a")
DOTS_PER_INCH = 110
PLAIN = FuncFormatter(lambda value, _: f"{value:g}")


def draw(path: Path) -> list[Path]:
    """Draw all that a result file has rows for; the pictures. ValueError for rows of several runs."""
    rows = select(read_rows(path), status=OK)
    require_one_run(rows)
    colours = _colours(rows)
    figures = {"scaling": _scaling(rows, colours), "workloads": _workloads(rows, colours)}
    drawn = {path.with_name(f"{path.stem}-{name}.png"): of for name, of in figures.items() if of is not None}
    for picture, figure in drawn.items():
        _save(figure, picture, rows[0].device)
    return [*drawn]


def _scaling(rows: list[Row], colours: dict[str, str]) -> Figure | None:
    rows = [row for row in rows if row.mode == "knn" and row.workload in SCALING]
    kinds = [kind for kind in SCALING if any(row.workload == kind for row in rows)]
    if not kinds:
        return None
    figure, axes = _axes(1, len(kinds), (4 * len(kinds) + 1, 4.2), sharey=True)
    for ax, kind in zip(axes[0], kinds, strict=True):
        _lines(ax, select(rows, workload=kind), colours)
        ax.set(title=SCALING[kind], xlabel="points", xscale="log", yscale="log")
        ax.yaxis.set_major_formatter(PLAIN)
        ax.grid(True, alpha=0.3)
    axes[0][0].set_ylabel("ms: build, and 8 nearest of every point")
    lines = (zip(*ax.get_legend_handles_labels(), strict=True) for ax in axes[0])
    named = {label: handle for of in lines for handle, label in of}
    figure.legend(named.values(), named.keys(), loc="outside right center", fontsize=8, frameon=False)
    return figure


def _workloads(rows: list[Row], colours: dict[str, str]) -> Figure | None:
    names = [name for name in NAMED if any(row.workload == name for row in rows)]
    modes = [mode for mode in MODES if any(row.mode == mode and row.workload in names for row in rows)]
    if not names or not modes:
        return None
    grid = [
        {f"{NAMED[name]}\n{MODES[mode]}": select(rows, workload=name, mode=mode) for name in names}
        for mode in modes
    ]
    return _bars(grid, colours)


def draw_tasks(path: Path, tasks: Mapping[str, Mapping[str, Row]], device: str) -> Path:
    """Draw bars of a few tasks beside each other: of rows with a time, by task and contender."""
    measured = {task: [*of.values()] for task, of in tasks.items() if of}
    titles = [*measured]
    grid = [{task: measured[task] for task in titles[i : i + 3]} for i in range(0, len(titles), 3)]
    _save(_bars(grid, _colours([row for rows in measured.values() for row in rows])), path, device)
    return path


def _bars(grid: list[dict[str, list[Row]]], colours: dict[str, str]) -> Figure:
    """Bars of each title's rows, the slowest first, in lines of titles of which the first is the longest."""
    heights = [max(1, *map(len, line.values())) for line in grid]
    size = (4.6 * len(grid[0]), 0.27 * sum(heights) + 1.1 * len(grid))
    figure, axes = _axes(len(grid), len(grid[0]), size, height_ratios=heights)
    for line, titles in zip(axes, grid, strict=True):
        for ax in line[len(titles) :]:
            ax.set_axis_off()
        for ax, (title, rows) in zip(line, titles.items(), strict=False):
            _draw_bars(ax, sorted(rows, key=lambda row: -row.p50_ms), colours)
            ax.set_title(title, fontsize=9)
    return figure


def _draw_bars(ax: Axes, rows: list[Row], colours: dict[str, str]) -> None:
    labels = [f"{row.contender}, {row.execution}" for row in rows]
    ax.barh(labels, [row.p50_ms for row in rows], color=[colours[row.contender] for row in rows])
    for place, row in enumerate(rows):
        shown = f"{row.p50_ms:.3g}" if row.p50_ms < 100 else f"{row.p50_ms:,.0f}"
        ax.text(row.p50_ms, place, f" {shown}", va="center", fontsize=7)
    if rows:
        ax.set(xscale="log", xlim=(rows[-1].p50_ms / 2, rows[0].p50_ms * 4))
    ax.xaxis.set_major_formatter(PLAIN)
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.set_xlabel("ms", fontsize=8)
    ax.tick_params(labelsize=7)


def _lines(ax: Axes, rows: list[Row], colours: dict[str, str]) -> None:
    """One line per contender, of its fastest execution at each size."""
    for name in dict.fromkeys(row.contender for row in rows):
        of = select(rows, contender=name)
        sizes = sorted({row.references for row in of})
        values = [fastest(select(of, references=size)).p50_ms for size in sizes]
        ours = of[0].kind == "backend"
        style = {"linewidth": 2.2 if ours else 1.2, "marker": "o", "markersize": 4 if ours else 3}
        ax.plot(sizes, values, color=colours[name], label=name, **style)


def _save(figure: Figure, path: Path, device: str) -> None:
    figure.suptitle(device, fontsize=9, color="0.4")
    figure.savefig(path, dpi=DOTS_PER_INCH)
    plt.close(figure)


def _axes(lines: int, columns: int, size: tuple[float, float], sharey: bool = False, **grid):
    how = {"squeeze": False, "layout": "constrained", "sharey": sharey, "gridspec_kw": grid or None}
    return plt.subplots(lines, columns, figsize=size, **how)


def _colours(rows: list[Row]) -> dict[str, str]:
    """The same colour for a contender in all pictures: strong ones for ours."""
    colours = {}
    for kind, palette in (("backend", OURS), ("peer", PEERS)):
        names = sorted({row.contender for row in rows if row.kind == kind})
        colours |= {name: palette[i % len(palette)] for i, name in enumerate(names)}
    return colours


def main(arguments: Sequence[str]) -> None:
    """Draw the pictures of the files named."""
    parser = argparse.ArgumentParser(
        prog="python -m pointproj benchmark-plots", description="Pictures of the benchmark's result files."
    )
    parser.add_argument("files", nargs="+", type=Path, help="CSV files of bench.py")
    for file in parser.parse_args(arguments).files:
        try:
            pictures = draw(file)
        except ValueError as error:
            parser.error(str(error))
        for picture in pictures:
            print(picture)
