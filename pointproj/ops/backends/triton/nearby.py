"""The points of a tree that lie near a box: groups of leaves first, then leaves, then points.

What is near is listed in memory of the program's own, that stays in the cache: there is no other way to
close the gaps that all else leaves. Each step then looks at many that may be near at once, so that a program
waits for memory as often as there are steps, not nodes. How long a list is stands there as well, and is read
back: a torch that traces a kernel takes whatever an address is computed from for memory that is written to.
"""

import triton
import triton.language as tl

from pointproj.ops.backends.triton.tiles import END, between, squared_length

GROUPS = tl.constexpr(128)  # nodes and points that are looked at together
LEAVES = tl.constexpr(512)
POINTS = tl.constexpr(256)
RING = tl.constexpr(512)  # near points that wait: a power of two, more than POINTS and a matrix of them
LISTS = tl.constexpr(8 + 128 + 512 + 2 * 512)  # numbers, groups, leaves; rows and clouds of the points
N_GROUPS = tl.constexpr(0)  # where lists keep how long they are
N_LEAVES = tl.constexpr(1)
N_POINTS = tl.constexpr(2)
AT_GROUPS = tl.constexpr(8)  # and what is in them
AT_LEAVES = tl.constexpr(8 + 128)
AT_ROWS = tl.constexpr(8 + 128 + 512)


@triton.jit
def list_nodes(
    lists, node, exists, number, boxes, spans, stride, box, reach,
    MANY: tl.constexpr, AT: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """List those of some nodes, by their numbers, that are within reach of a box."""
    x0, x1, y0, y1, z0, z1, c0, c1 = box
    far = float("inf")
    low, high = boxes + node, boxes + 3 * stride + node
    dx = between(tl.load(low, exists, far), tl.load(high, exists, -far), x0, x1)
    low, high = low + stride, high + stride
    dy = between(tl.load(low, exists, far), tl.load(high, exists, -far), y0, y1)
    low, high = low + stride, high + stride
    dz = between(tl.load(low, exists, far), tl.load(high, exists, -far), z0, z1)
    near = exists & (squared_length(dx, dy, dz) <= reach)
    if MANY:
        near &= (tl.load(spans + node, exists, END) <= c1) & (
            tl.load(spans + stride + node, exists, -1) >= c0
        )
    place = tl.cumsum(near.to(tl.int32), 0) - 1
    tl.debug_barrier()  # other threads have read what was there
    tl.store(lists + AT + place, number, mask=near)
    tl.store(lists + LENGTH, tl.max(place) + 1)
    tl.debug_barrier()  # other threads read what these have written


@triton.jit
def list_groups(lists, first, boxes, spans, leaves, box, reach, MANY: tl.constexpr, FANOUT: tl.constexpr):
    """List the groups of leaves, from ``first``, within reach of a box."""
    group = first + tl.arange(0, GROUPS)
    groups = leaves // FANOUT
    list_nodes(
        lists, leaves + group, group < groups, group, boxes, spans, leaves + groups, box, reach,
        MANY, AT_GROUPS, N_GROUPS,
    )  # fmt: skip


@triton.jit
def list_leaves(lists, first, boxes, spans, leaves, box, reach, MANY: tl.constexpr, FANOUT: tl.constexpr):
    """List the leaves of some listed groups, from ``first``, within reach of a box."""
    lane = tl.arange(0, LEAVES)
    place = first + lane // FANOUT
    exists = place < tl.load(lists + N_GROUPS)
    leaf = tl.load(lists + AT_GROUPS + place, mask=exists, other=0) * FANOUT + lane % FANOUT
    list_nodes(
        lists, leaf, exists, leaf, boxes, spans, leaves + leaves // FANOUT, box, reach,
        MANY, AT_LEAVES, N_LEAVES,
    )  # fmt: skip


@triton.jit
def list_points(
    lists, ring, first, end, points, row_of, clouds, padded, box, reach,
    MANY: tl.constexpr, LEAF: tl.constexpr,
):  # fmt: skip
    """Append to the ring, at ``end``, the points of some listed leaves, from ``first``, near a box."""
    lane = tl.arange(0, POINTS)
    place = first + lane // LEAF
    near = place < tl.load(lists + N_LEAVES)
    at = tl.load(lists + AT_LEAVES + place, mask=near, other=0) * LEAF + lane % LEAF
    x = tl.load(points + at, mask=near, other=float("inf"))
    y = tl.load(points + padded + at, mask=near, other=float("inf"))
    z = tl.load(points + 2 * padded + at, mask=near, other=float("inf"))
    row = tl.load(row_of + at, mask=near, other=-1)
    cloud = tl.zeros_like(row)
    x0, x1, y0, y1, z0, z1, c0, c1 = box
    squared = squared_length(between(x, x, x0, x1), between(y, y, y0, y1), between(z, z, z0, z1))
    near &= (squared <= reach) & (row >= 0)
    if MANY:
        cloud = tl.load(clouds + at, mask=near, other=-1)
        near &= (cloud >= c0) & (cloud <= c1)
    place = end + tl.cumsum(near.to(tl.int32), 0) - 1
    append(lists, ring, place, x, y, z, row, cloud, near, MANY)
    tl.store(lists + N_POINTS, tl.max(place) + 1)
    tl.debug_barrier()  # other threads read what these have written


@triton.jit
def append(lists, ring, place, x, y, z, row, cloud, near, MANY: tl.constexpr):
    """Write points to places of the ring."""
    tl.debug_barrier()  # other threads have read what was there
    at = place & (RING - 1)
    tl.store(ring + at, x, mask=near)
    tl.store(ring + RING + at, y, mask=near)
    tl.store(ring + 2 * RING + at, z, mask=near)
    tl.store(lists + AT_ROWS + at, row, mask=near)
    if MANY:
        tl.store(lists + AT_ROWS + RING + at, cloud, mask=near)


@triton.jit
def pad(lists, ring, end, MANY: tl.constexpr, SOME: tl.constexpr):
    """Append points that are near nothing, so that all can be taken SOME at a time."""
    place = end + tl.arange(0, SOME)
    nowhere = tl.full([SOME], float("nan"), ring.dtype.element_ty)
    row = tl.zeros([SOME], tl.int32)
    append(lists, ring, place, nowhere, nowhere, nowhere, row, row, row == 0, MANY)
    tl.debug_barrier()  # other threads read what these have written
