"""How much of the outside is seen from a point, past disks around the samples of a cloud.

What is inside is a question of visibility (``pointproj.geometry.interior``), and a cloud answers it
approximately: each sample stands for a disk in its local plane. Small disks leave holes between them, large
ones reach over edges and narrow openings, so there are two sizes. A ray through a hole is alone; rays through
an opening have neighbours. So the result says how many rays escape, and how many pairs of neighbours do.
"""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from pointproj.nn.visibility.constants import Disk, Edge, Ray
from pointproj.nn.visibility.disk_grid import (
    PAIRS,
    DiskGrid,
    directions,
    list_disks,
    look_around,
    neighboring,
)

__all__ = ["DiskGrid", "disk_grid", "plain_soft_visibility", "soft_visibility"]


def disk_grid(
    points: Float[Tensor, "b n 3"],
    normals: Float[Tensor, "b n 3"],
    radii: Float[Tensor, "b n"],
    edges: Float[Tensor, "b n e 4"] | None = None,
) -> DiskGrid:
    """List disks (B, N) in the cells of a grid, for any number of :func:`soft_visibility`; without gradients.

    Points that are not finite, or have the normal 0, have no disk. ``radii`` are those of the large disks;
    the search is fast where they are of similar size. ``edges`` are where disks end before them: see
    :func:`pointproj.nn.visibility.edges.nearest_edges`.
    """
    squared = radii[..., None].square()
    if edges is None:
        edges = points.new_zeros(*points.shape[:2], Edge.COUNT, 4)
    has_edges = edges.flatten(2).any(-1, keepdim=True).to(points.dtype)
    disks = torch.cat([points, squared, normals, has_edges], dim=-1).detach().float()
    exists = disks.isfinite().all(-1, keepdim=True) & normals.detach().any(-1, keepdim=True)
    disks = torch.where(exists, disks, 0.0)
    frames, start, entries = list_disks(disks, disks[..., 3].amax(1).sqrt())
    return DiskGrid(frames, disks, edges.detach().float().contiguous(), start, entries)


def soft_visibility(points: Float[Tensor, "b q 3"], grid: DiskGrid) -> Float[Tensor, "b q 4"]:
    """Count the rays that escape from points, of 64 that are spread evenly over all directions.

    Returns
    -------
    (B, Q, 4) float tensor
        Past disks of 0.6 times the radii: the share of rays that escape, and the share of pairs of
        neighbouring rays that both do; then the same past disks of the whole radii. NaN for a point that is
        not finite. A disk in whose plane a point lies hides nothing from it. Autograd takes the result for a
        constant.
    """
    return look_around(points.detach().float().contiguous(), *grid).to(points.dtype)


def plain_list_disks(disks: Tensor, radius: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Stand in for the cells, which :func:`plain_soft_visibility` does without."""
    nothing = torch.zeros(1, dtype=torch.int32, device=disks.device)
    return disks.new_zeros(disks.shape[0], 7), nothing, nothing.clone()


def plain_soft_visibility(
    points: Tensor, frames: Tensor, disks: Tensor, edges: Tensor, start: Tensor, entries: Tensor
) -> Tensor:
    """The same as operators of torch, which try every disk for every ray: what the kernels are held to."""
    numbers = disks[:, None].unbind(-1)  # (B, 1, N) each
    centre, squared_radii, normal = numbers[:3], numbers[3], numbers[4:7]
    towards = edges[:, None].unbind(-1)  # (B, 1, N, edges) each
    away = [place[..., None] - middle for place, middle in zip(points.unbind(-1), centre, strict=True)]
    height = _dot(normal, away)
    off_plane = height.abs() > Disk.IN_PLANE
    escaped = []  # (B, Q, 2) for each direction
    for direction in directions.tolist():
        slope = _dot(normal, direction)
        distance = height / torch.where(slope == 0, 1.0, slope)
        met = [one - distance * along for one, along in zip(away, direction, strict=True)]
        squared = _dot(met, met)
        in_all = (_dot(towards[:3], [place[..., None] for place in met]) <= towards[3]).all(-1)
        ahead = off_plane & (height * slope < 0) & in_all
        sizes = Disk.INNER**2 * squared_radii, squared_radii
        blocked = ((ahead & (squared < size)).any(-1) for size in sizes)
        escaped.append(torch.stack([1 - one.to(points.dtype) for one in blocked], dim=-1))
    both = [escaped[one] * escaped[other] for one, other in np.argwhere(np.triu(neighboring)).tolist()]
    result = torch.stack([sum(escaped) / Ray.COUNT, sum(both) / PAIRS], dim=-1).flatten(-2)
    return torch.where(points.isfinite().all(-1, keepdim=True), result, torch.nan)


def _dot(one: Sequence[Tensor], other: Sequence[Tensor | float]) -> Tensor:
    """Summed in the order of the kernels."""
    return one[0] * other[0] + one[1] * other[1] + one[2] * other[2]
