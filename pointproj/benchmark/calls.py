"""What is called in each mode, and how in each execution; benchmarks/README.md lists both.

Every call returns all that it computes. A compiler leaves out what a function does not return, so a call that
returned a part would do a part of the work.
"""

from collections.abc import Callable
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

import pointproj
from pointproj.benchmark.cases import Problem
from pointproj.benchmark.config import LIST_SUMS, NETWORK, SUMS
from pointproj.benchmark.implementations import Implementation
from pointproj.benchmark.workloads import Inputs
from pointproj.config import OptimizerConfig, TargetConfig
from pointproj.runtime.graph_memory import GraphMemory
from pointproj.training.losses import loss_function
from pointproj.training.optimizers import build_optimizer
from pointproj.training.step import STEPS_BEFORE_CAPTURE, CapturedCall, TrainingStep, on_stream

SEED = 0  # of the networks and their targets
Call = Callable[[], Any]


class Calls:
    """The calls of one implementation on one set of inputs."""

    def __init__(self, implementation: Implementation, inputs: Inputs) -> None:
        self.implementation, self.inputs = implementation, inputs
        self.device = inputs.problem.query_points.device
        self._step, self._function = cache(self._make_step), cache(_function)

    def make(self, mode: str, execution: str) -> Call:
        """The call to check and time.

        By mode it returns an index, :class:`Nearest`, a list, values, (values, *gradients), or a prediction
        (1, Q); what a step returns is not read.
        """
        if mode in NETWORK:
            return self._network_call(mode, execution)
        compiled = execution == "compiled"
        make = self._aggregation_call if mode in (*SUMS, *LIST_SUMS) else self._search_call
        call = make(mode, compiled)
        return captured(call, self.device) if execution == "captured" else call

    @cached_property
    def leaves(self) -> tuple[Tensor, ...]:
        """Copies of the inputs' tensors, which require gradients."""
        return tuple(tensor.detach().clone().requires_grad_() for tensor in self.inputs.tensors)

    @cached_property
    def upstream(self) -> Tensor:
        """The gradient of the loss with respect to the result, filled in place: captured calls read it."""
        problem = self.inputs.problem
        return problem.features.new_empty(*problem.query_points.shape[:-1], problem.features.shape[-1])

    def step(self, execution: str) -> TrainingStep:
        """The training step in this execution; compiled and captured share one compiled model."""
        step = self._step(execution != "eager")
        step.captured = execution == "captured"
        return step

    def _make_step(self, compiled: bool) -> TrainingStep:
        torch.manual_seed(SEED)
        model = self.implementation.network(self.inputs).to(self.device)
        settings = OptimizerConfig(name="adam", lr=1e-3)
        capturable = compiled and self.device.type == "cuda"
        optimizer = build_optimizer(settings, model.parameters(), capturable=capturable)
        return TrainingStep(model, optimizer, loss_function(TargetConfig("random")), compile=compiled)

    @cached_property
    def batch(self) -> dict[str, Tensor]:
        """The batch of a step: the inputs' one cloud, and a random target."""
        query, points = self.inputs.points
        target = torch.randn(1, len(query), generator=torch.Generator().manual_seed(SEED)).to(self.device)
        return {"query_points": query, "reference_points": points[None], "target": target}

    def _search_call(self, mode: str, compiled: bool) -> Call:
        find, inputs = self.implementation.find, self.inputs
        if mode == "search":
            index = find["build"](inputs)
            return lambda: find["knn"](inputs, index)
        return _function(lambda: find[mode](inputs), compiled)

    def _aggregation_call(self, mode: str, compiled: bool) -> Call:
        implementation, inputs = self.implementation, self.inputs
        function = pointproj.aggregate if mode in LIST_SUMS else implementation.aggregate
        function = self._function(function, compiled)
        if mode == "aggregate":
            return lambda: function(inputs, *inputs.tensors)
        leaves, given = self.leaves, (inputs, *self.leaves)
        if mode in LIST_SUMS:
            given = *leaves, implementation.find[mode.removeprefix("aggregate_")](inputs)
        elif mode == "gradients":
            points = [tensor.detach().clone().requires_grad_() for tensor in inputs.points]
            sigma = torch.tensor(inputs.sigma, device=self.device, requires_grad=True)
            differentiable = inputs._replace(problem=Problem(*points, *inputs.problem[2:]), sigma=sigma)
            leaves, given = (*self.leaves, *points, sigma), (differentiable, *self.leaves)
        elif mode == "second":
            return self._second_call(function)

        def with_gradients() -> tuple[Tensor, ...]:
            values = function(*given)
            gradients = torch.autograd.grad(values, leaves, self.upstream, allow_unused=True)
            return values.detach(), *gradients

        return with_gradients

    def _second_call(self, function: Callable) -> Call:
        query = self.inputs.points[0].detach().clone().requires_grad_()
        inputs = self.inputs._replace(problem=self.inputs.problem._replace(query_points=query))

        def second() -> Tensor:
            loss = eikonal_loss(function(inputs, *self.leaves), query, self.upstream[:, 0])
            return torch.autograd.grad(loss, self.leaves)[0]

        return second

    def _network_call(self, mode: str, execution: str) -> Call:
        step = self.step(execution)
        if mode == "forward":
            forward = lambda: step.forward(self.batch).detach()  # noqa: E731
            return captured(forward, self.device) if execution == "captured" else forward
        for _ in range(STEPS_BEFORE_CAPTURE + 1 if step.captured else 1):
            step(self.batch)
        if step.mode != execution:
            raise RuntimeError(f"the step runs {step.mode} instead; the log above says why")
        return lambda: step(self.batch)


def eikonal_loss(values: Tensor, query_points: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum over queries of (slope - 1)^2, with the slope of the channels' sum by the position."""
    (slope,) = torch.autograd.grad(values.sum(), query_points, create_graph=True)
    return (weights * (slope.norm(dim=-1) - 1).square()).sum()


def _function(function: Callable, compiled: bool) -> Callable:
    whole = lambda *given: function(*given)  # noqa: E731 - torch.compile takes no partial
    return torch.compile(whole, fullgraph=True) if compiled else function


def captured(function: Call, device: torch.device) -> Call:
    """Capture a function as one CUDA graph; the call returned replays it into the same tensors."""
    stream, memory = torch.cuda.Stream(device), GraphMemory()
    with on_stream(stream), memory.before_capture():
        for _ in range(STEPS_BEFORE_CAPTURE):
            function()
    replay = CapturedCall(lambda inputs: function(), {}, stream, memory)
    return lambda: replay({})
