"""Batches are fetched and copied to the device while the steps before them run.

Receiving a batch from the processes that sample it, and copying it into pinned memory, takes the host some
milliseconds. A thread does it, on a stream of its own, so that the loop that launches steps need not wait.
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

PREFETCHED = 2  # batches that are copied before they are asked for, at most
MADE_AHEAD = 4  # batches that are made on the device before they are asked for


def prefetch_to_device(batches: Iterator[dict[str, Any]], device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield batches with their tensors on the device; on a GPU they are copied while earlier ones are used.

    Parameters
    ----------
    batches : iterator of dict
        A tensor that is the same object as in the batch before, such as a grid that all share, is copied
        once.
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
    for batch, copied in prefetch(_copies(batches, device, stream), PREFETCHED):
        _ready_here(batch, copied, device)
        yield batch


def _ready_here(batch: dict[str, Any], event: torch.cuda.Event, device: torch.device) -> None:
    """Let the current stream use a batch that another one has made by the time of an event."""
    current = torch.cuda.current_stream(device)
    current.wait_event(event)
    for value in batch.values():
        if isinstance(value, Tensor):
            value.record_stream(current)  # its memory is used again only after what is queued there now


def made_ahead(batches: Iterator[dict[str, Any]], device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield batches that are made on the device, each while those before it are made or used.

    Choosing even points is a long kernel for few of the processors, since each point depends on all before
    it. The others are free for steps, and for the batches after it.

    Parameters
    ----------
    batches : iterator of dict
        What it queues on the current stream makes the next batch. That reads what was ready at the start,
        and nothing that a step or another batch makes.
    device : torch.device

    Yields
    ------
    dict
        Ready for the stream that is current where the batch is asked for.
    """
    if device.type != "cuda" or rmm_memory.in_use():
        yield from batches
        return
    streams = deque(torch.cuda.Stream(device) for _ in range(MADE_AHEAD))
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream(device))  # for the tables that batches are drawn from

    def make() -> tuple[dict[str, Any] | None, torch.cuda.Event]:
        streams.rotate(1)
        with torch.cuda.stream(streams[0]):
            return next(batches, None), streams[0].record_event()

    made = deque(make() for _ in range(MADE_AHEAD))
    while (batch := made[0][0]) is not None:
        _, ready = made.popleft()
        made.append(make())
        _ready_here(batch, ready, device)
        yield batch


def prefetch(items: Iterator[T], count: int) -> Iterator[T]:
    """Yield the items, up to ``count`` of them made in a thread before they are asked for.

    An error of the iterator is raised in place of the item.
    """
    end = object()
    with ThreadPoolExecutor(1, thread_name_prefix="batches") as thread:
        futures = deque(thread.submit(next, items, end) for _ in range(count))
        try:
            while (item := futures.popleft().result()) is not end:
                futures.append(thread.submit(next, items, end))
                yield item
        finally:
            thread.shutdown(wait=True, cancel_futures=True)


def _copies(
    batches: Iterator[dict[str, Any]], device: torch.device, stream: torch.cuda.Stream
) -> Iterator[tuple[dict[str, Any], torch.cuda.Event]]:
    """Copy batches on the stream; each comes with the event that its copy is complete."""
    torch.cuda.set_device(stream.device)  # of this thread, which begins with the first
    last: dict[str, Any] = {}
    last_copy: dict[str, Any] = {}
    for batch in batches:
        known = {name: last_copy[name] for name, value in batch.items() if last.get(name) is value}
        new = {name: value for name, value in batch.items() if name not in known}
        with torch.cuda.stream(stream):
            last, last_copy = batch, {**to_device(new, device), **known}
            complete = stream.record_event()
        yield last_copy, complete
