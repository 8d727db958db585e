"""Batches are made on the device while the steps before them run."""

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from pointproj.runtime import rmm_memory

MADE_AHEAD = 4  # batches that are made before they are asked for


def made_ahead(batches: Iterator[dict[str, Any]], device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield batches that are made on the device, each while those before it are made or used.

    Choosing even points is a long kernel for few of the processors, since each point depends on all before
    it. The others are free for steps, and for the batches after it.

    What ``batches`` queues on the current stream makes the next batch. That reads what was ready at the
    start, and nothing that a step or another batch makes. A batch is ready for the stream that is current
    where it is asked for.
    """
    if device.type != "cuda" or rmm_memory.in_use():  # RMM does not hold memory back for another stream
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
                value.record_stream(current)  # its memory is used again only after what is queued there now
        yield batch
