"""What all kernels here share: types, constants, clouds of a batch, cells along an axis, packed points."""

import functools
from typing import Any, NamedTuple

import torch
import warp as wp
from torch import Tensor

DENSE = 256  # a cell with so many points is subdivided
POINTS_PER_SUBCELL = 1
SAMPLE = 64  # about so many points of a dense cell say where its sub-cells go
MARGIN = 1.0 / 16.0  # and so much of their extent is added on each side
AXIS_BITS = 10  # a dense cell has less than 2 ** AXIS_BITS sub-cells along an axis
FRACTION = 2.0**30  # positions inside a cell, as integers up to here
BLOCK = 256  # threads that share memory: Warp's own choice
ROUNDINGS = 16.0  # rounding errors, in units of the largest coordinate, that a distance to a cell can have
# Below about this distance squares round to 0, or to numbers of few bits: slack for that.
LEAST_DISTANCE = {torch.float32: 1.5e-22, torch.float64: 9e-162}

REALS = {torch.float32: (wp.float32, wp.vec3f), torch.float64: (wp.float64, wp.vec3d)}
MODULE_OPTIONS = {"fuse_fp": False, "enable_backward": False}  # the reference rounds after every operation
OPTIONS = {"module": "unique", "module_options": MODULE_OPTIONS}


class Batch(NamedTuple):
    """How packed rows are divided among the clouds of a batch; passed to kernels as :class:`BatchStruct`."""

    offsets: Tensor | None  # (count + 1,) int32; None: all clouds are of equal size
    rows: int
    count: int  # clouds


@wp.struct
class BatchStruct:
    """:class:`Batch` inside a kernel."""

    offsets: wp.array(dtype=wp.int32)
    rows: int
    count: int


@wp.func
def cloud_of(row: int, batch: BatchStruct):
    """Cloud that a packed row belongs to."""
    if batch.count == 1:
        return 0
    if not batch.offsets:
        return row / (batch.rows / batch.count)
    low = int(0)
    high = int(batch.count)
    while high - low > 1:
        middle = (low + high) / 2
        if batch.offsets[middle] <= row:
            low = middle
        else:
            high = middle
    return low


@wp.func
def first_row_of(cloud: int, batch: BatchStruct):
    """First packed row of a cloud (of the one past the last: number of rows)."""
    if batch.count == 1:
        return cloud * batch.rows
    if not batch.offsets:
        return cloud * (batch.rows / batch.count)
    return batch.offsets[cloud]


@wp.func
def subcells_along(packed: int):
    """Sub-cells of a dense cell along x, y, z."""
    mask = (1 << AXIS_BITS) - 1
    return wp.vec3i(packed & mask, (packed >> AXIS_BITS) & mask, packed >> (2 * AXIS_BITS))


@functools.cache
def cell_functions(dtype: torch.dtype) -> Any:
    """Where a point falls, for positions of one dtype; shared by build and search."""
    real, vec3 = REALS[dtype]

    @wp.func
    def inverse(edge: vec3):
        """Cells a unit of length; 0 for an axis without extent."""
        result = vec3()
        for axis in range(3):
            if edge[axis] > real(0.0):
                result[axis] = real(1.0) / edge[axis]
        return result

    @wp.func
    def axis_cell(x: real, low: real, per_unit: real, cells: int):
        """Cell along one axis; points outside, by rounding or far away, go to the border."""
        t = (x - low) * per_unit
        if not (t > real(0.0)):
            return 0
        return int(wp.min(t, real(cells - 1)))

    @wp.func
    def low_of(frames: wp.array2d(dtype=real), row: int):
        return vec3(frames[row, 0], frames[row, 1], frames[row, 2])

    @wp.func
    def edge_of(frames: wp.array2d(dtype=real), row: int):
        return vec3(frames[row, 3], frames[row, 4], frames[row, 5])

    @wp.func
    def cell_at(p: vec3, low: vec3, per_unit: vec3, shape: wp.vec3i):
        return wp.vec3i(
            axis_cell(p[0], low[0], per_unit[0], shape[0]),
            axis_cell(p[1], low[1], per_unit[1], shape[1]),
            axis_cell(p[2], low[2], per_unit[2], shape[2]),
        )

    @wp.func
    def cell_span(frames: wp.array2d(dtype=real), cloud: int, axis: int, cell: int, cells: int):
        """Both ends of a cell of a cloud's grid along one axis; border cells extend to its corners."""
        low = frames[cloud, axis] + real(cell) * frames[cloud, axis + 3]
        high = frames[cloud, axis] + real(cell + 1) * frames[cloud, axis + 3]
        if cell == 0:
            low = frames[cloud, axis + 6]
        if cell == cells - 1:
            high = frames[cloud, axis + 9]
        return low, high

    return inverse, axis_cell, low_of, edge_of, cell_at, cell_span


# On a GPU rows of floats are read and written 16 bytes at a time.
_LOAD_POINT = """
#if defined(__CUDA_ARCH__)
    if (sizeof({real}) == 4) {{
        const float4 v = reinterpret_cast<const float4*>(points.data)[at];
        return wp::vec_t<4, {real}>(v.x, v.y, v.z, v.w);
    }}
#endif
    const {real}* from = points.data + 4 * static_cast<size_t>(at);
    return wp::vec_t<4, {real}>(from[0], from[1], from[2], from[3]);
"""
_STORE_POINT = """
    {integer} bits = row;
    {real} tail;
    memcpy(&tail, &bits, sizeof(tail));
#if defined(__CUDA_ARCH__)
    if (sizeof({real}) == 4) {{
        reinterpret_cast<float4*>(points.data)[at] = make_float4(p[0], p[1], p[2], tail);
        return;
    }}
#endif
    {real}* to = points.data + 4 * static_cast<size_t>(at);
    to[0] = p[0]; to[1] = p[1]; to[2] = p[2]; to[3] = tail;
"""
_ROW_OF = """
    {real} tail = point[3];
    {integer} bits;
    memcpy(&bits, &tail, sizeof(bits));
    return bits;
"""


@functools.cache
def packed_point(dtype: torch.dtype) -> Any:
    """Sorted points as rows of four: the position, then the bits of its row in the cloud as given."""
    real, vec3 = REALS[dtype]
    vec4 = wp.types.vector(length=4, dtype=real)
    single = dtype == torch.float32
    names = {"real": "float", "integer": "int"} if single else {"real": "double", "integer": "long long"}

    @wp.func_native(_LOAD_POINT.format(**names))
    def load_point(points: wp.array2d(dtype=real), at: int) -> vec4: ...

    @wp.func_native(_STORE_POINT.format(**names))
    def store_point(points: wp.array2d(dtype=real), at: int, p: vec3, row: int): ...

    @wp.func_native(_ROW_OF.format(**names))
    def row_of(point: vec4) -> int: ...

    return load_point, store_point, row_of
