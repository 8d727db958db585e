"""Compare two result files, such as those of two commits on one machine, row by row.

python -m pointproj benchmark-compare BEFORE.csv AFTER.csv
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean

from pointproj import command_line
from pointproj.benchmark.results import OK, Row, read_rows, require_one_run, select
from pointproj.benchmark.table import markdown

ALLOWED = 1.03  # a row whose ratio is larger is marked as slower


def report(before: list[Row], after: list[Row]) -> str:
    """Markdown: a summary by workload and implementation, then all rows, then those timed only before.

    ValueError if the rows of a list are not of one run, or no row has a time in both.
    """
    require_one_run(before)
    require_one_run(after)
    old, new = ({row.measurement: row for row in select(rows, status=OK)} for rows in (before, after))
    ratios = {key: new[key].p50_ms / row.p50_ms for key, row in old.items() if key in new}
    if not ratios:
        raise ValueError(
            f"expected rows with a time in both files; of {len(old)} before and {len(new)} after none is the "
            "same measurement. Run bench.py with the same arguments for both."
        )
    rows = []
    for key in sorted(ratios, key=lambda key: -ratios[key]):
        times = f"{old[key].p50_ms:.4g}", f"{new[key].p50_ms:.4g}", f"{ratios[key]:.3f}"
        rows.append([_name(old[key]), *times, "slower" if ratios[key] > ALLOWED else ""])
    newest = {"Before": before[-1], "After": after[-1]}
    lines = [f"{when}: {row.device}, commit {row.commit}, {row.date}\n" for when, row in newest.items()]
    lines += [*_summary({old[key]: ratio for key, ratio in ratios.items()}), ""]
    lines += markdown("row", ["before, ms", "after, ms", "ratio", ""], rows)
    if untimed := [row for key, row in old.items() if key not in new]:
        reasons = {row.measurement: f"{row.status}: {row.note}" for row in after}
        lines.append("\nTimed before, but not after:\n")
        lines += (f"- {_name(row)} ({reasons.get(row.measurement, 'no such row')})" for row in untimed)
    return "\n".join(lines)


def _summary(ratios: dict[Row, float]) -> list[str]:
    groups: dict[str, list[float]] = {}
    for row in sorted(ratios, key=lambda row: (row.workload, row.implementation)):
        groups.setdefault(f"{row.workload}, {row.implementation}", []).append(ratios[row])
    groups["all"] = [*ratios.values()]
    lines = []
    for name, of in groups.items():
        slower = sum(ratio > ALLOWED for ratio in of)
        lines.append([name, f"{len(of)}", f"{geometric_mean(of):.3f}", f"{max(of):.3f}", f"{slower}"])
    return markdown("after / before", ["rows", "geometric mean", "worst", "slower by more than 3%"], lines)


def _name(row: Row) -> str:
    what = f"{row.workload} {row.operator}, {row.references:,} points"
    return f"{what}, {row.implementation}, {row.mode}, {row.execution}"


def main(arguments: Sequence[str]) -> None:
    """Print the comparison of two files."""
    parser = argparse.ArgumentParser(
        prog="python -m pointproj benchmark-compare",
        description="Compare two result files of bench.py, row by row.",
    )
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    files = command_line.parse(parser, arguments)
    try:
        print(report(read_rows(files.before), read_rows(files.after)))
    except (OSError, ValueError) as error:
        parser.error(str(error))
