"""What a run shows while it trains: a line at regular intervals, and a live bar on a terminal."""

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Interval:
    """Pace of the steps since the last look."""

    ms_per_step: float
    samples_per_second: float
    expected_ms: float | None = None  # of the steps to come, where it is another: the first step may compile


class Pace:
    """Time of training steps, without what lies between them (validation, checkpoints)."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._steps = 0
        self._samples = 0
        self._running_since: float | None = None
        self._history: list[float] = []
        self._first_seconds: float | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let the clock run for the block."""
        self._running_since = time.perf_counter()
        try:
            yield
        finally:
            self._add_elapsed()
            self._running_since = None

    def count(self, samples: int) -> None:
        """Note one step over so many samples."""
        self._steps += 1
        self._samples += samples
        if self._first_seconds is None:
            self._add_elapsed()
            self._first_seconds = self._seconds

    def read(self) -> Interval:
        """Return the pace since the last read, over at least one step, and begin a new interval.

        To be called when the device has just ended the last step counted: the clock is the host's.
        """
        self._add_elapsed()
        expected = None
        if not self._history and self._steps > 1 and self._first_seconds is not None:
            expected = (self._seconds - self._first_seconds) / (self._steps - 1) * 1e3
        interval = Interval(self._seconds / self._steps * 1e3, self._samples / self._seconds, expected)
        self._history.append(interval.ms_per_step)
        self._seconds, self._steps, self._samples = 0.0, 0, 0
        return interval

    @property
    def ms_per_step(self) -> float | None:
        """Median over the intervals read, so that compiling in the first does not count; None before any."""
        return median(self._history) if self._history else None

    def _add_elapsed(self) -> None:
        if self._running_since is not None:
            now = time.perf_counter()
            self._seconds += now - self._running_since
            self._running_since = now


class ProgressDisplay:
    """Progress lines in the log, and on a terminal a live bar below them.

    Parameters
    ----------
    total_steps : int
        Steps of the whole run.
    steps_taken : int
        How many of them were taken before, where a run is continued.
    console : rich.console.Console, optional
        Where the bar goes; standard output by default.
    """

    def __init__(self, total_steps: int, steps_taken: int = 0, console: Console | None = None) -> None:
        self._total = total_steps
        console = console or Console()
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(),
            TextColumn("{task.percentage:3.0f}%"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("training", total=total_steps, completed=steps_taken)
        self._redirected: list[tuple[logging.StreamHandler, object]] = []

    def __enter__(self) -> "ProgressDisplay":
        before = (sys.stdout, sys.stderr)
        self._bar.start()
        # The bar has replaced the streams, to print above itself; log handlers still have the old ones.
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream in before:
                previous = handler.setStream(sys.stdout)
                if previous is not None:
                    self._redirected.append((handler, previous))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handler, stream in self._redirected:
            handler.setStream(stream)
        self._bar.stop()

    def advance(self, step: int) -> None:
        """Move the bar to this step."""
        self._bar.update(self._task, completed=step)

    def line(
        self, epoch: int, epochs: int, step: int, loss: float, lr: float, pace: Interval, memory_bytes: int
    ) -> None:
        """Write one progress line to the log.

        Parameters
        ----------
        epoch, epochs : int
            The epoch under way, counted from 1, of how many.
        step : int
            Steps taken since the run began.
        loss, lr : float
        pace : Interval
        memory_bytes : int
            Most memory in use so far.
        """
        expected_ms = pace.ms_per_step if pace.expected_ms is None else pace.expected_ms
        left = (self._total - step) * expected_ms / 1e3
        log.info(
            f"epoch {epoch:{len(str(epochs))}}/{epochs} {step / self._total:4.0%}  loss {loss:.5f}  "
            f"lr {lr:.1e}  {pace.ms_per_step:.4g} ms/step  {pace.samples_per_second:.4g} samples/s  "
            f"{memory_bytes / 2**20:.0f} MiB  ETA {duration(left)}"
        )


def duration(seconds: float) -> str:
    """Return ``1:02:03``, ``2:03`` or ``3 s``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
