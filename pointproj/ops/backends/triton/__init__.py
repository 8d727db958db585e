"""The recipe of a backend of Triton kernels, which torch compiles and exports; plain torch on a CPU."""

import importlib.util

from torch import Tensor

from pointproj.ops.clouds import Clouds
from pointproj.ops.reference import Weighting
from pointproj.ops.registry import Tables

OPERATORS = frozenset({"knn", "radius"})
RANK = {"cpu": -1, "cuda": 5}
EXPORTABLE = frozenset({"cuda"})
ONE_INDEX = True  # the cell list


def unavailable() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "the package triton is missing; install it with: pip install triton"
    return None


def build_index(
    reference_points: Tensor, reference_offsets: Tensor | None, count: int, radius: float | None
) -> Tables:
    from pointproj.ops.backends.triton.cell_list import build_cell_list
    from pointproj.ops.bridge.triton_op import runs_kernels

    if not runs_kernels(reference_points):
        return ()
    return build_cell_list(reference_points, reference_offsets, count)


def search(clouds: Clouds, tables: Tables | None, k: int) -> Tensor:
    from pointproj.ops.backends.triton.operators import search

    return search(*clouds, _cells(clouds, tables), k)


def aggregate_neighbors(
    clouds: Clouds, features: Tensor, sigma: Tensor, rows: Tensor, weighting: Weighting
) -> Tensor:
    from pointproj.ops.backends.triton.operators import sum_lists

    return sum_lists(clouds.query_points, clouds.reference_points, features, sigma, rows, *weighting)[0]


def radius_aggregate(
    clouds: Clouds,
    tables: Tables | None,
    features: Tensor,
    sigma: Tensor,
    radius: float,
    weighting: Weighting,
) -> Tensor:
    from pointproj.ops.backends.triton.operators import sum_within

    return sum_within(*clouds, _cells(clouds, tables), features, sigma, radius, *weighting)[0]


def radius_search(
    clouds: Clouds, tables: Tables | None, radius: float | Tensor, k: int
) -> tuple[Tensor, Tensor, Tensor]:
    from pointproj.ops.backends.torch import radius_search

    return radius_search(clouds, (), radius, k)


def radius_list(
    clouds: Clouds, tables: Tables | None, radius: float | Tensor, capacity: int
) -> tuple[Tensor, Tensor, Tensor]:
    from pointproj.ops.backends.torch import radius_list

    return radius_list(clouds, (), radius, capacity)


def _cells(clouds: Clouds, tables: Tables | None) -> list[Tensor]:
    """The cell list of the reference points, as operators take it."""
    if tables is None:
        points = clouds.detached().reference_points
        tables = build_index(points, clouds.reference_offsets, clouds.count, None)
    return list(tables)
