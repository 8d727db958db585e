"""What is called in each mode, and how in each execution.

Modes of the operator alone: ``build`` (the index), ``search`` (``pointproj.knn`` with a ready index), ``knn``
(both in one call), ``aggregate`` (the forward, index included), ``operator`` (that and the gradient of the
features), ``gradients`` (that and all gradients: of features, both sets of points, and sigma). Modes of the
network: ``forward`` and ``step`` (forward, loss, backward, Adam).

Executions: ``eager``; ``compiled``, by torch.compile with fullgraph=True; ``captured``, replayed as one CUDA
graph (of the operator as it is called eagerly; of the network after compilation).

Every call returns all that it computes, as the functions of a contender do: a compiled function computes
nothing that it does not return, so no result is picked or dropped here.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pointproj.benchmark.contenders import SEED, Contender
from pointproj.benchmark.workloads import NETWORK
from pointproj.config import OptimizerConfig, TargetConfig
from pointproj.ops.cases import Problem
from pointproj.training.capture import STEPS_BEFORE_CAPTURE, CapturedCall, on_stream
from pointproj.training.losses import loss_function
from pointproj.training.optimizers import build_optimizer
from pointproj.training.step import TrainingStep

NOT_COMPILED = ("build", "search")

Call = Callable[[], Any]


class NotRunAsAsked(RuntimeError):  # noqa: N818 - says what happened
    """A training step fell back to another execution than the one to time."""


class OperatorCalls:
    """The operator alone, for one contender on one problem.

    ``upstream`` is the gradient of the loss by the result. Every call reads it in place, so that writing to
    it also changes what a captured call computes.

    Parameters
    ----------
    contender : Contender
    problem : Problem
    """

    def __init__(self, contender: Contender, problem: Problem) -> None:
        self.contender = contender
        self.problem = problem
        self.device = problem.query_points.device
        self.features = problem.features.detach().clone().requires_grad_()
        points = (points.detach().clone().requires_grad_() for points in problem[:2])
        self.points = problem._replace(**dict(zip(problem._fields[:2], points, strict=True)))
        self.sigma = torch.tensor(contender.sigma, device=self.device, requires_grad=True)
        shape = (*problem.query_points.shape[:-1], problem.features.shape[-1])
        self.upstream = torch.empty(shape, dtype=self.features.dtype, device=self.device)
        self._functions: dict[tuple[str, bool], Callable[[], Any]] = {}

    def make(self, mode: str, execution: str) -> Call:
        """The call to check and time; it returns an index, Nearest, values, or (values, feature gradient)."""
        call = self._call(mode, compiled=execution == "compiled")
        return captured(call, self.device) if execution == "captured" else call

    def _call(self, mode: str, compiled: bool) -> Call:
        contender, problem = self.contender, self.problem
        if mode == "build":
            return lambda: contender.build(problem)
        if mode == "search":
            index = contender.build(problem)
            return lambda: contender.search(problem, index)
        if mode == "knn":
            knn = self._function("knn", lambda: contender.knn(problem), compiled)
            return lambda: knn()
        aggregate = self._function("aggregate", contender.aggregate, compiled)
        if mode == "aggregate":
            return lambda: aggregate(problem, problem.features)

        if mode == "gradients":
            leaves = self.features, *self.points[:2], self.sigma

            def gradients() -> tuple[Tensor, ...]:
                values = aggregate(self.points, self.features, self.sigma)
                return values.detach(), *torch.autograd.grad(values, leaves, self.upstream)

            return gradients

        def operator() -> tuple[Tensor, Tensor]:
            values = aggregate(problem, self.features)
            return values.detach(), *torch.autograd.grad(values, self.features, self.upstream)

        return operator

    def _function(self, name: str, function: Callable, compiled: bool) -> Callable:
        key = name, compiled
        if key not in self._functions:
            self._functions[key] = torch.compile(function, fullgraph=True) if compiled else function
        return self._functions[key]


class NetworkCalls:
    """The network around one contender: hidden width 25, Adam, mean squared error to a random target.

    Parameters
    ----------
    contender : Contender
    problem : Problem
        Of one cloud.
    """

    def __init__(self, contender: Contender, problem: Problem) -> None:
        self.contender = contender
        self.device = problem.query_points.device
        generator = torch.Generator().manual_seed(SEED)
        target = torch.randn(1, len(problem.query_points), generator=generator).to(self.device)
        self.batch = {
            "query_points": problem.query_points,
            "reference_points": problem.reference_points[None],
            "target": target,
        }
        self._steps: dict[bool, TrainingStep] = {}

    def step(self, execution: str) -> TrainingStep:
        """The training step in this execution; compiled and captured share one compiled model."""
        compiled = execution != "eager"
        if compiled not in self._steps:
            torch.manual_seed(SEED)
            model = self.contender.network().to(self.device)
            settings = OptimizerConfig(name="adam", lr=1e-3)
            capturable = compiled and self.device.type == "cuda"
            optimizer = build_optimizer(settings, model.parameters(), capturable=capturable)
            loss = loss_function(TargetConfig("random"))
            self._steps[compiled] = TrainingStep(model, optimizer, loss, compile=compiled)
        step = self._steps[compiled]
        step.captured = execution == "captured"
        return step

    def make(self, mode: str, execution: str) -> Call:
        """The call to check and time; a forward returns the prediction (1, Q), a step nothing."""
        step = self.step(execution)
        if mode == "forward":
            forward = lambda: step.forward(self.batch).detach()  # noqa: E731
            return captured(forward, self.device) if execution == "captured" else forward
        for _ in range(STEPS_BEFORE_CAPTURE + 1 if step.captured else 1):
            step(self.batch)
        if step.mode != execution:
            raise NotRunAsAsked(f"the step runs {step.mode} instead; the log above says why")
        return lambda: step(self.batch)


def captured(function: Call, device: torch.device) -> Call:
    """Capture the GPU work of a function as one CUDA graph.

    Parameters
    ----------
    function : callable
    device : torch.device
        A CUDA device.

    Returns
    -------
    callable
        It replays the graph and returns the tensors of the capture, overwritten.
    """
    stream = torch.cuda.Stream(device)
    with on_stream(stream):
        for _ in range(STEPS_BEFORE_CAPTURE):
            function()
    replay = CapturedCall(lambda inputs: function(), {}, stream)
    return lambda: replay({})


def calls_for(mode: str, contender: Contender, problem: Problem) -> OperatorCalls | NetworkCalls:
    """The object that makes the calls of a mode."""
    return (NetworkCalls if mode in NETWORK else OperatorCalls)(contender, problem)
