"""Aggregation over all points within a radius: operators of the extension.

The algorithms stand in ``csrc``: ``wrapped.h`` searches, ``within.h`` aggregates.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from pointproj.ops.backends.native.nearest import sorted_points_spec
from pointproj.ops.bridge.cpp_op import cpp_op
from pointproj.ops.bridge.torch_op import Spec
from pointproj.ops.gradients import DIFFERENTIABLE, aggregate_second_backward
from pointproj.ops.pairs import chunks_within
from pointproj.ops.registry import Clouds

PLACES_PER_POINT = 4  # as in csrc/wrapped.h, which says what the tables hold


class WrappedCells(NamedTuple):
    """Cells for about one radius, in a table of fixed size, as tensors."""

    width: Tensor  # () edge of the cells
    start: Tensor  # (places + 2,) int32: first sorted point of each place; then of points not finite
    points: Tensor  # sorted, as those of nearest.Cells


def build_wrapped_cells(points: Tensor, offsets: Tensor | None, clouds: int, radius: float) -> WrappedCells:
    """Sort ``points`` (N, 3), packed clouds, for searches within about ``radius``."""
    return WrappedCells(*_build(points, offsets, clouds, radius))


def aggregate_within(
    clouds: Clouds, cells: WrappedCells | None, features: Tensor, sigma: Tensor, radius: float
) -> Tensor:
    """Weighted mean of the features within ``radius``: ``(Q, C)`` in their dtype."""
    points = clouds.detached()
    if cells is None:
        tables = _build_pair(*points, radius)
        query_cells, reference_cells = tables[:3], tables[3:]
    else:
        query_cells = _build(points.query_points, points.query_offsets, points.count, radius)
        reference_cells = cells
    return _aggregate(*clouds, list(query_cells), list(reference_cells), features, sigma, radius)[0]


def _cells_specs(points: Tensor, offsets: Tensor | None, clouds: int, radius: float) -> tuple[Spec, ...]:
    places = PLACES_PER_POINT * points.shape[0] + clouds
    return ((), points.dtype), ((places + 2,), torch.int32), sorted_points_spec(points)


def _pair_specs(
    query_points: Tensor,
    query_offsets: Tensor | None,
    reference_points: Tensor,
    reference_offsets: Tensor | None,
    clouds: int,
    radius: float,
) -> tuple[Spec, ...]:
    queries = _cells_specs(query_points, query_offsets, clouds, radius)
    return queries + _cells_specs(reference_points, reference_offsets, clouds, radius)


def _specs(
    query_points: Tensor,
    query_offsets: Tensor | None,
    reference_points: Tensor,
    reference_offsets: Tensor | None,
    clouds: int,
    query_cells: list[Tensor],
    reference_cells: list[Tensor],
    features: Tensor,
    sigma: Tensor,
    radius: float,
) -> tuple[Spec, ...]:
    queries = query_points.shape[0]
    return ((queries, features.shape[1]), features.dtype), ((queries, 2), features.dtype)


_build = cpp_op("native_build_wrapped", _cells_specs)
_build_pair = cpp_op("native_build_wrapped_pair", _pair_specs)
_aggregate = cpp_op(
    "native_aggregate_within",
    _specs,
    differentiable=DIFFERENTIABLE,
    second_backward=lambda directions, grads, saved: aggregate_second_backward(
        directions, grads[0], saved.inputs, chunks_within
    ),
)
