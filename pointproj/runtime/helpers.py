"""Helper processes for work with many parts, such as meshes to prepare."""

import logging
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Self

from pointproj.runtime.progress_bar import progress

log = logging.getLogger(__name__)

Jobs = Mapping[Any, Callable[[], Any]]

FEWEST_JOBS = 12  # jobs of up to a second each


class HelperProcesses:
    """A context in which jobs run side by side; the processes start with the first sufficiently many jobs.

    ``count`` is the number of processes, by default one for each processor core. With less than
    ``fewest_jobs`` jobs, starting processes would take longer than the jobs. ``meanwhile`` is called once in
    this process, after the helpers were given the next jobs.
    """

    def __init__(
        self,
        count: int | None = None,
        meanwhile: Callable[[], None] | None = None,
        fewest_jobs: int = FEWEST_JOBS,
    ) -> None:
        self.count = count or len(os.sched_getaffinity(0))
        self.meanwhile = meanwhile
        self._fewest_jobs = fewest_jobs
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    @property
    def fewest_jobs(self) -> int:
        """Number of jobs from which on helper processes run them."""
        if self.count == 1:
            return 1
        return self._fewest_jobs if self._pool is None else 2

    def results(self, title: str, jobs: Jobs, unit: str) -> Iterator[tuple[Any, Any]]:
        """Run jobs and show the progress; yield their keys and results in the order of completion.

        ``jobs`` take no arguments and can be pickled. ``unit`` is the plural of what a job makes.
        """
        with progress(title, len(jobs), unit=unit) as advance:
            for key, result in self._completed(jobs, unit):
                advance(1)
                yield key, result

    def _completed(self, jobs: Jobs, unit: str) -> Iterator[tuple[Any, Any]]:
        left = dict(jobs)
        if self.count > 1 and len(jobs) >= self.fewest_jobs:
            try:
                if self._pool is None:
                    # Spawned, since a forked copy of a process that uses Warp, CUDA or threads can hang.
                    context = multiprocessing.get_context("spawn")
                    self._pool = ProcessPoolExecutor(self.count, context, initializer=_end_with_parent)
                futures = {self._pool.submit(job): key for key, job in jobs.items()}
                meanwhile, self.meanwhile = self.meanwhile, None
                if meanwhile is not None:
                    meanwhile()
                for future in as_completed(futures):
                    key, result = futures[future], future.result()
                    del left[key]
                    yield key, result
            except BrokenProcessPool:
                log.warning(
                    "the helper processes ended early; this one makes the other %d %s", len(left), unit
                )
                self.count, self._pool = 1, None
        for key, job in left.items():
            yield key, job()


def _end_with_parent() -> None:
    """End this helper as soon as its parent ends, even by SIGKILL, which the pool itself does not notice."""

    def wait() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
