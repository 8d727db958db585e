"""What torch's counter of floating-point operations counts for the operators of each backend."""

from collections.abc import Callable

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from pointproj import radius_neighbors
from pointproj.benchmark.cases import Case
from tests.ops.cases import uniform
from tests.oracle import INPUTS, run

COUNTED = Case("", uniform(6, 10), k=3, radius=0.9, channels=5)  # 18 pairs, or 60 within any radius
DISTANCE, SUM = 8, 2 * 5
with_formulas = pytest.mark.parametrize("backend", ["native", "warp", "triton"])


def counted(function: Callable[[], object], backend: str) -> dict[str, int]:
    """All operations of the searches and sums, of their derivatives, and of second derivatives."""
    if backend == "triton":
        pytest.importorskip("triton", reason="the package triton is not installed")
    counter = FlopCounterMode(display=False)
    for target in [name for name in counter.flop_registry if "pointproj" in str(name)]:
        del counter.flop_registry[target]  # as if the operators were loaded inside the counter
    with counter:
        function()
    counts = dict.fromkeys(("forward", "backward", "second_backward"), 0)
    for name, count in counter.get_flop_counts()["Global"].items():
        _, is_first, _ = str(name).partition("_backward")
        counts["second_backward" if "_second" in str(name) else is_first[1:] or "forward"] += count
    return counts


@with_formulas
@pytest.mark.parametrize(
    ("operator", "leaves", "forward", "backward"),
    [
        ("knn", ["features"], 18 * (DISTANCE + DISTANCE + SUM), 18 * SUM),
        ("radius", INPUTS[:3], 60 * (DISTANCE + SUM), 60 * (SUM + SUM + DISTANCE)),
    ],
    ids=["knn", "radius"],
)
def test_sums_and_their_gradients(backend, operator, leaves, forward, backward):
    problem = COUNTED.problem()

    def function() -> None:
        given = problem._replace(**{n: getattr(problem, n).clone().requires_grad_() for n in leaves})
        run(operator, given, COUNTED.neighborhood(operator), 0.1, backend=backend).sum().backward()

    assert counted(function, backend) == {"forward": forward, "backward": backward, "second_backward": 0}


def test_backward_alone():
    problem = COUNTED.problem()
    features = problem.features.clone().requires_grad_()
    field = run("knn", problem._replace(features=features), 3, 0.1, backend="native")
    with FlopCounterMode(display=False) as counter:
        field.sum().backward()
    assert counter.get_total_flops() == 18 * SUM


@with_formulas
def test_second_derivatives(backend):
    problem = COUNTED.problem()

    def function() -> None:
        query_points = problem.query_points.clone().requires_grad_()
        field = run("knn", problem._replace(query_points=query_points), 3, 0.1, backend=backend)
        (slope,) = torch.autograd.grad(field.sum(), query_points, create_graph=True)
        slope.square().sum().backward()

    counts = counted(function, backend)
    assert counts["backward"] == 18 * (SUM + DISTANCE)
    assert counts["second_backward"] == 18 * (DISTANCE + 5 * SUM)


@with_formulas
def test_dense_clouds_have_no_pairs_between_them(backend):
    problem = Case("", uniform(6, 10), channels=5, batch=2).problem()
    counts = counted(lambda: run("radius", problem, 0.9, 0.1, backend=backend), backend)
    assert counts["forward"] == 30 * (DISTANCE + SUM)


@pytest.mark.parametrize("backend", ["native", "warp"])
def test_lists_have_as_many_pairs_as_places(backend):
    points = COUNTED.problem().query_points.detach()
    counts = counted(lambda: radius_neighbors(points, points, 0.9, max_neighbors=4, backend=backend), backend)
    assert counts["forward"] == 6 * 4 * DISTANCE
