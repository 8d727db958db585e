"""Batches are copied ahead: all of them, in order, and errors are raised in their place."""

import threading

import pytest
import torch

from pointproj.data.transfer import PREFETCHED, made_ahead, prefetch, prefetch_to_device


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


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_batches_made_ahead_are_those_that_are_made_when_asked_for(device):
    table = torch.rand(1000, 1000, device=device)

    def made_there():
        for number in range(6):
            long = table
            for _ in range(20):  # so long that the batch is used while it would still be in the making
                long = long @ table / 500
            yield {"sum": (long[:3] + number).clone(), "name": [str(number)]}

    expected = [batch["sum"].clone() for batch in made_there()]
    for number, batch in enumerate(made_ahead(made_there(), torch.device(device))):
        assert batch["name"] == [str(number)]
        assert torch.equal(batch["sum"], expected[number])
    assert number == 5
