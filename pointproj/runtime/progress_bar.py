"""Progress of long work: a live bar with the time left on a terminal, plain log lines elsewhere."""

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

SECONDS_BETWEEN_LINES = 5.0
CALLS_BEFORE_ESTIMATE = 4  # the time before the first is not counted: it is longer, as processes start

log = logging.getLogger(__name__)


@contextmanager
def progress(
    title: str, total: int, *, done: int = 0, unit: str = "", lines: bool = True
) -> Iterator[Callable[[int], None]]:
    """Show how far a loop has come; what is logged or printed meanwhile stands above a bar.

    Parameters
    ----------
    title : str
        What is being done.
    total : int
        Steps (or bytes, with ``unit="bytes"``) of the whole.
    done : int
        Steps that were done before.
    unit : str
        Name of the steps in log lines.
    lines : bool
        Whether to log lines where there is no terminal.

    Yields
    ------
    callable
        Call it with the number of steps just done.
    """
    console = Console(stderr=True)
    if console.is_terminal:
        counts = [DownloadColumn(), TransferSpeedColumn()] if unit == "bytes" else [MofNCompleteColumn()]
        columns = [TextColumn("{task.description}"), BarColumn(), *counts, TimeRemainingColumn()]
        # Standard output may be a file.
        bar = Progress(*columns, console=console, transient=True, redirect_stdout=sys.stdout.isatty())
        with _below_the_log(bar):
            task = bar.add_task(title, total=total, completed=done)
            yield lambda steps: bar.advance(task, steps)
    else:
        yield _LineProgress(title, total, done, unit) if lines else lambda steps: None


@contextmanager
def _below_the_log(bar: Progress) -> Iterator[None]:
    """Show a bar. It replaces the standard streams, to print above itself; log handlers have the old ones."""
    before = sys.stdout, sys.stderr
    with bar:
        replaced = dict(zip(before, (sys.stdout, sys.stderr), strict=True))
        handlers = [
            each for each in logging.getLogger().handlers if getattr(each, "stream", None) in replaced
        ]
        previous = [handler.setStream(replaced[handler.stream]) for handler in handlers]
        try:
            yield
        finally:
            for handler, stream in zip(handlers, previous, strict=True):
                if stream is not None:  # else it was the same
                    handler.setStream(stream)


class _LineProgress:
    """Writes at most one log line in :data:`SECONDS_BETWEEN_LINES`, with the time left once it is known."""

    def __init__(self, title: str, total: int, done: int, unit: str) -> None:
        self.title, self.total, self.done, self.unit = title, total, done, unit
        self.last_line = time.monotonic()
        self.calls = 0
        self.first_call, self.done_then = 0.0, 0

    def __call__(self, steps: int) -> None:
        now = time.monotonic()
        self.done += steps
        self.calls += 1
        if self.calls == 1:
            self.first_call, self.done_then = now, self.done
        if now - self.last_line < SECONDS_BETWEEN_LINES:
            return
        self.last_line = now
        percent = 100 * self.done / max(self.total, 1)
        line = f"{self.title}: {self.done} of {self.total} {self.unit} ({percent:.0f}%)"
        if self.calls >= CALLS_BEFORE_ESTIMATE and self.done > self.done_then:
            left = (now - self.first_call) / (self.done - self.done_then) * (self.total - self.done)
            line += f", {left:.0f} s left"
        log.info(line)
