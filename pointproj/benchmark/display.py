"""What a run shows: one line per row, and on a terminal also what is being measured."""

import time
from collections import Counter
from types import TracebackType

from rich.console import Console
from rich.markup import escape

from pointproj.benchmark.results import MISSING, OK, WRONG, Row
from pointproj.benchmark.workloads import Question, Workload

MOST_NAMED = 25  # rows that took long
COLOURS = {OK: "default", WRONG: "red", MISSING: "dim"}


class Display:
    """Lines on standard output, of any length.

    Parameters
    ----------
    shown : bool
        False prints nothing: of several processes that measure together, one prints.
    """

    def __init__(self, *, shown: bool = True) -> None:
        self.console = Console(highlight=False, soft_wrap=True, quiet=not shown)
        self._status = self.console.status("")
        self._done, self._expected, self._started = 0, 0, time.monotonic()

    def __enter__(self) -> "Display":
        if self.console.is_terminal:
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._status.stop()

    def header(self, machine: dict[str, str], path: str) -> None:
        """Where this runs and where the rows go."""
        versions = ", ".join(f"{name} {machine[name]}" for name in ("torch", "cuda", "warp") if machine[name])
        self.console.print(
            f"[bold]{escape(machine['device'])}[/bold], {versions}; results go to {escape(path)}"
        )

    def expect(self, rows: int) -> None:
        """How many rows there will be."""
        self._expected = rows
        self._started = time.monotonic()

    def preparing(self, name: str) -> None:
        """A workload's clouds are being made."""
        self._status.update(f"making the clouds of {name}")

    def compiling(self, done: int, jobs: int) -> None:
        """So much of what the rows compile is compiled."""
        self._status.update(f"compiling ahead: {done} of {jobs}")

    def compiled(self, processes: int, seconds: float) -> None:
        """What the rows compile is in the caches."""
        self.console.print(f"compiled what the rows compile, in {processes} processes and {seconds:.0f} s")

    def workload(self, workload: Workload, question: Question, checked: int) -> None:
        """A workload begins."""
        queries, points = (tensor.shape[:-1].numel() for tensor in question.points)
        asked = "".join(
            f", {name}={value:g}" for name, value in (("k", question.k), ("r", question.radius)) if value
        )
        self.console.print(
            f"\n[bold]{workload.name}[/bold] {workload.operator}{asked}, {queries:,} queries, {points:,} "
            f"points; {checked:,} queries are compared with the reference"
        )

    def agrees(self, name: str, error: float) -> None:
        """A contender's results agree with the reference."""
        self.console.print(f"  {escape(name)}: agrees with the reference, error {error:.1e}")

    def doing(self, row: Row) -> None:
        """A row is being measured."""
        what = f"{row.workload}, {row.contender}, {row.mode}, {row.execution}"
        self._status.update(f"{self._done + 1} of {self._expected}: {escape(what)}")

    def row(self, row: Row) -> None:
        """A row has been measured."""
        self._done += 1
        count = f"[{self._done}/{self._expected}]"
        seconds = f"{time.monotonic() - self._started:.0f} s"
        line = f"{count:>10} {seconds:>6} {row.contender:16} {row.mode:16} {row.execution:9}"
        if row.status == OK:
            error = "" if row.parity_error is None else f"  error {row.parity_error:.1e}"
            spread = f"{row.p50_ms:11.4f} ms ({row.p20_ms:.4f} to {row.p80_ms:.4f})"
            peak = "" if row.peak_mib is None else f"{row.peak_mib:9.1f} MiB"
            line += f" {spread:40} {peak}{error}"
        else:
            line += f" {row.status}: {row.note}"
        self.console.print(escape(line), style=COLOURS.get(row.status, "yellow"))

    def footer(self, rows: list[Row], spent: list[tuple[str, float]], allowed: float) -> None:
        """How many rows have which status, and where the time of the run went."""
        counts = Counter(row.status for row in rows)
        total = sum(seconds for _, seconds in spent)
        self.console.print(
            f"\n{', '.join(f'{count} {status}' for status, count in counts.items())}; {total:.0f} s in all"
        )
        of_workloads: Counter[str] = Counter()
        for what, seconds in spent:
            of_workloads[what.partition(",")[0]] += seconds
        parts = (f"{name} {seconds:.0f} s" for name, seconds in of_workloads.most_common())
        self.console.print(escape(", ".join(parts)))
        slow = sorted((item for item in spent if item[1] > allowed), key=lambda item: -item[1])
        if slow:
            self.console.print(f"longer than row_s={allowed:g}:")
        for what, seconds in slow[:MOST_NAMED]:
            self.console.print(escape(f"{seconds:8.1f} s  {what}"))
