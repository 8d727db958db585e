"""All tables of the benchmark, as one Markdown page, from result files alone.

python -m pointproj benchmark-table benchmarks/*.csv --output benchmarks/tables.md
"""

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from pointproj.benchmark.cells import markdown, milliseconds, only, peak, seconds
from pointproj.benchmark.config import WITH_RMM
from pointproj.benchmark.readme_table import renew
from pointproj.benchmark.results import (
    MISSING,
    OK,
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
SCALING = {
    "scaling_uniform": "uniform",
    "scaling_clustered": "clustered",
    "scaling_surface": "surface",
}
LISTS = {"lists_uniform": "uniform", "lists_surface": "surface"}
FORMS = {"padded": "{k} nearest", "csr": "all"}
MODELS = {"gino": "GINO", "geotransolver": "GeoTransolver"}
SUMS = {"aggregate_padded": "padded", "aggregate_csr": "CSR"}
EXECUTION_ORDER = ("captured", "compiled", "eager")


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
    made = {name: make(rows) for name, make in _SECTIONS.items()}
    filled = [name for name in made if len(made[name]) > 2]  # more than the head
    if not filled:
        return
    newest = rows[-1]
    versions = [f"{name} {getattr(newest, name)}" for name in ("torch", "cuda", "warp", "python", "driver")]
    known = [version for version in versions if not version.endswith(" ")]
    yield f"**{newest.device}** ({', '.join(known)}; commit {newest.commit}, {newest.date[:10]})"
    for name in filled:
        yield f"{name}:\n\n" + "\n".join(made[name])
    yield from _absent(rows)
    yield from _otherwise(rows)


def _tutorial(rows: list[Row]) -> list[str]:
    rows = [row for row in rows if row.driver]  # of a GPU, as the tutorial's
    groups = []
    for line in LINES:
        name = line.contender + (WITH_RMM if line.gpu_memory == "rmm" else "")
        groups.append((line.label, select(rows, workload="w1", contender=name, execution=line.execution)))

    def cells(of: list[Row]) -> list[str]:
        forward, step = (only(of, mode=mode) for mode in ("forward", "step"))
        return [milliseconds(forward), milliseconds(step), peak(step)]

    return _table(["forward, ms", "training step, ms", "step, peak MiB"], groups, cells)


def _network(rows: list[Row]) -> list[str]:
    columns = [("w1", "forward"), *((name, "step") for name in NAMED)]
    head = [f"{NAMED[name]} {mode}" for name, mode in columns] + ["W1 step, peak MiB"]

    def cells(of: list[Row]) -> list[str]:
        times = [milliseconds(only(of, workload=name, mode=mode)) for name, mode in columns]
        return [*times, peak(only(of, workload="w1", mode="step"))]

    return _table(head, _by_contender_and_execution(rows), cells)


def _operator(rows: list[Row]) -> list[str]:
    words = {"aggregate": "forward", "operator": "features' gradient", "gradients": "all gradients"}
    columns = [(name, mode) for name in NAMED for mode in words]
    head = [f"{NAMED[name]} {words[mode]}" for name, mode in columns]

    def cells(of: list[Row]) -> list[str]:
        return [milliseconds(only(of, workload=name, mode=mode)) for name, mode in columns]

    return _table(head, _by_contender_and_execution(rows), cells)


def _scaling(rows: list[Row]) -> list[str]:
    rows = [row for row in rows if row.workload in SCALING and row.mode in ("knn", "-")]
    present = {(row.workload, row.references) for row in rows}
    keys = sorted(present, key=lambda key: ([*SCALING].index(key[0]), key[1]))
    largest = max((size for _, size in keys), default=0)
    keys = [(kind, size) for kind, size in keys if kind == "scaling_uniform" or size == largest]
    head = [f"{SCALING[kind]} {_count(size)}" for kind, size in keys]

    def cells(of: list[Row]) -> list[str]:
        return [milliseconds(only(of, workload=kind, references=size)) for kind, size in keys]

    return _table(head, _by_contender_and_execution(rows), cells)


def _search(rows: list[Row]) -> list[str]:
    def cells(of: list[Row]) -> list[str]:
        return [milliseconds(only(of, mode=mode)) for mode in ("knn", "search")]

    return _table(
        ["built in the call", "ready"], _by_contender_and_execution(select(rows, workload="w1")), cells
    )


def _host(rows: list[Row]) -> list[str]:
    words = {"aggregate": "forward", "operator": "and gradient", "step": "training step"}
    clouds = {("host_64", "knn"): "64, kNN", ("host_64", "radius"): "64, radius", ("host_w1", "knn"): "W1"}
    keys = [(*cloud, mode) for cloud in clouds for mode in words]
    head = [f"{clouds[workload, operator]}: {words[mode]}" for workload, operator, mode in keys]

    def cells(of: list[Row]) -> list[str]:
        return [
            milliseconds(only(of, workload=w, operator=operator, mode=mode)) for w, operator, mode in keys
        ]

    return _table(head, _by_contender(row for row in rows if row.workload.startswith("host")), cells)


def _models(rows: list[Row]) -> list[str]:
    rows = [row for row in rows if row.workload in MODELS]
    keys = sorted({(row.workload, row.references) for row in rows})
    head = [f"{MODELS[workload]}, {_count(size)} points" for workload, size in keys]

    def cells(of: list[Row]) -> list[str]:
        return [milliseconds(only(of, workload=workload, references=size)) for workload, size in keys]

    return _table(head, _by_contender_and_execution(rows), cells)


def _start(rows: list[Row]) -> list[str]:
    words = {"first_step": "first step", "whole": "whole run"}
    keys = [(mode, start) for mode in words for start in ("cold", "warm")]

    def cells(of: list[Row]) -> list[str]:
        found = (only(of, mode=mode, execution=start) for mode, start in keys)
        return [seconds(row) for row in found]

    head = [f"{words[mode]}, {start} caches" for mode, start in keys]
    return _table(head, _by_contender(select(rows, workload="start")), cells)


def _batches(rows: list[Row]) -> list[str]:
    keys = [(kind, operator) for kind in ("batch_dense", "batch_ragged") for operator in ("knn", "radius")]
    head = [f"{kind.removeprefix('batch_')} {operator}" for kind, operator in keys]

    def cells(of: list[Row]) -> list[str]:
        found = (only(of, workload=kind, operator=operator, mode="operator") for kind, operator in keys)
        return [milliseconds(row) for row in found]

    return _table(head, _by_contender_and_execution(rows), cells)


def _lists(rows: list[Row]) -> list[str]:
    return _of_lists(rows, FORMS)


def _list_sums(rows: list[Row]) -> list[str]:
    return _of_lists(rows, SUMS)


def _of_lists(rows: list[Row], modes: dict[str, str]) -> list[str]:
    rows = [row for row in rows if row.workload in LISTS and row.mode in modes]
    present = {(row.references, row.workload, row.mode) for row in rows}
    keys = sorted(present, key=lambda key: (key[0], [*LISTS].index(key[1]), [*modes].index(key[2])))
    numbers = {row.mode: row.k for row in rows}
    named = [modes[mode].format(k=numbers[mode]) for _, _, mode in keys]
    head = [f"{LISTS[of]} {_count(size)}, {name}" for (size, of, _), name in zip(keys, named, strict=True)]

    def cells(of: list[Row]) -> list[str]:
        return [milliseconds(only(of, references=s, workload=w, mode=mode)) for s, w, mode in keys]

    return _table(head, _by_contender_and_execution(rows), cells)


def _large(rows: list[Row]) -> list[str]:
    def cells(of: list[Row]) -> list[str]:
        forward, both = (only(of, mode=mode) for mode in ("aggregate", "operator"))
        return [milliseconds(forward), milliseconds(both), peak(both)]

    head = ["forward, ms", "with the features' gradient, ms", "peak on each device, MiB"]
    return _table(head, _by_contender(select(rows, workload="large")), cells)


def _memory(rows: list[Row]) -> list[str]:
    rows = [row for row in rows if row.workload == "memory" and row.execution in ("eager", "-")]
    return _by_size(rows, "", peak)


def _interop(rows: list[Row]) -> list[str]:
    return _by_size(select(rows, workload="interop"), " elements", milliseconds)


def _by_size(rows: list[Row], unit: str, value: Callable[[Row | None], str]) -> list[str]:
    sizes = sorted({row.references for row in rows})

    def cells(of: list[Row]) -> list[str]:
        return [value(fastest(select(of, references=size))) for size in sizes]

    return _table([f"{_count(size)}{unit}" for size in sizes], _by_contender(rows), cells)


def _import(rows: list[Row]) -> list[str]:
    return _table(["ms"], _by_contender(select(rows, workload="import")), lambda of: [milliseconds(of[-1])])


def _table(
    head: list[str], groups: Iterable[tuple[str, list[Row]]], cells: Callable[[list[Row]], list[str]]
) -> list[str]:
    """A line for each (label, rows), without those that have no cell."""
    lines = [[label, *cells(of)] for label, of in groups]
    return markdown("", head, [line for line in lines if any(line[1:])])


def _absent(rows: list[Row]) -> Iterator[str]:
    missing = {row.contender: row.note for row in rows if row.status == MISSING}
    if missing:
        yield (
            "Not measured here: "
            + "; ".join(f"{name} ({_short(note)})" for name, note in missing.items())
            + "."
        )


def _otherwise(rows: list[Row]) -> Iterator[str]:
    """What libraries return that return something else than our lists."""
    rows = [row for row in rows if row.workload in LISTS and row.status == OK and row.note]
    said = dict.fromkeys((row.contender, FORMS[row.mode].format(k=row.k), row.note) for row in rows)
    if said:
        yield "What lists of other libraries are:\n\n" + "\n".join(
            f"- {name}, {form}: {note}" for name, form, note in said
        )


_SECTIONS: dict[str, Callable[[list[Row]], list[str]]] = {
    "The tutorial's table (W1), reproduced, and ours below it": _tutorial,
    "Network, milliseconds (median)": _network,
    "Operator alone, index built in each call, milliseconds": _operator,
    "kNN of W1, distances and indices, milliseconds": _search,
    "kNN of a cloud within itself, k = 8, distances and indices, index built in the call, ms": _scaling,
    "Time that the host takes to issue an eager call, milliseconds": _host,
    "Batches: forward with the features' gradient, milliseconds": _batches,
    "Peak memory of a W1 training step, eager, by number of points, MiB": _memory,
    "Lists of neighbours within a radius, index built in each call, milliseconds": _lists,
    "Aggregation over ready lists of 25 channels, with the features' gradient, milliseconds": _list_sums,
    "One cloud of 10^8 points, 10^7 queries, about 32 neighbours, 32 features, eager": _large,
    "A training step of whole models, with their library's search and with ours, milliseconds": _models,
    "From the start of a training run to the end of its first step, and of the run, seconds": _start,
    "A Warp kernel on new tensors that require a gradient, milliseconds": _interop,
    "`from pointproj import knn` in a new process, after `import torch`": _import,
}


def _by_contender(rows: Iterable[Row]) -> Iterator[tuple[str, list[Row]]]:
    """(label, rows) of each contender: backends first, each in order of appearance."""
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


def _count(number: int) -> str:
    exponent = len(str(number)) - 1
    return f"10^{exponent}" if number == 10**exponent else f"{number:,}"


def _short(note: str) -> str:
    return note if len(note) < 90 else note[:87] + "..."


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
