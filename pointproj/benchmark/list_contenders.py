"""Who gives lists of neighbours in the workload ``lists``, and how: our backends, and other libraries."""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pointproj
from pointproj.benchmark.config import EXECUTIONS, BenchConfig
from pointproj.benchmark.contenders import backend_names, missing_backend, peer_names
from pointproj.benchmark.list_peers import LIST_PEERS, ListPeer, Pairs, Question, padded_pairs
from pointproj.machine import package_version
from pointproj.ops.registry import waits

SUMS = ("aggregate_padded", "aggregate_csr")


@dataclass(frozen=True)
class ListContender:
    """One of our backends, or a peer, in one mode."""

    name: str
    kind: str  # backend | peer
    mode: str
    package: str
    executions: tuple[str, ...]
    missing: str | None
    search: Callable[[Question], Any]  # for aggregation, what makes the ready list
    read: Callable[[Any], Pairs]
    returns: str = ""
    nearest: bool = True
    itself: bool = True
    brute_force: bool = False  # time grows with queries times references


def list_contenders(config: BenchConfig, device_type: str, modes: tuple[str, ...]) -> Iterator[ListContender]:
    """All contenders in these modes, as far as the config asks for them, also those that cannot run here."""
    for mode in modes:
        if mode not in config.modes:
            continue
        if mode in SUMS:
            yield from _aggregation(config, mode)
            continue
        for name in backend_names(config.backends, "radius"):
            yield _backend(name, mode, missing_backend(name, device_type, "radius"))
        chosen = peer_names(config.peers)
        for peer in LIST_PEERS:
            if peer.mode == mode and peer.name in chosen and device_type in peer.devices:
                yield _peer(peer)


def _aggregation(config: BenchConfig, mode: str) -> Iterator[ListContender]:
    """Over a ready list, which is the same from every backend; of plain torch."""
    finders = ["auto"] if config.backends is None else backend_names(config.backends, "radius")
    for finder in sorted(finders, key=lambda name: name == "torch")[:1]:  # torch only if there is no other
        contender = _backend(finder, mode.removeprefix("aggregate_"), None)
        yield dataclasses.replace(contender, name="pointproj", mode=mode, executions=EXECUTIONS)


def _backend(name: str, mode: str, missing: str | None) -> ListContender:
    search, read = _OURS[mode]
    executions = EXECUTIONS[:2] if name != "auto" and waits(name) else EXECUTIONS
    return ListContender(
        *(name, "backend", mode, package_version("pointproj"), executions, missing),
        search=lambda asked: search(asked, name),
        read=read,
        brute_force=name == "torch",
    )


def _peer(peer: ListPeer) -> ListContender:
    return ListContender(
        *(peer.name, "peer", peer.mode, package_version(peer.distribution), ("eager",), peer.missing()),
        search=peer.function,
        read=peer.read,
        returns=peer.returns,
        nearest=peer.nearest,
        itself=peer.itself,
    )


def _padded(asked: Question, backend: str) -> pointproj.Neighbors:
    points = asked.query_points, asked.reference_points
    return pointproj.radius_neighbors(*points, asked.radius, max_neighbors=asked.k, backend=backend)


def _csr(asked: Question, backend: str) -> pointproj.NeighborList:
    points = asked.query_points, asked.reference_points
    return pointproj.radius_neighbors(*points, asked.radius, capacity=asked.capacity, backend=backend)


def _read_padded(found: pointproj.Neighbors) -> Pairs:
    return padded_pairs(found.indices, found.indices >= 0, found.distances, found.counts)


def _read_csr(found: pointproj.NeighborList) -> Pairs:
    used = found.indices >= 0
    counts = found.row_splits.diff()
    return Pairs(found.query_indices[used], found.indices[used], found.distances[used], counts)


_OURS = {"padded": (_padded, _read_padded), "csr": (_csr, _read_csr)}
