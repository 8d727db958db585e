"""Planes of clouds with noise, each fitted to as much of a flat face as there is: Warp kernels.

The neighbours of a point tell its plane to some tenths of the noise. A face has hundreds of samples, which
tell it far better. So planes are spread: each is fitted anew to what its neighbours' planes were fitted to,
if they agree with it, again and again; and then to all samples of the cloud that are on it. Narrow faces tell
their direction badly, but it is often one that wide faces have.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pointproj.nn.rows import take_rows
from pointproj.nn.visibility.constants import FacePlane
from pointproj.nn.visibility.directions import shared_directions
from pointproj.nn.visibility.face_kernels import (
    Fitted,
    Noisy,
    fit_kernel,
    spread_kernel,
    take_kernel,
    turn_kernel,
    whole_kernel,
)
from pointproj.nn.visibility.local_planes import least_axis
from pointproj.ops.bridge.warp_op import warp_op


def spread_planes(
    points: Float[Tensor, "b n 3"],
    rows: Int[Tensor, "b n k"],
    normals: Float[Tensor, "b n 3"],
    noise: Float[Tensor, "b 1 1"],
    sensors: Float[Tensor, "b n 3"] | None = None,
) -> tuple[Float[Tensor, "b n 3"], Float[Tensor, "b n 3"]]:
    """Improve the planes of points of clouds with noise: normals of either sign, and ways onto the planes.

    1. Each plane is moved to where the squared distances of the neighbours on it are least.
    2. Each plane is fitted anew to all that its neighbours' planes were fitted to, as far as these agree with
       it in place and direction; again and again, so that what a sample tells spreads over its face, and not
       over edges or to the other side of a board.
    3. In the last rounds, each point takes the plane of the neighbour that has the most planes around it that
       agree with it, of those that pass the point within the noise. So what lies at an edge or on a narrow
       side gets the plane of a face.
    4. Of the directions that many planes of the cloud share, a point takes the one in which a plane passes
       most neighbours within the noise, if these are nearly as many as on its own plane. Steps 1 to 3 are
       repeated.
    5. Each plane is fitted to all samples whose own planes agree with it, if there are enough of them.

    ``rows`` are those of the nearest points, the point itself first. ``normals`` are those of first planes, 0
    for a point that has none. ``noise`` is the standard deviation of each cloud's; where it is 0, everything
    stays. ``sensors`` are unit vectors to those that saw the points, 0 where not known. The results have no
    gradients.
    """
    where = points.detach().float().contiguous()
    sensors = torch.zeros_like(where) if sensors is None else sensors
    inputs = (tensor.detach().float().contiguous() for tensor in (sensors, noise.flatten(), normals))
    normals, means = _spread(where, rows.contiguous(), *inputs)
    off = ((means - where) * normals).sum(-1, keepdim=True)
    farthest = FacePlane.FARTHEST * noise
    off = torch.maximum(torch.minimum(off, farthest), -farthest)
    return normals.to(points.dtype), (off * normals).to(points.dtype)


@warp_op(
    "pointproj::spread_planes",
    outputs=lambda points, **_: dict.fromkeys(("fitted", "means"), (points.shape, torch.float32)),
)
def _spread(
    launch,
    points: Tensor,
    rows: Tensor,
    sensors: Tensor,
    noise: Tensor,
    normals: Tensor,
    *,
    fitted: Tensor,
    means: Tensor,
) -> None:
    clouds = Noisy(points, rows, sensors, noise)
    shape = points.shape[:2]
    support = points.new_empty(shape)
    now = Fitted(fitted, means, points.new_empty(*shape, 2, 3))
    other = Fitted(*(torch.empty_like(tensor) for tensor in now))
    _spread_over_faces(launch, clouds, normals, now, other, support)
    votes = (support > FacePlane.VOTING) & (noise > 0)[:, None]
    voters = torch.where(votes[..., None], now.normals, 0.0)
    directions = shared_directions(
        voters, same=FacePlane.SAME_DIRECTION, rounds=FacePlane.MEANS, least=FacePlane.VOTES
    )
    turned = torch.empty_like(points)
    launch(turn_kernel, shape, clouds, now.normals, directions, turned, block_dim=64)
    _spread_over_faces(launch, clouds, turned, now, other, support)
    for _ in range(FacePlane.WHOLE):
        launch(whole_kernel, shape, clouds, now, other, block_dim=64)
        now, other = other, now
    # After an even number of these launches, the last planes are in the outputs.


def _spread_over_faces(
    launch, clouds: Noisy, normals: Tensor, now: Fitted, other: Fitted, support: Tensor
) -> None:
    """Fit planes with these normals to the neighbours, and spread them; the result is in ``now``."""
    shape = clouds.points.shape[:2]
    launch(fit_kernel, shape, clouds, normals, now, block_dim=64)
    for number in range(FacePlane.ROUNDS):
        launch(spread_kernel, shape, clouds, now, other, support, block_dim=64)
        now, other = other, now
        if number >= FacePlane.ROUNDS - FacePlane.LAST_ROUNDS:
            launch(take_kernel, shape, clouds, now, support, other, block_dim=64)
            now, other = other, now
    # Rounds and last rounds are together an even number of swaps.


def plain_spread_planes(
    points: Tensor, rows: Tensor, sensors: Tensor, noise: Tensor, normals: Tensor
) -> tuple[Tensor, Tensor]:
    """The same as operators of torch: what the kernels are held to."""
    given, has_plane = normals, (noise > 0)[:, None, None] & normals.any(-1, keepdim=True)
    where = points, rows, sensors, noise[:, None, None, None].clamp(min=1e-12)
    normals, means, support = _plain_spread_over_faces(*where, normals)
    voters = torch.where((support > FacePlane.VOTING) & has_plane, normals, 0.0)
    settings = {"same": FacePlane.SAME_DIRECTION, "rounds": FacePlane.MEANS, "least": FacePlane.VOTES}
    turned = _plain_turned(*where, normals, shared_directions(voters, **settings))
    normals, means, _ = _plain_spread_over_faces(*where, turned)
    for _ in range(FacePlane.WHOLE):
        normals, means = _plain_whole(points, sensors, where[-1][..., 0], normals, means)
    return torch.where(has_plane, normals, given), torch.where(has_plane, means, points)


def _plain_spread_over_faces(
    points: Tensor, rows: Tensor, sensors: Tensor, noise: Tensor, normals: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Normals, means and support of planes, fitted to the neighbours and spread."""
    around, seen_from = (take_rows(one, rows.clamp(min=0)) for one in (points, sensors))

    def counted(normal: Tensor) -> Tensor:
        opposite = _dot(sensors[:, :, None], normal) * _dot(seen_from, normal) < 0
        return (rows >= 0)[..., None] & ~opposite

    means = points
    for _ in range(FacePlane.REFITTED):
        away, own = around - means[:, :, None], normals[:, :, None]
        weights = _close(_dot(away, own) / (FacePlane.WITHIN * noise)) * counted(own)
        normals, means, covariances, _ = _plain_fit(weights, away, 0.0, normals, means)
    for number in range(FacePlane.ROUNDS):
        fitted = torch.cat([normals, means, covariances.flatten(2)], dim=-1)
        its, centres, spreads = take_rows(fitted, rows.clamp(min=0)).split((3, 3, 9), dim=-1)
        own, feet = normals[:, :, None], around - _dot(around - centres, its) * its
        between = feet - feet[:, :, :1]
        across = torch.linalg.cross(its, own.expand_as(its)).norm(dim=-1, keepdim=True)
        weights = _close(across / FacePlane.BENT) * counted(own)
        for normal in (own, its):
            weights = weights * _close(_dot(between, normal) / (FacePlane.AGREEING * noise))
        given_moments = centres - means[:, :, None], spreads.unflatten(-1, (3, 3))
        normals, means, covariances, support = _plain_fit(weights, *given_moments, normals, means)
        if number >= FacePlane.ROUNDS - FacePlane.LAST_ROUNDS:
            fitted = torch.cat([normals, means, covariances.flatten(2), support], dim=-1)
            its, centres, _, of_its = take_rows(fitted, rows.clamp(min=0)).split((3, 3, 9, 1), dim=-1)
            score = (
                of_its
                * _close(_dot(around[:, :, :1] - centres, its) / (FacePlane.NEAR * noise))
                * counted(its)
            )
            best = rows.gather(2, score.argmax(2))
            normals, means, covariances, _ = take_rows(fitted, best)[:, :, 0].split((3, 3, 9, 1), dim=-1)
            covariances = covariances.unflatten(-1, (3, 3))
    return normals, means, support


def _plain_turned(
    points: Tensor,
    rows: Tensor,
    sensors: Tensor,
    noise: Tensor,
    normals: Tensor,
    directions: Float[Tensor, "b d 3"],
) -> Tensor:
    """Of the points' own normals and the directions of the cloud, those with most neighbours on a plane."""
    around, seen_from = (take_rows(one, rows.clamp(min=0)) for one in (points, sensors))
    tried = directions[:, None].expand(-1, points.shape[1], -1, -1)
    tried = torch.cat([normals[:, :, None], tried], dim=2)  # (B, N, 1 + d, 3)
    heights = tried @ (around - points[:, :, None]).mT  # (B, N, 1 + d, k)
    opposite = _dot(tried, sensors[:, :, None]) * (tried @ seen_from.mT) < 0
    counted = (rows >= 0)[:, :, None] & ~opposite
    moved = torch.zeros_like(heights[..., :1])
    for _ in range(FacePlane.MOVED + 1):
        weights = _close((heights - moved) / (FacePlane.ON_TURNED * noise)) * counted
        total = weights.sum(-1, keepdim=True)
        moved = (weights * heights).sum(-1, keepdim=True) / total.clamp(min=1e-6)
    score = (total * _close(moved / (FacePlane.NEAR_TURNED * noise)))[..., 0] * tried.any(-1)
    score = torch.cat([score[..., :1], FacePlane.PREFERRED * score[..., 1:]], dim=-1)  # first the point's own
    return tried.gather(2, score.argmax(2)[..., None, None].expand(-1, -1, 1, 3))[:, :, 0]


def _plain_whole(
    points: Tensor, sensors: Tensor, noise: Tensor, normals: Tensor, means: Tensor
) -> tuple[Tensor, Tensor]:
    """Normals and means of the planes that are nearest to all samples whose planes agree."""
    feet = points - _dot(points - means, normals) * normals
    heights = normals @ feet.mT - _dot(normals, feet)
    same = (1 - (1 - (normals @ normals.mT).square()) / FacePlane.SAME**2).clamp(0, 1)
    towards = sensors @ normals.mT
    opposite = towards.diagonal(dim1=1, dim2=2)[..., None] * towards.mT < 0
    weights = _close(heights / (FacePlane.AGREEING * noise)) * same.square()
    weights = weights * ~opposite
    total = weights.sum(-1, keepdim=True)
    first = weights @ points / total
    products = (points[..., None] * points[..., None, :]).flatten(2)
    second = (weights @ products / total).unflatten(-1, (3, 3))
    covariances = second - first[..., None] * first[..., None, :]
    enough, axes = total > FacePlane.ENOUGH, _plain_axes(covariances, normals)
    return torch.where(enough, axes, normals), torch.where(enough, first, means)


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
    return _plain_axes(covariances, normals), means + first, covariances, total / weights.shape[2]


def _plain_axes(covariances: Tensor, normals: Tensor) -> Tensor:
    """Unit eigenvectors of the least eigenvalues, on the sides of the normals."""
    axes = least_axis(1e-6 / FacePlane.FLAT * covariances, FacePlane.SQUARED)
    return torch.where(_dot(axes, normals) < 0, -axes, axes)
