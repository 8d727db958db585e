"""NVIDIA Warp kernels over a cell list, on CPU and CUDA."""

import importlib.util

from torch import Tensor

from pointproj.backends import Tables

OPERATORS = frozenset({"knn", "radius"})
RANK = {"cpu": 10, "cuda": 10}


def unavailable() -> str | None:
    if importlib.util.find_spec("warp") is None:
        return "the package warp-lang is missing; install it with: pip install warp-lang"
    return None


def build_index(
    reference_points: Tensor, reference_offsets: Tensor | None, clouds: int, radius: float | None
) -> Tables:
    from pointproj.backends.warp.cells import build_cells
    from pointproj.backends.warp.wrapped import build_wrapped_cells

    if radius is None:
        return build_cells(reference_points, reference_offsets, clouds)
    return build_wrapped_cells(reference_points, reference_offsets, clouds, radius)


def search(
    query_points: Tensor,
    query_offsets: Tensor | None,
    reference_points: Tensor,
    reference_offsets: Tensor | None,
    clouds: int,
    tables: Tables,
    k: int,
) -> Tensor:
    from pointproj.backends.warp import nearest
    from pointproj.backends.warp.cells import Cells, build_cells

    if not isinstance(tables, Cells):
        tables = build_cells(reference_points, reference_offsets, clouds)
    return nearest.search(query_points, query_offsets, reference_points, clouds, tables, k)


def knn_aggregate(
    query_points: Tensor,
    query_offsets: Tensor | None,
    reference_points: Tensor,
    reference_offsets: Tensor | None,
    clouds: int,
    tables: Tables,
    features: Tensor,
    sigma: Tensor,
    k: int,
) -> Tensor:
    from pointproj.backends.warp import lists

    points = (query_points.detach(), query_offsets, reference_points.detach(), reference_offsets)
    rows = search(*points, clouds, tables, k)
    return lists.aggregate_neighbors(query_points, reference_points, features, sigma, rows)


def radius_aggregate(
    query_points: Tensor,
    query_offsets: Tensor | None,
    reference_points: Tensor,
    reference_offsets: Tensor | None,
    clouds: int,
    tables: Tables,
    features: Tensor,
    sigma: Tensor,
    radius: float,
) -> Tensor:
    from pointproj.backends.warp import within
    from pointproj.backends.warp.wrapped import WrappedCells, build_wrapped_cells

    if not isinstance(tables, WrappedCells):
        tables = build_wrapped_cells(reference_points.detach(), reference_offsets, clouds, radius)
    points = (query_points, query_offsets, reference_points, reference_offsets)
    return within.aggregate_within(*points, clouds, tables, features, sigma, radius)
