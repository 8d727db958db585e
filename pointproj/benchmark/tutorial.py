"""The table of the tutorial "Torch Compile and External Kernels" (its W1), and our lines below it.

    python -m pointproj benchmark-tutorial                     # into tutorial.csv
    python -m pointproj benchmark-tutorial output=t.csv        # what follows goes to bench.py
    python -m pointproj benchmark-table tutorial.csv

Each line is measured by a process of its own: a process cannot change its allocator of GPU memory, and the
state of one library does not slow down the next. All lines are of one run.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from pointproj import command_line
from pointproj.machine import PROJECT


class Line(NamedTuple):
    """A line of the table."""

    label: str
    implementation: str
    execution: str
    gpu_memory: str = "torch"


LINES = (
    Line("torch", "tutorial torch", "eager"),
    Line("torch.compile", "tutorial torch", "compiled"),
    Line("cuML", "cuML", "eager"),
    Line("cuML + torch.compile", "cuML", "compiled"),
    Line("cuML + RMM", "cuML", "eager", "rmm"),
    Line("cuML + RMM + torch.compile", "cuML", "compiled", "rmm"),
    Line("**`backend=cuml`**", "cuml", "eager"),
    Line("**`backend=cuml compile=true`**", "cuml", "compiled"),
    Line("**`backend=cuml allocator=rmm`**", "cuml", "eager", "rmm"),
    Line("**`backend=cuml allocator=rmm compile=true`**", "cuml", "compiled", "rmm"),
    Line("**`backend=warp`**", "warp", "eager"),
    Line("**`backend=warp compile=true`**", "warp", "captured"),
    Line("**`backend=warp allocator=rmm compile=true`**", "warp", "captured", "rmm"),
)


def command(line: Line, further: list[str]) -> list[str]:
    """The command that measures one line."""
    kind, others = ("backends", "peers") if "backend=" in line.label else ("peers", "backends")
    return [
        *(sys.executable, str(PROJECT / "bench.py"), "workloads=[w1]", "modes=[forward,step]"),
        *(f"execution=[{line.execution}]", f"gpu_memory={line.gpu_memory}"),
        *(f"{kind}=['{line.implementation}']", f"{others}=[]", *further),
    ]


def main(arguments: Sequence[str]) -> int:
    """Measure line by line, all of them even if one fails; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m pointproj benchmark-tutorial",
        description="Measure the lines of the tutorial's table, each in a process of its own.",
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of bench.py, such as output=t.csv")
    overrides = command_line.parse(parser, arguments).overrides
    started = datetime.now().astimezone().isoformat(timespec="seconds")
    further = ["output=tutorial.csv", f"started='{started}'", *overrides]
    failed = [line.label for line in LINES if subprocess.run(command(line, further)).returncode]
    if failed:
        print(f"without result: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))
