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

PREFETCHED = 2  # batches that are made before they are asked for, at most


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
        current = torch.cuda.current_stream(device)
        current.wait_event(copied)
        for value in batch.values():
            if isinstance(value, Tensor):
                value.record_stream(current)  # its memory is used again only after what is queued there now
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
