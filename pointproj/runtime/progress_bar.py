"""Progress of long work: on a terminal a live bar with the time left, elsewhere plain log lines."""

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
STEPS_BEFORE_ESTIMATE = 4  # calls; rich ignores the time before the first one, in which processes start

log = logging.getLogger(__name__)


@contextmanager
def progress(
    title: str, total: int, *, done: int = 0, unit: str = "", lines: bool = True
) -> Iterator[Callable[[int], None]]:
    """Show how far a loop has come; text that is logged or printed meanwhile appears above the bar.

    Yields a function to be called with the number of steps just done. ``total`` is the number of all steps,
    and ``done`` those done before; with ``unit="bytes"``, both are bytes. Without a terminal, log lines name
    the ``unit``, at most one in :data:`SECONDS_BETWEEN_LINES`; there are none with ``lines=False``.
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
        redirect_stdout=sys.stdout.isatty(),  # not if it is a file
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
    """Show a bar, and let log handlers use the streams with which it replaces the standard streams.

    The bar prints text from these streams above itself. Log handlers would still use the old streams.
    """
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
                if stream is not None:  # None: the stream was the same
                    handler.setStream(stream)
