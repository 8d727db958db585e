"""The workloads ``gino`` and ``geotransolver``: a step of a model, with its library's search and with ours.

Each row is measured by a process of its own (:mod:`pointproj.benchmark.model_process`). On a GPU these begin
with the run, take their first steps side by side, and wait: importing and compiling take longer than a step.
On the CPU such steps take seconds to minutes: those that are known to take longer than ``slowest_call_s`` are
left out.
"""

import dataclasses
import json
from collections.abc import Iterator
from functools import partial

from pointproj.benchmark import geotransolver, gino
from pointproj.benchmark.config import BenchConfig
from pointproj.benchmark.model_process import Request
from pointproj.benchmark.recorder import MIB, Missing, Part, Recorder, check_error, with_time
from pointproj.benchmark.results import Row
from pointproj.benchmark.timing import Timing

MODELS = {"gino": gino, "geotransolver": geotransolver}
OURS = "pointproj"
TOLERANCE = 1e-4  # sums in fp32, in another order
TIMEOUT_S = 1800


def parts(config: BenchConfig, device_type: str) -> Iterator[Part]:
    """One for each row."""
    for request in requests(config, device_type):
        yield Part(1, partial(_measure, request=request))


def requests(config: BenchConfig, device: str) -> list[Request]:
    """What the rows ask processes for."""
    if "step" not in config.modes:
        return []
    return [
        Request(workload, contender == OURS, execution, points, device, config.budget_s)
        for workload, model in MODELS.items()
        if workload in config.workloads
        for contender in (model.PACKAGE, OURS)
        if contender == OURS or config.peers != []
        for points in model.SIZES[contender]
        for execution in model.EXECUTIONS
        if execution in (config.execution or model.EXECUTIONS)
    ]


def begin(recorder: Recorder) -> None:
    """Start the processes that will measure all rows."""
    asked = requests(recorder.config, recorder.device.type)
    recorder.prepared.begin(json.dumps(request) for request in asked)


def _measure(recorder: Recorder, request: Request) -> None:
    model = MODELS[request.workload]
    contender = OURS if request.replaced else model.PACKAGE
    of_model = {"radius": model.RADIUS, "channels": model.CHANNELS, "references": request.points}
    blank = recorder.blank(
        workload=request.workload,
        operator="radius",
        contender=contender,
        kind="backend" if request.replaced else "peer",
        mode="step",
        execution=request.execution,
        queries=getattr(model, "GRID", 0) ** 3 or request.points,
        package=contender,
        **of_model,
    )

    def measured(row: Row) -> Row:
        if recorder.device.type == "cpu":
            recorder.limits.refuse_if_slow(model.SECONDS_ON_CPU[contender, request.points])
        found = json.loads(recorder.prepared.ask(json.dumps(request), TIMEOUT_S))
        if found.get("missing"):
            raise Missing(found["missing"])
        if found["error"] is not None:
            check_error("output and gradients of a small model", found["error"], TOLERANCE)
        timing = Timing(*(found[name] for name in ("p20_ms", "p50_ms", "p80_ms", "repetitions")))
        note = f"{found['before'] / MIB:.0f} MiB before the first step"
        facts = {"peak_mib": found["peak"] / MIB, "parity_error": found["error"], "note": note}
        return dataclasses.replace(with_time(row, timing), **facts)

    recorder.record(blank, measured, TIMEOUT_S)
