"""torch.func: gradients, Jacobians, Hessians and vmap are those of autograd and of dense batches."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, func

import pointproj
from pointproj.benchmark.cases import Case
from tests.conftest import Where
from tests.ops.cases import FP64, uniform
from tests.oracle import assert_close

CASE = Case("transforms", uniform(3 * 5, 3 * 16), batch=3, **FP64)
NAMES = ("query_points", "reference_points", "features")


@pytest.fixture(params=["knn", "radius"])
def operator(request: pytest.FixtureRequest, where: Where) -> Callable[..., Tensor]:
    if request.param == "knn":
        return lambda *inputs: pointproj.knn_aggregate(*inputs, 4, backend=where.backend)
    return lambda *inputs: pointproj.radius_aggregate(*inputs, 0.7, backend=where.backend)


def test_one_cloud(operator: Callable, where: Where):
    inputs = [t[0] for t in CASE.problem(where.device)[:3]]

    def loss(*inputs: Tensor) -> Tensor:
        return operator(*inputs).square().sum()

    leaves = [t.clone().requires_grad_() for t in inputs]
    expected = torch.autograd.grad(loss(*leaves), leaves)
    for name, got, want in zip(NAMES, func.grad(loss, (0, 1, 2))(*inputs), expected, strict=True):
        assert_close(f"d_{name}", got, want)
    _, pull = func.vjp(loss, *inputs)
    for name, got, want in zip(NAMES, pull(torch.ones_like(loss(*inputs))), expected, strict=True):
        assert_close(f"vjp {name}", got, want)

    def of_query(query: Tensor) -> Tensor:
        return operator(query, *inputs[1:])

    functional = torch.autograd.functional
    expected = functional.jacobian(of_query, inputs[0])
    assert_close("is_grads_batched", functional.jacobian(of_query, inputs[0], vectorize=True), expected)
    assert_close("jacrev", func.jacrev(of_query)(inputs[0]), expected)
    assert_close("jacfwd", func.jacfwd(of_query)(inputs[0]), expected)

    def loss_of_query(query: Tensor) -> Tensor:
        return of_query(query).square().sum()

    expected = functional.hessian(loss_of_query, inputs[0])
    assert_close("twice", functional.hessian(loss_of_query, inputs[0], vectorize=True), expected)
    assert_close("hessian", func.hessian(loss_of_query)(inputs[0]), expected)


def test_vmap_is_the_dense_batch(operator: Callable, where: Where):
    inputs = CASE.problem(where.device)[:3]
    assert_close("aggregated", func.vmap(operator)(*inputs), operator(*inputs))
    shared = [t[:1].expand_as(t) for t in inputs[1:]]
    one_cloud = func.vmap(operator, (0, None, None))(inputs[0], *(t[0] for t in inputs[1:]))
    assert_close("shared cloud", one_cloud, operator(inputs[0], *shared))

    def loss(*inputs: Tensor) -> Tensor:
        return operator(*inputs).square().sum()

    every = (0, 1, 2)
    of_batch, of_each = func.grad(loss, every)(*inputs), func.vmap(func.grad(loss, every))(*inputs)
    for name, got, want in zip(NAMES, of_each, of_batch, strict=True):
        assert_close(f"d_{name}", got, want)


def test_compiling_a_transform_is_refused_in_words():
    inputs = [t[0].float() for t in CASE.problem()[:3]]
    compiled = torch.compile(
        func.grad(lambda *i: pointproj.knn_aggregate(*i, 4, backend="torch").sum()), fullgraph=True
    )
    with pytest.raises(Exception, match="compile the function without the transform"):
        compiled(*inputs)
