"""Our backends beside the libraries installed here, in two minutes: ``python -m pointproj benchmark``.

It measures the rows of ``bench.py`` that most users need, and shows them as a table and a picture.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown

from pointproj.benchmark import league, peers, plots
from pointproj.benchmark.config import MODES, BenchConfig
from pointproj.benchmark.results import OK, Row, select
from pointproj.benchmark.run import run_benchmark
from pointproj.benchmark.selection import backend_names, missing_backend
from pointproj.benchmark.table import by_implementation, lines_of
from pointproj.runtime.devices import choose_device

TASKS = {  # heading: workload and mode
    "7 nearest of 100,000 points, for 27,000": ("w1", "knn"),
    "sums over these, with gradient": ("w1", "operator"),
    "training step with these": ("w1", "step"),
    "32 nearest within a radius, 100,000 points": ("lists_uniform", "padded"),
    "sums within a radius, 25,000 points, with gradient": ("w2", "operator"),
    "training step within a radius": ("w2", "step"),
}
LEAGUE = ("w1", "w2", "scaling", "lists", "cfd", "attend", "farthest")  # workloads that peers have
# torch compares all pairs; on a CPU triton is interpreted.
LEFT_OUT = {"cpu": ("torch", "triton"), "cuda": ("torch",)}


def config_for(device_type: str, output: Path, minutes: float) -> BenchConfig:
    """What is measured: our backends, and the libraries that are installed for this type of device."""
    ours = [name for name in backend_names(None) if missing_backend(name, device_type, "knn") is None]
    installed = {p.name for p in peers.PEERS if device_type in p.devices and not p.not_installed()}
    return BenchConfig(
        workloads=["w1", "lists", "w2"],
        modes=list(dict.fromkeys(mode for _, mode in TASKS.values())),
        execution=["eager", "captured"] if device_type == "cuda" else ["eager"],
        backends=[name for name in ours if name not in LEFT_OUT[device_type]],
        peers=sorted(installed),
        sizes=[10**5],
        device=device_type,
        minutes=minutes,
        output=str(output),
    )


def table(rows: list[Row]) -> list[str]:
    """Markdown: a line for each task, a column for each implementation, of its fastest execution."""
    columns = {label: {"implementation": of[0].implementation} for label, of in by_implementation(rows)}
    return lines_of(columns, _by_task(rows).items(), "{ms}", "milliseconds")


def _agrees(text: str) -> bool:
    if not sys.stdin.isatty():
        print(f"{text} Nobody can answer here: --yes installs them.")
        return False
    return input(f"{text} [y/N] ").strip().lower() in ("y", "yes")


def _by_task(rows: list[Row]) -> dict[str, list[Row]]:
    return {task: select(rows, workload=workload, mode=mode) for task, (workload, mode) in TASKS.items()}


def run(chosen: argparse.Namespace) -> int:
    """Measure as the command line says, and show the table; 1 if nothing got a time."""
    device = choose_device(chosen.device)
    every = chosen.peers == "all"
    if every:
        league.install(league.missing(device.type), lambda text: chosen.yes or _agrees(text))
    minutes = chosen.minutes or (20.0 if every else 2.0)
    config = config_for(device.type, chosen.output / "benchmark.csv", minutes)
    if every:
        config = replace(config, workloads=[*LEAGUE], modes=list(MODES), sizes=None)
    rows = run_benchmark(config, interleaved=() if every else [workload for workload, _ in TASKS.values()])
    timed = select(rows, status=OK)
    if not timed:
        print("nothing got a time; the lines above say why")
        return 1
    if every:
        ranked = chosen.output / "league.md"
        ranked.write_text(league.page(rows), encoding="utf-8")
        print(f"every measurement, where another library is faster first: {ranked}")
    Console(width=200).print(timed[0].device, Markdown("\n".join(table(rows))))
    picture = plots.draw_tasks(chosen.output / "benchmark.png", _by_task(timed))
    worst = max(row.parity_error or 0.0 for row in timed)
    print(
        "Each time is that of the fastest execution. All results agree with the reference: the largest error "
        f"is {worst:.1e}.\nAs a picture: {picture}; all rows: {chosen.output / 'benchmark.csv'}. "
        "python bench.py measures more."
    )
    return 0
