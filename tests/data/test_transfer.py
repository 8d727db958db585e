"""Batches are copied ahead: all of them, in order, and errors are raised in their place."""

import threading

import pytest
import torch

from pointproj.data.transfer import PREFETCHED, prefetch, prefetch_to_device


def made(count, asked, fails_at=None):
    for number in range(count):
        if number == fails_at:
            raise ValueError(f"no item {number}")
        asked.append((number, threading.current_thread()))
        yield number


@pytest.mark.parametrize("count", [0, 1, PREFETCHED, 7])
def test_items_are_made_in_order_in_another_thread_and_not_too_early(count):
    asked = []
    for number, item in enumerate(prefetch(made(count, asked), PREFETCHED)):
        assert item == number
        assert len(asked) <= item + 1 + PREFETCHED
    assert [number for number, _ in asked] == list(range(count))
    assert threading.current_thread() not in {thread for _, thread in asked}


def test_an_error_comes_out_where_the_item_would_have():
    items = prefetch(made(5, [], fails_at=3), PREFETCHED)
    assert [next(items) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="no item 3"):
        next(items)


def test_closed_early_no_thread_is_left():
    before = threading.active_count()
    items = prefetch(made(100, []), PREFETCHED)
    next(items)
    items.close()
    assert threading.active_count() == before


def batches(count):
    shared = torch.rand(5, 3)
    for number in range(count):
        own = torch.full((1000, 1000), float(number))
        yield {"query_points": shared, "target": own, "name": [str(number)]}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_batches_arrive_whole_and_what_they_share_is_sent_once(device):
    grids, sums = set(), []
    for number, batch in enumerate(prefetch_to_device(batches(20), torch.device(device))):
        assert {tensor.device.type for tensor in (batch["query_points"], batch["target"])} == {device}
        assert batch["name"] == [str(number)]
        grids.add(batch["query_points"].data_ptr())
        sums.append(batch["target"].sum())  # on a GPU nothing waits: the copy has to be over by itself
    assert torch.stack(sums).tolist() == [1e6 * number for number in range(20)]
    assert len(grids) == 1
