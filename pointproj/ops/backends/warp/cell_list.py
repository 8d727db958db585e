"""A two-level cell list: built on the device in a fixed number of launches, for any density.

The box that holds most of a cloud is divided into about as many cells as there are points; the cells at its
border extend to the farthest points. A dense cell, one with many points, is subdivided where most of its
points lie, which a small sample tells: a dense cluster has small cells of its own then, also when a few other
points share its cell. Points are sorted by cell, those of dense cells by sub-cell behind all others: cells
that follow each other along x hold one contiguous run of points.

Every size follows from the number of points and clouds, nothing is read back, and torch owns all buffers:
the build can be captured in a CUDA graph.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pointproj.ops.backends.warp.bounds import bound_threads
from pointproj.ops.backends.warp.cell_list_kernels import build_kernels
from pointproj.ops.backends.warp.common import BLOCK, DENSE, POINTS_PER_SUBCELL, Batch
from pointproj.ops.backends.warp.grids import CellList
from pointproj.ops.backends.warp.scan import running_sum, states_of
from pointproj.ops.bridge.scratch import Part, Scratch
from pointproj.ops.bridge.warp_op import Launch, warp_op


def cells_per_two_points(points: Tensor) -> int:
    """Fine cells spare distances; for many points, on a GPU, the tables themselves are what takes time.

    Self-kNN of 10^6 uniform points takes 0.76 ms with one cell for two points, 1.10 with two for one; the
    search of W1 40 us with two for one, 53 with one for one.
    """
    if not points.is_cuda:
        return 2
    return 4 if points.shape[0] <= 2**18 else 1


def build_cell_list(points: Tensor, offsets: Tensor | None, clouds: int) -> CellList:
    """Sort ``points`` (N, 3), packed clouds, into cells; points that are not finite come last, in none."""
    return CellList(*_build(points, offsets, clouds))


def new_cell_list(launch: Launch, points: Tensor, offsets: Tensor | None, clouds: int) -> CellList:
    """The same for an operator that builds its own."""
    tables = _tables(points.shape[0], points.dtype, clouds, cells_per_two_points(points))
    cells = CellList(*tables.allocate(points.device))
    _fill(launch, points, offsets, clouds, cells)
    return cells


def _specs(points: Tensor, clouds: int, **_: Any) -> dict:
    return _table_specs(points.shape[0], points.dtype, clouds, cells_per_two_points(points))


def _table_specs(rows: int, dtype: torch.dtype, clouds: int, density: int) -> dict:
    cells = density * rows // 2 + clouds
    subgrids = rows // DENSE + 2  # never 1: torch.compile would take that for a size of its own
    return {
        "frames": ((clouds, 12), dtype),
        "dims": ((clouds, 4), torch.int32),
        "subgrid": ((cells,), torch.int32),
        "subframes": ((subgrids, 6), dtype),
        "subdims": ((subgrids, 2), torch.int32),
        "start": ((cells + rows // POINTS_PER_SUBCELL + 2,), torch.int64),
        "sorted_points": ((rows, 4), dtype),
    }


@functools.lru_cache
def _tables(rows: int, dtype: torch.dtype, clouds: int, density: int) -> Scratch:
    return Scratch((), list(_table_specs(rows, dtype, clouds, density).values()))


@functools.lru_cache
def _build_memory(rows: int, dtype: torch.dtype, clouds: int, subgrids: int, sizes: int) -> Scratch:
    """The states of the running sum, and what :class:`Build` holds, in another order: counters first."""
    counters = [(sizes,), (subgrids, 6), (subgrids,), (1,), (1,), (1,), (2,)]
    return Scratch(
        [((states_of(sizes),), torch.int64), *((shape, torch.int32) for shape in counters)],
        [((clouds, 13), dtype), ((rows, 2), torch.int32)],
    )


class Build(NamedTuple):
    """What the kernels of the build work with: :func:`pointproj.ops.backends.warp.bounds.build_struct`."""

    box: Part
    placed: Part
    occupancy: Part
    extent: Part
    arrived: Part
    threads_arrived: Part
    dense_count: Part
    subcell_count: Part
    tickets: Part


@warp_op("pointproj::warp_build_cell_list", outputs=_specs, replayable=True)
def _build(
    launch: Launch,
    points: Tensor,
    offsets: Tensor | None,
    clouds: int,
    *,
    frames: Tensor,
    dims: Tensor,
    subgrid: Tensor,
    subframes: Tensor,
    subdims: Tensor,
    start: Tensor,
    sorted_points: Tensor,
) -> None:
    cells = CellList(frames, dims, subgrid, subframes, subdims, start, sorted_points)
    _fill(launch, points, offsets, clouds, cells)


def _fill(launch: Launch, points: Tensor, offsets: Tensor | None, clouds: int, cells: CellList) -> None:
    _, _, subgrid, _, subdims, start, sorted_points = cells
    batch = Batch(offsets, points.shape[0], clouds)
    kernels = build_kernels(points.dtype, 32 if points.is_cuda else 1)
    rows, subgrids, sizes = points.shape[0], subdims.shape[0], start.shape[0] - 1
    memory = _build_memory(rows, points.dtype, clouds, subgrids, sizes).allocate(points.device)
    counters, states, occupancy, *others, box, placed = memory
    build = Build(box, placed, occupancy, *others)

    launch(kernels.clear, counters.shape[0], counters, cells, build)
    threads, density = bound_threads(points), cells_per_two_points(points)
    # Few threads, many processors: so small blocks.
    launch(kernels.bound, threads, points, batch, threads, density, cells, build, block_dim=64)
    launch(kernels.count, rows, points, batch, cells, build)
    half = -(-rows // BLOCK) * BLOCK if points.is_cuda else rows  # whole blocks
    launch(kernels.subdivide, 2 * half, points, batch, cells, build, half, block_dim=BLOCK)
    running_sum(launch, occupancy, subgrid.shape[0], states, start)
    if points.is_cuda and torch.are_deterministic_algorithms_enabled():
        rank_in_order(placed, start)
    launch(kernels.scatter, rows, points, None, placed, start, sorted_points)


def rank_in_order(placed: Part, start: Tensor | Part) -> None:
    """Rank the points of each cell in the order of the rows, where atomics give that of arrival."""
    cells, ranks = placed.tensor().unbind(1)
    start = start.tensor() if isinstance(start, Part) else start
    by_cell = cells.argsort(stable=True)
    in_order = torch.empty_like(by_cell)
    in_order[by_cell] = torch.arange(len(by_cell), device=by_cell.device)
    ranks.copy_(in_order - start[cells.long()].to(torch.int32))
