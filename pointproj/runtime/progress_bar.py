"""Progress of long work: a live bar with the time left on a terminal, plain log lines elsewhere."""

import logging
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

log = logging.getLogger(__name__)


@contextmanager
def progress(title: str, total: int, *, done: int = 0, unit: str = "") -> Iterator[Callable[[int], None]]:
    """Show how far a loop has come.

    Parameters
    ----------
    title
        What is being done.
    total
        Steps (or bytes, with ``unit="bytes"``) of the whole.
    done
        Steps that were done before.
    unit
        Name of the steps in log lines.

    Yields
    ------
    callable
        Call it with the number of steps just done.
    """
    console = Console(stderr=True)
    if console.is_terminal:
        counts = [DownloadColumn(), TransferSpeedColumn()] if unit == "bytes" else [MofNCompleteColumn()]
        columns = [TextColumn("{task.description}"), BarColumn(), *counts, TimeRemainingColumn()]
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(title, total=total, completed=done)
            yield lambda steps: bar.advance(task, steps)
    else:
        yield _LineProgress(title, total, done, unit)


class _LineProgress:
    def __init__(self, title: str, total: int, done: int, unit: str) -> None:
        self.title, self.total, self.done, self.unit = title, total, done, unit
        self.already = done
        self.started = self.last_line = time.monotonic()

    def __call__(self, steps: int) -> None:
        self.done += steps
        now = time.monotonic()
        if now - self.last_line < SECONDS_BETWEEN_LINES:
            return
        self.last_line = now
        left = (now - self.started) / max(self.done - self.already, 1) * (self.total - self.done)
        percent = 100 * self.done / max(self.total, 1)
        log.info(
            "%s: %d of %d %s (%.0f%%), %.0f s left",
            self.title,
            self.done,
            self.total,
            self.unit,
            percent,
            left,
        )
