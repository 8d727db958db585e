"""Which tiles of points have few neighbours in common, and are left to lanes that work on one point each.

What a tile searches grows with the cells between its first and its last point in each row of cells; apart
from each other its points would search 32 times as much as one.
"""

import functools

import torch
import warp as wp
from torch import Tensor

from pointproj.ops.backends.warp.common import OPTIONS, Batch, BatchStruct, cloud_of, packed_point
from pointproj.ops.backends.warp.hash_grid import SearchedGrid, searched_struct
from pointproj.ops.backends.warp.hash_table import MOST_STEPS, table_functions
from pointproj.ops.backends.warp.lanes import lanes, lowest_bit
from pointproj.ops.backends.warp.tiles import LANES
from pointproj.ops.bridge.warp_op import Launch

SPARSE = 16  # so many points' searches take a tile longer than all its points apart
MANY = 2**18  # so many points, and sparse tiles are left to a second kernel; of fewer they take little time


def mark_sparse(
    launch: Launch, sorted_points: Tensor, batch: Batch, searched: SearchedGrid, radius: float
) -> Tensor | None:
    """For each tile of ``sorted_points``, 1 if it is sparse, else 0; None if there are few.

    Apart from the sums, which leave few registers: for 10^8 points it took 6 ms together with them.
    """
    if batch.rows < MANY:
        return None
    tiles = -(-batch.rows // LANES)
    sparse = torch.empty(tiles, dtype=torch.int32, device=sorted_points.device)
    launch(_mark_kernel(), (tiles, LANES), sorted_points, batch, searched, radius, sparse)
    return sparse


@functools.cache
def _mark_kernel() -> wp.Kernel:
    SearchedStruct = searched_struct(torch.float32)
    _, table_of, axis_cell, first_bucket_of, along, _ = table_functions(torch.float32)
    load_point, _, row_of = packed_point(torch.float32)
    group = lanes(LANES)
    item, lane, take, ballot = group.item, group.lane, group.take, group.ballot
    minimum = group.minimum

    @wp.func
    def is_sparse(q: wp.vec3f, cloud: int, searched: SearchedStruct, radius: float):
        """All lanes call it; what they exchange is never behind a condition of one of them."""
        table = table_of(cloud, searched.batch, searched.first_bucket)
        per_unit = float(1.0) / searched.width[searched.number]
        x = along(table, axis_cell(q[0], per_unit))
        row = first_bucket_of(table, axis_cell(q[1], per_unit), axis_cell(q[2], per_unit))
        of_one = 2 * int(wp.min(radius * per_unit, float(MOST_STEPS))) + 3
        there = wp.isfinite(q)
        todo = ballot(there)
        cells = float(0.0)
        most = float(SPARSE) * float(of_one)
        while todo != 0 and cells <= most:
            chosen_row = take(row, lowest_bit(todo))
            active = there and row == chosen_row
            todo = todo & ~ballot(active)
            first = minimum(wp.where(active, x, 1 << 30))
            last = -minimum(wp.where(active, -x, 0))
            cells += float(last - first + of_one)
        return cells > most

    @wp.kernel(**OPTIONS)
    def mark(
        sorted_points: wp.array2d(dtype=wp.float32),
        batch: BatchStruct,
        searched: SearchedStruct,
        radius: float,
        sparse: wp.array(dtype=wp.int32),
    ):
        first, _ = wp.tid()
        tile = item(first)
        at = tile * LANES + lane()
        q = wp.vec3f(float(wp.nan))
        cloud = int(0)
        if at < batch.rows:  # the last tile may have fewer points than lanes
            point = load_point(sorted_points, at)
            q = wp.vec3f(point[0], point[1], point[2])
            cloud = cloud_of(row_of(point), batch)
        leaves = is_sparse(q, cloud, searched, radius)
        if lane() == 0:
            sparse[tile] = wp.where(leaves, 1, 0)

    return mark
