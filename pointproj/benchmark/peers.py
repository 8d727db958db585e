"""What a peer is: another library that does the same work; :mod:`pointproj.benchmark.libraries` has them.

A peer is a small function of a library. What it finds says what it takes and returns:

- ``knn``: (query points, reference points, k) to :class:`Nearest`; torch gathers and weighs around it.
- ``sums``: (query points, reference points, features, k or radius, sigma) to aggregated features.
- ``farthest``: (points (N, 3) or (B, N, 3), count) to rows in the order in which they are chosen.
- ``padded``, ``csr``: a :class:`~pointproj.benchmark.workloads.Question` to whatever the library returns,
  which ``read`` turns into :class:`Pairs`. Libraries return different things under the same name, so each
  says in ``returns`` what its result lacks.

A peer's package is imported when the peer is asked whether it can run, not before.
"""

import functools
import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from pointproj.runtime.errors import first_line


class Nearest(NamedTuple):
    """The k nearest of every query, as a library returns them: in its own integers, perhaps squared."""

    distances: Float[Tensor, "*queries k"] | None
    indices: Int[Tensor, "*queries k"]


class Pairs(NamedTuple):
    """A list of neighbours in any order; None for what a library does not return."""

    queries: Int[Tensor, " pairs"]
    indices: Int[Tensor, " pairs"]
    distances: Float[Tensor, " pairs"] | None = None
    counts: Int[Tensor, " q"] | None = None  # all within the radius, also those that were left out


class Library(NamedTuple):
    """A library: its name in the results, the package whose version is noted, and what must be importable."""

    name: str
    distribution: str
    imports: tuple[str, ...] = ()
    devices: tuple[str, ...] = ("cuda",)


@dataclass(frozen=True)
class Peer:
    """A library, and one thing that it finds.

    Parameters
    ----------
    library : Library
    finds : {"knn", "sums", "farthest", "padded", "csr"}
    function : callable
        What is timed; the module says what it takes and returns.
    operator : {"knn", "radius", "farthest"}
    batched : bool
        Whether it takes dense batches too.
    traceable : bool
        Whether torch.compile can trace the function; those of ``knn`` are called by a custom operator.
    brute_force : tuple of str
        Devices on which time grows with queries times references.
    bytes_per_pair : float
        Memory that grows so as well; 0 if it does not.
    read : callable, optional
    returns : str
        What a list is, where that is something else than ours.
    nearest : bool
        Whether the neighbours beyond k that a list leaves out are the farthest.
    itself : bool
        Whether a point is a neighbour of itself.
    """

    library: Library
    finds: str
    function: Callable[..., Any]
    operator: str = "radius"
    batched: bool = False
    traceable: bool = False
    brute_force: tuple[str, ...] = ()
    bytes_per_pair: float = 0.0
    read: Callable[[Any], Pairs] | None = None
    returns: str = ""
    nearest: bool = True
    itself: bool = True

    def missing(self) -> str | None:
        """None if it can be imported, else one line with the reason."""
        return next(filter(None, map(import_failure, self.library.imports)), None)


PEERS: list[Peer] = []


def peer(library: Library, finds: str, **properties: Any) -> Callable[[Callable], Callable]:
    """Add the decorated function to :data:`PEERS`, with the properties of :class:`Peer`."""

    def register(function: Callable) -> Callable:
        operator = finds if finds in ("knn", "farthest") else "radius"
        PEERS.append(Peer(library, finds, function, **{"operator": operator} | properties))
        return function

    return register


@functools.cache
def import_failure(module: str) -> str | None:
    """None if a module can be imported, else one line with the reason."""
    failure = None
    for _ in range(2):  # a torchvision made for another torch fails once; the second import works without it
        try:
            importlib.import_module(module)
        except Exception as error:  # broken installations raise all sorts
            failure = error
        else:
            return None
    return f"{module} cannot be imported: {first_line(failure)}"


def prepare_environment() -> None:
    """Settings that peers read when they are imported."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # jax would take most of the GPU


def search(
    name: str, query_points: Float[Tensor, "q 3"], reference_points: Float[Tensor, "n 3"], k: int
) -> Int[Tensor, "q k"]:
    """Indices of the k nearest that a library finds; torch.compile calls an operator for it."""
    if torch.compiler.is_compiling():
        return torch.ops.pointproj_benchmark.peer_search(query_points, reference_points, k, name)
    chosen = next(known for known in PEERS if (known.library.name, known.finds) == (name, "knn"))
    return chosen.function(query_points, reference_points, k).indices.long()


@torch.library.custom_op("pointproj_benchmark::peer_search", mutates_args=())
def _peer_search(query_points: Tensor, reference_points: Tensor, k: int, name: str) -> Tensor:
    return search(name, query_points, reference_points, k).contiguous()


@_peer_search.register_fake
def _(query_points: Tensor, reference_points: Tensor, k: int, name: str) -> Tensor:
    return query_points.new_empty((query_points.shape[0], k), dtype=torch.int64)


def gather_aggregate(
    query_points: Float[Tensor, "q 3"],
    reference_points: Float[Tensor, "n 3"],
    features: Float[Tensor, "n c"],
    neighbor_indices: Int[Tensor, "q k"],
    sigma: float,
) -> Float[Tensor, "q c"]:
    """What users write around a neighbour search: gather, softmax of -distance / sigma, weighted sum."""
    distances = (query_points[:, None] - reference_points[neighbor_indices]).norm(dim=-1)
    weights = torch.softmax(-distances / sigma, dim=-1)
    return (weights[..., None] * features[neighbor_indices]).sum(1)


def padded_pairs(
    indices: Int[Tensor, "q k"],
    exists: Bool[Tensor, "q k"],
    distances: Float[Tensor, "q k"] | None = None,
    counts: Int[Tensor, " q"] | None = None,
) -> Pairs:
    """Pairs of a padded list."""
    queries = exists.nonzero()[:, 0]
    return Pairs(queries, indices[exists].long(), None if distances is None else distances[exists], counts)
