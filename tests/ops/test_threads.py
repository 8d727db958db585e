"""Results on the CPU are the same however many threads share the work."""

import pytest
import torch

from pointproj.benchmark.cases import Case, gaussian
from tests.conftest import Where
from tests.oracle import assert_close, derivatives, probe, run

CASE = Case("threads", gaussian(701, 1501), k=7, radius=0.2, channels=25)  # enough for all to have some


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("operator", ["knn", "radius"])
def test_threads_change_nothing(operator: str, on_cpu: Where, threads):
    problem, neighborhood = CASE.problem(), CASE.neighborhood(operator)
    at, made = probe(problem, CASE.sigma), {}
    for count in (1, 3):
        threads(count)
        made[count] = derivatives(
            lambda p, sigma: run(operator, p, neighborhood, sigma, backend=on_cpu.backend), problem, at
        )
    for name, alone in made[1].items():
        assert_close(name, made[3][name], alone)
