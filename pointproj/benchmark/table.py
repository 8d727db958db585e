"""The writer of tables, from result files alone: all as one Markdown page, and the one of README.md.

python -m pointproj benchmark-table benchmarks/*.csv --output benchmarks/tables.md
python -m pointproj benchmark-table benchmarks/nvidia-h200.csv --readme README.md
"""

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from pointproj.benchmark.config import WITH_RMM
from pointproj.benchmark.results import (
    MISSING,
    OK,
    OUT_OF_MINUTES,
    SKIPPED,
    Row,
    fastest,
    read_rows,
    require_one_run,
    select,
)
from pointproj.benchmark.tutorial import LINES

HEAD = """# What was measured

All tables that the CSV files beside this page give. [README.md](README.md) says what is timed, how, and what
bounds it. Written by `python -m pointproj benchmark-table`.
"""
NAMED = {"w1": "W1", "w2": "W2, r = 0.1", "w2_wide": "W2, r = 0.25"}
SCALING = {"scaling_uniform": "uniform", "scaling_clustered": "clustered", "scaling_surface": "surface"}
LISTS = {"lists_uniform": "uniform", "lists_surface": "surface", "lists_crystal": "crystal"}
FORMS = {"padded": "{k} nearest", "csr": "all"}
LIST_SUMS = {"aggregate_padded": "padded", "aggregate_csr": "CSR"}
MODELS = {"geotransolver": "GeoTransolver", "gino": "GINO"}
OPERATOR = {"aggregate": "forward", "operator": "features' gradient", "gradients": "all gradients"}
HOST = {("host_64", "knn"): "64, kNN", ("host_64", "radius"): "64, radius", ("host_w1", "knn"): "W1"}
HOST_MODES = {"aggregate": "forward", "operator": "and gradient", "step": "training step"}
ATTEND = {"forward": "aggregate", "with gradients": "operator", "with gradients, peak MiB": "operator"}
EXECUTION_ORDER = ("captured", "compiled", "eager")

BEGIN, END = "<!-- begin of the benchmark's table -->", "<!-- end of the benchmark's table -->"
README_WORKLOADS = {"w1": "kNN, k = 7", "w2": "radius 0.1", "w2_wide": "radius 0.25"}
README_LINES = {
    "tutorial torch": "plain torch, brute force",
    "cuML": "cuML",
    "PhysicsNeMo": "PhysicsNeMo",
    "warp": "**pointproj**, `backend=warp`",
    "native": "**pointproj**, `backend=native`",
}

Columns = dict[str, dict[str, object]]  # heading -> what the row has whose value stands there
Groups = Iterable[tuple[str, list[Row]]]  # label and rows of each line


def page(*files: list[Row]) -> str:
    """The page of all tables, file after file, GPUs first; ValueError as by :func:`require_one_run`."""
    ordered = sorted(files, key=lambda rows: not any(row.driver for row in rows))
    text = "\n\n".join(tables(rows) for rows in ordered)
    return f"{HEAD}\n{text}\n"


def tables(rows: list[Row]) -> str:
    """Markdown for the rows of one file, device after device, GPUs first; errors as in :func:`page`."""
    require_one_run(rows)
    devices = dict.fromkeys(row.device for row in sorted(rows, key=lambda row: not row.driver))
    return "\n\n".join(text for device in devices for text in _device(select(rows, device=device)))


def _device(rows: list[Row]) -> Iterator[str]:
    """Facts of a device and its tables; nothing if it has none of them."""
    made = {title: _table(title, *of, rows) for title, of in _TABLES.items()}
    filled = [f"{title}:\n\n" + "\n".join(lines) for title, lines in made.items() if len(lines) > 2]  # a head
    if not filled:
        return
    newest = rows[-1]
    versions = [f"{name} {getattr(newest, name)}" for name in ("torch", "cuda", "warp", "python", "driver")]
    known = [version for version in versions if not version.endswith(" ")]
    yield f"**{newest.device}** ({', '.join(known)}; commit {newest.commit}, {newest.date[:16]})"
    yield from filled
    missing = {row.contender: row.note for row in rows if row.status == MISSING}
    if missing:
        short = ((name, note if len(note) < 90 else note[:87] + "...") for name, note in missing.items())
        yield f"Not measured here: {'; '.join(f'{name} ({note})' for name, note in short)}."
    lists = [row for row in select(rows, status=OK) if row.workload in LISTS and row.note]
    said = dict.fromkeys(f"- {r.contender}, {FORMS[r.mode].format(k=r.k)}: {r.note}" for r in lists)
    if said:
        yield "What lists of other libraries are:\n\n" + "\n".join(said)


def _table(title: str, columns: Columns | Callable, groups: Callable, rows: list[Row]) -> list[str]:
    """A line for each (label, rows) of the groups, without those that have no cell."""
    columns = columns(rows) if callable(columns) else columns
    usual = seconds if title.endswith(", seconds") else milliseconds
    shown = {heading: peak if heading.endswith("MiB") else usual for heading in columns}
    lines = [
        [label, *(shown[heading](only(of, **wanted)) for heading, wanted in columns.items())]
        for label, of in groups(rows)
    ]
    return markdown("", [*columns], [line for line in lines if any(line[1:])])


def _by_contender(rows: list[Row]) -> Groups:
    """The rows of each contender: backends first and in bold."""
    rows = sorted(rows, key=lambda row: row.kind)
    ours = {row.contender for row in rows if row.kind == "backend"}
    for name in dict.fromkeys(row.contender for row in rows):
        yield f"**{name}**" if name in ours else name, select(rows, contender=name)


def _by_execution(rows: list[Row]) -> Groups:
    for label, of in _by_contender(rows):
        for execution in EXECUTION_ORDER:
            yield f"{label}, {execution}", select(of, execution=execution)


def _of_tutorial(rows: list[Row]) -> Groups:
    for line in LINES:
        name = line.contender + (WITH_RMM if line.gpu_memory == "rmm" else "")
        of = select(rows, workload="w1", contender=name, execution=line.execution)
        yield line.label, [row for row in of if row.driver]  # of a GPU, as the tutorial's


def _found(rows: Iterable[Row], heading: Callable[[Row], str], *keys: str) -> Columns:
    """A column for each heading that rows have, with what these rows have in common."""
    return {heading(row): {key: getattr(row, key) for key in ("workload", *keys)} for row in rows}


def _scaling(rows: list[Row]) -> Columns:
    """All sizes of uniform points, the largest of the others, and the batch."""
    names = SCALING | {"scaling_batch": "16 of"}
    rows = sorted((row for row in rows if row.workload in names), key=lambda row: row.references)
    largest = {row.workload: row.references for row in rows} | {"scaling_uniform": None}
    shown = [row for row in rows if largest[row.workload] in (None, row.references)]
    shown.sort(key=lambda row: [*names].index(row.workload))
    return _found(
        shown, lambda row: f"{names[row.workload]} {_count(row.references // row.clouds)}", "references"
    )


def _farthest(rows: list[Row]) -> Columns:
    def heading(row: Row) -> str:
        clouds = f"{row.clouds} of " if row.clouds > 1 else ""
        return f"{clouds}{row.references // row.clouds:,} to {row.k:,}"

    return _found(select(rows, workload="farthest"), heading, "references", "k")


def _attend(rows: list[Row]) -> Columns:
    return {
        f"{_count(size)}, {heading}": {"workload": "attend", "references": size, "mode": mode}
        for size in sorted({row.references for row in select(rows, workload="attend")})
        for heading, mode in ATTEND.items()
    }


def _models(rows: list[Row]) -> Columns:
    rows = sorted((row for row in rows if row.workload in MODELS), key=lambda r: (r.workload, r.references))
    return _found(rows, lambda r: f"{MODELS[r.workload]}, {_count(r.references)} points", "references")


def _lists(modes: dict[str, str], rows: list[Row]) -> Columns:
    names, order = [*LISTS], [*modes]
    found = [row for row in rows if row.workload in LISTS and row.mode in modes]
    found.sort(key=lambda row: (row.references, names.index(row.workload), order.index(row.mode)))

    def heading(row: Row) -> str:
        return f"{LISTS[row.workload]} {_count(row.references)}, {modes[row.mode].format(k=row.k)}"

    return _found(found, heading, "references", "mode")


def _interop(rows: list[Row]) -> Columns:
    rows = sorted(select(rows, workload="interop"), key=lambda row: row.references)
    return _found(rows, lambda row: f"{_count(row.references)} elements", "references")


def _count(number: int) -> str:
    exponent = len(str(number)) - 1
    return f"10^{exponent}" if number == 10**exponent else f"{number:,}"


def _modes(workload: str, **headings: str) -> Columns:
    """A column for each mode of a workload."""
    return {heading: {"workload": workload, "mode": mode} for mode, heading in headings.items()}


_OPERATORS = {
    f"{words} {called}": {"workload": name, "mode": mode}
    for name, words in NAMED.items()
    for mode, called in OPERATOR.items()
}
_HOSTS = {
    f"{words}: {called}": {"workload": name, "operator": operator, "mode": mode}
    for (name, operator), words in HOST.items()
    for mode, called in HOST_MODES.items()
}
_BATCHES = {
    f"{kind} {operator}": {"workload": f"batch_{kind}", "operator": operator, "mode": "operator"}
    for kind in ("dense", "ragged")
    for operator in ("knn", "radius")
}
_STEPS = {f"{words} step": {"workload": name, "mode": "step"} for name, words in NAMED.items()}
_LARGE = _modes("large", aggregate="forward, ms", operator="with the features' gradient, ms")
_STARTS = {
    f"{words}, {start} caches": {"workload": "start", "mode": mode, "execution": start}
    for mode, words in (("first_step", "first step"), ("whole", "whole run"))
    for start in ("cold", "warm")
}

# Title, which says the unit: columns, or what makes them of the rows; lines.
_TABLES: dict[str, tuple[Columns | Callable[[list[Row]], Columns], Callable[[list[Row]], Groups]]] = {
    "The tutorial's table (W1), reproduced, and ours below it": (
        _modes("w1", forward="forward, ms", step="training step, ms") | _modes("w1", step="step, peak MiB"),
        _of_tutorial,
    ),
    "Network, milliseconds (median)": (
        _modes("w1", forward="W1 forward") | _STEPS | _modes("w1", step="W1 step, peak MiB"),
        _by_execution,
    ),
    "Operator alone, index built in each call, milliseconds": (_OPERATORS, _by_execution),
    "kNN of W1, distances and indices, milliseconds": (
        _modes("w1", knn="built in the call", search="ready"),
        _by_execution,
    ),
    "kNN of a cloud within itself, k = 8, distances and indices, index built in the call, ms": (
        _scaling,
        _by_execution,
    ),
    "Attention over the 16 nearest, 64 channels, 4 heads, milliseconds": (_attend, _by_execution),
    "Farthest points, milliseconds": (
        _farthest,
        lambda rows: _by_contender(select(rows, workload="farthest")),  # in the order that it was measured in
    ),
    "Time that the host takes to issue an eager call, milliseconds": (_HOSTS, _by_contender),
    "Batches: forward with the features' gradient, milliseconds": (_BATCHES, _by_execution),
    "Lists of neighbours within a radius, index built in each call, milliseconds": (
        partial(_lists, FORMS),
        _by_execution,
    ),
    "Aggregation over ready lists of 25 channels, with the features' gradient, milliseconds": (
        partial(_lists, LIST_SUMS),
        _by_execution,
    ),
    "One cloud of 10^8 points, 10^7 queries, about 32 neighbours, 32 features, eager": (
        _LARGE | _modes("large", operator="peak on each device, MiB"),
        _by_contender,
    ),
    "A training step of whole models, with their library's search and with ours, milliseconds": (
        _models,
        _by_execution,
    ),
    "From the start of a training run to the end of its first step, and of the run, seconds": (
        _STARTS,
        _by_contender,
    ),
    "A Warp kernel on new tensors that require a gradient, milliseconds": (_interop, _by_contender),
    "`from pointproj import knn` in a new process, after `import torch`": (
        {"ms": {"workload": "import"}},
        _by_contender,
    ),
}


def renew(page: Path, rows: list[Row]) -> None:
    """Write the table of these rows, of one run, between the two comments of a page, or raise ValueError."""
    require_one_run(rows)
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page}: expected the lines {BEGIN} and {END} around its table")
    page.write_text(f"{before}{BEGIN}\n\n{readme_table(rows)}\n\n{END}{after}", encoding="utf-8")


def readme_table(rows: list[Row]) -> str:
    """The table and a sentence about its run."""
    steps = select(rows, mode="step")
    head = [f"{words}: {how}" for words in README_WORKLOADS.values() for how in ("eager", "best")]
    body = [_readme_line(name, select(steps, contender=name)) for name in README_LINES]
    lines = markdown("milliseconds", [*head, "peak memory, kNN"], [line for line in body if any(line[1:])])
    run = rows[-1]
    versions = f"torch {run.torch.partition('+')[0]}, commit {run.commit[:7]}, {run.date[:10]}"
    return "\n".join([*lines, "", f"One {run.device}; all rows are of one run ({versions})."])


def _readme_line(name: str, rows: list[Row]) -> list[str]:
    cells = []
    for workload in README_WORKLOADS:
        of = select(rows, workload=workload)
        cells += [milliseconds(only(of, execution="eager")), milliseconds(fastest(of))]
    best = fastest(select(rows, workload="w1"))
    return [README_LINES[name], *cells, f"{peak(best)} MiB" if best is not None else ""]


def markdown(corner: str, head: list[str], body: list[list[str]]) -> list[str]:
    """The lines of a Markdown table; ``corner`` is the head of its first column."""
    lines = [[corner, *head], ["---", *("---:" for _ in head)], *body]
    return ["| " + " | ".join(line) + " |" for line in lines]


def only(rows: Iterable[Row], **wanted: object) -> Row | None:
    """The row that has these values, if there is one."""
    return next(reversed(select(rows, **wanted)), None)


def milliseconds(row: Row | None) -> str:
    """The median time."""
    return cell(row, lambda row: f"{row.p50_ms:.3g}" if row.p50_ms < 100 else f"{row.p50_ms:.0f}")


def seconds(row: Row | None) -> str:
    """The median time, for what takes seconds."""
    return cell(row, lambda row: f"{row.p50_ms / 1e3:.1f}")


def peak(row: Row | None) -> str:
    """Peak memory in MiB."""
    return cell(row, lambda row: f"{row.peak_mib:,.0f}")


def cell(row: Row | None, value: Callable[[Row], str]) -> str:
    """The value of a row that was measured, else why it was not in a word or two."""
    if row is None or row.status == MISSING:
        return ""
    if row.status == OK:
        return value(row)
    if "OutOfMemory" in row.note or "GiB are free" in row.note:
        return "out of memory"
    if row.status == SKIPPED and row.note.startswith(OUT_OF_MINUTES):
        return "not run"
    return "too slow" if row.status == SKIPPED else row.status


def main(arguments: Sequence[str]) -> None:
    """Print the page, or write it into a file."""
    parser = argparse.ArgumentParser(
        prog="python -m pointproj benchmark-table", description="Tables from the benchmark's result files."
    )
    parser.add_argument("files", nargs="+", type=Path, help="CSV files of bench.py")
    parser.add_argument("--output", type=Path, help="write the page here instead of printing it")
    parser.add_argument("--readme", type=Path, help="renew the table in this page, from the first file")
    chosen = parser.parse_args(arguments)
    try:
        text = page(*map(read_rows, chosen.files))
        if chosen.readme is not None:
            renew(chosen.readme, read_rows(chosen.files[0]))
    except ValueError as error:
        parser.error(str(error))
    if chosen.output is not None:
        chosen.output.write_text(text, encoding="utf-8")
    elif chosen.readme is None:
        print(text, end="")
