"""What several tests of operators call."""

from collections.abc import Callable, Iterator

import pytest
from torch import Tensor

from pointproj import NeighborList, Neighbors, radius_neighbors
from pointproj.benchmark.cases import Problem
from pointproj.ops.backends.torch import pair_lists
from tests.conftest import Where


@pytest.fixture
def lists(where: Where) -> Iterator[Callable]:
    """``radius_neighbors`` on every backend; of tests with the mark ``operators("radius")``."""

    def search(problem: Problem, radius: float | Tensor, **options) -> Neighbors | NeighborList:
        # Not by the property ``offsets``: torch.compile of torch 2.10 takes none of a named tuple.
        options |= {"query_offsets": problem.query_offsets, "reference_offsets": problem.reference_offsets}
        return radius_neighbors(*problem[:2], radius, backend=where.backend, **options)

    return search


@pytest.fixture
def few_pairs_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks of pairs, the last one shorter than the others."""
    monkeypatch.setattr(pair_lists, "VALUES_AT_ONCE", dict.fromkeys(("cpu", "cuda"), 700))
