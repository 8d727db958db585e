"""The workloads ``start`` and ``import``: how long a new process takes until it is ready for work.

``start`` trains until the first step has ended. ``cold`` finds no compiled code and no prepared data,
``warm`` what the cold run left. What the operating system keeps of files, and the ``native`` extension where
it is built, are the same in both. ``import`` is ``from pointproj import knn``, after torch was imported.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp

from pointproj.benchmark.config import EXECUTIONS, BenchConfig
from pointproj.benchmark.recorder import Part, Recorder, one_row, with_time
from pointproj.benchmark.results import Row
from pointproj.benchmark.timing import percentiles
from pointproj.machine import PROJECT

TIMEOUT_S = 300
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "WARP_CACHE_PATH")
STARTS = ("cold", "warm")  # in this order: the second finds what the first left
MODES = ("first_step", "whole")
NOTHING = {"queries": 0, "references": 0, "clouds": 0, "channels": 0, "dtype": ""}
IMPORTS = 3
IMPORT_PROGRAM = """
import time
import torch
before = time.perf_counter()
from pointproj import knn
print(time.perf_counter() - before)
"""
# Arguments of train.py, where {folder} may keep data, and the modes that are rows. Pictures come after a
# first step, and are in no row's time.
JOBS = {
    "tutorial_knn": (("experiment=tutorial_knn", "backend=warp", "compile=true"), MODES),
    "default": (
        ("training.epochs=1", "data.root={folder}/data", "data.cache={folder}/cache", "training.pictures=0"),
        MODES[:1],
    ),
}


def parts(config: BenchConfig, device_type: str) -> Iterator[Part]:
    """A part for each job with its rows, cold and then warm, and one of the import."""
    for name, (_, able) in JOBS.items() if "start" in config.workloads and config.execution is None else ():
        modes = [mode for mode in able if mode in config.modes]
        yield Part(len(STARTS) * len(modes), partial(_start, name=name, modes=modes))
    if {"import"} <= {*config.workloads} & {*config.modes} and "eager" in (config.execution or EXECUTIONS):
        of = {"workload": "import", "operator": "import", "contender": "pointproj", "mode": "import"}
        yield one_row(of | NOTHING, _imported, TIMEOUT_S)


def answer_of(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """The last line that this Python prints with these arguments, run in the project's folder.

    RuntimeError with the last line of what it wrote to standard error if it failed, and TimeoutExpired.
    """
    settings = {"cwd": PROJECT, "env": environment, "timeout": TIMEOUT_S, "stdin": subprocess.DEVNULL}
    ended = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, **settings)
    if ended.returncode != 0:
        said = ended.stderr.strip() or ended.stdout.strip() or f"exit status {ended.returncode}"
        raise RuntimeError(f"the process failed: {said.splitlines()[-1]}")
    return ended.stdout.strip().rpartition("\n")[2]


def _start(recorder: Recorder, name: str, modes: list[str]) -> None:
    arguments, _ = JOBS[name]
    note = f"python train.py {' '.join(arguments[:3])}"
    with TemporaryDirectory() as folder:
        for start in STARTS:
            seconds = cache(partial(run_seconds, arguments, recorder.device.type, Path(folder)))
            for mode in modes:
                of = {"workload": "start", "operator": "start", "contender": name, "mode": mode}
                blank = recorder.blank(**of, **NOTHING, execution=start, note=note)
                measured = lambda row, of=seconds: with_time(row, percentiles([of()[row.mode]], 1))  # noqa: E731
                recorder.record(blank, measured, TIMEOUT_S)


def run_seconds(arguments: Sequence[str], device_type: str, folder: Path) -> dict[str, float]:
    """Train in a new process with all caches below ``folder``; errors are those of :func:`answer_of`.

    Seconds from the start of the process to the end of the first step, and to its own end.
    """
    run = Path(mkdtemp(dir=folder))
    chosen = [argument.format(folder=folder) for argument in arguments]
    caches = {name: str(folder / name) for name in CACHES}
    started, before = time.time(), time.monotonic()
    command = ["train.py", *chosen, f"device={device_type}", f"hydra.run.dir={run}"]
    answer_of(command, {**os.environ, **caches})
    whole = time.monotonic() - before
    first = json.loads((run / "metrics.json").read_text(encoding="utf-8"))["first_step_ended"]
    return {"first_step": first - started, "whole": whole}


def _imported(recorder: Recorder, blank: Row) -> Row:
    """Importing the operators after torch, in new processes, of which the first fills the disk's cache."""
    _, *seconds = [float(answer_of(["-c", IMPORT_PROGRAM])) for _ in range(1 + IMPORTS)]
    return with_time(blank, percentiles(seconds, 1))
