"""Processes that prepare what they measure, side by side, and wait: no row waits for a compiler."""

import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable
from types import TracebackType
from typing import NamedTuple, Self, TextIO

from pointproj.machine import PROJECT

MODULE = "pointproj.benchmark.model_process"
ENDS_WITHIN_S = 10
LONGEST_S = 120  # that preparation may take beside others
READY = "ready to measure"  # the line that a process writes then


class Waiting(NamedTuple):
    """A process, and the file with what it writes to standard error."""

    process: subprocess.Popen[str]
    errors: TextIO


class WaitingProcesses:
    """A context of processes of :data:`MODULE`, one a request; those that were not asked end with it."""

    def __init__(self) -> None:
        self._waiting: dict[str, Waiting] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each in self._waiting.values():
            each.process.kill()
            each.process.communicate(timeout=ENDS_WITHIN_S)
            each.errors.close()

    def begin(self, requests: Iterable[str]) -> None:
        """Start a process for each request, one line; they prepare side by side."""
        self._waiting |= {request: _begun(request) for request in requests}

    def until_ready(self) -> None:
        """Wait until all have prepared what they need, which would disturb measurements."""
        timers = [threading.Timer(LONGEST_S, each.process.kill) for each in self._waiting.values()]
        for timer in timers:
            timer.start()
        for each, timer in zip(self._waiting.values(), timers, strict=True):
            for line in each.process.stdout:  # the libraries print too
                if line.strip() == READY:
                    break
            timer.cancel()

    def ask(self, request: str, timeout_s: float) -> str:
        """Return the last line that the request's process answers.

        A process that failed beside others, for which memory may not have sufficed, begins once more.

        Parameters
        ----------
        request : str
            One line.
        timeout_s : float

        Raises
        ------
        RuntimeError
            With the last line of what the process wrote, if it failed.
        TimeoutExpired
        """
        begun = self._waiting.pop(request, None)
        if begun is not None and begun.process.poll() is None:
            return _answer(begun, timeout_s)
        if begun is not None:
            begun.errors.close()
        return _answer(_begun(request), timeout_s)


def _begun(request: str) -> Waiting:
    command = [sys.executable, "-m", MODULE, request]
    pipes = {**dict.fromkeys(("stdin", "stdout"), subprocess.PIPE), "text": True, "cwd": PROJECT}
    # A file never fills up, however much the libraries warn; it is closed with the process.
    errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
    return Waiting(subprocess.Popen(command, stderr=errors, **pipes), errors)


def _answer(asked: Waiting, timeout_s: float) -> str:
    process, errors = asked
    with errors:
        try:
            said, _ = process.communicate("measure\n", timeout=timeout_s)
        except BaseException:
            process.kill()
            raise
        if process.returncode != 0:
            errors.seek(0)
            reason = errors.read().strip().splitlines() or [f"exit status {process.returncode}"]
            raise RuntimeError(f"the step failed: {reason[-1]}")
    return said.strip().splitlines()[-1]  # the libraries print too
