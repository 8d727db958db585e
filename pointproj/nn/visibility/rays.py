"""Visibility of points past the disks of a cloud: Warp kernels, one source for CPU and CUDA.

Visibility decides what is inside (``pointproj.geometry.interior``). For a cloud it is computed approximately:
each sample stands for a disk in its local plane. Small disks leave holes between them, and large disks extend
over edges and narrow gaps of the surface, so there are two sizes. Through a hole between disks, mostly one
ray escapes alone; through a gap of the surface, neighbouring rays escape too. So the result has the share of
rays that escape, and the share of pairs of neighbouring rays that both escape.

Rays go from cell to cell of a grid until a disk stops them.
"""

import numpy as np
import torch
import warp as wp
from jaxtyping import Float, Int
from torch import Tensor

from pointproj.nn.visibility.constants import Disk, Edge, Ray
from pointproj.nn.visibility.disk_grid import DiskGrid, DiskGridStruct, cell_row
from pointproj.nn.visibility.kernels import for_kernels, kernel
from pointproj.ops.bridge.warp_op import warp_op

Points = wp.array(dtype=wp.vec3)  # of all clouds
Order = wp.array(dtype=wp.int64)
Escaped = wp.array2d(dtype=wp.uint8)  # (64, places in the order)


def soft_visibility(points: Float[Tensor, "b q 3"], grid: DiskGrid) -> Float[Tensor, "b q 4"]:
    """Count the rays that escape from points, of 64 rays in evenly distributed directions.

    A disk stops no ray of a point that lies in the plane of the disk. The result has no gradients.

    Returns
    -------
    (B, Q, 4) float tensor
        For disks of 0.6 times the radii: the share of rays that escape, and the share of pairs of
        neighbouring rays that both escape; then the same for disks of the whole radii. NaN for a point that
        is not finite.
    """
    return _look_around(*for_kernels(points), *grid).to(points.dtype)


def _spiral() -> Float[np.ndarray, "64 3"]:
    """Return evenly distributed directions, rounded to 1/4096, so that all machines have the same."""
    number = np.arange(Ray.COUNT) + 0.5
    height = 1 - 2 * number / Ray.COUNT
    angle = np.pi * (1 + 5**0.5) * number
    radius = np.sqrt(1 - height**2)
    return np.round(4096 * np.stack([radius * np.cos(angle), radius * np.sin(angle), height], axis=1)) / 4096


directions = _spiral()
# Neighbouring directions are less than 1.4 times the spacing apart; each has about six neighbours.
neighboring = directions @ directions.T > np.cos(1.4 * (4 * np.pi / Ray.COUNT) ** 0.5)
np.fill_diagonal(neighboring, False)
PAIRS = int(neighboring.sum()) // 2

_ROWS = ", ".join(f"{value!r}f" for value in directions.ravel().tolist())
_MASKS = ", ".join(f"{sum(1 << int(place) for place in np.flatnonzero(row))}ull" for row in neighboring)


@wp.func_native(f"""
    static const float rows[{3 * Ray.COUNT}] = {{ {_ROWS} }};
    return wp::vec3f(rows[3 * number], rows[3 * number + 1], rows[3 * number + 2]);
""")
def direction_of(number: int) -> wp.vec3f:
    """Return one of the directions."""
    ...


@wp.func_native(f"""
    static const unsigned long long masks[{Ray.COUNT}] = {{ {_MASKS} }};
    return masks[number];
""")
def neighbors_of(number: int) -> wp.uint64:
    """Return the neighbours of a direction, one bit each."""
    ...


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
    """Return a row of four numbers, which a GPU reads at once."""
    ...


@wp.func
def before_edges(grid: DiskGridStruct, row: int, away: wp.vec3):
    """Return whether a place in the plane of a disk is within all its edges; ``away`` is from the centre."""
    for place in range(Edge.COUNT):
        edge = load_four(grid.edges, Edge.COUNT * row + place)
        if wp.dot(wp.vec3(edge[0], edge[1], edge[2]), away) > edge[3]:
            return False
    return True


@wp.func
def stopped_in(grid: DiskGridStruct, cell: int, origin: wp.vec3, direction: wp.vec3):
    """Return 0 if no disk of a cell stops a ray, 1 if only large disks do, 2 if a small disk does."""
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
    """Return the same as :func:`stopped_in`, for all cells along a ray."""
    low = wp.vec3(grid.frames[cloud, 0], grid.frames[cloud, 1], grid.frames[cloud, 2])
    cells = wp.vec3(grid.frames[cloud, 4], grid.frames[cloud, 5], grid.frames[cloud, 6])
    place = (origin - low) * grid.frames[cloud, 3]
    first = wp.cw_div(-place, direction)
    second = wp.cw_div(cells - place, direction)
    begin = wp.max(wp.max(wp.min(first, second)), 0.0)
    found = int(0)
    if begin >= wp.min(wp.max(first, second)):
        return found
    at = wp.vec3i()
    step = wp.vec3i()
    following = wp.vec3()  # how far along the ray the next cell of each axis begins
    for axis in range(3):
        at[axis] = wp.clamp(int(wp.floor(place[axis] + begin * direction[axis])), 0, int(cells[axis]) - 1)
        step[axis] = wp.where(direction[axis] > 0.0, 1, -1)
        border = float(wp.where(step[axis] > 0, at[axis] + 1, at[axis]))
        following[axis] = (border - place[axis]) / direction[axis]
    while True:
        cell = cell_row(cloud, at[0], at[1], at[2])
        found = wp.max(found, stopped_in(grid, cell, origin, direction))
        if found == 2:
            break
        nearest = wp.min(following[0], wp.min(following[1], following[2]))
        inside = int(1)
        for axis in range(3):  # a loop, since a variable index would move the vectors out of registers
            if following[axis] == nearest and inside == 1:
                at[axis] = at[axis] + step[axis]
                following[axis] = following[axis] + wp.abs(1.0 / direction[axis])
                inside = wp.where(at[axis] >= 0 and at[axis] < int(cells[axis]), 2, 0)
        if inside == 0:
            break
    return found


@kernel
def rays_kernel(grid: DiskGridStruct, points: Points, order: Order, escaped: Escaped):
    """One thread a ray, launched over (64, B * Q): 0 if a small disk stops it, 1 if only large ones, else 2.

    Adjacent threads follow one direction from points near each other, so they read the same disks.
    """
    number, place = wp.tid()
    row = int(order[place])
    cloud = row / (points.shape[0] / grid.frames.shape[0])
    if wp.isfinite(points[row]):
        escaped[number, place] = wp.uint8(2 - stopped(grid, cloud, points[row], direction_of(number)))


@kernel
def count_kernel(points: Points, order: Order, escaped: Escaped, result: wp.array(dtype=wp.vec4)):
    """One thread a point, launched over B * Q: count escaping rays, and pairs that both escape."""
    place = wp.tid()
    row = int(order[place])
    if not wp.isfinite(points[row]):
        result[row] = wp.vec4(wp.NAN, wp.NAN, wp.NAN, wp.NAN)
        return
    small = wp.uint64(0)  # one bit for each ray that escapes past the small disks
    large = wp.uint64(0)
    count = wp.vec4()
    for ray in range(Ray.COUNT):
        past = int(escaped[ray, place])
        bit = wp.uint64(1) << wp.uint64(ray)
        if past > 0:
            count += wp.vec4(1.0, float(wp.bit_count(small & neighbors_of(ray))), 0.0, 0.0)
            small |= bit
        if past == 2:
            count += wp.vec4(0.0, 0.0, 1.0, float(wp.bit_count(large & neighbors_of(ray))))
            large |= bit
    rays, pairs = float(Ray.COUNT), float(PAIRS)
    result[row] = wp.cw_div(count, wp.vec4(rays, pairs, rays, pairs))


@warp_op(
    "pointproj::soft_visibility",
    outputs=lambda points, **_: {"result": ((*points.shape[:2], Ray.FEATURES), torch.float32)},
)
def _look_around(
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
    """Compute visibility (B, Q, 4) at points (B, Q, 3)."""
    grid = DiskGrid(frames, disks.view(-1, 4), edges.view(-1, 4), start, entries)
    order, points = _morton_order(frames, points), points.view(-1, 3)
    escaped = torch.empty((Ray.COUNT, len(order)), dtype=torch.uint8, device=points.device)
    launch(rays_kernel, escaped.shape, grid, points, order, escaped, block_dim=128)
    launch(count_kernel, len(order), points, order, escaped, result.view(-1, 4))


def _morton_order(frames: Float[Tensor, "b 7"], points: Float[Tensor, "b q 3"]) -> Int[Tensor, " b*q"]:
    """Return the order of all clouds' points: cloud by cloud, along a Morton curve through half cells."""
    halves = 2 * (points - frames[:, None, :3]) * frames[:, None, 3:4]
    bits = halves.nan_to_num(0.0).clamp(0, 63).int()
    for shift, kept in ((8, 0x300F), (4, 0x30C3), (2, 0x9249)):  # two zeros after each of six bits
        bits = (bits | bits << shift) & kept
    clouds = torch.arange(len(points), dtype=torch.int32, device=points.device)[:, None] << 18
    return (clouds | bits[..., 0] | bits[..., 1] << 1 | bits[..., 2] << 2).flatten().argsort()
