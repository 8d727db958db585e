"""The functions of the backend, and the library's operators as torch sees them: results, second derivatives.

The arguments of each operator are a struct in ``csrc``, from which C++ makes the schema: their names are the
same here. Importing this module loads the library.
"""

import math
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace

import torch
from torch import Tensor

from pointproj.ops.backends.native.build import extension
from pointproj.ops.backends.torch import attention
from pointproj.ops.backends.torch.weighted_sums import sums_spec
from pointproj.ops.bridge.cpp_op import cpp_op
from pointproj.ops.bridge.flops import count_aggregation, count_search
from pointproj.ops.bridge.torch_op import Spec
from pointproj.ops.specification.clouds import Clouds
from pointproj.ops.specification.gradients import DIFFERENTIABLE
from pointproj.ops.specification.records import Summands, Tables
from pointproj.ops.specification.reference import Weighting


def build_index(
    reference_points: Tensor, reference_offsets: Tensor | None, count: int, radius: float | Tensor | None
) -> Tables:
    radii = _number_or_tensor(radius)
    return (_build_index(reference_points, reference_offsets, count, *radii, _deterministic()),)


def nearest(
    clouds: Clouds,
    tables: Tables | None,
    k: int,
    index_dtype: torch.dtype,
    max_radius: float | None = None,
) -> tuple[Tensor, Tensor]:
    limit = math.inf if max_radius is None else max_radius
    return _knn(*clouds, _table(tables), limit, k, index_dtype == torch.int64)


def knn_aggregate(clouds: Clouds, tables: Tables | None, summands: Summands, k: int) -> Tensor:
    return _knn_aggregate(*_sum_arguments(clouds, summands), _table(tables), None, k)[0]


def aggregate_neighbors(clouds: Clouds, summands: Summands, rows: Tensor) -> Tensor:
    points = Clouds(clouds.query_points, None, clouds.reference_points, None, 1)
    return _knn_aggregate(*_sum_arguments(points, summands), None, rows, rows.shape[1])[0]


def radius_aggregate(clouds: Clouds, tables: Tables | None, summands: Summands, radius: float) -> Tensor:
    return _radius_aggregate(*_sum_arguments(clouds, summands), _table(tables), radius)[0]


def radius_search(
    clouds: Clouds, tables: Tables | None, radius: float | Tensor, k: int, knn_tables: Tables | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    number, tensor = _number_or_tensor(radius)
    return _radius_search(*clouds, _table(tables), _table(knn_tables), number or 0.0, tensor, k)


def radius_list(
    clouds: Clouds, tables: Tables | None, radius: float | Tensor, capacity: int
) -> tuple[Tensor, Tensor, Tensor]:
    number, tensor = _number_or_tensor(radius)
    return _radius_list(*clouds, _table(tables), number or 0.0, tensor, capacity)


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    bias: Tensor,
    rows: Tensor,
    row_splits: Tensor | None,
    heads: int,
    scale: float,
) -> Tensor:
    given = queries, keys, values, bias, rows, row_splits, heads, scale
    if queries.shape[1] > MOST_HEAD_CHANNELS * heads:
        return attention.attend(*given)
    return _attend(*given, _deterministic())[0]


def list_weights(
    distances: Tensor,
    rows: Tensor,
    row_splits: Tensor | None,
    references: int,
    reference_weights: Tensor | None,
    sigma: Tensor,
    weighting: Weighting,
) -> Tensor:
    given = distances.contiguous(), rows.contiguous(), row_splits, references, reference_weights
    return _list_weights(*given, sigma, *weighting)


def weighted_sums(features: Tensor, weights: Tensor, rows: Tensor, row_splits: Tensor | None) -> Tensor:
    given = features.contiguous(), weights.contiguous(), rows.contiguous(), row_splits
    return _weighted_sums(*given, _deterministic())


def farthest_points(points: Tensor, offsets: Tensor | None, starts: Tensor, steps: int) -> Tensor:
    return _farthest_points(points, offsets, starts.shape[0], starts, steps)


def _sum_arguments(clouds: Clouds, summands: Summands) -> tuple:
    features, sigma, weighting = summands
    return *clouds, features, sigma, *weighting, torch.are_deterministic_algorithms_enabled()


def _table(tables: Tables | None) -> Tensor | None:
    return tables[0] if tables else None


def _number_or_tensor(radius: float | Tensor | None) -> tuple[float | None, Tensor | None]:
    return (None, radius) if isinstance(radius, Tensor) else (radius, None)


def _deterministic() -> bool:
    """The switch as an argument: the stable ABI has none, and a backward works as its forward did."""
    return torch.are_deterministic_algorithms_enabled()


@cache
def _formula(of_radius: bool, on_gpu: bool) -> Callable[[int, int, int], int]:
    """C++ writes down how many words a table has, so that the numbers of rows and clouds may be symbols."""
    words = _library.native_table_words(of_radius, on_gpu)
    names = {"sym_min": torch.sym_min, "sym_max": torch.sym_max}  # without a guard on the numbers
    return eval(f"lambda rows, clouds, words_per_real: {words}", names)


def _words(points: Tensor, clouds: int, of_radius: bool = True) -> int:
    return _formula(of_radius, points.is_cuda)(points.shape[0], clouds, points.dtype.itemsize // 4)


def _index(call: SimpleNamespace) -> tuple[Spec, ...]:
    of_radius = call.radius is not None or call.largest_radius is not None
    return (((_words(call.points, call.clouds, of_radius),), torch.int32),)


def _nearest(call: SimpleNamespace, k: int, dtype: torch.dtype) -> tuple[Spec, ...]:
    shape = call.query_points.shape[0], k
    return (shape, call.query_points.dtype), (shape, dtype)


def _sums(call: SimpleNamespace) -> tuple[Spec, ...]:
    """The sums, and two numbers of each query for the backward."""
    queries, dtype = call.query_points.shape[0], call.features.dtype
    return ((queries, call.features.shape[1]), dtype), ((queries, 2), dtype)


def _radius_sums(call: SimpleNamespace) -> tuple[Spec, ...]:
    """The sums, and the hash grids that were made."""
    made = _words(call.query_points, call.clouds)
    if call.reference_grid is None:
        made += _words(call.reference_points, call.clouds)
    return *_sums(call), ((made,), torch.int32)


def _knn_sums(call: SimpleNamespace) -> tuple[Spec, ...]:
    """The sums, and the rows, of which there are none if they were given."""
    searched = call.query_points.shape[0] if call.neighbor_indices is None else 0
    return *_sums(call), ((searched, call.k), torch.int32)


_library = extension()
MOST_HEAD_CHANNELS = _library.native_most_head_channels()

_build_index = cpp_op(_library, "native_build_index", _index)
_knn = cpp_op(
    _library,
    "native_knn",
    lambda call: _nearest(call, call.k, torch.int64 if call.long_rows else torch.int32),
)
_radius_search = cpp_op(
    _library,
    "native_radius_search",
    lambda call: (*_nearest(call, call.most, torch.int64), ((call.query_points.shape[0],), torch.int64)),
)
_radius_list = cpp_op(
    _library,
    "native_radius_list",
    lambda call: (
        ((call.query_points.shape[0] + 1,), torch.int64),
        ((call.most,), torch.int64),
        ((call.most,), call.query_points.dtype),
    ),
)
_knn_aggregate = cpp_op(_library, "native_knn_aggregate", _knn_sums, DIFFERENTIABLE)
_radius_aggregate = cpp_op(_library, "native_radius_aggregate", _radius_sums, DIFFERENTIABLE)
_attend = cpp_op(
    _library,
    "native_attend",
    lambda call: (
        (call.queries.shape, call.queries.dtype),
        ((call.queries.shape[0], call.heads), call.queries.dtype),
    ),
    attention.DIFFERENTIABLE,
)
_list_weights = cpp_op(
    _library, "native_list_weights", lambda call: ((call.rows.shape, call.distances.dtype),)
)
_weighted_sums = cpp_op(
    _library,
    "native_weighted_sums",
    lambda call: sums_spec(call.features, call.weights, call.rows, call.row_splits),
    ("features", "weights"),
)
_farthest_points = cpp_op(
    _library, "native_farthest_points", lambda call: (((call.clouds, call.steps), torch.int64),)
)

count_search("native_knn", _knn.parameters, "k")
count_search("native_radius_search", _radius_search.parameters, "most")
count_aggregation("native_knn_aggregate", _knn_aggregate.parameters, searches=True)
count_aggregation("native_radius_aggregate", _radius_aggregate.parameters)
