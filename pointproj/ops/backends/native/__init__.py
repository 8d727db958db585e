"""A C++ and CUDA extension over a cell list, on all cores of a CPU and on CUDA; built on first use."""

import torch
from torch import Tensor

from pointproj.ops.clouds import Clouds
from pointproj.ops.reference import Weighting
from pointproj.ops.registry import Tables

OPERATORS = frozenset({"knn", "radius"})
RANK = {"cpu": 20, "cuda": 20}


def unavailable() -> str | None:
    from pointproj.ops.backends.native.build import obstacle

    return obstacle()


def unbuilt() -> str | None:
    from pointproj.ops.backends.native.build import BUILD_AHEAD, find_build

    return None if find_build() else f"build it with: {BUILD_AHEAD}"


def build_index(
    reference_points: Tensor,
    reference_offsets: Tensor | None,
    count: int,
    radius: float | Tensor | None,
) -> Tables:
    from pointproj.ops.backends.native import operators

    if radius is None:
        return operators.build_cell_list(reference_points, reference_offsets, count)
    return operators.build_hash_grid(reference_points, reference_offsets, count, *_number_or_tensor(radius))


def search(clouds: Clouds, tables: Tables | None, k: int) -> Tensor:
    from pointproj.ops.backends.native import operators

    if tables is None:
        tables = operators.build_cell_list(clouds.reference_points, clouds.reference_offsets, clouds.count)
    points = clouds.query_points, clouds.query_offsets, clouds.reference_points, clouds.count
    return operators.search(*points, list(tables), k)


def nearest(clouds: Clouds, tables: Tables | None, k: int, index_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    from pointproj.ops.backends.native import operators

    return operators.nearest(*clouds, list(tables or ()), k, index_dtype == torch.int64)


def knn_aggregate(
    clouds: Clouds, tables: Tables | None, features: Tensor, sigma: Tensor, k: int, weighting: Weighting
) -> Tensor:
    from pointproj.ops.backends.native import operators

    return operators.knn_aggregate(*clouds, list(tables or ()), features, sigma, k, *weighting)


def aggregate_neighbors(
    clouds: Clouds, features: Tensor, sigma: Tensor, rows: Tensor, weighting: Weighting
) -> Tensor:
    from pointproj.ops.backends.native import operators

    points = clouds.query_points, clouds.reference_points
    return operators.neighbor_sums(*points, features, sigma, rows, *weighting)[0]


def radius_aggregate(
    clouds: Clouds,
    tables: Tables | None,
    features: Tensor,
    sigma: Tensor,
    radius: float,
    weighting: Weighting,
) -> Tensor:
    from pointproj.ops.backends.native import operators

    return operators.radius_aggregate(*clouds, list(tables or ()), features, sigma, radius, *weighting)


def radius_search(
    clouds: Clouds, tables: Tables | None, radius: float | Tensor, k: int
) -> tuple[Tensor, Tensor, Tensor]:
    from pointproj.ops.backends.native import operators

    return operators.radius_search(*clouds, list(tables or ()), *_number_or_tensor(radius), k)


def radius_list(
    clouds: Clouds, tables: Tables | None, radius: float | Tensor, capacity: int
) -> tuple[Tensor, Tensor, Tensor]:
    from pointproj.ops.backends.native import operators

    return operators.radius_list(*clouds, list(tables or ()), *_number_or_tensor(radius), capacity)


def _number_or_tensor(radius: float | Tensor) -> tuple[float, Tensor | None]:
    """As the extension's operators take it: the number counts where there is no tensor."""
    return (0.0, radius) if isinstance(radius, Tensor) else (radius, None)
