"""The command ``benchmark``: its arguments; nothing heavy is imported before they are read."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from pointproj import command_line
from pointproj.benchmark.config import DEVICES


def main(arguments: Sequence[str]) -> int:
    """Measure, and show the table; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m pointproj benchmark",
        description="Measure our backends beside the libraries installed here; results are compared first.",
    )
    parser.add_argument("--device", choices=DEVICES, default="auto")
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmark"), help="folder")
    parser.add_argument(
        "--peers",
        choices=("installed", "all"),
        default="installed",
        help="all: install, after asking, those that pip brings without a compiler; measure and rank more",
    )
    parser.add_argument("--yes", action="store_true", help="install without asking")
    parser.add_argument(
        "--minutes", type=float, help="rows not begun by then are left out; default: 2, with --peers all 20"
    )
    chosen = command_line.parse(parser, arguments)
    from pointproj.benchmark.quick import run

    return run(chosen)
