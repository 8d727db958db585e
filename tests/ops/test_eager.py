"""Operators in eager mode: called directly if unobserved, else by torch's dispatcher."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, func
from torch._library.custom_ops import CustomOpDef
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import pointproj
from pointproj.benchmark.cases import Problem
from pointproj.ops.bridge.torch_op import torch_op
from pointproj.ops.specification.records import Saved
from tests.conftest import Where
from tests.ops.cases import by_id
from tests.oracle import INPUTS, assert_close, run

NAME = "pointproj_tests::scaled_sum"


def _forward(x: Tensor, other: Tensor, y: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    total = x + other if y is None else x * y + other
    return scale * total, (x > 0).to(x.dtype)


def _backward(grads: tuple[Tensor, ...], needs: dict[str, bool], saved: Saved) -> tuple[Tensor | None, ...]:
    x, y, scale = (saved.inputs[name] for name in ("x", "y", "scale"))
    assert not any(t.requires_grad for t in (x, *grads, *saved.outputs))
    d_x = scale * grads[0] if y is None else scale * grads[0] * y
    return d_x if needs["x"] else None, scale * grads[0] * x if needs["y"] else None


def _second_backward(
    directions: tuple[Tensor, ...], grads: tuple[Tensor, ...], saved: Saved
) -> tuple[Tensor | None, ...]:
    (u, v), (g,) = directions, grads
    x, y, scale = (saved.inputs[name] for name in ("x", "y", "scale"))
    if y is None:
        return scale * u, torch.zeros_like(x), None
    return scale * (u * y + v * x), scale * g * v, scale * g * u


scaled_sum = torch_op(
    NAME,
    _forward,
    lambda x, *_: ((x.shape, x.dtype), (x.shape, x.dtype)),
    differentiable=("x", "y"),
    backward=_backward,
    second_backward=_second_backward,
)


def _plain(x: Tensor, other: Tensor, y: Tensor | None, scale: float) -> Tensor:
    return scale * (x + other if y is None else x * y + other)


def _tensors(count: int, *, requires_grad: bool = False) -> list[Tensor]:
    generator = torch.Generator().manual_seed(count)
    made = [torch.randn(5, generator=generator, dtype=torch.float64) for _ in range(count)]
    return [t.requires_grad_(requires_grad) for t in made]


@pytest.fixture
def dispatched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the operators whose calls torch's dispatcher was given, in order."""
    names, original = [], CustomOpDef.__call__

    def counted(operator: CustomOpDef, *args: Any, **kwargs: Any) -> Any:
        names.append(operator._qualname)
        return original(operator, *args, **kwargs)

    monkeypatch.setattr(CustomOpDef, "__call__", counted)
    return names


@pytest.mark.parametrize("has_y", [True, False])
def test_values_and_both_derivatives_without_the_dispatcher(has_y: bool, dispatched: list[str]):
    x, y, g, u, v = _tensors(5, requires_grad=True)
    inputs = (x, y) if has_y else (x,)
    results = []
    for function in (lambda *args: scaled_sum(*args)[0], _plain):
        value = function(x, *_tensors(1), y if has_y else None, 3.0)
        first = torch.autograd.grad(value, inputs, g, create_graph=True)
        every = (*inputs, g)
        second = torch.autograd.grad(first, every, (u, v)[: len(inputs)], materialize_grads=True)
        results.append((value, *first, *second))
    for number, (got, expected) in enumerate(zip(*results, strict=True)):
        assert_close(f"result {number}", got, expected)
    assert not dispatched


@pytest.mark.operators("knn", "radius", "lists")
def test_every_backends_operators_are_called_directly(on_cpu: Where, dispatched: list[str]):
    query, points, features = (t.requires_grad_() for t in by_id("plain").problem()[:3])
    options = {"backend": on_cpu.backend}
    distances, _ = pointproj.knn(query, points, 4, **options)
    aggregated = pointproj.knn_aggregate(query, points, features, 4, **options)
    within = pointproj.radius_aggregate(query, points, features, 0.4, **options)
    lists = pointproj.radius_neighbors(query, points, 0.4, max_neighbors=4, **options)
    found = lists.distances[lists.indices >= 0]
    (distances.sum() + aggregated.sum() + within.sum() + found.sum()).backward()
    assert not dispatched


class _Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.names.append(operator.name())
        return operator(*args, **(kwargs or {}))


class _Functions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class _Subclass(Tensor):
    pass


def test_modes_and_subclasses_see_the_operator(dispatched: list[str]):
    (x, y), (other,) = _tensors(2, requires_grad=True), _tensors(1)
    expected = scaled_sum(x, other, y, 2.0)[0]
    assert not dispatched
    with _Seen() as seen:
        value = scaled_sum(x, other, y, 2.0)[0]
        torch.autograd.grad(value.sum(), x)
    assert [n for n in seen.names if n.startswith("pointproj")] == [NAME, f"{NAME}_backward"]
    assert torch.equal(value, expected)
    dispatched.clear()
    with _Functions():
        assert torch.equal(scaled_sum(x, other, y, 2.0)[0], expected)
    assert dispatched == [NAME]
    for args in (
        (x.as_subclass(_Subclass), other, y, 2.0),
        (x, other.as_subclass(_Subclass), y, 2.0),
    ):
        dispatched.clear()
        assert torch.equal(scaled_sum(*args)[0].as_subclass(Tensor), expected)
        assert dispatched == [NAME]


def test_profiler_names_the_operator_and_its_backward():
    (x,) = _tensors(1, requires_grad=True)
    with torch.profiler.profile() as profile:
        scaled_sum(x, *_tensors(1), None, 2.0)[0].sum().backward()
    assert {NAME, f"{NAME}_backward"} <= {event.name for event in profile.events()}


def test_tracers_and_fake_tensors_see_the_operator():
    x, other = _tensors(2)
    traced = make_fx(lambda x: scaled_sum(x, other, None, 2.0)[0])(x)
    assert any(str(node.target).startswith("pointproj_tests.scaled_sum") for node in traced.graph.nodes)
    assert torch.equal(traced(x), _plain(x, other, None, 2.0))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = scaled_sum(mode.from_tensor(x), other, None, 2.0)
    assert [t.shape for t in fake] == [x.shape] * 2
    meta = scaled_sum(x.to("meta"), other, None, 2.0)
    assert all(t.is_meta for t in meta)


def test_by_name_and_without_gradient():
    (x,) = _tensors(1, requires_grad=True)
    with torch.no_grad():
        assert not scaled_sum(x, *_tensors(1), y=None, scale=2.0)[0].requires_grad
    value, sign = scaled_sum(x, *_tensors(1), y=None, scale=2.0)
    assert value.requires_grad
    assert not sign.requires_grad
    with torch.inference_mode():
        assert torch.equal(scaled_sum(x, *_tensors(1), None, 2.0)[0], value)


def test_change_in_place_before_the_backward_is_an_error():
    x, y = _tensors(2, requires_grad=True)
    for changes_y in (True, False):
        (other,) = _tensors(1)
        value, _ = scaled_sum(x, other, y, 2.0)
        with torch.no_grad():
            (y if changes_y else other).add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            value.sum().backward()


def test_two_live_graphs_keep_their_own_inputs():
    x, y, a, b = _tensors(4, requires_grad=True)
    values = [
        scaled_sum(x, *_tensors(1), factor, scale)[0] for factor, scale in ((a, 2.0), (b, 3.0), (y, 5.0))
    ]
    for value, expected in zip(values, (2 * a, 3 * b, 5 * y), strict=True):
        assert_close("d_x", torch.autograd.grad(value.sum(), x, retain_graph=True)[0], expected)
        assert_close("d_x again", torch.autograd.grad(value.sum(), x)[0], expected)
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(value.sum(), x)


def _recomputed(policy: CheckpointPolicy | None) -> Callable[..., Any]:
    if policy is None:
        return lambda function, *args: checkpoint(function, *args, use_reentrant=False)
    contexts = lambda: create_selective_checkpoint_contexts(lambda *_, **__: policy)  # noqa: E731
    return lambda function, *args: checkpoint(function, *args, use_reentrant=False, context_fn=contexts)


@pytest.mark.parametrize("policy", [None, CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE])
def test_recomputed_in_the_backward(policy: CheckpointPolicy | None):
    x, y = _tensors(2, requires_grad=True)

    def function(x: Tensor, y: Tensor) -> Tensor:
        return scaled_sum(x.sin(), *_tensors(1), y.cos(), 2.0)[0].square().sum()

    expected = torch.autograd.grad(function(x, y), (x, y))
    got = torch.autograd.grad(_recomputed(policy)(function, x, y), (x, y))
    for name, one, two in zip("xy", got, expected, strict=True):
        assert_close(f"d_{name}", one, two)


def test_what_is_left_of_a_transform_that_ended():
    """A tensor that outlives its transform is a wrapper around an ordinary one."""
    kept: list[Tensor] = []

    def function(x: Tensor) -> Tensor:
        kept.append(x * 2)
        return x.sum()

    (x,) = _tensors(1)
    func.grad(function)(x)
    assert_close(
        "value", scaled_sum(kept[0], *_tensors(1), None, 3.0)[0], _plain(2 * x, *_tensors(1), None, 3.0)
    )


@pytest.mark.parametrize("operator", ["knn", "radius"])
def test_views_of_negated_numbers(operator: str, where: Where):
    """Their memory holds other numbers than they: an operator that is called directly must not read them."""
    problem = by_id("plain").problem(where.device)
    results = []
    for negated in (True, False):
        leaves = [torch.complex(t, -t).conj().imag if negated else t.clone() for t in problem[:3]]
        assert all(t.is_neg() == negated for t in leaves)
        leaves = [t.requires_grad_() for t in leaves]
        neighborhood = 4 if operator == "knn" else 0.4
        aggregated = run(operator, Problem(*leaves), neighborhood, 0.1, backend=where.backend)
        upstream = problem.features[: len(aggregated)]
        upstream = torch.complex(upstream, -upstream).conj().imag if negated else upstream
        results.append((aggregated, *torch.autograd.grad(aggregated, leaves, upstream)))
    for name, got, expected in zip(("aggregated", *INPUTS[:3]), *results, strict=True):
        assert_close(name, got, expected)


def test_autograd_functions_carry_the_operators_name():
    (x,) = _tensors(1, requires_grad=True)
    assert "scaled_sum" in scaled_sum(x, *_tensors(1), None, 2.0)[0].grad_fn.name()
