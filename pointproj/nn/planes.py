"""Planes through points of a cloud: exact on flat pieces of a surface, however thin the solid is."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pointproj.nn.attention import take_rows

PAIRED = 10  # of the nearest neighbours; each pair of them spans a plane that is tried
COUNTED = 15  # of the nearest neighbours, of which a plane should contain many
EXACT = 0.01  # a neighbour that far from a plane, in units, counts half; in clouds with noise one farther off
NOISE_RANK = 5  # neighbours on an exact plane, beside those that span it: see _noise
NOISE_OF_RANK = 1.75  # standard deviation of the noise, in distances of that neighbour
WITHIN = 1.5  # standard deviations of noise from a plane: so far off a neighbour counts half
FARTHEST = 3.0  # such distances that a point is moved, at most
REFINED = 3  # times
FEW, FEWEST = 0.25, 0.05  # share of the neighbours on a plane: with less than few the surface is curved
UPWARDS = (0.37, 0.52, 0.77)  # a direction that few planes of made things contain


class Planes(NamedTuple):
    """Of the points of clouds; none has gradients."""

    normals: Float[Tensor, "b n 3"]  # 0 where a point has no three neighbours that span a plane
    fit: Float[Tensor, "b n 1"]  # share of the neighbours on the plane, from 0 to 1
    shift: Float[Tensor, "b n 3"]  # from the point onto its plane
    noise: Float[Tensor, "b 1 1"]  # standard deviation of the cloud's noise, estimated


def local_planes(points: Float[Tensor, "b n 3"], rows: Int[Tensor, "b n k"], unit: float) -> Planes:
    """Find for each point the plane that most of its neighbours lie on.

    Every pair of near neighbours spans a plane with the point, which is tried (the search of RANSAC,
    complete). Samples of a flat piece lie on their plane exactly, so it is found beside an edge, and where a
    second sheet is closer than the samples are to each other, which an average over neighbours would mix in.
    Where no plane holds many neighbours, because the surface is curved, the plane has the direction of least
    squares.

    In a cloud with noise even the best plane misses most neighbours of most points, and by how much tells the
    noise of the cloud. Then planes are sought that hold neighbours within that noise, and moved to where the
    squares of those neighbours' distances are least. They need not contain their points.

    Parameters
    ----------
    points : (B, N, 3) float tensor
    rows : (B, N, k) integer tensor
        Of the k nearest points, the point itself first; from :func:`pointproj.knn`. At least 16.
    unit : float
        The usual distance between points.

    Returns
    -------
    Planes
        Unit normals are on one side of a fixed plane through the origin: they do not tell inside from
        outside.
    """
    return Planes(*torch.ops.pointproj.local_planes(points.detach(), rows, unit))


def plain_local_planes(points: Tensor, rows: Tensor, unit: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same as operators of torch."""
    around = (take_rows(points, rows.clamp(min=0)) - points[:, :, None]) / unit  # itself first
    away = around[:, :, 1 : COUNTED + 1]
    paired = away[:, :, :PAIRED]
    rolled = [paired.roll(shift, 2) for shift in range(1, paired.shape[2] // 2 + 1)]
    crossed = torch.linalg.cross(torch.cat([paired] * len(rolled), dim=2), torch.cat(rolled, dim=2))
    candidates = crossed / crossed.norm(dim=-1, keepdim=True).clamp(min=1e-6)
    along = zip(candidates[:, :, :, None].unbind(-1), away[:, :, None].unbind(-1), strict=True)
    height = sum(one * other for one, other in along).abs()  # (B, N, pairs, neighbours)
    _, best = _most_on_plane(candidates, height, EXACT)
    noise = _noise(height, best)
    within = (WITHIN * noise).clamp(min=EXACT)
    fit, best = _most_on_plane(candidates, height, within[..., None])
    candidate = candidates.gather(2, best[..., None].expand(-1, -1, -1, 3))[:, :, 0]
    normal, shift = _refined(around, candidate, within)
    none, curved = fit <= FEWEST, fit < FEW
    normal = torch.where(curved, _least_squares(away)[0], normal)
    normal = torch.where(none, candidate, normal)
    shift = torch.where(curved, 0.0, shift)
    upwards = sum(axis * part for axis, part in zip(normal.split(1, dim=-1), UPWARDS, strict=True))
    return torch.where(upwards < 0, -normal, normal), fit, unit * shift, unit * noise


def _most_on_plane(
    candidates: Float[Tensor, "b n pairs 3"], height: Float[Tensor, "b n pairs k"], within: Tensor | float
) -> tuple[Float[Tensor, "b n 1"], Int[Tensor, "b n 1"]]:
    """Share of the neighbours on the plane that contains the most; and which one it is."""
    on_plane = (1 / (1 + (height / within).square())).mean(-1) * candidates.square().sum(-1)
    return on_plane.max(-1, keepdim=True)


def _noise(height: Float[Tensor, "b n pairs k"], best: Int[Tensor, "b n 1"]) -> Float[Tensor, "b 1 1"]:
    """Standard deviation of a cloud's noise: 0 where half of the points have exact planes.

    A plane is spanned by two neighbours. How far off the next ones are is sorted for each point, and the
    median over the cloud is taken.
    """
    of_best = height.gather(2, best[..., None].expand(-1, -1, -1, height.shape[-1]))[:, :, 0]
    next_ones = of_best.sort(dim=-1).values[..., NOISE_RANK]
    middle = next_ones.shape[1] // 2
    return NOISE_OF_RANK * next_ones.sort(dim=1).values.narrow(1, middle, 1)[..., None]


def _refined(
    around: Float[Tensor, "b n k 3"], normal: Float[Tensor, "b n 3"], within: Float[Tensor, "b 1 1"]
) -> tuple[Float[Tensor, "b n 3"], Float[Tensor, "b n 3"]]:
    """Move planes to where squared distances of the neighbours on them are least.

    Returns
    -------
    normals, shifts : (B, N, 3) float tensors
        The shift leads from the point onto the plane.
    """
    centre = torch.zeros_like(normal)
    for _ in range(REFINED):
        away = (around - centre[:, :, None]).unbind(-1)
        height = sum(one * other for one, other in zip(away, normal[:, :, None].unbind(-1), strict=True))
        weights = (1 / (1 + (height / within).square())).square()[..., None]
        normal, centre = _least_squares(around, weights)
    off = (centre * normal).sum(-1, keepdim=True)
    farthest = FARTHEST * within
    return normal, torch.maximum(torch.minimum(off, farthest), -farthest) * normal


def _least_squares(
    away: Float[Tensor, "b n k 3"], weights: Float[Tensor, "b n k 1"] | float = 1.0
) -> tuple[Float[Tensor, "b n 3"], Float[Tensor, "b n 3"]]:
    """Unit normals of the planes that are nearest to points, and the points' means."""
    weights = torch.ones_like(away[..., :1]) * weights
    mean = (weights * away).sum(2) / weights.sum(2)
    centred = away - mean[:, :, None]
    return least_axis((weights * centred).mT @ centred), mean


def least_axis(moments: Float[Tensor, "b n 3 3"]) -> Float[Tensor, "b n 3"]:
    """Unit eigenvectors of the least eigenvalues of second moments; 1e-6 is added to all of these.

    They are columns of a high power of the inverse, here of the adjugate. torch's own function waits for the
    device.
    """
    x, y, z = (moments + 1e-6 * torch.eye(3, dtype=moments.dtype, device=moments.device)).unbind(-2)
    cross = torch.linalg.cross
    power = torch.stack([cross(y, z), cross(z, x), cross(x, y)], dim=-2)
    for _ in range(5):
        power = power / power.abs().amax((-2, -1), keepdim=True).clamp(min=1e-20)
        # Its square, in less time than the product of so many small matrices takes on a GPU.
        power = sum(one * other for one, other in zip(power.split(1, -1), power.split(1, -2), strict=True))
    largest = power.diagonal(dim1=-2, dim2=-1).argmax(-1)
    column = power.gather(-2, largest[..., None, None].expand(-1, -1, 1, 3))[:, :, 0]
    return column / column.norm(dim=-1, keepdim=True).clamp(min=1e-20)


# One operator to torch.compile: with it in the graph, Inductor of torch 2.11 failed, perhaps at roll.
_operator = torch.library.custom_op("pointproj::local_planes", plain_local_planes, mutates_args=())


@_operator.register_fake
def _(points: Tensor, rows: Tensor, unit: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    of_point, of_cloud = points.new_empty(*points.shape[:2], 1), points.new_empty(len(points), 1, 1)
    return torch.empty_like(points), of_point, torch.empty_like(points), of_cloud
