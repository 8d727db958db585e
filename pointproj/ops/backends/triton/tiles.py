"""What all kernels share: tiles of points, the boxes around them, and who is near whom.

Distances between boxes are computed with the operations, and in the order, of distances between points.
Rounding is monotone, so a box is never farther away than a point in it, to the last bit: no slack is needed.
"""

import triton
import triton.language as tl

LEAF = 32  # points that share a box
FANOUT = 64  # leaves that share a box
GROUP = LEAF * FANOUT
INTERPRETED = triton.knobs.runtime.interpret  # whether kernels run in Python, on CPU tensors

_INTERPRETED = tl.constexpr(INTERPRETED)
LOG2E = tl.constexpr(1.4426950408889634)  # powers are of 2
END = tl.constexpr(2**31 - 1)  # more than any leaf, row or cloud


def tuned(configs: list[triton.Config], key: list[str]):
    """``triton.autotune``; there is nothing to time where kernels are interpreted."""
    return triton.autotune(configs=configs[:1] if INTERPRETED else configs, key=key)


def size_class(rows: int) -> int:
    """What kernels are tuned for besides their constants: few rows, some, or many.

    None of these numbers is one that Triton compiles a kernel anew for. A number of rows that a compiler
    keeps open counts as many.
    """
    if not isinstance(rows, int) or rows > 2**16:
        return 5
    return 2 if rows <= 2**12 else 3


@triton.jit
def square(x):
    """x * x, rounded: the compiler must not fuse it with the addition that follows."""
    if _INTERPRETED:
        squared = x * x
    elif x.dtype == tl.float64:
        squared = tl.inline_asm_elementwise("mul.rn.f64 $0, $1, $1;", "=d,d", [x], tl.float64, True, 1)
    else:
        squared = tl.inline_asm_elementwise("mul.rn.f32 $0, $1, $1;", "=f,f", [x], tl.float32, True, 1)
    return squared


@triton.jit
def squared_length(dx, dy, dz):
    """Rounded in the order of :func:`pointproj.ops.reference.squared_distances`."""
    return square(dx) + square(dy) + square(dz)


@triton.jit
def root(x):
    """Square root, as the hardware approximates it; of what is close to the smallest number, 0."""
    if _INTERPRETED or x.dtype == tl.float64:
        result = tl.sqrt(x)
    else:
        result = tl.inline_asm_elementwise("sqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    return result


@triton.jit
def power(x):
    """2 to the power of x, as the hardware approximates it."""
    if _INTERPRETED or x.dtype == tl.float64:
        result = tl.exp2(x)
    else:
        result = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    return result


@triton.jit
def load_points(points, padded, at):
    """Sorted points: three rows of ``padded`` coordinates."""
    return tl.load(points + at), tl.load(points + padded + at), tl.load(points + 2 * padded + at)


@triton.jit
def is_finite(x, y, z):
    return (tl.abs(x) < float("inf")) & (tl.abs(y) < float("inf")) & (tl.abs(z) < float("inf"))


@triton.jit
def load_tile(points, clouds, padded, size, tile, TILE: tl.constexpr, MANY: tl.constexpr):
    """The points of a tile, their clouds, and which of them can have neighbours."""
    at = tile * TILE + tl.arange(0, TILE)
    x, y, z = load_points(points, padded, at)
    cloud = tl.zeros_like(at)
    if MANY:
        cloud = tl.load(clouds + at)
    return at, x, y, z, cloud, (at < size) & is_finite(x, y, z)


@triton.jit
def cloud_of(row, offsets, rows, clouds, exists, LAYOUT: tl.constexpr):
    """Cloud of each packed row: of equal size (layout 1), or as offsets say (2)."""
    if LAYOUT == 1:
        return (row // tl.maximum(rows // clouds, 1)).to(tl.int32)
    cloud = tl.zeros_like(row).to(tl.int32)
    step = 1
    while step < clouds:
        step *= 2
    while step > 0:
        probe = cloud + step
        begins = tl.load(offsets + probe, mask=exists & (probe < clouds), other=END)
        cloud = tl.where(begins <= row, probe, cloud)
        step = step // 2
    return cloud


@triton.jit
def bounds(x, exists):
    """Lowest and highest value of those that exist."""
    return tl.min(tl.where(exists, x, float("inf"))), tl.max(tl.where(exists, x, -float("inf")))


@triton.jit
def between(low, high, other_low, other_high):
    """Distance between two intervals."""
    return tl.maximum(tl.maximum(low - other_high, other_low - high), 0.0)


@triton.jit
def axis_gap(boxes, stride, axis: tl.constexpr, node, exists, low, high):
    """Distance along an axis between the nodes' boxes and the interval from low to high."""
    node_low = tl.load(boxes + axis * stride + node, mask=exists, other=float("inf"))
    node_high = tl.load(boxes + (axis + 3) * stride + node, mask=exists, other=-float("inf"))
    return between(node_low, node_high, low, high)


@triton.jit
def tile_box(x, y, z, cloud, active):
    """The box around the active points of a tile, and their first and last cloud."""
    x0, x1 = bounds(x, active)
    y0, y1 = bounds(y, active)
    z0, z1 = bounds(z, active)
    return x0, x1, y0, y1, z0, z1, tl.min(tl.where(active, cloud, END)), tl.max(tl.where(active, cloud, -1))


@triton.jit
def box_squares(boxes, spans, stride, node, exists, box, MANY: tl.constexpr):
    """Squared distances from the boxes of nodes to a tile's box; inf where no cloud is shared."""
    x0, x1, y0, y1, z0, z1, c0, c1 = box
    dx = axis_gap(boxes, stride, 0, node, exists, x0, x1)
    dy = axis_gap(boxes, stride, 1, node, exists, y0, y1)
    dz = axis_gap(boxes, stride, 2, node, exists, z0, z1)
    squared = squared_length(dx, dy, dz)
    if MANY:
        first = tl.load(spans + node, mask=exists, other=END)
        last = tl.load(spans + stride + node, mask=exists, other=-1)
        squared = tl.where((first <= c1) & (last >= c0), squared, float("inf"))
    return squared


@triton.jit
def next_group(group, boxes, spans, leaves, box, reach, MANY: tl.constexpr, FANOUT: tl.constexpr):
    """The first group of leaves within reach of a box behind ``group``; their number if there is none."""
    node = tl.arange(0, FANOUT)
    groups = leaves // FANOUT
    first = group + 1
    found = groups
    while (first < groups) & (found == groups):
        candidate = first + node
        squared = box_squares(
            boxes, spans, leaves + groups, leaves + candidate, candidate < groups, box, MANY
        )
        found = tl.minimum(tl.min(tl.where(squared <= reach, candidate, END)), groups)
        first += FANOUT
    return found


@triton.jit
def first_leaf(boxes, spans, leaves, box, reach, MANY: tl.constexpr, FANOUT: tl.constexpr):
    """The first leaf within reach of a tile's box (END if none), and which leaves of its group are."""
    none = tl.arange(0, FANOUT) < 0
    return next_leaf(-1, none, boxes, spans, leaves, box, reach, MANY, FANOUT)


@triton.jit
def next_leaf(leaf, near, boxes, spans, leaves, box, reach, MANY: tl.constexpr, FANOUT: tl.constexpr):
    """The first leaf within reach behind ``leaf``; ``near`` is what came with that one."""
    node = tl.arange(0, FANOUT)
    groups = leaves // FANOUT
    group = (leaf + FANOUT) // FANOUT - 1  # of leaf -1 it is -1
    behind = near & (group * FANOUT + node > leaf)
    following = tl.min(tl.where(behind, group * FANOUT + node, END))
    while (following == END) & (group < groups):
        group = next_group(group, boxes, spans, leaves, box, reach, MANY, FANOUT)
        if group < groups:
            inside = group * FANOUT + node
            near = box_squares(boxes, spans, leaves + groups, inside, node >= 0, box, MANY) <= reach
            following = tl.min(tl.where(near, inside, END))
    return following, near
