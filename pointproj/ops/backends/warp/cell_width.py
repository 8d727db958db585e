"""How wide the cells of a hash grid are: as the radius for few neighbours, else about half as wide.

Wide cells spare lookups of rows of cells, and points that follow each other lie closer together; narrow cells
spare tests of points. Where a GPU sorts two sets at once, it finds out on the device what their points have.
"""

import functools

import torch
import warp as wp

from pointproj.ops.backends.warp.common import OPTIONS, REALS, BatchStruct, cloud_of
from pointproj.ops.backends.warp.counters import completes

# Edge of narrow cells, in radii: a little more than a half, so that rounding adds no cell on each side.
EDGE = 65 / 128
FEW = 8  # cells are wide for points of which there are so many times fewer than of all
FEW_NEIGHBORS = (
    48  # within the radius; W2 with all gradients, of 4 and 66: 116 and 396 us wide, 144 and 338 narrow
)
MOST_POINTS = 2**18  # of both sets: of more, a sample says too little
SAMPLED, THREADS, PAIRS_OF_THREAD = 512, 2**14, 8  # points of the first set; pairs with points of the other


def edge(rows: int, all_rows: int) -> float:
    """Of the cells for ``rows`` points, in radii, as far as their number tells."""
    return EDGE if FEW * rows > all_rows else 2.0 * EDGE


@functools.cache
def widen_kernel(dtype: torch.dtype) -> wp.Kernel:
    """Double the widths of narrow cells where few of a sample of pairs are within the radius.

    Launched with :data:`THREADS`. Which pairs these are follows from the numbers of points alone.
    """
    real, vec3 = REALS[dtype]
    pairs = THREADS * PAIRS_OF_THREAD

    @wp.func
    def spread(i: int, rows: int):
        """The i-th of rows that lie all over a set."""
        bits = wp.uint64(wp.uint32(i) * wp.uint32(2654435769))
        return int((bits * wp.uint64(rows)) >> wp.uint64(32))

    @wp.kernel(**OPTIONS)
    def widen(
        points: wp.array(dtype=vec3),
        batch: BatchStruct,
        others: wp.array(dtype=vec3),
        other_batch: BatchStruct,
        radius: real,
        narrow: wp.vec2i,
        counters: wp.array(dtype=wp.int32),
        width: wp.array(dtype=real),
    ):
        """``counters``, 0 at first, are of pairs within the radius and of threads that are done."""
        thread = wp.tid()
        near = int(0)
        for i in range(PAIRS_OF_THREAD):
            pair = i * THREADS + thread
            row = spread(pair % SAMPLED, batch.rows)
            other = spread(SAMPLED + pair / SAMPLED, other_batch.rows)
            apart = points[row] - others[other]
            if wp.dot(apart, apart) <= radius * radius and cloud_of(row, batch) == cloud_of(
                other, other_batch
            ):
                near += 1
        if near > 0:
            wp.atomic_add(counters, 0, near)
        if completes(counters, 1, THREADS):
            share = real(wp.atomic_add(counters, 0, 0)) / real(pairs)
            if narrow[0] != 0 and share * real(batch.rows) < real(FEW_NEIGHBORS):
                width[0] = real(2.0) * width[0]
            if narrow[1] != 0 and share * real(other_batch.rows) < real(FEW_NEIGHBORS):
                width[1] = real(2.0) * width[1]

    return widen
