"""Disks in the cells of a grid, and rays that go from cell to cell until a disk stops them: Warp kernels.

One source for CPU and CUDA. Everything has a size that follows from the number of disks alone, so that a
CUDA graph can hold it: a cell is half as wide as the largest disk's radius or wider, so a disk lies in at
most five cells along each axis.
"""

from typing import Annotated, NamedTuple

import numpy as np
import torch
import warp as wp
from jaxtyping import Float, Int
from torch import Tensor

from pointproj.nn.visibility.constants import Disk, DiskCell, Edge, Ray
from pointproj.nn.visibility.kernels import kernel
from pointproj.ops.bridge.warp_launch import record_struct
from pointproj.ops.bridge.warp_op import warp_op


@wp.func_native("""
#if defined(__CUDA_ARCH__)
    const float4 v = reinterpret_cast<const float4*>(rows.data)[at];
    return wp::vec4f(v.x, v.y, v.z, v.w);
#else
    const float* from = rows.data + 4 * static_cast<size_t>(at);
    return wp::vec4f(from[0], from[1], from[2], from[3]);
#endif
""")
def load_four(rows: wp.array2d(dtype=wp.float32), at: int) -> wp.vec4f:
    """A row of four numbers, which a GPU reads at once."""
    ...


def _spiral() -> Float[np.ndarray, "64 3"]:
    """Directions spread evenly over the sphere, in steps of 1/4096, so that every machine has the same."""
    number = np.arange(Ray.COUNT) + 0.5
    height = 1 - 2 * number / Ray.COUNT
    angle = np.pi * (1 + 5**0.5) * number
    radius = np.sqrt(1 - height**2)
    return np.round(4096 * np.stack([radius * np.cos(angle), radius * np.sin(angle), height], axis=1)) / 4096


def _neighboring(directions: Float[np.ndarray, "64 3"]) -> np.ndarray:
    """Which directions are neighbours: those less than 1.4 times their spacing apart, about six of each."""
    spacing = (4 * np.pi / len(directions)) ** 0.5
    near = directions @ directions.T > np.cos(1.4 * spacing)
    np.fill_diagonal(near, False)
    return near


directions = _spiral()
neighboring = _neighboring(directions)
PAIRS = int(neighboring.sum()) // 2

_ROWS = ", ".join(f"{value!r}f" for value in directions.ravel().tolist())
_MASKS = ", ".join(f"{sum(1 << int(place) for place in np.flatnonzero(row))}ull" for row in neighboring)


@wp.func_native(f"""
    static const float rows[{3 * Ray.COUNT}] = {{ {_ROWS} }};
    return wp::vec3f(rows[3 * number], rows[3 * number + 1], rows[3 * number + 2]);
""")
def direction_of(number: int) -> wp.vec3f:
    """One of the directions."""
    ...


@wp.func_native(f"""
    static const unsigned long long masks[{Ray.COUNT}] = {{ {_MASKS} }};
    return masks[number];
""")
def neighbors_of(number: int) -> wp.uint64:
    """The neighbours of a direction, a bit each."""
    ...


@wp.func
def pairs_in(escaped: wp.uint64):
    """Pairs of neighbouring directions that both escaped; a bit each."""
    twice = int(0)
    for number in range(Ray.COUNT):
        if (escaped >> wp.uint64(number)) & wp.uint64(1):
            twice += int(wp.bit_count(escaped & neighbors_of(number)))
    return twice / 2


Rows = Annotated[Tensor, wp.float32, 2]  # kernels see disks and edges as rows of four numbers
Numbers = Annotated[Tensor, wp.int32, 1]


class DiskGrid(NamedTuple):
    """Disks of b clouds of n points in cells."""

    frames: Rows  # (b, 7): lower corner (3), cells a unit, cells along each axis (3)
    disks: Rows  # (b, n, 8): centre (3), squared radius, normal (3), has edges; 0 for none
    edges: Rows  # (b, n, e, 4): unit vector in the plane, distance at which the disk ends there
    start: Numbers  # (b * DiskCell.SIDE**3 + 1,): where a cell's disks begin among the entries
    entries: Numbers  # (b * n * DiskCell.OF_DISK,): rows among the disks of all clouds


DiskGridStruct = record_struct(DiskGrid)


@wp.func
def cell_row(cloud: int, x: int, y: int, z: int):
    """Row of a cell among those of all clouds."""
    return ((cloud * DiskCell.SIDE + x) * DiskCell.SIDE + y) * DiskCell.SIDE + z


@wp.func
def along_axis(frames: wp.array2d(dtype=wp.float32), cloud: int, axis: int, low: float, high: float):
    """First and last cell between two places, in cells."""
    last = int(frames[cloud, 4 + axis]) - 1
    return wp.vec2i(
        wp.clamp(int(wp.floor(low - DiskCell.MARGIN)), 0, last),
        wp.clamp(int(wp.floor(high + DiskCell.MARGIN)), 0, last),
    )


@kernel
def list_kernel(
    frames: wp.array2d(dtype=wp.float32),
    disks: wp.array3d(dtype=wp.float32),
    start: wp.array(dtype=wp.int32),
    taken: wp.array(dtype=wp.int32),
    entries: wp.array(dtype=wp.int32),
):
    """One thread a disk, launched over (B, N): count it in its cells, and list it where there are entries.

    ``taken`` has a number for each cell, 0 before; ``entries`` may be absent.
    """
    cloud, row = wp.tid()
    squared = disks[cloud, row, 3]
    if squared == 0.0:
        return
    per_unit = frames[cloud, 3]
    radius = wp.sqrt(squared) * per_unit
    normal = wp.vec3(disks[cloud, row, 4], disks[cloud, row, 5], disks[cloud, row, 6])
    centre = wp.vec3()
    low = wp.vec3i()
    high = wp.vec3i()
    for axis in range(3):
        centre[axis] = (disks[cloud, row, axis] - frames[cloud, axis]) * per_unit
        extent = radius * wp.sqrt(wp.max(1.0 - normal[axis] * normal[axis], 0.0))
        span = along_axis(frames, cloud, axis, centre[axis] - extent, centre[axis] + extent)
        low[axis] = span[0]
        high[axis] = span[1]
    thickness = (0.5 + DiskCell.MARGIN) * (wp.abs(normal[0]) + wp.abs(normal[1]) + wp.abs(normal[2]))
    for x in range(low[0], high[0] + 1):
        for y in range(low[1], high[1] + 1):
            for z in range(low[2], high[2] + 1):
                middle = wp.vec3(float(x) + 0.5, float(y) + 0.5, float(z) + 0.5)
                if wp.abs(wp.dot(normal, middle - centre)) <= thickness:
                    cell = cell_row(cloud, x, y, z)
                    place = wp.atomic_add(taken, cell, 1)
                    if entries:
                        entries[start[cell] + place] = cloud * disks.shape[1] + row


@wp.func
def before_edges(grid: DiskGridStruct, row: int, away: wp.vec3):
    """Whether a place in the plane of a disk, seen from its centre, is on this side of all its edges."""
    for place in range(Edge.COUNT):
        edge = load_four(grid.edges, Edge.COUNT * row + place)
        if wp.dot(wp.vec3(edge[0], edge[1], edge[2]), away) > edge[3]:
            return False
    return True


@wp.func
def stopped_in(grid: DiskGridStruct, cell: int, origin: wp.vec3, direction: wp.vec3):
    """0 if no disk of a cell stops a ray, 1 if only large ones do, 2 if a small one does."""
    found = int(0)
    for entry in range(grid.start[cell], grid.start[cell + 1]):
        row = grid.entries[entry]
        sphere = load_four(grid.disks, 2 * row)
        plane = load_four(grid.disks, 2 * row + 1)
        normal = wp.vec3(plane[0], plane[1], plane[2])
        away = origin - wp.vec3(sphere[0], sphere[1], sphere[2])
        height = wp.dot(normal, away)
        slope = wp.dot(normal, direction)
        if height * slope < 0.0 and wp.abs(height) > Disk.IN_PLANE:
            away = away - (height / slope) * direction
            squared = wp.dot(away, away)
            if squared < sphere[3] and (plane[3] == 0.0 or before_edges(grid, row, away)):
                if squared < Disk.INNER * Disk.INNER * sphere[3]:
                    return 2
                found = 1
    return found


@wp.func
def stopped(grid: DiskGridStruct, cloud: int, origin: wp.vec3, direction: wp.vec3):
    """The same for all cells along a ray."""
    place = wp.vec3()
    step = wp.vec3i()
    cells = wp.vec3i()
    begin = float(0.0)
    end = float(1.0e30)
    for axis in range(3):
        cells[axis] = int(grid.frames[cloud, 4 + axis])
        place[axis] = (origin[axis] - grid.frames[cloud, axis]) * grid.frames[cloud, 3]
        first = -place[axis] / direction[axis]
        second = (float(cells[axis]) - place[axis]) / direction[axis]
        begin = wp.max(begin, wp.min(first, second))
        end = wp.min(end, wp.max(first, second))
        step[axis] = wp.where(direction[axis] > 0.0, 1, -1)
    found = int(0)
    if begin >= end:
        return found
    at = wp.vec3i()
    following = wp.vec3()  # how far along the ray the next cell of each axis begins
    for axis in range(3):
        at[axis] = wp.clamp(int(wp.floor(place[axis] + begin * direction[axis])), 0, cells[axis] - 1)
        border = float(wp.where(step[axis] > 0, at[axis] + 1, at[axis]))
        following[axis] = (border - place[axis]) / direction[axis]
    while True:
        cell = cell_row(cloud, at[0], at[1], at[2])
        found = wp.max(found, stopped_in(grid, cell, origin, direction))
        if found == 2:
            break
        nearest = wp.min(following[0], wp.min(following[1], following[2]))
        inside = int(1)
        for axis in range(3):  # no index that varies, which would take the vectors out of the registers
            if following[axis] == nearest and inside == 1:
                at[axis] = at[axis] + step[axis]
                following[axis] = following[axis] + wp.abs(1.0 / direction[axis])
                inside = wp.where(at[axis] >= 0 and at[axis] < cells[axis], 2, 0)
        if inside == 0:
            break
    return found


@kernel
def rays_kernel(
    grid: DiskGridStruct,
    points: wp.array2d(dtype=wp.vec3),
    order: wp.array(dtype=wp.int64),
    escaped: wp.array2d(dtype=wp.uint8),
):
    """One thread a ray, launched over (64, B * Q): 0 if it is stopped, 1 if by large disks alone, 2 if not.

    Threads side by side follow one direction from points near each other, so they read the same disks.
    """
    number, place = wp.tid()
    cloud = int(order[place]) / points.shape[1]
    origin = points[cloud, int(order[place]) - cloud * points.shape[1]]
    if wp.isfinite(origin):
        escaped[number, place] = wp.uint8(2 - stopped(grid, cloud, origin, direction_of(number)))


@kernel
def count_kernel(
    points: wp.array2d(dtype=wp.vec3),
    order: wp.array(dtype=wp.int64),
    escaped: wp.array2d(dtype=wp.uint8),
    result: wp.array2d(dtype=wp.vec4),
):
    """One thread a point, launched over B * Q: count the rays that escape, and pairs of neighbours."""
    place = wp.tid()
    cloud = int(order[place]) / points.shape[1]
    number = int(order[place]) - cloud * points.shape[1]
    if not wp.isfinite(points[cloud, number]):
        result[cloud, number] = wp.vec4(wp.NAN, wp.NAN, wp.NAN, wp.NAN)
        return
    small = wp.uint64(0)
    large = wp.uint64(0)
    bit = wp.uint64(1)
    for ray in range(escaped.shape[0]):
        past = int(escaped[ray, place])
        if past > 0:
            small |= bit
        if past == 2:
            large |= bit
        bit = bit << wp.uint64(1)
    result[cloud, number] = wp.vec4(
        float(wp.bit_count(small)) / float(Ray.COUNT),
        float(pairs_in(small)) / float(PAIRS),
        float(wp.bit_count(large)) / float(Ray.COUNT),
        float(pairs_in(large)) / float(PAIRS),
    )


def _grid_specs(disks: Tensor, radius: Tensor) -> dict:
    clouds, points, _ = disks.shape
    return {
        "frames": ((clouds, 7), torch.float32),
        "start": ((clouds * DiskCell.SIDE**3 + 1,), torch.int32),
        "entries": ((clouds * points * DiskCell.OF_DISK,), torch.int32),
    }


@warp_op("pointproj::list_disks", outputs=_grid_specs)
def list_disks(
    launch, disks: Tensor, radius: Tensor, *, frames: Tensor, start: Tensor, entries: Tensor
) -> None:
    """List disks (B, N, 8) in cells; ``radius`` (B,) is that of the largest of each cloud."""
    centres = disks[..., :3]
    low = (centres - radius[:, None, None]).amin(1)
    extent = (centres + radius[:, None, None]).amax(1) - low
    edge = torch.maximum(0.501 * radius, extent.amax(1) / (DiskCell.SIDE - 1)).clamp(min=1e-6)
    frames[:, :3] = low
    frames[:, 3] = 1 / edge
    frames[:, 4:] = (extent / edge[:, None]).ceil().clamp(1, DiskCell.SIDE)
    taken = torch.zeros(len(start), dtype=torch.int32, device=start.device)
    shape = disks.shape[:2]
    launch(list_kernel, shape, frames, disks, start, taken[1:], None)
    torch.cumsum(taken, 0, dtype=torch.int32, out=start)
    taken.zero_()
    launch(list_kernel, shape, frames, disks, start, taken, entries)


@warp_op(
    "pointproj::soft_visibility",
    outputs=lambda points, **_: {"result": ((*points.shape[:2], Ray.FEATURES), torch.float32)},
)
def look_around(
    launch,
    points: Tensor,
    frames: Tensor,
    disks: Tensor,
    edges: Tensor,
    start: Tensor,
    entries: Tensor,
    *,
    result: Tensor,
) -> None:
    """Visibility (B, Q, 4) at points (B, Q, 3)."""
    grid = DiskGrid(frames, disks.view(-1, 4), edges.view(-1, 4), start, entries)
    order = _morton_order(frames, points)
    escaped = torch.empty((Ray.COUNT, len(order)), dtype=torch.uint8, device=points.device)
    launch(rays_kernel, escaped.shape, grid, points, order, escaped, block_dim=128)
    launch(count_kernel, len(order), points, order, escaped, result)


def _morton_order(frames: Float[Tensor, "b 7"], points: Float[Tensor, "b q 3"]) -> Int[Tensor, " b*q"]:
    """Points of all clouds, cloud by cloud, along a Morton curve through half cells."""
    halves = 2 * (points - frames[:, None, :3]) * frames[:, None, 3:4]
    bits = halves.nan_to_num(0.0).clamp(0, 63).int()
    for shift, kept in ((8, 0x300F), (4, 0x30C3), (2, 0x9249)):  # two places free after each of the six
        bits = (bits | bits << shift) & kept
    clouds = torch.arange(len(points), dtype=torch.int32, device=points.device)[:, None] << 18
    return (clouds | bits[..., 0] | bits[..., 1] << 1 | bits[..., 2] << 2).flatten().argsort()
