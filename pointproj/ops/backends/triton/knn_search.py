"""The k nearest reference points, exactly, ties by the lower index.

Each lane of a program searches for one query. It visits the query's cell, then larger and larger cubes around
it, until k points are found; then the cube that contains all points as near as the farthest of these. Queries
are sorted by cell, so that adjacent lanes visit the same cells.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pointproj.ops.backends.triton.arithmetic import load_points, squared_length
from pointproj.ops.backends.triton.cell_list import CellList, cell_numbers, cloud_numbers
from pointproj.ops.backends.triton.top_k import empty_lists, insert, precedes, store_lists
from pointproj.ops.backends.triton.traversal import cell_of, cube_within, load_queries, run_of, runs_of
from pointproj.ops.bridge.triton_op import cdiv, launch, tuned
from pointproj.ops.specification.clouds import Clouds

LARGEST_LIST = 32  # neighbours found in one search; for more, each search begins behind the last result
CONFIGS = [triton.Config({"TILE": 32, "STEP": step}, num_warps=1) for step in (4, 2, 8)]


def nearest_rows(clouds: Clouds, cells: CellList, k: int) -> Tensor:
    """Packed rows (Q, k) int32 of the k nearest, nearest first, -1 where there are fewer."""
    points = clouds.query_points
    count = points.shape[0]
    found = torch.empty(count, k, dtype=torch.int32, device=points.device)
    numbers = cloud_numbers(points, clouds.query_offsets, clouds.count)
    order = cell_numbers(points, numbers, cells.frame, cells.side, clouds.count).argsort()
    for first in range(0, k, LARGEST_LIST):
        wanted = min(k - first, LARGEST_LIST)
        launch(
            search_kernel, lambda meta: (cdiv(count, meta["TILE"]),),
            points, numbers, order, *cells, clouds.reference_points, found,
            count, cells.side, k, first, wanted, first > 0, clouds.count != 1, 1 << (wanted - 1).bit_length(),
        )  # fmt: skip
    return found


@tuned(CONFIGS, key=["SLOTS", "CONTINUES", "BATCHED"])
@triton.jit
def search_kernel(
    query_points, clouds, order, points, rows, first, frame, points_as_given, found,
    queries, side, k, begin, wanted, CONTINUES: tl.constexpr, BATCHED: tl.constexpr, SLOTS: tl.constexpr,
    TILE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Find ``wanted`` rows of each query, from place ``begin`` on; STEP points of a run at a time."""
    side = tl.cast(side, tl.int32)  # sizes may come as 64 bits
    lane = tl.program_id(0) * TILE + tl.arange(0, TILE)
    exists = lane < queries
    query = tl.load(order + lane, mask=exists, other=0)
    x, y, z, cloud, active = load_queries(query_points, clouds, query, exists, BATCHED)
    # The last neighbour that earlier searches found.
    done = tl.full([TILE], -float("inf"), x.dtype)
    done_row = tl.full([TILE], -1, tl.int32)
    if CONTINUES:
        done_row = tl.load(found + query * k + begin - 1, mask=exists, other=-1)
        active &= done_row >= 0
        last_x, last_y, last_z = load_points(points_as_given, tl.maximum(done_row, 0), exists, 0.0)
        done = squared_length(x - last_x, y - last_y, z - last_z)

    best, best_rows = empty_lists(x.dtype, wanted, SLOTS, TILE)
    cx, cy, cz = cell_of(x, y, z, frame, side)
    size, inner = tl.zeros([TILE], tl.int32), tl.full([TILE], -1, tl.int32)
    searching = active
    while tl.max(searching.to(tl.int32)) > 0:
        for number in range(tl.max(tl.where(searching, runs_of(cy, cz, size, side), 0))):
            run, end = run_of(number, cx, cy, cz, size, inner, cloud, searching, first, side)
            for step in range(0, tl.max(end - run), STEP):
                at = (run + step)[None, :] + tl.arange(0, STEP)[:, None]
                there = at < end[None, :]
                px, py, pz = load_points(points, at, there, float("inf"))
                row = tl.load(rows + at, mask=there, other=-1)
                squared = squared_length(x[None, :] - px, y[None, :] - py, z[None, :] - pz)
                if CONTINUES:
                    there &= precedes(done[None, :], done_row[None, :], squared, row)
                best, best_rows = insert(tl.where(there, squared, float("inf")), row, best, best_rows)
        farthest = tl.max(best, 0)
        within = cube_within(x, y, z, cx, cy, cz, farthest, frame, side)
        inner = size
        size = tl.maximum(size, tl.minimum(tl.where(farthest < float("inf"), within, 2 * size + 1), side - 1))
        searching &= size > inner
    store_lists(best, best_rows, found, query * k + begin, wanted, exists, SLOTS, TILE)
