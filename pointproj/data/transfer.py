"""Batches made on the device while earlier steps run."""

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from pointproj.runtime import rmm_memory

MADE_AHEAD = 4  # batches that are made before they are needed


def made_ahead(batches: Iterator[dict[str, Any]], device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield the batches of an iterator, several of which are made on the device at the same time.

    Choosing even points takes a long kernel that uses few multiprocessors, since each point depends on all
    earlier ones. The other multiprocessors run steps and make later batches meanwhile.

    ``next(batches)`` must queue all work for a batch on the current stream. This work may only read data that
    was ready when the iteration began: no result of a step or of another batch. A batch may be used on the
    stream that is current when the batch is yielded.
    """
    # RMM reuses memory that another stream may still read; a pool that is in use never reuses it.
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
        current = torch.cuda.current_stream(device)
        current.wait_event(ready)
        for value in batch.values():
            if isinstance(value, Tensor):
                value.record_stream(current)  # so that its memory is reused only after the work queued there
        yield batch
