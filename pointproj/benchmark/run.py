"""The run: for every workload and contender parity first, then times, a row of results each."""

import dataclasses
import gc
import logging
from collections.abc import Callable
from typing import Any

import torch

from pointproj.benchmark import interop
from pointproj.benchmark.calls import NetworkCalls, OperatorCalls, calls_for
from pointproj.benchmark.config import BenchConfig
from pointproj.benchmark.contenders import OURS_MAY_ERR, Contender, backend_names, peer_names
from pointproj.benchmark.display import Display
from pointproj.benchmark.machine import device_name, machine_columns, package_version, slug
from pointproj.benchmark.parity import Expected
from pointproj.benchmark.peers import prepare_environment
from pointproj.benchmark.plan import Entry, entries, executions, ways
from pointproj.benchmark.projection import Projection, Unaffordable
from pointproj.benchmark.results import FAILED, MISSING, OK, RED, SKIPPED, ResultsFile, Row
from pointproj.benchmark.timing import measure
from pointproj.benchmark.workloads import ELEMENTS, NETWORK, Workload, workloads
from pointproj.devices import choose_device
from pointproj.memory import peak_bytes, reset_peak
from pointproj.step import first_line
from tests.cases import Problem

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
    ConfigError, DeviceError
        Before anything is measured.
    KeyboardInterrupt
        After Ctrl-C; the file holds the rows up to then.
    """
    prepare_environment()
    device = choose_device(config.device)
    backend_names(config.backends), peer_names(config.peers), executions(config, device.type)
    output = config.output or f"benchmarks/{slug(device_name(device))}.csv"
    with Display() as display:
        return _Run(config, device, ResultsFile(output), display).run()


class _Run:
    """State of one run: the file, the display, the clock."""

    def __init__(
        self, config: BenchConfig, device: torch.device, file: ResultsFile, display: Display
    ) -> None:
        self.config = config
        self.device = device
        self.file = file
        self.display = display
        self.machine = machine_columns(device)
        self.projection = Projection(config, device)
        self.rows: list[Row] = []

    def run(self) -> list[Row]:
        self.display.header(self.machine, str(self.file.path))
        planned = [
            (w, [*entries(self.config, w, self.device.type)])
            for w in workloads(self.config, self.device.type)
        ]
        total = sum(max(1, len(entry.measurements)) for _, of in planned for entry in of)
        elements = self.config.elements or ELEMENTS[self.device.type]
        with_interop = "interop" in self.config.workloads and "launch" in self.config.modes
        self.display.expect(total + (len([*ways(self.config)]) if with_interop else 0))
        for workload, of in planned:
            if any(entry.measurements or entry.missing for entry in of):
                _Clouds(self, workload).run(of)
        if with_interop:
            self._interop(elements)
        self.display.footer(self.rows)
        return self.rows

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self.file.add(row)
        self.display.row(row)

    def _interop(self, elements: int) -> None:
        vectors = interop.FreshTensors(elements, self.device)
        for name, kind in ways(self.config):
            blank = Row(
                **{"workload": "interop", "operator": "saxpy", "contender": name, "kind": kind},
                **{"mode": "launch", "execution": "eager", "queries": elements, "references": elements},
                **{"clouds": 1, "k": None, "radius": None, "channels": 1, "dtype": "float32", "status": OK},
                package=package_version({"torch.add": "torch"}.get(name, "warp-lang")),
                **self.machine,
            )
            call = vectors.call(interop.WAYS[name][1])
            self.add(self.measured(blank, lambda call=call: call, vectors.error, OURS_MAY_ERR))

    def measured(
        self,
        blank: Row,
        make: Callable[[], Callable],
        error_of: Callable[[Any], float | None],
        allowed: float,
    ) -> Row:
        """``blank`` with a verdict and, where that is green, times and memory. It never raises errors."""
        self.display.doing(blank)
        release(self.device)
        try:
            self.projection.check_clock()
            reset_peak(self.device)
            call = make()
            result = call()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            peak = peak_bytes(self.device)
            error = error_of(result)
            del result
            if error is not None and not error <= allowed:
                raise RedParity(f"{blank.mode} {blank.execution}", error, allowed)
            timing = measure(call, self.device, self.config.budget_s)
        except RedParity as verdict:
            return dataclasses.replace(
                blank, status=RED, parity_error=verdict.error, note=f"not the reference's result: {verdict}"
            )
        except Unaffordable as reason:
            return dataclasses.replace(blank, status=SKIPPED, note=str(reason))
        except Exception as failure:
            log.debug("%s failed", blank.key, exc_info=True)
            return dataclasses.replace(blank, status=FAILED, note=first_line(failure)[:300])
        return dataclasses.replace(
            blank,
            **{"p20_ms": timing.p20, "p50_ms": timing.p50, "p80_ms": timing.p80},
            **{"repetitions": timing.repetitions, "peak_mib": peak / MIB, "parity_error": error},
        )


class _Clouds:
    """One workload: its tensors, what the reference makes of them, and everybody's rows."""

    def __init__(self, run: _Run, workload: Workload) -> None:
        self.of = run
        self.workload = workload
        self.problem: Problem | None = None
        self.expected: Expected | None = None

    def run(self, planned: list[Entry]) -> None:
        self.of.display.preparing(self.workload.name)
        self.problem = self.workload.problem(self.of.device)
        self.expected = Expected(self.workload, self.problem)
        self.of.display.workload(self.workload, self.problem, self.expected.checked_queries)
        for entry in planned:
            if entry.missing:
                row = dataclasses.replace(self._blank(entry, "-", "-"), status=MISSING, note=entry.missing)
                self.of.add(row)
            elif entry.measurements:
                self._measure(entry.contender, entry)
            torch.compiler.reset()  # its limit of versions of one function is for a whole process
        self.problem = self.expected = None
        release(self.of.device)

    def _measure(self, contender: Contender, entry: Entry) -> None:
        try:
            self.of.projection.check_contender(contender, self.workload, self.problem)
            error = self._verdict(contender, entry)
        except (RedParity, Unaffordable, Exception) as reason:
            for mode, execution in entry.measurements:
                self.of.add(self._without_time(entry, mode, execution, reason))
            return
        self.of.display.parity(contender.name, error)
        made: dict[type, OperatorCalls | NetworkCalls] = {}
        for mode, execution in entry.measurements:
            kind = NetworkCalls if mode in NETWORK else OperatorCalls
            if kind not in made:
                made[kind] = calls_for(mode, contender, self.problem)
            self.of.add(self._row(contender, entry, made[kind], mode, execution))

    def _verdict(self, contender: Contender, entry: Entry) -> float:
        """The contender's error in everything that will be timed, eager; raises RedParity."""
        errors = []
        modes = {mode for mode, _ in entry.measurements}
        if contender.knn is not None and (contender.kind == "peer" or modes & {"search", "knn", "build"}):
            error = self.expected.neighbors_error(contender.knn(self.problem))
            errors.append(_checked("neighbours", error, contender.rows_may_err))
        if modes & {"aggregate", "operator", "forward", "step"}:
            calls = OperatorCalls(contender, self.problem)
            self.expected.fill_upstream(calls.upstream, checked_only=True)
            error = self.expected.sums_error(*calls.make("operator", "eager")())
            errors.append(_checked("values and feature gradient", error, contender.sums_may_err))
        return max(errors, default=0.0)

    def _row(
        self,
        contender: Contender,
        entry: Entry,
        calls: OperatorCalls | NetworkCalls,
        mode: str,
        execution: str,
    ) -> Row:
        blank = self._blank(entry, mode, execution)
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
            if mode in NETWORK:
                step = calls.step(execution)
                return expected.network_error(step.forward(calls.batch), step.model)
            return None

        row = self.of.measured(blank, make, error_of, allowed)
        self.of.projection.learn(row)
        return row

    def _without_time(self, entry: Entry, mode: str, execution: str, reason: Exception) -> Row:
        blank = self._blank(entry, mode, execution)
        if isinstance(reason, RedParity):
            return dataclasses.replace(
                blank, status=RED, parity_error=reason.error, note=f"not the reference's result: {reason}"
            )
        status = SKIPPED if isinstance(reason, Unaffordable) else FAILED
        note = str(reason) if isinstance(reason, Unaffordable) else first_line(reason)[:300]
        return dataclasses.replace(blank, status=status, note=note)

    def _blank(self, entry: Entry, mode: str, execution: str) -> Row:
        workload, problem = self.workload, self.problem
        is_knn = workload.operator == "knn"
        return Row(
            workload=workload.name,
            operator=workload.operator,
            contender=entry.name,
            kind=entry.kind,
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
            package="" if entry.contender is None else entry.contender.package,
            **self.of.machine,
        )


def release(device: torch.device) -> None:
    """Give back what the last call left, so that memory is counted from the same ground."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _checked(what: str, error: float, allowed: float) -> float:
    if not error <= allowed:
        raise RedParity(what, error, allowed)
    return error
