"""What several tests of operators call."""

from collections.abc import Callable, Iterator

import pytest
from torch import Tensor

from pointproj import NeighborList, Neighbors, radius_neighbors
from pointproj.ops.cases import Problem
from tests.conftest import Where


@pytest.fixture
def lists(where: Where) -> Iterator[Callable]:
    """``radius_neighbors`` on a backend that has it."""
    where.skip_unless("radius")

    def search(problem: Problem, radius: float | Tensor, **options) -> Neighbors | NeighborList:
        return radius_neighbors(*problem[:2], radius, backend=where.backend, **problem.offsets, **options)

    return search
