"""Triton kernels over a tree of boxes on CUDA; plain torch on CPU."""

import importlib.util

import torch
from torch import Tensor

from pointproj.ops.bridge.eager import nobody_looks_on
from pointproj.ops.clouds import Clouds
from pointproj.ops.reference import Weighting
from pointproj.ops.registry import Tables

OPERATORS = frozenset({"knn", "radius"})
RANK = {"cpu": -1, "cuda": 5}
EXPORTABLE = frozenset({"cuda"})
ONE_INDEX = True  # the tree


def unavailable() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "the package triton is missing; install it with: pip install triton"
    return None


def build_index(
    reference_points: Tensor, reference_offsets: Tensor | None, count: int, radius: float | None
) -> Tables:
    from pointproj.ops.backends.triton.operators import runs_kernels
    from pointproj.ops.backends.triton.tree import build_tree

    if not runs_kernels(reference_points):
        return ()
    return build_tree(reference_points, reference_offsets, count)


def search(clouds: Clouds, tables: Tables | None, k: int) -> Tensor:
    return nearest(clouds, tables, k, torch.int32)[1]


def nearest(clouds: Clouds, tables: Tables | None, k: int, index_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    from pointproj.ops.backends.triton.knn_search import nearest

    return nearest(clouds, tables, k, index_dtype)


def aggregate_neighbors(
    clouds: Clouds, features: Tensor, sigma: Tensor, rows: Tensor, weighting: Weighting
) -> Tensor:
    from pointproj.ops.backends.triton.neighbor_sums import aggregate_neighbors

    points = clouds.query_points, clouds.reference_points
    return aggregate_neighbors(*points, features, sigma, rows, weighting)


def knn_aggregate(
    clouds: Clouds, tables: Tables | None, features: Tensor, sigma: Tensor, k: int, weighting: Weighting
) -> Tensor:
    from pointproj.ops.backends.triton.neighbor_sums import search_and_aggregate
    from pointproj.ops.backends.triton.operators import runs_kernels

    given = clouds.query_points, clouds.reference_points, features, sigma
    if tables is None and runs_kernels(features) and nobody_looks_on(given):
        return search_and_aggregate(clouds, features, sigma, k, weighting)
    rows = search(clouds.detached(), tables, k)
    return aggregate_neighbors(clouds, features, sigma, rows, weighting)


def radius_aggregate(
    clouds: Clouds,
    tables: Tables | None,
    features: Tensor,
    sigma: Tensor,
    radius: float,
    weighting: Weighting,
) -> Tensor:
    from pointproj.ops.backends.triton.radius_sums import radius_aggregate

    return radius_aggregate(clouds, tables, features, sigma, radius, weighting)


def radius_search(
    clouds: Clouds, tables: Tables | None, radius: float | Tensor, k: int
) -> tuple[Tensor, Tensor, Tensor]:
    from pointproj.ops.backends.triton.radius_lists import radius_search

    return radius_search(clouds, tables, radius, k)


def radius_list(
    clouds: Clouds, tables: Tables | None, radius: float | Tensor, capacity: int
) -> tuple[Tensor, Tensor, Tensor]:
    from pointproj.ops.backends.triton.radius_lists import radius_list

    return radius_list(clouds, tables, radius, capacity)
