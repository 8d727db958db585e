"""The table of README.md: a training step of W1 and W2, ours and other libraries', from a result file.

    python -m pointproj benchmark-table benchmarks/nvidia-h200.csv --readme README.md

It stands between two comments, and is written as a whole.
"""

from pathlib import Path

from pointproj.benchmark.cells import markdown, milliseconds, only, peak
from pointproj.benchmark.results import Row, fastest, require_one_run, select

BEGIN, END = "<!-- begin of the benchmark's table -->", "<!-- end of the benchmark's table -->"
WORKLOADS = {"w1": "kNN, k = 7", "w2": "radius 0.1", "w2_wide": "radius 0.25"}
LINES = {
    "tutorial torch": "plain torch, brute force",
    "cuML": "cuML",
    "PhysicsNeMo": "PhysicsNeMo",
    "warp": "**pointproj**, `backend=warp`",
    "native": "**pointproj**, `backend=native`",
}


def renew(page: Path, rows: list[Row]) -> None:
    """Write the table of these rows into a page, in place of the one that it has.

    Parameters
    ----------
    page : Path
        With the two comments, which stay.
    rows : list of Row
        Of one run on one device.

    Raises
    ------
    ValueError
        If the rows are not of one run, or the page has no place for the table.
    """
    require_one_run(rows)
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page}: expected the lines {BEGIN} and {END} around its table")
    page.write_text(f"{before}{BEGIN}\n\n{table(rows)}\n\n{END}{after}", encoding="utf-8")


def table(rows: list[Row]) -> str:
    """The table and a sentence about its run."""
    steps = select(rows, mode="step")
    head = [f"{words}: {how}" for words in WORKLOADS.values() for how in ("eager", "best")]
    body = [_line(name, select(steps, contender=name)) for name in LINES]
    lines = markdown("milliseconds", [*head, "peak memory, kNN"], [line for line in body if any(line[1:])])
    run = rows[-1]
    versions = f"torch {run.torch.partition('+')[0]}, commit {run.commit[:7]}, {run.date[:10]}"
    return "\n".join([*lines, "", f"One {run.device}; all rows are of one run ({versions})."])


def _line(name: str, rows: list[Row]) -> list[str]:
    cells = []
    for workload in WORKLOADS:
        of = select(rows, workload=workload)
        cells += [milliseconds(only(of, execution="eager")), milliseconds(fastest(of))]
    best = fastest(select(rows, workload="w1"))
    return [LINES[name], *cells, f"{peak(best)} MiB" if best is not None else ""]
