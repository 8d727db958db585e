"""The typed config of ``bench.py`` and the checks that need no device. No torch here."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from omegaconf import OmegaConf

from pointproj.config import ConfigError, nearest, register

WORKLOADS = (  # first those that README shows; of the others, what takes long comes last
    *("w1", "w2", "w2_wide", "scaling", "lists", "cfd", "attend", "large"),
    *("host", "batches", "import", "farthest", "gino", "geotransolver", "start"),
)
SEARCH = ("build", "search", "knn")
SUMS = ("aggregate", "operator", "gradients", "second")
NETWORK = ("forward", "step")
LISTS = ("padded", "csr")
LIST_SUMS = ("aggregate_padded", "aggregate_csr")
OF_LISTS = (*LISTS, *LIST_SUMS)
MODES = (*SEARCH, *SUMS, *NETWORK, *OF_LISTS, "farthest", "import", "first_step", "whole")
EXECUTIONS = ("eager", "compiled", "captured")
DEVICES = ("auto", "cpu", "cuda")
ALLOCATORS = ("torch", "rmm")
WITH_RMM = " + RMM"  # ends the name of an implementation whose GPU memory RMM allocates


@dataclass
class BenchConfig:
    """What is measured, where, for how long, and where the results go (``conf/bench.yaml``)."""

    workloads: list[str] = field(default_factory=lambda: list(WORKLOADS))  # measured in this order
    modes: list[str] = field(default_factory=lambda: list(MODES))
    execution: list[str] | None = None  # null: those of the workload that the device can run
    backends: list[str] | None = None  # null: all of pointproj.backends
    peers: list[str] | None = None  # null: all; []: none; names are those in the results
    device: str = "auto"  # auto | cpu | cuda
    gpu_memory: str = "torch"  # torch | rmm: what allocates it; with rmm, names end in "+ RMM"
    sizes: list[int] | None = None  # of scaling, lists, cfd, attend; null: those in workloads.py
    budget_s: float = 0.1  # seconds of repetitions per row
    slowest_call_s: float = 2.0  # a longer call is skipped: a row without a time
    minutes: float = 8.0  # after this long no row is begun
    started: str | None = None  # date of an interrupted run to continue; null: a new run
    output: str | None = None  # CSV file; null: benchmarks/<device>.csv


def register_schema() -> None:
    """Make :class:`BenchConfig` known to Hydra as ``bench_schema``."""
    register({"bench_schema": BenchConfig})


def to_bench_config(composed: Any) -> BenchConfig:
    """Turn what Hydra composed into a checked :class:`BenchConfig`.

    Raises ConfigError with every wrong value, what was expected, and a similar known name.
    """
    config = OmegaConf.to_object(composed)
    problems = [*_problems(config)]
    if problems:
        raise ConfigError("\n".join(problems))
    return config


def unknown(key: str, values: Iterable[str], known: tuple[str, ...]) -> Iterator[str]:
    """A sentence for each unknown value: what was expected, what was given, and a similar known name."""
    for value in values:
        if value not in known:
            yield f"{key}: expected some of {', '.join(known)}; got {value}{nearest(value, known)}"


def _problems(config: BenchConfig) -> Iterator[str]:
    yield from unknown("workloads", config.workloads, WORKLOADS)
    yield from unknown("modes", config.modes, MODES)
    yield from unknown("execution", config.execution or (), EXECUTIONS)
    yield from unknown("device", [config.device], DEVICES)
    yield from unknown("gpu_memory", [config.gpu_memory], ALLOCATORS)
    for key in ("workloads", "modes", "execution", "backends", "sizes"):
        if getattr(config, key) == [] and not (key == "backends" and config.peers != []):
            yield f"{key}=[]: expected at least one"
    for size in config.sizes or ():
        if size < 100:
            yield f"sizes: expected whole numbers of at least 100 points, got {size}"
    for key in ("budget_s", "slowest_call_s", "minutes"):
        value = getattr(config, key)
        if not 0 < value < math.inf:
            yield f"{key}={value}: expected a finite number above 0"
