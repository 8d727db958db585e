"""One step of a model, in a process of its own: ``python -m pointproj.benchmark.model_process NAME``.

It imports what the model needs, reads one line, a :class:`Request`, and writes one, the answer.

A step is the forward, the mean square of the output, the backward, and SGD, which holds no state. Memory on
the CPU is that of the whole process, so no other model of that size may have been in it.
"""

import gc
import json
import sys
import time
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import NamedTuple

import torch

from pointproj.benchmark.parity import relative_error
from pointproj.benchmark.peer import import_failure
from pointproj.benchmark.timing import Timing, measure, percentiles
from pointproj.benchmark.waiting import READY
from pointproj.runtime.memory import allocated_bytes, peak_bytes, reset_peak

LONGEST_STEP_S = 20.0  # of longer ones the first alone is timed


class Request(NamedTuple):
    """What to measure; all strings and numbers, for a command line."""

    workload: str  # the module beside this one that makes the model
    replaced: bool  # whether its search is ours
    execution: str  # eager | compiled
    points: int
    device: str
    budget_s: float


def answer(request: Request) -> dict[str, float | None]:
    """Measure, after a comparison of results where the search was replaced.

    Parameters
    ----------
    request : Request

    Returns
    -------
    dict
        ``p20_ms``, ``p50_ms``, ``p80_ms``, ``repetitions``, ``error`` (relative, of output and gradients of a
        small model; None for the library's own), ``before`` and ``peak`` in bytes.
    """
    module = import_module(f"pointproj.benchmark.{request.workload}")
    device = torch.device(request.device)
    error = disagreement(module, device) if request.replaced else None
    torch.manual_seed(0)
    model, inputs = module.make(request.replaced, request.points, device)
    compiled = request.execution == "compiled"
    step = _step(model, inputs, compiled)
    gc.collect()
    reset_peak(device)
    before = allocated_bytes(device) or peak_bytes(device)
    timing = _timing(step, device, request.budget_s, compiled)
    times = {f"{name}_ms": getattr(timing, name) for name in ("p20", "p50", "p80")}
    memory = {"before": before, "peak": peak_bytes(device)}
    return {**times, "repetitions": timing.repetitions, "error": error, **memory}


def disagreement(module: ModuleType, device: torch.device) -> float:
    """The largest relative error of output and parameters' gradients of the small model with our search."""
    results = []
    for replaced in (False, True):
        torch.manual_seed(0)
        model, inputs = module.make_small(replaced, device)
        output = model(**inputs)
        gradients = torch.autograd.grad(output.square().mean(), [*model.parameters()], allow_unused=True)
        found = [output, *(gradient for gradient in gradients if gradient is not None)]
        results.append([torch.view_as_real(t) if t.is_complex() else t for t in found])
    return max(relative_error(got, expected) for expected, got in zip(*results, strict=True))


def _step(model: torch.nn.Module, inputs: dict[str, torch.Tensor], compiled: bool) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    called = torch.compile(model) if compiled else model

    def step() -> None:
        optimizer.zero_grad()
        called(**inputs).square().mean().backward()
        optimizer.step()

    return step


def _timing(step: Callable[[], None], device: torch.device, budget_s: float, compiled: bool) -> Timing:
    for _ in range(2 if compiled else 1):  # the first one compiles
        start = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - start
    if seconds > LONGEST_STEP_S:
        return percentiles([seconds], 1)
    return measure(step, device, budget_s)


if __name__ == "__main__":
    import_failure(import_module(f"pointproj.benchmark.{sys.argv[1]}").IMPORTS)
    print(f"\n{READY}", flush=True)
    if asked := sys.stdin.readline():  # else whoever began this process has ended
        print(json.dumps(answer(Request(**json.loads(asked)))))
