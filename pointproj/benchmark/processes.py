"""The runner of processes: what a row measures in one of its own, some of which prepare it side by side."""

import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import NamedTuple, Self, TextIO

from pointproj.machine import PROJECT

ENDS_WITHIN_S = 10
LONGEST_S = 120  # that preparation may take beside others
READY = "ready to measure"  # the line that a process writes then


class Process(NamedTuple):
    """A process, and the file with what it writes to standard error."""

    process: subprocess.Popen[str]
    errors: TextIO

    @classmethod
    def begin(cls, arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> Self:
        """Start this Python with these arguments, in the project's folder."""
        pipes = {**dict.fromkeys(("stdin", "stdout"), subprocess.PIPE), "text": True, "cwd": PROJECT}
        # A file never fills up, however much the libraries warn; it is closed with the process.
        errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        started = subprocess.Popen([sys.executable, *arguments], stderr=errors, env=environment, **pipes)
        return cls(started, errors)

    def answer(self, timeout_s: float, line: str = "") -> str:
        """Write a line to it, wait for its end, and return the last line that it wrote, "" if there is none.

        Raises
        ------
        RuntimeError
            With the last line of what it wrote to standard error, if it failed.
        TimeoutExpired
        """
        with self.errors:
            try:
                said, _ = self.process.communicate(f"{line}\n", timeout=timeout_s)
            except BaseException:
                self.process.kill()
                raise
            if self.process.returncode != 0:
                self.errors.seek(0)
                status = f"exit status {self.process.returncode}"
                reason = (self.errors.read().strip() or said.strip()).splitlines() or [status]
                raise RuntimeError(f"the process failed: {reason[-1]}")
        return next(reversed(said.strip().splitlines()), "")  # the libraries print too

    def end(self) -> None:
        """End it without an answer."""
        self.process.kill()
        self.process.communicate(timeout=ENDS_WITHIN_S)
        self.errors.close()


class Prepared:
    """A context of processes of a module, one a request; those that were not asked end with it.

    Each prepares what it measures, writes :data:`READY`, waits for a line, and answers with one: no row
    waits for a compiler.

    Parameters
    ----------
    module : str
        Run with the request, one line, as its argument.
    """

    def __init__(self, module: str = "pointproj.benchmark.model_process") -> None:
        self.module = module
        self._waiting: dict[str, Process] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each in self._waiting.values():
            each.end()

    def begin(self, requests: Iterable[str]) -> None:
        """Start a process for each request; they prepare side by side."""
        self._waiting |= {request: self._begun(request) for request in requests}

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
        """Return the last line that the request's process answers; errors as of :meth:`Process.answer`.

        A process that failed beside others, for which memory may not have sufficed, begins once more.

        Parameters
        ----------
        request : str
            One line.
        timeout_s : float
        """
        begun = self._waiting.pop(request, None)
        if begun is not None and begun.process.poll() is not None:
            begun.end()
            begun = None
        return (begun or self._begun(request)).answer(timeout_s, "measure")

    def _begun(self, request: str) -> Process:
        return Process.begin(["-m", self.module, request])
