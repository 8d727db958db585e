"""Which rows a run will have, in order: fixed by the config, the device and what is registered."""

from collections.abc import Iterator
from typing import NamedTuple

from pointproj.benchmark import interop
from pointproj.benchmark.calls import NOT_COMPILED
from pointproj.benchmark.config import EXECUTIONS, BenchConfig
from pointproj.benchmark.contenders import (
    Contender,
    backend_contender,
    backend_names,
    missing_backend,
    peer_contender,
    peer_names,
)
from pointproj.benchmark.peers import PEERS, Peer
from pointproj.benchmark.workloads import Workload
from pointproj.config import ConfigError


class Entry(NamedTuple):
    """One contender on one workload: how to make it, or why it cannot run, and what to measure."""

    name: str
    kind: str
    contender: Contender | None
    missing: str | None
    measurements: tuple[tuple[str, str], ...]  # (mode, execution)


def executions(config: BenchConfig, device_type: str) -> tuple[str, ...]:
    """The executions to time, cheapest set-up first."""
    if config.execution is None:
        return EXECUTIONS if device_type == "cuda" else EXECUTIONS[:2]
    if device_type != "cuda" and "captured" in config.execution:
        raise ConfigError(f"execution: captured needs a CUDA device, and this runs on {device_type}")
    return tuple(execution for execution in EXECUTIONS if execution in config.execution)


def entries(config: BenchConfig, workload: Workload, device_type: str) -> Iterator[Entry]:
    """Everybody who takes part in a workload; those that cannot run here have nothing to measure."""
    for name in backend_names(config.backends):
        missing = missing_backend(name, device_type, workload.operator)
        contender = None if missing else backend_contender(name, workload)
        yield _entry(name, "backend", contender, missing, config, device_type)
    if not workload.single:
        return
    for peer in _peers(config, workload, device_type):
        missing = peer.missing()
        contender = None if missing else peer_contender(peer, workload)
        yield _entry(peer.name, "peer", contender, missing, config, device_type)


def ways(config: BenchConfig) -> Iterator[tuple[str, str]]:
    """(name, kind) of what takes part in the interop workload."""
    chosen = {"backend": True, "peer": config.peers != []}
    return ((name, kind) for name, (kind, _) in interop.WAYS.items() if chosen[kind])


def _entry(
    name: str,
    kind: str,
    contender: Contender | None,
    missing: str | None,
    config: BenchConfig,
    device_type: str,
) -> Entry:
    measurements = () if contender is None else tuple(_measurements(contender, config, device_type))
    return Entry(name, kind, contender, missing, measurements)


def _measurements(contender: Contender, config: BenchConfig, device_type: str) -> Iterator[tuple[str, str]]:
    for mode in contender.modes:
        if mode not in config.modes:
            continue
        for execution in executions(config, device_type):
            nothing_to_compile = mode in NOT_COMPILED or (contender.kind == "peer" and mode == "knn")
            if execution == "compiled" and nothing_to_compile:
                continue
            if execution in contender.executions:
                yield mode, execution


def _peers(config: BenchConfig, workload: Workload, device_type: str) -> Iterator[Peer]:
    chosen = peer_names(config.peers)
    for peer in PEERS:
        if peer.name in chosen and peer.operator == workload.operator and device_type in peer.devices:
            yield peer
