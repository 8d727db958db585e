"""Planes of most neighbours: those of flat pieces of a surface, however thin the solid is. Warp kernels."""

from typing import NamedTuple

import torch
import warp as wp
from jaxtyping import Float, Int
from torch import Tensor

from pointproj.nn.rows import take_rows
from pointproj.nn.visibility.constants import LocalPlane
from pointproj.nn.visibility.kernels import adjugate_power, displacements, kernel
from pointproj.ops.bridge.warp_op import warp_op


class Planes(NamedTuple):
    """Of the points of clouds; none has gradients."""

    normals: Float[Tensor, "b n 3"]  # 0 where a point has no three neighbours that span a plane
    fit: Float[Tensor, "b n 1"]  # share of the neighbours on the plane, from 0 to 1
    shift: Float[Tensor, "b n 3"]  # from the point onto its plane
    noise: Float[Tensor, "b 1 1"]  # standard deviation of the cloud's noise, estimated


def local_planes(points: Float[Tensor, "b n 3"], rows: Int[Tensor, "b n k"], unit: float) -> Planes:
    """Find for each point the plane that most of its neighbours lie on; they do not tell inside from outside.

    Every pair of near neighbours spans a plane with the point, which is tried (the search of RANSAC,
    complete). Where none holds many neighbours, because the surface is curved, the plane has the direction of
    least squares. In a cloud with noise even the best plane misses most neighbours, and by how much tells the
    noise; then planes are sought that hold neighbours within it, and moved to their least squares.

    ``rows`` are those of the k nearest points, at least 16, the point itself first; ``unit`` is the usual
    distance between points.
    """
    return Planes(*_search(points.detach().contiguous(), rows.contiguous(), unit))


def plain_local_planes(points: Tensor, rows: Tensor, unit: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same as operators of torch, which hold every pair and neighbour: what the kernels are held to."""
    around = (take_rows(points, rows.clamp(min=0)) - points[:, :, None]) / unit  # itself first
    away = around[:, :, 1 : LocalPlane.COUNTED + 1]
    paired = away[:, :, : LocalPlane.PAIRED]
    rolled = [paired.roll(shift, 2) for shift in range(1, paired.shape[2] // 2 + 1)]
    crossed = torch.linalg.cross(torch.cat([paired] * len(rolled), dim=2), torch.cat(rolled, dim=2))
    candidates = crossed / crossed.norm(dim=-1, keepdim=True).clamp(min=1e-6)
    height = _dot(candidates[:, :, :, None], away[:, :, None]).abs()  # (B, N, pairs, neighbours)
    _, best = _most_on_plane(candidates, height, LocalPlane.EXACT)
    noise = _noise(height.gather(2, best[..., None].expand(-1, -1, -1, away.shape[2]))[:, :, 0])
    within = (LocalPlane.WITHIN * noise).clamp(min=LocalPlane.EXACT)
    fit, best = _most_on_plane(candidates, height, within[..., None])
    candidate = candidates.gather(2, best[..., None].expand(-1, -1, -1, 3))[:, :, 0]
    normal, shift = _refined(around, candidate, within)
    none, curved = fit <= LocalPlane.FEWEST, fit < LocalPlane.FEW
    normal = torch.where(curved, _least_squares(away)[0], normal)
    normal = torch.where(none, candidate, normal)
    shift = torch.where(curved, 0.0, shift)
    upwards = sum(axis * part for axis, part in zip(normal.split(1, dim=-1), LocalPlane.UPWARDS, strict=True))
    return torch.where(upwards < 0, -normal, normal), fit, unit * shift, unit * noise


def _most_on_plane(
    candidates: Float[Tensor, "b n pairs 3"], height: Float[Tensor, "b n pairs k"], within: Tensor | float
) -> tuple[Float[Tensor, "b n 1"], Int[Tensor, "b n 1"]]:
    """Share of the neighbours on the plane that contains the most; and which one it is."""
    on_plane = (1 / (1 + (height / within).square())).mean(-1) * candidates.square().sum(-1)
    return on_plane.max(-1, keepdim=True)


def _dot(one: Float[Tensor, "*pairs 3"], other: Float[Tensor, "*pairs 3"]) -> Float[Tensor, "*pairs"]:
    return sum(part * beside for part, beside in zip(one.unbind(-1), other.unbind(-1), strict=True))


def _noise(height: Float[Tensor, "b n k"]) -> Float[Tensor, "b 1 1"]:
    """Standard deviation of a cloud's noise: 0 where half of the points have exact planes.

    A plane is spanned by two neighbours. How far off the next ones are is sorted for each point, and the
    median over the cloud is taken.
    """
    next_ones, middle = height.sort(dim=-1).values[..., LocalPlane.NOISE_RANK], height.shape[1] // 2
    return LocalPlane.NOISE_OF_RANK * next_ones.sort(dim=1).values.narrow(1, middle, 1)[..., None]


def _refined(
    around: Float[Tensor, "b n k 3"], normal: Float[Tensor, "b n 3"], within: Float[Tensor, "b 1 1"]
) -> tuple[Float[Tensor, "b n 3"], Float[Tensor, "b n 3"]]:
    """Move planes to where squared distances of the neighbours on them are least; shifts lead onto them."""
    centre = torch.zeros_like(normal)
    for _ in range(LocalPlane.REFINED):
        height = _dot(around - centre[:, :, None], normal[:, :, None])
        weights = (1 / (1 + (height / within).square())).square()[..., None]
        normal, centre = _least_squares(around, weights)
    off = (centre * normal).sum(-1, keepdim=True)
    farthest = LocalPlane.FARTHEST * within
    return normal, torch.maximum(torch.minimum(off, farthest), -farthest) * normal


def _least_squares(
    away: Float[Tensor, "b n k 3"], weights: Float[Tensor, "b n k 1"] | float = 1.0
) -> tuple[Float[Tensor, "b n 3"], Float[Tensor, "b n 3"]]:
    """Unit normals of the planes that are nearest to points, and the points' means."""
    weights = torch.ones_like(away[..., :1]) * weights
    mean = (weights * away).sum(2) / weights.sum(2)
    centred = away - mean[:, :, None]
    return least_axis((weights * centred).mT @ centred), mean


def least_axis(
    moments: Float[Tensor, "b n 3 3"], squared: int = LocalPlane.SQUARED
) -> Float[Tensor, "b n 3"]:
    """Unit eigenvectors of the least eigenvalues of second moments; 1e-6 is added to all of these.

    They are columns of a high power of the inverse, here of the adjugate, which is squared so many times.
    torch's own function waits for the device.
    """
    x, y, z = (moments + 1e-6 * torch.eye(3, dtype=moments.dtype, device=moments.device)).unbind(-2)
    cross = torch.linalg.cross
    power = torch.stack([cross(y, z), cross(z, x), cross(x, y)], dim=-2)
    for _ in range(squared):
        power = power / power.abs().amax((-2, -1), keepdim=True).clamp(min=1e-20)
        power = power @ power
    largest = power.diagonal(dim1=-2, dim2=-1).argmax(-1)
    column = power.gather(-2, largest[..., None, None].expand(-1, -1, 1, 3))[:, :, 0]
    return column / column.norm(dim=-1, keepdim=True).clamp(min=1e-20)


@wp.func
def closeness(distance: float, within: float):
    """How much counts what lies so far off a plane: 1 at 0, a half at ``within``."""
    off = distance / within
    return 1.0 / (1.0 + off * off)


@kernel
def most_kernel(
    around: wp.array3d(dtype=wp.vec3),
    scale: float,
    within: wp.array(dtype=wp.float32),
    planes: wp.array2d(dtype=wp.vec3),
    fit: wp.array2d(dtype=wp.float32),
):
    """One thread a point, launched over (B, N): of the planes of all pairs, the one with most neighbours."""
    cloud, row = wp.tid()
    best = wp.vec3()
    most = float(-1.0)
    for turn in range(1, LocalPlane.PAIRED // 2 + 1):
        for first in range(LocalPlane.PAIRED):
            one = around[cloud, row, 1 + first] * scale
            other = around[cloud, row, 1 + (first + LocalPlane.PAIRED - turn) % LocalPlane.PAIRED] * scale
            across = wp.cross(one, other)
            normal = across / wp.max(wp.length(across), 1.0e-6)
            total = float(0.0)
            for place in range(LocalPlane.COUNTED):
                total += closeness(wp.dot(normal, around[cloud, row, 1 + place] * scale), within[cloud])
            share = total / float(LocalPlane.COUNTED) * wp.dot(normal, normal)
            if share > most:
                most = share
                best = normal
    planes[cloud, row] = best
    fit[cloud, row] = wp.max(most, 0.0)


@wp.func
def weight_of(away: wp.vec3, normal: wp.vec3, centre: wp.vec3, within: float):
    """Of a neighbour, by its distance from a plane."""
    weight = closeness(wp.dot(away - centre, normal), within)
    return weight * weight


@wp.func
def least_squares(
    around: wp.array3d(dtype=wp.vec3),
    scale: float,
    cloud: int,
    row: int,
    first: int,
    last: int,
    normal: wp.vec3,
    centre: wp.vec3,
    within: float,
):
    """Normal and place of the plane nearest to neighbours, weighted by their distances from a plane."""
    total = float(0.0)
    mean = wp.vec3()
    for place in range(first, last):
        away = around[cloud, row, place] * scale
        weight = weight_of(away, normal, centre, within)
        total += weight
        mean += weight * away
    mean = mean / total
    x = wp.vec3(1.0e-6, 0.0, 0.0)
    y = wp.vec3(0.0, 1.0e-6, 0.0)
    z = wp.vec3(0.0, 0.0, 1.0e-6)
    for place in range(first, last):
        away = around[cloud, row, place] * scale
        weight = weight_of(away, normal, centre, within)
        away = away - mean
        x += weight * away[0] * away
        y += weight * away[1] * away
        z += weight * away[2] * away
    power = adjugate_power(x, y, z, LocalPlane.SQUARED)
    column = wp.vec3(power[0, 0], power[1, 0], power[2, 0])
    largest = power[0, 0]
    if power[1, 1] > largest:
        largest = power[1, 1]
        column = wp.vec3(power[0, 1], power[1, 1], power[2, 1])
    if power[2, 2] > largest:
        column = wp.vec3(power[0, 2], power[1, 2], power[2, 2])
    return column / wp.max(wp.length(column), 1.0e-20), mean


@kernel
def refined_kernel(
    around: wp.array3d(dtype=wp.vec3),
    scale: float,
    within: wp.array(dtype=wp.float32),
    planes: wp.array2d(dtype=wp.vec3),
    fit: wp.array2d(dtype=wp.float32),
    normals: wp.array2d(dtype=wp.vec3),
    shift: wp.array2d(dtype=wp.vec3),
):
    """One thread a point, launched over (B, N): its plane where it fits best, and the way to it."""
    cloud, row = wp.tid()
    normal = planes[cloud, row]
    way = wp.vec3()
    if fit[cloud, row] >= LocalPlane.FEW:
        centre = wp.vec3()
        for _ in range(LocalPlane.REFINED):
            normal, centre = least_squares(
                around, scale, cloud, row, 0, around.shape[2], normal, centre, within[cloud]
            )
        farthest = LocalPlane.FARTHEST * within[cloud]
        way = wp.clamp(wp.dot(centre, normal), -farthest, farthest) / scale * normal
    elif fit[cloud, row] > LocalPlane.FEWEST:
        last = 1 + LocalPlane.COUNTED
        normal, _mean = least_squares(around, scale, cloud, row, 1, last, normal, way, LocalPlane.FAR)
    if wp.dot(normal, LocalPlane.UPWARDS) < 0.0:
        normal = -normal
    normals[cloud, row] = normal
    shift[cloud, row] = way


@warp_op(
    "pointproj::local_planes",
    outputs=lambda points, rows, unit: {
        "normals": (points.shape, points.dtype),
        "fit": ((*points.shape[:2], 1), points.dtype),
        "shift": (points.shape, points.dtype),
        "noise": ((len(points), 1, 1), points.dtype),
    },
)
def _search(
    launch,
    points: Tensor,
    rows: Tensor,
    unit: float,
    normals: Tensor,
    fit: Tensor,
    shift: Tensor,
    noise: Tensor,
) -> None:
    if points.dtype != torch.float32:
        plain = plain_local_planes(points, rows, unit)
        for result, values in zip((normals, fit, shift, noise), plain, strict=True):
            result.copy_(values)
        return
    around, scale = displacements(launch, points, rows), 1 / unit
    planes, shares = torch.empty_like(points), fit.squeeze(-1)
    within = points.new_full((len(points),), LocalPlane.EXACT)
    shape = points.shape[:2]
    launch(most_kernel, shape, around, scale, within, planes, shares, block_dim=64)
    counted = around[:, :, 1 : 1 + LocalPlane.COUNTED] * scale
    deviation = _noise(_dot(counted, planes[:, :, None]).abs())
    noise.copy_(unit * deviation)
    within = (LocalPlane.WITHIN * deviation).clamp(min=LocalPlane.EXACT).flatten()
    launch(most_kernel, shape, around, scale, within, planes, shares, block_dim=64)
    launch(refined_kernel, shape, around, scale, within, planes, shares, normals, shift, block_dim=64)
