"""Threads of the CPU."""

import torch

from pointproj.runtime.devices import cpu_threads


def test_threads_are_those_of_the_block_alone():
    before = torch.get_num_threads()
    for wanted, expected in ((before + 1, before + 1), (None, before)):
        with cpu_threads(wanted):
            assert torch.get_num_threads() == expected
        assert torch.get_num_threads() == before
