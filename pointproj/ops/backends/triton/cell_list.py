"""Points sorted by their cell in a grid, and the first point of each cell.

Plain torch operators make the tables. Only the numbers of the cells come from a kernel, since points and
queries must be rounded by the same code. Sorting is stable, so the tables are the same, bit for bit, in every
run. Every size follows from the number of points and nothing is read back: the build can be captured.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pointproj.ops.backends.triton.arithmetic import is_finite, load_points
from pointproj.ops.backends.triton.traversal import cell_of
from pointproj.ops.bridge.triton_op import cdiv, launch, triton_op
from pointproj.ops.specification import pairs
from pointproj.ops.specification.records import FIELDS

EXTENT = (
    2.2  # of the grid to each side of the mean, in standard deviations; border cells extend to all points
)
LEAST_SIDE = 8  # cells along each axis, for a few clouds
FEW_CLOUDS = 256
UNKNOWN_SIDE = 32  # for a symbolic number of points
BLOCK = 256


class CellList(NamedTuple):
    """One or several sorted clouds, as tensors."""

    points: Tensor  # (N, 3) real, cell after cell; points that are not finite come last
    rows: Tensor  # (N,) int32: row of each point in the given cloud
    first: Tensor  # (clouds * side * side, side + 1) int32: first points of a row's cells, and the row's end
    frame: Tensor  # (4,) real: lowest corner of the grid, and cells a unit of length

    @property
    def side(self) -> int:
        """How many cells there are along each axis."""
        return self.first.shape[1] - 1


FIELDS[CellList] = dict.fromkeys(CellList._fields, Tensor | None)


def build_cell_list(points: Tensor, offsets: Tensor | None, clouds: int) -> CellList:
    """Sort ``points`` (N, 3), packed clouds."""
    return CellList(*_build(points, offsets, clouds, _side(points.shape[0], clouds)))


def cloud_numbers(points: Tensor, offsets: Tensor | None, clouds: int) -> Tensor:
    """The cloud of each packed point, (N,) int32; empty for a single cloud."""
    if clouds == 1:
        return points.new_empty(0, dtype=torch.int32)
    return pairs.cloud_numbers(offsets, points.shape[0], clouds, points.device).int()


def cell_numbers(points: Tensor, clouds_of: Tensor, frame: Tensor, side: int, clouds: int) -> Tensor:
    """The cell of each point, (N,) int32; points that are not finite are in one more cell, the last."""
    count = points.shape[0]
    cells = points.new_empty(count, dtype=torch.int32)
    launch(
        number_kernel, (cdiv(count, BLOCK),),
        points, clouds_of, frame, cells, count, side, clouds, clouds != 1, BLOCK,
    )  # fmt: skip
    return cells


def _side(count: int, clouds: int) -> int:
    """A power of two, so that there are 1 to 8 cells for each point, or more for few points.

    Compiled code depends on the side, and so serves many numbers of points.
    """
    if not (isinstance(count, int) and isinstance(clouds, int)):
        return UNKNOWN_SIDE
    side = LEAST_SIDE if clouds <= FEW_CLOUDS else 1
    while clouds * side**3 < count:
        side *= 2
    return side


def _make_tables(
    points: Tensor, offsets: Tensor | None, clouds: int, side: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    frame = _frame(points, side)
    cells, order = cell_numbers(points, cloud_numbers(points, offsets, clouds), frame, side, clouds).sort(
        stable=True
    )
    whole = {"dtype": torch.int32, "device": points.device}
    places = torch.arange(clouds * side * side, **whole)[:, None] * side + torch.arange(side + 1, **whole)
    first = torch.searchsorted(cells, places, out_int32=True)
    return points[order], order.int(), first, frame


def _frame(points: Tensor, side: int) -> Tensor:
    """One frame for all clouds. It affects the time of a search, never the result."""
    if points.shape[0] == 0:
        return points.new_zeros(4)
    deviation, mean = torch.std_mean(points.nan_to_num(0.0, 0.0, 0.0), 0, correction=0)
    extent = EXTENT * deviation.amax(0, keepdim=True)
    return torch.cat([mean - extent, side / (2 * extent)])


@triton.jit
def number_kernel(
    points, clouds_of, frame, cells, count, side, clouds, BATCHED: tl.constexpr, BLOCK: tl.constexpr
):
    """The cell numbers of a block of points."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    x, y, z = load_points(points, at, inside, 0.0)
    cx, cy, cz = cell_of(x, y, z, frame, side)
    cloud = tl.zeros_like(at)
    if BATCHED:
        cloud = tl.load(clouds_of + at, mask=inside, other=0)
    cell = ((cloud * side + cz) * side + cy) * side + cx
    cell = tl.where(is_finite(x, y, z), cell, clouds * side * side * side)
    tl.store(cells + at, cell.to(tl.int32), mask=inside)


_build = triton_op(
    "pointproj::triton_build_cell_list",
    _make_tables,
    lambda points, offsets, clouds, side: (
        (points.shape, points.dtype),
        ((points.shape[0],), torch.int32),
        ((clouds * side * side, side + 1), torch.int32),
        ((4,), points.dtype),
    ),
)
