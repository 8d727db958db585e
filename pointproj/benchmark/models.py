"""The workloads ``gino`` and ``geotransolver``: a step of a model, with its library's search and with ours.

Each row is measured by a process of its own (:mod:`pointproj.benchmark.model_process`). On a GPU these begin
with the run, take their first steps side by side, and wait: importing and compiling take longer than a step.
On the CPU such steps take seconds to minutes: those that are known to take longer than ``slowest_call_s`` are
left out.
"""

import dataclasses
import json

from pointproj.benchmark import geotransolver, gino
from pointproj.benchmark.config import BenchConfig
from pointproj.benchmark.projection import Unaffordable
from pointproj.benchmark.recorder import Recorder, check_error, with_time, without_time
from pointproj.benchmark.results import MISSING, Row
from pointproj.benchmark.timing import Timing
from pointproj.machine import package_version

MODELS = {"gino": gino, "geotransolver": geotransolver}
OURS = "pointproj"
TOLERANCE = 1e-4  # sums in fp32, in another order
TIMEOUT_S = 1800
MIB = 2**20


def planned(config: BenchConfig, device_type: str) -> list[tuple[str, str, str, int]]:
    """(workload, contender, execution, points) of each row."""
    if "step" not in config.modes:
        return []
    return [
        (workload, contender, execution, points)
        for workload, model in MODELS.items()
        if workload in config.workloads
        for contender in (model.PACKAGE, OURS)
        if contender == OURS or config.peers != []
        for points in model.SIZES[contender]
        for execution in model.EXECUTIONS
        if execution in (config.execution or model.EXECUTIONS)
    ]


def begin(recorder: Recorder, rows: list[tuple[str, str, str, int]]) -> None:
    """Start the processes that will measure these rows."""
    recorder.waiting.begin(_request(recorder, *row) for row in rows)


def measure(recorder: Recorder, rows: list[tuple[str, str, str, int]]) -> None:
    """Add a row for each planned one."""
    for row in rows:
        blank = _blank(recorder, *row)
        recorder.display.doing(blank)
        try:
            recorder.projection.check_clock()
            _refuse_if_slow(recorder, *row)
            recorder.add(_measured(recorder, blank, _request(recorder, *row)))
        except Exception as reason:
            recorder.add(without_time(blank, reason))


def _blank(recorder: Recorder, workload: str, contender: str, execution: str, points: int) -> Row:
    model = MODELS[workload]
    return Row(
        **{"workload": workload, "operator": "radius", "contender": contender, "mode": "step"},
        **{"kind": "backend" if contender == OURS else "peer", "execution": execution},
        **{"queries": getattr(model, "GRID", 0) ** 3 or points, "references": points},
        **{"radius": model.RADIUS, "channels": model.CHANNELS, "package": package_version(contender)},
        **recorder.machine,
    )


def _refuse_if_slow(recorder: Recorder, workload: str, contender: str, execution: str, points: int) -> None:
    seconds, limit = MODELS[workload].SECONDS_ON_CPU[contender, points], recorder.config.slowest_call_s
    if recorder.device.type == "cpu" and seconds > limit:
        raise Unaffordable(f"takes about {seconds:.0f} s on two cores, more than slowest_call_s={limit:g}")


def _request(recorder: Recorder, workload: str, contender: str, execution: str, points: int) -> str:
    """What a process is begun with."""
    return json.dumps(
        {
            **{"workload": workload, "replaced": contender == OURS, "execution": execution},
            **{"points": points, "device": str(recorder.device), "budget_s": recorder.config.budget_s},
        }
    )


def _measured(recorder: Recorder, blank: Row, request: str) -> Row:
    found = json.loads(recorder.waiting.ask(request, TIMEOUT_S))
    if found.get("missing"):
        return dataclasses.replace(blank, status=MISSING, note=found["missing"])
    if found["error"] is not None:
        check_error("output and gradients of a small model", found["error"], TOLERANCE)
    timing = Timing(*(found[name] for name in ("p20_ms", "p50_ms", "p80_ms", "repetitions")))
    note = f"{found['before'] / MIB:.0f} MiB before the first step"
    return dataclasses.replace(
        with_time(blank, timing), peak_mib=found["peak"] / MIB, parity_error=found["error"], note=note
    )
