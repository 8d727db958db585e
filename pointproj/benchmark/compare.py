"""Compare two result files, or two commits that are measured one after the other here, row by row.

python -m pointproj benchmark-compare BEFORE.csv AFTER.csv
python -m pointproj benchmark-compare --base REV workloads=[w1] device=cpu
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import NamedTuple

from pointproj import command_line
from pointproj.benchmark.cells import markdown
from pointproj.benchmark.results import OK, Row, read_rows, require_one_run, select
from pointproj.benchmark.revisions import measure

ALLOWED = 1.03  # a row whose ratio is larger is marked as slower


class Comparison(NamedTuple):
    """What two lists of rows are beside each other."""

    text: str  # Markdown: a summary by workload and implementation, all rows, then those timed only before
    is_slower: bool  # whether a row takes longer after than is allowed


def compared(before: list[Row], after: list[Row]) -> Comparison:
    """Compare rows of two runs.

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
    return Comparison("\n".join(lines), any(ratio > ALLOWED for ratio in ratios.values()))


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


def main(arguments: Sequence[str]) -> int:
    """Print the comparison; return 1 if a row is slower by more than 3%, else 0."""
    parser = argparse.ArgumentParser(
        prog="python -m pointproj benchmark-compare",
        usage="%(prog)s BEFORE.csv AFTER.csv\n       %(prog)s --base REV [KEY=VALUE ...]",
        description="Compare two result files of bench.py row by row, or measure a commit and this tree and "
        "compare those. Each is measured twice, in the order commit, tree, tree, commit, and the lesser time "
        "of a row counts: four runs of bench.py, each of at most minutes=8 minutes. The exit code is 1 if a "
        "row is slower by more than 3%%.",
    )
    parser.add_argument("given", nargs="*", help="two files; with --base, arguments of bench.py")
    parser.add_argument("--base", metavar="REV", help="commit to compare this tree with")
    options = command_line.parse(parser, arguments)
    if options.base is None and len(options.given) != 2:
        parser.error(f"expected two files, or --base REV; got {' '.join(options.given) or 'nothing'}")
    try:
        if options.base is None:
            before, after = map(read_rows, map(Path, options.given))
        else:
            before, after = measure(options.base, options.given)
        found = compared(before, after)
        print(found.text)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return int(found.is_slower)
