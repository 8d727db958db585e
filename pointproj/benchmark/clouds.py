"""Measure all contenders in each workload of :mod:`pointproj.benchmark.workloads`."""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from pointproj.benchmark.calls import Calls
from pointproj.benchmark.config import BenchConfig
from pointproj.benchmark.contenders import Contender, Entry, entries
from pointproj.benchmark.limits import LONGEST_ROW_S, given_up_after
from pointproj.benchmark.parity import Expected
from pointproj.benchmark.recorder import (
    Part,
    Recorder,
    check_error,
    collect_only_new_garbage,
    exclude_from_collection,
    without_time,
)
from pointproj.benchmark.results import MISSING, Row
from pointproj.benchmark.workloads import LIST_SUMS, NETWORK, SUMS, Question, Workload, workloads

LISTS = ("padded", "csr")
SEARCHES = ("search", "knn", "farthest", *LISTS)
WITH_GRADIENTS = ("operator", "gradients", *LIST_SUMS)


def parts(config: BenchConfig, device_type: str) -> Iterator[Part]:
    """The rows of each workload that the config names; importing the peers takes a while."""
    for workload in workloads(config, device_type):
        planned = [*entries(config, workload, device_type)]
        rows = sum(entry.rows for entry in planned)
        yield Part(rows, partial(measure_workload, workload=workload, planned=planned))


def measure_workload(recorder: Recorder, workload: Workload, planned: list[Entry]) -> None:
    """Make the workload's clouds and measure the planned rows; without clouds, rows say why.

    Parameters
    ----------
    recorder : Recorder
    workload : Workload
    planned : list of Entry
    """
    recorder.display.preparing(workload.name)
    try:
        contest = Contest(recorder, workload)
    except Exception as reason:
        named = {"workload": workload.name, "operator": workload.operator, "queries": 0, "references": 0}
        for contender, ((mode, execution), *_) in planned:
            whose = {"contender": contender.name, "kind": contender.kind, "package": contender.package}
            blank = recorder.blank(**named, **whose, mode=mode, execution=execution)
            recorder.add(without_time(blank, reason))
        return
    recorder.display.workload(workload, contest.question, contest.expected.checked_queries)
    points = contest.question.points[1].shape[:-1].numel()
    recorder.mark(f"{workload.name}, clouds of {points:,} points")
    with collect_only_new_garbage():
        for entry in planned:
            contest.measure(entry)
            torch.compiler.reset()  # its limit of versions of one function is for a whole process
            exclude_from_collection()


class Contest:
    """The tensors of one workload, and what the reference makes of them.

    Parameters
    ----------
    recorder : Recorder
    workload : Workload
    """

    def __init__(self, recorder: Recorder, workload: Workload) -> None:
        self.recorder, self.workload = recorder, workload
        self.question: Question = workload.question(recorder.device)
        self.expected = Expected(workload, self.question)

    def measure(self, entry: Entry) -> None:
        """Add a row for each (mode, execution); the eager results are compared first."""
        contender, recorder = entry.contender, self.recorder
        blanks = [self.blank(contender, *measurement) for measurement in entry.measurements]
        if contender.missing:
            blank = self.blank(contender, contender.modes[0] if contender.modes[0] in LISTS else "-", "-")
            recorder.add(dataclasses.replace(blank, status=MISSING, note=contender.missing))
            return
        calls = Calls(contender, self.question)
        try:
            recorder.limits.check_clock()
            recorder.limits.check_growth(blanks[0])
            with given_up_after(LONGEST_ROW_S):
                recorder.limits.check_pairs(contender, self.question)
                error = self._eager_error(calls, {blank.mode for blank in blanks})
        except Exception as reason:
            for blank in blanks:
                recorder.add(without_time(blank, reason))
            return
        if error is not None:
            recorder.display.agrees(contender.name, error)
        recorder.mark(f"{self.workload.name}, {contender.name}, comparison with the reference")
        for blank in blanks:
            recorder.record(blank, partial(self._measured, calls))

    def _eager_error(self, calls: Calls, modes: set[str]) -> float | None:
        """The contender's largest error in what the modes rest on; raises WrongResult."""
        contender, errors = calls.contender, []
        if "knn" in contender.find and (contender.kind == "peer" or modes & {"search", "knn", "build"}):
            error = self.expected.error(calls, "knn", "eager", contender.find["knn"](self.question))
            errors.append(check_error("neighbours", error, contender.search_tolerance))
        if modes & {*SUMS, *NETWORK}:
            self.expected.fill_upstream(calls.upstream, checked_only=True)
            error = self.expected.error(calls, "operator", "eager", calls.make("operator", "eager")())
            errors.append(check_error("values and feature gradient", error, contender.sums_tolerance))
        return max(errors, default=None)

    def _measured(self, calls: Calls, blank: Row) -> Row:
        contender, mode, execution = calls.contender, blank.mode, blank.execution
        allowed = contender.search_tolerance if mode in SEARCHES else contender.sums_tolerance

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

        return self.recorder.timed(blank, make, error_of, allowed, host=self.workload.host)

    def blank(self, contender: Contender, mode: str, execution: str) -> Row:
        """A row of this workload without its results."""
        asked, problem = self.question, self.question.problem
        return self.recorder.blank(
            workload=self.workload.name,
            operator=self.workload.operator,
            **{"contender": contender.name, "kind": contender.kind, "package": contender.package},
            **{"mode": mode, "execution": execution, "note": contender.returns},
            queries=problem.query_points.shape[:-1].numel(),
            references=problem.reference_points.shape[:-1].numel(),
            clouds=len(problem.ranges()),
            k=None if mode.endswith("csr") else asked.k,
            radius=asked.radius,
            channels=1 if mode in LISTS else problem.features.shape[-1],
            dtype=str(problem.query_points.dtype).removeprefix("torch."),
        )
