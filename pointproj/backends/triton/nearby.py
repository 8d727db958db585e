"""The points of a tree that lie near a box, one after the other, as many at a time as a program asks for.

A program writes them to a ring of its own in global memory, that stays in the cache: there is no other way to
close the gaps that points farther away leave. What is taken from the ring is dense.
"""

import triton
import triton.language as tl

from pointproj.backends.triton.tiles import between, box_squares, squared_length


@triton.jit
def near_leaves(group, boxes, spans, leaves, box, reach, MANY: tl.constexpr, FANOUT: tl.constexpr):
    """Which leaves of a group are within reach of a box, a bit each; none of a group that does not exist."""
    node = tl.arange(0, FANOUT)
    stride = leaves + leaves // FANOUT
    exists = (group * FANOUT + node) < leaves
    near = box_squares(boxes, spans, stride, group * FANOUT + node, exists, box, MANY) <= reach
    return tl.sum((near & exists).to(tl.int64) << node.to(tl.int64))


@triton.jit
def append(ring, ring_rows, place, x, y, z, row, cloud, wanted, MANY: tl.constexpr, RING: tl.constexpr):
    """Write points to places of a ring."""
    tl.debug_barrier()  # other threads have read what these places held
    at = place & (RING - 1)
    tl.store(ring + at, x, mask=wanted)
    tl.store(ring + RING + at, y, mask=wanted)
    tl.store(ring + 2 * RING + at, z, mask=wanted)
    tl.store(ring_rows + at, row, mask=wanted)
    if MANY:
        tl.store(ring_rows + RING + at, cloud, mask=wanted)


@triton.jit
def collect(
    ring, ring_rows, end, first, bits, points, row_of, clouds, padded, box, reach,
    MANY: tl.constexpr, LEAF: tl.constexpr, STEP: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """Append those of STEP points, from ``first``, whose leaf has its bit and that are within reach of the
    box; return where the ring ends then.
    """
    lane = tl.arange(0, STEP)
    at = first + lane
    wanted = ((bits >> (lane // LEAF).to(tl.int64)) & 1) == 1
    x = tl.load(points + at, mask=wanted, other=float("inf"))
    y = tl.load(points + padded + at, mask=wanted, other=float("inf"))
    z = tl.load(points + 2 * padded + at, mask=wanted, other=float("inf"))
    row = tl.load(row_of + at, mask=wanted, other=0)
    cloud = tl.zeros_like(row)
    x0, x1, y0, y1, z0, z1, c0, c1 = box
    squared = squared_length(between(x, x, x0, x1), between(y, y, y0, y1), between(z, z, z0, z1))
    wanted &= (squared <= reach) & (row >= 0)
    if MANY:
        cloud = tl.load(clouds + at, mask=wanted, other=-1)
        wanted &= (cloud >= c0) & (cloud <= c1)
    place = end + tl.cumsum(wanted.to(tl.int32), 0) - 1
    append(ring, ring_rows, place, x, y, z, row, cloud, wanted, MANY, RING)
    return tl.max(place) + 1


@triton.jit
def pad(ring, ring_rows, end, MANY: tl.constexpr, SOME: tl.constexpr, RING: tl.constexpr):
    """Append points that are near nothing, so that all can be taken SOME at a time."""
    place = end + tl.arange(0, SOME)
    nowhere = tl.full([SOME], float("nan"), ring.dtype.element_ty)
    row = tl.zeros([SOME], tl.int32)
    append(ring, ring_rows, place, nowhere, nowhere, nowhere, row, row, row == 0, MANY, RING)
