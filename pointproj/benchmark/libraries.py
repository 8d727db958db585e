"""The peers: one small function for each library and what it finds.

Adding a peer means adding a function. :mod:`pointproj.benchmark.peers` says what it takes and returns.
"""

import contextlib
import functools
import math
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from pointproj.benchmark.peers import PEERS, Nearest, Pairs, library, padded_pairs, peer
from pointproj.benchmark.workloads import ATTEND_CHANNELS, ATTEND_K, HEADS, Question

__all__ = ["PEERS"]

MAX_IN_RADIUS = 1024  # neighbours per query that torch-cluster may return
BOTH = ("cpu", "cuda")
EAGER = ("eager",)  # no table shows how their networks run compiled


def _aggregate_pairs(
    query: Tensor, reference: Tensor, features: Tensor, queries: Tensor, rows: Tensor, sigma: float
) -> Tensor:
    """Weighted means over pairs (queries[m], rows[m]) in any order."""
    distances = (query[queries] - reference[rows]).norm(dim=-1)
    weights = (-distances / sigma).exp()
    sums = features.new_zeros(len(query), features.shape[1])
    sums = sums.index_add(0, queries, weights[:, None] * features[rows])
    totals = weights.new_zeros(len(query)).index_add(0, queries, weights)
    return sums / totals.clamp(min=torch.finfo(totals.dtype).tiny)[:, None]


def _found_below(found: tuple[Tensor, Tensor, int]) -> Pairs:
    """Pairs of (distances, indices, N), where an index of N is none."""
    distances, indices, count = found
    return padded_pairs(indices, indices < count, distances)


def _tensors(*arrays: Any) -> tuple[Tensor, ...]:
    return tuple(torch.from_numpy(array) for array in arrays)


TUTORIAL = library("tutorial torch", "torch", devices=BOTH)


@peer(TUTORIAL, "sums", operator="knn", traceable=True, brute_force=BOTH, bytes_per_pair=16.0)
def tutorial_knn(query: Tensor, reference: Tensor, features: Tensor, k: int, sigma: float) -> Tensor:
    """All pairs, their distances, the k smallest of each row."""
    distances, rows = (query[:, None] - reference[None]).norm(dim=-1).topk(k, dim=-1, largest=False)
    weights = torch.softmax(-distances / sigma, dim=-1)
    return (weights[..., None] * features[rows]).sum(1)


@peer(TUTORIAL, "sums", traceable=True, brute_force=BOTH, bytes_per_pair=110.0)
def tutorial_radius(
    query: Tensor, reference: Tensor, features: Tensor, radius: float, sigma: float
) -> Tensor:
    """Softmax over all points, masked by the radius and divided by the sum that is left."""
    distances = (query[:, None] - reference[None]).norm(dim=-1)
    weights = torch.softmax(-distances / sigma, dim=-1) * (distances <= radius)
    return (weights / (weights.sum(-1, keepdim=True) + 1e-8)) @ features


def _gathered(asked: Question, *tensors: Tensor) -> list[Tensor]:
    """Queries (N, H, D), and keys and values of the neighbours (N, K, H, D)."""
    query, *others = (tensor.unflatten(-1, (HEADS, -1)) for tensor in tensors)
    return [query, *(other[asked.neighbors.indices] for other in others)]


@peer(library("gather + SDPA", "torch", devices=BOTH), "attend")
def attention_by_torch(asked: Question, *tensors: Tensor) -> Tensor:
    """Torch's own function, with a row of one query for each point and head."""
    query, keys, values = _gathered(asked, *tensors)
    found = scaled_dot_product_attention(query[:, :, None], keys.transpose(1, 2), values.transpose(1, 2))
    return found[:, :, 0].flatten(1)


@peer(library("gather + einsum", "torch", devices=BOTH), "attend", traceable=True)
def attention_by_einsum(asked: Question, *tensors: Tensor) -> Tensor:
    """Products, softmax and sums written out, for a compiler to fuse."""
    query, keys, values = _gathered(asked, *tensors)
    weights = torch.einsum("nhd,nkhd->nkh", query / math.sqrt(query.shape[-1]), keys).softmax(1)
    return torch.einsum("nkh,nkhd->nhd", weights, values).flatten(1)


PHYSICSNEMO = library("PhysicsNeMo", "nvidia-physicsnemo", "physicsnemo.nn.functional", devices=BOTH)


@functools.cache
def _physicsnemo_block(device: torch.device) -> nn.Module:
    from physicsnemo.nn.module.point_transformer_attention import LocalPointTransformerBlock

    sizes = {"dim": ATTEND_CHANNELS, "num_heads": HEADS, "neighbor_k": ATTEND_K, "dilation": 1}
    block = LocalPointTransformerBlock(**sizes, mlp_ratio=1, dropout=0.0, use_te=False)
    return block.to(device).requires_grad_(False)


@peer(
    PHYSICSNEMO | {"imports": ("physicsnemo.nn.module.point_transformer_attention",)},
    "attend",
    compared=False,
    returns="vector attention: a network scores each pair, with projections of its own",
)
def physicsnemo_attention(asked: Question, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """The attention of its block alone, which projects values of its own: neither search nor what follows."""
    points, rows = asked.points[0], asked.neighbors.indices
    return _physicsnemo_block(query.device)._attend(query, keys, points, points, rows, None)


@peer(PHYSICSNEMO, "knn", brute_force=("cuda",))
def physicsnemo_knn(query: Tensor, reference: Tensor, k: int) -> Nearest:
    """cuML on CUDA and scipy on CPU where they are installed, else brute force."""
    from physicsnemo.nn.functional import knn

    with contextlib.suppress(ImportError):
        import cuml.neighbors  # noqa: F401 - PhysicsNeMo uses it without importing it
    indices, distances = knn(reference, query, k)
    return Nearest(distances, indices)


@peer(PHYSICSNEMO, "sums")
def physicsnemo_radius(
    query: Tensor, reference: Tensor, features: Tensor, radius: float, sigma: float
) -> Tensor:
    """All pairs within the radius, none truncated; weights and sums in torch."""
    from physicsnemo.nn.functional import radius_search

    pairs = radius_search(reference, query, radius)
    found = (pairs[0] if isinstance(pairs, tuple) else pairs).long()
    return _aggregate_pairs(query, reference, features, found[0], found[1], sigma)


def _read_physicsnemo(found: tuple[Tensor, Tensor, Tensor]) -> Pairs:
    """Slots that are not used hold index 0 as well, but the origin as its point."""
    indices, points, distances = found
    return padded_pairs(indices, (indices != 0) | (points != 0).any(-1), distances)


FIRST_MET = "the first met, not the nearest; no counts; slots that are not used hold index 0"


@peer(PHYSICSNEMO, "padded", read=_read_physicsnemo, nearest=False, returns=FIRST_MET)
def physicsnemo_padded(asked: Question) -> tuple[Tensor, ...]:
    """Indices, points and distances."""
    from physicsnemo.nn.functional import radius_search

    queries, points = asked.points
    options = {"max_points": asked.k, "return_dists": True, "return_points": True}
    return radius_search(points, queries, asked.radius, **options)


@peer(
    PHYSICSNEMO,
    "csr",
    read=lambda found: Pairs(found[0][0].long(), found[0][1].long(), found[1]),
    returns="pairs of exact number, for which it waits",
)
def physicsnemo_csr(asked: Question) -> tuple[Tensor, ...]:
    """Pairs and their distances."""
    from physicsnemo.nn.functional import radius_search

    queries, points = asked.points
    return radius_search(points, queries, asked.radius, return_dists=True)


@peer(library("cuML", "cuml-cu13", "cuml", "cupy", "rmm"), "knn", brute_force=("cuda",))
def cuml_knn(query: Tensor, reference: Tensor, k: int) -> Nearest:
    """NearestNeighbors with its defaults; with gpu_memory=rmm it allocates from a pool."""
    import cupy
    from cuml.neighbors import NearestNeighbors

    found = NearestNeighbors(n_neighbors=k, output_type="cupy").fit(cupy.from_dlpack(reference.detach()))
    return Nearest(*map(torch.from_dlpack, found.kneighbors(cupy.from_dlpack(query.detach()))))


@peer(library("cupyx KDTree", "cupy-cuda13x", "cupyx.scipy.spatial"), "knn", executions=EAGER)
def cupyx_knn(query: Tensor, reference: Tensor, k: int) -> Nearest:
    """Build the tree, query it."""
    import cupy
    from cupyx.scipy.spatial import KDTree

    tree = KDTree(cupy.from_dlpack(reference.detach()))
    return Nearest(*map(torch.from_dlpack, tree.query(cupy.from_dlpack(query.detach()), k)))


@peer(library("jz-tree", "jztree", "jztree"), "knn", executions=EAGER)
def jztree_knn(query: Tensor, reference: Tensor, k: int) -> Nearest:
    """Jitted. A cloud that is searched within itself is passed once, as the library asks for."""
    import jztree
    from jax import dlpack

    points = dlpack.from_dlpack(reference.detach())
    same = query.data_ptr() == reference.data_ptr() and query.shape == reference.shape
    queries = None if same else dlpack.from_dlpack(query.detach())
    distances, indices = jztree.knn.knn.jit(points, k, part_query=queries)
    indices.block_until_ready()
    return Nearest(torch.from_dlpack(distances), torch.from_dlpack(indices))


TORCHBVH = library("torchbvh", "torchbvh", "torchbvh")


@peer(TORCHBVH, "knn", executions=EAGER, batched=True)
def torchbvh_knn(query: Tensor, reference: Tensor, k: int) -> Nearest:
    """Build the tree and query it; k is 4, 8 or 16, so for another k more are found. Squared distances."""
    import torchbvh

    found = next(able for able in (4, 8, 16) if able >= k)
    with torchbvh.BVH(reference.detach()) as tree:
        indices, squared = tree.knn(query.detach(), found)
    return Nearest(squared[..., :k], indices[..., :k])


@peer(TORCHBVH, "farthest", batched=True)
def torchbvh_farthest(points: Tensor, count: int) -> Int[Tensor, "*clouds count"]:
    """Its exact mode."""
    import torchbvh

    return torchbvh.fps(points, count, mode="exact_bucketed").indices


TORCH_CLUSTER = library("torch-cluster", "torch-cluster", "torch_cluster", devices=BOTH)


def _clouds_of(points: Tensor) -> Tensor:
    return torch.arange(len(points), device=points.device).repeat_interleave(points.shape[1])


@peer(TORCH_CLUSTER, "farthest", batched=True)
def torch_cluster_farthest(points: Tensor, count: int) -> Int[Tensor, "*clouds count"]:
    """Every point is compared with each that was chosen."""
    import torch_cluster

    size = points.shape[-2]
    batch = None if points.ndim == 2 else _clouds_of(points)
    rows = torch_cluster.fps(points.view(-1, 3), batch, ratio=count / size, random_start=False)
    return rows.view(*points.shape[:-2], count) % size


@peer(TORCH_CLUSTER, "knn", devices=("cuda",), batched=True, brute_force=("cuda",))
def torch_cluster_knn(query: Tensor, reference: Tensor, k: int) -> Nearest:
    """One brute-force kernel, without distances."""
    import torch_cluster

    if query.ndim == 2:
        return Nearest(None, torch_cluster.knn(reference, query, k)[1].view(-1, k))
    of = [_clouds_of(points) for points in (reference, query)]
    rows = torch_cluster.knn(reference.flatten(0, 1), query.flatten(0, 1), k, *of)[1]
    return Nearest(None, rows.view(*query.shape[:2], k) % reference.shape[1])


@peer(TORCH_CLUSTER, "sums", devices=("cuda",), brute_force=("cuda",))
def torch_cluster_radius(
    query: Tensor, reference: Tensor, features: Tensor, radius: float, sigma: float
) -> Tensor:
    """One brute-force kernel with at most 1024 neighbours per query; weights and sums in torch."""
    import torch_cluster

    found = torch_cluster.radius(reference, query, radius, max_num_neighbors=MAX_IN_RADIUS)
    return _aggregate_pairs(query, reference, features, found[0], found[1], sigma)


OF_TORCH_CLUSTER = {"read": lambda found: Pairs(found[0], found[1]), "brute_force": ("cuda",)}
FIRST_PAIRS = "the first met, not the nearest, as pairs; no distances, no counts"


@peer(TORCH_CLUSTER, "padded", **OF_TORCH_CLUSTER, nearest=False, returns=FIRST_PAIRS)
def torch_cluster_padded(asked: Question) -> Tensor:
    """A tree on the CPU, all pairs on CUDA."""
    import torch_cluster

    queries, points = asked.points
    return torch_cluster.radius(points, queries, asked.radius, max_num_neighbors=asked.k)


@peer(TORCH_CLUSTER, "csr", **OF_TORCH_CLUSTER, returns="pairs; no distances")
def torch_cluster_csr(asked: Question) -> Tensor:
    """The same with more neighbours allowed."""
    return torch_cluster_padded(asked._replace(k=asked.most))


NVALCHEMIOPS = library("nvalchemiops", "nvalchemi-toolkit-ops", "nvalchemiops.torch.neighbors", devices=BOTH)


def _read_nvalchemiops(found: tuple[Tensor, ...]) -> Pairs:
    indices, counts, _, distances = found
    return padded_pairs(indices, indices < len(indices), distances, counts)


@peer(
    NVALCHEMIOPS,
    "padded",
    read=_read_nvalchemiops,
    nearest=False,
    itself=False,
    returns="the first met, not the nearest, without the point itself; periodic shifts too; waits",
)
def nvalchemiops_padded(asked: Question, **options: bool) -> tuple[Tensor, ...]:
    """Its cell list, of one set of points."""
    from nvalchemiops.torch.neighbors import neighbor_list

    options = {"method": "cell_list", "max_neighbors": asked.k, "return_distances": True, **options}
    return neighbor_list(asked.points[0], asked.radius, **options)


@peer(
    NVALCHEMIOPS,
    "csr",
    read=lambda found: Pairs(found[0][0].long(), found[0][1].long(), found[3]),
    itself=False,
    returns="pairs of exact number, for which it waits, without the point itself; periodic shifts too",
)
def nvalchemiops_csr(asked: Question) -> tuple[Tensor, ...]:
    """Its cell list, of one set of points, made into pairs."""
    return nvalchemiops_padded(asked._replace(k=asked.most), return_neighbor_list=True)


KEOPS = library("KeOps", "pykeops", "pykeops.torch", devices=BOTH)


def _keops_squared(query: Tensor, reference: Tensor):
    from pykeops.torch import LazyTensor

    queries, points = query[..., :, None, :].contiguous(), reference[..., None, :, :].contiguous()
    return ((LazyTensor(queries) - LazyTensor(points)) ** 2).sum(-1)


@peer(KEOPS, "knn", batched=True, brute_force=BOTH)
def keops_knn(query: Tensor, reference: Tensor, k: int) -> Nearest:
    """A lazy matrix of squared distances, reduced to the k smallest and their indices."""
    return Nearest(*_keops_squared(query, reference).Kmin_argKmin(k, dim=query.ndim - 1))


@peer(KEOPS, "sums", brute_force=BOTH)
def keops_radius(query: Tensor, reference: Tensor, features: Tensor, radius: float, sigma: float) -> Tensor:
    """The whole formula in one lazy expression."""
    from pykeops.torch import LazyTensor

    squared = _keops_squared(query, reference)
    weights = (-squared.sqrt() / sigma).exp() * (radius * radius - squared).step()
    sums = (weights * LazyTensor(features[None].contiguous())).sum(1)
    return sums / weights.sum(1).clamp(min=torch.finfo(sums.dtype).tiny)


SCIPY = library("scipy cKDTree", "scipy", "scipy.spatial", devices=("cpu",))


@peer(SCIPY, "knn")
def scipy_knn(query: Tensor, reference: Tensor, k: int) -> Nearest:
    """Build the tree and query it on all cores."""
    from scipy.spatial import cKDTree

    found = cKDTree(reference.detach().numpy()).query(query.detach().numpy(), k, workers=-1)
    return Nearest(*(part.view(-1, k) for part in _tensors(*found)))


def _scipy_pairs(query: Tensor, reference: Tensor, radius: float) -> Any:
    """The pairs of two trees and their distances as a structured array; without ``workers``."""
    from scipy.spatial import cKDTree

    trees = [cKDTree(points.detach().numpy()) for points in (query, reference)]
    return trees[0].sparse_distance_matrix(trees[1], radius, output_type="ndarray")


@peer(SCIPY, "sums")
def scipy_radius(query: Tensor, reference: Tensor, features: Tensor, radius: float, sigma: float) -> Tensor:
    """A sparse matrix of distances between two trees, turned into weights; a sparse product."""
    from scipy.sparse import csr_array

    found = _scipy_pairs(query, reference, radius)
    weights = torch.from_numpy(found["v"]).div(-sigma).exp().to(query.dtype).numpy()
    matrix = csr_array((weights, (found["i"], found["j"])), shape=(len(query), len(reference)))
    totals = matrix.sum(1).clip(min=torch.finfo(query.dtype).tiny)
    return _SparseProduct.apply(features, matrix.multiply(1 / totals[:, None]).tocsr())


class _SparseProduct(torch.autograd.Function):
    """A constant scipy matrix times features."""

    @staticmethod
    def forward(ctx, features: Tensor, matrix) -> Tensor:
        ctx.matrix = matrix
        return torch.from_numpy(matrix @ features.detach().numpy()).to(features.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return torch.from_numpy(ctx.matrix.T @ grad.numpy()).to(grad.dtype), None


@peer(SCIPY, "padded", read=_found_below, returns="no counts")
def scipy_padded(asked: Question) -> tuple[Tensor, Tensor, int]:
    """Build the tree and query it on all cores."""
    from scipy.spatial import cKDTree

    queries, points = asked.points
    within = {"distance_upper_bound": asked.radius, "workers": -1}
    return *_tensors(*cKDTree(points.numpy()).query(queries.numpy(), asked.k, **within)), len(points)


SCIPY_PAIRS = "pairs, not in the order of the queries; one core"


@peer(SCIPY, "csr", read=lambda found: Pairs(*found), returns=SCIPY_PAIRS)
def scipy_csr(asked: Question) -> tuple[Tensor, ...]:
    """The distances between two trees."""
    found = _scipy_pairs(*asked.points, asked.radius)
    return _tensors(*(found[column].copy() for column in "ijv"))


PYKDTREE = library("pykdtree", "pykdtree", "pykdtree.kdtree", devices=("cpu",))


def _pykdtree(query: Tensor, reference: Tensor, k: int, **within: float) -> tuple[Tensor, Tensor]:
    """Build the tree and query it, on the threads that OpenMP gives."""
    from pykdtree.kdtree import KDTree

    distances, indices = KDTree(reference.detach().numpy()).query(query.detach().numpy(), k, **within)
    return _tensors(distances.reshape(-1, k), indices.astype("int64").reshape(-1, k))


peer(PYKDTREE, "knn")(lambda query, reference, k: Nearest(*_pykdtree(query, reference, k)))


@peer(PYKDTREE, "padded", read=_found_below, returns="no counts")
def pykdtree_padded(asked: Question) -> tuple[Tensor, Tensor, int]:
    """The k nearest within the radius; an index of N is none."""
    found = _pykdtree(*asked.points, asked.k, distance_upper_bound=asked.radius)
    return *found, len(asked.points[1])
