"""All tables of the benchmark, as one Markdown page, from result files alone; and the table of README.md.

python -m pointproj benchmark-table benchmarks/*.csv --output benchmarks/tables.md
python -m pointproj benchmark-table benchmarks/nvidia-h200.csv --readme README.md
"""

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

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
MODELS = {"gino": "GINO", "geotransolver": "GeoTransolver"}
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

Groups = Iterable[tuple[str, list[Row]]]  # label and rows of each line


class Column(NamedTuple):
    """A column of a table: its heading, and the row whose value stands in it."""

    heading: str
    wanted: dict[str, object]
    value: Callable[[Row | None], str]


def milliseconds(row: Row | None) -> str:
    """The median time."""
    return _cell(row, lambda row: f"{row.p50_ms:.3g}" if row.p50_ms < 100 else f"{row.p50_ms:.0f}")


def seconds(row: Row | None) -> str:
    """The median time, for what takes seconds."""
    return _cell(row, lambda row: f"{row.p50_ms / 1e3:.1f}")


def peak(row: Row | None) -> str:
    """Peak memory in MiB."""
    return _cell(row, lambda row: f"{row.peak_mib:,.0f}")


def _cell(row: Row | None, value: Callable[[Row], str]) -> str:
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


def markdown(corner: str, head: list[str], body: list[list[str]]) -> list[str]:
    """The lines of a Markdown table; ``corner`` is the head of its first column."""
    lines = [[corner, *head], ["---", *("---:" for _ in head)], *body]
    return ["| " + " | ".join(line) + " |" for line in lines]


def page(rows: list[Row]) -> str:
    """The page of all tables.

    Raises
    ------
    ValueError
        If the rows of one device are of several runs.
    """
    return f"{HEAD}\n{tables(rows)}\n"


def tables(rows: list[Row]) -> str:
    """Markdown for all rows, device after device, GPUs first; errors as in :func:`page`."""
    require_one_run(rows)
    devices = dict.fromkeys(row.device for row in sorted(rows, key=lambda row: not row.driver))
    parts = (_device(select(rows, device=device)) for device in devices)
    return "\n\n".join(text for part in parts for text in part)


def _device(rows: list[Row]) -> Iterator[str]:
    """Facts of a device and its tables; nothing if it has none of them."""
    made = {title: _table(columns(rows), groups(rows)) for title, columns, groups in _TABLES}
    filled = [title for title in made if len(made[title]) > 2]  # more than the head
    if not filled:
        return
    newest = rows[-1]
    versions = [f"{name} {getattr(newest, name)}" for name in ("torch", "cuda", "warp", "python", "driver")]
    known = [version for version in versions if not version.endswith(" ")]
    yield f"**{newest.device}** ({', '.join(known)}; commit {newest.commit}, {newest.date[:10]})"
    for title in filled:
        yield f"{title}:\n\n" + "\n".join(made[title])
    missing = {row.contender: row.note for row in rows if row.status == MISSING}
    if missing:
        named = (
            f"{name} ({note if len(note) < 90 else note[:87] + '...'})" for name, note in missing.items()
        )
        yield f"Not measured here: {'; '.join(named)}."
    lists = [row for row in rows if row.workload in LISTS and row.status == OK and row.note]
    said = dict.fromkeys((row.contender, FORMS[row.mode].format(k=row.k), row.note) for row in lists)
    if said:
        lines = (f"- {name}, {form}: {note}" for name, form, note in said)
        yield "What lists of other libraries are:\n\n" + "\n".join(lines)


def _table(columns: list[Column], groups: Groups) -> list[str]:
    """A line for each (label, rows), without those that have no cell."""
    lines = []
    for label, rows in groups:
        found = (next(reversed(select(rows, **column.wanted)), None) for column in columns)
        lines.append([label, *(column.value(row) for column, row in zip(columns, found, strict=True))])
    return markdown("", [column.heading for column in columns], [line for line in lines if any(line[1:])])


def _by_contender(rows: Iterable[Row]) -> Groups:
    """Each contender: backends first, in bold, each in order of appearance."""
    rows = sorted(rows, key=lambda row: row.kind)
    ours = {row.contender for row in rows if row.kind == "backend"}
    for name in dict.fromkeys(row.contender for row in rows):
        yield f"**{name}**" if name in ours else name, select(rows, contender=name)


def _by_execution(rows: Iterable[Row]) -> Groups:
    for label, of in _by_contender(rows):
        for execution in EXECUTION_ORDER:
            yield f"{label}, {execution}", select(of, execution=execution)


def _of_tutorial(rows: list[Row]) -> Groups:
    for line in LINES:
        name = line.contender + (WITH_RMM if line.gpu_memory == "rmm" else "")
        of = select(rows, workload="w1", contender=name, execution=line.execution)
        yield line.label, [row for row in of if row.driver]  # of a GPU, as the tutorial's


def _fixed(*columns: tuple) -> Callable[[list[Row]], list[Column]]:
    """The same columns whatever the rows are: heading, what its row has, and how it is shown if not in ms."""
    made = [Column(heading, wanted, *(shown or [milliseconds])) for heading, wanted, *shown in columns]
    return lambda rows: made


def _scaling(rows: list[Row]) -> list[Column]:
    """All sizes of uniform points, the largest of the others, and the batch."""
    sizes = {name: sorted({row.references for row in rows if row.workload == name}) for name in SCALING}
    kept = [(name, n) for name, of in sizes.items() for n in (of if name == "scaling_uniform" else of[-1:])]
    made = [_of_size(name, size, f"{SCALING[name]} {_count(size)}") for name, size in kept]
    of_batch = select(rows, workload="scaling_batch")
    batch = [_of_size("scaling_batch", row.references, "16 of 10^4") for row in of_batch]
    return [*made, *batch[:1]]


def _farthest(rows: list[Row]) -> list[Column]:
    keys = dict.fromkeys((r.clouds, r.references, r.k) for r in rows if r.workload == "farthest")
    return [
        Column(
            f"{f'{clouds} of ' if clouds > 1 else ''}{size // clouds:,} to {k:,}",
            {"workload": "farthest", "references": size, "k": k},
            milliseconds,
        )
        for clouds, size, k in keys
    ]


def _models(rows: list[Row]) -> list[Column]:
    keys = sorted({(row.workload, row.references) for row in rows if row.workload in MODELS})
    return [_of_size(name, size, f"{MODELS[name]}, {_count(size)} points") for name, size in keys]


def _lists(modes: dict[str, str], rows: list[Row]) -> list[Column]:
    found = [row for row in rows if row.workload in LISTS and row.mode in modes]
    numbers = {(row.workload, row.mode): row.k for row in found}
    present = {(row.references, row.workload, row.mode) for row in found}
    keys = sorted(present, key=lambda key: (key[0], [*LISTS].index(key[1]), [*modes].index(key[2])))
    return [
        _of_size(
            name, size, f"{LISTS[name]} {_count(size)}, {modes[mode].format(k=numbers[name, mode])}", mode
        )
        for size, name, mode in keys
    ]


def _of_size(workload: str, size: int, heading: str, mode: str | None = None) -> Column:
    wanted = {"workload": workload, "references": size} | ({"mode": mode} if mode else {})
    return Column(heading, wanted, milliseconds)


def _of(**wanted: object) -> Callable[[list[Row]], Groups]:
    return lambda rows: _by_contender(select(rows, **wanted))


_STEP = {"workload": "w1", "mode": "step"}
_HOST = {
    ("host_64", "knn"): "64, kNN",
    ("host_64", "radius"): "64, radius",
    ("host_w1", "knn"): "W1",
}
_HOST_MODES = {"aggregate": "forward", "operator": "and gradient", "step": "training step"}
_OPERATOR_MODES = {"aggregate": "forward", "operator": "features' gradient", "gradients": "all gradients"}
_START_MODES = {"first_step": "first step", "whole": "whole run"}

# Title, columns, lines.
_TABLES: tuple[tuple[str, Callable[[list[Row]], list[Column]], Callable[[list[Row]], Groups]], ...] = (
    (
        "The tutorial's table (W1), reproduced, and ours below it",
        _fixed(
            ("forward, ms", {"mode": "forward"}),
            ("training step, ms", {"mode": "step"}),
            ("step, peak MiB", {"mode": "step"}, peak),
        ),
        _of_tutorial,
    ),
    (
        "Network, milliseconds (median)",
        _fixed(
            ("W1 forward", {"workload": "w1", "mode": "forward"}),
            *((f"{words} step", {"workload": name, "mode": "step"}) for name, words in NAMED.items()),
            ("W1 step, peak MiB", _STEP, peak),
        ),
        _by_execution,
    ),
    (
        "Operator alone, index built in each call, milliseconds",
        _fixed(
            *(
                (f"{words} {called}", {"workload": name, "mode": mode})
                for name, words in NAMED.items()
                for mode, called in _OPERATOR_MODES.items()
            )
        ),
        _by_execution,
    ),
    (
        "kNN of W1, distances and indices, milliseconds",
        _fixed(
            ("built in the call", {"workload": "w1", "mode": "knn"}),
            ("ready", {"workload": "w1", "mode": "search"}),
        ),
        _by_execution,
    ),
    (
        "kNN of a cloud within itself, k = 8, distances and indices, index built in the call, ms",
        _scaling,
        _by_execution,
    ),
    ("Farthest points, milliseconds", _farthest, _by_execution),
    (
        "Time that the host takes to issue an eager call, milliseconds",
        _fixed(
            *(
                (f"{words}: {called}", {"workload": name, "operator": operator, "mode": mode})
                for (name, operator), words in _HOST.items()
                for mode, called in _HOST_MODES.items()
            )
        ),
        _by_contender,
    ),
    (
        "Batches: forward with the features' gradient, milliseconds",
        _fixed(
            *(
                (
                    f"{kind} {operator}",
                    {"workload": f"batch_{kind}", "operator": operator, "mode": "operator"},
                )
                for kind in ("dense", "ragged")
                for operator in ("knn", "radius")
            )
        ),
        _by_execution,
    ),
    (
        "Lists of neighbours within a radius, index built in each call, milliseconds",
        partial(_lists, FORMS),
        _by_execution,
    ),
    (
        "Aggregation over ready lists of 25 channels, with the features' gradient, milliseconds",
        partial(_lists, LIST_SUMS),
        _by_execution,
    ),
    (
        "One cloud of 10^8 points, 10^7 queries, about 32 neighbours, 32 features, eager",
        _fixed(
            ("forward, ms", {"mode": "aggregate"}),
            ("with the features' gradient, ms", {"mode": "operator"}),
            ("peak on each device, MiB", {"mode": "operator"}, peak),
        ),
        _of(workload="large"),
    ),
    (
        "A training step of whole models, with their library's search and with ours, milliseconds",
        _models,
        _by_execution,
    ),
    (
        "From the start of a training run to the end of its first step, and of the run, seconds",
        _fixed(
            *(
                (f"{words}, {start} caches", {"mode": mode, "execution": start}, seconds)
                for mode, words in _START_MODES.items()
                for start in ("cold", "warm")
            )
        ),
        _of(workload="start"),
    ),
    (
        "A Warp kernel on new tensors that require a gradient, milliseconds",
        lambda rows: [
            Column(f"{_count(size)} elements", {"references": size}, milliseconds)
            for size in sorted({row.references for row in select(rows, workload="interop")})
        ],
        _of(workload="interop"),
    ),
    (
        "`from pointproj import knn` in a new process, after `import torch`",
        _fixed(("ms", {})),
        _of(workload="import"),
    ),
)


def _count(number: int) -> str:
    exponent = len(str(number)) - 1
    return f"10^{exponent}" if number == 10**exponent else f"{number:,}"


def renew(page: Path, rows: list[Row]) -> None:
    """Write the README's table of these rows into a page, in place of the one that it has.

    Parameters
    ----------
    page : Path
        With the comments :data:`BEGIN` and :data:`END`, which stay.
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
    page.write_text(f"{before}{BEGIN}\n\n{readme_table(rows)}\n\n{END}{after}", encoding="utf-8")


def readme_table(rows: list[Row]) -> str:
    """A training step of W1 and W2, ours and other libraries', and a sentence about the run."""
    head = [f"{words}: {how}" for words in README_WORKLOADS.values() for how in ("eager", "best")]
    body = []
    for name, label in README_LINES.items():
        steps = select(rows, mode="step", contender=name)
        best = {workload: fastest(select(steps, workload=workload)) for workload in README_WORKLOADS}
        cells = []
        for workload, quickest in best.items():
            eager = select(steps, workload=workload, execution="eager")
            cells += [milliseconds(next(reversed(eager), None)), milliseconds(quickest)]
        body.append([label, *cells, f"{peak(best['w1'])} MiB" if best["w1"] is not None else ""])
    lines = markdown("milliseconds", [*head, "peak memory, kNN"], [line for line in body if any(line[1:])])
    run = rows[-1]
    versions = f"torch {run.torch.partition('+')[0]}, commit {run.commit[:7]}, {run.date[:10]}"
    return "\n".join([*lines, "", f"One {run.device}; all rows are of one run ({versions})."])


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
        text = page([row for file in chosen.files for row in read_rows(file)])
        if chosen.readme is not None:
            renew(chosen.readme, read_rows(chosen.files[0]))
    except ValueError as error:
        parser.error(str(error))
    if chosen.output is not None:
        chosen.output.write_text(text, encoding="utf-8")
    elif chosen.readme is None:
        print(text, end="")
