"""Ctrl-C, SIGTERM and SIGUSR1: between two steps as a request, elsewhere as an exception.

SIGTERM is what schedulers and shutdowns send; SIGUSR1 is what SLURM sends ahead of time if asked to
(``--signal=USR1@120``). All mean the same here: save what there is, say how to go on, and leave.
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
        """What a shell says of a program that this signal ended: 130, 143, 138 (on Linux)."""
        return 128 + self.number


class StopAtOnce:
    """While it is entered, a signal raises :class:`Stopped` wherever the program is."""

    def __init__(self) -> None:
        self._previous: dict[signal.Signals, Callable | int | None] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # Python handles none elsewhere
            self._previous = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        return self

    def __exit__(self, *raised: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not set by Python
        self._previous = {}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        raise Stopped(number)


class StopRequest(StopAtOnce):
    """While it is entered, the first signal is only noted; a second one acts as it did outside."""

    made: signal.Signals | None = None  # the signal that asked

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.made = signal.Signals(number)
        self.__exit__()
