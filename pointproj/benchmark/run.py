"""The run: for every workload and contender parity first, then times, a row of results each."""

import dataclasses
import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pointproj.benchmark import interop, large
from pointproj.benchmark.calls import NetworkCalls, OperatorCalls, calls_for
from pointproj.benchmark.config import BenchConfig
from pointproj.benchmark.contenders import (
    OURS_MAY_ERR,
    Contender,
    backend_names,
    missing_backend,
    peer_names,
)
from pointproj.benchmark.display import Display
from pointproj.benchmark.parity import Expected
from pointproj.benchmark.peers import prepare_environment
from pointproj.benchmark.plan import Entry, entries, executions, large_modes, ways
from pointproj.benchmark.projection import Projection, Unaffordable
from pointproj.benchmark.results import FAILED, MISSING, OK, RED, SKIPPED, ResultsFile, Row
from pointproj.benchmark.timing import measure
from pointproj.benchmark.workloads import ELEMENTS, NETWORK, Workload, workloads
from pointproj.config import AllocatorConfig
from pointproj.machine import device_name, machine_columns, package_version, slug
from pointproj.ops.cases import Problem
from pointproj.runtime import distributed
from pointproj.runtime.devices import choose_device
from pointproj.runtime.distributed import Processes
from pointproj.runtime.memory import configure_allocator, empty_cache, held_bytes, peak_bytes, reset_peak
from pointproj.training.step import first_line

log = logging.getLogger(__name__)

MIB = 2**20


class RedParity(RuntimeError):  # noqa: N818 - a verdict
    """A result is not the reference's, so it gets no time."""

    def __init__(self, what: str, error: float, allowed: float) -> None:
        super().__init__(f"{what}: error {error:.2g}, allowed {allowed:.2g}")
        self.error = error


def run(config: BenchConfig) -> list[Row]:
    """Measure what the config asks for.

    Parameters
    ----------
    config : BenchConfig
        Checked, from :func:`pointproj.benchmark.config.to_bench_config`.

    Returns
    -------
    list of Row
        In the order in which they were measured; the CSV file holds them too, each since it was measured.

    Raises
    ------
    ConfigError, DeviceError, AllocatorUnavailable
        Before anything is measured.
    KeyboardInterrupt
        After Ctrl-C; the file holds the rows up to then.
    """
    prepare_environment()
    configure_allocator(AllocatorConfig(name=config.gpu_memory))
    device = choose_device(config.device)
    backend_names(config.backends), peer_names(config.peers), executions(config, device.type)
    processes = distributed.join()
    if not processes.alone and config.workloads != ["large"]:
        raise ConfigError("several processes measure one workload together: write workloads=[large]")
    output = config.output or f"benchmarks/{slug(_device_names(device, processes))}.csv"
    with Display(shown=processes.is_first) as display:
        return _Run(config, device, ResultsFile(output, writes=processes.is_first), display).run()


def _device_names(device: torch.device, processes: Processes) -> str:
    name = device_name(device)
    return name if processes.alone else f"{processes.count} x {name}"


class _Run:
    """State of one run: the file, the display, the clock."""

    def __init__(
        self, config: BenchConfig, device: torch.device, file: ResultsFile, display: Display
    ) -> None:
        self.config = config
        self.device = device
        self.file = file
        self.display = display
        self.processes = distributed.join()
        self.machine = {**machine_columns(device), "device": _device_names(device, self.processes)}
        self.projection = Projection(config, device)
        self.rows: list[Row] = []

    def run(self) -> list[Row]:
        self.display.header(self.machine, str(self.file.path))
        config, device_type = self.config, self.device.type
        planned = [(w, [*entries(config, w, device_type)]) for w in workloads(config, device_type)]
        launches = [*ways(config)]
        modes = large_modes(config)
        on_large = [(name, mode) for name in backend_names(config.backends, "radius") for mode in modes]
        counts = [entry.rows for _, of in planned for entry in of]
        self.display.expect(sum(counts) + len(launches) + len(on_large))
        for workload, of in planned:
            if of:
                _Clouds(self, workload).run(of)
        if launches:
            self._interop(launches)
        for name, mode in on_large:
            self._large(name, mode)
        self.display.footer(self.rows)
        return self.rows

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self.file.add(row)
        self.display.row(row)

    def _interop(self, launches: list[tuple[str, str]]) -> None:
        elements = self.config.elements or ELEMENTS[self.device.type]
        vectors = interop.FreshTensors(elements, self.device)
        for name, kind in launches:
            blank = Row(
                **{"workload": "interop", "operator": "saxpy", "contender": name, "kind": kind},
                **{"mode": "launch", "execution": "eager", "queries": elements, "references": elements},
                **{"clouds": 1, "k": None, "radius": None, "channels": 1, "dtype": "float32", "status": OK},
                package=package_version({"torch.add": "torch"}.get(name, "warp-lang")),
                **self.machine,
            )
            call = vectors.call(interop.WAYS[name][1])
            self.add(self.measured(blank, lambda call=call: call, vectors.error, OURS_MAY_ERR))

    def _large(self, name: str, mode: str) -> None:
        device_type = self.device.type
        references, queries = large.SIZES[device_type]
        blank = Row(
            **{"workload": "large", "operator": "radius", "contender": name, "kind": "backend"},
            **{"mode": mode, "execution": "eager", "queries": queries, "references": references},
            **{"clouds": 1, "k": None, "radius": large.radius_for(references)},
            **{"channels": large.CHANNELS, "dtype": "float32", "status": OK},
            package=package_version("pointproj"),
            **self.machine,
        )
        missing = missing_backend(name, device_type, "radius")
        if missing is not None:
            self.add(dataclasses.replace(blank, status=MISSING, note=missing))
        elif name == "torch":
            pairs = f"compares all {queries * references:.0e} pairs"
            self.add(dataclasses.replace(blank, status=SKIPPED, note=pairs))
        else:
            cloud = large.LargeCloud(self.processes, self.device, name)
            made = (lambda: cloud.call(mode)), cloud.error, OURS_MAY_ERR
            self.add(self.measured(blank, *made, repetitions=large.REPETITIONS))

    def measured(
        self,
        blank: Row,
        make: Callable[[], Callable],
        error_of: Callable[[Any], float | None],
        allowed: float,
        repetitions: int | None = None,
    ) -> Row:
        """``blank`` with a verdict and, where that is green, times and memory. It never raises errors."""
        self.display.doing(blank)
        try:
            self.projection.check_clock()
            before = self._clean_memory()
            call = make()
            result = call()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            peak = peak_bytes(self.device) - before
            error = error_of(result)
            del result
            if error is not None and not error <= allowed:
                raise RedParity(f"{blank.mode} {blank.execution}", error, allowed)
            timing = measure(call, self.device, self.config.budget_s, repetitions)
        except Exception as reason:
            return without_time(blank, reason)
        return dataclasses.replace(
            blank,
            **{"p20_ms": timing.p20, "p50_ms": timing.p50, "p80_ms": timing.p80},
            **{"repetitions": timing.repetitions, "peak_mib": peak / MIB, "parity_error": error},
        )

    def _clean_memory(self) -> int:
        """Give back what the last call left; the bytes that stay, of which a call's peak is counted.

        On the CPU nothing tells a process's own memory from its libraries', so there it is counted from 0.
        """
        gc.collect()
        empty_cache()
        reset_peak(self.device)
        return held_bytes(self.device)


@contextmanager
def only_new_garbage() -> Iterator[None]:
    """Let collections within look at what was made within.

    Each row begins with one, and the modules of torch.compile and of the peers are so many objects that
    looking at them all takes half a second.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def without_time(blank: Row, reason: Exception) -> Row:
    """The row of a measurement that came to nothing."""
    if isinstance(reason, RedParity):
        note = f"not the reference's result: {reason}"
        return dataclasses.replace(blank, status=RED, parity_error=reason.error, note=note)
    if isinstance(reason, Unaffordable):
        return dataclasses.replace(blank, status=SKIPPED, note=str(reason))
    log.debug("%s failed", blank.key, exc_info=reason)
    return dataclasses.replace(blank, status=FAILED, note=first_line(reason)[:300])


class _Clouds:
    """One workload: its tensors, what the reference makes of them, and everybody's rows."""

    def __init__(self, run: _Run, workload: Workload) -> None:
        self.of = run
        self.workload = workload
        self.problem: Problem | None = None
        self.expected: Expected | None = None

    def run(self, planned: list[Entry]) -> None:
        self.of.display.preparing(self.workload.name)
        try:
            self.problem = self.workload.problem(self.of.device)
            self.expected = Expected(self.workload, self.problem)
        except Exception as failure:
            log.error(
                "%s is left out, its clouds cannot be made: %s", self.workload.name, first_line(failure)
            )
            return
        self.of.display.workload(self.workload, self.problem, self.expected.checked_queries)
        for entry in planned:
            if entry.missing:
                blank = self._blank(entry.contender, "-", "-")
                self.of.add(dataclasses.replace(blank, status=MISSING, note=entry.missing))
            else:
                with only_new_garbage():
                    self._measure(entry.contender, entry.measurements)
            torch.compiler.reset()  # its limit of versions of one function is for a whole process

    def _measure(self, contender: Contender, measurements: tuple[tuple[str, str], ...]) -> None:
        try:
            self.of.projection.check_contender(contender, self.workload, self.problem)
            error = self._verdict(contender, {mode for mode, _ in measurements})
        except Exception as reason:
            for mode, execution in measurements:
                self.of.add(without_time(self._blank(contender, mode, execution), reason))
            return
        if error is not None:
            self.of.display.parity(contender.name, error)
        made: dict[type, OperatorCalls | NetworkCalls] = {}
        for mode, execution in measurements:
            kind = NetworkCalls if mode in NETWORK else OperatorCalls
            if kind not in made:
                made[kind] = calls_for(mode, contender, self.problem)
            self.of.add(self._row(contender, made[kind], mode, execution))

    def _verdict(self, contender: Contender, modes: set[str]) -> float | None:
        """The contender's largest error, eager, in what its times rest on; raises RedParity."""
        errors = []
        if contender.knn is not None and (contender.kind == "peer" or modes & {"search", "knn", "build"}):
            error = self.expected.neighbors_error(contender.knn(self.problem))
            errors.append(_checked("neighbours", error, contender.rows_may_err))
        if modes & {"aggregate", "operator", "forward", "step"}:
            calls = OperatorCalls(contender, self.problem)
            self.expected.fill_upstream(calls.upstream, checked_only=True)
            error = self.expected.sums_error(*calls.make("operator", "eager")())
            errors.append(_checked("values and feature gradient", error, contender.sums_may_err))
        return max(errors, default=None)

    def _row(
        self,
        contender: Contender,
        calls: OperatorCalls | NetworkCalls,
        mode: str,
        execution: str,
    ) -> Row:
        blank = self._blank(contender, mode, execution)
        allowed = contender.rows_may_err if mode in ("search", "knn") else contender.sums_may_err
        expected = self.expected

        def make() -> Callable[[], Any]:
            self.of.projection.check_growth(blank)
            if mode == "operator":
                expected.fill_upstream(calls.upstream, checked_only=True)
            return calls.make(mode, execution)

        def error_of(result: Any) -> float | None:
            if mode in ("search", "knn"):
                return expected.neighbors_error(result)
            if mode == "aggregate":
                return expected.sums_error(result)
            if mode == "operator":
                error = expected.sums_error(*result)
                expected.fill_upstream(calls.upstream, checked_only=False)
                return error
            if mode == "forward":
                return expected.network_error(result, calls.step(execution).model)
            if mode == "step":
                step = calls.step(execution)
                return expected.network_error(step.forward(calls.batch), step.model)
            return None

        row = self.of.measured(blank, make, error_of, allowed)
        self.of.projection.learn(row)
        return row

    def _blank(self, contender: Contender, mode: str, execution: str) -> Row:
        workload, problem = self.workload, self.problem
        is_knn = workload.operator == "knn"
        return Row(
            workload=workload.name,
            operator=workload.operator,
            contender=contender.name,
            kind=contender.kind,
            mode=mode,
            execution=execution,
            queries=problem.query_points.shape[:-1].numel(),
            references=problem.reference_points.shape[:-1].numel(),
            clouds=len(problem.ranges()),
            k=workload.neighborhood if is_knn else None,
            radius=None if is_knn else workload.neighborhood,
            channels=problem.features.shape[-1],
            dtype=str(problem.query_points.dtype).removeprefix("torch."),
            status=OK,
            package=contender.package,
            **self.of.machine,
        )


def _checked(what: str, error: float, allowed: float) -> float:
    if not error <= allowed:
        raise RedParity(what, error, allowed)
    return error
