"""Rows of results, the CSV file of a run, and how rows are selected."""

import csv
import dataclasses
import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from pointproj.geometry.files.writing import replacing

log = logging.getLogger(__name__)

OK, WRONG, FAILED, SKIPPED, MISSING = "ok", "wrong", "failed", "skipped", "missing"


@dataclass(frozen=True)
class Row:
    """One result. Times are milliseconds per call; None (empty in the file) is unknown or not applicable.

    ``date`` is when the run was started, the same in all its rows.
    """

    workload: str
    operator: str  # knn | radius | attend | farthest_points | start | import
    implementation: str
    kind: str  # backend | peer
    mode: str  # what is called, see pointproj.benchmark.calls
    execution: str  # eager | compiled | captured
    queries: int
    references: int
    clouds: int = 1
    k: int | None = None
    radius: float | None = None
    channels: int = 1
    dtype: str = "float32"
    status: str = OK  # ok | wrong | failed | skipped | missing
    p20_ms: float | None = None
    p50_ms: float | None = None
    p80_ms: float | None = None
    repetitions: int | None = None
    peak_mib: float | None = None
    parity_error: float | None = None
    note: str = ""
    package: str = ""  # of the implementation, with its version
    device: str = ""
    driver: str = ""
    torch: str = ""
    cuda: str = ""
    warp: str = ""
    python: str = ""
    commit: str = ""
    date: str = ""

    @property
    def measurement(self) -> tuple:
        """What was measured, on whatever device and commit."""
        what = self.workload, self.operator, self.implementation, self.mode, self.execution, self.dtype
        return *what, self.queries, self.references, self.clouds, self.k, self.radius, self.channels

    @property
    def key(self) -> tuple:
        """What a newer row of the same measurement, which replaces this one, has in common with it."""
        return *self.measurement, self.device


# The fields, and what their text is read as. The file's columns have these names, but one.
FIELDS = {of.name: next(iter(get_args(of.type)), of.type) for of in dataclasses.fields(Row)}
COLUMNS = ["contender" if name == "implementation" else name for name in FIELDS]


class ResultsFile:
    """A CSV file of one run that is complete after every row, so that an interrupted run keeps its rows.

    A file of another run is renamed to ``FILE.old`` when the first row is added: times of two commits, and on
    a GPU even those of two hours, are not comparable. Of several processes one ``writes``. A file that
    :func:`read_rows` cannot read is refused.
    """

    def __init__(self, path: Path | str, *, writes: bool = True) -> None:
        self.path = Path(path)
        self.writes = writes
        self._rows = {row.key: row for row in read_rows(self.path)} if writes and self.path.exists() else {}

    def holds(self, blank: Row) -> bool:
        """Whether this run measured the row before it was interrupted and continued."""
        row = self._rows.get(blank.key)
        return row is not None and (row.commit, row.date) == (blank.commit, blank.date)

    def add(self, row: Row) -> None:
        """Write ``row``, in place of an older one of the same measurement."""
        if not self.writes:
            return
        before, now = runs_of(self._rows.values()), runs_of([row])
        if before not in ([], now):
            old = self.path.with_name(f"{self.path.name}.old")
            text = "%s has results of %s, this run is of %s: a new file is started, the old one is now %s"
            log.warning(text, self.path, ", ".join(before), *now, old)
            os.replace(self.path, old)
            self._rows = {}
        self._rows.pop(row.key, None)
        self._rows[row.key] = row
        write_rows(self.path, self._rows.values())


def runs_of(rows: Iterable[Row]) -> list[str]:
    """Commit and start of each run that the rows are of, oldest first."""
    rows = sorted(rows, key=lambda row: row.date)
    return list(dict.fromkeys(f"commit {row.commit} at {row.date}" for row in rows))


def require_one_run(rows: Iterable[Row]) -> None:
    """Raise ValueError for rows of one device that are of several runs: they are not shown together."""
    rows = list(rows)
    for device in dict.fromkeys(row.device for row in rows):
        runs = runs_of(row for row in rows if row.device == device)
        if len(runs) > 1:
            raise ValueError(
                f"{device}: expected results of one run, got those of {', '.join(runs)}. Measure again with "
                "'python bench.py', which starts a new file for each run."
            )


def select(rows: Iterable[Row], **wanted: object) -> list[Row]:
    """The rows that have these values, such as ``mode="step"``."""
    return [row for row in rows if all(getattr(row, key) == value for key, value in wanted.items())]


def fastest(rows: Iterable[Row]) -> Row | None:
    """The row with the shortest median; if none was timed the last row, which says why; None of no rows."""
    rows = list(rows)
    timed = select(rows, status=OK)
    return min(timed, key=lambda row: row.p50_ms) if timed else next(reversed(rows), None)


def write_rows(path: Path | str, rows: Iterable[Row]) -> None:
    """Write the file as a whole: a reader sees the old one or the new one."""
    with replacing(Path(path)) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for row in rows:
            values = (getattr(row, name) for name in FIELDS)
            writer.writerow([f"{value:.6g}" if isinstance(value, float) else value for value in values])


def read_rows(path: Path | str) -> list[Row]:
    """Read what :func:`write_rows` wrote; ValueError for a file with other columns."""
    with Path(path).open(newline="", encoding="utf-8") as file:
        reader = csv.reader(file)
        head = next(reader, [])
        if head != COLUMNS:
            raise ValueError(
                f"{path}: expected the columns {', '.join(COLUMNS)}; got "
                f"{', '.join(head or ['none'])}. Move the file away, or name another one."
            )
        return [
            Row(
                **{
                    name: of(text) if text or of is str else None
                    for (name, of), text in zip(FIELDS.items(), line, strict=True)
                }
            )
            for line in reader
        ]
