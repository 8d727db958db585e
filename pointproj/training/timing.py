"""Milliseconds of the forward pass and of the whole training step, as the tutorials print them."""

import itertools
import math
import time
from collections.abc import Callable
from statistics import median

import torch

from pointproj.training.capture import STEPS_BEFORE_CAPTURE, CapturedCall, on_stream
from pointproj.training.step import INPUTS, Batch, TrainingStep

SECONDS_ON_CPU = 20.0


def time_step(step: TrainingStep, batch: Batch, repetitions: int) -> dict[str, float]:
    """Time the forward pass and the training step on one batch.

    Both run as the step does: eager, compiled or captured. The model is trained by every step timed.

    Parameters
    ----------
    step : TrainingStep
    batch : mapping
        On the step's device.
    repetitions : int
        How often each is timed, after a few runs that are not. On the CPU fewer, if they would take more
        than 20 seconds.

    Returns
    -------
    dict
        ``forward_ms`` and ``step_ms``, medians.
    """
    for _ in range(STEPS_BEFORE_CAPTURE + 1 if step.captured else 1):
        step(batch)  # the last of these captures the step, if it can be
    forward = _captured_forward(step, batch) if step.captured else lambda: step.forward(batch)
    return {
        "forward_ms": _median_ms(forward, step, repetitions),
        "step_ms": _median_ms(lambda: step(batch), step, repetitions),
    }


def _captured_forward(step: TrainingStep, batch: Batch) -> Callable[[], object]:
    inputs = {name: batch[name] for name in INPUTS if name in batch}
    stream = torch.cuda.Stream(step.device)
    with on_stream(stream):
        step.forward(inputs)
    captured = CapturedCall(lambda kept: step.forward(kept).detach(), inputs, stream)
    return lambda: captured(inputs)


def _median_ms(function: Callable[[], object], step: TrainingStep, repetitions: int) -> float:
    function()
    device = step.device
    if device.type != "cuda":
        # Processes that train together have to take equally many steps, however long these take.
        return _median_ms_on_host(function, repetitions, SECONDS_ON_CPU if step.processes.alone else math.inf)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repetitions + 1)]
    torch.cuda.synchronize(device)
    marks[0].record()
    for mark in marks[1:]:
        function()
        mark.record()
    torch.cuda.synchronize(device)
    return median(before.elapsed_time(after) for before, after in itertools.pairwise(marks))


def _median_ms_on_host(function: Callable[[], object], repetitions: int, most_seconds: float) -> float:
    times: list[float] = []
    while len(times) < repetitions and sum(times) < most_seconds * 1e3:
        start = time.perf_counter()
        function()
        times.append((time.perf_counter() - start) * 1e3)
    return median(times)
