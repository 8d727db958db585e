"""RAPIDS cuML's ``NearestNeighbors`` on CUDA, made exact by :mod:`.candidates`; kNN only.

cuML waits for the device in every call, and so does this backend. The clouds of a ragged batch are searched
one after the other, with sizes read from the device. A step cannot be captured in a CUDA graph. cuML searches
in fp32; for positions in fp64 its candidates are ranked in fp64.
"""

import functools
import importlib
import importlib.util
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from pointproj.ops.backends.cuml.candidates import Candidates, candidates_of, exact_neighbors
from pointproj.ops.backends.torch import operators as plain
from pointproj.ops.bridge.torch_op import torch_op
from pointproj.ops.specification.clouds import Clouds
from pointproj.ops.specification.pairs import rows_of_clouds
from pointproj.ops.specification.records import Tables, fields_apart, nearest_specs

OPERATORS = frozenset({"knn"})
RANK = {"cuda": 2}
WAITS = "cuML waits for the GPU in every search"
ALGORITHMS = ("auto", "brute", "rbc")
FEWEST_FOR_RBC = 100_000  # below, brute force is faster (27,000 queries, k = 7, on an H200)
PACKAGES = ("cuml", "cupy")

_algorithm = "auto"
_exact = True


class CaptureImpossible(RuntimeError):  # noqa: N818 - the name is the message
    """A search was called while a CUDA graph is recorded."""


def unavailable() -> str | None:
    if not torch.cuda.is_available():
        return f"needs a CUDA GPU, and torch {torch.__version__} finds none"
    cuda = torch.version.cuda.partition(".")[0]
    install = f'install it with: pip install -e ".[rapids-cu{cuda}]"'
    for package in PACKAGES:
        if importlib.util.find_spec(package) is None:
            return f"the package {package} is missing; {install}"
    failure = _import_failure()
    return failure and f"cuML cannot be imported ({failure}); {install}"


def use_algorithm(name: str) -> None:
    """Choose the algorithm of the next searches: ``brute`` force, ``rbc`` (random ball cover) or ``auto``.

    ``auto`` uses rbc for clouds of 100,000 points and more. ``rbc`` uses it for all clouds, except that cuML
    takes brute force for more neighbours than rbc has landmarks. Results are the same.
    """
    global _algorithm
    if name not in ALGORITHMS:
        raise ValueError(f"algorithm must be one of {', '.join(ALGORITHMS)}; got {name!r}")
    _algorithm = name


def use_exact(exact: bool) -> None:
    """Whether clouds that are fitted from here on are searched exactly, or give cuML's own result.

    cuML's own result takes a part of the time. It breaks the contract of :func:`pointproj.knn`: rows are
    rounded in fp32 (of coordinates far from the origin, most are wrong), ties have any order, and points that
    are not finite are not left out.
    """
    global _exact
    _exact = exact


def build_index(
    reference_points: Tensor, reference_offsets: Tensor | None, count: int, radius: float | None
) -> Tables:
    return (_build_index(reference_points, reference_offsets, count),)


def search(clouds: Clouds, tables: Tables | None, k: int) -> Tensor:
    return _search(*clouds, tables[0] if tables else None, k)


aggregate_neighbors = plain.aggregate_neighbors


class _FittedCloud:
    """One cloud, fitted once."""

    def __init__(self, reference_points: Tensor) -> None:
        self.candidates: Candidates | None = candidates_of(reference_points) if _exact else None
        self._points = self.candidates.shifted if self.candidates else _single(reference_points)
        self._model = self._by_cuml(self._fit) if len(self._points) else None

    def search(self, query_points: Tensor, k: int) -> Tensor:
        """Rows of the k nearest, (Q, k)."""
        if self.candidates:
            return exact_neighbors(query_points, self.candidates, self._propose, k)
        found = query_points.new_full((len(query_points), k), -1, dtype=torch.int64)
        count = min(k, len(self._points))
        if count:
            proposed = self._propose(_single(query_points), count)
            found[:, :count] = proposed
            torch.cuda.current_stream().synchronize()  # another stream may reuse cuML's memory afterwards
        return found

    def _fit(self) -> Any:
        import cupy
        from cuml.neighbors import NearestNeighbors

        algorithm = _algorithm
        if algorithm == "auto":
            algorithm = "rbc" if len(self._points) >= FEWEST_FOR_RBC else "brute"
        model = NearestNeighbors(algorithm=algorithm, metric="euclidean", output_type="cupy")
        return model.fit(cupy.from_dlpack(self._points))

    def _propose(self, shifted: Tensor, count: int) -> Tensor:
        import cupy

        def rows() -> Any:
            return self._model.kneighbors(cupy.from_dlpack(shifted), count, return_distance=False)

        return torch.from_dlpack(self._by_cuml(rows))

    def _by_cuml(self, work: Callable[[], Any]) -> Any:
        """Let cuML work on what the current stream has written.

        cuML uses a stream of its own, and waits for it before it returns. So it is enough to wait for the
        current stream before the call. Its results are read before a search ends, see ``candidates``.
        """
        import cuml

        torch.cuda.current_stream().synchronize()
        if torch.cuda.device_count() == 1:
            with cuml.using_output_type("cupy"):  # the caller may have set another
                return work()
        return _thread_of(self._points.device).submit(work).result()


def _single(points: Tensor) -> Tensor:
    return points.detach().float().contiguous()


class _Index(NamedTuple):
    """The fitted clouds of an index, as long as its token exists."""

    token: StorageWeakRef
    clouds: list[_FittedCloud]


# cuML's models are not tensors. So an index is a token: a tensor whose address is the key of the models.
_indices: dict[int, _Index] = {}


def _build_body(reference_points: Tensor, reference_offsets: Tensor | None, clouds: int) -> tuple[Tensor]:
    for address in [address for address, index in _indices.items() if index.token.expired()]:
        del _indices[address]
    token = reference_points.new_empty(1)
    with _on(reference_points.device):
        fitted = _fit(reference_points, rows_of_clouds(reference_offsets, len(reference_points), clouds))
    _indices[token.data_ptr()] = _Index(StorageWeakRef(token.untyped_storage()), fitted)
    return (token,)


@fields_apart
def _search_body(clouds: Clouds, token: Tensor | None, k: int) -> tuple[Tensor]:
    query_points, reference_points = clouds.query_points, clouds.reference_points
    index = None if token is None else _indices.get(token.data_ptr())
    found = query_points.new_full((len(query_points), k), -1, dtype=torch.int64)
    with _on(query_points.device):
        bounds = rows_of_clouds(clouds.reference_offsets, len(reference_points), clouds.count)
        queries = rows_of_clouds(clouds.query_offsets, len(query_points), clouds.count)
        fitted = _fit(reference_points, bounds) if index is None or index.token.expired() else index.clouds
        for (first, end), (first_row, _), cloud in zip(queries, bounds, fitted, strict=True):
            if end > first:
                rows = cloud.search(query_points[first:end], k)
                found[first:end] = torch.where(rows >= 0, rows + first_row, -1)
    return (found,)


def _fit(reference_points: Tensor, bounds: list[tuple[int, int]]) -> list[_FittedCloud]:
    return [_FittedCloud(reference_points[first:end]) for first, end in bounds]


def _on(device: torch.device) -> torch.cuda.device:
    """Make a device the current one; an error while a CUDA graph is recorded."""
    if torch.cuda.is_current_stream_capturing():
        raise CaptureImpossible(f"backend cuml cannot be recorded in a CUDA graph: {WAITS}")
    return torch.cuda.device(device)


@functools.cache
def _thread_of(device: torch.device) -> ThreadPoolExecutor:
    """A thread for this device, if there are several: cuML has one state of a device in each thread."""
    return ThreadPoolExecutor(1, "cuml", initializer=torch.cuda.set_device, initargs=(device,))


@functools.cache
def _import_failure() -> str | None:
    """Import cuML; None, or the error in one line."""
    try:
        importlib.import_module("cuml.neighbors")
    except Exception as error:  # broken installations raise errors of many types
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    # For a k above the number of rbc's landmarks cuML warns, and takes brute force as it should.
    warnings.filterwarnings("ignore", message="algorithm='rbc' requires")
    return None


_build_index = torch_op(
    "pointproj::cuml_build_index",
    _build_body,
    lambda reference_points, reference_offsets, clouds: (((1,), reference_points.dtype),),
)
_search = torch_op("pointproj::cuml_search", _search_body, nearest_specs(torch.int64))
