"""What all kernels share: rounding, points, tiles of them, and the boxes around them.

Distances between boxes are computed with the operations, and in the order, of distances between points.
Rounding is monotone, so a box is never farther away than a point in it, to the last bit: no slack is needed.
"""

import triton
import triton.language as tl

LEAF = tl.constexpr(32)  # points that share a box
FANOUT = tl.constexpr(64)  # leaves that share a box
GROUP = tl.constexpr(32 * 64)
LOG2E = tl.constexpr(1.4426950408889634)  # powers are of 2
END = tl.constexpr(2**31 - 1)  # more than any leaf, row or cloud

INTERPRETED = triton.knobs.runtime.interpret  # whether kernels run in Python, on CPU tensors
_INTERPRETED = tl.constexpr(INTERPRETED)


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


def cdiv(count: int, size: int) -> int:
    """How many groups of a size hold so many; ``triton.cdiv`` takes 2 us."""
    return (count + size - 1) // size


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
def rounded_root(x):
    """Square root, rounded."""
    return tl.sqrt(x) if x.dtype == tl.float64 else tl.sqrt_rn(x)


@triton.jit
def quotient(x, y):
    """x / y, rounded."""
    x, y = tl.broadcast(x, y)
    return x / y if x.dtype == tl.float64 else tl.div_rn(x, y)


@triton.jit
def power(x):
    """2 to the power of x, as the hardware approximates it."""
    if _INTERPRETED or x.dtype == tl.float64:
        result = tl.exp2(x)
    else:
        result = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    return result


@triton.jit
def is_finite(x, y, z):
    return (tl.abs(x) < float("inf")) & (tl.abs(y) < float("inf")) & (tl.abs(z) < float("inf"))


@triton.jit
def load_rows_of_3(points, row, mask, other):
    """Points (N, 3) as given."""
    at = points + 3 * row.to(tl.int64)
    x, y = tl.load(at, mask=mask, other=other), tl.load(at + 1, mask=mask, other=other)
    return x, y, tl.load(at + 2, mask=mask, other=other)


@triton.jit
def store_rows_of_3(points, row, x, y, z, mask):
    """Into a tensor (N, 3)."""
    at = points + 3 * row.to(tl.int64)
    tl.store(at, x, mask=mask)
    tl.store(at + 1, y, mask=mask)
    tl.store(at + 2, z, mask=mask)


@triton.jit
def load_points(points, padded, at):
    """Sorted points: three rows of ``padded`` coordinates."""
    return tl.load(points + at), tl.load(points + padded + at), tl.load(points + 2 * padded + at)


@triton.jit
def load_tile(side, size, tile, TILE: tl.constexpr, BATCHED: tl.constexpr):
    """The points of a tile, and which of them can have neighbours.

    ``side`` is (points, rows, clouds, padded) of a tree; returns places, x, y, z, clouds, active.
    """
    points, _, clouds, padded = side
    at = tile * TILE + tl.arange(0, TILE)
    x, y, z = load_points(points, padded, at)
    cloud = tl.zeros_like(at)
    if BATCHED:
        cloud = tl.load(clouds + at)
    return at, x, y, z, cloud, (at < size) & is_finite(x, y, z)


@triton.jit
def bounds(x, exists):
    """Lowest and highest value of those that exist."""
    return tl.min(tl.where(exists, x, float("inf"))), tl.max(tl.where(exists, x, -float("inf")))


@triton.jit
def tile_box(x, y, z, cloud, active):
    """The box around the active points of a tile, and their first and last cloud."""
    x0, x1 = bounds(x, active)
    y0, y1 = bounds(y, active)
    z0, z1 = bounds(z, active)
    return x0, x1, y0, y1, z0, z1, tl.min(tl.where(active, cloud, END)), tl.max(tl.where(active, cloud, -1))


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
def box_squares(boxes, spans, stride, node, exists, box, BATCHED: tl.constexpr):
    """Squared distances from the boxes of nodes to a tile's box; inf where no cloud is shared."""
    x0, x1, y0, y1, z0, z1, c0, c1 = box
    dx = axis_gap(boxes, stride, 0, node, exists, x0, x1)
    dy = axis_gap(boxes, stride, 1, node, exists, y0, y1)
    dz = axis_gap(boxes, stride, 2, node, exists, z0, z1)
    squared = squared_length(dx, dy, dz)
    if BATCHED:
        first = tl.load(spans + node, mask=exists, other=END)
        last = tl.load(spans + stride + node, mask=exists, other=-1)
        squared = tl.where((first <= c1) & (last >= c0), squared, float("inf"))
    return squared
