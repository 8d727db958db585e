"""Our backends beside the fastest other library, in everything that both measured."""

from collections.abc import Iterable

from pointproj.benchmark.cells import cell, markdown, readable_size
from pointproj.benchmark.results import OK, Row, fastest, select


def standings(rows: Iterable[Row], *, losses: bool = False) -> list[str]:
    """Markdown: our fastest backend and the fastest other library of each measurement, the worst first.

    A measurement is a workload of one size, a mode and an execution; it is taken from the newest run
    that has both. ``losses`` shows only those in which another library is faster. Libraries whose
    formula or list differs are compared too: notes say so.
    """
    compared: dict[tuple, dict[str, list[Row]]] = {}
    for row in select(rows, status=OK):
        what = row.workload, row.operator, row.mode, row.execution, row.queries, row.references
        what = (*what, row.clouds, row.k, row.radius)
        compared.setdefault(what, {}).setdefault(row.date, []).append(row)
    lines = []
    for runs in compared.values():
        for _, measured in sorted(runs.items(), reverse=True):
            ours, other = (fastest(select(measured, kind=kind)) for kind in ("backend", "peer"))
            if ours and other:  # the newest run that has both
                lines.append((other.p50_ms / ours.p50_ms, ours, other))
                break
    lines = [line for line in lines if line[0] < 1 or not losses]
    body = [
        [_said(ours), *map(_with_time, (ours, other)), f"{ratio:.3g}"]
        for ratio, ours, other in sorted(lines, key=lambda line: line[0])
    ]
    return markdown("measurement", ["ours, ms", "fastest other, ms", "theirs / ours"], body) if body else []


def _said(row: Row) -> str:
    neighborhood = [f"k = {row.k}"] if row.k else []
    neighborhood += [f"r = {row.radius:g}"] if row.radius else []
    clouds = f"{row.clouds} clouds, " if row.clouds > 1 else ""
    size = f"{readable_size(row.queries)} among {readable_size(row.references)}"
    return ", ".join([f"`{row.workload}` {row.mode}, {row.execution}", f"{clouds}{size}", *neighborhood])


def _with_time(row: Row) -> str:
    return f"{row.implementation} {cell(row, '{ms}')}"
