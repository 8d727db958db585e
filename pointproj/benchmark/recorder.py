"""The runner of rows: call, compare with the reference, time; then keep the row and show it."""

import dataclasses
import gc
import logging
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from pointproj.benchmark.config import BenchConfig
from pointproj.benchmark.limits import LONGEST_ROW_S, Limits, Unaffordable, given_up_after
from pointproj.benchmark.results import FAILED, MISSING, OK, SKIPPED, WRONG, ResultsFile, Row
from pointproj.benchmark.timing import Timing, measure, measure_host
from pointproj.machine import package_version
from pointproj.runtime.errors import first_line
from pointproj.runtime.memory import allocated_bytes, empty_cache, peak_bytes, reset_peak

log = logging.getLogger(__name__)

MIB = 2**20
Make = Callable[[], Callable[[], Any]]  # gives the call


class WrongResult(RuntimeError):  # noqa: N818 - a verdict
    """A result differs from the reference's, so its call gets no time."""

    def __init__(self, what: str, error: float, allowed: float) -> None:
        super().__init__(f"{what}: error {error:.2g}, allowed {allowed:.2g}")
        self.error = error


class Missing(RuntimeError):  # noqa: N818 - says what there is not
    """What a row needs is not installed here."""


class Part(NamedTuple):
    """Rows that are planned together: how many, and what measures them."""

    rows: int
    measure: Callable[["Recorder"], None]


class Recorder:
    """What all workloads of a run share: the config, the machine and the results.

    Parameters
    ----------
    config : BenchConfig
    device : torch.device
    machine : dict of str to str
        The columns of every row that say where and with what it was measured.
    file : ResultsFile
    shows : bool
        Whether it prints: of several processes that measure together, one does.
    """

    def __init__(
        self,
        config: BenchConfig,
        device: torch.device,
        machine: dict[str, str],
        file: ResultsFile,
        *,
        shows: bool = True,
    ) -> None:
        self.config, self.device, self.machine, self.file = config, device, machine, file
        self.shows = shows
        self.limits = Limits(config, device)
        self.rows: list[Row] = []
        self.expected = 0  # rows

    def say(self, text: str) -> None:
        """Print a line."""
        if self.shows:
            print(text, flush=True)

    def blank(self, **columns: Any) -> Row:
        """A row of this machine without its results; ``package`` is named, its version is looked up."""
        given = {"kind": "backend", "execution": "eager", "package": "pointproj"} | columns
        return Row(**given | {"package": package_version(given["package"])} | self.machine)

    def is_measured(self, blank: Row) -> bool:
        """Whether the run whose start the config names has measured a row before it was cut off."""
        return self.config.started is not None and self.file.holds(blank)

    def record(self, blank: Row, measured: Callable[[Row], Row], longest_s: float = LONGEST_ROW_S) -> None:
        """Add the row that ``measured`` makes of ``blank``; what it raises becomes a row without a time.

        A row that the file holds of this run is not measured again.

        Parameters
        ----------
        blank : Row
            The row without its results.
        measured : callable
            Such as :meth:`timed`.
        longest_s : float
            After this long it is given up.
        """
        if self.is_measured(blank):
            return
        try:
            self.limits.check_clock()
            with given_up_after(longest_s):
                row = measured(blank)
        except Exception as reason:
            row = without_time(blank, reason)
        self.limits.learn(row)
        self.add(row)

    def add(self, row: Row) -> None:
        """Keep a row and show it."""
        self.rows.append(row)
        self.file.add(row)
        count = f"[{len(self.rows)}/{self.expected}]"
        seconds = f"{time.monotonic() - self.limits.started:.0f} s"
        line = f"{count:>10} {seconds:>6} {row.contender:16} {row.mode:16} {row.execution:9}"
        if row.status == OK:
            line += f" {row.p50_ms:11.4f} ms ({row.p20_ms:.4f} to {row.p80_ms:.4f})"
            line += "" if row.peak_mib is None else f" {row.peak_mib:9.1f} MiB"
            line += "" if row.parity_error is None else f"  error {row.parity_error:.1e}"
        else:
            line += f" {row.status}: {row.note}"
        self.say(line)

    def end(self) -> None:
        """Say how many rows have which status."""
        counts = Counter(row.status for row in self.rows)
        said = ", ".join(f"{count} {status}" for status, count in counts.items())
        self.say(f"\n{said}; {time.monotonic() - self.limits.started:.0f} s in all")

    def time(self, blank: Row, make: Make, error_of: Callable, allowed: float, **options: Any) -> None:
        """Record what :meth:`timed` measures, which has the parameters."""
        measured = partial(self.timed, make=make, error_of=error_of, allowed=allowed, **options)
        self.record(blank, measured)

    def timed(
        self,
        blank: Row,
        make: Make,
        error_of: Callable[[Any], float | None],
        allowed: float,
        repetitions: int | None = None,
        *,
        host: bool = False,
    ) -> Row:
        """Check a call, and time it.

        Parameters
        ----------
        blank : Row
        make : callable
            Gives the call.
        error_of : callable
            Takes what the first call returned, gives its error; None if there is nothing to compare.
        allowed : float
            The largest error that is accepted.
        repetitions : int, optional
            As in :func:`~pointproj.benchmark.timing.measure`.
        host : bool
            Whether the host's time to issue the call is asked for.

        Returns
        -------
        Row

        Raises
        ------
        WrongResult
            If the error is larger, and whatever the call raises.
        """
        before = self._clean_memory()
        call = make()
        result = call()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        peak = peak_bytes(self.device) - before
        error = error_of(result)
        del result
        if error is not None:
            check_error(f"{blank.mode} {blank.execution}", error, allowed)
        if host:
            timing = measure_host(call, self.device, self.config.budget_s)
        else:
            timing = measure(call, self.device, self.config.budget_s, repetitions)
        return dataclasses.replace(with_time(blank, timing), peak_mib=peak / MIB, parity_error=error)

    def _clean_memory(self) -> int:
        """Free what the last call left; return the bytes in use, which do not count for the next peak.

        On the CPU nothing tells a process's own memory from its libraries', so there it is counted from 0.
        """
        gc.collect()
        empty_cache()
        reset_peak(self.device)
        return allocated_bytes(self.device)


def check_error(what: str, error: float, allowed: float) -> float:
    """The error, if it is allowed; NaN is not.

    Raises
    ------
    WrongResult
        If it is not.
    """
    if not error <= allowed:
        raise WrongResult(what, error, allowed)
    return error


def with_time(blank: Row, timing: Timing) -> Row:
    """The row of a measurement."""
    times = {"p20_ms": timing.p20, "p50_ms": timing.p50, "p80_ms": timing.p80}
    return dataclasses.replace(blank, **times, repetitions=timing.repetitions)


def without_time(blank: Row, reason: Exception) -> Row:
    """The row of a measurement that gave no time, with the reason."""
    if isinstance(reason, WrongResult):
        note = f"not the reference's result: {reason}"
        return dataclasses.replace(blank, status=WRONG, parity_error=reason.error, note=note)
    for kind, status in ((Unaffordable, SKIPPED), (Missing, MISSING)):
        if isinstance(reason, kind):
            return dataclasses.replace(blank, status=status, note=str(reason))
    log.debug("%s failed", blank.key, exc_info=reason)
    return dataclasses.replace(blank, status=FAILED, note=first_line(reason)[:300])
