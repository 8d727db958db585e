"""The peers: one small function for each search or sum of another library, and the table of them.

To add a peer, add a function and its entry; :func:`peer` says what the function takes and returns.
"""

import contextlib
import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pointproj.benchmark import implementations
from pointproj.benchmark.config import EXECUTIONS, NETWORK, SUMS
from pointproj.benchmark.implementations import (
    PAIRS_PER_SECOND,
    FoundPairs,
    Implementation,
    Nearest,
    of_library,
    padded_pairs,
)
from pointproj.benchmark.peer_attention import (
    BLOCK,
    attention_by_einsum,
    attention_by_torch,
    physicsnemo_attention,
)
from pointproj.benchmark.workloads import Inputs

MAX_IN_RADIUS = 1024  # neighbours per query that torch-cluster may return
BOTH = ("cpu", "cuda")

_SUMMED = (*SUMS[:2], *NETWORK)
# By what a function finds: its operator, and the modes in which it is called.
_FINDS: dict[str, tuple[str, tuple[str, ...]]] = {
    **{"knn": ("knn", ("knn", *_SUMMED)), "knn_sums": ("knn", _SUMMED), "sums": ("radius", _SUMMED)},
    **{"attend": ("attend", SUMS[:2]), "farthest": ("farthest_points", ("farthest",))},
    **{"padded": ("radius", ("padded",)), "csr": ("radius", ("csr",))},
}
# Distribution, what must be importable, and the types of devices that it runs on.
_LIBRARIES: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "tutorial torch": ("torch", (), BOTH),
    "gather + SDPA": ("torch", (), BOTH),
    "gather + einsum": ("torch", (), BOTH),
    "PhysicsNeMo": ("nvidia-physicsnemo", ("physicsnemo.nn.functional",), BOTH),
    "cuML": ("cuml-cu13", ("cuml", "cupy", "rmm"), BOTH[1:]),
    "cupyx KDTree": ("cupy-cuda13x", ("cupyx.scipy.spatial",), BOTH[1:]),
    "jz-tree": ("jztree", ("jztree",), BOTH[1:]),
    "torchbvh": ("torchbvh", ("torchbvh",), BOTH[1:]),
    "torch-cluster": ("torch-cluster", ("torch_cluster",), BOTH),
    "nvalchemiops": ("nvalchemi-toolkit-ops", ("nvalchemiops.torch.neighbors",), BOTH),
    "KeOps": ("pykeops", ("pykeops.torch",), BOTH),
    "cupy-knn": ("cupy-knn", ("cupy_knn",), BOTH[1:]),
    "torch-fps": ("torch-fps", ("torch_fps",), BOTH),
    "vesin": ("vesin-torch", ("vesin_torch",), BOTH),
    "scipy cKDTree": ("scipy", ("scipy.spatial",), BOTH[:1]),
    "pykdtree": ("pykdtree", ("pykdtree.kdtree",), BOTH[:1]),
}


def peer(name: str, finds: str, function: Callable, returns: str = "", **properties: Any) -> Implementation:
    """An entry of the table; ``properties`` are further fields of :class:`Implementation`.

    ``finds`` says what the function takes and returns. ``knn`` takes query points, reference points and k. It
    returns distances (perhaps None) and indices; torch gathers the features and sums them. All others take
    :class:`Inputs`. ``farthest`` returns rows in the order chosen, ``padded`` and ``csr`` what ``read`` turns
    into pairs. ``knn_sums``, ``sums`` and ``attend`` also take the inputs' tensors, and return aggregated
    features.
    """
    package, imports, devices = _LIBRARIES[name]
    operator, modes = _FINDS[finds]
    facts = {"imports": imports, "devices": devices, "operator": operator, "modes": modes, "returns": returns}
    if finds == "knn":
        implementations.SEARCHES[name] = function
        facts["find"] = {finds: lambda inputs: Nearest(*function(*inputs.points, inputs.k))}
        facts |= {"aggregate": partial(implementations.gather_aggregate, name), **TRACED}
    elif "sums" in finds or finds == "attend":
        facts["aggregate"] = function
    else:
        facts["find"] = {finds: function}
    return Implementation(name, package, **facts | properties)


def _sum_pairs(inputs: Inputs, features: Tensor, queries: Tensor, rows: Tensor) -> Tensor:
    """Weighted means over pairs (queries[m], rows[m]) in any order."""
    query, reference = inputs.points
    weights = (-(query[queries] - reference[rows]).norm(dim=-1) / inputs.sigma).exp()
    sums = features.new_zeros(len(query), features.shape[1])
    sums = sums.index_add(0, queries, weights[:, None] * features[rows])
    totals = weights.new_zeros(len(query)).index_add(0, queries, weights)
    return sums / totals.clamp(min=torch.finfo(totals.dtype).tiny)[:, None]


def tutorial_knn(inputs: Inputs, features: Tensor) -> Tensor:
    """All pairs, their distances, the k smallest of each row."""
    query, reference = inputs.points
    distances, rows = (query[:, None] - reference[None]).norm(dim=-1).topk(inputs.k, dim=-1, largest=False)
    weights = torch.softmax(-distances / inputs.sigma, dim=-1)
    return (weights[..., None] * features[rows]).sum(1)


def tutorial_radius(inputs: Inputs, features: Tensor) -> Tensor:
    """Softmax over all points, masked by the radius and divided by the sum that is left."""
    query, reference = inputs.points
    distances = (query[:, None] - reference[None]).norm(dim=-1)
    weights = torch.softmax(-distances / inputs.sigma, dim=-1) * (distances <= inputs.radius)
    return (weights / (weights.sum(-1, keepdim=True) + 1e-8)) @ features


def physicsnemo_knn(query: Tensor, reference: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """cuML on CUDA and scipy on CPU where they are installed, else brute force."""
    with contextlib.suppress(ImportError):
        importlib.import_module("cuml.neighbors")  # PhysicsNeMo uses it without importing it
    indices, distances = of_library("physicsnemo.nn.functional.knn")(reference, query, k)
    return distances, indices


def _physicsnemo_search(inputs: Inputs, **options: Any) -> Any:
    query, reference = inputs.points
    return of_library("physicsnemo.nn.functional.radius_search")(reference, query, inputs.radius, **options)


def physicsnemo_radius(inputs: Inputs, features: Tensor) -> Tensor:
    """All pairs within the radius, none truncated; weights and sums in torch."""
    pairs = _physicsnemo_search(inputs)
    return _sum_pairs(inputs, features, *(pairs[0] if isinstance(pairs, tuple) else pairs).long())


def physicsnemo_padded(inputs: Inputs) -> tuple[Tensor, ...]:
    """Indices, points and distances."""
    return _physicsnemo_search(inputs, max_points=inputs.k, return_dists=True, return_points=True)


def _read_slots(found: tuple[Tensor, Tensor, Tensor]) -> FoundPairs:
    """The pairs of used slots. An unused slot holds index 0 and, as the point, the origin."""
    indices, points, distances = found
    return padded_pairs(indices, (indices != 0) | (points != 0).any(-1), distances)


def _arrays(*tensors: Tensor) -> list[Any]:
    """The same memory as arrays of CuPy on a GPU, and of numpy elsewhere."""
    convert = of_library("cupy.from_dlpack") if tensors[0].is_cuda else Tensor.numpy
    return [convert(tensor.detach()) for tensor in tensors]


def _tree(path: str, query: Tensor, reference: Tensor, k: int, **options: Any) -> tuple[Tensor, Tensor]:
    """Build the tree of a library with scipy's interface, and query it on all cores or on the GPU."""
    query, reference = _arrays(query, reference)
    found = of_library(path)(reference).query(query, k, **options)
    distances, indices = (torch.from_dlpack(part.reshape(-1, k)) for part in found)
    return distances, indices.long()


def _tree_padded(tree: Callable, inputs: Inputs) -> tuple[Tensor, Tensor, int]:
    """Distances, indices and N; an unused slot holds index N."""
    return *tree(*inputs.points, inputs.k, distance_upper_bound=inputs.radius), len(inputs.points[1])


def cuml_knn(query: Tensor, reference: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """NearestNeighbors with its defaults; with gpu_memory=rmm it allocates from a pool."""
    query, reference = _arrays(query, reference)
    made = of_library("cuml.neighbors.NearestNeighbors")(n_neighbors=k, output_type="cupy")
    return tuple(map(torch.from_dlpack, made.fit(reference).kneighbors(query)))


def jztree_knn(query: Tensor, reference: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Jitted. A cloud that is searched within itself is passed once, as the library asks for."""
    made = of_library("jax.dlpack.from_dlpack")
    same = query.data_ptr() == reference.data_ptr() and query.shape == reference.shape
    queries = None if same else made(query.detach())
    distances, indices = of_library("jztree.knn").knn.jit(made(reference.detach()), k, part_query=queries)
    indices.block_until_ready()
    return torch.from_dlpack(distances), torch.from_dlpack(indices)


def torchbvh_knn(query: Tensor, reference: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Build the tree and query it. The library finds 4, 8 or 16, and returns squared distances."""
    found = next(able for able in (4, 8, 16) if able >= k)
    with of_library("torchbvh.BVH")(reference.detach()) as tree:
        indices, squared = tree.knn(query.detach(), found)
    return squared[..., :k], indices[..., :k]


def cupy_knn(query: Tensor, reference: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Build the tree, prepare the kernel for k, and query; squared distances."""
    query, reference = _arrays(query, reference)
    index = of_library("cupy_knn.LBVHIndex")()
    index.build(reference)
    index.prepare_knn_default(k)
    indices, squared, _ = index.query_knn(query)
    return torch.from_dlpack(squared), torch.from_dlpack(indices).long()


def _keops_squared(query: Tensor, reference: Tensor) -> Any:
    lazy = of_library("pykeops.torch.LazyTensor")
    if query.is_cuda and torch.version.cuda.startswith("13."):
        raise RuntimeError("KeOps 2.3 ends the whole process with CUDA 13")
    if query.is_cuda and not of_library(
        "pykeops.config.gpu_available"
    ):  # it would read these addresses on the host
        raise RuntimeError("KeOps found no libcuda, libnvrtc or libcudart: see LD_LIBRARY_PATH and CUDA_PATH")
    queries, points = query[..., :, None, :].contiguous(), reference[..., None, :, :].contiguous()
    return ((lazy(queries) - lazy(points)) ** 2).sum(-1)


def keops_knn(query: Tensor, reference: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """A lazy matrix of squared distances, reduced to the k smallest and their indices."""
    return _keops_squared(query, reference).Kmin_argKmin(k, dim=query.ndim - 1)


def keops_radius(inputs: Inputs, features: Tensor) -> Tensor:
    """The whole formula in one lazy expression."""
    squared, radius = _keops_squared(*inputs.points), inputs.radius
    weights = (-squared.sqrt() / inputs.sigma).exp() * (radius * radius - squared).step()
    sums = (weights * of_library("pykeops.torch.LazyTensor")(features[None].contiguous())).sum(1)
    return sums / weights.sum(1).clamp(min=torch.finfo(sums.dtype).tiny)


def _packed(points: Tensor) -> tuple[Tensor, Tensor | None]:
    """The points of all clouds, and the cloud of each."""
    if points.ndim == 2:
        return points, None
    clouds = torch.arange(len(points), device=points.device).repeat_interleave(points.shape[1])
    return points.flatten(0, 1), clouds


def torch_cluster_farthest(inputs: Inputs) -> Tensor:
    """Every point is compared with each that was chosen."""
    points, size = inputs.points[0], inputs.points[0].shape[-2]
    rows = of_library("torch_cluster.fps")(*_packed(points), ratio=inputs.k / size, random_start=False)
    return rows.view(*points.shape[:-2], inputs.k) % size


def torch_fps_farthest(inputs: Inputs) -> Tensor:
    """Its sampler of dense batches, without the checks that wait for the device."""
    points = inputs.points[0]
    clouds = points.view(-1, *points.shape[-2:])
    options = {"random_start": False, "validate": False, "assume_finite": True}
    exists = torch.ones(clouds.shape[:2], dtype=torch.bool, device=points.device)
    rows = of_library("torch_fps.farthest_point_sampling")(clouds, exists, inputs.k, **options)
    return rows.view(*points.shape[:-2], inputs.k)


def vesin_csr(inputs: Inputs) -> tuple[Tensor, ...]:
    """Queries, indices and distances of the pairs, searched in float64."""
    points = inputs.points[0]
    made = of_library("vesin_torch.NeighborList")(inputs.radius, full_list=True)
    return tuple(made.compute(points, points.new_zeros(3, 3), periodic=False, quantities="ijd"))


def torch_cluster_knn(query: Tensor, reference: Tensor, k: int) -> tuple[None, Tensor]:
    """One brute-force kernel, without distances."""
    (queries, of_query), (points, of_points) = _packed(query), _packed(reference)
    rows = of_library("torch_cluster.knn")(points, queries, k, of_points, of_query)[1]
    return None, rows.view(*query.shape[:-1], k) % reference.shape[-2]


def _cluster_pairs(inputs: Inputs, most: int = MAX_IN_RADIUS) -> Tensor:
    """One brute-force kernel."""
    query, reference = inputs.points
    return of_library("torch_cluster.radius")(reference, query, inputs.radius, max_num_neighbors=most)


def _nvalchemi(inputs: Inputs, most: int, *, pairs: bool = False) -> tuple[Tensor, ...]:
    """Its cell list of one set of points: padded indices, counts, shifts and distances; or pairs."""
    options = {"method": "cell_list", "max_neighbors": most, "return_neighbor_list": pairs}
    search = of_library("nvalchemiops.torch.neighbors.neighbor_list")
    return search(inputs.points[0], inputs.radius, return_distances=True, **options)


def _scipy_pairs(inputs: Inputs) -> Any:
    """The pairs of two trees and their distances as a structured array, found on one core."""
    trees = [of_library("scipy.spatial.cKDTree")(points) for points in _arrays(*inputs.points)]
    return trees[0].sparse_distance_matrix(trees[1], inputs.radius, output_type="ndarray")


def scipy_csr(inputs: Inputs) -> tuple[Tensor, ...]:
    """Queries, indices and distances of the pairs."""
    found = _scipy_pairs(inputs)
    return tuple(torch.from_numpy(found[column].copy()) for column in "ijv")


def scipy_radius(inputs: Inputs, features: Tensor) -> Tensor:
    """A product with a sparse matrix: the weights of the pairs of two trees, divided by their sums."""
    found, dtype = _scipy_pairs(inputs), features.dtype
    weights = torch.from_numpy(found["v"]).div(-inputs.sigma).exp().to(dtype).numpy()
    sizes = [len(points) for points in inputs.points]
    matrix = of_library("scipy.sparse.csr_array")((weights, (found["i"], found["j"])), shape=sizes)
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


EAGER = {"executions": EXECUTIONS[:1]}  # no table has their compiled networks
TRACED = {"executions": EXECUTIONS[:2]}  # torch.compile can trace it
PLAIN_TORCH = {**TRACED, "brute_force": PAIRS_PER_SECOND}
ON_GPU = {"brute_force": {"cuda": 1e11}}
TILED = {"brute_force": {"cuda": 3e11}}
GPU_ONLY = {"devices": BOTH[1:], **ON_GPU}
FIRST_FOUND = {"nearest": False}
# How the list of a library is read.
ROWS = {"read": lambda found: FoundPairs(found[0], found[1]), **ON_GPU}
PAIRS = {"read": lambda found: FoundPairs(*found[0].long(), found[-1])}
PADDED = {"read": lambda of: padded_pairs(of[0], of[0] < len(of[0]), of[3], of[1]), "itself": False}
OTHERS = {**PAIRS, "itself": False}
VESIN_PAIRS = {"read": lambda of: FoundPairs(*of), "itself": False}
TREE_PADDED = {"read": lambda of: padded_pairs(of[1], of[1] < of[2], of[0]), "returns": "no counts"}

VECTORS = "vector attention: a network scores each pair, with projections of its own"
SLOTS = "the first found, not the nearest; no counts; unused slots hold index 0"
EXACT = "exactly as many pairs as there are, so it waits for the device"
FIRST_ROWS = "the first found, not the nearest, as pairs; no distances, no counts"
FIRST_OTHERS = "the first found, not the nearest, without the point itself; also periodic shifts; waits"
ALL_OTHERS = f"{EXACT}, without the point itself; also periodic shifts"
VESIN = f"{EXACT}, without the point itself; searched in float64"
UNORDERED = "pairs, not in the order of the queries; one core"

CUPYX = partial(_tree, "cupyx.scipy.spatial.KDTree")
SCIPY = partial(_tree, "scipy.spatial.cKDTree", workers=-1)
PYKDTREE = partial(_tree, "pykdtree.kdtree.KDTree")
BVH_FARTHEST = lambda of: of_library("torchbvh.fps")(of.points[0], of.k, mode="exact_bucketed").indices  # noqa: E731

PEERS: list[Implementation] = [
    peer("tutorial torch", "knn_sums", tutorial_knn, **PLAIN_TORCH, bytes_per_pair=16.0),
    peer("tutorial torch", "sums", tutorial_radius, **PLAIN_TORCH, bytes_per_pair=110.0),
    peer("gather + SDPA", "attend", attention_by_torch),
    peer("gather + einsum", "attend", attention_by_einsum, **TRACED),
    peer("PhysicsNeMo", "attend", physicsnemo_attention, VECTORS, imports=(BLOCK,), compared=False),
    peer("PhysicsNeMo", "knn", physicsnemo_knn, **TILED),
    peer("PhysicsNeMo", "sums", physicsnemo_radius),
    peer("PhysicsNeMo", "padded", physicsnemo_padded, SLOTS, read=_read_slots, **FIRST_FOUND),
    peer("PhysicsNeMo", "csr", partial(_physicsnemo_search, return_dists=True), EXACT, **PAIRS),
    peer("cuML", "knn", cuml_knn, **TILED),
    peer("cupyx KDTree", "knn", CUPYX, **EAGER),
    peer("jz-tree", "knn", jztree_knn, **EAGER),
    peer("cupy-knn", "knn", cupy_knn, **EAGER),
    peer("torchbvh", "knn", torchbvh_knn, **EAGER, batched=True),
    peer("torchbvh", "farthest", BVH_FARTHEST, batched=True),
    peer("torch-fps", "farthest", torch_fps_farthest, batched=True),
    peer("torch-cluster", "farthest", torch_cluster_farthest, batched=True),
    peer("torch-cluster", "knn", torch_cluster_knn, **GPU_ONLY, batched=True),
    peer("torch-cluster", "sums", lambda of, f: _sum_pairs(of, f, *_cluster_pairs(of)), **GPU_ONLY),
    peer("torch-cluster", "padded", lambda of: _cluster_pairs(of, of.k), FIRST_ROWS, **ROWS, **FIRST_FOUND),
    peer("torch-cluster", "csr", lambda of: _cluster_pairs(of, of.most), "pairs; no distances", **ROWS),
    peer("nvalchemiops", "padded", lambda of: _nvalchemi(of, of.k), FIRST_OTHERS, **PADDED, **FIRST_FOUND),
    peer("nvalchemiops", "csr", lambda of: _nvalchemi(of, of.most, pairs=True), ALL_OTHERS, **OTHERS),
    peer("vesin", "csr", vesin_csr, VESIN, **VESIN_PAIRS),
    peer("KeOps", "knn", keops_knn, batched=True, brute_force=PAIRS_PER_SECOND | TILED["brute_force"]),
    peer("KeOps", "sums", keops_radius, brute_force=PAIRS_PER_SECOND | TILED["brute_force"]),
    peer("scipy cKDTree", "knn", SCIPY),
    peer("scipy cKDTree", "padded", partial(_tree_padded, SCIPY), **TREE_PADDED),
    peer("pykdtree", "knn", PYKDTREE),
    peer("pykdtree", "padded", partial(_tree_padded, PYKDTREE), **TREE_PADDED),
    peer("scipy cKDTree", "sums", scipy_radius),
    peer("scipy cKDTree", "csr", scipy_csr, UNORDERED, read=lambda found: FoundPairs(*found)),
]
