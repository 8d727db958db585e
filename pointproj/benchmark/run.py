"""The run: plan the rows, then measure them."""

import gc
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch

from pointproj.benchmark import large, models, start
from pointproj.benchmark.calls import Calls
from pointproj.benchmark.config import LIST_SUMS, LISTS, NETWORK, SUMS, BenchConfig
from pointproj.benchmark.implementations import Implementation
from pointproj.benchmark.parity import Expected
from pointproj.benchmark.recorder import NoTime, Part, Recorder, check_error
from pointproj.benchmark.results import MISSING, ResultsFile, Row
from pointproj.benchmark.selection import SLOW, Entry, backend_names, entries, executions, peer_names
from pointproj.benchmark.timing import measure, measure_host
from pointproj.benchmark.workloads import Workload, workloads
from pointproj.config import AllocatorConfig, ConfigError
from pointproj.machine import machine_columns, slug
from pointproj.runtime import distributed
from pointproj.runtime.devices import choose_device
from pointproj.runtime.memory import configure_allocator

log = logging.getLogger(__name__)

WITH_GRADIENTS = ("operator", "gradients", "second", *LIST_SUMS)
OTHERS = {"large": large.parts, "start": start.parts, "import": start.import_parts}


def run_benchmark(config: BenchConfig, *, interleaved: Sequence[str] = ()) -> list[Row]:
    """Measure what a checked config asks for, in the order of :func:`plan`; the rows in this order.

    Each is in the CSV file as soon as it is measured, also if Ctrl-C ends the run. Raises ConfigError,
    DeviceError and AllocatorUnavailable before anything is measured.
    """
    captures = "captured" in (config.execution or ())
    configure_allocator(AllocatorConfig(name=config.gpu_memory), captures=captures)
    device = choose_device(config.device)
    backend_names(config.backends), peer_names(config.peers), executions(config, device.type)
    processes = distributed.join()
    if not processes.is_single and config.workloads != ["large"]:
        raise ConfigError("several processes measure one workload together: write workloads=[large]")
    machine = machine_columns(device)
    machine["date"] = config.started or machine["date"]
    if not processes.is_single:
        machine["device"] = f"{processes.count} x {machine['device']}"
        config = replace(config, started=None)  # only the first process reads the file
    path = config.output or f"benchmarks/{slug(machine['device'])}.csv"
    recorder = Recorder(config, device, machine, ResultsFile(path, writes=processes.is_first))
    versions = ", ".join(f"{of} {machine[of]}" for of in ("torch", "cuda", "warp") if machine[of])
    recorder.say(f"{machine['device']}, {versions}; results go to {path}")
    parts = plan(config, device.type, interleaved=interleaved)
    recorder.expected = sum(part.rows for part in parts)
    while parts:
        part = parts.pop(0)  # with the last part of a workload its clouds are freed
        if recorder.limits.is_over:
            recorder.left_out[part.workload] += part.rows
        else:
            part.measure(recorder)
    for name, rows in recorder.left_out.items():
        log.warning("minutes=%g are over: %d rows of %s are left out", config.minutes, rows, name)
    counts = Counter(row.status for row in recorder.rows)
    summary = ", ".join(f"{count} {status}" for status, count in counts.items())
    recorder.say(f"\n{summary}; {recorder.limits.seconds:.0f} s in all")
    return recorder.rows


def plan(config: BenchConfig, device_type: str, *, interleaved: Sequence[str] = ()) -> list[Part]:
    """All parts, workload after workload, but what is slow comes last.

    If ``interleaved`` names workloads, only these are planned: the first part of each, then the second of
    each, and so on.
    """
    parts = [part for name in config.workloads for part in _parts(config, name, device_type)]
    planned: Counter[str] = Counter()  # parts of each workload

    def place(part: Part) -> tuple[bool, int]:
        planned[part.workload] += bool(interleaved)
        return part.last, planned[part.workload]

    return sorted((part for part in parts if not interleaved or part.workload in interleaved), key=place)


def _parts(config: BenchConfig, name: str, device_type: str) -> Iterator[Part]:
    """The parts of one name of the config: one for each implementation of its workloads."""
    if name in models.MODELS:
        yield from models.parts(config, name)
    elif name in OTHERS:
        yield from OTHERS[name](config, device_type)
    else:
        for workload in workloads(replace(config, workloads=[name]), device_type):
            made = partial(PreparedWorkload, workload)
            shared = cache(made)  # the clouds are made once
            for entry in entries(config, workload, device_type):  # importing the peers takes a while
                last = (workload.name, entry.implementation.name) in SLOW
                rows = 1 if entry.implementation.missing else len(entry.measurements)
                measure = partial(_measure, workload, entry, made if last else shared)
                yield Part(workload.name, rows, measure, last)


def _measure(
    workload: Workload, entry: Entry, prepare: Callable[[Recorder], "PreparedWorkload"], recorder: Recorder
) -> None:
    """Measure the rows of an entry; if its clouds cannot be made, one row says why."""
    gc.collect()  # the clouds of the last workload
    (mode, execution), *_ = entry.measurements
    given = {"workload": workload.name, "operator": workload.operator, **entry.implementation.columns}
    blank = recorder.blank(**given, mode=mode, execution=execution, queries=0, references=0)
    prepared = recorder.attempt(partial(prepare, recorder), [blank], longest_s=0)
    if prepared is None:
        return
    gc.freeze()  # else the garbage collection before each row takes half a second
    try:
        prepared.measure(entry)
        torch.compiler.reset()  # a process may compile one function only so often
    finally:
        gc.unfreeze()


class PreparedWorkload:
    """The tensors of one workload, and the reference's results."""

    def __init__(self, workload: Workload, recorder: Recorder) -> None:
        self.recorder, self.workload = recorder, workload
        self.inputs = inputs = workload.make_inputs(recorder.device)
        self.expected = Expected(workload, inputs)
        self.columns = {
            **{"workload": workload.name, "operator": workload.operator, "radius": inputs.radius},
            "queries": len(self.expected.query),
            "references": len(self.expected.points),
            "clouds": len(self.expected.clouds),
            "dtype": str(self.expected.query.dtype).removeprefix("torch."),
        }
        numbers = {"k": inputs.k, "r": inputs.radius}
        neighborhood = "".join(f", {name}={value:g}" for name, value in numbers.items() if value)
        recorder.say(
            f"\n{workload.name} {workload.operator}{neighborhood}, {self.columns['queries']:,} queries, "
            f"{self.columns['references']:,} points; "
            f"{len(self.expected.checked):,} queries are compared with the reference"
        )

    def measure(self, entry: Entry) -> None:
        """Add a row for each (mode, execution); the eager results are compared first."""
        implementation, measurements = entry
        if implementation.missing:
            measurements = [(implementation.modes[0] if implementation.modes[0] in LISTS else "-", "-")]
        blanks = [self._blank(implementation, *measurement) for measurement in measurements]
        calls = Calls(implementation, self.inputs)
        self.recorder.record(blanks, partial(self._measured, calls), partial(self._check, calls))

    def _check(self, calls: Calls, blanks: Sequence[Row]) -> None:
        """Compare the eager results that other modes use; NoTime if one is wrong or cannot be computed."""
        implementation, limits, modes = (
            calls.implementation,
            self.recorder.limits,
            {blank.mode for blank in blanks},
        )
        if implementation.missing:
            raise NoTime(MISSING, implementation.missing)
        limits.check_growth(blanks[0])
        limits.check_pairs(implementation, self.inputs)
        if "knn" in implementation.find and (
            implementation.kind == "peer" or modes & {"search", "knn", "build"}
        ):
            error = self.expected.error(calls, "knn", "eager", implementation.find["knn"](self.inputs))
            check_error("neighbours", error, implementation.allowed("knn"))
        if implementation.compared and modes & {*SUMS, *NETWORK}:
            self.expected.fill_upstream(calls.upstream, checked_only=True)
            error = self.expected.error(calls, "operator", "eager", calls.make("operator", "eager")())
            check_error("values and feature gradient", error, implementation.allowed("operator"))

    def _measured(self, calls: Calls, blank: Row) -> Row:
        mode, execution = blank.mode, blank.execution

        def make() -> Callable[[], Any]:
            self.recorder.limits.check_growth(blank)
            if mode in WITH_GRADIENTS:
                self.expected.fill_upstream(calls.upstream, checked_only=True)
            return calls.make(mode, execution)

        def error_of(result: Any) -> float | None:
            error = self.expected.error(calls, mode, execution, result)
            if mode in WITH_GRADIENTS:
                self.expected.fill_upstream(calls.upstream, checked_only=False)
            return error

        allowed, timer = calls.implementation.allowed(mode), measure_host if self.workload.host else measure
        return self.recorder.timed(blank, make, error_of, allowed, timer)

    def _blank(self, implementation: Implementation, mode: str, execution: str) -> Row:
        """A row of this workload without its results."""
        how = {"mode": mode, "execution": execution, "note": implementation.returns}
        k = None if mode.endswith("csr") else self.inputs.k
        channels = 1 if mode in LISTS else self.inputs.problem.features.shape[-1]
        return self.recorder.blank(**self.columns, **implementation.columns, **how, k=k, channels=channels)
