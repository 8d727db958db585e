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
STEPS_BEFORE_ESTIMATE = 4  # calls; rich leaves out the time before the first, when processes start

log = logging.getLogger(__name__)


@contextmanager
def progress(
    title: str, total: int, *, done: int = 0, unit: str = "", lines: bool = True
) -> Iterator[Callable[[int], None]]:
    """Show how far a loop has come; what is logged or printed meanwhile stands above a bar.

    Yields a function to be called with the number of steps just done. ``total`` and ``done`` are steps, or
    bytes with ``unit="bytes"``, of the whole and from before. Where there is no terminal, log lines name the
    ``unit``, at most one in :data:`SECONDS_BETWEEN_LINES`; none with ``lines=False``.
    """
    console = Console(stderr=True)
    if not (lines or console.is_terminal):
        yield lambda steps: None
        return
    counts = [DownloadColumn(), TransferSpeedColumn()] if unit == "bytes" else [MofNCompleteColumn()]
    bar = Progress(
        *(TextColumn("{task.description}"), BarColumn(), *counts, TimeRemainingColumn()),
        console=console,
        transient=True,
        redirect_stdout=sys.stdout.isatty(),  # which may be a file
        disable=not console.is_terminal,
        get_time=time.monotonic,
    )
    bar.add_task(title, total=total, completed=done)
    (task,) = bar.tasks
    last_line, calls = time.monotonic(), 0

    def advance(steps: int) -> None:
        nonlocal last_line, calls
        bar.advance(task.id, steps)
        calls += 1
        if not console.is_terminal and time.monotonic() - last_line >= SECONDS_BETWEEN_LINES:
            last_line = time.monotonic()
            left = task.time_remaining if calls >= STEPS_BEFORE_ESTIMATE else None
            words = "" if left is None else f", {left:.0f} s left"
            log.info(f"{title}: {task.completed:.0f} of {total} {unit} ({task.percentage:.0f}%){words}")

    with _below_the_log(bar):
        yield advance


@contextmanager
def _below_the_log(bar: Progress) -> Iterator[None]:
    """Show a bar. It replaces the standard streams, to print above itself; log handlers have the old ones."""
    before = sys.stdout, sys.stderr
    with bar:
        replaced = dict(zip(before, (sys.stdout, sys.stderr), strict=True))
        root = logging.getLogger()
        handlers = [each for each in root.handlers if getattr(each, "stream", None) in replaced]
        previous = [handler.setStream(replaced[handler.stream]) for handler in handlers]
        try:
            yield
        finally:
            for handler, stream in zip(handlers, previous, strict=True):
                if stream is not None:  # else it was the same
                    handler.setStream(stream)
