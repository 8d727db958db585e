"""If one process of a run fails, all of them end soon, with the error of the first one that failed.

A process that waits for a reduction on its GPU cannot notice that another process has ended. Launchers notice
it late or not at all. So a process that fails writes its error to a file in the run's folder, and all others
look for such files while they work.
"""

import errno
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pointproj.runtime.distributed import Processes
from pointproj.runtime.run_folder import RunError, replace_text, resume_argument

log = logging.getLogger(__name__)

POLL_INTERVAL = 0.5  # seconds
SHARED_MEMORY, LEAST_SHARED = "/dev/shm", 1 << 16  # bytes free, where locks and queues can be made
EXIT_TIMEOUT = 5.0  # seconds for a process to end by itself after another has failed


class PeerFailed(RuntimeError):  # noqa: N818 - says what happened
    """Another process of this run has failed; the message says which, and how."""


class WorkerDied(RuntimeError):  # noqa: N818 - says what happened
    """A worker of the data loader has died; the message says how to go on."""


class SharedMemoryFull(RuntimeError):  # noqa: N818 - says what happened
    """A worker of the data loader got no shared memory for its batch."""


@contextmanager
def explained_dead_worker(workers: int, last: Path) -> Iterator[None]:
    """Raise :class:`WorkerDied` if one of the ``workers`` of the data loader dies in the block.

    torch raises its error wherever this process is, perhaps within a step. So the state in memory may be
    inconsistent, and is not saved. ``last`` is the path of the run's checkpoint, which need not exist.
    """
    try:
        yield
    except (RuntimeError, OSError, EOFError) as error:
        reason = _reported_by_signal() if isinstance(error, ConnectionError | EOFError) else str(error)
        full = isinstance(error, SharedMemoryFull) or "Bus error" in reason or _no_locks(error)
        if not (workers and (full or reason.startswith("DataLoader worker"))):
            raise
        onwards = f"continue with {resume_argument(last)} and" if last.exists() else "start again with"
        if full:
            raise WorkerDied(
                f"shared memory ({SHARED_MEMORY}) is full, which the processes that sample batches pass "
                f"them through: {onwards} more of it (docker run --ipc=host, or --shm-size=8g), or a lower "
                f"data.workers (now {workers}; 0 needs none)"
            ) from error
        raise WorkerDied(
            f"a process that samples batches has died ({reason}), often since memory ran out: {onwards} a "
            f"lower data.workers (now {workers}; 0 samples in the run's own process)"
        ) from error


def _no_locks(error: Exception) -> bool:
    """Return whether queues and locks between processes, which have no file name, could not be made."""
    return (
        isinstance(error, OSError)
        and error.errno == errno.ENOSPC
        and error.filename is None
        and not (os.path.isdir(SHARED_MEMORY) and shutil.disk_usage(SHARED_MEMORY).free >= LEAST_SHARED)
    )


def _reported_by_signal() -> str:
    """Return torch's message about a dead worker; its signal may come after the connection was closed."""
    try:
        time.sleep(POLL_INTERVAL)
    except RuntimeError as error:
        return str(error)
    return ""


@contextmanager
def ending_together(folder: Path, processes: Processes) -> Iterator[None]:
    """End all processes when one of them fails in this block; ``folder`` is the run's folder.

    If an error here follows from an earlier error of another process, PeerFailed is raised instead. A process
    that cannot raise it, since it waits for the others, is ended with exit code 1.
    """
    if processes.is_single:
        yield
        return
    name = os.environ.get("POINTPROJ_RUN", "run").replace("/", "_")
    others = {rank: folder / f".failed-{name}-{rank}" for rank in range(processes.count)}
    own = others.pop(processes.rank)
    done = threading.Event()

    def end_with_others() -> None:
        while not done.wait(POLL_INTERVAL):
            message = _error_of(others)
            if message is not None and not done.wait(EXIT_TIMEOUT):
                log.error("%s", message)
                logging.shutdown()
                os._exit(1)

    watch = threading.Thread(target=end_with_others, daemon=True)
    watch.start()
    try:
        yield
    except Exception as error:
        words = "onnection", "gloo", "NCCL"
        lost = isinstance(error, RuntimeError) and any(word in str(error) for word in words)
        for _ in range(4 if lost else 1):  # after a lost connection, another process will soon write why
            if first := _error_of(others):
                raise PeerFailed(first) from error
            time.sleep(POLL_INTERVAL if lost else 0)
        try:
            replace_text(own, f"{type(error).__name__}: {error}")
        except RunError:
            log.debug("the error could not be written for the other processes", exc_info=True)
        raise
    finally:
        done.set()
        watch.join()


def _error_of(others: dict[int, Path]) -> str | None:
    """Return the error of another process, if one has failed."""
    for rank, path in others.items():
        if path.exists():
            error = path.read_text(encoding="utf-8")
            return f"process {rank} of this run has failed, and this one ended with it: {error}"
    return None
