"""Tables from result files: all of them as one Markdown page, and the one of README.md.

python -m pointproj benchmark-table benchmarks/*.csv --output benchmarks/tables.md
python -m pointproj benchmark-table benchmarks/nvidia-h100-80gb-hbm3.csv --readme README.md
"""

import argparse
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from pointproj import command_line
from pointproj.benchmark.cells import cell, markdown, readable_size
from pointproj.benchmark.config import WITH_RMM
from pointproj.benchmark.results import MISSING, OK, Row, fastest, read_rows, require_one_run, select
from pointproj.benchmark.standings import standings
from pointproj.benchmark.tutorial import LINES

HEAD = """# What was measured

The results in the CSV files beside this page. A device has one table of each kind, with the newest run of
each implementation; the line above it names the runs where a device has several. What is timed, how, and what
bounds it is said in [README.md](README.md). `python -m pointproj benchmark-table` writes this page.
"""
LOSSES = """## Where another library is faster

Our fastest backend beside the fastest other library in the same execution, of the newest run that has both;
the worst first. All that is not listed here is won, or measured by us alone. Formulas and lists of other
libraries may differ: notes below say so.
"""
NAMED = {"w1": "W1", "w2": "W2, r = 0.1", "w2_wide": "W2, r = 0.25"}
SCALING = {"scaling_uniform": "uniform", "scaling_clustered": "clustered", "scaling_surface": "surface"}
LISTS = {
    **{"lists_uniform": "uniform", "lists_surface": "surface"},
    **{"lists_crystal": "crystal", "lists_atoms": "atoms"},
}
CROWDED = {"lists_crowded": "of about 7,800"}
CFD = {
    **{"cfd_volume": "cells", "cfd_wall": "wall in cells", "cfd_far": "cells in wall"},
    **{"cfd_box": "sums in a box", "cfd_lists": "lists of the wall"},
}
FORMS = {"padded": "{k} nearest", "csr": "all"}

BEGIN, END = "<!-- begin of the benchmark's table -->", "<!-- end of the benchmark's table -->"
PEAK = "peak memory, kNN"
README_LINES = {
    "tutorial torch": "plain torch, brute force",
    "cuML": "cuML",
    "PhysicsNeMo": "PhysicsNeMo",
    "warp": "**pointproj**, `backend=warp`",
    "native": "**pointproj**, `backend=native`",
}

Columns = dict[str, dict[str, object]]  # heading -> values of the row that it shows
Groups = Iterable[tuple[str, list[Row]]]  # label and rows of each line


def page(*files: list[Row]) -> str:
    """The page of all tables, after what we lose; ValueError as by :func:`require_one_run`, of each file."""
    return "\n".join([HEAD, *_losses(files), tables(*files), ""])


def _losses(files: Sequence[list[Row]]) -> Iterator[str]:
    """A table for each device on which another library is faster in anything, and its heading."""
    yield LOSSES
    devices: dict[str, list[Row]] = {}
    for row in (row for rows in files for row in rows):
        devices.setdefault(row.device, []).append(row)
    for device, rows in devices.items():
        lines = standings(rows, losses=True)
        if lines:
            yield "\n".join([f"### Faster than ours: {device}\n", *lines, ""])


def tables(*files: list[Row]) -> str:
    """Markdown for the rows of files, a section for each device; errors as in :func:`page`.

    Devices with the newest results come first: single GPUs, then several GPUs, then CPUs.
    """
    for rows in files:
        require_one_run(rows)
    runs = [select(rows, device=of) for rows in files for of in dict.fromkeys(row.device for row in rows)]
    devices: dict[str, list[list[Row]]] = {}
    for rows in sorted(runs, key=lambda rows: rows[-1].date, reverse=True):
        devices.setdefault(rows[-1].device, []).append(rows)
    ordered = sorted(devices, key=lambda of: (not devices[of][0][-1].driver, bool(re.match(r"\d+ x ", of))))
    return "\n\n".join(text for device in ordered for text in _section(device, devices[device]))


def _section(device: str, runs: list[list[Row]]) -> Iterator[str]:
    """The runs of a device, newest first, and its tables; nothing if it has no table."""
    filled = [text for title, made in _TABLES.items() for text in _table(title, made, runs)]
    if not filled:
        return
    yield f"## {device}"
    yield "\n".join(f"- {_run_of(rows[-1])}: {_versions(rows[-1])}" for rows in runs)
    yield from filled
    rows = [row for of in reversed(runs) for row in of]
    measured = {row.implementation for row in select(rows, status=OK)}
    missing = {row.implementation: row.note for row in select(rows, status=MISSING)}
    notes = [f"{name} ({_shortened(note)})" for name, note in missing.items() if name not in measured]
    if notes:
        yield f"Not measured here: {'; '.join(notes)}."
    lists = [row for row in select(rows, status=OK) if row.workload in LISTS and row.note]
    kinds = dict.fromkeys(f"- {r.implementation}, {FORMS[r.mode].format(k=r.k)}: {r.note}" for r in lists)
    if kinds:
        yield "### What the lists of other libraries hold\n\n" + "\n".join(kinds)


def _table(title: str, made: Any, runs: list[list[Row]]) -> Iterator[str]:
    """A table with its heading and runs, each implementation from its newest run; nothing without lines."""
    columns, groups = made if isinstance(made, tuple) else (made, _by_execution)
    columns_of = columns if callable(columns) else lambda rows: columns
    shown: list[Row] = []
    newest: dict[str, str] = {}  # implementation -> its run
    for rows in runs:
        values = columns_of(rows).values()
        found = [row for row in rows if row.status != MISSING and any(select([row], **of) for of in values)]
        found = [row for row in found if row.implementation not in newest]
        shown += found
        newest |= {row.implementation: _run_of(row) for row in found}
    lines = lines_of(columns_of(shown), groups(shown), "{s:.1f}" if title.endswith(", seconds") else "{ms}")
    if len(lines) <= 2:  # a head without lines
        return
    yield f"### {title}"
    if len(runs) > 1:
        first, *others = dict.fromkeys(newest.values())
        names = {run: ", ".join(name for name, of in newest.items() if of == run) for run in others}
        yield "; ".join([f"Results of {first}", *(f"{of} of {run}" for run, of in names.items())]) + "."
    yield "\n".join(lines)


def _run_of(row: Row) -> str:
    return f"commit {row.commit}, {row.date[:16].replace('T', ' ')}"


def _versions(row: Row) -> str:
    versions = [f"{name} {getattr(row, name)}" for name in ("torch", "cuda", "warp", "python", "driver")]
    return ", ".join(version for version in versions if not version.endswith(" "))


def _shortened(note: str) -> str:
    return note if len(note) < 90 else f"{note[:87]}..."


def lines_of(columns: Columns, groups: Groups, form: str, corner: str = "") -> list[str]:
    """A line for each (label, rows) of the groups, without those that have no cell."""
    forms = dict.fromkeys(columns, form) | {of: "{mib:,.0f}" for of in columns if of.endswith("MiB")}
    forms[PEAK] = "{mib:,.0f} MiB"
    lines = [
        [label, *(cell(fastest(select(of, **columns[heading])), forms[heading]) for heading in columns)]
        for label, of in groups
    ]
    return markdown(corner, [*columns], [line for line in lines if any(line[1:])])


def by_implementation(rows: list[Row]) -> Groups:
    """The rows of each implementation: backends first and in bold."""
    rows = sorted(rows, key=lambda row: row.kind)
    ours = {row.implementation for row in rows if row.kind == "backend"}
    for name in dict.fromkeys(row.implementation for row in rows):
        yield f"**{name}**" if name in ours else name, select(rows, implementation=name)


def _by_execution(rows: list[Row]) -> Groups:
    for label, of in by_implementation(rows):
        for execution in ("captured", "compiled", "eager"):
            yield f"{label}, {execution}", select(of, execution=execution)


def _of_tutorial(rows: list[Row]) -> Groups:
    for line in LINES:
        name = line.implementation + (WITH_RMM if line.gpu_memory == "rmm" else "")
        of = select(rows, workload="w1", implementation=name, execution=line.execution)
        yield line.label, [row for row in of if row.driver]  # of a GPU, as the tutorial's


def _columns(between: str = " ", /, **keys: str | Mapping[str, str]) -> Columns:
    """A column for each combination of values of the mappings, headed by their words; a string is common."""
    common = {key: value for key, value in keys.items() if isinstance(value, str)}
    varied = {key: words for key, words in keys.items() if key not in common}
    return {
        between.join(map(dict.get, varied.values(), values)): common | dict(zip(varied, values, strict=True))
        for values in product(*varied.values())
    }


def _found(names: Mapping[str, str], heading: str, rows: list[Row], further: str = "clouds") -> Columns:
    """A column for each heading of the rows of some workloads, with what these rows have in common."""
    order, columns = [*names], {}
    found = [row for row in rows if row.workload in names]
    for row in sorted(found, key=lambda row: (order.index(row.workload), row.k or 0, row.references)):
        each = row.references // row.clouds
        clouds = f"{row.clouds} of " if row.clouds > 1 else ""
        given = {"name": names[row.workload], "size": readable_size(each), "each": each, "k": row.k}
        title = heading.format(clouds=clouds, **given)
        columns[title] = {key: getattr(row, key) for key in ("workload", "references", further)}
    return columns


def _scaling(rows: list[Row]) -> Columns:
    """All sizes of uniform points, the largest of the others, and the batch."""
    largest = {row.workload: row.references for row in sorted(rows, key=lambda row: row.references)}
    shown = [r for r in rows if r.workload == "scaling_uniform" or r.references == largest[r.workload]]
    return _found(SCALING | {"scaling_batch": "16 of"}, "{name} {size}", shown)


def _attend(rows: list[Row]) -> Columns:
    shown = {"forward": "aggregate", "with gradients": "operator", "with gradients, peak MiB": "operator"}
    sizes = _found({"attend": ""}, "{size}", rows).items()
    return {
        f"{size}, {said}": of | {"mode": mode} for (size, of), (said, mode) in product(sizes, shown.items())
    }


def _lists(modes: dict[str, str], rows: list[Row]) -> Columns:
    """Small clouds first; the modes of a cloud beside each other."""
    columns = {}
    for size, name, mode in product(sorted({row.references for row in rows}), LISTS, modes):
        found = select(rows, workload=name, references=size, mode=mode)
        columns |= _found({name: LISTS[name]}, f"{{name}} {{size}}, {modes[mode]}", found, further="mode")
    return columns


_OPERATORS = {"aggregate": "forward", "operator": "features' gradient", "gradients": "all gradients"}
_HOST_64 = {"knn": "64, kNN", "radius": "64, radius"}
_HOST_MODES = {"aggregate": "forward", "operator": "and gradient", "step": "training step"}
_BATCHES = {"batch_dense": "dense", "batch_ragged": "ragged"}
_LARGE = {"aggregate": "forward, ms", "operator": "with the features' gradient, ms"}
_STARTS = {"first_step": "first step", "whole": "whole run"}
_STEP_PEAK = {"workload": "w1", "mode": "step"}


# Title -> columns, or what makes them of the rows; and what makes the lines, if not :func:`_by_execution`.
_TABLES: dict[str, Any] = {
    "The tutorial's table (W1), reproduced, and ours below it": (
        _columns(mode={"forward": "forward, ms", "step": "training step, ms"}, workload="w1")
        | {"step, peak MiB": _STEP_PEAK},
        _of_tutorial,
    ),
    "Network, milliseconds (median)": {
        "W1 forward": {"workload": "w1", "mode": "forward"},
        **_columns(workload=NAMED, mode={"step": "step"}),
        "W1 step, peak MiB": _STEP_PEAK,
    },
    "Operator alone, index built in each call, milliseconds": _columns(workload=NAMED, mode=_OPERATORS),
    "kNN of W1, distances and indices, milliseconds": _columns(
        mode={"knn": "built in the call", "search": "ready"}, workload="w1"
    ),
    "kNN of a cloud within itself, k = 8, distances and indices, index built in the call, ms": _scaling,
    "Attention over the 16 nearest, 64 channels, 4 heads, milliseconds": _attend,
    "Farthest points, milliseconds": (
        partial(_found, {"farthest": ""}, "{clouds}{each:,} to {k:,}", further="k"),
        lambda rows: by_implementation(
            select(rows, workload="farthest")
        ),  # in the order that it was measured in
    ),
    "Time that the host takes to issue an eager call, milliseconds": (
        _columns(": ", workload="host_64", operator=_HOST_64, mode=_HOST_MODES)
        | _columns(": ", workload={"host_w1": "W1"}, operator="knn", mode=_HOST_MODES),
        by_implementation,
    ),
    "Batches: forward with the features' gradient, milliseconds": _columns(
        workload=_BATCHES, operator={"knn": "knn", "radius": "radius"}
    ),
    "Lists of neighbours within a radius, index built in each call, milliseconds": partial(_lists, FORMS),
    "Aggregation over ready lists of 25 channels, with the features' gradient, milliseconds": partial(
        _lists, {"aggregate_padded": "padded", "aggregate_csr": "CSR"}
    ),
    "The k nearest of many within a radius, milliseconds": partial(
        _found, CROWDED, "{k} {name}, {size} points", further="k"
    ),
    "A graded cloud of cells around a body, index built in each call, milliseconds": partial(
        _found, CFD, "{name}, k = {k}, {size} points", further="mode"
    ),
    "Second derivatives (a loss of slopes, by the features), milliseconds": (
        _columns(workload=NAMED, mode={"second": "by the features"})
        | {"W2 second, peak MiB": {"workload": "w2", "mode": "second"}},
        _by_execution,
    ),
    "One cloud of 10^8 points, 10^7 queries, about 32 neighbours, 32 features, eager": (
        _columns(mode=_LARGE, workload="large")
        | {"peak on each device, MiB": {"workload": "large", "mode": "operator"}},
        by_implementation,
    ),
    "A training step of whole models, with their library's search and with ours, milliseconds": partial(
        _found, {"geotransolver": "GeoTransolver", "gino": "GINO"}, "{name}, {size} points"
    ),
    "From the start of a training run to the end of its first step, and of the run, seconds": (
        _columns(", ", mode=_STARTS, execution={"cold": "cold caches", "warm": "warm caches"}),
        by_implementation,
    ),
    "`from pointproj import knn` in a new process, after `import torch`": (
        {"ms": {"workload": "import"}},
        by_implementation,
    ),
}
_README = {
    f"{said}: {best}": {"workload": name, **execution}
    for name, said in {"w1": "kNN, k = 7", "w2": "radius 0.1", "w2_wide": "radius 0.25"}.items()
    for best, execution in {"eager": {"execution": "eager"}, "best": {}}.items()
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
    steps, run = select(rows, mode="step"), rows[-1]
    groups = [(said, select(steps, implementation=name)) for name, said in README_LINES.items()]
    lines = lines_of(_README | {PEAK: {"workload": "w1"}}, groups, "{ms}", "milliseconds")
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
    chosen = command_line.parse(parser, arguments)
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
