"""What of a tree lies near a box: groups of leaves first, then leaves, then points.

Gradients of positions go from leaf to leaf (``next_leaf``). Sums, which rows W2 and W2-wide of the benchmark
time, go through points: what is near is listed in memory of the program's own, which stays in the cache,
and points wait in a queue there until there are enough of them for a matrix product. Each step looks at many
nodes at once, so that a program waits for memory as often as there are steps, not nodes.

A torch that traces a kernel takes whatever an address is computed from for memory that is written to, unless
it was loaded in that very function. So how long a list is stands in memory as well, and is read back.
"""

import triton
import triton.language as tl

from pointproj.ops.backends.triton.tiles import END, FANOUT, LEAF, between, box_squares, squared_length

GROUPS = tl.constexpr(128)  # nodes and points that are looked at together
LEAVES = tl.constexpr(512)
POINTS = tl.constexpr(256)
QUEUE = tl.constexpr(512)  # near points that wait: a power of two, more than POINTS and a matrix of them
LISTS = tl.constexpr(8 + 128 + 512 + 2 * 512)  # numbers, groups, leaves; rows and clouds of the points
N_GROUPS = tl.constexpr(0)  # where lists keep how long they are
N_LEAVES = tl.constexpr(1)
N_POINTS = tl.constexpr(2)
AT_GROUPS = tl.constexpr(8)  # and what is in them
AT_LEAVES = tl.constexpr(8 + 128)
AT_ROWS = tl.constexpr(8 + 128 + 512)


@triton.jit
def list_nodes(
    lists, node, exists, number, boxes, spans, stride, box, limit,
    BATCHED: tl.constexpr, AT: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """List those of some nodes, by their numbers, whose squared distance from a box is at most ``limit``."""
    # As box_squares, but with loads of its own: what they give becomes an address, see above.
    x0, x1, y0, y1, z0, z1, c0, c1 = box
    far = float("inf")
    low, high = boxes + node, boxes + 3 * stride + node
    dx = between(tl.load(low, exists, far), tl.load(high, exists, -far), x0, x1)
    low, high = low + stride, high + stride
    dy = between(tl.load(low, exists, far), tl.load(high, exists, -far), y0, y1)
    low, high = low + stride, high + stride
    dz = between(tl.load(low, exists, far), tl.load(high, exists, -far), z0, z1)
    near = exists & (squared_length(dx, dy, dz) <= limit)
    if BATCHED:
        near &= (tl.load(spans + node, exists, END) <= c1) & (
            tl.load(spans + stride + node, exists, -1) >= c0
        )
    place = tl.cumsum(near.to(tl.int32), 0) - 1
    tl.debug_barrier()  # other threads have read what was there
    tl.store(lists + AT + place, number, mask=near)
    tl.store(lists + LENGTH, tl.max(place) + 1)
    tl.debug_barrier()  # other threads read what these have written


@triton.jit
def list_groups(lists, first, boxes, spans, leaves, box, limit, BATCHED: tl.constexpr):
    """List the groups of leaves, from ``first``, that are near a box."""
    group = first + tl.arange(0, GROUPS)
    groups = leaves // FANOUT
    list_nodes(
        lists, leaves + group, group < groups, group, boxes, spans, leaves + groups, box, limit,
        BATCHED, AT_GROUPS, N_GROUPS,
    )  # fmt: skip


@triton.jit
def list_leaves(lists, first, boxes, spans, leaves, box, limit, BATCHED: tl.constexpr):
    """List the leaves of some listed groups, from ``first``, that are near a box."""
    lane = tl.arange(0, LEAVES)
    place = first + lane // FANOUT
    exists = place < tl.load(lists + N_GROUPS)
    leaf = tl.load(lists + AT_GROUPS + place, mask=exists, other=0) * FANOUT + lane % FANOUT
    list_nodes(
        lists, leaf, exists, leaf, boxes, spans, leaves + leaves // FANOUT, box, limit,
        BATCHED, AT_LEAVES, N_LEAVES,
    )  # fmt: skip


@triton.jit
def queue_points(lists, queue, first, end, side, box, limit, BATCHED: tl.constexpr):
    """Append to the queue, at ``end``, the points of some listed leaves, from ``first``, near a box."""
    points, row_of, clouds, padded = side
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
    near &= (squared <= limit) & (row >= 0)
    if BATCHED:
        cloud = tl.load(clouds + at, mask=near, other=-1)
        near &= (cloud >= c0) & (cloud <= c1)
    place = end + tl.cumsum(near.to(tl.int32), 0) - 1
    append(lists, queue, place, x, y, z, row, cloud, near, BATCHED)
    tl.store(lists + N_POINTS, tl.max(place) + 1)
    tl.debug_barrier()  # other threads read what these have written


@triton.jit
def append(lists, queue, place, x, y, z, row, cloud, near, BATCHED: tl.constexpr):
    """Write points to places of the queue."""
    tl.debug_barrier()  # other threads have read what was there
    at = place & (QUEUE - 1)
    tl.store(queue + at, x, mask=near)
    tl.store(queue + QUEUE + at, y, mask=near)
    tl.store(queue + 2 * QUEUE + at, z, mask=near)
    tl.store(lists + AT_ROWS + at, row, mask=near)
    if BATCHED:
        tl.store(lists + AT_ROWS + QUEUE + at, cloud, mask=near)


@triton.jit
def pad(lists, queue, end, BATCHED: tl.constexpr, STEP: tl.constexpr):
    """Append points that are near nothing, so that all can be taken STEP at a time."""
    place = end + tl.arange(0, STEP)
    nowhere = tl.full([STEP], float("nan"), queue.dtype.element_ty)
    row = tl.zeros([STEP], tl.int32)
    append(lists, queue, place, nowhere, nowhere, nowhere, row, row, row == 0, BATCHED)
    tl.debug_barrier()  # other threads read what these have written


@triton.jit
def next_group(group, boxes, spans, leaves, box, limit, BATCHED: tl.constexpr):
    """The first group of leaves near a box behind ``group``; their number if there is none."""
    node = tl.arange(0, FANOUT)
    groups = leaves // FANOUT
    first = group + 1
    found = groups
    while (first < groups) & (found == groups):
        candidate = first + node
        squared = box_squares(
            boxes, spans, leaves + groups, leaves + candidate, candidate < groups, box, BATCHED
        )
        found = tl.minimum(tl.min(tl.where(squared <= limit, candidate, END)), groups)
        first += FANOUT
    return found


@triton.jit
def first_leaf(boxes, spans, leaves, box, limit, BATCHED: tl.constexpr):
    """The first leaf near a tile's box (END if none), and which leaves of its group are near."""
    none = tl.arange(0, FANOUT) < 0
    return next_leaf(-1, none, boxes, spans, leaves, box, limit, BATCHED)


@triton.jit
def next_leaf(leaf, near, boxes, spans, leaves, box, limit, BATCHED: tl.constexpr):
    """The first leaf near a tile's box behind ``leaf``; ``near`` is what came with that one."""
    node = tl.arange(0, FANOUT)
    groups = leaves // FANOUT
    group = (leaf + FANOUT) // FANOUT - 1  # of leaf -1 it is -1
    behind = near & (group * FANOUT + node > leaf)
    following = tl.min(tl.where(behind, group * FANOUT + node, END))
    while (following == END) & (group < groups):
        group = next_group(group, boxes, spans, leaves, box, limit, BATCHED)
        if group < groups:
            inside = group * FANOUT + node
            near = box_squares(boxes, spans, leaves + groups, inside, node >= 0, box, BATCHED) <= limit
            following = tl.min(tl.where(near, inside, END))
    return following, near
