"""NVIDIA Warp kernels over a cell list, on CPU and CUDA."""

import importlib.util

from torch import Tensor

from pointproj.ops.registry import Clouds, Tables

OPERATORS = frozenset({"knn", "radius"})
RANK = {"cpu": 10, "cuda": 10}


def unavailable() -> str | None:
    if importlib.util.find_spec("warp") is None:
        return "the package warp-lang is missing; install it with: pip install warp-lang"
    return None


def build_index(
    reference_points: Tensor, reference_offsets: Tensor | None, count: int, radius: float | None
) -> Tables:
    from pointproj.ops.backends.warp.cells import build_cells
    from pointproj.ops.backends.warp.wrapped import build_wrapped_cells

    if radius is None:
        return build_cells(reference_points, reference_offsets, count)
    return build_wrapped_cells(reference_points, reference_offsets, count, radius)


def search(clouds: Clouds, tables: Tables | None, k: int) -> Tensor:
    from pointproj.ops.backends.warp import nearest
    from pointproj.ops.backends.warp.cells import Cells

    if not isinstance(tables, Cells):  # none, or cells for a radius
        tables = build_index(clouds.reference_points, clouds.reference_offsets, clouds.count, None)
    return nearest.search(clouds, tables, k)


def aggregate_neighbors(clouds: Clouds, features: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
    from pointproj.ops.backends.warp import lists

    return lists.aggregate_neighbors(clouds.query_points, clouds.reference_points, features, sigma, rows)


def radius_aggregate(
    clouds: Clouds, tables: Tables | None, features: Tensor, sigma: Tensor, radius: float
) -> Tensor:
    from pointproj.ops.backends.warp import within
    from pointproj.ops.backends.warp.wrapped import WrappedCells

    cells = tables if isinstance(tables, WrappedCells) else None  # not those for kNN
    return within.aggregate_within(clouds, cells, features, sigma, radius)
