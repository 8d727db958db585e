"""The memory that CUDA graphs are captured in: torch's own, or that of pools which another library fills.

torch captures no graph while another library is its allocator. But pools of torch's own allocator
(``torch.cuda.MemPool``) can take their memory from that library, in segments, and graphs can be captured in
them. With :func:`fill_pools`, one pool serves the calling thread, and each :class:`GraphMemory` has its own.

Other libraries cannot allocate while a graph is captured: RMM would let the captured stream wait for others.
So the runs before a capture leave in the pool what the capture needs. Afterwards nothing else may use this
pool, since each replay overwrites it.

torch ends the process if a pool is deleted while a thread uses one, and a capture that failed counts as a
use. So pools live until :func:`release_pools`, and after a failed capture until the process ends.
"""

import ctypes
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch


class _Pools:
    """The pools of a process, filled by one library; one of them serves the thread that makes this object."""

    def __init__(self, library: Any) -> None:
        self.library = library
        self.unused: list[torch.cuda.MemPool] = []
        self.capture_failed = False
        self._ordinary = self.make()
        self._begin()

    def make(self) -> torch.cuda.MemPool:
        pool = torch.cuda.MemPool(self.library)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool))  # else Python deletes it when the process ends
        return pool

    def release(self) -> None:
        with self.instead(None):
            while self.unused and not self.capture_failed:
                ctypes.pythonapi.Py_DecRef(ctypes.py_object(self.unused.pop()))
            torch.cuda.empty_cache()

    @contextmanager
    def instead(self, pool: torch.cuda.MemPool | None) -> Iterator[None]:
        """Let this thread take memory from ``pool`` in the block, None: from torch's allocator."""
        self._end()
        try:
            with nullcontext() if pool is None else torch.cuda.use_mem_pool(pool):
                yield
        finally:
            self._begin()

    def _begin(self) -> None:
        self._use = torch.cuda.use_mem_pool(self._ordinary)
        self._use.__enter__()

    def _end(self) -> None:
        self._use.__exit__(None, None, None)


_pools: _Pools | None = None


def fill_pools(library: Any) -> None:
    """Let this thread's memory of torch come from a library, until the process ends.

    ``library`` is what ``torch.cuda.MemPool`` takes: the allocator of a ``CUDAPluggableAllocator``.
    """
    global _pools
    _pools = _Pools(library)


def from_pools() -> bool:
    """Return whether :func:`fill_pools` was called."""
    return _pools is not None


def release_pools() -> None:
    """Return the memory of graphs and of :class:`GraphMemory` that are not needed any more."""
    _pools.release()


class GraphMemory:
    """Memory of the graphs of one function, with inputs of the same shapes.

    Its ``id`` is the argument ``pool`` of ``torch.cuda.graph``. In torch's own memory the graphs of ``other``
    can share it, if they do not run at the same time.
    """

    def __init__(self, other: "GraphMemory | None" = None) -> None:
        self._pool = None
        if _pools is not None:
            self._pool = _pools.make()
            weakref.finalize(self, _pools.unused.append, self._pool)
            self.id = self._pool.id
        else:
            self.id = torch.cuda.graph_pool_handle() if other is None else other.id

    def before_capture(self) -> AbstractContextManager[None]:
        """Enclose the runs before the capture, on the stream that will be captured."""
        return nullcontext() if self._pool is None else _pools.instead(self._pool)

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Enclose the capture."""
        with nullcontext() if self._pool is None else _pools.instead(None):
            try:
                yield
            except BaseException:
                if self._pool is not None:
                    _pools.capture_failed = True
                raise
