"""The workload ``lists``: neighbours as tensors, the way other libraries pass them around.

Modes: ``padded`` (the K nearest within a radius, with distances and counts), ``csr`` (all within it, one
query's after the other's), and ``aggregate_padded`` and ``aggregate_csr``
(features aggregated over a ready list, with their gradient). Everything that a call returns is used: in a
compiled call it is an output.
"""

import dataclasses
import itertools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import pointproj
from pointproj.benchmark import plan
from pointproj.benchmark.calls import captured
from pointproj.benchmark.config import WITH_RMM, BenchConfig
from pointproj.benchmark.contenders import BACKEND_TOLERANCE, PEER_TOLERANCE, SEED
from pointproj.benchmark.list_contenders import SUMS, ListContender, list_contenders
from pointproj.benchmark.list_parity import ExpectedPairs, ExpectedSums
from pointproj.benchmark.list_peers import Question
from pointproj.benchmark.projection import PILOT_PAIRS
from pointproj.benchmark.recorder import Recorder, collect_only_new_garbage, exclude_from_collection
from pointproj.benchmark.results import MISSING, Row
from pointproj.benchmark.workloads import surface, uniform
from pointproj.ops import reference
from pointproj.ops.cases import Case, itself

SIZES = {"cuda": (10**5,), "cpu": (10**4, 10**5)}
SEARCHES = ("padded", "csr")
UNIFORM = "lists_uniform"
CLOUDS = {
    UNIFORM: lambda size: itself(uniform(size)),
    "lists_surface": lambda size: itself(surface(size)),
}
EAGER_ONLY = ("lists_surface",)  # unless the config names executions: compiling all takes minutes
K = 32  # the most neighbours within the radius
CAPACITY = 40  # pairs per query that csr has room for
CHANNELS = 25
SIGMA = 0.1
SAMPLE = 256  # queries from which the radius is chosen


class Planned(NamedTuple):
    """One row; a contender that is missing has only one."""

    workload: str
    size: int
    contender: ListContender
    execution: str


def planned(config: BenchConfig, device_type: str) -> list[Planned]:
    """The rows of each cloud, contender after contender."""
    if "lists" not in config.workloads:
        return []
    wanted = plan.executions(config, device_type)
    rows = []
    for size in sorted(config.sizes or SIZES[device_type]):
        for workload in CLOUDS:
            for contender in list_contenders(config, device_type, (*SEARCHES, *SUMS)):
                if config.gpu_memory == "rmm":
                    contender = dataclasses.replace(contender, name=f"{contender.name}{WITH_RMM}")
                runs = [e for e in wanted if e in contender.executions]
                if config.execution is None:
                    runs = [e for e in runs if e != "compiled"]
                all_pairs = contender.brute_force and contender.mode in SEARCHES  # launches cost it nothing
                if config.execution is None and (workload in EAGER_ONLY or all_pairs):
                    runs = ["eager"]
                if contender.missing:
                    runs = ["-"][: len(runs)]
                rows += [Planned(workload, size, contender, execution) for execution in runs]
    return rows


def measure(recorder: Recorder, rows: list[Planned]) -> None:
    """Add the planned rows, cloud after cloud."""
    for (workload, size), of_cloud in itertools.groupby(rows, key=lambda row: row[:2]):
        recorder.display.preparing(workload)
        cloud = ListCloud(recorder, workload, size)
        recorder.mark(f"{workload}, clouds of {size:,} points")
        with collect_only_new_garbage():
            for contender, of_contender in itertools.groupby(of_cloud, key=lambda row: row.contender):
                cloud.measure(contender, [row.execution for row in of_contender])
                torch.compiler.reset()  # its limit of versions of one function is for a whole process
                exclude_from_collection()


class ListCloud:
    """The tensors of one cloud, and what the reference finds in it.

    Parameters
    ----------
    recorder : Recorder
    workload : str
        Of :data:`CLOUDS`.
    size : int
        Reference points.
    """

    def __init__(self, recorder: Recorder, workload: str, size: int) -> None:
        self.recorder, self.workload = recorder, workload
        self.asked, features = question(workload, size, recorder.device)
        self.pairs = ExpectedPairs(self.asked)
        self.features = features.requires_grad_()
        generator = torch.Generator().manual_seed(SEED)
        numbers = torch.randn(len(self.asked.query_points), CHANNELS, generator=generator)
        self._upstream = numbers.to(recorder.device)
        self.sums = ExpectedSums(self.asked, self.features, self._upstream, self.pairs.rows, SIGMA)
        recorder.display.lists(workload, self.asked, len(self.pairs.rows))

    def measure(self, contender: ListContender, executions: list[str]) -> None:
        """Add a row for each execution."""
        if contender.missing is not None:
            blank = self._blank(contender, "-")
            self.recorder.add(dataclasses.replace(blank, status=MISSING, note=contender.missing))
            return
        upstream = torch.empty_like(self._upstream)  # read in place, also by what was captured
        functions = {}

        def make(execution: str) -> Callable[[], Any]:
            self._refuse_if_slow(contender, execution)
            upstream.copy_(self.sums.upstream)
            compiled = execution == "compiled"
            if compiled not in functions:
                functions[compiled] = self._function(contender, compiled, upstream)
            call = functions[compiled]
            return captured(call, self.recorder.device) if execution == "captured" else call

        def error_of(found: Any) -> float:
            error = self._error(contender, found)
            upstream.copy_(self._upstream)
            return error

        allowed = BACKEND_TOLERANCE if contender.kind == "backend" else PEER_TOLERANCE
        for execution in executions:
            blank = self._blank(contender, execution)
            row = self.recorder.measured(blank, lambda e=execution: make(e), error_of, allowed)
            self.recorder.projection.learn(row)
            self.recorder.add(row)

    def _function(self, contender: ListContender, compiled: bool, upstream: Tensor) -> Callable[[], Any]:
        compiler = torch.compile(fullgraph=True) if compiled else lambda function: function
        if contender.mode not in SUMS:
            return compiler(lambda: contender.search(self.asked))
        neighbors = contender.search(self.asked)
        aggregate = compiler(lambda features: pointproj.aggregate(features, neighbors, sigma=SIGMA))

        def with_gradient() -> tuple[Tensor, Tensor]:
            values = aggregate(self.features)
            return values.detach(), *torch.autograd.grad(values, self.features, upstream)

        return with_gradient

    def _error(self, contender: ListContender, found: Any) -> float:
        if contender.mode in SUMS:
            return self.sums.error(contender.mode, *found)
        return self.pairs.error(
            contender.read(found),
            radius=self.asked.radius,
            most=None if contender.mode == "csr" else self.asked.k,
            nearest=contender.nearest,
            itself=contender.itself,
        )

    def _refuse_if_slow(self, contender: ListContender, execution: str) -> None:
        """Raise if a call would take too long, as smaller clouds or, for brute force, fewer queries say."""
        asked = self.asked
        self.recorder.projection.check_growth(self._blank(contender, execution))
        queries = len(asked.query_points)
        few = max(1, PILOT_PAIRS[self.recorder.device.type] // len(asked.reference_points))
        if not contender.brute_force or queries <= 8 * few:
            return
        part = asked._replace(
            query_points=asked.query_points[:few].clone(), capacity=asked.capacity * few // queries
        )
        for _ in range(2):  # the second time counts
            start = time.perf_counter()
            contender.search(part)
            if self.recorder.device.type == "cuda":
                torch.cuda.synchronize(self.recorder.device)
        self.recorder.projection.refuse_if_slow((time.perf_counter() - start) * queries / few)

    def _blank(self, contender: ListContender, execution: str) -> Row:
        """A row without its results."""
        asked, mode = self.asked, contender.mode
        return Row(
            workload=self.workload,
            operator="radius",
            contender=contender.name,
            kind=contender.kind,
            mode=mode,
            execution=execution,
            queries=len(asked.query_points),
            references=len(asked.reference_points),
            k=None if mode.endswith("csr") else asked.k,
            radius=asked.radius,
            channels=CHANNELS if mode in SUMS else 1,
            note=contender.returns,
            package=contender.package,
            **self.recorder.machine,
        )


def question(workload: str, size: int, device: torch.device) -> tuple[Question, Tensor]:
    """What is asked of one of :data:`CLOUDS`, and features of its points."""
    case = Case(workload, CLOUDS[workload](size), radius=None, channels=CHANNELS)
    _, points, features, *_ = case.problem(device)
    return Question(points, points, K, radius_of(points), CAPACITY * size), features  # one tensor, not two


def radius_of(points: Tensor) -> float:
    """The radius within which half of the points have at least :data:`K`, themselves included."""
    some = points[torch.randperm(len(points), generator=torch.Generator().manual_seed(1))[:SAMPLE]]
    squared = reference.squared_distances(some, points)
    return float(f"{squared.kthvalue(K, dim=1).values.sqrt().median().item():.3g}")
