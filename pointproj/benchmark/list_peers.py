"""Other libraries that give lists of neighbours: one function for each library and form of the list.

They return different things under the same name, so each says what its result lacks, and how to read it as
:class:`Pairs`. Adding a peer means adding a function.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from pointproj.benchmark.peer import missing_import

BOTH = ("cpu", "cuda")
PHYSICSNEMO = {"imports": ("physicsnemo.nn.functional",), "distribution": "nvidia-physicsnemo"}
TORCH_CLUSTER = {"imports": ("torch_cluster",), "distribution": "torch-cluster"}
NVALCHEMIOPS = {"imports": ("nvalchemiops.torch.neighbors",), "distribution": "nvalchemi-toolkit-ops"}
SCIPY = {"imports": ("scipy.spatial",), "distribution": "scipy"}
MOST_IN_RADIUS = 256  # neighbours per query where a library must be told how many there may be


class Question(NamedTuple):
    """What is asked of a library: the k nearest within a radius, or all within it."""

    query_points: Tensor  # (Q, 3)
    reference_points: Tensor  # (N, 3), the same tensor where a cloud is searched within itself
    k: int
    radius: float
    capacity: int  # pairs that there is room for


class Pairs(NamedTuple):
    """What was found, in any order; None for what a library does not return."""

    queries: Int[Tensor, " pairs"]
    indices: Int[Tensor, " pairs"]
    distances: Float[Tensor, " pairs"] | None = None
    counts: Int[Tensor, " q"] | None = None  # all within the radius, also those that were left out


@dataclass(frozen=True)
class ListPeer:
    """A library and one form of its lists.

    Parameters
    ----------
    name : str
        As in the results.
    mode : {"padded", "csr"}
        What it is asked for: the k nearest within the radius, or all within it.
    function : callable
        Takes a :class:`Question`; what is timed.
    read : callable
        Makes :class:`Pairs` of what ``function`` returned.
    imports : tuple of str
        The modules that it needs.
    distribution : str
        The package whose version is noted.
    returns : str
        What its result is, where that is something else than ours.
    devices : tuple of str
    nearest : bool
        Whether the neighbours beyond k that it leaves out are the farthest.
    itself : bool
        Whether a point is a neighbour of itself.
    """

    name: str
    mode: str
    function: Callable[[Question], Any]
    read: Callable[[Any], Pairs]
    imports: tuple[str, ...]
    distribution: str
    returns: str = ""
    devices: tuple[str, ...] = ("cuda",)
    nearest: bool = True
    itself: bool = True

    def missing(self) -> str | None:
        """None if it can be imported, else one line with the reason."""
        return missing_import(self.imports)


LIST_PEERS: list[ListPeer] = []


def list_peer(name: str, mode: str, read: Callable[[Any], Pairs], **properties: Any) -> Callable:
    """Add the decorated function to :data:`LIST_PEERS`, with the properties of :class:`ListPeer`."""

    def register(function: Callable[[Question], Any]) -> Callable[[Question], Any]:
        LIST_PEERS.append(ListPeer(name, mode, function, read, **properties))
        return function

    return register


def padded_pairs(
    indices: Int[Tensor, "q k"],
    exists: Bool[Tensor, "q k"],
    distances: Float[Tensor, "q k"] | None = None,
    counts: Int[Tensor, " q"] | None = None,
) -> Pairs:
    """Pairs of a padded list."""
    queries = exists.nonzero()[:, 0]
    return Pairs(queries, indices[exists].long(), None if distances is None else distances[exists], counts)


def _found_below(found: tuple[Tensor, Tensor, int]) -> Pairs:
    """Pairs of (distances, indices, N), where an index of N is none."""
    distances, indices, count = found
    return padded_pairs(indices, indices < count, distances)


def _read_physicsnemo(found: tuple[Tensor, Tensor, Tensor]) -> Pairs:
    """Slots that are not used hold index 0 as well, but the origin as its point."""
    indices, points, distances = found
    return padded_pairs(indices, (indices != 0) | (points != 0).any(-1), distances)


@list_peer(
    "PhysicsNeMo",
    "padded",
    _read_physicsnemo,
    **PHYSICSNEMO,
    devices=BOTH,
    nearest=False,
    returns="the first met, not the nearest; no counts; slots that are not used hold index 0",
)
def physicsnemo_padded(asked: Question) -> tuple[Tensor, ...]:
    """Indices, points and distances."""
    from physicsnemo.nn.functional import radius_search

    options = {"max_points": asked.k, "return_dists": True, "return_points": True}
    return radius_search(asked.reference_points, asked.query_points, asked.radius, **options)


@list_peer(
    "PhysicsNeMo",
    "csr",
    lambda found: Pairs(found[0][0].long(), found[0][1].long(), found[1]),
    **PHYSICSNEMO,
    devices=BOTH,
    returns="pairs of exact number, for which it waits",
)
def physicsnemo_csr(asked: Question) -> tuple[Tensor, ...]:
    """Pairs and their distances."""
    from physicsnemo.nn.functional import radius_search

    return radius_search(asked.reference_points, asked.query_points, asked.radius, return_dists=True)


def _edges(found: Tensor) -> Pairs:
    return Pairs(found[0], found[1])


@list_peer(
    "torch-cluster",
    "padded",
    _edges,
    **TORCH_CLUSTER,
    devices=BOTH,
    nearest=False,
    returns="the first met, not the nearest, as pairs; no distances, no counts",
)
def torch_cluster_padded(asked: Question) -> Tensor:
    """A tree on the CPU, all pairs on CUDA."""
    import torch_cluster

    return torch_cluster.radius(
        asked.reference_points, asked.query_points, asked.radius, max_num_neighbors=asked.k
    )


@list_peer("torch-cluster", "csr", _edges, **TORCH_CLUSTER, devices=BOTH, returns="pairs; no distances")
def torch_cluster_csr(asked: Question) -> Tensor:
    """The same with more neighbours allowed."""
    return torch_cluster_padded(asked._replace(k=MOST_IN_RADIUS))


def _read_nvalchemiops(found: tuple[Tensor, ...]) -> Pairs:
    indices, counts, _, distances = found
    return padded_pairs(indices, indices < len(indices), distances, counts)


@list_peer(
    "nvalchemiops",
    "padded",
    _read_nvalchemiops,
    **NVALCHEMIOPS,
    devices=BOTH,
    nearest=False,
    itself=False,
    returns="the first met, not the nearest, without the point itself; periodic shifts too; waits",
)
def nvalchemiops_padded(asked: Question) -> tuple[Tensor, ...]:
    """Its cell list, of one set of points."""
    from nvalchemiops.torch.neighbors import neighbor_list

    options = {"method": "cell_list", "max_neighbors": asked.k, "return_distances": True}
    return neighbor_list(asked.query_points, asked.radius, **options)


@list_peer(
    "nvalchemiops",
    "csr",
    lambda found: Pairs(found[0][0].long(), found[0][1].long(), found[3]),
    **NVALCHEMIOPS,
    devices=BOTH,
    itself=False,
    returns="pairs of exact number, for which it waits, without the point itself; periodic shifts too",
)
def nvalchemiops_csr(asked: Question) -> tuple[Tensor, ...]:
    """Its cell list, of one set of points, made into pairs."""
    from nvalchemiops.torch.neighbors import neighbor_list

    options = {"method": "cell_list", "max_neighbors": MOST_IN_RADIUS, "return_distances": True}
    return neighbor_list(asked.query_points, asked.radius, return_neighbor_list=True, **options)


@list_peer("scipy cKDTree", "padded", _found_below, **SCIPY, devices=("cpu",), returns="no counts")
def scipy_padded(asked: Question) -> tuple[Tensor, Tensor, int]:
    """Build the tree and query it on all cores."""
    from scipy.spatial import cKDTree

    tree = cKDTree(asked.reference_points.numpy())
    within = {"distance_upper_bound": asked.radius, "workers": -1}
    distances, indices = tree.query(asked.query_points.numpy(), asked.k, **within)
    return torch.from_numpy(distances), torch.from_numpy(indices), len(asked.reference_points)


@list_peer(
    "scipy cKDTree",
    "csr",
    lambda found: Pairs(found[0], found[1], found[2]),
    **SCIPY,
    devices=("cpu",),
    returns="pairs, not in the order of the queries; one core",
)
def scipy_csr(asked: Question) -> tuple[Tensor, ...]:
    """The distances between two trees; without ``workers``."""
    from scipy.spatial import cKDTree

    trees = (cKDTree(points.numpy()) for points in (asked.query_points, asked.reference_points))
    found = next(trees).sparse_distance_matrix(next(trees), asked.radius, output_type="ndarray")
    return tuple(torch.from_numpy(found[column].copy()) for column in "ijv")


def _pykdtree(asked: Question) -> tuple[Tensor, Tensor, int]:
    from pykdtree.kdtree import KDTree

    tree = KDTree(asked.reference_points.numpy())
    distances, indices = tree.query(asked.query_points.numpy(), asked.k, distance_upper_bound=asked.radius)
    return torch.from_numpy(distances), torch.from_numpy(indices.astype("int64")), tree.n


PYKDTREE = {"imports": ("pykdtree.kdtree",), "distribution": "pykdtree", "devices": ("cpu",)}
list_peer("pykdtree", "padded", _found_below, **PYKDTREE, returns="no counts")(_pykdtree)
