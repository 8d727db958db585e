"""Measure all contenders in one workload of :mod:`pointproj.benchmark.workloads`."""

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import torch

from pointproj.benchmark.calls import NetworkCalls, OperatorCalls, calls_for
from pointproj.benchmark.contenders import Contender
from pointproj.benchmark.parity import Expected
from pointproj.benchmark.peer import Nearest
from pointproj.benchmark.plan import Entry
from pointproj.benchmark.recorder import (
    Recorder,
    check_error,
    collect_only_new_garbage,
    exclude_from_collection,
    without_time,
)
from pointproj.benchmark.results import MISSING, Row
from pointproj.benchmark.workloads import NETWORK, SUMS, Workload
from pointproj.runtime.errors import first_line

log = logging.getLogger(__name__)


def measure_workload(recorder: Recorder, workload: Workload, planned: list[Entry]) -> None:
    """Make the workload's clouds and measure the planned rows; without clouds, log why and measure none.

    Parameters
    ----------
    recorder : Recorder
    workload : Workload
    planned : list of Entry
    """
    recorder.display.preparing(workload.name)
    try:
        clouds = _Clouds(recorder, workload)
    except Exception as failure:
        log.error("%s is left out, its clouds cannot be made: %s", workload.name, first_line(failure))
        return
    recorder.display.workload(workload, clouds.problem, clouds.expected.checked_queries)
    recorder.mark(f"{workload.name}, clouds of {clouds.problem.reference_points.shape[:-1].numel():,} points")
    with collect_only_new_garbage():
        for entry in planned:
            if entry.missing:
                blank = clouds.blank(entry.contender, "-", "-")
                recorder.add(dataclasses.replace(blank, status=MISSING, note=entry.missing))
                continue
            clouds.measure(entry.contender, entry.measurements)
            torch.compiler.reset()  # its limit of versions of one function is for a whole process
            exclude_from_collection()


class _Clouds:
    """The tensors of one workload and what the reference makes of them."""

    def __init__(self, recorder: Recorder, workload: Workload) -> None:
        self.recorder = recorder
        self.workload = workload
        self.problem = workload.problem(recorder.device)
        self.expected = Expected(workload, self.problem)

    def measure(self, contender: Contender, measurements: tuple[tuple[str, str], ...]) -> None:
        """Add a row for each (mode, execution)."""
        try:
            self.recorder.projection.check_contender(contender, self.workload, self.problem)
            error = self._eager_error(contender, {mode for mode, _ in measurements})
        except Exception as reason:
            for mode, execution in measurements:
                self.recorder.add(without_time(self.blank(contender, mode, execution), reason))
            return
        if error is not None:
            self.recorder.display.agrees(contender.name, error)
        self.recorder.mark(f"{self.workload.name}, {contender.name}, comparison with the reference")
        made: dict[bool, OperatorCalls | NetworkCalls] = {}
        for mode, execution in measurements:
            of_network = mode in NETWORK
            if of_network not in made:
                made[of_network] = calls_for(mode, contender, self.problem)
            self.recorder.add(self._row(contender, made[of_network], mode, execution))

    def _eager_error(self, contender: Contender, modes: set[str]) -> float | None:
        """The contender's largest error in what the modes rest on; raises WrongResult."""
        errors = []
        if contender.knn is not None and (contender.kind == "peer" or modes & {"search", "knn", "build"}):
            error = self._neighbors_error(contender, contender.knn(self.problem))
            errors.append(check_error("neighbours", error, contender.search_tolerance))
        if modes & {*SUMS, *NETWORK}:
            calls = OperatorCalls(contender, self.problem)
            self.expected.fill_upstream(calls.upstream, checked_only=True)
            error = self.expected.sums_error(*calls.make("operator", "eager")())
            errors.append(check_error("values and feature gradient", error, contender.sums_tolerance))
        return max(errors, default=None)

    def _neighbors_error(self, contender: Contender, found: Nearest) -> float:
        return self.expected.neighbors_error(found, check_distances=contender.kind == "backend")

    def _row(
        self, contender: Contender, calls: OperatorCalls | NetworkCalls, mode: str, execution: str
    ) -> Row:
        blank = self.blank(contender, mode, execution)
        allowed = contender.search_tolerance if mode in ("search", "knn") else contender.sums_tolerance
        expected = self.expected

        def make() -> Callable[[], Any]:
            self.recorder.projection.check_growth(blank)
            if mode in ("operator", "gradients"):
                expected.fill_upstream(calls.upstream, checked_only=True)
            return calls.make(mode, execution)

        def error_of(result: Any) -> float | None:
            if mode in ("search", "knn"):
                return self._neighbors_error(contender, result)
            if mode == "aggregate":
                return expected.sums_error(result)
            if mode in ("operator", "gradients"):
                error = expected.sums_error(*result)
                expected.fill_upstream(calls.upstream, checked_only=False)
                return error
            if mode == "forward":
                return expected.network_error(result, calls.step(execution).model)
            if mode == "step":
                step = calls.step(execution)
                return expected.network_error(step.forward(calls.batch), step.model)
            return None

        row = self.recorder.measured(blank, make, error_of, allowed, host=self.workload.host)
        self.recorder.projection.learn(row)
        return row

    def blank(self, contender: Contender, mode: str, execution: str) -> Row:
        """A row of this workload without its results."""
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
            package=contender.package,
            **self.recorder.machine,
        )
