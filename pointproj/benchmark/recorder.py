"""Measuring a row: estimate what a call costs, compare its result, time it, write the row and show it."""

import gc
import logging
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch

from pointproj.benchmark.config import WITH_RMM, BenchConfig
from pointproj.benchmark.implementations import Implementation
from pointproj.benchmark.results import FAILED, OK, SKIPPED, WRONG, ResultsFile, Row
from pointproj.benchmark.timing import Timing, measure
from pointproj.benchmark.workloads import Inputs
from pointproj.machine import package_version
from pointproj.runtime.errors import first_line
from pointproj.runtime.memory import allocated_bytes, empty_cache, free_bytes, peak_bytes, reset_peak

log = logging.getLogger(__name__)

T = TypeVar("T")
LONGEST_ROW_S = 120  # of a row, with the time in which a library compiles its code
MIB, GIB = 2**20, 2**30


class NoTime(RuntimeError):  # noqa: N818 - says why
    """Why a row has no time: its status, a note, and the error of a wrong result."""

    def __init__(self, status: str, note: str, error: float | None = None) -> None:
        super().__init__(note)
        self.status, self.error = status, error


class Part(NamedTuple):
    """Rows of a workload that are planned together."""

    workload: str
    rows: int
    measure: Callable[["Recorder"], None]
    last: bool = False  # whether they come after all others


def one_row(
    config: BenchConfig,
    measured: Callable[["Recorder", Row], Row],
    longest_s: float = LONGEST_ROW_S,
    **columns: Any,
) -> Iterator[Part]:
    """A part of one row, if the config wants it; ``measured`` takes the row without its results."""
    columns = {"kind": "backend", "execution": "eager"} | columns
    wanted = config.execution is None or columns["execution"] in config.execution
    if wanted and columns["mode"] in config.modes and (columns["kind"] == "backend" or config.peers != []):
        record = lambda of: of.record([of.blank(**columns)], partial(measured, of), longest_s=longest_s)  # noqa: E731
        yield Part(columns["workload"], 1, record)


class Limits:
    """What a row may cost: time and memory are estimated before a call. Checks raise NoTime."""

    def __init__(self, config: BenchConfig, device: torch.device) -> None:
        self.config, self.device = config, device
        self.started = time.monotonic()
        self._seen: dict[tuple, Row] = {}  # the last row with a time, by call

    @property
    def seconds(self) -> float:
        """Since the run was started."""
        return time.monotonic() - self.started

    @property
    def is_over(self) -> bool:
        """Whether the run's minutes are over."""
        return self.seconds > self.config.minutes * 60

    def check_pairs(self, implementation: Implementation, inputs: Inputs) -> None:
        """Refuse to form all pairs where that takes too long, or more memory than the host has free."""
        if self.device.type == "cpu" and implementation.bytes_per_pair:
            needed, free = implementation.bytes_per_pair * inputs.pairs / GIB, free_bytes("cpu") / GIB
            if needed > free:
                raise NoTime(SKIPPED, f"would need about {needed:.0f} GiB, {free:.0f} GiB are free")
        if rate := implementation.brute_force.get(self.device.type):
            threads = torch.get_num_threads() if self.device.type == "cpu" else 1
            self.refuse_if_slow(inputs.pairs / (rate * threads))

    def check_growth(self, blank: Row) -> None:
        """Refuse a call that takes too long, judged by its other executions and by smaller clouds."""
        before = self._seen.get(_call_of(blank))
        if before is not None and before.references <= blank.references:
            self.refuse_if_slow(before.p50_ms / 1e3 * blank.references / before.references)

    def remember(self, row: Row) -> None:
        """Remember a time for :meth:`check_growth`."""
        if row.status == OK:
            self._seen[_call_of(row)] = row

    def refuse_if_slow(self, seconds: float) -> None:
        limit = self.config.slowest_call_s
        if seconds > limit:
            note = f"would take about {seconds:.0f} s a call, more than slowest_call_s={limit:g}"
            raise NoTime(SKIPPED, note)


def _call_of(row: Row) -> tuple:
    return row.workload, row.operator, row.implementation, row.mode


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise NoTime in the block after so many seconds; 0 is no limit. Only for the main thread."""

    def give_up(*_: object) -> None:
        raise NoTime(SKIPPED, f"given up after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Recorder:
    """What all workloads of a run share; ``machine`` are the columns of the device and of versions."""

    def __init__(self, config: BenchConfig, device: torch.device, machine: dict, file: ResultsFile) -> None:
        self.config, self.device, self.machine, self.file = config, device, machine, file
        self.limits = Limits(config, device)
        self.rows: list[Row] = []
        self.expected = 0  # rows
        self.left_out: Counter[str] = Counter()  # rows of each workload

    def say(self, text: str) -> None:
        """Print a text, in the process that writes the file."""
        if self.file.writes:
            print(text, flush=True)

    def blank(self, *, implementation: str, package: str = "pointproj", **columns: Any) -> Row:
        """A row without its results; the version of ``package`` is looked up."""
        implementation += WITH_RMM if self.config.gpu_memory == "rmm" else ""
        columns = {"kind": "backend", "execution": "eager", **columns, **self.machine}
        return Row(implementation=implementation, package=package_version(package), **columns)

    def record(
        self,
        blanks: Sequence[Row],
        measured: Callable[[Row], Row],
        check: Callable[[Sequence[Row]], None] = lambda _: None,
        longest_s: float = LONGEST_ROW_S,
    ) -> None:
        """Measure and add rows, given without their results, if ``check`` does not raise.

        Rows that a continued run finds in its file are left out, and those that come after its minutes.
        """
        blanks = [of for of in blanks if self.config.started is None or not self.file.holds(of)]
        if not blanks or self.attempt(lambda: (check(blanks),), blanks, longest_s) is None:
            return
        for blank in blanks:
            if self.limits.is_over:
                self.left_out[blank.workload] += 1
            elif row := self.attempt(partial(measured, blank), [blank], longest_s):
                self.add(row)

    def attempt(
        self, function: Callable[[], T], blanks: Sequence[Row], longest_s: float = LONGEST_ROW_S
    ) -> T | None:
        """What a function returns; None if it raises or takes too long: each row then says why."""
        try:
            with time_limit(longest_s):
                return function()
        except NoTime as reason:
            found = {"status": reason.status, "parity_error": reason.error, "note": str(reason)}
        except Exception as reason:
            log.debug("%s failed", blanks[0].key, exc_info=reason)
            found = {"status": FAILED, "note": first_line(reason)[:300]}
        for blank in blanks:
            self.add(replace(blank, **found))
        return None

    def add(self, row: Row) -> None:
        """Write a row to the file and show it."""
        self.limits.remember(row)
        self.rows.append(row)
        self.file.add(row)
        count, seconds = f"[{len(self.rows)}/{self.expected}]", f"{self.limits.seconds:.0f} s"
        line = f"{count:>10} {seconds:>6} {row.workload:17} {row.implementation:16} "
        line += f"{row.mode:16} {row.execution:9}"
        if row.status == OK:
            line += f" {row.p50_ms:11.4f} ms ({row.p20_ms:.4f} to {row.p80_ms:.4f})"
            line += "" if row.peak_mib is None else f" {row.peak_mib:9.1f} MiB"
            line += "" if row.parity_error is None else f"  error {row.parity_error:.1e}"
        else:
            line += f" {row.status}: {row.note}"
        self.say(line)

    def timed(
        self,
        blank: Row,
        make: Callable[[], Callable[[], Any]],
        error_of: Callable[[Any], float | None],
        allowed: float,
        timer: Callable[..., Timing] = measure,
    ) -> Row:
        """Make a call, check what it returns the first time, and time it; the row.

        ``error_of`` gives the error of a result, None if there is nothing to compare. Raises NoTime if the
        error is not allowed, and whatever the call raises.
        """
        gc.collect()  # garbage of the last call would count in the peak
        empty_cache()
        reset_peak(self.device)
        before = allocated_bytes(self.device)
        call = make()
        result = call()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        peak = peak_bytes(self.device) - before
        error = error_of(result)
        del result
        if error is not None:
            check_error(f"{blank.mode} {blank.execution}", error, allowed)
        timing = timer(call, self.device, self.config.budget_s)
        return replace(blank, **timing._asdict(), peak_mib=peak / MIB, parity_error=error)


def check_error(what: str, error: float, allowed: float) -> None:
    """Raise NoTime if an error is not allowed; NaN is not."""
    if not error <= allowed:
        note = f"not the reference's result: {what}: error {error:.2g}, allowed {allowed:.2g}"
        raise NoTime(WRONG, note, error)
