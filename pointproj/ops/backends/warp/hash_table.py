"""The table of a hash grid: how many buckets it has, and which of them a cell of space is in.

Rows of cells are along a Z-curve, of which y takes the lower bits: what is near in space is near in the table
too, so that points and features are still in a GPU's cache when the next row wants them. Along x the buckets
of a row follow each other.
"""

import functools
from typing import Any

import torch
import warp as wp

from pointproj.ops.backends.warp.common import REALS, BatchStruct, first_row_of
from pointproj.ops.backends.warp.lanes import floor_log2

MANY_POINTS = 2**22  # more buckets a point spare tests in vain, until to clear and sum them up takes longer
MOST_STEPS = 2.0**20  # cells on each side: more than any table has along an axis
FARTHEST = 2.0**28  # cells from the origin; what lies beyond counts as there


def buckets_per_point(rows: int) -> int:
    """Of the table for so many points."""
    return 4 if rows <= MANY_POINTS else 2


def bucket_count(rows: int, clouds: int) -> int:
    """Buckets that a table has for so many points, with the one for points that are not finite."""
    return buckets_per_point(rows) * rows + clouds + 1


@functools.cache
def table_functions(dtype: torch.dtype) -> Any:
    """Each cloud's part of the table, and the bucket of a cell in it."""
    real, _ = REALS[dtype]

    @wp.struct
    class Table:
        base: int  # first bucket
        bits: wp.vec3i  # buckets along x, y, z, as powers of two

    @wp.func
    def per_point_of(batch: BatchStruct):
        return wp.where(batch.rows <= MANY_POINTS, 4, 2)

    @wp.func
    def last_bucket(batch: BatchStruct):
        """The one for points that are not finite."""
        return per_point_of(batch) * batch.rows + batch.count

    @wp.func
    def table_of(cloud: int, batch: BatchStruct, first_bucket: int):
        begin = first_row_of(cloud, batch)
        size = first_row_of(cloud + 1, batch) - begin
        per_point = per_point_of(batch)
        bits = floor_log2(wp.max(per_point * size, 1))
        table = Table()
        table.base = first_bucket + per_point * begin + cloud
        table.bits = wp.vec3i((bits + 2) / 3, (bits + 1) / 3, bits / 3)
        return table

    @wp.func
    def axis_cell(x: real, per_unit: real):
        return int(wp.floor(wp.clamp(x * per_unit, real(-FARTHEST), real(FARTHEST))))

    @wp.func
    def first_bucket_of(table: Table, y: int, z: int):
        """First bucket of a row of cells."""
        along_y = _spread_bits(y & ((1 << table.bits[1]) - 1))
        along_z = _spread_bits(z & ((1 << table.bits[2]) - 1))
        return table.base + ((along_y | (along_z << 1)) << table.bits[0])

    @wp.func
    def along(table: Table, x: int):
        """Bucket in a row. Around the origin, where clouds mostly are, rows do not wrap."""
        return (x + (1 << table.bits[0]) / 2) & ((1 << table.bits[0]) - 1)

    return Table, table_of, axis_cell, first_bucket_of, along, last_bucket


@wp.func
def _spread_bits(x: int):
    """The lowest 16 bits, with a 0 before each."""
    x = (x | (x << 8)) & 0x00FF00FF
    x = (x | (x << 4)) & 0x0F0F0F0F
    x = (x | (x << 2)) & 0x33333333
    return (x | (x << 1)) & 0x55555555
