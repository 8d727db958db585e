"""Threads of the CPU."""

import pytest
import torch

from pointproj.runtime.devices import cpu_threads


def test_threads_are_those_of_the_block_alone():
    before = torch.get_num_threads()
    with pytest.raises(ZeroDivisionError), cpu_threads(before + 1):
        assert torch.get_num_threads() == before + 1
        1 / 0  # noqa: B018
    with cpu_threads(None):
        assert torch.get_num_threads() == before
    assert torch.get_num_threads() == before
