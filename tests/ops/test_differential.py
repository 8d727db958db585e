"""Random calls against the formula in float64; ``python -m tests.differential`` runs more of them.

``DIFFERENTIAL_CASES`` and ``DIFFERENTIAL_SEED`` choose how many, and which.
"""

import os
import time

import pytest

import pointproj
from pointproj.ops.specification.reference import KERNELS
from tests.conftest import Where
from tests.differential.check import Expected, check
from tests.differential.draw import OPERATORS, draw
from tests.differential.run import run

CASES = int(os.environ.get("DIFFERENTIAL_CASES", "300"))
SEED = int(os.environ.get("DIFFERENTIAL_SEED", "0"))


@pytest.mark.slow
@pytest.mark.operators("knn", "radius")
def test_random_calls(where: Where, monkeypatch: pytest.MonkeyPatch):
    if where == ("warp", "cpu"):  # most of the time goes into compiling
        monkeypatch.setattr("warp.config.optimization_level", 0)
    until = time.time() + 3600
    outcome = run(range(CASES), SEED, KERNELS, [where.backend], where.device, until)[where.backend]
    assert outcome["counts"]["cases"] == CASES
    assert outcome["failures"] == []


@pytest.mark.operators("knn", "radius")
def test_a_few_random_calls(on_cpu: Where):
    """Of kernels that Warp need not compile for this test alone."""
    operators, kernels = OPERATORS, KERNELS
    if on_cpu.backend == "warp":
        operators, kernels = ("knn", "padded", "csr"), KERNELS[:1]
    for number in range(25):
        outcome = check(Expected.of(draw(1, number, operators, kernels)), on_cpu.backend)
        assert outcome.differences == [], f"seed 1, case {number}"


def test_a_wrong_answer_is_found(monkeypatch: pytest.MonkeyPatch):
    """A kernel that is wrong by one part in a thousand, where rounding is one in a million."""
    exact = pointproj.radius_aggregate

    def wrong(*points, sigma, **options):
        return exact(*points, sigma=sigma * 1.001, **options)

    monkeypatch.setattr(pointproj, "radius_aggregate", wrong)
    calls = [draw(2, number, ("radius_aggregate",), ("exponential",)) for number in range(12)]
    assert any(check(Expected.of(call), "torch").differences for call in calls)
