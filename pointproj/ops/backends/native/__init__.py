"""The engine, in C++ and CUDA, on all cores of a CPU: a library from the wheel, or built on first use."""

from typing import Any

import torch
from torch import Tensor

from pointproj.ops.clouds import Clouds
from pointproj.ops.reference import Weighting
from pointproj.ops.registry import Tables

OPERATORS = frozenset({"knn", "radius"})
RANK = {"cpu": 20, "cuda": 20}
MOST_HEAD_CHANNELS = 256  # as in csrc/attention.h


def unavailable() -> str | None:
    from pointproj.ops.backends.native.build import obstacle

    return obstacle()


def unbuilt() -> str | None:
    from pointproj.ops.backends.native.build import BUILD_AHEAD, architectures_here, find_build

    return None if find_build(architectures_here()) else f"build it with: {BUILD_AHEAD}"


def build_index(
    reference_points: Tensor,
    reference_offsets: Tensor | None,
    count: int,
    radius: float | Tensor | None,
) -> Tables:
    number, tensor = _number_or_tensor(radius)
    return (
        _operators().build_index(
            reference_points, reference_offsets, count, number, tensor, _deterministic()
        ),
    )


def search(clouds: Clouds, tables: Tables | None, k: int) -> Tensor:
    return nearest(clouds, tables, k, torch.int32)[1]


def nearest(clouds: Clouds, tables: Tables | None, k: int, index_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return _operators().knn(*clouds, _table(tables), k, index_dtype == torch.int64)


def knn_aggregate(
    clouds: Clouds, tables: Tables | None, features: Tensor, sigma: Tensor, k: int, weighting: Weighting
) -> Tensor:
    given = *clouds, _table(tables), None, features, sigma, k
    return _operators().knn_aggregate(*given, *weighting, _deterministic())[0]


def aggregate_neighbors(
    clouds: Clouds, features: Tensor, sigma: Tensor, rows: Tensor, weighting: Weighting
) -> Tensor:
    points = clouds.query_points, None, clouds.reference_points, None, 1
    given = *points, None, rows, features, sigma, rows.shape[1]
    return _operators().knn_aggregate(*given, *weighting, _deterministic())[0]


def radius_aggregate(
    clouds: Clouds,
    tables: Tables | None,
    features: Tensor,
    sigma: Tensor,
    radius: float,
    weighting: Weighting,
) -> Tensor:
    given = *clouds, _table(tables), features, sigma, radius
    return _operators().radius_aggregate(*given, *weighting, _deterministic())[0]


def radius_search(
    clouds: Clouds, tables: Tables | None, radius: float | Tensor, k: int
) -> tuple[Tensor, Tensor, Tensor]:
    number, tensor = _number_or_tensor(radius)
    return _operators().radius_search(*clouds, _table(tables), number or 0.0, tensor, k)


def radius_list(
    clouds: Clouds, tables: Tables | None, radius: float | Tensor, capacity: int
) -> tuple[Tensor, Tensor, Tensor]:
    number, tensor = _number_or_tensor(radius)
    return _operators().radius_list(*clouds, _table(tables), number or 0.0, tensor, capacity)


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
        from pointproj.ops.attention import plain_attend

        return plain_attend(*given)
    return _operators().attend(*given, _deterministic())[0]


def farthest_points(
    points: Tensor, cloud: Tensor, offsets: Tensor | None, starts: Tensor, steps: int
) -> Tensor:
    return _operators().farthest_points(points, offsets, starts.shape[0], starts, steps)


def _operators() -> Any:
    """The module, which loads the library."""
    from pointproj.ops.backends.native import operators

    return operators


def _table(tables: Tables | None) -> Tensor | None:
    return tables[0] if tables else None


def _number_or_tensor(radius: float | Tensor | None) -> tuple[float | None, Tensor | None]:
    return (None, radius) if isinstance(radius, Tensor) else (radius, None)


def _deterministic() -> bool:
    """The switch, which C++ cannot ask for; a backward works as its forward did."""
    return torch.are_deterministic_algorithms_enabled()
