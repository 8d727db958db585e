"""The device of a run, and copies to it."""

import contextlib
import fcntl
import logging
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pointproj.machine import missing_gpu
from pointproj.runtime import distributed

log = logging.getLogger(__name__)


class DeviceError(RuntimeError):
    """The requested device does not exist; the message says what to write instead."""


def choose_device(name: str) -> torch.device:
    """Return the device to run on; several processes on one machine use a GPU each.

    ``name`` is ``cpu``, ``cuda`` or ``auto``; ``auto`` takes the GPU if there is one. Raises DeviceError for
    ``cuda`` if there is no GPU.
    """
    obstacle = missing_gpu()
    if name == "cuda" and obstacle:
        raise DeviceError(f"device=cuda: {obstacle}; write device=cpu or device=auto")
    if name == "cpu" or obstacle:
        return torch.device("cpu")
    distributed.join()  # makes this process's GPU the current one
    return torch.device("cuda", torch.cuda.current_device())


@contextlib.contextmanager
def cpu_threads(count: int | None) -> Iterator[None]:
    """Let operators on the CPU use so many threads in the block; None: as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def own_gpu() -> Iterator[None]:
    """Lock a free GPU for the block, and make it the current one of this process.

    So each job of a sweep on one machine uses its own GPU. If there are more jobs than GPUs, the additional
    jobs share the first GPU. If a job is killed, the system releases its lock.
    """
    count = torch.cuda.device_count()
    if count < 2:
        yield
        return
    with contextlib.ExitStack() as stack:
        for number in range(count):
            identity = torch.cuda.get_device_properties(number).uuid
            try:
                path = Path(tempfile.gettempdir()) / f"pointproj-gpu-{identity}.lock"
                lock = stack.enter_context(path.open("a"))
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:  # locked by another job, or owned by another user
                continue
            torch.cuda.set_device(number)
            break
        else:
            log.warning("all %d GPUs are in use by other jobs: this one shares the first", count)
            torch.cuda.set_device(0)
        yield


def to_device(batch: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Return the batch with its tensors on the device; copies to a GPU are asynchronous."""
    moved = dict(batch)
    for name, value in batch.items():
        if isinstance(value, Tensor):
            pinned = device.type == "cuda" and value.device.type == "cpu"
            moved[name] = (value.pin_memory() if pinned else value).to(device, non_blocking=pinned)
    return moved
