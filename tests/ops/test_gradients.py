"""Derivatives beyond the values of test_operators: numeric checks, and every way autograd is used."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import pointproj
from pointproj.benchmark.cases import Case, Problem
from tests.conftest import Where
from tests.ops.cases import FP64, by_id, uniform
from tests.oracle import INPUTS, assert_close, derivatives, probe, run

SIZES = ((3, 5), (2, 1), (0, 2), (2, 4))
SMALL = (
    Case("one-cloud", uniform(4, 9), radius=1.1, sigma=0.4, **FP64),
    Case("dense", uniform(6, 10), radius=1.1, sigma=0.4, batch=2, **FP64),
    Case("ragged", uniform(7, 12), radius=1.1, sigma=0.4, sizes=SIZES, **FP64),
)
small = pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in SMALL])
operators = pytest.mark.parametrize("operator", ["knn", "radius"])


@small
@operators
def test_gradcheck_and_gradgradcheck(operator: str, case: Case, where: Where):
    """Second derivatives of one cloud entry by entry, of batches by random sums."""
    function, inputs = _numeric(operator, case, where)
    assert gradcheck(function, inputs, nondet_tol=1e-12)
    assert gradgradcheck(function, inputs, nondet_tol=1e-12, fast_mode=case is not SMALL[0])


@pytest.mark.parametrize(
    "along", [(0,), (2,), (1, 3), (0, 1, 2, 3)], ids=["query", "features", "others", "all"]
)
@pytest.mark.parametrize("channels", [1, 40])
@operators
def test_second_derivatives_of_some_gradients(operator: str, channels: int, along: tuple, where: Where):
    case = replace(by_id("odd-sizes"), channels=channels, **FP64)

    def seconds(at: Where) -> dict[str, Tensor]:
        leaves, values = _graph(operator, case, at, 3)
        grad = values.detach().cos().requires_grad_()
        firsts = torch.autograd.grad(values, leaves, grad, create_graph=True)
        total = sum(firsts[i].square().sum() for i in along)
        made = torch.autograd.grad(total, [grad, *leaves], materialize_grads=True)
        return dict(zip(("grad", *INPUTS), made, strict=True))

    got, expected = seconds(where), seconds(where._replace(backend="torch"))
    for what in expected:
        assert_close(what, got[what], expected[what])


@operators
@pytest.mark.parametrize("name", ["plain", "ragged", "dense-bf16"])
def test_registered_operators_pass_opcheck(operator: str, name: str, where: Where, deterministic: None):
    """Deterministic, because opcheck compares runs, and an index may else hold its points in any order."""
    case = by_id(name)
    with _Recorder() as recorder:
        _derivatives(operator, case, where)
    assert recorder.calls
    for call, args in recorder.calls.items():
        # Third derivatives are refused, so there is no gradient of the second to check.
        track = not call.name().endswith("second_backward")
        torch.library.opcheck(call, tuple(_fresh(a, track) for a in args))


@operators
@pytest.mark.parametrize("wanted", INPUTS)
def test_one_gradient_alone(operator: str, wanted: str, where: Where):
    """Asking for less than all must not change what is asked for."""
    case = by_id("ragged")
    problem = case.problem(where.device)
    at = probe(problem, case.sigma)
    every = _derivatives(operator, case, where)
    given = dict(zip(INPUTS, (*problem[:3], at.sigma), strict=True))
    given[wanted] = given[wanted].clone().requires_grad_()
    of_call = problem._replace(**{n: given[n] for n in INPUTS[:3]})
    aggregated = run(operator, of_call, case.neighborhood(operator), given["sigma"], backend=where.backend)
    (got,) = torch.autograd.grad(aggregated, given[wanted], at.grad)
    assert_close(f"d_{wanted}", got, every[f"d_{wanted}"])
    assert all(t.grad is None for t in given.values())


@operators
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_sigma_may_be_a_number_or_a_tensor_of_any_dtype(operator, shape, where, deterministic):
    case = by_id("plain")
    problem, neighborhood = case.problem(where.device), case.neighborhood(operator)
    aggregate = getattr(pointproj, f"{operator}_aggregate")
    by_default = aggregate(*problem[:3], neighborhood, backend=where.backend)
    assert torch.equal(by_default, run(operator, problem, neighborhood, 0.1, backend=where.backend))
    by_number = run(operator, problem, neighborhood, 0.25, backend=where.backend)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        sigma = torch.full(shape, 0.25, dtype=dtype, device=where.device, requires_grad=True)
        by_tensor = run(operator, problem, neighborhood, sigma, backend=where.backend)
        assert torch.equal(by_tensor, by_number)
        by_tensor.square().sum().backward()
        assert sigma.grad.shape == shape
        assert sigma.grad.dtype == dtype
        assert sigma.grad.abs() > 1e-3


@operators
def test_two_graphs_alive(operator: str, where: Where):
    """Backward twice in the order of the forwards, and against it, with other inputs in each."""
    case = by_id("plain")

    def alone(seed: int) -> tuple[Tensor, ...]:
        leaves, aggregated = _graph(operator, case, where, seed)
        return torch.autograd.grad(aggregated.square().sum(), leaves)

    expected = {seed: alone(seed) for seed in (0, 1)}
    for order in ((0, 1), (1, 0)):
        graphs = {seed: _graph(operator, case, where, seed) for seed in (0, 1)}
        for seed in order:
            leaves, aggregated = graphs[seed]
            for retain in (True, False):
                got = torch.autograd.grad(aggregated.square().sum(), leaves, retain_graph=retain)
                for name, one, two in zip(INPUTS, got, expected[seed], strict=True):
                    assert_close(f"d_{name} of graph {seed}", one, two)


@operators
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(operator: str, reentrant: bool, where: Where):
    """Two checkpointed calls on different inputs: each recomputes its own forward."""
    case = by_id("plain")

    def function(*inputs: Tensor) -> Tensor:
        neighborhood = case.neighborhood(operator)
        return run(operator, Problem(*inputs[:3]), neighborhood, inputs[3], backend=where.backend)

    graphs = [_graph(operator, case, where, seed) for seed in (0, 1)]
    losses = [checkpoint(function, *leaves, use_reentrant=reentrant).square().sum() for leaves, _ in graphs]
    torch.autograd.backward(losses)
    for leaves, aggregated in graphs:
        expected = torch.autograd.grad(aggregated.square().sum(), leaves)
        for name, leaf, wanted in zip(INPUTS, leaves, expected, strict=True):
            assert_close(f"d_{name}", leaf.grad, wanted)


def _graph(operator: str, case: Case, where: Where, seed: int) -> tuple[list[Tensor], Tensor]:
    problem = case.problem(where.device, seed)
    sigma = torch.tensor(case.sigma, device=where.device)
    leaves = [t.clone().requires_grad_() for t in (*problem[:3], sigma)]
    problem = problem._replace(**dict(zip(INPUTS[:3], leaves[:3], strict=True)))
    return leaves, run(operator, problem, case.neighborhood(operator), leaves[3], backend=where.backend)


def _derivatives(operator: str, case: Case, where: Where) -> dict[str, Tensor]:
    problem, neighborhood = case.problem(where.device), case.neighborhood(operator)
    return derivatives(
        lambda p, sigma: run(operator, p, neighborhood, sigma, backend=where.backend),
        problem,
        probe(problem, case.sigma),
    )


def _numeric(operator: str, case: Case, where: Where) -> tuple[Callable, list[Tensor]]:
    """A function of the four differentiable inputs, and the inputs."""
    problem = case.problem(where.device)
    sigma = torch.tensor(case.sigma, dtype=torch.float64, device=where.device)
    inputs = [t.clone().requires_grad_() for t in (*problem[:3], sigma)]

    def function(query_points: Tensor, reference_points: Tensor, features: Tensor, sigma: Tensor) -> Tensor:
        tensors = problem._replace(
            query_points=query_points, reference_points=reference_points, features=features
        )
        return run(operator, tensors, case.neighborhood(operator), sigma, backend=where.backend)

    return function, inputs


class _Recorder(TorchDispatchMode):
    """Keeps one call of each operator of this package, whoever made it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[torch._ops.OpOverload, tuple] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.namespace == "pointproj":
            assert not kwargs
            self.calls[func] = args
        return func(*args, **(kwargs or {}))


def _fresh(argument: Any, track: bool) -> Any:
    if not isinstance(argument, Tensor):
        return argument
    return argument.detach().clone().requires_grad_(track and argument.requires_grad)
