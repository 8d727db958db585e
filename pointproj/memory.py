"""Who owns the device's memory, and how much of it a job used at most."""

import logging
import os
import resource
import sys
from pathlib import Path

import torch

from pointproj.config import AllocatorConfig

log = logging.getLogger(__name__)

_expandable = False  # whether the last job asked for expandable segments


def configure_allocator(allocator: AllocatorConfig) -> None:
    """Set up torch's CUDA allocator; call it before the job's first tensor.

    Parameters
    ----------
    allocator : AllocatorConfig
        ``expandable_segments`` lets a block of reserved memory grow instead of being replaced by a larger
        one, which saves memory where shapes vary. Settings in the environment variable
        ``PYTORCH_ALLOC_CONF`` stay in force beside it.
    """
    if not torch.cuda.is_available():
        if allocator.expandable_segments:
            log.warning("allocator.expandable_segments=true has no effect: no CUDA device is in use")
        return
    global _expandable
    # Of a key given twice some versions of torch take the first, others the last.
    given = [s for s in os.environ.get("PYTORCH_ALLOC_CONF", "").split(",") if s]
    others = [s for s in given if not s.startswith("expandable_segments")]
    if allocator.expandable_segments:
        torch.cuda.memory._set_allocator_settings(",".join([*others, "expandable_segments:True"]))
    elif _expandable:  # by an earlier job of this process
        torch.cuda.memory._set_allocator_settings(",".join(given) or "expandable_segments:False")
    _expandable = allocator.expandable_segments


def reset_peak(device: torch.device | str | None = None) -> None:
    """Let :func:`peak_bytes` count from now on.

    Parameters
    ----------
    device : torch.device or str or None
        The device that the next job uses; None resets host and current GPU.
    """
    if torch.cuda.is_initialized() and (device is None or torch.device(device).type == "cuda"):
        torch.cuda.reset_peak_memory_stats(device)
    if device is None or torch.device(device).type == "cpu":
        _reset_host_peak()


def peak_bytes(device: torch.device | str) -> int:
    """Return the most memory held at one time since :func:`reset_peak`, in bytes.

    Parameters
    ----------
    device : torch.device or str
        On a GPU, what torch's tensors held there. On the CPU, the resident memory of the whole process,
        libraries included.
    """
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _reset_host_peak() -> None:
    """Set the peak of resident memory back to the present value, where the kernel offers that."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # 5: reset the peak, and touch nothing else
    except OSError:
        log.debug("this system does not reset the peak of resident memory: it counts since the process began")
