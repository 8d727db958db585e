"""Which rows a run will have, in order: they follow from the config, the device and what is installed."""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

from pointproj.benchmark.calls import NOT_COMPILED
from pointproj.benchmark.config import EXECUTIONS, WITH_RMM, BenchConfig
from pointproj.benchmark.contenders import (
    Contender,
    backend_contender,
    backend_names,
    missing_backend,
    peer_contender,
    peer_names,
)
from pointproj.benchmark.peers import PEERS
from pointproj.benchmark.workloads import NETWORK, Workload
from pointproj.config import ConfigError

ONLY_EAGER = ("cupyx KDTree", "jz-tree", "torchbvh")  # no table shows how their networks run compiled


class Entry(NamedTuple):
    """One contender on one workload, why it cannot run here, if so, and what to measure."""

    contender: Contender
    missing: str | None
    measurements: tuple[tuple[str, str], ...]  # (mode, execution)

    @property
    def rows(self) -> int:
        """Rows of results that this makes."""
        return 1 if self.missing else len(self.measurements)


def executions(config: BenchConfig, device_type: str) -> tuple[str, ...]:
    """The executions to time, the one with the cheapest set-up first.

    Parameters
    ----------
    config : BenchConfig
    device_type : str
        "cpu" or "cuda".

    Returns
    -------
    tuple of str

    Raises
    ------
    ConfigError
        If the config asks for captured calls on another device than CUDA.
    """
    if config.execution is None:
        return EXECUTIONS if device_type == "cuda" and config.gpu_memory == "torch" else EXECUTIONS[:2]
    if device_type != "cuda" and "captured" in config.execution:
        raise ConfigError(f"execution: captured needs a CUDA device, and this runs on {device_type}")
    return tuple(execution for execution in EXECUTIONS if execution in config.execution)


def entries(config: BenchConfig, workload: Workload, device_type: str) -> Iterator[Entry]:
    """All contenders of a workload, also those that cannot run here.

    Parameters
    ----------
    config : BenchConfig
    workload : Workload
    device_type : str
        "cpu" or "cuda".

    Yields
    ------
    Entry
    """
    for contender, missing in _contenders(config, workload, device_type):
        if config.gpu_memory == "rmm":
            contender = dataclasses.replace(contender, name=f"{contender.name}{WITH_RMM}")
        measurements = tuple(_measurements(contender, config, workload, device_type))
        if measurements:
            yield Entry(contender, missing, measurements)


def _contenders(
    config: BenchConfig, workload: Workload, device_type: str
) -> Iterator[tuple[Contender, str | None]]:
    """Each with the reason why it cannot run here, if there is one."""
    for name in backend_names(config.backends, workload.operator):
        missing = missing_backend(name, device_type, workload.operator)
        yield backend_contender(name, workload), missing
    chosen = peer_names(config.peers) if workload.with_peers else ()
    for peer in PEERS:
        if peer.name in chosen and peer.operator == workload.operator and device_type in peer.devices:
            yield peer_contender(peer, workload), peer.missing()


def _worth_a_row(contender: Contender, workload: Workload, mode: str) -> tuple[str, ...]:
    """Executions that say what no other row says; the others are measured only if the config names them.

    Where most of the time is the device's, or the call waits for it, a compiled or captured call takes as
    long as an eager one; of networks the tutorial shows both.
    """
    if workload.host:
        return () if contender.brute_force and workload.name == "host_w1" else ("eager",)
    if contender.kind == "peer" or "captured" not in contender.executions:
        both = mode in NETWORK and workload.executions == EXECUTIONS and contender.name not in ONLY_EAGER
        return ("eager", "compiled") if both else ("eager",)
    if contender.brute_force:
        return () if mode == "gradients" else ("eager",)
    return workload.fewer.get(mode, workload.executions)


def _measurements(
    contender: Contender, config: BenchConfig, workload: Workload, device_type: str
) -> Iterator[tuple[str, str]]:
    for mode in contender.modes:
        if mode not in config.modes:
            continue
        wanted = _worth_a_row(contender, workload, mode) if config.execution is None else config.execution
        for execution in executions(config, device_type):
            # The compiler does not look into a peer's search: only the network around it gains anything.
            nothing_to_compile = mode in NOT_COMPILED or (contender.kind == "peer" and mode not in NETWORK)
            if execution == "compiled" and nothing_to_compile:
                continue
            if workload.host and execution != "eager":
                continue
            if execution in wanted and execution in contender.executions:
                yield mode, execution
