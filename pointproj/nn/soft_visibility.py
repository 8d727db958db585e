"""How much of the outside is seen from a point, past disks around the samples of a cloud.

What is inside is a question of visibility (``pointproj.geometry.interior``), and a cloud answers it
approximately: each sample stands for a disk in its local plane. Small disks leave holes between them, large
ones reach over edges and narrow openings, so there are two sizes. A ray through a hole is alone; rays through
an opening have neighbours. So the result says how many rays escape, and how many pairs of neighbours do.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from pointproj.nn.disk_grid import (
    FEATURES,
    IN_PLANE,
    INNER,
    PAIRS,
    DiskGrid,
    directions,
    list_disks,
    look_around,
    neighboring,
)

__all__ = ["FEATURES", "DiskGrid", "disk_grid", "plain_soft_visibility", "soft_visibility"]


def disk_grid(
    points: Float[Tensor, "b n 3"], normals: Float[Tensor, "b n 3"], radii: Float[Tensor, "b n"]
) -> DiskGrid:
    """List the disks of clouds in the cells of a grid, for any number of :func:`soft_visibility`.

    Parameters
    ----------
    points : (B, N, 3) float tensor
        Centres. One that is not finite has no disk.
    normals : (B, N, 3) float tensor
        Unit normals of the disks, of either sign; 0 for a point that has no disk.
    radii : (B, N) float tensor
        Of the large disks. The search is fast where they are of similar size: its cells are as wide as the
        largest.

    Returns
    -------
    DiskGrid
        Without gradients, in single precision.
    """
    disks = torch.cat([points, normals, radii[..., None].square()], dim=-1).detach().float()
    exists = disks.isfinite().all(-1, keepdim=True) & normals.detach().any(-1, keepdim=True)
    disks = torch.where(exists, disks, 0.0)
    frames, start, entries = list_disks(disks, disks[..., 6].amax(1).sqrt())
    return DiskGrid(frames, disks, start, entries)


def soft_visibility(points: Float[Tensor, "b q 3"], grid: DiskGrid) -> Float[Tensor, "b q 4"]:
    """Count the rays that escape from points, of 64 that are spread evenly over all directions.

    Parameters
    ----------
    points : (B, Q, 3) float tensor
        Where to look from. A disk in whose plane a point lies hides nothing from it.
    grid : DiskGrid
        Of as many clouds, from :func:`disk_grid`.

    Returns
    -------
    (B, Q, 4) float tensor
        Past disks of 0.6 times the radii: the share of rays that escape, and the share of pairs of
        neighbouring rays that both do; then the same past disks of the whole radii. NaN for a point that is
        not finite. It is constant but for jumps, so it has no gradients: autograd takes it for a constant.
    """
    return look_around(points.detach().float().contiguous(), *grid).to(points.dtype)


def plain_soft_visibility(
    points: Tensor, frames: Tensor, disks: Tensor, start: Tensor, entries: Tensor
) -> Tensor:
    """The same as operators of torch, which try every disk for every ray: what the kernels are held to."""
    centres, normals, squared_radii = disks[:, None].split([3, 3, 1], dim=-1)
    away = points[:, :, None] - centres
    height = (away * normals).sum(-1)
    off_plane = height.abs() > IN_PLANE
    near = torch.as_tensor(neighboring, device=points.device)
    escaped = []
    for direction in torch.as_tensor(directions, dtype=points.dtype, device=points.device):
        slope = (normals * direction).sum(-1)
        distance = -height / torch.where(slope == 0, 1.0, slope)
        squared = (away + distance[..., None] * direction).square().sum(-1)
        ahead = off_plane & (height * slope < 0)
        sizes = INNER**2 * squared_radii[..., 0], squared_radii[..., 0]
        escaped.append(torch.stack([~(ahead & (squared < size)).any(-1) for size in sizes], dim=-1))
    passed = torch.stack(escaped, dim=-1).to(points.dtype)  # (B, Q, 2, 64)
    pairs = ((passed @ near.to(points.dtype)) * passed).sum(-1) / (2 * PAIRS)
    result = torch.stack([passed.mean(-1), pairs], dim=-1).flatten(-2)
    return torch.where(points.isfinite().all(-1, keepdim=True), result, torch.nan)
