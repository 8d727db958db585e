"""Batches on their way to the device: fetched and copied there while the steps before them run.

Taking a batch from the processes that sample it, copying it into pinned memory and sending it off costs the
host milliseconds which the loop that launches steps lacks. So a thread does it, on a stream of its own.
"""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from pointproj.runtime import rmm_memory
from pointproj.runtime.devices import to_device

T = TypeVar("T")

AHEAD = 2  # batches that are under way at most


def sent_ahead(batches: Iterator[dict[str, Any]], device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield batches with their tensors on the device; on a GPU they travel while earlier ones are worked on.

    Parameters
    ----------
    batches : iterator of dict
        A tensor that is the same object as in the batch before, such as a grid that all share, is sent once.
    device : torch.device
        Where the tensors go.

    Yields
    ------
    dict
        Ready for the stream that is current where the batch is asked for.
    """
    if device.type != "cuda" or rmm_memory.in_use():  # RMM does not hold memory back for another stream
        yield from (to_device(batch, device) for batch in batches)
        return
    stream = torch.cuda.Stream(device)
    for batch, sent in ahead(_sending(batches, device, stream), AHEAD):
        current = torch.cuda.current_stream(device)
        current.wait_event(sent)
        for value in batch.values():
            if isinstance(value, Tensor):
                value.record_stream(current)  # its memory is used again only after what is queued there now
        yield batch


def ahead(items: Iterator[T], count: int) -> Iterator[T]:
    """Yield the items, up to ``count`` of them made in a thread before they are asked for.

    An error of the iterator comes out where its item would have.
    """
    end = object()
    with ThreadPoolExecutor(1, thread_name_prefix="batches") as thread:
        under_way = deque(thread.submit(next, items, end) for _ in range(count))
        try:
            while (item := under_way.popleft().result()) is not end:
                under_way.append(thread.submit(next, items, end))
                yield item
        finally:
            thread.shutdown(wait=True, cancel_futures=True)


def _sending(
    batches: Iterator[dict[str, Any]], device: torch.device, stream: torch.cuda.Stream
) -> Iterator[tuple[dict[str, Any], torch.cuda.Event]]:
    """Send batches off on the stream, each with the event of its arrival."""
    torch.cuda.set_device(stream.device)  # of this thread, which begins with the first
    given: dict[str, Any] = {}
    sent: dict[str, Any] = {}
    for batch in batches:
        known = {name: sent[name] for name, value in batch.items() if given.get(name) is value}
        new = {name: value for name, value in batch.items() if name not in known}
        with torch.cuda.stream(stream):
            given, sent = batch, {**to_device(new, device), **known}
            arrived = stream.record_event()
        yield sent, arrived
