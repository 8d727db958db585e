"""The workloads ``start`` and ``import``: how long a new process takes until it is ready for work.

``start`` trains until the first step has ended. A ``cold`` run finds neither compiled code nor prepared data;
a ``warm`` run finds what the cold one left. The operating system's cache of files and the built ``native``
extension are the same in both. ``import`` is ``from pointproj import knn``, after torch was imported.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

from pointproj.benchmark.config import BenchConfig
from pointproj.benchmark.recorder import Part, one_row
from pointproj.benchmark.timing import percentiles
from pointproj.machine import PROJECT

TIMEOUT_S = 300
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "WARP_CACHE_PATH")
Seconds = dict[str, list[float]]  # of each mode
NO_CLOUD = {"queries": 0, "references": 0, "clouds": 0, "channels": 0, "dtype": ""}
IMPORTS = 3
IMPORT_PROGRAM = """
import time
import torch
before = time.perf_counter()
from pointproj import knn
print(time.perf_counter() - before)
"""
# Arguments of train.py, with {folder} for data, and the modes that are rows. Pictures are drawn after the
# first step, so no row's time includes them.
JOBS = {
    "tutorial_knn": (("experiment=tutorial_knn", "backend=warp", "compile=true"), ("first_step", "whole")),
    "default": (
        ("training.epochs=1", "data.root={folder}/data", "data.cache={folder}/cache", "training.pictures=0"),
        ("first_step",),
    ),
}


def parts(config: BenchConfig, device_type: str) -> Iterator[Part]:
    """A part for each row: of each job the cold ones, then the warm ones."""
    for name, (arguments, modes) in JOBS.items():
        of = {
            "workload": "start",
            "implementation": name,
            "note": f"python train.py {' '.join(arguments[:3])}",
        }
        folder = TemporaryDirectory()  # until the last part is gone
        for execution in ("cold", "warm"):
            seconds = cache(partial(run_seconds, arguments, device_type, folder))
            for mode in modes:
                yield from _row(config, seconds, mode=mode, execution=execution, **of)


def import_parts(config: BenchConfig, device_type: str) -> Iterator[Part]:
    """One part: the import, in new processes. The first one fills the disk's cache and is left out."""
    once = lambda: float(last_line_of(["-c", IMPORT_PROGRAM]))  # noqa: E731
    seconds = lambda: {"import": [once() for _ in range(1 + IMPORTS)][1:]}  # noqa: E731
    yield from _row(config, seconds, workload="import", implementation="pointproj", mode="import")


def _row(config: BenchConfig, seconds: Callable[[], Seconds], **columns: Any) -> Iterator[Part]:
    measured = lambda _, blank: replace(blank, **percentiles(seconds()[blank.mode], 1)._asdict())  # noqa: E731
    return one_row(config, measured, TIMEOUT_S, operator=columns["workload"], **NO_CLOUD, **columns)


def last_line_of(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """The last line that this Python prints with these arguments, run in the project's folder.

    RuntimeError with the last line of what it wrote to standard error if it failed, and TimeoutExpired.
    """
    settings = {"cwd": PROJECT, "env": environment, "timeout": TIMEOUT_S, "stdin": subprocess.DEVNULL}
    ended = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, **settings)
    if ended.returncode != 0:
        output = ended.stderr.strip() or ended.stdout.strip() or f"exit status {ended.returncode}"
        raise RuntimeError(f"the process failed: {output.splitlines()[-1]}")
    return ended.stdout.strip().rpartition("\n")[2]


def run_seconds(arguments: Sequence[str], device_type: str, shared: TemporaryDirectory) -> Seconds:
    """Train in a new process with all caches in a folder; errors are those of :func:`last_line_of`.

    Seconds from the start of the process to the end of the first step, and to its own end.
    """
    folder = Path(shared.name)
    run_folder = Path(mkdtemp(dir=folder))
    chosen = [argument.format(folder=folder) for argument in arguments]
    caches = {name: str(folder / name) for name in CACHES}
    started, before = time.time(), time.monotonic()
    command = ["train.py", *chosen, f"device={device_type}", f"hydra.run.dir={run_folder}"]
    last_line_of(command, {**os.environ, **caches})
    whole = time.monotonic() - before
    first = json.loads((run_folder / "metrics.json").read_text(encoding="utf-8"))["first_step_ended"]
    return {"first_step": [first - started], "whole": [whole]}
