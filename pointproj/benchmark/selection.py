"""Which backends and peers a workload measures, and in which modes and executions."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from torch import Tensor

import pointproj
from pointproj.benchmark import peers
from pointproj.benchmark.config import EXECUTIONS, LIST_SUMS, LISTS, NETWORK, BenchConfig, unknown
from pointproj.benchmark.implementations import (
    PAIRS_PER_SECOND,
    FoundPairs,
    Implementation,
    Nearest,
    padded_pairs,
)
from pointproj.benchmark.workloads import HEADS, Inputs, Workload
from pointproj.config import ConfigError
from pointproj.ops.backends import BackendUnavailable
from pointproj.ops.registry import load, names, resolve

NOT_COMPILED = ("build", "search")  # modes
FIRST = ("native", "warp", "tutorial torch", "cuML", "PhysicsNeMo")  # those in README's table
SLOW = {("scaling_clustered", name) for name in ("warp", "triton", "cuml")}  # minutes on a GPU: come last


class Entry(NamedTuple):
    """One implementation on one workload, and what to measure: (mode, execution) of each row."""

    implementation: Implementation
    measurements: tuple[tuple[str, str], ...]


def backend_names(wanted: list[str] | None, operator: str | None = None) -> list[str]:
    """The wanted backends (None: all) that have an operator; ConfigError for an unknown name."""
    chosen = _chosen("backends", wanted, names())
    return [name for name in chosen if operator is None or operator in load(name).OPERATORS]


def peer_names(wanted: list[str] | None) -> list[str]:
    """The wanted peers (None: all); ConfigError for an unknown name."""
    return _chosen("peers", wanted, dict.fromkeys(peer.name for peer in peers.PEERS))


def _chosen(key: str, wanted: list[str] | None, known: Iterable[str]) -> list[str]:
    if problems := [*unknown(key, wanted or (), tuple(known))]:
        raise ConfigError("\n".join(problems))
    return [*known] if wanted is None else wanted


def executions(config: BenchConfig, device_type: str) -> tuple[str, ...]:
    """The executions to time on a type of device, cheap ones first; ConfigError for captured on a CPU."""
    if config.execution is None:
        # RMM is set up in one of two ways: for graphs only if captured is asked for.
        return EXECUTIONS if device_type == "cuda" and config.gpu_memory == "torch" else EXECUTIONS[:2]
    if device_type != "cuda" and "captured" in config.execution:
        raise ConfigError(f"execution: captured needs a CUDA device, and this runs on {device_type}")
    return tuple(execution for execution in EXECUTIONS if execution in config.execution)


def missing_backend(name: str, device_type: str, operator: str) -> str | None:
    """Why a backend cannot be measured here, or None."""
    try:
        resolve(name, device_type, operator)
    except BackendUnavailable as reason:
        return str(reason)
    return None


def entries(config: BenchConfig, workload: Workload, device_type: str) -> Iterator[Entry]:
    """All implementations of a workload, also those that cannot run on this device; :data:`FIRST` first."""
    made = [*_implementations(config, workload, device_type)]
    for implementation in sorted(made, key=lambda of: (*FIRST, of.name).index(of.name)):
        measurements = tuple(
            (mode, execution)
            for mode in workload.modes
            if mode in implementation.modes and mode in config.modes
            for execution in _executions(implementation, config, workload, mode, device_type)
        )
        if measurements:
            yield Entry(implementation, measurements)


def _implementations(config: BenchConfig, workload: Workload, device_type: str) -> Iterator[Implementation]:
    chosen = backend_names(config.backends, workload.operator)
    operator = "lists" if {*workload.modes} <= {*LISTS, *LIST_SUMS} else workload.operator
    for name in chosen:
        made = backend_implementation(name, workload)
        yield replace(made, missing=missing_backend(name, device_type, operator))
    known = peer_names(config.peers)
    for peer in peers.PEERS:
        takes_it = workload.peers == "all" or (workload.peers == "batched" and peer.batched)
        wanted = peer.operator == workload.operator and {*peer.modes} & {*workload.modes}
        if peer.name in known and device_type in peer.devices and takes_it and wanted:
            yield replace(peer, missing=peer.not_installed())
    # All backends share the function that aggregates over ready lists.
    if {*LIST_SUMS} <= {*workload.modes} and config.backends != []:
        finder = "auto" if config.backends is None else next((n for n in chosen if n != "torch"), "torch")
        given = {"name": "pointproj", "modes": LIST_SUMS, "executions": EXECUTIONS, "brute_force": {}}
        yield replace(backend_implementation(finder, workload), **given)


def backend_implementation(name: str, workload: Workload) -> Implementation:
    """One of our backends on a workload."""
    brute_force = name == "torch" and workload.operator in ("knn", "radius")  # it has no index to build
    without = LIST_SUMS + (NOT_COMPILED if brute_force else ())
    build, knn = partial(pointproj.build_index, backend=name), partial(pointproj.knn, backend=name)
    lists = partial(pointproj.radius_neighbors, backend=name)

    def aggregate(inputs: Inputs, *tensors: Tensor) -> Tensor:
        if workload.operator == "attend":
            return pointproj.attend(*tensors, inputs.neighbors, heads=HEADS, backend=name)
        options = {"sigma": inputs.sigma, "backend": name, **inputs.problem.offsets}
        if workload.operator == "knn":
            return pointproj.knn_aggregate(*inputs.points, *tensors, inputs.k, **options)
        return pointproj.radius_aggregate(*inputs.points, *tensors, inputs.radius, **options)

    find = {
        "build": lambda of: build(
            of.points[1], radius=of.radius, reference_offsets=of.problem.reference_offsets
        ),
        "knn": lambda of, index=None: Nearest(*knn(*of.points, of.k, index=index, **of.problem.offsets)),
        "padded": lambda of: lists(*of.points, of.radius, max_neighbors=of.k),
        "csr": lambda of: lists(*of.points, of.radius, capacity=of.capacity),
        "farthest": lambda of: pointproj.farthest_points(of.points[0], of.k, backend=name),
    }
    return Implementation(
        name=name,
        kind="backend",
        package="pointproj",
        operator=workload.operator,
        modes=tuple(mode for mode in workload.modes if mode not in without),
        executions=EXECUTIONS[:2] if name != "auto" and load(name).WAITS else EXECUTIONS,
        find=find,
        aggregate=aggregate,
        brute_force=PAIRS_PER_SECOND if brute_force else {},
        read=_read,
    )


def _read(found: pointproj.Neighbors | pointproj.NeighborList) -> FoundPairs:
    """The pairs of our list."""
    used = found.indices >= 0
    if isinstance(found, pointproj.Neighbors):
        return padded_pairs(found.indices, used, found.distances, found.counts)
    counts = found.row_splits.diff()
    return FoundPairs(found.query_indices[used], found.indices[used], found.distances[used], counts)


def _executions(
    implementation: Implementation, config: BenchConfig, workload: Workload, mode: str, device_type: str
) -> Iterator[str]:
    """The executions of a mode to measure: all possible ones that the config names.

    If the config names none, those that add information: where the device takes most of the time, or the call
    waits for it, a compiled or captured call takes as long as an eager one. Networks of peers are measured
    eager and compiled, as in the tutorial.
    """
    possible = {*implementation.executions} & {*(EXECUTIONS[:1] if workload.host else EXECUTIONS)}
    ours, attends = implementation.kind == "backend", workload.operator == "attend"
    if mode in NOT_COMPILED or not (ours or attends or mode in NETWORK):
        possible -= {"compiled"}  # the compiler changes nothing in a library's search
    if config.execution is None:
        useful = workload.fewer.get(mode, workload.executions)
        if ours and device_type in implementation.brute_force:
            useful = () if mode in ("gradients", "second") or workload.name == "host_w1" else EXECUTIONS[:1]
        elif not ours or "captured" not in implementation.executions:
            both = attends or (workload.executions == EXECUTIONS and mode in NETWORK)
            useful = EXECUTIONS[:2] if both else EXECUTIONS[:1]
        possible &= {*useful}
    return (execution for execution in executions(config, device_type) if execution in possible)
