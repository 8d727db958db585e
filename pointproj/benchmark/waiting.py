"""Processes that have imported what they need and wait for a request, so that no row waits for imports."""

import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import NamedTuple, Self, TextIO

from pointproj.machine import PROJECT

MODULE = "pointproj.benchmark.model_process"
ENDS_WITHIN_S = 10
READY = "waiting for a request"  # the line that a process writes then


class Waiting(NamedTuple):
    """A process, and the file with what it writes to standard error."""

    process: subprocess.Popen[str]
    errors: TextIO


class WaitingProcesses:
    """A context of processes for the models of :data:`MODULE`; those that nothing was asked end with it."""

    def __init__(self) -> None:
        self._waiting: defaultdict[str, list[Waiting]] = defaultdict(list)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each in self._all():
            each.process.kill()
            each.process.communicate(timeout=ENDS_WITHIN_S)
            each.errors.close()

    def begin(self, models: Iterable[str]) -> None:
        """Start a process for each model; they import side by side."""
        for model in models:
            command = [sys.executable, "-m", MODULE, model]
            pipes = {**dict.fromkeys(("stdin", "stdout"), subprocess.PIPE), "text": True, "cwd": PROJECT}
            # A file never fills up, however much the libraries warn; it is closed with the process.
            errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
            process = subprocess.Popen(command, stderr=errors, **pipes)
            self._waiting[model].append(Waiting(process, errors))

    def until_ready(self) -> None:
        """Wait until all have imported what they need, which would disturb measurements."""
        for each in self._all():
            for line in each.process.stdout:  # the libraries print too
                if line.strip() == READY:
                    break

    def ask(self, model: str, request: str, timeout_s: float) -> str:
        """Return the last line that a process of its own answers.

        Parameters
        ----------
        model : str
            A process that waits for a request about it is taken, else one begins now.
        request : str
            One line.
        timeout_s : float

        Raises
        ------
        RuntimeError
            With the last line of what the process wrote, if it failed.
        TimeoutExpired
        """
        if not self._waiting[model]:
            self.begin([model])
        process, errors = self._waiting[model].pop()
        with errors:
            try:
                said, _ = process.communicate(f"{request}\n", timeout=timeout_s)
            except BaseException:
                process.kill()
                raise
            if process.returncode != 0:
                errors.seek(0)
                reason = errors.read().strip().splitlines() or [f"exit status {process.returncode}"]
                raise RuntimeError(f"the step failed: {reason[-1]}")
        return said.strip().splitlines()[-1]  # the libraries print too

    def _all(self) -> Iterator[Waiting]:
        return (each for of_model in self._waiting.values() for each in of_model)
