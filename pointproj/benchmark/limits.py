"""What a row may cost: calls that would take hours are foreseen, and what takes too long is given up."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pointproj.benchmark.config import BenchConfig
from pointproj.benchmark.peers import Contender
from pointproj.benchmark.results import OK, OUT_OF_MINUTES, Row
from pointproj.benchmark.workloads import Question
from pointproj.runtime.memory import free_bytes

PILOT_PAIRS = {"cuda": 2**27, "cpu": 2**22}
LONGEST_ROW_S = 120  # with all that it needs, such as a library that compiles itself
GIB = 2**30


class Unaffordable(RuntimeError):  # noqa: N818 - says why there is no time
    """A measurement that the config's limits do not allow."""


class Limits:
    """Estimates time and memory of calls from smaller ones.

    Parameters
    ----------
    config : BenchConfig
        Its limits: ``minutes`` and ``slowest_call_s``.
    device : torch.device
    """

    def __init__(self, config: BenchConfig, device: torch.device) -> None:
        self.config = config
        self.device = device
        self.started = time.monotonic()
        self._seen: dict[tuple, list[tuple[int, float]]] = {}  # sizes and seconds, in the order of the rows

    @property
    def is_over(self) -> bool:
        """Whether the run's minutes are over."""
        return time.monotonic() - self.started > self.config.minutes * 60

    def check_clock(self) -> None:
        """Raise if the run's minutes are over."""
        if self.is_over:
            raise Unaffordable(f"{OUT_OF_MINUTES}{self.config.minutes:g} were over before it was measured")

    def check_pairs(self, contender: Contender, question: Question) -> None:
        """Raise if a contender that forms all pairs would take too long, or more memory than the host has.

        On a GPU running out of memory is safe, so it is tried there.
        """
        if self.device.type == "cpu" and contender.bytes_per_pair:
            needed, free = contender.bytes_per_pair * question.pairs, free_bytes("cpu")
            if needed > free:
                raise Unaffordable(f"would need about {needed / GIB:.0f} GiB, {free / GIB:.0f} GiB are free")
        pilot = PILOT_PAIRS[self.device.type]
        if self.device.type in contender.brute_force and question.pairs > 8 * pilot:
            few = question.part(pilot)
            for _ in range(2):
                start = time.perf_counter()
                contender.try_out(few)
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
                seconds = time.perf_counter() - start
            self.refuse_if_slow(seconds * question.pairs / few.pairs)

    def check_growth(self, blank: Row) -> None:
        """Raise if the same call on smaller clouds says that this one would take too long."""
        seen = self._seen.get(_family(blank), [])
        smaller = [(size, seconds) for size, seconds in seen if size < blank.references]
        if smaller:
            size, seconds = smaller[-1]
            self.refuse_if_slow(seconds * blank.references / size)

    def learn(self, row: Row) -> None:
        """Remember a time for :meth:`check_growth`."""
        if row.status == OK:
            self._seen.setdefault(_family(row), []).append((row.references, row.p50_ms / 1e3))

    def refuse_if_slow(self, seconds: float) -> None:
        """Raise if a call of this length is not wanted."""
        limit = self.config.slowest_call_s
        if seconds > limit:
            raise Unaffordable(f"would take about {seconds:.0f} s a call, more than slowest_call_s={limit:g}")


@contextmanager
def given_up_after(seconds: float) -> Iterator[None]:
    """Raise :class:`Unaffordable` in the block once it has taken so long; a call that has begun ends first.

    For the main thread.
    """

    def give_up(*_: object) -> None:
        raise Unaffordable(f"given up after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _family(row: Row) -> tuple:
    return row.workload, row.contender, row.mode, row.execution
