"""Points sorted along a Hilbert curve, in leaves of equal number, with boxes around them.

Leaves follow the density of the points, whatever it is, and need neither cells nor counting. How well the
points are sorted decides how tight the boxes are, never what is found. Sorting is stable, so a tree is the
same, bit for bit, in every run. Every size follows from the number of points: nothing is read back, and the
build can be captured in a CUDA graph.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pointproj.ops.backends.triton.launch import launch
from pointproj.ops.backends.triton.operators import kernel_op
from pointproj.ops.backends.triton.tiles import END, FANOUT, GROUP, LEAF, cdiv, is_finite, load_rows_of_3
from pointproj.ops.clouds import Clouds

VERY_FEW_POINTS = 2**16  # of one cloud: up to here keys of 16 bits are fine enough
FEW_POINTS = 2**17  # up to here those of 32 bits are
PARTS = 64  # in which the bounding box is found
BLOCK = 1024
ENCODED = 256  # points a program; their number is small where time counts


class Tree(NamedTuple):
    """A sorted cloud, or several, as tensors; padded with points that are not finite to whole groups."""

    points: Tensor  # (3, padded) real
    rows: Tensor  # (padded,) int32: row of each point in the cloud as given
    clouds: Tensor  # (padded,) int32: which cloud it is of; empty for a single one
    boxes: Tensor  # (6, leaves + groups) real: lowest, then highest corner
    spans: Tensor  # (2, leaves + groups) int32: first and last cloud in there; empty for a single cloud
    keys: Tensor  # (leaves,) int16, int32 or int64: place on the curve of the first point of each leaf
    frame: Tensor  # (6,) real: lowest corner, and cells a unit of length, of the curve's grid

    def side(self) -> tuple:
        """What kernels take of points that they have in tiles: points, rows, clouds, padded."""
        return self.points, self.rows, self.clouds, self.rows.shape[0]


def build_tree(points: Tensor, offsets: Tensor | None, clouds: int) -> Tree:
    """Sort ``points`` (N, 3), packed clouds; points that are not finite come last, in no box."""
    return Tree(*_build_one(points, offsets, clouds, key_dtype([points.shape[0]], clouds)))


def build_trees(clouds: Clouds) -> tuple[Tree, Tree]:
    """Sort queries and reference points at once, for calls without an index (rows W1, W2, W2-wide): sorting
    takes as long for both as for one.
    """
    return _pair(_build_both(*clouds, key_of_both(clouds)))


def sorted_together(clouds: Clouds, key: torch.dtype) -> tuple[Tree, Tree]:
    """As :func:`build_trees`, within an operator."""
    return _pair(_sort_both(*clouds, key))


def _pair(made: Sequence[Tensor]) -> tuple[Tree, Tree]:
    return Tree(*made[:7]), Tree(*made[7:])


def key_of_both(clouds: Clouds) -> torch.dtype:
    """The dtype of the keys of queries and reference points."""
    return key_dtype([clouds.query_points.shape[0], clouds.reference_points.shape[0]], clouds.count)


def key_dtype(rows: Sequence[int], clouds: int) -> torch.dtype:
    """Of the keys of points that are sorted together; half of the bits are sorted in half the time.

    Of the benchmark's rows, W2 and W2-wide (52,000 points) have 16 bits, W1 (127,000) has 32, large self-kNN
    64. A number that an export keeps open could be any. The dtype is an argument of the operators, so that
    what they return never depends on who traces them.
    """
    if not all(isinstance(n, int) for n in rows) or sum(rows) > FEW_POINTS:
        return torch.int64
    return torch.int16 if clouds == 1 and sum(rows) <= VERY_FEW_POINTS else torch.int32


def key_bits(dtype: torch.dtype, clouds: int) -> int:
    """How many bits of a key an axis gets. The sign tells queries from reference points; the rest clouds."""
    if dtype == torch.int16:
        return 5
    if dtype == torch.int64:
        return 16
    return 10 if clouds == 1 else 8


def _specs(points: Tensor, clouds: int, key: torch.dtype) -> tuple:
    """Shapes and dtypes of a tree's tensors."""
    group, fanout = GROUP.value, FANOUT.value
    groups = cdiv(points.shape[0], group)
    nodes = groups * (fanout + 1)
    return (
        ((3, groups * group), points.dtype),
        ((groups * group,), torch.int32),
        ((groups * group if clouds != 1 else 0,), torch.int32),
        ((6, nodes), points.dtype),
        ((2, nodes if clouds != 1 else 0), torch.int32),
        ((groups * fanout,), key),
        ((6,), points.dtype),
    )


def _specs_of_all(sides: Sequence[Tensor], clouds: int, key: torch.dtype) -> tuple:
    return tuple(spec for points in sides for spec in _specs(points, clouds, key))


def _sort(sides: Sequence[tuple[Tensor, Tensor | None]], clouds: int, key: torch.dtype) -> tuple[Tensor, ...]:
    """The tensors of one tree, or of several that are sorted together, side after side."""
    specs = _specs_of_all([points for points, _ in sides], clouds, key)
    made = [sides[0][0].new_empty(shape, dtype=dtype) for shape, dtype in specs]
    trees = [Tree(*made[7 * side : 7 * side + 7]) for side in range(len(sides))]
    begins = [0, sides[0][0].shape[0]]
    keys = trees[0].keys.new_empty(sum(points.shape[0] for points, _ in sides))
    parts = trees[0].frame.new_empty(6, PARTS)
    bits = key_bits(key, clouds)
    arguments = []
    for side, ((points, offsets), tree) in enumerate(zip(sides, trees, strict=True)):
        rows = points.shape[0]
        layout = 0 if clouds == 1 else 1 if offsets is None else 2
        offsets = tree.frame if offsets is None else offsets  # kernels take a tensor
        arguments.append((points, offsets, layout))
        launch(bound_kernel, (PARTS,), points, parts, rows, PARTS, BLOCK)
        launch(
            encode_kernel, (cdiv(rows, ENCODED),),
            points, offsets, parts, tree.frame, keys, begins[side], rows, clouds,
            side, bits, layout, PARTS, ENCODED,
        )  # fmt: skip
    keys, order = keys.sort(stable=True)
    for begin, tree, (points, offsets, layout) in zip(begins, trees, arguments, strict=False):
        launch(
            arrange_kernel, (tree.rows.shape[0] // GROUP.value,),
            points, offsets, order, keys, begin, *tree[:6], points.shape[0], clouds, layout, num_warps=8,
        )  # fmt: skip
    return tuple(made)


def _sort_one(points: Tensor, offsets: Tensor | None, clouds: int, key: torch.dtype) -> tuple[(Tensor,) * 7]:
    return _sort([(points, offsets)], clouds, key)


def _sort_both(
    query_points: Tensor,
    query_offsets: Tensor | None,
    reference_points: Tensor,
    reference_offsets: Tensor | None,
    clouds: int,
    key: torch.dtype,
) -> tuple[(Tensor,) * 14]:
    return _sort([(query_points, query_offsets), (reference_points, reference_offsets)], clouds, key)


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
def widen(low, high, x, exists):
    """Let intervals hold the values that exist."""
    return (
        tl.minimum(low, tl.where(exists, x, float("inf"))),
        tl.maximum(high, tl.where(exists, x, -float("inf"))),
    )


@triton.jit
def bound_kernel(points, parts, rows, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Lowest and highest corner of the finite points, for every PARTS-th block of them."""
    part = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    nowhere = tl.full([BLOCK], float("inf"), points.dtype.element_ty)
    x0, y0, z0 = nowhere, nowhere, nowhere
    x1, y1, z1 = -nowhere, -nowhere, -nowhere
    for first in range(part * BLOCK, rows, PARTS * BLOCK):
        at = first + lane
        x, y, z = load_rows_of_3(points, at, at < rows, float("inf"))
        finite = is_finite(x, y, z)
        x0, x1 = widen(x0, x1, x, finite)
        y0, y1 = widen(y0, y1, y, finite)
        z0, z1 = widen(z0, z1, z, finite)
    tl.store(parts + part, tl.min(x0))
    tl.store(parts + PARTS + part, tl.min(y0))
    tl.store(parts + 2 * PARTS + part, tl.min(z0))
    tl.store(parts + 3 * PARTS + part, tl.max(x1))
    tl.store(parts + 4 * PARTS + part, tl.max(y1))
    tl.store(parts + 5 * PARTS + part, tl.max(z1))


@triton.jit
def cell_along(x, low, per_unit, BITS: tl.constexpr):
    """Number of a cell of the curve's grid along one axis."""
    cell = tl.minimum(tl.maximum((x - low) * per_unit, 0.0), 2.0**BITS - 1)
    return tl.where(cell == cell, cell, 0.0).to(tl.int32)


@triton.jit
def unwind(x, along, bit: tl.constexpr):
    """One axis' part in bringing a cube of the Hilbert curve to where its parent begins."""
    below: tl.constexpr = 2**bit - 1
    swapped = (x ^ along) & below
    is_inverted = ((along >> bit) & 1) == 1
    return tl.where(is_inverted, x ^ below, x ^ swapped), tl.where(is_inverted, along, along ^ swapped)


@triton.jit
def key_of(x, y, z, x0, y0, z0, per_x, per_y, per_z, BITS: tl.constexpr, KEY: tl.constexpr):
    """Place of a point on the Hilbert curve, whose neighbours are neighbours in space; after J. Skilling,
    "Programming the Hilbert curve", 2004.
    """
    cx = cell_along(x, x0, per_x, BITS)
    cy = cell_along(y, y0, per_y, BITS)
    cz = cell_along(z, z0, per_z, BITS)
    for bit in tl.static_range(BITS - 1, 0, -1):
        cx = tl.where(((cx >> bit) & 1) == 1, cx ^ (2**bit - 1), cx)
        cx, cy = unwind(cx, cy, bit)
        cx, cz = unwind(cx, cz, bit)
    cy ^= cx
    cz ^= cy
    gray = tl.zeros_like(cx)
    for bit in tl.static_range(1, BITS):
        gray ^= ((cz >> bit) & 1) * (2**bit - 1)
    cx, cy, cz = (cx ^ gray).to(KEY), (cy ^ gray).to(KEY), (cz ^ gray).to(KEY)
    key = tl.zeros_like(cx)
    for bit in tl.static_range(BITS):
        triple = ((cx >> bit) & 1) << 2 | ((cy >> bit) & 1) << 1 | ((cz >> bit) & 1)
        key |= triple << (3 * bit)
    return key


@triton.jit
def axis_frame(parts, frame, axis: tl.constexpr, PARTS: tl.constexpr, BITS: tl.constexpr):
    """Lowest coordinate, and cells a unit of length; the first program writes them down."""
    lane = tl.arange(0, PARTS)
    low = tl.min(tl.load(parts + axis * PARTS + lane))
    high = tl.max(tl.load(parts + (axis + 3) * PARTS + lane))
    extent = tl.where(high > low, high - low, 1.0)
    low = tl.where(high >= low, low, 0.0)
    per_unit = 2.0**BITS / extent
    if tl.program_id(0) == 0:
        tl.store(frame + axis, low)
        tl.store(frame + axis + 3, per_unit)
    return low, per_unit


@triton.jit
def encode_kernel(
    points, offsets, parts, frame, keys, begin, rows, clouds, SIDE: tl.constexpr,
    BITS: tl.constexpr, LAYOUT: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Key of each point: side, cloud, place on the curve; points that are not finite come last."""
    KEY: tl.constexpr = keys.dtype.element_ty
    WIDTH: tl.constexpr = KEY.primitive_bitwidth
    x0, per_x = axis_frame(parts, frame, 0, PARTS, BITS)
    y0, per_y = axis_frame(parts, frame, 1, PARTS, BITS)
    z0, per_z = axis_frame(parts, frame, 2, PARTS, BITS)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < rows
    x, y, z = load_rows_of_3(points, at, inside, float("inf"))
    key = key_of(x, y, z, x0, y0, z0, per_x, per_y, per_z, BITS, KEY)
    if LAYOUT > 0:
        cloud = cloud_of(at, offsets, rows, clouds, inside, LAYOUT).to(KEY)
        key |= (cloud & (2 ** (WIDTH - 1 - 3 * BITS) - 1)) << (3 * BITS)
    key = tl.where(is_finite(x, y, z), key, tl.full([BLOCK], 2 ** (WIDTH - 1) - 1, KEY))
    if SIDE == 0:
        key |= tl.full([BLOCK], -(2 ** (WIDTH - 1)), KEY)
    tl.store(keys + begin + at, key, mask=inside)


@triton.jit
def store_bounds(x, exists, boxes, axis: tl.constexpr, group, groups):
    """Lowest and highest value in each leaf of a group, and in the group."""
    leaves = groups * FANOUT
    stride = leaves + groups
    leaf = group * FANOUT + tl.arange(0, FANOUT)
    low = tl.min(tl.reshape(tl.where(exists, x, float("inf")), [FANOUT, LEAF]), 1)
    high = tl.max(tl.reshape(tl.where(exists, x, -float("inf")), [FANOUT, LEAF]), 1)
    tl.store(boxes + axis * stride + leaf, low)
    tl.store(boxes + axis * stride + leaves + group, tl.min(low))
    tl.store(boxes + (axis + 3) * stride + leaf, high)
    tl.store(boxes + (axis + 3) * stride + leaves + group, tl.max(high))


@triton.jit
def arrange_kernel(
    points, offsets, order, keys, begin,
    coordinates, row_of, cloud_at, boxes, spans, leaf_keys, rows, clouds, LAYOUT: tl.constexpr,
):  # fmt: skip
    """Put a group of points in their order, and boxes around them."""
    group = tl.program_id(0)
    groups = tl.num_programs(0)
    padded = groups * GROUP
    at = group * GROUP + tl.arange(0, GROUP)
    inside = at < rows
    row = tl.load(order + begin + at, mask=inside, other=begin) - begin
    x, y, z = load_rows_of_3(points, row, inside, float("inf"))
    finite = is_finite(x, y, z)
    tl.store(coordinates + at, x)
    tl.store(coordinates + padded + at, y)
    tl.store(coordinates + 2 * padded + at, z)
    tl.store(row_of + at, tl.where(inside, row, -1).to(tl.int32))
    store_bounds(x, finite, boxes, 0, group, groups)
    store_bounds(y, finite, boxes, 1, group, groups)
    store_bounds(z, finite, boxes, 2, group, groups)
    leaf = group * FANOUT + tl.arange(0, FANOUT)
    first = tl.minimum(leaf * LEAF, rows - 1)
    tl.store(leaf_keys + leaf, tl.load(keys + begin + first))
    if LAYOUT > 0:
        cloud = cloud_of(row, offsets, rows, clouds, inside, LAYOUT)
        tl.store(cloud_at + at, cloud)
        leaves = groups * FANOUT
        first = tl.min(tl.reshape(tl.where(finite, cloud, END), [FANOUT, LEAF]), 1)
        last = tl.max(tl.reshape(tl.where(finite, cloud, -1), [FANOUT, LEAF]), 1)
        tl.store(spans + leaf, first)
        tl.store(spans + leaves + group, tl.min(first))
        tl.store(spans + leaves + groups + leaf, last)
        tl.store(spans + 2 * leaves + groups + group, tl.max(last))


_build_one = kernel_op(
    "pointproj::triton_build_tree",
    _sort_one,
    lambda points, offsets, clouds, key: _specs_of_all([points], clouds, key),
)
_build_both = kernel_op(
    "pointproj::triton_build_trees",
    _sort_both,
    lambda query_points, qo, reference_points, ro, clouds, key: _specs_of_all(
        [query_points, reference_points], clouds, key
    ),
)
