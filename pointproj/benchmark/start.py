"""The workload ``start``: how long a training run takes until its first step has ended, in a new process.

``cold`` finds no compiled code and no prepared data, ``warm`` what the cold run left. What the operating
system keeps of files, and the ``native`` extension where it is built, are the same in both.
"""

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import NamedTuple

from pointproj.benchmark.config import BenchConfig
from pointproj.benchmark.recorder import Recorder, with_time, without_time
from pointproj.benchmark.results import Row
from pointproj.benchmark.timing import percentiles
from pointproj.machine import PROJECT, package_version

TIMEOUT_S = 300
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "WARP_CACHE_PATH")
STARTS = ("cold", "warm")  # in this order: the second finds what the first left
MODES = ("first_step", "whole")


class Job(NamedTuple):
    """A training run; ``{folder}`` is where it may keep data."""

    arguments: tuple[str, ...]
    modes: tuple[str, ...]


JOBS = {
    "tutorial_knn": Job(("experiment=tutorial_knn", "backend=warp", "compile=true"), MODES),
    "default": Job(
        (
            *("training.epochs=1", "data.root={folder}/data", "data.cache={folder}/cache"),
            "training.pictures=0",  # after the first step, and no row's time
        ),
        MODES[:1],
    ),
}


def planned(config: BenchConfig, device_type: str) -> list[tuple[str, str, str]]:
    """(job, mode, start) of each row."""
    if "start" not in config.workloads or config.execution is not None:
        return []
    return [
        (name, mode, start)
        for name, job in JOBS.items()
        for start in STARTS
        for mode in job.modes
        if mode in config.modes
    ]


def measure(recorder: Recorder, rows: list[tuple[str, str, str]]) -> None:
    """Run each job cold and then warm, and add the planned rows."""
    for name in dict.fromkeys(name for name, _, _ in rows):
        with TemporaryDirectory() as folder:
            for start in STARTS:
                blanks = [
                    _blank(recorder, name, mode, start)
                    for job, mode, of in rows
                    if (job, of) == (name, start)
                ]
                for row in _measured(recorder, JOBS[name], blanks, Path(folder)):
                    recorder.add(row)


def _measured(recorder: Recorder, job: Job, blanks: list[Row], folder: Path) -> list[Row]:
    if not blanks:
        return []
    recorder.display.doing(blanks[0])
    try:
        recorder.projection.check_clock()
        seconds = run_seconds(job.arguments, recorder.device.type, folder)
    except Exception as reason:
        return [without_time(blank, reason) for blank in blanks]
    return [with_time(blank, percentiles([seconds[blank.mode]], 1)) for blank in blanks]


def run_seconds(arguments: tuple[str, ...], device_type: str, folder: Path) -> dict[str, float]:
    """Train in a new process with all caches below ``folder``.

    Returns
    -------
    dict
        Seconds from the start of the process to the end of the first step, and to its own end.

    Raises
    ------
    RuntimeError
        With the last line of what the process wrote, if it failed.
    """
    run = Path(mkdtemp(dir=folder))
    chosen = [argument.format(folder=folder) for argument in arguments]
    command = [sys.executable, "train.py", *chosen, f"device={device_type}", f"hydra.run.dir={run}"]
    caches = {name: str(folder / name) for name in CACHES}
    started, before = time.time(), time.monotonic()
    ended = subprocess.run(
        command, cwd=PROJECT, env={**os.environ, **caches}, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    whole = time.monotonic() - before
    if ended.returncode != 0:
        reason = (ended.stderr or ended.stdout).strip().splitlines() or [f"exit status {ended.returncode}"]
        raise RuntimeError(f"the run failed: {reason[-1]}")
    first = json.loads((run / "metrics.json").read_text(encoding="utf-8"))["first_step_ended"]
    return {"first_step": first - started, "whole": whole}


def _blank(recorder: Recorder, job: str, mode: str, start: str) -> Row:
    row = Row(
        **{"workload": "start", "operator": "start", "contender": job, "kind": "backend"},
        **{"mode": mode, "execution": start, "queries": 0, "references": 0, "clouds": 0},
        **{"channels": 0, "dtype": "", "package": package_version("pointproj")},
        **recorder.machine,
    )
    return dataclasses.replace(row, note=f"python train.py {' '.join(JOBS[job].arguments[:3])}")
