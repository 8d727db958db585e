"""The peers: one small function for each library and what it finds, and the table of them.

Adding a peer means adding a function and its entry; :func:`pointproj.benchmark.peers.peer` says what it takes
and returns.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from pointproj.benchmark.peers import Contender, Nearest, Pairs, library, padded_pairs, peer
from pointproj.benchmark.workloads import ATTEND_CHANNELS, ATTEND_K, HEADS, Question

MAX_IN_RADIUS = 1024  # neighbours per query that torch-cluster may return


def _aggregate_pairs(asked: Question, features: Tensor, queries: Tensor, rows: Tensor) -> Tensor:
    """Weighted means over pairs (queries[m], rows[m]) in any order."""
    query, reference = asked.points
    weights = (-(query[queries] - reference[rows]).norm(dim=-1) / asked.sigma).exp()
    sums = features.new_zeros(len(query), features.shape[1])
    sums = sums.index_add(0, queries, weights[:, None] * features[rows])
    totals = weights.new_zeros(len(query)).index_add(0, queries, weights)
    return sums / totals.clamp(min=torch.finfo(totals.dtype).tiny)[:, None]


def _tensors(*arrays: Any) -> tuple[Tensor, ...]:
    return tuple(torch.from_numpy(array) for array in arrays)


def tutorial_knn(asked: Question, features: Tensor) -> Tensor:
    """All pairs, their distances, the k smallest of each row."""
    query, reference = asked.points
    distances, rows = (query[:, None] - reference[None]).norm(dim=-1).topk(asked.k, dim=-1, largest=False)
    weights = torch.softmax(-distances / asked.sigma, dim=-1)
    return (weights[..., None] * features[rows]).sum(1)


def tutorial_radius(asked: Question, features: Tensor) -> Tensor:
    """Softmax over all points, masked by the radius and divided by the sum that is left."""
    query, reference = asked.points
    distances = (query[:, None] - reference[None]).norm(dim=-1)
    weights = torch.softmax(-distances / asked.sigma, dim=-1) * (distances <= asked.radius)
    return (weights / (weights.sum(-1, keepdim=True) + 1e-8)) @ features


def _gathered(asked: Question, *tensors: Tensor) -> list[Tensor]:
    """Queries (N, H, D), and keys and values of the neighbours (N, K, H, D)."""
    query, *others = (tensor.unflatten(-1, (HEADS, -1)) for tensor in tensors)
    return [query, *(other[asked.neighbors.indices] for other in others)]


def attention_by_torch(asked: Question, *tensors: Tensor) -> Tensor:
    """Torch's own function, with a row of one query for each point and head."""
    query, keys, values = _gathered(asked, *tensors)
    found = scaled_dot_product_attention(query[:, :, None], keys.transpose(1, 2), values.transpose(1, 2))
    return found[:, :, 0].flatten(1)


def attention_by_einsum(asked: Question, *tensors: Tensor) -> Tensor:
    """Products, softmax and sums written out, for a compiler to fuse."""
    query, keys, values = _gathered(asked, *tensors)
    weights = torch.einsum("nhd,nkhd->nkh", query / math.sqrt(query.shape[-1]), keys).softmax(1)
    return torch.einsum("nkh,nkhd->nhd", weights, values).flatten(1)


@functools.cache
def _physicsnemo_block(device: torch.device) -> nn.Module:
    from physicsnemo.nn.module.point_transformer_attention import LocalPointTransformerBlock

    sizes = {"dim": ATTEND_CHANNELS, "num_heads": HEADS, "neighbor_k": ATTEND_K, "dilation": 1}
    block = LocalPointTransformerBlock(**sizes, mlp_ratio=1, dropout=0.0, use_te=False)
    return block.to(device).requires_grad_(False)


def physicsnemo_attention(asked: Question, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """The attention of its block alone, which makes its own values: neither search nor what follows."""
    points, rows = asked.points[0], asked.neighbors.indices
    return _physicsnemo_block(query.device)._attend(query, keys, points, points, rows, None)


def physicsnemo_knn(asked: Question) -> Nearest:
    """cuML on CUDA and scipy on CPU where they are installed, else brute force."""
    from physicsnemo.nn.functional import knn

    with contextlib.suppress(ImportError):
        import cuml.neighbors  # noqa: F401 - PhysicsNeMo uses it without importing it
    query, reference = asked.points
    indices, distances = knn(reference, query, asked.k)
    return Nearest(distances, indices)


def _physicsnemo_search(asked: Question, **options: Any) -> Any:
    from physicsnemo.nn.functional import radius_search

    query, reference = asked.points
    return radius_search(reference, query, asked.radius, **options)


def physicsnemo_radius(asked: Question, features: Tensor) -> Tensor:
    """All pairs within the radius, none truncated; weights and sums in torch."""
    pairs = _physicsnemo_search(asked)
    found = (pairs[0] if isinstance(pairs, tuple) else pairs).long()
    return _aggregate_pairs(asked, features, found[0], found[1])


def physicsnemo_padded(asked: Question) -> tuple[Tensor, ...]:
    """Indices, points and distances."""
    return _physicsnemo_search(asked, max_points=asked.k, return_dists=True, return_points=True)


def _read_slots(found: tuple[Tensor, Tensor, Tensor]) -> Pairs:
    """Slots that are not used hold index 0 as well, but the origin as its point."""
    indices, points, distances = found
    return padded_pairs(indices, (indices != 0) | (points != 0).any(-1), distances)


def _read_pairs(found: tuple[Tensor, ...]) -> Pairs:
    """Pairs (2, M), and last their distances."""
    return Pairs(found[0][0].long(), found[0][1].long(), found[-1])


def cuml_knn(asked: Question) -> Nearest:
    """NearestNeighbors with its defaults; with gpu_memory=rmm it allocates from a pool."""
    import cupy
    from cuml.neighbors import NearestNeighbors

    query, reference = (cupy.from_dlpack(points.detach()) for points in asked.points)
    found = NearestNeighbors(n_neighbors=asked.k, output_type="cupy").fit(reference)
    return Nearest(*map(torch.from_dlpack, found.kneighbors(query)))


def cupyx_knn(asked: Question) -> Nearest:
    """Build the tree, query it."""
    import cupy
    from cupyx.scipy.spatial import KDTree

    query, reference = (cupy.from_dlpack(points.detach()) for points in asked.points)
    return Nearest(*map(torch.from_dlpack, KDTree(reference).query(query, asked.k)))


def jztree_knn(asked: Question) -> Nearest:
    """Jitted. A cloud that is searched within itself is passed once, as the library asks for."""
    import jztree
    from jax import dlpack

    query, reference = asked.points
    same = query.data_ptr() == reference.data_ptr() and query.shape == reference.shape
    queries = None if same else dlpack.from_dlpack(query.detach())
    points = dlpack.from_dlpack(reference.detach())
    distances, indices = jztree.knn.knn.jit(points, asked.k, part_query=queries)
    indices.block_until_ready()
    return Nearest(torch.from_dlpack(distances), torch.from_dlpack(indices))


def torchbvh_knn(asked: Question) -> Nearest:
    """Build the tree and query it; k is 4, 8 or 16, so for another k more are found. Squared distances."""
    import torchbvh

    query, reference = asked.points
    found = next(able for able in (4, 8, 16) if able >= asked.k)
    with torchbvh.BVH(reference.detach()) as tree:
        indices, squared = tree.knn(query.detach(), found)
    return Nearest(squared[..., : asked.k], indices[..., : asked.k])


def torchbvh_farthest(asked: Question) -> Int[Tensor, "*clouds count"]:
    """Its exact mode."""
    import torchbvh

    return torchbvh.fps(asked.points[0], asked.k, mode="exact_bucketed").indices


def _packed(points: Tensor) -> tuple[Tensor, Tensor | None]:
    """The points of all clouds, and the cloud of each."""
    if points.ndim == 2:
        return points, None
    clouds = torch.arange(len(points), device=points.device).repeat_interleave(points.shape[1])
    return points.flatten(0, 1), clouds


def torch_cluster_farthest(asked: Question) -> Int[Tensor, "*clouds count"]:
    """Every point is compared with each that was chosen."""
    import torch_cluster

    points, size = asked.points[0], asked.points[0].shape[-2]
    rows = torch_cluster.fps(*_packed(points), ratio=asked.k / size, random_start=False)
    return rows.view(*points.shape[:-2], asked.k) % size


def torch_cluster_knn(asked: Question) -> Nearest:
    """One brute-force kernel, without distances."""
    import torch_cluster

    query, reference = asked.points
    (queries, of_query), (points, of_points) = _packed(query), _packed(reference)
    rows = torch_cluster.knn(points, queries, asked.k, of_points, of_query)[1]
    return Nearest(None, rows.view(*query.shape[:-1], asked.k) % reference.shape[-2])


def _torch_cluster_pairs(asked: Question, most: int) -> Tensor:
    import torch_cluster

    query, reference = asked.points
    return torch_cluster.radius(reference, query, asked.radius, max_num_neighbors=most)


def torch_cluster_radius(asked: Question, features: Tensor) -> Tensor:
    """One brute-force kernel with at most 1024 neighbours per query; weights and sums in torch."""
    return _aggregate_pairs(asked, features, *_torch_cluster_pairs(asked, MAX_IN_RADIUS))


def nvalchemi_padded(asked: Question, **options: bool) -> tuple[Tensor, ...]:
    """Its cell list, of one set of points: indices, counts, shifts and distances."""
    from nvalchemiops.torch.neighbors import neighbor_list

    options = {"method": "cell_list", "max_neighbors": asked.k, "return_distances": True, **options}
    return neighbor_list(asked.points[0], asked.radius, **options)


def nvalchemi_csr(asked: Question) -> tuple[Tensor, ...]:
    """The same, made into pairs."""
    return nvalchemi_padded(asked._replace(k=asked.most), return_neighbor_list=True)


def _read_counted(found: tuple[Tensor, ...]) -> Pairs:
    indices, counts, _, distances = found
    return padded_pairs(indices, indices < len(indices), distances, counts)


def _keops_squared(query: Tensor, reference: Tensor) -> Any:
    import pykeops
    from pykeops.torch import LazyTensor

    if query.is_cuda and not pykeops.config.gpu_available:  # it would read from these addresses on the host
        raise RuntimeError("KeOps found no libcuda, libnvrtc or libcudart: see LD_LIBRARY_PATH and CUDA_PATH")
    queries, points = query[..., :, None, :].contiguous(), reference[..., None, :, :].contiguous()
    return ((LazyTensor(queries) - LazyTensor(points)) ** 2).sum(-1)


def keops_knn(asked: Question) -> Nearest:
    """A lazy matrix of squared distances, reduced to the k smallest and their indices."""
    dimension = asked.points[0].ndim - 1
    return Nearest(*_keops_squared(*asked.points).Kmin_argKmin(asked.k, dim=dimension))


def keops_radius(asked: Question, features: Tensor) -> Tensor:
    """The whole formula in one lazy expression."""
    from pykeops.torch import LazyTensor

    squared, radius = _keops_squared(*asked.points), asked.radius
    weights = (-squared.sqrt() / asked.sigma).exp() * (radius * radius - squared).step()
    sums = (weights * LazyTensor(features[None].contiguous())).sum(1)
    return sums / weights.sum(1).clamp(min=torch.finfo(sums.dtype).tiny)


def _scipy_nearest(asked: Question, **within: float) -> tuple[Tensor, Tensor]:
    """Build the tree and query it on all cores."""
    from scipy.spatial import cKDTree

    query, reference = (points.detach().numpy() for points in asked.points)
    found = cKDTree(reference).query(query, asked.k, workers=-1, **within)
    return _tensors(*(part.reshape(-1, asked.k) for part in found))


def _pykdtree_nearest(asked: Question, **within: float) -> tuple[Tensor, Tensor]:
    """Build the tree and query it, on the threads that OpenMP gives."""
    from pykdtree.kdtree import KDTree

    query, reference = (points.detach().numpy() for points in asked.points)
    distances, indices = KDTree(reference).query(query, asked.k, **within)
    return _tensors(distances.reshape(-1, asked.k), indices.astype("int64").reshape(-1, asked.k))


def _scipy_pairs(asked: Question) -> Any:
    """The pairs of two trees and their distances as a structured array; without ``workers``."""
    from scipy.spatial import cKDTree

    trees = [cKDTree(points.detach().numpy()) for points in asked.points]
    return trees[0].sparse_distance_matrix(trees[1], asked.radius, output_type="ndarray")


def scipy_radius(asked: Question, features: Tensor) -> Tensor:
    """A sparse matrix of distances between two trees, turned into weights; a sparse product."""
    from scipy.sparse import csr_array

    found, dtype = _scipy_pairs(asked), features.dtype
    weights = torch.from_numpy(found["v"]).div(-asked.sigma).exp().to(dtype).numpy()
    sizes = [len(points) for points in asked.points]
    matrix = csr_array((weights, (found["i"], found["j"])), shape=sizes)
    totals = matrix.sum(1).clip(min=torch.finfo(dtype).tiny)
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


def scipy_csr(asked: Question) -> tuple[Tensor, ...]:
    """The distances between two trees."""
    found = _scipy_pairs(asked)
    return _tensors(*(found[column].copy() for column in "ijv"))


def _found_below(found: tuple[Tensor, Tensor, int]) -> Pairs:
    """Pairs of (distances, indices, N), where an index of N is none."""
    distances, indices, count = found
    return padded_pairs(indices, indices < count, distances)


def _tree(of: dict[str, Any], nearest: Callable[..., tuple[Tensor, Tensor]]) -> Iterator[Contender]:
    """What a library finds that builds a tree and queries it for the k nearest, all or within a radius."""

    def padded(asked: Question) -> tuple[Tensor, Tensor, int]:
        return *nearest(asked, distance_upper_bound=asked.radius), len(asked.points[1])

    yield peer(of, "knn", lambda asked: Nearest(*nearest(asked)))
    yield peer(of, "padded", padded, read=_found_below, returns="no counts")


BOTH = ("cpu", "cuda")
EAGER = {"executions": ("eager",)}  # no table shows how their networks run compiled
ON_GPU = {"brute_force": ("cuda",)}
FIRST_MET = {"nearest": False}
ROWS = {"read": lambda found: Pairs(found[0], found[1]), **ON_GPU}

VECTORS = "vector attention: a network scores each pair, with projections of its own"
SLOTS = "the first met, not the nearest; no counts; slots that are not used hold index 0"
EXACT = "pairs of exact number, for which it waits"
FIRST_ROWS = "the first met, not the nearest, as pairs; no distances, no counts"
FIRST_OTHERS = "the first met, not the nearest, without the point itself; periodic shifts too; waits"
ALL_OTHERS = f"{EXACT}, without the point itself; periodic shifts too"
UNORDERED = "pairs, not in the order of the queries; one core"

TUTORIAL = library("tutorial torch", "torch", devices=BOTH)
SDPA, EINSUM = (library(f"gather + {how}", "torch", devices=BOTH) for how in ("SDPA", "einsum"))
PHYSICSNEMO = library("PhysicsNeMo", "nvidia-physicsnemo", "physicsnemo.nn.functional", devices=BOTH)
BLOCK = PHYSICSNEMO | {"imports": ("physicsnemo.nn.module.point_transformer_attention",)}
CUML = library("cuML", "cuml-cu13", "cuml", "cupy", "rmm")
CUPYX = library("cupyx KDTree", "cupy-cuda13x", "cupyx.scipy.spatial")
JZTREE = library("jz-tree", "jztree", "jztree")
TORCHBVH = library("torchbvh", "torchbvh", "torchbvh")
CLUSTER = library("torch-cluster", "torch-cluster", "torch_cluster", devices=BOTH)
CLUSTER_GPU = CLUSTER | {"devices": ("cuda",)}
NVALCHEMI = library("nvalchemiops", "nvalchemi-toolkit-ops", "nvalchemiops.torch.neighbors", devices=BOTH)
KEOPS = library("KeOps", "pykeops", "pykeops.torch", devices=BOTH)
SCIPY = library("scipy cKDTree", "scipy", "scipy.spatial", devices=("cpu",))
PYKDTREE = library("pykdtree", "pykdtree", "pykdtree.kdtree", devices=("cpu",))

PEERS: list[Contender] = [
    peer(TUTORIAL, "knn_sums", tutorial_knn, traceable=True, brute_force=BOTH, bytes_per_pair=16.0),
    peer(TUTORIAL, "sums", tutorial_radius, traceable=True, brute_force=BOTH, bytes_per_pair=110.0),
    peer(SDPA, "attend", attention_by_torch),
    peer(EINSUM, "attend", attention_by_einsum, traceable=True),
    peer(BLOCK, "attend", physicsnemo_attention, VECTORS, compared=False),
    peer(PHYSICSNEMO, "knn", physicsnemo_knn, **ON_GPU),
    peer(PHYSICSNEMO, "sums", physicsnemo_radius),
    peer(PHYSICSNEMO, "padded", physicsnemo_padded, SLOTS, read=_read_slots, **FIRST_MET),
    peer(PHYSICSNEMO, "csr", partial(_physicsnemo_search, return_dists=True), EXACT, read=_read_pairs),
    peer(CUML, "knn", cuml_knn, **ON_GPU),
    peer(CUPYX, "knn", cupyx_knn, **EAGER),
    peer(JZTREE, "knn", jztree_knn, **EAGER),
    peer(TORCHBVH, "knn", torchbvh_knn, **EAGER, batched=True),
    peer(TORCHBVH, "farthest", torchbvh_farthest, batched=True),
    peer(CLUSTER, "farthest", torch_cluster_farthest, batched=True),
    peer(CLUSTER_GPU, "knn", torch_cluster_knn, **ON_GPU, batched=True),
    peer(CLUSTER_GPU, "sums", torch_cluster_radius, **ON_GPU),
    peer(CLUSTER, "padded", lambda of: _torch_cluster_pairs(of, of.k), FIRST_ROWS, **ROWS, **FIRST_MET),
    peer(CLUSTER, "csr", lambda of: _torch_cluster_pairs(of, of.most), "pairs; no distances", **ROWS),
    peer(NVALCHEMI, "padded", nvalchemi_padded, FIRST_OTHERS, read=_read_counted, itself=False, **FIRST_MET),
    peer(NVALCHEMI, "csr", nvalchemi_csr, ALL_OTHERS, read=_read_pairs, itself=False),
    peer(KEOPS, "knn", keops_knn, batched=True, brute_force=BOTH),
    peer(KEOPS, "sums", keops_radius, brute_force=BOTH),
    *_tree(SCIPY, _scipy_nearest),
    *_tree(PYKDTREE, _pykdtree_nearest),
    peer(SCIPY, "sums", scipy_radius),
    peer(SCIPY, "csr", scipy_csr, UNORDERED, read=lambda found: Pairs(*found)),
]
