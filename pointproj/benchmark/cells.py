"""Cells of the benchmark's tables, and tables of them in Markdown."""

from collections.abc import Callable, Iterable

from pointproj.benchmark.results import MISSING, OK, OUT_OF_MINUTES, SKIPPED, Row, select


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
