"""Tables of the benchmark in pages, from result files alone.

python -m pointproj benchmark-table benchmarks/*.csv --update README.md benchmarks/tables.md
"""

import argparse
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from pointproj.benchmark.config import WITH_RMM
from pointproj.benchmark.results import FAILED, MISSING, OK, OUT_OF_MINUTES, RED, SKIPPED, Row, read_rows
from pointproj.benchmark.tutorial import LINES

BEGIN, END = "<!-- benchmark: begin {} -->", "<!-- benchmark: end -->"  # names of tables, or all
NAMED = {"w1": "W1", "w2": "W2, r = 0.1", "w2_wide": "W2, r = 0.25"}
EXECUTION_ORDER = ("captured", "compiled", "eager")


def tables(rows: list[Row], names: Sequence[str] | None = None) -> str:
    """Markdown for all rows: for each device the tables that are named, or all of :data:`_SECTIONS`."""
    devices = dict.fromkeys(row.device for row in sorted(rows, key=lambda row: not row.driver))  # GPUs first
    parts = (_device([row for row in rows if row.device == of], names or [*_SECTIONS]) for of in devices)
    return "\n\n".join(text for part in parts for text in part)


def updated(path: Path, rows: list[Row]) -> str:
    """Return a page with the tables that its first mark names between its two marks, and all else as it is.

    Raises
    ------
    ValueError
        If the marks are not there, once each and in order, or name a table that there is not.
    """
    page = path.read_text(encoding="utf-8")
    begin, end = (mark.format("([a-z ]+)") for mark in (BEGIN, END))
    marks = [*re.finditer(f"{begin}|{end}", page)]
    if [mark[1] is None for mark in marks] != [False, True]:
        raise ValueError(
            f"{path}: expected one line {BEGIN.format('all')} and after it one line {END}; add them"
        )
    names = None if marks[0][1] == "all" else marks[0][1].split()
    unknown = [name for name in names or () if name not in _SECTIONS]
    if unknown:
        raise ValueError(
            f"{path}: there is no table {unknown[0]}; expected all, or some of {', '.join(_SECTIONS)}"
        )
    return f"{page[: marks[0].end()]}\n{tables(rows, names)}\n{page[marks[1].start() :]}"


def update(path: Path, rows: list[Row]) -> None:
    """Write what :func:`updated` returns, as a whole or not at all."""
    page = updated(path, rows)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(page, encoding="utf-8")
    os.replace(temporary, path)


def _device(rows: list[Row], names: Sequence[str]) -> Iterator[str]:
    """Facts of a device and its tables, of those named; nothing if it has none of them."""
    made = {name: _SECTIONS[name][1](rows) for name in names}
    filled = [name for name in names if len(made[name]) > 2]  # more than the head
    if not filled:
        return
    newest = max(rows, key=lambda row: row.date)
    versions = [f"{name} {getattr(newest, name)}" for name in ("torch", "cuda", "warp", "python", "driver")]
    known = [version for version in versions if not version.endswith(" ")]
    commits = ", ".join(
        dict.fromkeys(row.commit for row in sorted(rows, key=lambda row: row.date) if row.commit)
    )
    yield f"**{newest.device}** ({', '.join(known)}; commit {commits}, {newest.date[:10]})"
    for name in filled:
        yield f"{_SECTIONS[name][0]}:\n\n" + "\n".join(made[name])
    yield from _absent(rows)


def _tutorial(rows: list[Row]) -> list[str]:
    rows = [row for row in rows if row.driver]  # of a GPU, as the tutorial's
    body = []
    for line in LINES:
        name = line.contender + (WITH_RMM if line.gpu_memory == "rmm" else "")
        of = [row for row in rows if row.contender == name and row.execution == line.execution]
        forward, step = (_only(of, workload="w1", mode=mode) for mode in ("forward", "step"))
        cells = [_time(forward), _time(step)]
        if any(cells):
            body.append([line.label, *cells, _peak(step)])
    return _markdown("", ["forward, ms", "training step, ms", "step, peak MiB"], body)


def _network(rows: list[Row]) -> list[str]:
    columns = [(name, mode) for name in NAMED for mode in ("forward", "step")]
    head = [f"{NAMED[name]} {mode}" for name, mode in columns] + ["W1 step, peak MiB"]
    body = []
    for label, of in _by_contender_and_execution(rows):
        cells = [_time(_only(of, workload=name, mode=mode)) for name, mode in columns]
        peak = _only(of, workload="w1", mode="step")
        if any(cells):
            body.append([label, *cells, _peak(peak)])
    return _markdown("", head, body)


def _operator(rows: list[Row]) -> list[str]:
    columns = [(name, mode) for name in NAMED for mode in ("aggregate", "operator")]
    words = {"aggregate": "forward", "operator": "with gradient"}
    head = [f"{NAMED[name]} {words[mode]}" for name, mode in columns]
    body = []
    for label, of in _by_contender_and_execution(rows):
        cells = [_time(_only(of, workload=name, mode=mode)) for name, mode in columns]
        if any(cells):
            body.append([label, *cells])
    return _markdown("", head, body)


def _scaling(rows: list[Row]) -> list[str]:
    rows = [row for row in rows if row.workload.startswith("scaling_") and row.mode in ("knn", "-")]
    keys = sorted(
        {(row.workload, row.references) for row in rows}, key=lambda key: (_KINDS.index(key[0]), key[1])
    )
    largest = max((size for _, size in keys), default=0)
    keys = [(kind, size) for kind, size in keys if kind == _KINDS[0] or size == largest]
    head = [f"{kind.removeprefix('scaling_')} {_count(size)}" for kind, size in keys]
    body = []
    for name, of in _by_contender(rows):
        cells = [_time(_best(of, workload=kind, references=size)) for kind, size in keys]
        if any(cells):
            body.append([name, *cells])
    return _markdown("", head, body)


def _batches(rows: list[Row]) -> list[str]:
    keys = [(kind, operator) for kind in ("batch_dense", "batch_ragged") for operator in ("knn", "radius")]
    head = [f"{kind.removeprefix('batch_')} {operator}" for kind, operator in keys]
    body = []
    for label, of in _by_contender_and_execution(rows):
        cells = [
            _time(_only(of, workload=kind, operator=operator, mode="operator")) for kind, operator in keys
        ]
        if any(cells):
            body.append([label, *cells])
    return _markdown("", head, body)


def _large(rows: list[Row]) -> list[str]:
    rows = [row for row in rows if row.workload == "large"]
    body = []
    for name, of in _by_contender(rows):
        forward, both = (_only(of, mode=mode) for mode in ("aggregate", "operator"))
        body.append([name, _time(forward), _time(both), _peak(both)])
    head = ["forward, ms", "with the features' gradient, ms", "peak on each device, MiB"]
    return _markdown("", head, [line for line in body if any(line[1:])])


def _memory(rows: list[Row]) -> list[str]:
    rows = [row for row in rows if row.workload == "memory" and row.execution in ("eager", "-")]
    sizes = sorted({row.references for row in rows})
    body = [
        [name, *(_peak(_best(of, references=size)) for size in sizes)] for name, of in _by_contender(rows)
    ]
    return _markdown("", [_count(size) for size in sizes], [line for line in body if any(line[1:])])


def _interop(rows: list[Row]) -> list[str]:
    rows = [row for row in rows if row.workload == "interop"]
    sizes = sorted({row.references for row in rows})
    body = [
        [name, *(_time(_best(of, references=size)) for size in sizes)] for name, of in _by_contender(rows)
    ]
    return _markdown("", [f"{_count(size)} elements" for size in sizes], body)


def _absent(rows: list[Row]) -> Iterator[str]:
    missing = {row.contender: row.note for row in rows if row.status == MISSING}
    if missing:
        yield (
            "Not measured here: "
            + "; ".join(f"{name} ({_short(note)})" for name, note in missing.items())
            + "."
        )


_SECTIONS = {
    "tutorial": ("The tutorial's table (W1), reproduced, and ours below it", _tutorial),
    "network": ("Network, milliseconds (median)", _network),
    "operator": (
        "Operator alone, milliseconds: forward, and with the features' gradient; index built in each call",
        _operator,
    ),
    "scaling": ("kNN of a cloud within itself, k = 8, index built in each call, milliseconds", _scaling),
    "batches": ("Batches: forward with the features' gradient, milliseconds", _batches),
    "memory": ("Peak memory of a W1 training step, eager, by number of points, MiB", _memory),
    "large": ("One cloud of 10^8 points, 10^7 queries, about 32 neighbours, 32 features, eager", _large),
    "interop": ("A Warp kernel on fresh tensors that require grad, milliseconds", _interop),
}
_KINDS = ("scaling_uniform", "scaling_clustered", "scaling_surface")
_WORDS = {RED: "wrong", SKIPPED: "too slow", FAILED: "failed"}


def _by_contender(rows: Iterable[Row]) -> Iterator[tuple[str, list[Row]]]:
    """Ours first, each in order of appearance."""
    rows = sorted(rows, key=lambda row: row.kind)
    for name in dict.fromkeys(row.contender for row in rows):
        yield _label(name, rows), [row for row in rows if row.contender == name]


def _by_contender_and_execution(rows: Iterable[Row]) -> Iterator[tuple[str, list[Row]]]:
    for label, of in _by_contender(rows):
        for execution in EXECUTION_ORDER:
            some = [row for row in of if row.execution == execution]
            if some:
                yield f"{label}, {execution}", some


def _label(name: str, rows: Iterable[Row]) -> str:
    ours = any(row.kind == "backend" for row in rows if row.contender == name)
    return f"**{name}**" if ours else name


def _only(rows: Iterable[Row], **wanted: object) -> Row | None:
    found = [row for row in rows if all(getattr(row, key) == value for key, value in wanted.items())]
    return found[-1] if found else None


def _best(rows: Iterable[Row], **wanted: object) -> Row | None:
    """The fastest of the executions, or a row that says why there is none."""
    found = [row for row in rows if all(getattr(row, key) == value for key, value in wanted.items())]
    timed = [row for row in found if row.status == OK]
    return min(timed, key=lambda row: row.p50_ms) if timed else (found[-1] if found else None)


def _time(row: Row | None) -> str:
    return _cell(row, lambda: f"{row.p50_ms:.3g}" if row.p50_ms < 100 else f"{row.p50_ms:.0f}")


def _peak(row: Row | None) -> str:
    return _cell(row, lambda: f"{row.peak_mib:,.0f}")


def _cell(row: Row | None, value) -> str:
    if row is None or row.status == MISSING:
        return ""
    if row.status == OK:
        return value()
    if "OutOfMemory" in row.note or "GiB are free" in row.note:
        return "out of memory"
    if row.status == SKIPPED and row.note.startswith(OUT_OF_MINUTES):
        return "not run"
    return _WORDS[row.status]


def _count(number: int) -> str:
    exponent = len(str(number)) - 1
    return f"10^{exponent}" if number == 10**exponent else f"{number:,}"


def _short(note: str) -> str:
    return note if len(note) < 90 else note[:87] + "..."


def _markdown(corner: str, head: list[str], body: list[list[str]]) -> list[str]:
    lines = [[corner, *head], ["---", *("---:" for _ in head)], *body]
    return ["| " + " | ".join(line) + " |" for line in lines]


def main(arguments: Sequence[str]) -> None:
    """Print the tables, or put them into files."""
    parser = argparse.ArgumentParser(
        prog="python -m pointproj benchmark-table", description="Tables from the benchmark's result files."
    )
    parser.add_argument("files", nargs="+", type=Path, help="CSV files of bench.py")
    parser.add_argument(
        "--update",
        nargs="+",
        type=Path,
        metavar="PAGE",
        help="replace what is between the marks in these files, instead of printing",
    )
    given = parser.parse_args(arguments)
    rows = [row for file in given.files for row in read_rows(file)]
    for page in given.update or ():
        update(page, rows)
    if not given.update:
        print(tables(rows))
