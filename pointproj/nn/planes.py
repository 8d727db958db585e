"""Planes through points of a cloud: exact on flat pieces of a surface, however thin the solid is."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pointproj.nn.attention import take_rows

PAIRED = 10  # of the nearest neighbours; each pair of them spans a plane that is tried
ON_PLANE = 0.01  # a neighbour that far from a plane, in units, counts half
FEW, FEWEST = 0.25, 0.05  # share of the neighbours on a plane: if less than few, samples are noisy or curved
UPWARDS = (0.37, 0.52, 0.77)  # a direction that few planes of made things contain


def local_planes(
    points: Float[Tensor, "b n 3"], rows: Int[Tensor, "b n k"], unit: float
) -> tuple[Float[Tensor, "b n 3"], Float[Tensor, "b n 1"]]:
    """Find for each point the plane through it that most of its neighbours lie on.

    Every pair of near neighbours is tried (the search of RANSAC, complete). Samples of a flat piece lie on
    their plane exactly, so it is found beside an edge, and where a second sheet is closer than the samples
    are to each other, which an average over neighbours would mix in. Where no plane holds many neighbours,
    because samples have noise or the surface is curved, the plane has the direction of least squares.

    Parameters
    ----------
    points : (B, N, 3) float tensor
    rows : (B, N, k) integer tensor
        Of the k nearest points, the point itself first; from :func:`pointproj.knn`.
    unit : float
        The usual distance between points.

    Returns
    -------
    normals : (B, N, 3) float tensor
        Unit normals on one side of a fixed plane through the origin: they do not tell inside from outside.
        0 where a point has no three neighbours that span a plane.
    fit : (B, N, 1) float tensor
        Share of the neighbours on the plane, from 0 to 1. Neither has gradients.
    """
    return torch.ops.pointproj.local_planes(points.detach(), rows, unit)


def plain_local_planes(points: Tensor, rows: Tensor, unit: float) -> tuple[Tensor, Tensor]:
    """The same as operators of torch."""
    away = (take_rows(points, rows[..., 1:].clamp(min=0)) - points[:, :, None]) / unit
    paired = away[:, :, :PAIRED]
    rolled = [paired.roll(shift, 2) for shift in range(1, paired.shape[2] // 2 + 1)]
    crossed = torch.linalg.cross(torch.cat([paired] * len(rolled), dim=2), torch.cat(rolled, dim=2))
    normals = crossed / crossed.norm(dim=-1, keepdim=True).clamp(min=1e-6)
    height = (normals[:, :, :, None] * away[:, :, None]).sum(-1)  # (B, N, pairs, k - 1)
    on_plane = (1 / (1 + (height / ON_PLANE).square())).mean(-1) * normals.square().sum(-1)
    fit, best = on_plane.max(-1, keepdim=True)
    normal = normals.gather(2, best[..., None].expand(-1, -1, -1, 3))[:, :, 0]
    normal = torch.where((fit < FEW) & (fit > FEWEST), _least_squares(away), normal)
    upwards = sum(axis * part for axis, part in zip(normal.split(1, dim=-1), UPWARDS, strict=True))
    return torch.where(upwards < 0, -normal, normal), fit


def _least_squares(away: Float[Tensor, "b n k 3"]) -> Float[Tensor, "b n 3"]:
    """Unit normals of the planes that are nearest to points: eigenvectors of the least eigenvalue.

    They are the columns of a high power of the inverse, here of the adjugate. torch's own function waits for
    the device.
    """
    centred = away - away.mean(2, keepdim=True)
    moments = centred.mT @ centred + 1e-6 * torch.eye(3, dtype=away.dtype, device=away.device)
    x, y, z = moments.unbind(-2)
    cross = torch.linalg.cross
    power = torch.stack([cross(y, z), cross(z, x), cross(x, y)], dim=-2)
    for _ in range(5):
        power = power / power.abs().amax((-2, -1), keepdim=True).clamp(min=1e-20)
        power = power @ power
    largest = power.diagonal(dim1=-2, dim2=-1).argmax(-1)
    column = power.gather(-2, largest[..., None, None].expand(-1, -1, 1, 3))[:, :, 0]
    return column / column.norm(dim=-1, keepdim=True).clamp(min=1e-20)


# One operator to torch.compile: with it in the graph, Inductor of torch 2.11 failed, perhaps at roll.
_operator = torch.library.custom_op("pointproj::local_planes", plain_local_planes, mutates_args=())


@_operator.register_fake
def _(points: Tensor, rows: Tensor, unit: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(points), points.new_empty(*points.shape[:2], 1)
