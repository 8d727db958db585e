"""The workload ``import``: how long ``from pointproj import knn`` takes in a new process, after torch."""

import subprocess
import sys

from pointproj.benchmark.config import EXECUTIONS, BenchConfig
from pointproj.benchmark.recorder import Recorder, with_time, without_time
from pointproj.benchmark.results import Row
from pointproj.benchmark.timing import percentiles
from pointproj.machine import PROJECT, package_version

REPETITIONS = 3
TIMEOUT_S = 120
PROGRAM = """
import time
import torch
before = time.perf_counter()
from pointproj import knn
print(time.perf_counter() - before)
"""


def planned(config: BenchConfig, device_type: str) -> list[str]:
    """The mode ``import``, if the config asks for it."""
    wanted = "import" in config.workloads and "eager" in (config.execution or EXECUTIONS)
    return ["import"] if wanted and "import" in config.modes else []


def measure(recorder: Recorder, modes: list[str]) -> None:
    """Add a row for each planned mode."""
    for mode in modes:
        blank = Row(
            **{"workload": "import", "operator": "import", "contender": "pointproj", "kind": "backend"},
            **{"mode": mode, "execution": "eager", "queries": 0, "references": 0, "clouds": 0},
            **{"channels": 0, "dtype": "", "package": package_version("pointproj")},
            **recorder.machine,
        )
        recorder.display.doing(blank)
        try:
            recorder.projection.check_clock()
            _, *seconds = [import_seconds() for _ in range(1 + REPETITIONS)]  # the first fills the disk cache
        except Exception as reason:
            recorder.add(without_time(blank, reason))
        else:
            recorder.add(with_time(blank, percentiles(seconds, 1)))


def import_seconds() -> float:
    """Import the operators in a new process, and return the seconds that this took after torch was imported.

    Raises
    ------
    RuntimeError
        With the last line of what the process wrote, if it failed.
    """
    command = [sys.executable, "-c", PROGRAM]
    answer = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=TIMEOUT_S)
    if answer.returncode != 0:
        reason = answer.stderr.strip().splitlines() or [f"exit status {answer.returncode}"]
        raise RuntimeError(f"the import failed: {reason[-1]}")
    return float(answer.stdout)
