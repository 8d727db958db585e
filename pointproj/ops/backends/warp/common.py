"""What all kernels share: dtypes, the clouds of a batch, points in the order of their cells."""

import functools
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import torch
import warp as wp
from torch import Tensor

from pointproj.ops.bridge.warp_launch import building, record_struct

# The reference rounds after every operation: no fused multiply-adds where distances are computed.
OPTIONS = {"module": "unique", "module_options": {"fuse_fp": False, "enable_backward": False}}
REALS = {
    torch.float32: (wp.float32, wp.vec3f, wp.vec4f),
    torch.float64: (wp.float64, wp.vec3d, wp.vec4d),
}


def once(make: Callable[..., Any]) -> Callable[..., Any]:
    """``functools.cache`` for what makes kernels: Warp can register those of one thread at a time."""
    cached = functools.cache(make)

    @functools.cache  # finds what has been made before, without the lock
    @functools.wraps(make)
    def locked(*args: Any) -> Any:
        with building:
            return cached(*args)

    return locked


def aligned(values: Tensor) -> Tensor:
    """The same values at an address that is a multiple of 16, where a GPU can read words of 16 bytes."""
    return values.clone() if values.data_ptr() % 16 else values


# What the fields of records are in kernels, and how many dimensions their arrays have. "coordinate" is the
# dtype of positions, "number" a second dtype, for example that of sums.
Vectors = Annotated[Tensor | None, "vector", 1]  # of three coordinates
Coordinates = Annotated[Tensor | None, "coordinate", 1]
CoordinateRows = Annotated[Tensor | None, "coordinate", 2]
Numbers = Annotated[Tensor | None, "number", 1]
NumberPairs = Annotated[Tensor | None, "pair", 1]
NumberRows = Annotated[Tensor | None, "number", 2]
Ints = Annotated[Tensor | None, wp.int32, 1]
IntRows = Annotated[Tensor | None, wp.int32, 2]
Longs = Annotated[Tensor | None, wp.int64, 1]
Long = Annotated[int, wp.int64, 0]


@once
def struct_of(record: type, positions: torch.dtype, numbers: torch.dtype | None = None) -> Any:
    """The struct that a record is in kernels, for positions and other numbers of these dtypes."""
    coordinate, vec3, _ = REALS[positions]
    number = wp.dtype_from_torch(numbers or positions)
    pair = wp.types.vector(length=2, dtype=number)
    kinds = {"coordinate": coordinate, "vector": vec3, "number": number, "pair": pair}
    kinds |= {float: number, int: int}
    return record_struct(
        record, lambda kind: struct_of(kind, positions) if hasattr(kind, "_fields") else kinds.get(kind, kind)
    )


class Batch(NamedTuple):
    """How packed rows are divided among the clouds of a batch."""

    offsets: Ints  # (count + 1,); None: all clouds are of equal size
    rows: int
    count: int  # clouds


@wp.func
def first_row_of(cloud: int, batch: Any):
    """First packed row of a cloud; for the number of clouds, the number of rows."""
    if batch.count == 1:
        return cloud * batch.rows
    if not batch.offsets:
        return cloud * (batch.rows / batch.count)
    return batch.offsets[cloud]


@wp.func
def cloud_of(row: int, batch: Any):
    """The cloud that a packed row belongs to."""
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


class Points(NamedTuple):
    """One set of points, in the order in which a kernel takes them."""

    positions: Vectors  # (rows, 3)
    batch: Batch
    ordered: CoordinateRows = None  # (n, 4): the sorted points of a cell list, if that is the order


# A sorted point is a row of four numbers: its position, and the bits of its row number in the given set. In
# fp32 it is read and written as one word of 16 bytes, which Warp does not do by itself.
_POINT = """
    struct alignas(16) Four {{ {real} x[4]; }};
    Four* const points = reinterpret_cast<Four*>(table.data);
"""
_LOAD_POINT = """
    const Four four = points[at];
    return wp::vec_t<4, {real}>(four.x[0], four.x[1], four.x[2], four.x[3]);
"""
_STORE_POINT = """
    Four four = {{p[0], p[1], p[2], 0}};
    const {integer} bits = row;
    memcpy(&four.x[3], &bits, sizeof(bits));
    points[at] = four;
"""
_ROW_OF = """
    {integer} bits;
    memcpy(&bits, &point[3], sizeof(bits));
    return bits;
"""
for _real, _vec3, _vec4 in REALS.values():
    _name = f"wp::{_real.__name__}"
    _names = {"real": _name, "integer": _name.replace("float", "int")}

    @wp.func_native((_POINT + _LOAD_POINT).format(**_names))
    def load_point(table: wp.array2d(dtype=_real), at: int) -> _vec4: ...

    @wp.func_native((_POINT + _STORE_POINT).format(**_names))
    def store_point(table: wp.array2d(dtype=_real), at: int, p: _vec3, row: int): ...

    @wp.func_native(_ROW_OF.format(**_names))
    def row_of(point: _vec4) -> int: ...


@wp.func
def position_of(point: Any):
    """The position of a sorted point."""
    return wp.vector(point[0], point[1], point[2])


@wp.func
def take(points: Any, at: int):
    """Row number and position of the point at this place in the order."""
    if points.ordered:
        point = load_point(points.ordered, at)
        return row_of(point), position_of(point)
    return at, points.positions[at]


@wp.func
def squared_distance(p: Any, q: Any, like: Any):
    """The squared distance of two positions, in the dtype of ``like``, rounded as in the reference."""
    dx = type(like)(p[0] - q[0])
    dy = type(like)(p[1] - q[1])
    dz = type(like)(p[2] - q[2])
    return dx * dx + dy * dy + dz * dz
