"""A C++ and CUDA extension over a cell list, on all cores of a CPU and on CUDA; built on first use."""

from torch import Tensor

from pointproj.ops.registry import Clouds, Tables

OPERATORS = frozenset({"knn", "radius"})
RANK = {"cpu": 20, "cuda": 20}


def unavailable() -> str | None:
    from pointproj.ops.backends.native.build import obstacle

    return obstacle()


def unbuilt() -> str | None:
    from pointproj.ops.backends.native.build import BUILD_AHEAD, find_build

    return None if find_build() else f"build it with: {BUILD_AHEAD}"


def build_index(
    reference_points: Tensor, reference_offsets: Tensor | None, count: int, radius: float | None
) -> Tables:
    from pointproj.ops.backends.native import nearest, within

    if radius is None:
        return nearest.build_cells(reference_points, reference_offsets, count)
    return within.build_wrapped_cells(reference_points, reference_offsets, count, radius)


def search(clouds: Clouds, tables: Tables | None, k: int) -> Tensor:
    from pointproj.ops.backends.native import nearest

    if not isinstance(tables, nearest.Cells):
        tables = build_index(clouds.reference_points, clouds.reference_offsets, clouds.count, None)
    return nearest.search(clouds, tables, k)


def aggregate_neighbors(clouds: Clouds, features: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
    from pointproj.ops.backends.native import nearest

    return nearest.aggregate_neighbors(clouds.query_points, clouds.reference_points, features, sigma, rows)


def radius_aggregate(
    clouds: Clouds, tables: Tables | None, features: Tensor, sigma: Tensor, radius: float
) -> Tensor:
    from pointproj.ops.backends.native import within

    cells = tables if isinstance(tables, within.WrappedCells) else None  # not those for kNN
    return within.aggregate_within(clouds, cells, features, sigma, radius)
