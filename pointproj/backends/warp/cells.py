"""A two-level cell list: built on the device in a fixed number of launches, for any density.

The box that holds most of a cloud is cut into about as many cells as there are points; the cells at its
border reach out to the farthest points. A cell that holds a crowd is cut again where most of its points
lie, which a small sample tells: a dense cluster has small cells of its own then, also when a few other
points share its cell. Points are sorted by (cell, sub-cell): cells that follow each other along x
hold one contiguous run of points.

Every size follows from the number of points and clouds, nothing is read back, and torch owns all buffers:
the build can be captured in a CUDA graph.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pointproj.backends.warp.boxes import bound_threads
from pointproj.backends.warp.cell_kernels import build_kernels
from pointproj.backends.warp.common import CROWD, POINTS_PER_SUBCELL
from pointproj.warp_op import Launch, warp_op


def cells_per_two_points(points: Tensor) -> int:
    """Fine cells spare distances; for many points, on a GPU, the tables themselves are what takes time."""
    if not points.is_cuda:
        return 2
    return 4 if points.shape[0] <= 2**20 else 1


class Cells(NamedTuple):
    """The cell list as tensors."""

    frames: Tensor  # (clouds, 12) real: each grid's corner and cell edges, each cloud's two corners
    dims: Tensor  # (clouds, 4) int32: cells along x, y, z; number of the first cell
    cut: Tensor  # (cells,) int32: for a cell that is cut, its row in the next two tables
    subframes: Tensor  # (cuts, 6) real: lowest corner and edges of the sub-cells
    subdims: Tensor  # (cuts,) int32: sub-cells along x, y, z, AXIS_BITS bits each
    shift: Tensor  # (cells + 1,) int32: the first sub-cell of cell c is number c + shift[c]
    start: Tensor  # (subcells + 2,) int32: first sorted row of each sub-cell; then of points not finite
    points: Tensor  # (N, 4) real: positions, sorted, and the bits of their row in the cloud as given


def build_cells(points: Tensor, offsets: Tensor | None, clouds: int) -> Cells:
    """Sort ``points`` (N, 3), packed clouds, into cells; points that are not finite come last, in none."""
    return Cells(*_build_cells(points, offsets, clouds))


def _specs(points: Tensor, offsets: Any, clouds: int) -> dict:
    rows, dtype = points.shape[0], points.dtype
    cells = cells_per_two_points(points) * rows // 2 + clouds
    cuts = rows // CROWD + 2  # never 1: torch.compile would take that for a size of its own
    return {
        "frames": ((clouds, 12), dtype),
        "dims": ((clouds, 4), torch.int32),
        "cut": ((cells,), torch.int32),
        "subframes": ((cuts, 6), dtype),
        "subdims": ((cuts,), torch.int32),
        "shift": ((cells + 1,), torch.int32),
        "start": ((cells + rows // POINTS_PER_SUBCELL + 2,), torch.int32),
        "sorted_points": ((rows, 4), dtype),
    }


@warp_op("pointproj::warp_build_cells", outputs=_specs)
def _build_cells(
    launch: Launch,
    points: Tensor,
    offsets: Tensor | None,
    clouds: int,
    frames: Tensor,
    dims: Tensor,
    cut: Tensor,
    subframes: Tensor,
    subdims: Tensor,
    shift: Tensor,
    start: Tensor,
    sorted_points: Tensor,
) -> None:
    kernels = build_kernels(points.dtype)
    rows, cells, cuts, subcells = points.shape[0], cut.shape[0], subdims.shape[0], start.shape[0] - 1
    # One buffer, so that one launch clears all counters.
    counters = subdims.new_empty(2 * cells + subcells + 6 * cuts + 1)
    occupancy, extra, suboccupancy, extent, cut_count = counters.split([cells, cells, subcells, 6 * cuts, 1])
    box = points.new_empty(clouds, 13)
    cut_cells = subdims.new_empty(cuts)
    place = subdims.new_empty(rows, 2)  # sub-cell of each point, and its rank in there

    cloud = (points, offsets, clouds)
    threads = bound_threads(points)
    launch(kernels.clear, counters.shape[0], counters, box, cut, shift, start)
    launch(kernels.bound, threads, *cloud, threads, box)
    density = cells_per_two_points(points)
    launch(
        kernels.count,
        max(rows, clouds),
        *cloud,
        density,
        box,
        frames,
        dims,
        occupancy,
        cut_count,
        cut,
        cut_cells,
    )
    launch(kernels.sample, rows, *cloud, frames, dims, occupancy, cut, extent.view(cuts, 6))
    crowds = (cut_count, cut_cells, occupancy, extent.view(cuts, 6))
    launch(kernels.cut, cuts, clouds, frames, dims, *crowds, subframes, subdims, extra)
    torch.cumsum(extra, 0, dtype=torch.int32, out=shift[1:])
    grid = (frames, dims, cut, subframes, subdims, shift)
    launch(kernels.place, rows, *cloud, *grid, suboccupancy, place)
    torch.cumsum(suboccupancy, 0, dtype=torch.int32, out=start[1:])
    if points.is_cuda and torch.are_deterministic_algorithms_enabled():
        place[:, 1] = stable_ranks(place[:, 0], start)
    launch(kernels.scatter, rows, points, None, place, start, sorted_points)


def stable_ranks(cells: Tensor, start: Tensor) -> Tensor:
    """Ranks in the order of the rows, where atomics give them in the order of arrival."""
    by_cell = cells.argsort(stable=True)
    ranks = torch.empty_like(by_cell)
    ranks[by_cell] = torch.arange(len(by_cell), device=by_cell.device)
    return (ranks - start[cells.long()]).to(torch.int32)
