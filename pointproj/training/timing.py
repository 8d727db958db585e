"""Milliseconds of the forward pass and of the whole training step, as the tutorials print them."""

import itertools
import time
from collections.abc import Callable
from statistics import median

import torch

from pointproj.training.capture import STEPS_BEFORE_CAPTURE, CapturedCall, on_stream
from pointproj.training.step import INPUTS, Batch, TrainingStep

SECONDS_ON_CPU = 20.0


def time_step(step: TrainingStep, batch: Batch, repetitions: int) -> dict[str, float]:
    """Return medians ``forward_ms`` and ``step_ms`` on one batch; every step timed trains the model.

    Both run as the step does: eager, compiled or captured. Each is timed ``repetitions`` times after a few
    runs that are not; on the CPU fewer, if they would take more than 20 seconds.
    """
    for _ in range(STEPS_BEFORE_CAPTURE + 1 if step.captured else 1):
        step(batch)  # the last of these captures the step, if it can be
    forward = _captured_forward(step, batch) if step.captured else lambda: step.forward(batch)
    calls = {"forward_ms": forward, "step_ms": lambda: step(batch)}
    return {name: _median_ms(call, step, repetitions) for name, call in calls.items()}


def _captured_forward(step: TrainingStep, batch: Batch) -> Callable[[], object]:
    inputs = {name: batch[name] for name in INPUTS if name in batch}
    stream = torch.cuda.Stream(step.device)
    with on_stream(stream):
        step.forward(inputs)
    captured = CapturedCall(lambda kept: step.forward(kept).detach(), inputs, stream)
    return lambda: captured(inputs)


def _median_ms(function: Callable[[], object], step: TrainingStep, repetitions: int) -> float:
    function()
    if step.device.type == "cuda":
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(repetitions + 1)]
        torch.cuda.synchronize(step.device)
        marks[0].record()
        for mark in marks[1:]:
            function()
            mark.record()
        torch.cuda.synchronize(step.device)
        return median(before.elapsed_time(after) for before, after in itertools.pairwise(marks))
    times: list[float] = []
    # Processes that train together have to take equally many steps, however long these take.
    while len(times) < repetitions and (sum(times) < SECONDS_ON_CPU or not step.processes.alone):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return median(times) * 1e3
