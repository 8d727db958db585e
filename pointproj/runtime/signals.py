"""Ctrl-C, SIGTERM and SIGUSR1: a request to stop after the current step in training, elsewhere an exception.

Schedulers and shutdowns send SIGTERM. SLURM sends SIGUSR1 ahead of time with ``--signal=USR1@120``. All have
the same effect: the run saves its state, logs how to continue, and ends.
"""

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Self

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Stopped(KeyboardInterrupt):
    """A signal ended the run."""

    def __init__(self, number: int = signal.SIGINT) -> None:
        super().__init__(number)
        self.number = signal.Signals(number)

    def __str__(self) -> str:
        return f"stopped by {self.number.name}"

    @property
    def exit_code(self) -> int:
        """Exit code that a shell gives to a program ended by this signal: 130, 143, 138 (on Linux)."""
        return 128 + self.number


class StopAtOnce:
    """Context in which a signal raises :class:`Stopped` at any place of the program."""

    def __init__(self) -> None:
        self._previous: dict[signal.Signals, Callable | int | None] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # other threads get no signals
            self._previous = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        return self

    def __exit__(self, *raised: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not set by Python
        self._previous = {}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        raise Stopped(number)


class StopRequest(StopAtOnce):
    """Context in which the first signal is only recorded; a second one acts as outside of the context."""

    made: signal.Signals | None = None  # the recorded signal

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.made = signal.Signals(number)
        self.__exit__()
