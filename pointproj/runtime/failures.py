"""Processes of a run that fail: all of them end, soon, and with the error of the one that was first.

A process that waits for a sum on its GPU cannot notice that another is gone, and launchers notice late or not
at all. So each leaves a note in the run's folder before it ends with an error, and each looks for notes of
others while it works.
"""

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pointproj.runtime.distributed import Processes
from pointproj.runtime.run_folder import resume_argument

log = logging.getLogger(__name__)

LOOK_EVERY = 0.5  # seconds
PATIENCE = 5.0  # seconds in which a process may end by itself after another has failed


class PeerFailed(RuntimeError):  # noqa: N818 - says what happened
    """Another process of this run has failed; the message says which, and how."""


class HelperDied(RuntimeError):  # noqa: N818 - says what happened
    """A process that samples batches ahead has died; the message says how to go on."""


@contextmanager
def explained_dead_helper(workers: int, last: Path) -> Iterator[None]:
    """Say of a helper process that has died in the block what to do.

    torch raises its error wherever this process is at that moment, perhaps within a step: what is in memory
    cannot be trusted then, and is not saved.

    Parameters
    ----------
    workers : int
        How many there are (``data.workers``).
    last : Path
        Checkpoint of the run; there or not.

    Raises
    ------
    HelperDied
    """
    try:
        yield
    except (RuntimeError, ConnectionError, EOFError) as error:
        words = str(error) if isinstance(error, RuntimeError) else _reported_by_signal()
        if not (workers and words.startswith("DataLoader worker")):
            raise
        onwards = f"continue with {resume_argument(last)} and" if last.exists() else "start again with"
        raise HelperDied(
            f"a process that samples batches has died ({words}), often since memory ran out: {onwards} a "
            f"lower data.workers (now {workers}; 0 samples in the run's own process)"
        ) from error


def _reported_by_signal() -> str:
    """What torch says of a dead helper; its signal may come a moment after the connection is closed."""
    try:
        time.sleep(LOOK_EVERY)
    except RuntimeError as error:
        return str(error)
    return ""


@contextmanager
def ending_together(folder: Path, processes: Processes) -> Iterator[None]:
    """Let an error of any process in this block end all of them.

    Parameters
    ----------
    folder : Path
        Seen by all processes; of this run, or the one it continues.
    processes : Processes

    Raises
    ------
    PeerFailed
        In place of an error here that follows from an earlier one elsewhere. A process that cannot raise it,
        since it waits for the others, is ended with exit code 1.
    """
    if processes.alone:
        yield
        return
    notes = _Notes(folder, processes)
    done = threading.Event()
    watch = threading.Thread(target=_watch, args=(notes, done), daemon=True)
    watch.start()
    try:
        yield
    except Exception as error:
        first = notes.of_another(wait=_speaks_of_a_connection(error))
        if first is not None:
            raise PeerFailed(first) from error
        notes.leave(error)
        raise
    finally:
        done.set()
        watch.join()


class _Notes:
    """Files ``.failed-RUN-RANK`` in the run's folder, by the name that this run's processes share."""

    def __init__(self, folder: Path, processes: Processes) -> None:
        name = os.environ.get("POINTPROJ_RUN", "run").replace("/", "_")
        self._paths = [folder / f".failed-{name}-{rank}" for rank in range(processes.count)]
        self._rank = processes.rank

    def leave(self, error: Exception) -> None:
        path = self._paths[self._rank]
        temporary = path.with_name(f"{path.name}.new")
        try:
            temporary.write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
            os.replace(temporary, path)
        except OSError:
            log.debug("no note of the failure could be left", exc_info=True)

    def of_another(self, *, wait: bool = False) -> str | None:
        """What another process left, if any did; with ``wait`` given the time to."""
        patient = threading.Event()
        for _ in range(4 if wait else 1):
            for rank, path in enumerate(self._paths):
                if rank != self._rank and path.exists():
                    words = path.read_text(encoding="utf-8")
                    return f"process {rank} of this run has failed, and this one ended with it: {words}"
            patient.wait(LOOK_EVERY if wait else 0)
        return None


def _watch(notes: _Notes, done: threading.Event) -> None:
    while not done.wait(LOOK_EVERY):
        words = notes.of_another()
        if words is not None and not done.wait(PATIENCE):
            log.error("%s", words)
            logging.shutdown()
            os._exit(1)


def _speaks_of_a_connection(error: Exception) -> bool:
    """Whether an error may come from another process that is gone."""
    words = ("onnection", "gloo", "NCCL")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)
