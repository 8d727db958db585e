"""Random calls against the formula in float64; a failure names the number of each call that differs.

``DIFFERENTIAL_CASES``, ``DIFFERENTIAL_FIRST`` and ``DIFFERENTIAL_SEED`` choose how many, and which.
"""

import os

import pytest
import torch

import pointproj
from pointproj.ops.registry import load
from pointproj.ops.specification.reference import FINITE_SUPPORT, KERNELS
from tests.conftest import Where
from tests.differential.check import Expected, check
from tests.differential.draw import OPERATORS, Call, draw
from tests.ops.cases import is_compiled

CASES = int(os.environ.get("DIFFERENTIAL_CASES", "300"))
FIRST = int(os.environ.get("DIFFERENTIAL_FIRST", "0"))
SEED = int(os.environ.get("DIFFERENTIAL_SEED", "0"))


def _with_few_forms(call: Call) -> Call:
    """The same with one of three small k, three channels, and kernels that test_weightings compiles too."""
    if call.form != "csr" and call.k <= 16:
        call.k = max(k for k in (1, 4, 9) if k <= call.k)
    if call.operator in ("knn_aggregate", "radius_aggregate"):
        features = call.leaves["features"]
        call.leaves["features"] = torch.cat([features] * 3, -1)[..., :3]
        reduce = "weighted" if "reference_weights" in call.leaves else call.reduce
        dtypes = call.leaves["query_points"].dtype, features.dtype
        able = [kernel for kernel in KERNELS if is_compiled(kernel, reduce, *dtypes)]
        able = [kernel for kernel in able if kernel not in FINITE_SUPPORT or call.radius is not None]
        call.kernel = able[call.number % len(able)]
    return call


@pytest.mark.slow
@pytest.mark.operators("knn", "radius")
def test_random_calls(where: Where, monkeypatch: pytest.MonkeyPatch):
    is_compiled_slowly = where == ("warp", "cpu") or where.backend == "triton"
    if where.backend == "warp" and is_compiled_slowly:
        monkeypatch.setattr("warp.config.optimization_level", 0)
    operators = OPERATORS if "lists" in load(where.backend).OPERATORS else OPERATORS[1:3]
    differing = {}
    for number in range(FIRST, FIRST + CASES):
        call = draw(SEED, number, operators, kernels=KERNELS)
        expected = Expected.of(_with_few_forms(call) if is_compiled_slowly else call)
        if differences := check(expected, where.backend, where.device):
            differing[number] = differences, str(call)
    assert differing == {}


@pytest.mark.operators("knn", "radius")
@pytest.mark.parametrize("number", [733, 1528, 6431])
def test_calls_that_once_differed(number: int, on_cpu: Where):
    """Second derivatives where all weights are 0, or one has nearly all; distances equal to eps."""
    if on_cpu.backend == "warp":
        pytest.skip("compiles for many seconds; test_random_calls covers it")
    assert check(Expected.of(draw(49, number)), on_cpu.backend) == []


def test_a_wrong_answer_is_found(monkeypatch: pytest.MonkeyPatch):
    """A kernel that is wrong by one part in a thousand, where rounding is one in a million."""
    exact = pointproj.radius_aggregate

    def wrong(*points, sigma, **options):
        return exact(*points, sigma=sigma * 1.001, **options)

    monkeypatch.setattr(pointproj, "radius_aggregate", wrong)
    calls = [draw(2, number, ("radius_aggregate",), ("exponential",)) for number in range(12)]
    assert any(check(Expected.of(call), "torch") for call in calls)
