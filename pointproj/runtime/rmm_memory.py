"""RAPIDS Memory Manager as the allocator of GPU memory, for torch, CuPy (and so cuML) and Warp.

A process can activate RMM once, before torch has allocated memory, and cannot deactivate it. As torch's
allocator it prevents CUDA graphs. For jobs that capture, it fills pools of torch's own allocator instead (see
:mod:`pointproj.runtime.graph_memory`). The report has RMM's own counters, in which a pool's segments count as
allocated.
"""

import importlib.util
import logging
from dataclasses import dataclass
from typing import Any

import torch

from pointproj.config import AllocatorConfig
from pointproj.runtime import distributed, graph_memory

log = logging.getLogger(__name__)

GIB = 2**30
INITIAL_GIB = 1.0  # of a pool that grows


class AllocatorUnavailable(RuntimeError):  # noqa: N818 - a state of the machine, named as users say it
    """The requested allocator cannot be used here; the message says why and what to do."""


@dataclass
class _Owner:
    allocator: AllocatorConfig
    pool: Any  # RMM's memory resource
    statistics: Any  # RMM's adaptor around the pool, which counts
    allocated_at_reset: int = 0


_owner: _Owner | None = None


def in_use() -> bool:
    """Return whether RMM allocates this process's GPU memory."""
    return _owner is not None


def prevents_graphs() -> bool:
    """Return whether RMM is torch's own allocator, which can capture no CUDA graph."""
    return in_use() and not graph_memory.from_pools()


def unavailable() -> str | None:
    """Return None if RMM can be used on this machine, else a sentence: what is missing, and how to get it."""
    if not torch.cuda.is_available():
        return f"it manages GPU memory, and torch {torch.__version__} finds no GPU"
    if importlib.util.find_spec("rmm") is None:
        cuda = torch.version.cuda.partition(".")[0]
        return f'the package rmm is missing; install it with: pip install -e ".[rapids-cu{cuda}]"'
    return None


def activate(allocator: AllocatorConfig, *, captures: bool = False) -> None:
    """Let RMM allocate this process's GPU memory; raise AllocatorUnavailable if that is not possible.

    ``captures`` says that CUDA graphs are to be captured. If RMM is in use already, it stays as it is.

    Its ``resource`` is ``pool``, which grows from ``initial_gib`` up to ``maximum_gib``; ``async``, the
    driver's own pool; ``arena``, of ``maximum_gib``; or ``managed``, which may exceed the GPU's memory.
    """
    global _owner
    obstacle = None
    if _owner is not None:
        if _owner.allocator == allocator:
            return
        obstacle = (
            "an earlier job of this process set RMM up with other values, which hold for the whole process; "
            "start this job on its own"
        )
    elif reason := unavailable():
        obstacle = f"{reason}; or write allocator=torch"
    elif distributed.process_count() > 1:
        obstacle = (
            "several processes that train one model use the GPU before RMM can take over; write "
            "allocator=torch, or start one process"
        )
    elif torch.cuda.is_initialized():
        obstacle = (
            "torch has used the GPU in this process already, and RMM can take over only before that; start "
            "this job on its own"
        )
    if obstacle:
        raise AllocatorUnavailable(f"allocator=rmm: {obstacle}")
    _owner = _swap(allocator, captures)
    sizes = {"initially": allocator.initial_gib, "at most": allocator.maximum_gib}
    words = [f"{word} {gib:g} GiB" for word, gib in sizes.items() if gib is not None]
    words += ["in segments that torch can capture CUDA graphs in"] if captures else []
    log.info("GPU memory is RMM's: %s", ", ".join([allocator.resource or "pool", *words]))


def require_inactive() -> None:
    """Raise AllocatorUnavailable if RMM is active, since torch's allocator cannot replace it."""
    if _owner is not None:
        raise AllocatorUnavailable(
            "allocator=torch: an earlier job of this process made RMM the owner of its GPU memory until it "
            "ends; start this job on its own"
        )


def reset_counters() -> None:
    """Restart the counters; RMM must be active."""
    statistics = _owner.statistics
    statistics.pop_counters()
    _owner.allocated_at_reset = statistics.allocation_counts.current_bytes
    statistics.push_counters()
    if graph_memory.from_pools():
        torch.cuda.reset_peak_memory_stats()


def counters() -> dict[str, Any]:
    """Return RMM's counts since :func:`reset_counters`: see :func:`pointproj.runtime.memory.statistics`."""
    owner, counts = _owner, _owner.statistics.allocation_counts  # these began at 0 with the reset
    grows = hasattr(owner.pool, "pool_size")
    in_segments = {"torch_peak_bytes": torch.cuda.max_memory_allocated()} if graph_memory.from_pools() else {}
    return {
        "allocator": "rmm",
        "resource": owner.allocator.resource or "pool",
        "peak_bytes": owner.allocated_at_reset + counts.peak_bytes,
        "allocated_bytes": owner.allocated_at_reset + counts.current_bytes,
        "reserved_bytes": owner.pool.pool_size() if grows else None,
        "allocations": counts.total_count,
        **in_segments,
    }


def _swap(allocator: AllocatorConfig, captures: bool) -> _Owner:
    import rmm
    from rmm.allocators.torch import rmm_torch_allocator

    if not captures:
        torch.cuda.memory.change_current_allocator(rmm_torch_allocator)
    pool = _resource(allocator)
    statistics = rmm.mr.StatisticsResourceAdaptor(pool)
    rmm.mr.set_current_device_resource(statistics)
    statistics.push_counters()
    if captures:
        graph_memory.fill_pools(rmm_torch_allocator.allocator())
    if importlib.util.find_spec("cupy") is not None:
        import cupy
        from rmm.allocators.cupy import rmm_cupy_allocator

        cupy.cuda.set_allocator(rmm_cupy_allocator)
    if importlib.util.find_spec("warp") is not None:
        import warp as wp

        wp.set_cuda_allocator(wp.utils.AllocatorRmm())
    return _Owner(allocator, pool, statistics)


def _resource(allocator: AllocatorConfig) -> Any:
    """Return the memory resource of a config, on the current device."""
    from rmm import mr

    initial = _bytes(allocator.initial_gib or INITIAL_GIB)
    maximum = None if allocator.maximum_gib is None else _bytes(allocator.maximum_gib)
    if maximum is not None:
        initial = min(initial, maximum)
    match allocator.resource:
        case "arena":
            return mr.ArenaMemoryResource(mr.CudaMemoryResource(), arena_size=maximum)
        case "async":
            resource = mr.CudaAsyncMemoryResource(initial_pool_size=initial)
        case "managed":
            resource = mr.ManagedMemoryResource()
        case _:
            return mr.PoolMemoryResource(mr.CudaMemoryResource(), initial, maximum)
    return resource if maximum is None else mr.LimitingResourceAdaptor(resource, maximum)


def _bytes(gib: float) -> int:
    """Return a size in bytes as RMM takes it: a positive multiple of 256."""
    return max(1, round(gib * GIB / 256)) * 256
