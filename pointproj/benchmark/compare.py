"""Compare two result files, such as those of two commits on one machine, row by row.

python -m pointproj benchmark-compare BEFORE.csv AFTER.csv
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import NamedTuple

from pointproj.benchmark.results import OK, Row, read_rows, require_one_run, select
from pointproj.benchmark.table import markdown

ALLOWED = 1.03  # a row with a larger ratio is slower


class Pair(NamedTuple):
    """One measurement in both files; above 1, the ratio of its medians says that it became slower."""

    before: Row
    after: Row
    ratio: float


def report(before: list[Row], after: list[Row]) -> str:
    """Markdown: a summary by workload and contender, all rows, slowest first, and rows timed only before.

    ValueError if the rows of a list are not of one run, or no row has a time in both.
    """
    require_one_run(before)
    require_one_run(after)
    old, new = ({row.measurement: row for row in select(rows, status=OK)} for rows in (before, after))
    pairs = [Pair(row, new[key], new[key].p50_ms / row.p50_ms) for key, row in old.items() if key in new]
    if not pairs:
        raise ValueError(
            f"expected rows with a time in both files; of {len(old)} before and {len(new)} after none is the "
            "same measurement. Run bench.py with the same arguments for both."
        )
    lost = [row for key, row in old.items() if key not in new]
    newest = {"Before": before[-1], "After": after[-1]}
    heads = [f"{when}: {row.device}, commit {row.commit}, {row.date}\n" for when, row in newest.items()]
    return "\n".join([*heads, *_summary(pairs), "", *_rows(pairs), *_lost(lost, after)])


def _summary(pairs: list[Pair]) -> list[str]:
    groups: dict[str, list[float]] = {}
    for pair in sorted(pairs, key=lambda pair: (pair.before.workload, pair.before.contender)):
        groups.setdefault(f"{pair.before.workload}, {pair.before.contender}", []).append(pair.ratio)
    groups["all"] = [pair.ratio for pair in pairs]
    lines = []
    for name, ratios in groups.items():
        slower = sum(ratio > ALLOWED for ratio in ratios)
        means = f"{geometric_mean(ratios):.3f}", f"{max(ratios):.3f}"
        lines.append([name, f"{len(ratios)}", *means, f"{slower}"])
    return markdown("after / before", ["rows", "geometric mean", "worst", "slower by more than 3%"], lines)


def _rows(pairs: list[Pair]) -> list[str]:
    lines = []
    for pair in sorted(pairs, key=lambda pair: -pair.ratio):
        times = f"{pair.before.p50_ms:.4g}", f"{pair.after.p50_ms:.4g}", f"{pair.ratio:.3f}"
        lines.append([_name(pair.before), *times, "slower" if pair.ratio > ALLOWED else ""])
    return markdown("row", ["before, ms", "after, ms", "ratio", ""], lines)


def _lost(lost: list[Row], after: list[Row]) -> Iterator[str]:
    reasons = {row.measurement: f"{row.status}: {row.note}" for row in after}
    if lost:
        yield "\nTimed before, but not after:\n"
    yield from (f"- {_name(row)} ({reasons.get(row.measurement, 'no such row')})" for row in lost)


def _name(row: Row) -> str:
    what = f"{row.workload} {row.operator}, {row.references:,} points"
    return f"{what}, {row.contender}, {row.mode}, {row.execution}"


def main(arguments: Sequence[str]) -> None:
    """Print the comparison of two files."""
    parser = argparse.ArgumentParser(
        prog="python -m pointproj benchmark-compare",
        description="Compare two result files of bench.py, row by row.",
    )
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    files = parser.parse_args(arguments)
    try:
        print(report(read_rows(files.before), read_rows(files.after)))
    except (OSError, ValueError) as error:
        parser.error(str(error))
