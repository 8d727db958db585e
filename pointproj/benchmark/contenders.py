"""Who is measured: our backends and other libraries behind one interface, and which rows each has."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

import pointproj
from pointproj.benchmark import libraries, peers
from pointproj.benchmark.config import EXECUTIONS, WITH_RMM, BenchConfig, unknown
from pointproj.benchmark.peers import Nearest, Pairs, Peer, gather_aggregate, padded_pairs
from pointproj.benchmark.workloads import LIST_SUMS, NETWORK, Question, Workload
from pointproj.config import ConfigError
from pointproj.nn.projector import Projector
from pointproj.ops.registry import BackendUnavailable, load, names, resolve, waits

HIDDEN = 25
BACKEND_TOLERANCE = 1e-4  # fp32 sums in another order
PEER_TOLERANCE = 1e-3
PEER_SUMS_TOLERANCE = 5e-2  # their neighbours are checked too: of two equally far they may take the other
NOT_COMPILED = ("build", "search")
ONLY_EAGER = ("cupyx KDTree", "jz-tree", "torchbvh")  # no table shows how their networks run compiled


@dataclass(frozen=True)
class Contender:
    """What the benchmark calls.

    Each function returns all that a user's call returns. What a compiled function leaves out, the compiler
    does not compute: a time of half the results would be of half the work.
    """

    name: str
    kind: str  # backend | peer
    package: str
    modes: tuple[str, ...]
    executions: tuple[str, ...]
    find: Mapping[str, Callable[..., Any]]  # of a question; "build" and "search" (with an index) too
    aggregate: Callable[..., Tensor] | None = (
        None  # of a question, its features, and where gradients go, sigma
    )
    network: Callable[[], nn.Module] | None = None
    missing: str | None = None  # why it cannot run here
    search_tolerance: float = BACKEND_TOLERANCE
    sums_tolerance: float = BACKEND_TOLERANCE
    brute_force: bool = False  # time grows with queries times references
    bytes_per_pair: float = 0.0  # memory that grows so as well; 0 if bounded
    read: Mapping[str, Callable[[Any], Pairs]] = field(default_factory=dict)  # lists, by mode
    returns: str = ""  # what a list is, where that is something else than ours
    nearest: bool = True
    itself: bool = True

    @property
    def forward(self) -> Callable[[Question], Any]:
        """A call whose time says how long the others may take."""
        found = next((self.find[mode] for mode in ("knn", "padded", "csr") if mode in self.modes), None)
        return found or (lambda question: self.aggregate(question, question.problem.features))


class Entry(NamedTuple):
    """One contender on one workload, and what to measure."""

    contender: Contender
    measurements: tuple[tuple[str, str], ...]  # (mode, execution)

    @property
    def rows(self) -> int:
        """Rows of results that this makes."""
        return 1 if self.contender.missing else len(self.measurements)


def backend_names(asked_for: list[str] | None, operator: str | None = None) -> tuple[str, ...]:
    """The backends to measure.

    Parameters
    ----------
    asked_for : list of str or None
        Their names; None means all.
    operator : str, optional
        "knn", "radius" or "farthest": only backends that have it.

    Returns
    -------
    tuple of str

    Raises
    ------
    ConfigError
        For a name that is not known, with those that are.
    """
    chosen = _chosen("backends", asked_for, names())
    return tuple(name for name in chosen if operator is None or _has(name, operator))


def _has(backend: str, operator: str) -> bool:
    """Whether a backend has an operator of its own; that of torch serves the others."""
    if operator == "farthest":
        return backend == "torch" or hasattr(load(backend), "farthest_points")
    return operator in load(backend).OPERATORS


def peer_names(asked_for: list[str] | None) -> tuple[str, ...]:
    """The peers to measure; parameters and errors as those of :func:`backend_names`."""
    known = tuple(dict.fromkeys(peer.library.name for peer in libraries.PEERS))
    return _chosen("peers", asked_for, known)


def _chosen(key: str, asked_for: list[str] | None, known: tuple[str, ...]) -> tuple[str, ...]:
    problems = [*unknown(key, asked_for or (), known)]
    if problems:
        raise ConfigError("\n".join(problems))
    return known if asked_for is None else tuple(asked_for)


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


def missing_backend(name: str, device_type: str, operator: str) -> str | None:
    """Why a backend cannot be measured here, or None."""
    try:
        resolve(name, device_type, "knn" if operator == "farthest" else operator)
    except BackendUnavailable as reason:
        return str(reason)
    return None


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
    for contender in _contenders(config, workload, device_type):
        if config.gpu_memory == "rmm":
            contender = replace(contender, name=f"{contender.name}{WITH_RMM}")
        measurements = tuple(_measurements(contender, config, workload, device_type))
        if measurements:
            yield Entry(contender, measurements)


def _contenders(config: BenchConfig, workload: Workload, device_type: str) -> Iterator[Contender]:
    chosen = backend_names(config.backends, workload.operator)
    for name in chosen:
        yield backend_contender(name, workload, missing_backend(name, device_type, workload.operator))
    known = peer_names(config.peers)
    for peer in libraries.PEERS:
        wanted = peer.operator == workload.operator and device_type in peer.library.devices
        takes_it = workload.peers == "all" or (workload.peers == "batched" and peer.batched)
        if peer.library.name in known and wanted and takes_it and _modes(peer, workload):
            yield peer_contender(peer, workload, device_type)
    if {*LIST_SUMS} <= {*workload.modes}:
        finder = "auto" if config.backends is None else next((n for n in chosen if n != "torch"), "torch")
        if config.backends != []:
            yield _ready_lists(backend_contender(finder, workload, None))


def backend_contender(name: str, workload: Workload, missing: str | None = None) -> Contender:
    """One of our backends on a workload."""
    brute_force = name == "torch" and workload.operator != "farthest"  # it has no index to build
    without = LIST_SUMS + (("build", "search") if brute_force else ())
    find = {"build": _build, "padded": _padded, "csr": _csr, "farthest": _farthest}
    if workload.operator == "knn":
        find |= {"knn": _knn, "search": _knn}
    return Contender(
        name=name,
        kind="backend",
        package="pointproj",
        modes=tuple(mode for mode in workload.modes if mode not in without),
        executions=EXECUTIONS[:2] if name != "auto" and waits(name) else EXECUTIONS,
        find={mode: partial(function, name) for mode, function in find.items()},
        aggregate=partial(_aggregate, name),
        network=partial(_projector, workload, name),
        missing=missing,
        brute_force=brute_force,
        read={"padded": _read_padded, "csr": _read_csr},
    )


def _ready_lists(contender: Contender) -> Contender:
    """Aggregation over a ready list, which is the same from every backend; of plain torch."""
    given = {"name": "pointproj", "modes": LIST_SUMS, "executions": EXECUTIONS, "brute_force": False}
    return replace(contender, **given)


def peer_contender(peer: Peer, workload: Workload, device_type: str = "cuda") -> Contender:
    """A peer on a workload."""

    def sums(query: Tensor, reference: Tensor, features: Tensor, asked: Question) -> Tensor:
        if peer.finds == "sums":
            return peer.function(query, reference, features, asked.k or asked.radius, asked.sigma)
        rows = peers.search(peer.library.name, query, reference, asked.k)
        return gather_aggregate(query, reference, features, rows, asked.sigma)

    find = {} if peer.finds == "sums" else {peer.finds: peer.function}
    if peer.finds == "knn":
        find = {"knn": lambda asked: peer.function(*asked.points, asked.k)}
    elif peer.finds == "farthest":
        find = {"farthest": lambda asked: peer.function(asked.points[0], asked.k)}
    return Contender(
        name=peer.library.name,
        kind="peer",
        package=peer.library.distribution,
        modes=_modes(peer, workload),
        executions=("eager", "compiled") if peer.finds == "knn" or peer.traceable else ("eager",),
        find=find,
        aggregate=lambda asked, features: sums(*asked.points, features, asked),
        network=lambda asked: PeerNetwork(
            _projector(workload, "torch", asked), lambda *tensors: sums(*tensors, asked)
        ),
        missing=peer.missing(),
        search_tolerance=PEER_TOLERANCE,
        sums_tolerance=PEER_SUMS_TOLERANCE if peer.finds == "knn" else PEER_TOLERANCE,
        brute_force=device_type in peer.brute_force,
        bytes_per_pair=peer.bytes_per_pair,
        read={peer.finds: peer.read} if peer.read else {},
        returns=peer.returns,
        nearest=peer.nearest,
        itself=peer.itself,
    )


def _modes(peer: Peer, workload: Workload) -> tuple[str, ...]:
    """What can be called of a peer."""
    finds = {"knn": ("knn",), "sums": ()}.get(peer.finds)
    known = (peer.finds,) if finds is None else (*finds, "aggregate", "operator", *NETWORK)
    return tuple(mode for mode in workload.modes if mode in known)


class PeerNetwork(nn.Module):
    """The projector's two MLPs with another aggregation between them; one cloud per batch.

    Parameters
    ----------
    projector : Projector
        Whose MLPs are used.
    aggregate : callable
        Takes query points (Q, 3), reference points (N, 3) and features (N, C); gives (Q, C).
    """

    def __init__(self, projector: Projector, aggregate: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.reference_mlp = projector.reference_mlp
        self.query_mlp = projector.query_mlp
        self.aggregate = aggregate

    def forward(
        self, query_points: Tensor, reference_points: Tensor, features: Tensor | None = None
    ) -> Tensor:
        """(Q, 3), (1, N, 3) and (1, N, C) to (1, Q, 1), as the projector's."""
        hidden = self.reference_mlp(reference_points if features is None else features)[0]
        reference_points = reference_points[0]
        return self.query_mlp(self.aggregate(query_points, reference_points, hidden))[None]


def _projector(workload: Workload, backend: str, asked: Question) -> Projector:
    neighborhood = {"k": asked.k} if workload.operator == "knn" else {"radius": asked.radius}
    settings = {"sigma": asked.sigma, "hidden_channels": HIDDEN, "backend": backend}
    return Projector(kind=workload.operator, **neighborhood, **settings)


def _knn(backend: str, asked: Question, index: Any = None) -> Nearest:
    options = {"index": index, "backend": backend, **asked.problem.offsets}
    return Nearest(*pointproj.knn(*asked.points, asked.k, **options))


def _build(backend: str, asked: Question) -> Any:
    offsets = asked.problem.reference_offsets
    options = {"radius": asked.radius, "backend": backend, "reference_offsets": offsets}
    return pointproj.build_index(asked.points[1], **options)


def _aggregate(
    backend: str, asked: Question, features: Tensor, sigma: Tensor | float | None = None
) -> Tensor:
    function = pointproj.knn_aggregate if asked.radius is None else pointproj.radius_aggregate
    neighborhood = asked.k if asked.radius is None else asked.radius
    options = {"sigma": asked.sigma if sigma is None else sigma, "backend": backend, **asked.problem.offsets}
    return function(*asked.points, features, neighborhood, **options)


def _padded(backend: str, asked: Question) -> pointproj.Neighbors:
    return pointproj.radius_neighbors(*asked.points, asked.radius, max_neighbors=asked.k, backend=backend)


def _csr(backend: str, asked: Question) -> pointproj.NeighborList:
    return pointproj.radius_neighbors(*asked.points, asked.radius, capacity=asked.capacity, backend=backend)


def _farthest(backend: str, asked: Question) -> Tensor:
    return pointproj.farthest_points(asked.points[0], asked.k, backend=backend)


def _read_padded(found: pointproj.Neighbors) -> Pairs:
    return padded_pairs(found.indices, found.indices >= 0, found.distances, found.counts)


def _read_csr(found: pointproj.NeighborList) -> Pairs:
    used = found.indices >= 0
    counts = found.row_splits.diff()
    return Pairs(found.query_indices[used], found.indices[used], found.distances[used], counts)


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
