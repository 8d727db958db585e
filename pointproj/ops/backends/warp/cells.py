"""A two-level cell list: built on the device in a fixed number of launches, for any density.

The box that holds most of a cloud is cut into about as many cells as there are points; the cells at its
border reach out to the farthest points. A cell that holds a crowd is cut again where most of its points
lie, which a small sample tells: a dense cluster has small cells of its own then, also when a few other
points share its cell. Points are sorted by cell, those of crowds by sub-cell behind all others: cells that
follow each other along x hold one contiguous run of points.

Every size follows from the number of points and clouds, nothing is read back, and torch owns all buffers:
the build can be captured in a CUDA graph.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pointproj.ops.backends.warp.boxes import bound_threads
from pointproj.ops.backends.warp.cell_kernels import build_kernels
from pointproj.ops.backends.warp.common import BLOCK, CROWD, POINTS_PER_SUBCELL
from pointproj.ops.backends.warp.scan import running_sum, states_of
from pointproj.ops.bridge.warp_op import Launch, warp_op


def cells_per_two_points(points: Tensor) -> int:
    """Fine cells spare distances; for many points, on a GPU, the tables themselves are what takes time."""
    if not points.is_cuda:
        return 2
    return 4 if points.shape[0] <= 2**18 else 1


class Cells(NamedTuple):
    """The cell list as tensors."""

    frames: Tensor  # (clouds, 12) real: each grid's corner and cell edges, each cloud's two corners
    dims: Tensor  # (clouds, 4) int32: cells along x, y, z; number of the first cell
    cut: Tensor  # (cells,) int32: of a crowded cell, its row in the next two tables; of others, 0
    subframes: Tensor  # (cuts, 6) real: lowest corner and edges of the sub-cells
    subdims: Tensor  # (cuts, 2) int32: sub-cells along x, y, z, AXIS_BITS bits each; number of the first one
    start: Tensor  # (subcells + 2,) int64: points and crowds before each cell, as scan.py sums them up
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
        "subdims": ((cuts, 2), torch.int32),
        "start": ((cells + rows // POINTS_PER_SUBCELL + 2,), torch.int64),
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
    start: Tensor,
    sorted_points: Tensor,
) -> None:
    kernels = build_kernels(points.dtype)
    rows, cells, cuts, sizes = points.shape[0], cut.shape[0], subdims.shape[0], start.shape[0] - 1
    # One buffer, so that one launch clears all counters.
    lengths = [2 * states_of(sizes), sizes, 6 * cuts, cuts, 1, 1, 1, 2]
    counters = dims.new_empty(sum(lengths))
    states, occupancy, extent, arrived, threads_arrived, cut_count, subcell_count, turns = counters.split(
        lengths
    )
    box = points.new_empty(clouds, 13)
    placed = dims.new_empty(rows, 2)  # cell or sub-cell of each point, and its rank in there

    cloud = (points, offsets, clouds)
    launch(kernels.clear, counters.shape[0], counters, box, cut, subframes, subdims)
    threads, together = bound_threads(points)
    division = (threads, together, cells_per_two_points(points))
    found = (threads_arrived, box, frames, dims)
    launch(kernels.bound, threads, *cloud, *division, *found, block_dim=64)  # few threads, many processors
    grid = (frames, dims, occupancy, cut_count, cut, placed)
    launch(kernels.count, rows, *cloud, *grid)
    half = -(-rows // BLOCK) * BLOCK if points.is_cuda else rows  # whole blocks
    sampled = (extent.view(cuts, 6), arrived, subcell_count)
    launch(kernels.cut, 2 * half, *cloud, *grid, turns, half, *sampled, subframes, subdims, block_dim=BLOCK)
    running_sum(launch, occupancy, cells, states.view(torch.int64), start)
    if points.is_cuda and torch.are_deterministic_algorithms_enabled():
        placed[:, 1] = stable_ranks(placed[:, 0], start)
    launch(kernels.scatter, rows, points, None, placed, start, sorted_points)


def stable_ranks(cells: Tensor, start: Tensor) -> Tensor:
    """Ranks in the order of the rows, where atomics give them in the order of arrival."""
    by_cell = cells.argsort(stable=True)
    ranks = torch.empty_like(by_cell)
    ranks[by_cell] = torch.arange(len(by_cell), device=by_cell.device)
    return (ranks - start[cells.long()].to(torch.int32)).to(torch.int32)
