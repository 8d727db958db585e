"""The pace of a training, and the line that shows it at regular intervals."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from statistics import median

from pointproj.config import Config
from pointproj.training.checkpoint import Position

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Interval:
    """Pace of the steps since the last look."""

    ms_per_step: float
    samples_per_second: float
    expected_ms: float  # of the steps to come: without the first step, which may compile


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
        ms = expected = self._seconds / self._steps * 1e3
        if not self._history and self._steps > 1:
            expected = (self._seconds - self._first_seconds) / (self._steps - 1) * 1e3
        interval = Interval(ms, self._samples / self._seconds, expected)
        self._history.append(ms)
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


def log_progress(
    config: Config, position: Position, total_steps: int, loss: float, lr: float, pace: Interval, memory: int
) -> None:
    """Log one line; ``memory`` is the most bytes in use so far."""
    epochs, step = config.training.epochs, position.step
    left = timedelta(seconds=round((total_steps - step) * pace.expected_ms / 1e3))
    log.info(
        f"epoch {position.epoch + 1:{len(str(epochs))}}/{epochs} {step / total_steps:4.0%}  loss {loss:.5f}  "
        f"lr {lr:.1e}  {pace.ms_per_step:.4g} ms/step  {pace.samples_per_second:.4g} samples/s  "
        f"{memory / 2**20:.0f} MiB  ETA {left}"
    )
