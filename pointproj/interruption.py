"""Ctrl-C and SIGTERM as a request, so that a run stops between two steps and can be continued."""

import signal
import threading
from types import FrameType, TracebackType


class StopRequest:
    """While it is entered, the first Ctrl-C or SIGTERM sets :attr:`made`; a second one acts as usual.

    Outside of the main thread, where Python cannot handle signals, it does nothing.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.made = False
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._on_signal) for number in self.SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.made = True
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}
