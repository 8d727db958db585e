"""Disks around the samples of a cloud, listed in the cells of a grid: Warp kernels.

All sizes follow from the number of disks only, so that a CUDA graph can capture the work. A cell is at least
half as wide as the radius of the largest disk, so a disk lies in at most five cells along each axis.
"""

from typing import Annotated, NamedTuple

import torch
import warp as wp
from jaxtyping import Float
from torch import Tensor

from pointproj.nn.visibility.constants import DiskCell
from pointproj.nn.visibility.kernels import Numbers, for_kernels, kernel
from pointproj.ops.bridge.warp_launch import record_struct
from pointproj.ops.bridge.warp_op import warp_op

Floats = Annotated[Tensor, wp.float32, 2]
Integers = Annotated[Tensor, wp.int32, 1]


class DiskGrid(NamedTuple):
    """The disks of b clouds of n points, listed in cells; kernels read disks and edges in rows of four."""

    frames: Floats  # (b, 7): lower corner (3), cells a unit, cells along each axis (3)
    disks: Floats  # (b, n, 8): centre (3), squared radius, normal (3), has edges; 0 for none
    edges: Floats  # (b, n, e, 4): unit vector in the plane, and the distance at which the disk ends there
    start: Integers  # (b * DiskCell.SIDE**3 + 1,): first entry of each cell
    entries: Integers  # (b * n * DiskCell.OF_DISK,): rows among the disks of all clouds


DiskGridStruct = record_struct(DiskGrid)
Cells = wp.array(dtype=wp.int32)


def disk_grid(
    points: Float[Tensor, "b n 3"],
    normals: Float[Tensor, "b n 3"],
    radii: Float[Tensor, "b n"],
    edges: Float[Tensor, "b n e 4"],
) -> DiskGrid:
    """List disks (B, N) in the cells of a grid, for :func:`pointproj.nn.visibility.rays.soft_visibility`.

    Points that are not finite, or have the normal 0, get no disk. ``radii`` are those of the large disks; the
    search is fast if they are of similar size. ``edges`` tell where a disk ends within its radius: see
    :func:`pointproj.nn.visibility.edges.nearest_edges`. The result has no gradients.
    """
    squared = radii[..., None].square()
    has_edges = edges.flatten(2).any(-1, keepdim=True).to(points.dtype)
    disks, edges = for_kernels(torch.cat([points, squared, normals, has_edges], dim=-1), edges)
    exists = disks.isfinite().all(-1, keepdim=True) & normals.detach().any(-1, keepdim=True)
    disks = torch.where(exists, disks, 0.0)
    frames, start, entries = _list_disks(disks)
    return DiskGrid(frames, disks, edges, start, entries)


@wp.func
def cell_row(cloud: int, x: int, y: int, z: int):
    """Return the row of a cell among the cells of all clouds."""
    return ((cloud * DiskCell.SIDE + x) * DiskCell.SIDE + y) * DiskCell.SIDE + z


@kernel
def list_kernel(
    frames: Numbers, disks: wp.array3d(dtype=wp.float32), start: Cells, taken: Cells, entries: Cells
):
    """One thread a disk, launched over (B, N): count it in its cells, and list it there if ``entries`` exist.

    ``taken`` holds the number of disks in each cell so far, at first 0.
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
        last = int(frames[cloud, 4 + axis]) - 1
        low[axis] = wp.clamp(int(wp.floor(centre[axis] - extent - DiskCell.MARGIN)), 0, last)
        high[axis] = wp.clamp(int(wp.floor(centre[axis] + extent + DiskCell.MARGIN)), 0, last)
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


def _grid_specs(disks: Tensor) -> dict:
    clouds, points, _ = disks.shape
    return {
        "frames": ((clouds, 7), torch.float32),
        "start": ((clouds * DiskCell.SIDE**3 + 1,), torch.int32),
        "entries": ((clouds * points * DiskCell.OF_DISK,), torch.int32),
    }


@warp_op("pointproj::list_disks", outputs=_grid_specs)
def _list_disks(launch, disks: Tensor, frames: Tensor, start: Tensor, entries: Tensor) -> None:
    """List disks (B, N, 8) in cells."""
    centres, radius = disks[..., :3], disks[..., 3].amax(1).sqrt()  # the largest radius of each cloud
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
