"""Aggregation over all points within a radius: operators of the extension.

The algorithms stand in ``csrc``: ``wrapped.h`` searches, ``within.h`` aggregates.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from pointproj.backends import Clouds
from pointproj.backends.native.cpp_op import cpp_op
from pointproj.backends.native.nearest import sorted_points_spec
from pointproj.pairs import chunks_within
from pointproj.pairwise import DIFFERENTIABLE, aggregate_second_backward
from pointproj.torch_op import Spec

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
    clouds: Clouds, cells: WrappedCells, features: Tensor, sigma: Tensor, radius: float
) -> Tensor:
    """Weighted mean of the features within ``radius``: ``(Q, C)`` in their dtype."""
    return _aggregate(*clouds, list(cells), features, sigma, radius)[0]


def _cells_specs(points: Tensor, offsets: Tensor | None, clouds: int, radius: float) -> tuple[Spec, ...]:
    places = PLACES_PER_POINT * points.shape[0] + clouds
    return ((), points.dtype), ((places + 2,), torch.int32), sorted_points_spec(points)


def _specs(
    query_points: Tensor,
    query_offsets: Tensor | None,
    reference_points: Tensor,
    reference_offsets: Tensor | None,
    clouds: int,
    cells: list[Tensor],
    features: Tensor,
    sigma: Tensor,
    radius: float,
) -> tuple[Spec, ...]:
    queries = query_points.shape[0]
    aggregated, softmax = ((queries, features.shape[1]), features.dtype), ((queries, 2), features.dtype)
    return aggregated, softmax, *_cells_specs(query_points, query_offsets, clouds, radius)


_build = cpp_op("native_build_wrapped", _cells_specs)
_aggregate = cpp_op(
    "native_aggregate_within",
    _specs,
    differentiable=DIFFERENTIABLE,
    second_backward=lambda directions, grads, saved: aggregate_second_backward(
        directions, grads[0], saved.inputs, chunks_within
    ),
)
