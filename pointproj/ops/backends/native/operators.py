"""The extension's operators as torch sees them: what they return, and their second derivatives.

``csrc`` registers them, with their schemas and first derivatives; the algorithms are in its headers.
Importing this module loads the extension.
"""

from types import SimpleNamespace

import torch
from torch import Tensor

from pointproj.ops.bridge.cpp_op import cpp_op, whole_call
from pointproj.ops.bridge.torch_op import Spec
from pointproj.ops.gradients import DIFFERENTIABLE, aggregate_second_backward
from pointproj.ops.pairs import chunks_within, listed_chunks

DENSE_CELL = 256  # points; as in csrc/cell_list.h
READ_AHEAD = 16  # as in csrc/common.h


def _sorted_points(points: Tensor) -> Spec:
    """With their rows; those that are not finite come last, in no cell."""
    rows = points.shape[0]
    return ((rows, 4) if points.is_cuda else (4, rows + READ_AHEAD)), points.dtype


def _cell_list(call: SimpleNamespace) -> tuple[Spec, ...]:
    """The two-level cell list of csrc/cell_list.h, for kNN; ``CellListSizes`` there has the same sizes."""
    rows, clouds, dtype = call.points.shape[0], call.clouds, call.points.dtype
    density = 2 if not call.points.is_cuda else 4 if rows <= 2**18 else 1
    cells, dense = density * rows // 2 + clouds, rows // DENSE_CELL + 2
    numbers = 4 * clouds + cells + dense + (cells + 1) + (cells + rows + 2)
    grids = ((12 * clouds + 6 * dense,), dtype)  # of the clouds, then of the dense cells: corners and edges
    starts = ((numbers,), torch.int32)  # sizes of the grids; first cell, sub-cell and sorted point of each
    return grids, starts, _sorted_points(call.points)


def _hash_grid(points: Tensor, clouds: int) -> tuple[Spec, ...]:
    """The hash grid of csrc/hash_grid.h, for searches within about one radius."""
    rows = points.shape[0]
    slots = (4 if rows <= 2**22 else 2) * rows + clouds  # as in csrc/hash_grid.h
    width = ((), points.dtype)  # edge of the cells
    start = ((slots + 2,), torch.int32)  # first sorted point of each slot; then of points not finite
    return width, start, _sorted_points(points)


def _nearest(call: SimpleNamespace) -> tuple[Spec, ...]:
    shape = call.query_points.shape[0], call.k
    return (shape, call.query_points.dtype), (shape, torch.int64 if call.long_rows else torch.int32)


def _sums(call: SimpleNamespace, saved: int) -> tuple[Spec, ...]:
    """The sums, and ``saved`` numbers of each query for the backward."""
    queries, dtype = call.query_points.shape[0], call.features.dtype
    return ((queries, call.features.shape[1]), dtype), ((queries, saved), dtype)


build_cell_list = cpp_op("native_build_cell_list", _cell_list)
build_hash_grid = cpp_op("native_build_hash_grid", lambda call: _hash_grid(call.points, call.clouds))
radius_search = cpp_op(
    "native_radius_search",
    lambda call: (
        ((call.query_points.shape[0], call.k), call.query_points.dtype),
        ((call.query_points.shape[0], call.k), torch.int64),
        ((call.query_points.shape[0],), torch.int64),
    ),
)
radius_list = cpp_op(
    "native_radius_list",
    lambda call: (
        ((call.query_points.shape[0] + 1,), torch.int64),
        ((call.capacity,), torch.int64),
        ((call.capacity,), call.query_points.dtype),
    ),
)
build_hash_grids = cpp_op(  # of queries and of reference points
    "native_build_hash_grids",
    lambda call: _hash_grid(call.query_points, call.clouds) + _hash_grid(call.reference_points, call.clouds),
)
search = cpp_op("native_search", lambda call: (((call.query_points.shape[0], call.k), torch.int32),))
search_with_distances = cpp_op("native_search_with_distances", _nearest)
neighbor_sums = cpp_op(
    "native_neighbor_sums",
    lambda call: _sums(call, saved=call.neighbor_indices.shape[1]),
    differentiable=DIFFERENTIABLE,
    second_backward=lambda directions, grads, saved: aggregate_second_backward(
        directions, grads[0], saved.inputs, listed_chunks
    ),
)
radius_sums = cpp_op(
    "native_radius_sums",
    lambda call: _sums(call, saved=2),
    differentiable=DIFFERENTIABLE,
    second_backward=lambda directions, grads, saved: aggregate_second_backward(
        directions, grads[0], saved.inputs, chunks_within
    ),
)


def _nearest_in_parts(
    query_points: Tensor,
    query_offsets: Tensor | None,
    reference_points: Tensor,
    reference_offsets: Tensor | None,
    clouds: int,
    cell_list: list[Tensor],
    k: int,
    long_rows: bool,
) -> tuple[Tensor, Tensor]:
    tables = cell_list or build_cell_list(reference_points, reference_offsets, clouds)
    return search_with_distances(
        query_points, query_offsets, reference_points, clouds, list(tables), k, long_rows
    )


def _knn_aggregate_in_parts(
    query_points: Tensor,
    query_offsets: Tensor | None,
    reference_points: Tensor,
    reference_offsets: Tensor | None,
    clouds: int,
    cell_list: list[Tensor],
    features: Tensor,
    sigma: Tensor,
    k: int,
    *weighting: str | float,
) -> Tensor:
    tables = cell_list or build_cell_list(reference_points.detach(), reference_offsets, clouds)
    points = query_points.detach(), query_offsets, reference_points.detach(), clouds
    rows = search(*points, list(tables), k)
    return neighbor_sums(query_points, reference_points, features, sigma, rows, *weighting)[0]


def _radius_aggregate_in_parts(
    query_points: Tensor,
    query_offsets: Tensor | None,
    reference_points: Tensor,
    reference_offsets: Tensor | None,
    clouds: int,
    reference_grid: list[Tensor],
    features: Tensor,
    sigma: Tensor,
    radius: float,
    *weighting: str | float,
) -> Tensor:
    points = query_points, query_offsets, reference_points, reference_offsets, clouds
    queries, references = query_points.detach(), reference_points.detach()
    if reference_grid:
        query_grid = build_hash_grid(queries, query_offsets, clouds, radius, None)
    else:
        made = build_hash_grids(queries, query_offsets, references, reference_offsets, clouds, radius)
        query_grid, reference_grid = made[:3], made[3:]
    grids = list(query_grid), list(reference_grid)
    return radius_sums(*points, *grids, features, sigma, radius, *weighting)[0]


nearest = whole_call("native_nearest", _nearest_in_parts)
knn_aggregate = whole_call("native_knn_aggregate", _knn_aggregate_in_parts)
radius_aggregate = whole_call("native_radius_aggregate", _radius_aggregate_in_parts)
