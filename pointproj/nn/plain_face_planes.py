"""Planes that are spread over faces, as operators of torch: what the kernels are held to."""

import torch
from torch import Tensor

from pointproj.nn import face_planes as like
from pointproj.nn.attention import take_rows
from pointproj.nn.planes import least_axis


def plain_spread_planes(
    points: Tensor, rows: Tensor, sensors: Tensor, noise: Tensor, normals: Tensor
) -> tuple[Tensor, Tensor]:
    """The same as operators of torch: what the kernels are held to."""
    given, has_plane = normals, (noise > 0)[:, None, None] & normals.any(-1, keepdim=True)
    around, seen_from = (take_rows(one, rows.clamp(min=0)) for one in (points, sensors))
    noise = noise[:, None, None, None].clamp(min=1e-12)

    def counted(normal: Tensor) -> Tensor:
        opposite = _dot(sensors[:, :, None], normal) * _dot(seen_from, normal) < 0
        return (rows >= 0)[..., None] & ~opposite

    means = points
    for _ in range(like.REFITTED):
        away, own = around - means[:, :, None], normals[:, :, None]
        weights = _close(_dot(away, own) / (like.WITHIN * noise)) * counted(own)
        normals, means, covariances, _ = _plain_fit(weights, away, 0.0, normals, means)
    for number in range(like.ROUNDS):
        fitted = torch.cat([normals, means, covariances.flatten(2)], dim=-1)
        its, centres, spreads = take_rows(fitted, rows.clamp(min=0)).split((3, 3, 9), dim=-1)
        own, feet = normals[:, :, None], around - _dot(around - centres, its) * its
        between = feet - feet[:, :, :1]
        across = torch.linalg.cross(its, own.expand_as(its)).norm(dim=-1, keepdim=True)
        weights = _close(across / like.TURNED) * counted(own)
        for normal in (own, its):
            weights = weights * _close(_dot(between, normal) / (like.AGREEING * noise))
        given_moments = centres - means[:, :, None], spreads.unflatten(-1, (3, 3))
        normals, means, covariances, support = _plain_fit(weights, *given_moments, normals, means)
        if number >= like.ROUNDS - like.LAST_ROUNDS:
            fitted = torch.cat([normals, means, covariances.flatten(2), support], dim=-1)
            its, centres, _, of_its = take_rows(fitted, rows.clamp(min=0)).split((3, 3, 9, 1), dim=-1)
            score = (
                of_its * _close(_dot(around[:, :, :1] - centres, its) / (like.NEAR * noise)) * counted(its)
            )
            best = rows.gather(2, score.argmax(2))
            normals, means, covariances, _ = take_rows(fitted, best)[:, :, 0].split((3, 3, 9, 1), dim=-1)
            covariances = covariances.unflatten(-1, (3, 3))
    for _ in range(like.WHOLE):
        normals, means = _plain_whole(points, sensors, noise[..., 0], normals, means)
    return torch.where(has_plane, normals, given), torch.where(has_plane, means, points)


def _plain_whole(
    points: Tensor, sensors: Tensor, noise: Tensor, normals: Tensor, means: Tensor
) -> tuple[Tensor, Tensor]:
    """Normals and means of the planes that are nearest to all samples whose planes agree."""
    feet = points - _dot(points - means, normals) * normals
    heights = normals @ feet.mT - _dot(normals, feet)
    same = (1 - (1 - (normals @ normals.mT).square()) / like.SAME**2).clamp(0, 1)
    towards = sensors @ normals.mT
    opposite = towards.diagonal(dim1=1, dim2=2)[..., None] * towards.mT < 0
    weights = _close(heights / (like.AGREEING * noise)) * same.square()
    weights = weights * ~opposite
    total = weights.sum(-1, keepdim=True)
    first = weights @ points / total
    products = (points[..., None] * points[..., None, :]).flatten(2)
    second = (weights @ products / total).unflatten(-1, (3, 3))
    covariances = second - first[..., None] * first[..., None, :]
    axes = least_axis(1e-6 / like.FLAT * covariances, like.SQUARED)
    axes = torch.where(_dot(axes, normals) < 0, -axes, axes)
    return torch.where(total > like.ENOUGH, axes, normals), torch.where(total > like.ENOUGH, first, means)


def _dot(one: Tensor, other: Tensor) -> Tensor:
    return (one * other).sum(-1, keepdim=True)


def _close(distance: Tensor) -> Tensor:
    return (1 + distance.square()).reciprocal().square()


def _plain_fit(
    weights: Tensor, away: Tensor, spreads: Tensor | float, normals: Tensor, means: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normals, means and covariances of weighted samples or planes around points; and the mean weight."""
    total = weights.sum(2).clamp(min=1e-6)
    first = (weights * away).sum(2) / total
    second = (weights[..., None] * (away[..., None] * away[..., None, :] + spreads)).sum(2)
    covariances = second / total[..., None] - first[..., None] * first[..., None, :]
    axes = least_axis(1e-6 / like.FLAT * covariances, like.SQUARED)
    axes = torch.where(_dot(axes, normals) < 0, -axes, axes)
    return axes, means + first, covariances, total / weights.shape[2]
