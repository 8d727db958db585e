"""What a peer is: another library that does the same work; :mod:`pointproj.benchmark.peers` has them.

A peer finds either the k nearest reference points, from which plain torch gathers and weighs, or the
aggregated features themselves. A peer's package is imported when the peer is asked whether it can run, not
before.
"""

import functools
import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pointproj.runtime.errors import first_line


class Nearest(NamedTuple):
    """The k nearest of every query, as a library returns them: in its own integers, perhaps squared."""

    distances: Float[Tensor, "q k"] | None
    indices: Int[Tensor, "q k"]


@dataclass(frozen=True)
class Peer:
    """A library, what it finds, and where.

    Parameters
    ----------
    name : str
        As in the results.
    operator : str
        "knn" or "radius".
    function : callable
        Takes query points (Q, 3), reference points (N, 3) and k, gives :class:`Nearest`. If not
        ``finds_neighbors``, it takes both, features (N, C), k or radius, and sigma, and gives (Q, C).
    imports : tuple of str
        The modules that it needs.
    distribution : str
        The package whose version is noted.
    devices : tuple of str
    finds_neighbors : bool
    traceable : bool
        Whether torch.compile can trace the function. Functions that find neighbours are called by a custom
        operator instead.
    brute_force : bool
        Whether time grows with queries times references.
    bytes_per_pair : float
        Memory that grows so as well; 0 if it does not.
    """

    name: str
    operator: str
    function: Callable[..., "Tensor | Nearest"]
    imports: tuple[str, ...]
    distribution: str
    devices: tuple[str, ...] = ("cuda",)
    finds_neighbors: bool = True
    traceable: bool = False
    brute_force: bool = False
    bytes_per_pair: float = 0.0

    @property
    def compiles(self) -> bool:
        """Whether a network around it can be compiled."""
        return self.finds_neighbors or self.traceable

    def search(self, query_points: Tensor, reference_points: Tensor, k: int) -> Int[Tensor, "q k"]:
        """Indices of the k nearest; torch.compile calls it as an operator that it does not look into."""
        if torch.compiler.is_compiling():
            return torch.ops.pointproj_benchmark.peer_search(query_points, reference_points, k, self.name)
        return self.function(query_points, reference_points, k).indices.long()

    def missing(self) -> str | None:
        """None if it can be imported, else one line with the reason."""
        return missing_import(self.imports)


PEERS: list[Peer] = []


def missing_import(modules: Iterable[str]) -> str | None:
    """None if all modules can be imported, else one line on the first that cannot."""
    return next(filter(None, map(import_failure, modules)), None)


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


def peer(name: str, operator: str, *imports: str, **properties: object) -> Callable[[Callable], Callable]:
    """Add the decorated function to :data:`PEERS`, with the properties of :class:`Peer`."""

    def register(function: Callable) -> Callable:
        PEERS.append(Peer(name, operator, function, imports, **properties))
        return function

    return register


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


@torch.library.custom_op("pointproj_benchmark::peer_search", mutates_args=())
def _peer_search(query_points: Tensor, reference_points: Tensor, k: int, name: str) -> Tensor:
    chosen = next(known for known in PEERS if known.name == name and known.finds_neighbors)
    return chosen.function(query_points, reference_points, k).indices.long().contiguous()


@_peer_search.register_fake
def _(query_points: Tensor, reference_points: Tensor, k: int, name: str) -> Tensor:
    return query_points.new_empty((query_points.shape[0], k), dtype=torch.int64)
