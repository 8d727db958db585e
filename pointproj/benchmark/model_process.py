"""One step of a model, in a process of its own: ``python -m pointproj.benchmark.model_process REQUEST``.

It imports what the model needs and takes the first steps, which compile; then it waits for a line, measures,
and writes one line, the answer.

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
from pointproj.benchmark.peers import import_failure
from pointproj.benchmark.processes import READY
from pointproj.benchmark.timing import Timing, measure, percentiles
from pointproj.runtime.memory import allocated_bytes, empty_cache, peak_bytes, reset_peak

LONGEST_STEP_S = 20.0  # of longer ones the first alone is timed


class Request(NamedTuple):
    """What to measure; all strings and numbers, for a command line."""

    workload: str  # the module beside this one that makes the model
    replaced: bool  # whether its search is ours
    execution: str  # eager | compiled
    points: int
    device: str
    budget_s: float


class PreparedStep:
    """A step that has run, after a comparison of results where the search was replaced.

    Other processes may be busy until it is measured.

    Parameters
    ----------
    request : Request
    """

    def __init__(self, request: Request) -> None:
        module = import_module(f"pointproj.benchmark.{request.workload}")
        self.request = request
        self.device = torch.device(request.device)
        self.error = disagreement(module, self.device) if request.replaced else None
        torch.manual_seed(0)
        self.model, inputs = module.make(request.replaced, request.points, self.device)
        compiled = request.execution == "compiled"
        self.step = _step(self.model, inputs, compiled)
        gc.collect()
        reset_peak(self.device)
        self.before = allocated_bytes(self.device) or peak_bytes(self.device)
        for _ in range(2 if compiled else 1):  # the first one compiles
            start = time.perf_counter()
            self.step()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self.seconds = time.perf_counter() - start
        self._give_memory_back()

    def answer(self) -> dict[str, float | None]:
        """Measure.

        Returns
        -------
        dict
            ``p20_ms``, ``p50_ms``, ``p80_ms``, ``repetitions``, ``error`` (relative, of output and gradients
            of a small model; None for the library's own), ``before`` and ``peak`` in bytes.
        """
        timing = self._timing()
        times = {f"{name}_ms": getattr(timing, name) for name in ("p20", "p50", "p80")}
        memory = {"before": self.before, "peak": peak_bytes(self.device)}
        return {**times, "repetitions": timing.repetitions, "error": self.error, **memory}

    def _timing(self) -> Timing:
        if self.device.type == "cpu" and self.seconds > LONGEST_STEP_S:
            return percentiles([self.seconds], 1)
        return measure(self.step, self.device, self.request.budget_s)

    def _give_memory_back(self) -> None:
        """So that others have it until the step is measured, and the peak is that of steps alone."""
        self.model.zero_grad()
        if self.device.type == "cuda":
            gc.collect()
            empty_cache()
            reset_peak(self.device)


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


def main() -> None:
    """Prepare what the command line asks for, wait for a line, and answer."""
    request = Request(*json.loads(sys.argv[1]))
    missing = import_failure(import_module(f"pointproj.benchmark.{request.workload}").IMPORTS)
    prepared = None if missing else PreparedStep(request)
    print(f"\n{READY}", flush=True)
    if sys.stdin.readline():  # else whoever began this process has ended
        print(json.dumps({"missing": missing} if prepared is None else prepared.answer()))


if __name__ == "__main__":
    main()
