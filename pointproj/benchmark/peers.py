"""The peers: one function for each library and operator. Adding a peer means adding a function."""

import contextlib
import os

import torch
from torch import Tensor

from pointproj.benchmark.peer import PEERS, Nearest, peer

__all__ = ["PEERS", "prepare_environment"]

MAX_IN_RADIUS = 1024  # neighbours per query that torch-cluster may return
BOTH = ("cpu", "cuda")


@peer(
    "tutorial torch",
    "knn",
    distribution="torch",
    devices=BOTH,
    finds_neighbors=False,
    traceable=True,
    brute_force=True,
    bytes_per_pair=16.0,
)
def tutorial_knn(query: Tensor, reference: Tensor, features: Tensor, k: int, sigma: float) -> Tensor:
    """All pairs, their distances, the k smallest of each row."""
    distances, rows = (query[:, None] - reference[None]).norm(dim=-1).topk(k, dim=-1, largest=False)
    weights = torch.softmax(-distances / sigma, dim=-1)
    return (weights[..., None] * features[rows]).sum(1)


@peer(
    "tutorial torch",
    "radius",
    distribution="torch",
    devices=BOTH,
    finds_neighbors=False,
    traceable=True,
    brute_force=True,
    bytes_per_pair=110.0,
)
def tutorial_radius(
    query: Tensor, reference: Tensor, features: Tensor, radius: float, sigma: float
) -> Tensor:
    """Softmax over all points, masked by the radius and divided by the sum that is left."""
    distances = (query[:, None] - reference[None]).norm(dim=-1)
    weights = torch.softmax(-distances / sigma, dim=-1) * (distances <= radius)
    return (weights / (weights.sum(-1, keepdim=True) + 1e-8)) @ features


@peer("PhysicsNeMo", "knn", "physicsnemo.nn.functional", distribution="nvidia-physicsnemo", devices=BOTH)
def physicsnemo_knn(query: Tensor, reference: Tensor, k: int) -> Nearest:
    """cuML on CUDA and scipy on CPU where they are installed, else brute force."""
    from physicsnemo.nn.functional import knn

    with contextlib.suppress(ImportError):
        import cuml.neighbors  # noqa: F401 - PhysicsNeMo uses it without importing it
    indices, distances = knn(reference, query, k)
    return Nearest(distances, indices)


@peer(
    "PhysicsNeMo",
    "radius",
    "physicsnemo.nn.functional",
    distribution="nvidia-physicsnemo",
    devices=BOTH,
    finds_neighbors=False,
)
def physicsnemo_radius(
    query: Tensor, reference: Tensor, features: Tensor, radius: float, sigma: float
) -> Tensor:
    """All pairs within the radius, none truncated; weights and sums in torch."""
    from physicsnemo.nn.functional import radius_search

    pairs = radius_search(reference, query, radius)
    found = (pairs[0] if isinstance(pairs, tuple) else pairs).long()
    return _aggregate_pairs(query, reference, features, found[0], found[1], sigma)


@peer("cuML", "knn", "cuml", "cupy", "rmm", distribution="cuml-cu13")
def cuml_knn(query: Tensor, reference: Tensor, k: int) -> Nearest:
    """NearestNeighbors with its defaults; with gpu_memory=rmm it allocates from a pool."""
    import cupy
    from cuml.neighbors import NearestNeighbors

    found = NearestNeighbors(n_neighbors=k, output_type="cupy").fit(cupy.from_dlpack(reference.detach()))
    return Nearest(*map(torch.from_dlpack, found.kneighbors(cupy.from_dlpack(query.detach()))))


@peer("cupyx KDTree", "knn", "cupyx.scipy.spatial", distribution="cupy-cuda13x")
def cupyx_knn(query: Tensor, reference: Tensor, k: int) -> Nearest:
    """Build the tree, query it."""
    import cupy
    from cupyx.scipy.spatial import KDTree

    tree = KDTree(cupy.from_dlpack(reference.detach()))
    return Nearest(*map(torch.from_dlpack, tree.query(cupy.from_dlpack(query.detach()), k)))


@peer("jz-tree", "knn", "jztree", distribution="jztree")
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


@peer("torchbvh", "knn", "torchbvh", distribution="torchbvh")
def torchbvh_knn(query: Tensor, reference: Tensor, k: int) -> Nearest:
    """Build the tree and query it; k is 4, 8 or 16, so for another k more are found. Squared distances."""
    import torchbvh

    found = next(able for able in (4, 8, 16) if able >= k)
    with torchbvh.BVH(reference.detach()) as tree:
        indices, squared = tree.knn(query.detach(), found)
    return Nearest(squared[:, :k], indices[:, :k])


@peer("torch-cluster", "knn", "torch_cluster", distribution="torch-cluster", brute_force=True)
def torch_cluster_knn(query: Tensor, reference: Tensor, k: int) -> Nearest:
    """One brute-force kernel, without distances."""
    import torch_cluster

    return Nearest(None, torch_cluster.knn(reference, query, k)[1].view(-1, k))


@peer(
    "torch-cluster",
    "radius",
    "torch_cluster",
    distribution="torch-cluster",
    finds_neighbors=False,
    brute_force=True,
)
def torch_cluster_radius(
    query: Tensor, reference: Tensor, features: Tensor, radius: float, sigma: float
) -> Tensor:
    """One brute-force kernel with at most 1024 neighbours per query; weights and sums in torch."""
    import torch_cluster

    found = torch_cluster.radius(reference, query, radius, max_num_neighbors=MAX_IN_RADIUS)
    return _aggregate_pairs(query, reference, features, found[0], found[1], sigma)


@peer("KeOps", "knn", "pykeops.torch", distribution="pykeops", devices=BOTH, brute_force=True)
def keops_knn(query: Tensor, reference: Tensor, k: int) -> Nearest:
    """A lazy matrix of squared distances, reduced to the k smallest and their indices."""
    return Nearest(*_keops_squared(query, reference).Kmin_argKmin(k, dim=1))


@peer(
    "KeOps",
    "radius",
    "pykeops.torch",
    distribution="pykeops",
    devices=BOTH,
    finds_neighbors=False,
    brute_force=True,
)
def keops_radius(query: Tensor, reference: Tensor, features: Tensor, radius: float, sigma: float) -> Tensor:
    """The whole formula in one lazy expression."""
    from pykeops.torch import LazyTensor

    squared = _keops_squared(query, reference)
    weights = (-squared.sqrt() / sigma).exp() * (radius * radius - squared).step()
    sums = (weights * LazyTensor(features[None].contiguous())).sum(1)
    return sums / weights.sum(1).clamp(min=torch.finfo(sums.dtype).tiny)


def _keops_squared(query: Tensor, reference: Tensor):
    from pykeops.torch import LazyTensor

    difference = LazyTensor(query[:, None].contiguous()) - LazyTensor(reference[None].contiguous())
    return (difference**2).sum(-1)


@peer("scipy cKDTree", "knn", "scipy.spatial", distribution="scipy", devices=("cpu",))
def scipy_knn(query: Tensor, reference: Tensor, k: int) -> Nearest:
    """Build the tree and query it on all cores."""
    from scipy.spatial import cKDTree

    found = cKDTree(reference.detach().numpy()).query(query.detach().numpy(), k, workers=-1)
    return Nearest(*(torch.from_numpy(part).view(-1, k) for part in found))


@peer(
    "scipy cKDTree", "radius", "scipy.spatial", distribution="scipy", devices=("cpu",), finds_neighbors=False
)
def scipy_radius(query: Tensor, reference: Tensor, features: Tensor, radius: float, sigma: float) -> Tensor:
    """A sparse matrix of distances between two trees, turned into weights; a sparse product."""
    from scipy.sparse import csr_array
    from scipy.spatial import cKDTree

    trees = (cKDTree(points.detach().numpy()) for points in (query, reference))
    found = next(trees).sparse_distance_matrix(next(trees), radius, output_type="ndarray")
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


@peer("pykdtree", "knn", "pykdtree.kdtree", distribution="pykdtree", devices=("cpu",))
def pykdtree_knn(query: Tensor, reference: Tensor, k: int) -> Nearest:
    """Build the tree and query it, on the threads that OpenMP gives."""
    from pykdtree.kdtree import KDTree

    distances, indices = KDTree(reference.detach().numpy()).query(query.detach().numpy(), k)
    return Nearest(*(torch.from_numpy(part).view(-1, k) for part in (distances, indices.astype("int64"))))


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


def prepare_environment() -> None:
    """Settings that peers read when they are imported."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # jax would take most of the GPU
