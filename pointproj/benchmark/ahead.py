"""What rows compile, compiled before they are measured: by several processes at once, for the caches on disk.

One after the other, the kernels of ``triton``, the compiled networks and the libraries that compile
themselves would take more than two of the minutes of a run. No row's time contains any of it. A run that
finds its code compiled leaves this out.
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
from itertools import islice
from pathlib import Path

import torch
from torch._inductor.runtime.cache_dir_utils import cache_dir

from pointproj.benchmark.calls import Calls
from pointproj.benchmark.config import BenchConfig
from pointproj.benchmark.contenders import Entry, entries
from pointproj.benchmark.display import Display
from pointproj.benchmark.workloads import NETWORK, SIZES, workloads
from pointproj.ops.bridge.compiler_cache import fingerprint
from pointproj.runtime.memory import empty_cache

log = logging.getLogger(__name__)

FEWEST_JOBS = 12  # for fewer it takes longer to start the processes
MOST_PROCESSES = 12
LONGEST_S = 120  # then the rows compile what is left
MOST_POINTS = 10**6  # larger clouds run the same kernels, and take longer to be made
SAME_KERNELS = ("scaling_clustered", "scaling_surface", "lists_surface", "lists_crystal")  # as other clouds
COMPILE_THEMSELVES = ("torchbvh", "KeOps")  # peers, when they are first called

Job = partial[None]


def compile_ahead(config: BenchConfig, device: torch.device, display: Display) -> None:
    """Call once what the rows will call, in several processes.

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
    sizes = [size for size in config.sizes or SIZES[device_type] if size <= MOST_POINTS]
    small = dataclasses.replace(config, sizes=[max(sizes, default=MOST_POINTS)])
    made: list[tuple[tuple[bool, bool], Job]] = []
    for number, workload in enumerate(workloads(small, device_type)):
        if workload.name in SAME_KERNELS:
            continue
        for place, entry in enumerate(entries(small, workload, device_type)):
            for compiles, modes in _modes(entry):
                order = entry.contender.name not in ("triton", *COMPILE_THEMSELVES), not compiles
                made.append((order, partial(_call_rows, small, device, number, place, modes)))
    return [job for _, job in sorted(made, key=lambda item: item[0])]


def _modes(entry: Entry) -> list[tuple[bool, tuple[str, ...]]]:
    """The modes in groups that share what they compile, and whether torch.compile does."""
    contender = entry.contender
    if contender.missing or (contender.brute_force and contender.name not in COMPILE_THEMSELVES):
        return []
    if contender.kind == "peer":
        return [(True, ("knn",))] if contender.name in COMPILE_THEMSELVES and "knn" in contender.find else []
    compiled = {mode for mode, execution in entry.measurements if execution == "compiled" or mode in NETWORK}
    others = tuple(dict.fromkeys(mode for mode, _ in entry.measurements if mode not in compiled))
    return [*((True, (mode,)) for mode in sorted(compiled)), *([(False, others)] if others else [])]


def _call_rows(config: BenchConfig, device: str, number: int, place: int, modes: tuple[str, ...]) -> None:
    """Call what rows of one workload and contender measure."""
    of = torch.device(device)
    workload = next(islice(workloads(config, of.type), number, None))
    entry = next(islice(entries(config, workload, of.type), place, None))
    calls = Calls(entry.contender, workload.question(of))
    for mode, execution in entry.measurements:
        with suppress(Exception):  # the row itself will say so
            if mode in modes:
                calls.make(mode, execution)()
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
