"""The allocator of GPU memory, and the peak memory of a job."""

import logging
import os
import re
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from pointproj.config import AllocatorConfig, Config
from pointproj.runtime import graph_memory, rmm_memory

log = logging.getLogger(__name__)

_expandable = False  # whether the last job had expandable segments


class OutOfMemory(RuntimeError):  # noqa: N818 - says what happened
    """The device has too little memory for this run; the message says what to lower."""


@contextmanager
def explained_out_of_memory(config: Config, device: torch.device) -> Iterator[None]:
    """Raise :class:`OutOfMemory` in place of the errors of torch, NumPy and RMM in the block."""
    try:
        yield
    except Exception as error:
        words = ("out of memory", "out_of_memory", "can't allocate memory", "not enough memory")
        told = isinstance(error, RuntimeError) and any(word in str(error) for word in words)
        if not (told or isinstance(error, torch.OutOfMemoryError | MemoryError)):
            raise
        first_line = next(iter(str(error).splitlines()), type(error).__name__)
        raise OutOfMemory(
            f"{device} has not enough memory: {first_line} Lower training.batch_size (now "
            f"{config.training.batch_size}), data.points ({config.data.points}), data.grid "
            f"({config.data.grid}) or projector.hidden_channels ({config.projector.hidden_channels}); or "
            "write training.amp=true"
        ) from error


def configure_allocator(allocator: AllocatorConfig, *, captures: bool = False) -> None:
    """Set up the allocator of GPU memory; call it before the job's first tensor.

    ``captures`` says that CUDA graphs are to be captured, which RMM must know beforehand.

    With ``allocator=torch``, ``expandable_segments`` lets a block of reserved memory grow, instead of
    replacing it by a larger one. That saves memory if shapes vary. Settings in the environment variable
    ``PYTORCH_ALLOC_CONF`` stay in force too. Raises AllocatorUnavailable if RMM is requested and cannot take
    over, or if it is not requested and an earlier job has activated it for the whole process.
    """
    global _expandable
    if allocator.name == "rmm":
        rmm_memory.activate(allocator, captures=captures)
        return
    rmm_memory.require_inactive()
    expandable = allocator.expandable_segments
    if not torch.cuda.is_available():
        if expandable:
            log.warning("allocator.expandable_segments=true has no effect: no CUDA device is in use")
        return
    # If a key is given twice, some versions of torch take the first value, others the last.
    given = [s for s in os.environ.get("PYTORCH_ALLOC_CONF", "").split(",") if s]
    others = [s for s in given if not s.startswith("expandable_segments")]
    if expandable:
        torch.cuda.memory._set_allocator_settings(",".join([*others, "expandable_segments:True"]))
    elif _expandable:  # an earlier job of this process has switched it on
        torch.cuda.memory._set_allocator_settings(",".join(given) or "expandable_segments:False")
    _expandable = expandable


def graphs_unsupported() -> str | None:
    """Return why no CUDA graph can be captured with the current allocator, or None."""
    reason = "torch captures no CUDA graph while RMM owns the memory"
    return reason if rmm_memory.prevents_graphs() else None


def empty_cache() -> None:
    """Return reserved but unused memory to the GPU, if the allocator can."""
    if graph_memory.from_pools():
        graph_memory.release_pools()
    elif torch.cuda.is_initialized() and not rmm_memory.in_use():
        torch.cuda.empty_cache()


def reset_peak(device: torch.device | str | None = None) -> None:
    """Restart the counts of :func:`peak_bytes` and :func:`statistics` for a device; for None, for all."""
    kind = None if device is None else torch.device(device).type
    if torch.cuda.is_initialized() and kind != "cpu":
        if rmm_memory.in_use():
            rmm_memory.reset_counters()
        else:
            torch.cuda.reset_peak_memory_stats(device)
    if kind != "cuda":
        try:
            Path("/proc/self/clear_refs").write_text("5")  # 5: reset only the peak
        except OSError:
            log.debug("this system does not reset the peak of resident memory: it counts since the start")


def peak_bytes(device: torch.device | str) -> int:
    """Return the peak of allocated memory since :func:`reset_peak`, in bytes.

    On a GPU, torch's tensors count; with RMM, the memory of all libraries that use it. On the CPU, the memory
    of the process counts.
    """
    return statistics(device)["peak_bytes"]


def allocated_bytes(device: torch.device | str) -> int:
    """Return the currently allocated memory in bytes, counted as in :func:`peak_bytes`; 0 on the CPU."""
    return statistics(device).get("allocated_bytes", 0)


def free_bytes(device: torch.device | str) -> int:
    """Return the free memory of a GPU or of the host, in bytes."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def statistics(device: torch.device | str) -> dict[str, Any]:
    """Return the name of the device's allocator and its counts since :func:`reset_peak`, for the report.

    The keys are ``allocator`` and ``peak_bytes``; on a GPU also ``allocated_bytes``, ``reserved_bytes`` (None
    if unknown) and ``allocations``; with RMM also ``resource``. If CUDA graphs are captured with RMM, torch's
    segments count as a whole, and ``torch_peak_bytes`` is the peak of its tensors.
    """
    if torch.device(device).type == "cpu":
        return {"allocator": "host", "peak_bytes": _host_peak()}
    if rmm_memory.in_use():
        return rmm_memory.counters()
    counts = torch.cuda.memory_stats(device)
    return {
        "allocator": "torch",
        "peak_bytes": torch.cuda.max_memory_allocated(device),
        "allocated_bytes": torch.cuda.memory_allocated(device),
        "reserved_bytes": torch.cuda.memory_reserved(device),
        "allocations": counts.get("allocation.all.allocated", 0),
    }


def _host_peak() -> int:
    """Return the peak of resident memory, in bytes.

    ``ru_maxrss`` is only a substitute, since it includes the peak of the process which started this one.
    """
    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\s*(\d+)", status.read_text()) if status.exists() else None
    if found:
        return int(found[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
