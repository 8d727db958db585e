"""What is measured: our backends and other libraries (the peers) behind one interface."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

import pointproj
from pointproj.benchmark.config import EXECUTIONS, unknown
from pointproj.benchmark.list_peers import LIST_PEERS
from pointproj.benchmark.peer import Nearest, Peer, gather_aggregate
from pointproj.benchmark.peers import PEERS
from pointproj.benchmark.workloads import Workload
from pointproj.config import ConfigError
from pointproj.machine import package_version
from pointproj.nn.projector import Projector
from pointproj.ops.cases import Problem
from pointproj.ops.registry import BackendUnavailable, load, names, resolve, waits

SEED = 0  # of the networks
HIDDEN = 25
BACKEND_TOLERANCE = 1e-4  # fp32 sums in another order
PEER_TOLERANCE = 1e-3
PEER_SUMS_TOLERANCE = 5e-2  # their neighbours are checked too: of two equally far they may take the other


@dataclass(frozen=True)
class Contender:
    """What the benchmark calls. Functions that a contender lacks are None.

    Each returns all that a user's call returns. What a compiled function leaves out, the compiler does not
    compute: a time of half the results would be of half the work.
    """

    name: str
    kind: str  # backend | peer
    package: str
    modes: tuple[str, ...]
    executions: tuple[str, ...]
    aggregate: Callable[..., Tensor]  # problem, its features, and where gradients go to it sigma
    sigma: float
    knn: Callable[[Problem], Nearest] | None  # index built inside
    build: Callable[[Problem], Any] | None
    search: Callable[[Problem, Any], Nearest] | None  # the same, with a ready index
    network: Callable[[], nn.Module]
    search_tolerance: float
    sums_tolerance: float
    brute_force: bool  # time grows with queries times references
    bytes_per_pair: float  # memory that grows so as well; 0 if bounded


def backend_names(asked_for: list[str] | None, operator: str | None = None) -> tuple[str, ...]:
    """The backends to measure.

    Parameters
    ----------
    asked_for : list of str or None
        Their names; None means all.
    operator : str, optional
        "knn" or "radius": only backends that have it.

    Returns
    -------
    tuple of str

    Raises
    ------
    ConfigError
        For a name that is not known, with those that are.
    """
    chosen = _chosen("backends", asked_for, names())
    return tuple(name for name in chosen if operator is None or operator in load(name).OPERATORS)


def peer_names(asked_for: list[str] | None) -> tuple[str, ...]:
    """The peers to measure; parameters and errors as those of :func:`backend_names`."""
    return _chosen("peers", asked_for, tuple(dict.fromkeys(peer.name for peer in (*PEERS, *LIST_PEERS))))


def missing_backend(name: str, device_type: str, operator: str) -> str | None:
    """Why a backend cannot be measured here, or None."""
    try:
        resolve(name, device_type, operator)
    except BackendUnavailable as reason:
        return str(reason)
    return None


def backend_contender(name: str, workload: Workload) -> Contender:
    """One of our backends on a workload."""
    operator, neighborhood, sigma = workload.operator, workload.neighborhood, workload.case.sigma
    function = pointproj.knn_aggregate if operator == "knn" else pointproj.radius_aggregate
    radius = None if operator == "knn" else neighborhood

    def aggregate(problem: Problem, features: Tensor, sigma: Tensor | float = sigma) -> Tensor:
        points = problem.query_points, problem.reference_points
        # Not by the property ``offsets``: torch.compile of torch 2.10 takes none of a named tuple.
        options = {"query_offsets": problem.query_offsets, "reference_offsets": problem.reference_offsets}
        return function(*points, features, neighborhood, sigma=sigma, backend=name, **options)

    def build(problem: Problem) -> Any:
        offsets = problem.reference_offsets
        return pointproj.build_index(
            problem.reference_points, radius=radius, backend=name, reference_offsets=offsets
        )

    def search(problem: Problem, index: Any = None) -> Nearest:
        points = problem.query_points, problem.reference_points
        return Nearest(*pointproj.knn(*points, neighborhood, index=index, backend=name, **problem.offsets))

    brute_force = name == "torch"  # it has no index to build
    return Contender(
        name=name,
        kind="backend",
        package=package_version("pointproj"),
        modes=tuple(m for m in workload.modes if not (brute_force and m in ("build", "search"))),
        executions=EXECUTIONS[:2] if waits(name) else EXECUTIONS,
        aggregate=aggregate,
        sigma=sigma,
        knn=search if operator == "knn" else None,
        build=build,
        search=search if operator == "knn" else None,
        network=lambda: _projector(workload, name),
        search_tolerance=BACKEND_TOLERANCE,
        sums_tolerance=BACKEND_TOLERANCE,
        brute_force=brute_force,
        bytes_per_pair=0.0,
    )


def peer_contender(peer: Peer, workload: Workload) -> Contender:
    """A peer on a workload of one cloud."""
    neighborhood, sigma = workload.neighborhood, workload.case.sigma

    def aggregate_points(query: Tensor, reference: Tensor, features: Tensor) -> Tensor:
        if not peer.finds_neighbors:
            return peer.function(query, reference, features, neighborhood, sigma)
        rows = peer.search(query, reference, neighborhood)
        return gather_aggregate(query, reference, features, rows, sigma)

    def knn(problem: Problem) -> Nearest:
        return peer.function(problem.query_points, problem.reference_points, neighborhood)

    unknown = {"build", "search", "gradients"} | (set() if peer.finds_neighbors else {"knn"})
    return Contender(
        name=peer.name,
        kind="peer",
        package=package_version(peer.distribution),
        modes=tuple(mode for mode in workload.modes if mode not in unknown),
        executions=("eager", "compiled") if peer.compiles else ("eager",),
        aggregate=lambda problem, features: aggregate_points(
            problem.query_points, problem.reference_points, features
        ),
        sigma=sigma,
        knn=knn if peer.finds_neighbors else None,
        build=None,
        search=None,
        network=lambda: PeerNetwork(_projector(workload, "torch"), aggregate_points),
        search_tolerance=PEER_TOLERANCE,
        sums_tolerance=PEER_SUMS_TOLERANCE if peer.finds_neighbors else PEER_TOLERANCE,
        brute_force=peer.brute_force,
        bytes_per_pair=peer.bytes_per_pair,
    )


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


def _projector(workload: Workload, backend: str) -> Projector:
    neighborhood = {"k" if workload.operator == "knn" else "radius": workload.neighborhood}
    return Projector(
        kind=workload.operator,
        **neighborhood,
        sigma=workload.case.sigma,
        hidden_channels=HIDDEN,
        backend=backend,
    )


def _chosen(key: str, asked_for: list[str] | None, known: tuple[str, ...]) -> tuple[str, ...]:
    problems = [*unknown(key, asked_for or (), known)]
    if problems:
        raise ConfigError("\n".join(problems))
    return known if asked_for is None else tuple(asked_for)
