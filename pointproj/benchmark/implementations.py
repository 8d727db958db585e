"""What an implementation is: one of our backends, or another library that does the same work.

Its functions take :class:`~pointproj.benchmark.workloads.Inputs`, and return all that a user's call returns:
a compiler leaves out what a function does not return, and the time would be of less work.
:mod:`pointproj.benchmark.peers` is the table of the other libraries.
"""

import functools
import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from pointproj.benchmark.cases import Problem
from pointproj.benchmark.config import NETWORK, SUMS
from pointproj.benchmark.workloads import Inputs
from pointproj.nn.projector import CloudEncoding, Projector
from pointproj.runtime.errors import first_line

HIDDEN = 25
OURS, THEIRS = 1e-4, 1e-3  # largest errors allowed, of our backends and of other libraries
THEIR_SUMS = 5e-2  # of sums over the neighbours they find: of two equally distant points they may take either

PAIRS_PER_SECOND = {"cuda": 1e10, "cpu": 7e7}  # that torch compares; on a CPU, for each thread
SEARCHES: dict[str, Callable[..., Any]] = {}  # of peers; called with query points, reference points, k


class Nearest(NamedTuple):
    """The k nearest of every query, as a library returns them; distances may be squared."""

    distances: Float[Tensor, "*queries k"] | None
    indices: Int[Tensor, "*queries k"]


class FoundPairs(NamedTuple):
    """A list of neighbours in any order; None for what a library does not return."""

    queries: Int[Tensor, " pairs"]
    indices: Int[Tensor, " pairs"]
    distances: Float[Tensor, " pairs"] | None = None
    counts: Int[Tensor, " q"] | None = None  # of neighbours within the radius, listed or not


@dataclass(frozen=True)
class Implementation:
    """What the benchmark calls: one of our backends, or another library."""

    name: str  # in the results
    package: str  # the distribution whose version is noted
    # Searches by mode. A backend's "knn" also takes the index that its "build" returned.
    find: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    aggregate: Callable[..., Tensor] | None = None  # of inputs and their tensors
    kind: str = "peer"  # backend | peer
    operator: str = "radius"  # knn | radius | farthest_points | attend
    modes: tuple[str, ...] = ()  # those of a workload that it has
    executions: tuple[str, ...] = ("eager",)
    imports: tuple[str, ...] = ()  # modules that must be importable
    devices: tuple[str, ...] = ("cuda",)  # types of devices that it runs on
    missing: str | None = None  # why it cannot run here
    batched: bool = False  # whether it takes dense batches too
    # If time grows with queries times references: pairs per second and type of device, as PAIRS_PER_SECOND.
    brute_force: Mapping[str, float] = field(default_factory=dict)
    bytes_per_pair: float = 0.0  # memory that it needs for each pair
    read: Callable[[Any], FoundPairs] | None = None  # makes pairs of a list that it returned
    returns: str = ""  # how its results differ from ours: the note of its rows
    nearest: bool = True  # whether a list of at most k neighbours has the nearest ones
    itself: bool = True  # whether a point stands in its own list
    compared: bool = True  # whether its results are compared; false if its formula differs

    @property
    def columns(self) -> dict[str, str]:
        """The columns of its rows that describe it."""
        return {"implementation": self.name, "kind": self.kind, "package": self.package}

    def allowed(self, mode: str) -> float:
        """The largest error of a result."""
        if self.kind == "backend" or self.operator == "attend":
            return OURS
        return THEIR_SUMS if "knn" in self.find and mode in (*SUMS, *NETWORK) else THEIRS

    def not_installed(self) -> str | None:
        """None if all that it needs can be imported, else the reason in one line."""
        return next(filter(None, map(import_failure, self.imports)), None)

    def network(self, inputs: Inputs) -> Projector:
        """The projector with this backend; of a peer, its aggregation between the projector's MLPs."""
        kind = "knn" if inputs.radius is None else "radius"
        of = {"kind": kind, "k": inputs.k, "radius": inputs.radius, "sigma": inputs.sigma}
        if self.kind == "backend":
            return Projector(**of, hidden_channels=HIDDEN, backend=self.name)
        return PeerNetwork(self, inputs, **of, hidden_channels=HIDDEN, backend="torch")


class PeerNetwork(Projector):
    """The projector with a peer's aggregation between its two MLPs, for one cloud."""

    def __init__(self, peer: Implementation, inputs: Inputs, **of: Any) -> None:
        super().__init__(**of)
        self.peer, self.inputs = peer, inputs

    def decode(self, query_points: Tensor, encoding: CloudEncoding, **_: Any) -> Tensor:
        """(1, Q, 1) from (Q, 3) query points and the encoding of (1, N, 3) reference points."""
        points, hidden = encoding.reference_points[0], encoding.features[0]
        inputs = self.inputs._replace(problem=Problem(query_points, points, hidden))
        return self.query_mlp(self.peer.aggregate(inputs, hidden))[None]


@functools.cache
def import_failure(module: str) -> str | None:
    """None if a module can be imported, else the reason in one line."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # jax would take most of the GPU
    for _ in range(2):  # a torchvision made for another torch fails once; the second import works without it
        try:
            importlib.import_module(module)
            return None
        except Exception as error:  # a broken installation may raise anything
            failure = f"{module} cannot be imported: {first_line(error)}"
    return failure


@torch.library.custom_op("pointproj_benchmark::peer_search", mutates_args=())
def _peer_search(query_points: Tensor, reference_points: Tensor, k: int, name: str) -> Tensor:
    return SEARCHES[name](query_points, reference_points, k)[1].long().contiguous()


@_peer_search.register_fake
def _(query_points: Tensor, reference_points: Tensor, k: int, name: str) -> Tensor:
    return query_points.new_empty((query_points.shape[0], k), dtype=torch.int64)


def gather_aggregate(name: str, inputs: Inputs, features: Tensor) -> Tensor:
    """What users write around a neighbour search: gather, softmax of -distance / sigma, weighted sum."""
    query, points = inputs.points
    if torch.compiler.is_compiling():
        rows = _peer_search(query, points, inputs.k, name)
    else:
        rows = SEARCHES[name](query, points, inputs.k)[1].long()
    weights = torch.softmax(-(query[:, None] - points[rows]).norm(dim=-1) / inputs.sigma, dim=-1)
    return (weights[..., None] * features[rows]).sum(1)


def padded_pairs(
    indices: Int[Tensor, "q k"],
    exists: Bool[Tensor, "q k"],
    distances: Float[Tensor, "q k"] | None = None,
    counts: Int[Tensor, " q"] | None = None,
) -> FoundPairs:
    """The pairs of a padded list, of which ``exists`` marks the used slots."""
    queries = exists.nonzero()[:, 0]
    return FoundPairs(
        queries, indices[exists].long(), None if distances is None else distances[exists], counts
    )


def of_library(path: str) -> Any:
    """An object of a library by its path; the library is imported at the first call."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)
