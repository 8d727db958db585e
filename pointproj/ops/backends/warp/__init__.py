"""NVIDIA Warp kernels over a cell list, on CPU and CUDA."""

import importlib.util

import torch
from torch import Tensor

from pointproj.ops.backends.warp import kernel_cache
from pointproj.ops.clouds import Clouds
from pointproj.ops.reference import Weighting
from pointproj.ops.registry import Tables

OPERATORS = frozenset({"knn", "radius"})
RANK = {"cpu": 10, "cuda": 10}
ONE_INDEX = True


def unavailable() -> str | None:
    if importlib.util.find_spec("warp") is None:
        return "the package warp-lang is missing; install it with: pip install warp-lang"
    return kernel_cache.obstacle()


def unavailable_on(device_type: str) -> str | None:
    """A build of Warp for CUDA 13 sees no GPU behind a driver for CUDA 12."""
    if device_type != "cuda":
        return None
    from pointproj.ops.bridge.warp_op import wp  # which has silenced it

    built, driver = wp.get_cuda_toolkit_version(), wp.get_cuda_driver_version()
    if wp.is_cuda_available() or built is None or driver is None:
        return None
    return (
        f"the installed warp-lang is built for CUDA {built[0]}, and this driver is for CUDA "
        f"{driver[0]}.{driver[1]}; update the driver, or install the last version for CUDA 12 with: "
        "pip install warp-lang==1.17.0"
    )


def build_index(
    reference_points: Tensor, reference_offsets: Tensor | None, count: int, radius: float | Tensor | None
) -> Tables:
    """The tables of a cell list; a radius, if there is one, says how wide its cells are."""
    from pointproj.ops.backends.warp.cell_list_build import build_cell_list

    return build_cell_list(reference_points, reference_offsets, count, radius)


def search(clouds: Clouds, tables: Tables | None, k: int) -> Tensor:
    from pointproj.ops.backends.warp import knn_search

    return knn_search.search(clouds, tables, k)


def nearest(clouds: Clouds, tables: Tables | None, k: int, index_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    from pointproj.ops.backends.warp import knn_search

    return knn_search.nearest(clouds, tables, k, index_dtype)


def aggregate_neighbors(
    clouds: Clouds, features: Tensor, sigma: Tensor, rows: Tensor, weighting: Weighting
) -> Tensor:
    from pointproj.ops.backends.warp import operators

    return operators.aggregate_neighbors(clouds, features, sigma, rows, weighting)


def knn_aggregate(
    clouds: Clouds, tables: Tables | None, features: Tensor, sigma: Tensor, k: int, weighting: Weighting
) -> Tensor:
    from pointproj.ops.backends.warp import operators

    return operators.knn_aggregate(clouds, tables, features, sigma, k, weighting)


def radius_aggregate(
    clouds: Clouds,
    tables: Tables | None,
    features: Tensor,
    sigma: Tensor,
    radius: float,
    weighting: Weighting,
) -> Tensor:
    from pointproj.ops.backends.warp import operators

    return operators.radius_aggregate(clouds, tables, features, sigma, radius, weighting)


def radius_search(
    clouds: Clouds, tables: Tables | None, radius: float | Tensor, k: int
) -> tuple[Tensor, Tensor, Tensor]:
    from pointproj.ops.backends.warp import lists

    return lists.nearest_within(clouds, tables, radius, k)


def radius_list(
    clouds: Clouds, tables: Tables | None, radius: float | Tensor, capacity: int
) -> tuple[Tensor, Tensor, Tensor]:
    from pointproj.ops.backends.warp import lists

    return lists.all_within(clouds, tables, radius, capacity)
