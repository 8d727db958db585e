"""Local planes: planes of flat pieces of a surface, also of thin solids. Warp kernels."""

from typing import NamedTuple

import torch
import warp as wp
from jaxtyping import Float, Int
from torch import Tensor

from pointproj.nn.visibility import plain
from pointproj.nn.visibility.constants import Cloud, LocalPlane
from pointproj.nn.visibility.kernels import (
    Around,
    Numbers,
    Scales,
    Vectors,
    adjugate_power,
    displacements,
    kernel,
)
from pointproj.ops.bridge.warp_op import warp_op


class Planes(NamedTuple):
    """The local planes of clouds' points, without gradients."""

    normals: Float[Tensor, "b n 3"]  # 0 where a point has no three neighbours that span a plane
    fit: Float[Tensor, "b n 1"]  # share of the neighbours on the plane, from 0 to 1
    noise: Float[Tensor, "b 1 1"]  # standard deviation of the cloud's noise, estimated


def local_planes(points: Float[Tensor, "b n 3"], rows: Int[Tensor, "b n k"]) -> Planes:
    """Find for each point the plane that most of its neighbours lie on; normals have either sign.

    Every pair of near neighbours spans a plane with the point; all these planes are tried, as in an
    exhaustive RANSAC. If none has many neighbours, the surface is curved, and the plane is that of least
    squares. In a cloud with noise, most neighbours are off even the best plane, and their distances give an
    estimate of the noise. Then planes are searched for again, with neighbours that are within the noise, and
    each is fitted to its neighbours by least squares.

    ``rows`` are those of the k nearest points, at least 16, the point itself first.
    """
    return Planes(*_search(points.detach().contiguous(), rows.contiguous()))


@wp.func
def closeness(distance: float, within: float):
    """Return the weight of a neighbour at a distance from a plane: 1 at 0, 1 / 2 at ``within``."""
    off = distance / within
    return 1.0 / (1.0 + off * off)


@kernel
def most_kernel(around: Around, within: Scales, planes: Vectors, fit: Numbers):
    """One thread a point, launched over (B, N): the plane with most neighbours among those of all pairs."""
    cloud, row = wp.tid()
    best = wp.vec3()
    most = float(-1.0)
    for shift in range(1, LocalPlane.PAIRED // 2 + 1):
        for first in range(LocalPlane.PAIRED):
            second = (first + LocalPlane.PAIRED - shift) % LocalPlane.PAIRED
            across = wp.cross(around[cloud, row, 1 + first], around[cloud, row, 1 + second])
            normal = across / wp.max(wp.length(across), 1.0e-6)
            total = float(0.0)
            for place in range(LocalPlane.NEIGHBORS):
                total += closeness(wp.dot(normal, around[cloud, row, 1 + place]), within[cloud])
            share = total / float(LocalPlane.NEIGHBORS) * wp.dot(normal, normal)
            if share > most:
                most = share
                best = normal
    planes[cloud, row] = best
    fit[cloud, row] = wp.max(most, 0.0)


@wp.func
def weight_of(away: wp.vec3, normal: wp.vec3, centre: wp.vec3, within: float):
    """Return the squared weight of a neighbour, by its distance from a plane."""
    weight = closeness(wp.dot(away - centre, normal), within)
    return weight * weight


@kernel
def refined_kernel(around: Around, within: Scales, planes: Vectors, fit: Numbers, normals: Vectors):
    """One thread a point, launched over (B, N): the normal of its plane, refined by least squares.

    Neighbours are weighted by their distances from the previous plane; on a curved surface, equally.
    """
    cloud, row = wp.tid()
    normal = planes[cloud, row]
    curved = fit[cloud, row] < LocalPlane.FEW
    first = wp.where(curved, 1, 0)
    last = wp.where(curved, 1 + LocalPlane.NEIGHBORS, around.shape[2])
    rounds = wp.where(curved, 1, LocalPlane.REFINED)
    near = wp.where(curved, LocalPlane.FAR, within[cloud])
    if fit[cloud, row] > LocalPlane.FEWEST:
        centre = wp.vec3()
        for _ in range(rounds):
            total = float(0.0)
            mean = wp.vec3()
            for place in range(first, last):
                away = around[cloud, row, place]
                weight = weight_of(away, normal, centre, near)
                total += weight
                mean += weight * away
            mean = mean / total
            x = wp.vec3(1.0e-6, 0.0, 0.0)
            y = wp.vec3(0.0, 1.0e-6, 0.0)
            z = wp.vec3(0.0, 0.0, 1.0e-6)
            for place in range(first, last):
                away = around[cloud, row, place]
                weight = weight_of(away, normal, centre, near)
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
            normal = column / wp.max(wp.length(column), 1.0e-20)
            centre = mean
    if wp.dot(normal, LocalPlane.UPWARDS) < 0.0:
        normal = -normal
    normals[cloud, row] = normal


@warp_op(
    "pointproj::local_planes",
    outputs=lambda points, rows: {
        "normals": (points.shape, points.dtype),
        "fit": ((*points.shape[:2], 1), points.dtype),
        "noise": ((len(points), 1, 1), points.dtype),
    },
)
def _search(launch, points: Tensor, rows: Tensor, normals: Tensor, fit: Tensor, noise: Tensor) -> None:
    if points.dtype != torch.float32:
        for result, values in zip((normals, fit, noise), plain.local_planes(points, rows), strict=True):
            result.copy_(values)
        return
    around = displacements(launch, points, rows).mul_(1 / Cloud.UNIT)
    planes, shares = torch.empty_like(points), fit.squeeze(-1)
    within = points.new_full((len(points),), LocalPlane.EXACT)
    shape = points.shape[:2]
    launch(most_kernel, shape, around, within, planes, shares, block_dim=64)
    near = around[:, :, 1 : 1 + LocalPlane.NEIGHBORS]
    deviation = plain.noise_of(plain.dot(near, planes[:, :, None])[..., 0].abs())
    noise.copy_(Cloud.UNIT * deviation)
    within = (LocalPlane.WITHIN * deviation).clamp(min=LocalPlane.EXACT).flatten()
    launch(most_kernel, shape, around, within, planes, shares, block_dim=64)
    launch(refined_kernel, shape, around, within, planes, shares, normals, block_dim=64)
