"""What rows compile, compiled before they are measured: by several processes at once, for the caches on disk.

One after the other, the kernels of ``triton`` and the compiled networks alone would take more than two of the
minutes of a run. No row's time contains any of it. A run that finds its code compiled leaves this out.
"""

import dataclasses
import gc
import hashlib
import logging
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from functools import partial
from itertools import groupby, islice
from pathlib import Path

import torch
from torch._inductor.runtime.cache_dir_utils import cache_dir

from pointproj.benchmark import lists
from pointproj.benchmark.calls import calls_for
from pointproj.benchmark.config import BenchConfig
from pointproj.benchmark.contenders import backend_contender
from pointproj.benchmark.display import Display
from pointproj.benchmark.list_contenders import list_contenders
from pointproj.benchmark.plan import Entry, entries
from pointproj.benchmark.workloads import NETWORK, SIZES, workloads
from pointproj.ops.bridge.compiler_cache import fingerprint
from pointproj.runtime.memory import empty_cache

log = logging.getLogger(__name__)

FEWEST_JOBS = 12  # for fewer it takes longer to start the processes
MOST_PROCESSES = 12
LONGEST_S = 90  # then the rows compile what is left
MOST_POINTS = 10**6  # larger clouds run the same kernels, and take longer to be made

OTHER_CLOUDS = ("scaling_clustered", "scaling_surface")  # the same kernels again
LIST_POINTS = 10**5

Job = partial[None]
Measurements = tuple[tuple[str, str], ...]  # (mode, execution)


def compile_ahead(config: BenchConfig, device: torch.device, display: Display) -> None:
    """Call once what the rows of our backends will call, in several processes.

    Parameters
    ----------
    config : BenchConfig
    device : torch.device
        Only for a GPU there is enough to compile.
    display : Display
    """
    processes = min(len(os.sched_getaffinity(0)) - 1, MOST_PROCESSES)
    if device.type != "cuda" or config.gpu_memory != "torch" or processes < 2:
        return
    made = jobs(config, str(device))
    done = Path(cache_dir()) / f"pointproj-ahead-{_digest(made)}"
    if len(made) < FEWEST_JOBS or done.exists():
        return
    started = time.monotonic()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_alone_on_a_core) as pool:
        futures = [pool.submit(job) for job in made]
        try:
            for count, future in enumerate(as_completed(futures, timeout=LONGEST_S), 1):
                display.compiling(count, len(made))
                if future.exception() is not None:  # the row itself will say so
                    log.debug("not compiled ahead: %s", future.exception())
        except TimeoutError:
            log.warning("what rows compile was not compiled ahead within %d s", LONGEST_S)
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.kill()
            return
    done.parent.mkdir(parents=True, exist_ok=True)
    done.touch()
    display.compiled(processes, time.monotonic() - started)


def jobs(config: BenchConfig, device: str) -> list[Job]:
    """What to call: the slowest to compile first.

    Parameters
    ----------
    config : BenchConfig
    device : str

    Returns
    -------
    list of partial
        Each can be pickled, and runs in a process of its own.
    """
    device_type = torch.device(device).type
    made: list[tuple[tuple[bool, bool], Job]] = []
    small = _small(config, device_type)
    for number, workload in enumerate(workloads(small, device_type)):
        if workload.name in OTHER_CLOUDS:
            continue
        for entry in entries(config, workload, device_type):
            name = entry.contender.name
            if entry.missing or entry.contender.kind == "peer" or entry.contender.brute_force:
                continue
            for compiles, measurements in _parts(entry):
                job = partial(_call_rows, small, device, number, name, measurements)
                made.append(((name != "triton", not compiles), job))
    if "lists" in config.workloads:
        for found in list_contenders(config, device_type, lists.SEARCHES):
            if found.kind == "backend" and not found.missing and not found.brute_force:
                job = partial(_search_lists, config, device, found.name, found.mode)
                made.append(((found.name != "triton", True), job))
    return [job for _, job in sorted(made, key=lambda item: item[0])]


def _small(config: BenchConfig, device_type: str) -> BenchConfig:
    sizes = [size for size in config.sizes or SIZES[device_type] if size <= MOST_POINTS]
    return dataclasses.replace(config, sizes=sizes or [MOST_POINTS])


def _parts(entry: Entry) -> list[tuple[bool, Measurements]]:
    """The measurements in groups that share what they compile, and whether torch.compile does."""

    def group(measurement: tuple[str, str]) -> tuple[bool, str]:
        mode, execution = measurement
        compiles = execution == "compiled" or (mode in NETWORK and execution == "captured")
        return compiles, mode if compiles else ""

    ordered = sorted(entry.measurements, key=group)
    return [(key[0], tuple(measurements)) for key, measurements in groupby(ordered, key=group)]


def _call_rows(
    config: BenchConfig, device: str, number: int, backend: str, measurements: Measurements
) -> None:
    """Call what rows of one workload measure."""
    workload = next(islice(workloads(config, torch.device(device).type), number, None))
    contender, problem = backend_contender(backend, workload), workload.problem(torch.device(device))
    for mode, execution in measurements:
        with suppress(Exception):  # the row itself will say so
            calls_for(mode, contender, problem).make(mode, execution)()
    _forget()


def _search_lists(config: BenchConfig, device: str, backend: str, mode: str) -> None:
    """Call what rows of ``lists`` measure."""
    asked = lists.question(lists.UNIFORM, LIST_POINTS, torch.device(device))[0]
    device_type = torch.device(device).type
    for contender in list_contenders(config, device_type, (mode,)):
        if contender.name == backend:
            contender.search(asked)
    _forget()


def _forget() -> None:
    torch.compiler.reset()
    gc.collect()
    empty_cache()


def _alone_on_a_core() -> None:
    """Leave the other cores to the other processes."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    torch.set_num_threads(1)


def _digest(made: list[Job]) -> str:
    """What the caches then hold: which code, for which calls, on which GPU."""
    known = fingerprint(), torch.__version__, torch.cuda.get_device_name(), [job.args[1:] for job in made]
    return hashlib.sha256(repr(known).encode()).hexdigest()[:16]
