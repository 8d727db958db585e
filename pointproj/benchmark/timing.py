"""Time of one call: warm-up, then repetitions within a budget, then percentiles.

On a GPU by device events, on the CPU by the host's clock. Calls shorter than :data:`SHORTEST_SAMPLE_S` are
timed several at a time, because the clock's resolution and the events' own cost would distort them. Inputs
are the same in every repetition: what fits in a cache is read from it, as in a training loop.
"""

import itertools
import math
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

SHORTEST_SAMPLE_S = 2e-4
FASTEST_CALL_S = 1e-7  # the least time assumed: the clock may measure 0
MOST_SAMPLES = 500
LONG_CALL_S = 0.5  # of longer calls only the second one is timed
FEWEST_SAMPLES = 3
ISSUED_IN_A_ROW = 5  # calls before the device is waited for; the queue has room for them

Call = Callable[[], object]


class Timing(NamedTuple):
    """Percentiles per call: columns of a row."""

    p20_ms: float
    p50_ms: float
    p80_ms: float
    repetitions: int


def measure(function: Call, device: torch.device, budget_s: float, repetitions: int | None = None) -> Timing:
    """Time ``function``, which has run before; its GPU work is on the current stream or has ended.

    Repetitions take about ``budget_s`` seconds. Several processes that make each call together give
    ``repetitions``, their number.
    """
    sample = _sample_on_gpu if device.type == "cuda" else _sample_on_host
    warm_up = sample(function, device, 1, 1)  # seconds per call
    if repetitions is not None:
        return percentiles(sample(function, device, 1, repetitions), 1)
    if warm_up[0] > LONG_CALL_S:
        return percentiles(warm_up, 1)
    few = sample(function, device, 1, FEWEST_SAMPLES)
    if FEWEST_SAMPLES * min(few) > budget_s:
        return percentiles(few, 1)
    calls, estimate = 1, min(few)
    for _ in range(2):  # the first estimate is of single calls, whose events cost too much
        wanted = math.ceil(SHORTEST_SAMPLE_S / max(estimate, FASTEST_CALL_S))
        if wanted != calls:
            calls = wanted
            estimate = min(sample(function, device, calls, FEWEST_SAMPLES))
    samples = min(MOST_SAMPLES, int(budget_s / (calls * max(estimate, FASTEST_CALL_S))))
    return percentiles(sample(function, device, calls, max(FEWEST_SAMPLES, samples)), calls)


def measure_host(function: Call, device: torch.device, budget_s: float) -> Timing:
    """Time that the host takes to issue a call, without waiting for the device; on a CPU that of the call."""
    if device.type != "cuda":
        return measure(function, device, budget_s)
    seconds: list[float] = []
    budget_s /= ISSUED_IN_A_ROW
    while len(seconds) < FEWEST_SAMPLES or (len(seconds) < MOST_SAMPLES and sum(seconds) < budget_s):
        torch.cuda.synchronize(device)
        seconds += _sample_on_host(function, device, ISSUED_IN_A_ROW, 1)
    torch.cuda.synchronize(device)
    return percentiles(seconds, ISSUED_IN_A_ROW)


def percentiles(seconds: list[float], calls: int) -> Timing:
    """Percentiles of samples given in seconds per call, each the mean over ``calls`` calls."""
    ms = torch.tensor(seconds, dtype=torch.float64) * 1e3
    p20, p50, p80 = ms.quantile(torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)).tolist()
    return Timing(p20, p50, p80, len(seconds) * calls)


def _sample_on_gpu(function: Call, device: torch.device, calls: int, samples: int) -> list[float]:
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(samples + 1)]
    torch.cuda.synchronize(device)
    marks[0].record()
    for mark in marks[1:]:
        for _ in range(calls):
            function()
        mark.record()
    torch.cuda.synchronize(device)
    return [before.elapsed_time(after) / 1e3 / calls for before, after in itertools.pairwise(marks)]


def _sample_on_host(function: Call, device: torch.device, calls: int, samples: int) -> list[float]:
    seconds = []
    for _ in range(samples):
        start = time.perf_counter()
        for _ in range(calls):
            function()
        seconds.append((time.perf_counter() - start) / calls)
    return seconds
