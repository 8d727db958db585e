"""Rows of results and the CSV file that keeps them."""

import csv
import dataclasses
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OK, RED, FAILED, SKIPPED, MISSING = "ok", "red", "failed", "skipped", "missing"
OUT_OF_MINUTES = "minutes="  # how the note of a row begins whose turn did not come


@dataclass(frozen=True)
class Row:
    """One result. Times are milliseconds a call; None (empty in the file) is unknown or not applicable."""

    workload: str
    operator: str  # knn | radius | saxpy
    contender: str
    kind: str  # backend | peer
    mode: str  # what is called, see pointproj.benchmark.plan
    execution: str  # eager | compiled | captured
    queries: int
    references: int
    clouds: int
    k: int | None
    radius: float | None
    channels: int
    dtype: str
    status: str  # ok | red | failed | skipped | missing
    p20_ms: float | None = None
    p50_ms: float | None = None
    p80_ms: float | None = None
    repetitions: int | None = None
    peak_mib: float | None = None
    parity_error: float | None = None
    note: str = ""
    package: str = ""  # of the contender, with its version
    device: str = ""
    driver: str = ""
    torch: str = ""
    cuda: str = ""
    warp: str = ""
    python: str = ""
    commit: str = ""
    date: str = ""

    @property
    def key(self) -> tuple:
        """What a newer row of the same measurement has in common with this one."""
        return (
            *(self.workload, self.operator, self.contender, self.mode, self.execution, self.device),
            *(self.queries, self.references, self.clouds, self.k, self.radius, self.channels, self.dtype),
        )


COLUMNS = tuple(column.name for column in dataclasses.fields(Row))
_INTEGERS = ("queries", "references", "clouds", "k", "channels", "repetitions")
_REALS = ("radius", "p20_ms", "p50_ms", "p80_ms", "peak_mib", "parity_error")


class ResultsFile:
    """A CSV file that is whole after every row, so that a run that is ended keeps what it has.

    Rows that are there already stay, except those that are measured again.

    Parameters
    ----------
    path : Path
        Written when the first row is added; its folder is made.
    writes : bool
        False writes nothing: of several processes that measure together one does.
    """

    def __init__(self, path: Path | str, *, writes: bool = True) -> None:
        self.path = Path(path)
        self._writes = writes
        self._rows = {row.key: row for row in read_rows(self.path)} if self.path.exists() else {}

    def add(self, row: Row) -> None:
        """Keep ``row``, in place of an older one of the same measurement."""
        self._rows.pop(row.key, None)
        self._rows[row.key] = row
        if self._writes:
            write_rows(self.path, self._rows.values())


def write_rows(path: Path | str, rows: Iterable[Row]) -> None:
    """Write the file under a temporary name first: a reader sees the old one or the new one."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows([_written(getattr(row, column)) for column in COLUMNS] for row in rows)
    os.replace(temporary, path)


def read_rows(path: Path | str) -> list[Row]:
    """Read what :func:`write_rows` wrote.

    Raises
    ------
    ValueError
        If the columns are others: the file is not one of results, or of another version.
    """
    with Path(path).open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise ValueError(
                f"{path}: expected the columns {', '.join(COLUMNS)}; got "
                f"{', '.join(reader.fieldnames or ['none'])}. Move the file away, or name another one."
            )
        return [Row(**{name: _read(name, value) for name, value in line.items()}) for line in reader]


def _written(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _read(name: str, value: str) -> Any:
    if name in _INTEGERS:
        return int(value) if value else None
    if name in _REALS:
        return float(value) if value else None
    return value
