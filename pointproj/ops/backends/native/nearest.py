"""The k nearest reference points, and the aggregation over them: operators of the extension.

The algorithms stand in ``csrc``: ``build_cells.h`` and ``nearest.h`` search, ``listed.h`` aggregates.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from pointproj.ops.bridge.cpp_op import cpp_op
from pointproj.ops.bridge.torch_op import Spec
from pointproj.ops.gradients import DIFFERENTIABLE, aggregate_second_backward
from pointproj.ops.pairs import listed_chunks
from pointproj.ops.registry import Clouds

CROWD = 256  # as in csrc/cells.h, which says what the tables hold
READ_AHEAD = 16  # as in csrc/common.h


class Cells(NamedTuple):
    """The two-level cell list as tensors."""

    reals: Tensor  # grids and sub-grids: corners and edges
    numbers: Tensor  # int32: sizes of the grids, first cell, sub-cell and sorted point of each
    points: Tensor  # sorted, with the bits of their rows: (N, 4) on a GPU, (4, N + READ_AHEAD) on a CPU


def build_cells(points: Tensor, offsets: Tensor | None, clouds: int) -> Cells:
    """Sort ``points`` (N, 3), packed clouds, into cells; points that are not finite come last, in none."""
    return Cells(*_build_cells(points, offsets, clouds))


def search(clouds: Clouds, cells: Cells, k: int) -> Tensor:
    """Packed rows of the k nearest, ``(Q, k)`` int32, nearest first, -1 where there are fewer."""
    points = clouds.query_points, clouds.query_offsets, clouds.reference_points, clouds.count
    return _search(*points, list(cells), k)


def aggregate_neighbors(
    query_points: Tensor, reference_points: Tensor, features: Tensor, sigma: Tensor, neighbor_indices: Tensor
) -> Tensor:
    """As :func:`pointproj.ops.backends.torch.aggregate_neighbors`, for lists sorted by distance."""
    return _aggregate(query_points, reference_points, features, sigma, neighbor_indices)[0]


def sorted_points_spec(points: Tensor) -> Spec:
    """Shape and dtype of ``points`` in the order of their cells."""
    rows = points.shape[0]
    return ((rows, 4) if points.is_cuda else (4, rows + READ_AHEAD)), points.dtype


def _cells_specs(points: Tensor, offsets: Tensor | None, clouds: int) -> tuple[Spec, ...]:
    """The sizes that ``CellSizes`` in csrc/cells.h has."""
    rows = points.shape[0]
    density = 2 if not points.is_cuda else 4 if rows <= 2**18 else 1
    cells, cuts = density * rows // 2 + clouds, rows // CROWD + 2
    numbers = 4 * clouds + cells + cuts + (cells + 1) + (cells + rows + 2)
    return ((12 * clouds + 6 * cuts,), points.dtype), ((numbers,), torch.int32), sorted_points_spec(points)


_build_cells = cpp_op("native_build_cells", _cells_specs)
_search = cpp_op(
    "native_search",
    lambda query_points, qo, reference_points, clouds, cells, k: (((query_points.shape[0], k), torch.int32),),
)
_aggregate = cpp_op(
    "native_aggregate_neighbors",
    lambda query_points, reference_points, features, sigma, neighbor_indices: (
        ((query_points.shape[0], features.shape[1]), features.dtype),
        (tuple(neighbor_indices.shape), features.dtype),
    ),
    differentiable=DIFFERENTIABLE,
    second_backward=lambda directions, grads, saved: aggregate_second_backward(
        directions, grads[0], saved.inputs, listed_chunks
    ),
)
