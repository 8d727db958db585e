"""What the cells of tables hold, and tables of them in Markdown."""

from pointproj.benchmark.results import MISSING, OK, SKIPPED, Row


def readable_size(number: int) -> str:
    """A count, as a power of ten if it is one."""
    exponent = len(str(number)) - 1
    return f"10^{exponent}" if number == 10**exponent else f"{number:,}"


def markdown(corner: str, head: list[str], body: list[list[str]]) -> list[str]:
    """The lines of a Markdown table; ``corner`` is the head of its first column."""
    lines = [[corner, *head], ["---", *("---:" for _ in head)], *body]
    return ["| " + " | ".join(line) + " |" for line in lines]


def cell(row: Row | None, form: str) -> str:
    """A row's median time or peak memory in this form, else in short why it was not measured."""
    if row is None or row.status == MISSING:
        return ""
    if row.status == OK:
        return form.format(ms=short(row.p50_ms), s=row.p50_ms / 1e3, mib=row.peak_mib or 0)
    if "OutOfMemory" in row.note or "GiB are free" in row.note:
        return "out of memory"
    if row.status == SKIPPED and row.note.startswith("minutes="):
        return "not run"
    return "too slow" if row.status == SKIPPED else row.status


def short(ms: float) -> str:
    """Milliseconds in three digits, from 100 on without decimals."""
    return f"{ms:.3g}" if ms < 100 else f"{ms:.0f}"
