"""Estimate what a call costs before it is made: brute force on large clouds can take hours or all memory."""

import time

import torch

from pointproj.benchmark.config import BenchConfig
from pointproj.benchmark.contenders import Contender
from pointproj.benchmark.results import OK, OUT_OF_MINUTES, Row
from pointproj.benchmark.workloads import Workload
from pointproj.ops.cases import Problem
from pointproj.runtime.memory import free_bytes

PILOT_PAIRS = {"cuda": 2**27, "cpu": 2**22}
GIB = 2**30


class Unaffordable(RuntimeError):  # noqa: N818 - says why there is no time
    """A measurement that the config's limits do not allow."""


class Projection:
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
        self._seen: dict[tuple, list[tuple[int, float]]] = {}  # sizes and seconds, smallest first

    @property
    def is_over(self) -> bool:
        """Whether the run's minutes are over."""
        return time.monotonic() - self.started > self.config.minutes * 60

    def check_clock(self) -> None:
        """Raise if the run's minutes are over."""
        if self.is_over:
            raise Unaffordable(f"{OUT_OF_MINUTES}{self.config.minutes:g} were over before it was measured")

    def check_contender(self, contender: Contender, workload: Workload, problem: Problem) -> None:
        """Raise if a contender that forms all pairs would take too long, or more memory than the host has.

        On a GPU running out of memory is safe, so it is tried there.
        """
        self.check_clock()
        pairs = sum(len(q) * len(r) for q, r in problem.ranges())
        if self.device.type == "cpu" and contender.bytes_per_pair:
            needed, free = contender.bytes_per_pair * pairs, free_bytes("cpu")
            if needed > free:
                raise Unaffordable(f"would need about {needed / GIB:.0f} GiB, {free / GIB:.0f} GiB are free")
        pilot = PILOT_PAIRS[self.device.type]
        if contender.brute_force and pairs > 8 * pilot:
            few, their_pairs = _some_queries(problem, pilot)
            seconds = _seconds(workload, contender, few, self.device)
            self.refuse_if_slow(seconds * pairs / their_pairs)

    def check_growth(self, blank: Row) -> None:
        """Raise if the same call on smaller clouds says that this one would take too long."""
        seen = self._seen.get(_family(blank), [])
        smaller = [(size, seconds) for size, seconds in seen if size < blank.references]
        if not smaller:
            return
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


def _some_queries(problem: Problem, pairs: int) -> tuple[Problem, int]:
    """The first cloud with so few of its queries that they form about ``pairs``, and how many they form."""
    queries, points = problem.ranges()[0]
    query, reference, features = (tensor.flatten(0, -2) for tensor in problem[:3])
    few = query[queries.start : queries.stop][: max(1, pairs // len(points))].clone()
    span = slice(points.start, points.stop)
    return Problem(few, reference[span], features[span]), len(few) * len(points)


def _seconds(workload: Workload, contender: Contender, problem: Problem, device: torch.device) -> float:
    """Seconds of a forward, the second time."""
    for _ in range(2):
        start = time.perf_counter()
        if workload.operator == "knn" and contender.knn is not None:
            contender.knn(problem)
        else:
            contender.aggregate(problem, problem.features)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _family(row: Row) -> tuple:
    return row.workload, row.contender, row.mode, row.execution
