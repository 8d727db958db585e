"""The operators of this folder in plain torch: the formulas that the kernels must match.

Exported programs use these. They store values for every pair of neighbours, or of points, in memory.
"""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import normalize

from pointproj.nn.rows import take_rows
from pointproj.nn.visibility.constants import (
    Cloud,
    Disk,
    Edge,
    ExactPlane,
    FacePlane,
    LocalPlane,
    Ray,
    SightLine,
)
from pointproj.nn.visibility.directions import shared_directions
from pointproj.nn.visibility.rays import PAIRS, directions, neighboring


def dot(one: Float[Tensor, "*pairs 3"], other: Float[Tensor, "*pairs 3"]) -> Float[Tensor, "*pairs 1"]:
    """Return scalar products, summed in the order of the kernels."""
    return sum(part * beside for part, beside in zip(one.split(1, -1), other.split(1, -1), strict=True))


def _of_neighbors(values: Float[Tensor, "b n c"], rows: Int[Tensor, "b n k"]) -> Float[Tensor, "b n k c"]:
    return take_rows(values, rows.clamp(min=0))


def _chosen(values: Float[Tensor, "b n m *c"], best: Int[Tensor, "b n"]) -> Float[Tensor, "b n *c"]:
    """Return one of m values for each point."""
    at = best.view(*best.shape, *[1] * (values.dim() - 2)).expand(-1, -1, 1, *values.shape[3:])
    return values.gather(2, at)[:, :, 0]  # take_along_dim fixes the number of points in a trace


def local_planes(points: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    around = (_of_neighbors(points, rows) - points[:, :, None]) / Cloud.UNIT  # itself first
    away = around[:, :, 1 : LocalPlane.NEIGHBORS + 1]
    paired = away[:, :, : LocalPlane.PAIRED]
    rolled = [paired.roll(shift, 2) for shift in range(1, paired.shape[2] // 2 + 1)]
    crossed = torch.linalg.cross(torch.cat([paired] * len(rolled), dim=2), torch.cat(rolled, dim=2))
    candidates = crossed / crossed.norm(dim=-1, keepdim=True).clamp(min=1e-6)
    height = dot(candidates[:, :, :, None], away[:, :, None])[..., 0].abs()  # (B, N, pairs, neighbours)

    def most(within: Tensor | float) -> tuple[Float[Tensor, "b n"], Int[Tensor, "b n"]]:
        """Return the share of the neighbours on the best plane, and the number of that plane."""
        on_plane = (1 / (1 + (height / within).square())).mean(-1) * candidates.square().sum(-1)
        return on_plane.max(-1)

    noise = noise_of(_chosen(height, most(LocalPlane.EXACT)[1]))
    within = (LocalPlane.WITHIN * noise).clamp(min=LocalPlane.EXACT)[..., None]
    fit, best = most(within)
    candidate, fit = _chosen(candidates, best), fit[..., None]
    normal, centre = candidate, torch.zeros_like(candidate)
    for _ in range(LocalPlane.REFINED):
        height = dot(around - centre[:, :, None], normal[:, :, None])
        normal, centre = _least_squares(around, (1 / (1 + (height / within).square())).square())
    of_all, _ = _least_squares(away, torch.ones_like(away[..., :1]))
    normal = torch.where(fit < LocalPlane.FEW, of_all, normal)
    normal = torch.where(fit <= LocalPlane.FEWEST, candidate, normal)
    upwards = sum(axis * part for axis, part in zip(normal.split(1, dim=-1), LocalPlane.UPWARDS, strict=True))
    return torch.where(upwards < 0, -normal, normal), fit, Cloud.UNIT * noise


def noise_of(height: Float[Tensor, "b n k"]) -> Float[Tensor, "b 1 1"]:
    """Return the standard deviation of a cloud's noise; 0 if half of the points have exact planes.

    Two neighbours span the plane of a point. The neighbours' distances from it are sorted; the noise is
    estimated from the one at :attr:`.LocalPlane.NOISE_RANK`, as a median over the cloud.
    """
    next_ones, middle = height.sort(dim=-1).values[..., LocalPlane.NOISE_RANK], height.shape[1] // 2
    return LocalPlane.NOISE_OF_RANK * next_ones.sort(dim=1).values.narrow(1, middle, 1)[..., None]


def _least_squares(
    away: Float[Tensor, "b n k 3"], weights: Float[Tensor, "b n k 1"]
) -> tuple[Float[Tensor, "b n 3"], Float[Tensor, "b n 3"]]:
    """Return unit normals of planes fitted to points by least squares, and the means of the points."""
    mean = (weights * away).sum(2) / weights.sum(2)
    centred = away - mean[:, :, None]
    return _least_axis((weights * centred).mT @ centred, LocalPlane.SQUARED), mean


def _least_axis(moments: Float[Tensor, "b n 3 3"], squared: int) -> Float[Tensor, "b n 3"]:
    """Return unit eigenvectors of the least eigenvalues of second moments; 1e-6 is added to all eigenvalues.

    They are columns of a high power of the inverse, here of the adjugate, which is squared ``squared`` times.
    torch's own function waits for the device.
    """
    x, y, z = (moments + 1e-6 * torch.eye(3, dtype=moments.dtype, device=moments.device)).unbind(-2)
    cross = torch.linalg.cross
    power = torch.stack([cross(y, z), cross(z, x), cross(x, y)], dim=-2)
    for _ in range(squared):
        power = power / power.abs().amax((-2, -1), keepdim=True).clamp(min=1e-20)
        power = power @ power
    return normalize(_chosen(power, power.diagonal(dim1=-2, dim2=-1).argmax(-1)), dim=-1, eps=1e-20)


def exact_planes(points: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    around = _of_neighbors(points, rows) - points[:, :, None]
    away = torch.where(rows[..., None] < 0, torch.nan, around)[:, :, 1:]
    own, most, voters = _of_pairs(away)
    directions = shared_directions(voters, same=ExactPlane.SAME, rounds=1, least=ExactPlane.VOTES)
    close = ((away @ directions.mT[:, None]).abs() < ExactPlane.ON_DIRECTION).sum(2)
    on_direction, best = torch.where(directions.any(-1)[:, None], close, 0).max(-1)
    normals = torch.where((on_direction > most)[..., None], take_rows(directions, best), own)
    most = torch.maximum(on_direction, most)
    its = _of_neighbors(own, rows)[:, :, 1:]
    close = (its @ away.mT).abs() < ExactPlane.ON_NEIGHBORS  # (B, N, planes, neighbours)
    contains = close.diagonal(dim1=2, dim2=3) & its.any(-1)
    shared, best = torch.where(contains, close.sum(-1), 0).max(-1)
    taken = (most == 0) & (shared >= ExactPlane.SHARED)
    normals = torch.where(taken[..., None], _chosen(its, best), normals)
    return normals, torch.where(taken, shared, most)[..., None] / away.shape[2]


def _of_pairs(away: Float[Tensor, "b n k 3"]) -> tuple[Tensor, Tensor, Tensor]:
    """Return normals (B, N, 3), numbers of neighbours on the planes (B, N), and voters' normals (B, N, 3)."""
    first, second = torch.triu_indices(*(min(ExactPlane.PAIRED, away.shape[2]),) * 2, 1, device=away.device)
    one, other = away[:, :, first], away[:, :, second]
    across, lengths = torch.linalg.cross(one, other), away.norm(dim=-1)
    height = _triangle_height(across, one, other)
    allowed = ExactPlane.ROUNDING * (1 + lengths[:, :, None] / height)
    on_plane = (normalize(across, dim=-1, eps=1e-20) @ away.mT).abs() < allowed.clamp(max=ExactPlane.FARTHEST)
    on_plane = on_plane & (height > ExactPlane.NARROWEST)
    most, best = on_plane.sum(-1).max(-1)
    on_plane = _chosen(on_plane, best)
    far = _chosen(away, torch.where(on_plane, lengths, 0).argmax(-1))
    across = torch.where(on_plane[..., None], torch.linalg.cross(far[:, :, None].expand_as(away), away), 0.0)
    widest = across.norm(dim=-1).argmax(-1)
    across, wide = _chosen(across, widest), _chosen(away, widest)
    confirmed = most >= ExactPlane.CONFIRMED
    normals = torch.where(confirmed[..., None], normalize(across, dim=-1, eps=1e-20), 0.0)
    votes = (most >= ExactPlane.SURE)[..., None] & (_triangle_height(across, far, wide) > ExactPlane.WIDE)
    return normals, torch.where(confirmed, most, 0), torch.where(votes, normals, 0.0)


def _triangle_height(across: Tensor, one: Tensor, other: Tensor) -> Float[Tensor, "*pairs 1"]:
    across, one, other = (side.norm(dim=-1, keepdim=True) for side in (across, one, other))
    return (across / torch.maximum(one, other).clamp(min=1e-9)).clamp(min=1e-12)


def propagate_planes(
    points: Tensor, rows: Tensor, sensors: Tensor, noise: Tensor, normals: Tensor
) -> tuple[Tensor, Tensor]:
    given, has_plane = normals, (noise > 0)[:, None, None] & normals.any(-1, keepdim=True)
    where = points, rows, sensors, noise[:, None, None, None].clamp(min=1e-12)
    normals, means, support = _propagate_over_faces(*where, normals)
    voters = torch.where((support > FacePlane.VOTING) & has_plane, normals, 0.0)
    settings = {"same": FacePlane.SAME_DIRECTION, "rounds": FacePlane.MEANS, "least": FacePlane.VOTES}
    chosen = _best_directions(*where, normals, shared_directions(voters, **settings))
    normals, means, _ = _propagate_over_faces(*where, chosen)
    for _ in range(FacePlane.WHOLE):
        normals, means = _fitted_to_whole(points, sensors, where[-1][..., 0], normals, means)
    return torch.where(has_plane, normals, given), torch.where(has_plane, means, points)


def _propagate_over_faces(
    points: Tensor, rows: Tensor, sensors: Tensor, noise: Tensor, normals: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return normals, means and support of planes that are fitted to the neighbours, then propagated."""
    around, seen_from = (_of_neighbors(one, rows) for one in (points, sensors))

    def usable(normal: Tensor) -> Tensor:
        opposite = dot(sensors[:, :, None], normal) * dot(seen_from, normal) < 0
        return (rows >= 0)[..., None] & ~opposite

    means = points
    for _ in range(FacePlane.REFITTED):
        away, own = around - means[:, :, None], normals[:, :, None]
        weights = _close(dot(away, own) / (FacePlane.WITHIN * noise)) * usable(own)
        normals, means, covariances, _ = _fitted(weights, away, 0.0, normals, means)
    for number in range(FacePlane.ROUNDS):
        fitted = torch.cat([normals, means, covariances.flatten(2)], dim=-1)
        its, centres, within_planes = _of_neighbors(fitted, rows).split((3, 3, 9), dim=-1)
        own, feet = normals[:, :, None], around - dot(around - centres, its) * its
        between = feet - feet[:, :, :1]
        across = torch.linalg.cross(its, own.expand_as(its)).norm(dim=-1, keepdim=True)
        weights = _close(across / FacePlane.BENT) * usable(own)
        for normal in (own, its):
            weights = weights * _close(dot(between, normal) / (FacePlane.AGREEING * noise))
        given_moments = centres - means[:, :, None], within_planes.unflatten(-1, (3, 3))
        normals, means, covariances, support = _fitted(weights, *given_moments, normals, means)
        if number >= FacePlane.ROUNDS - FacePlane.LAST_ROUNDS:
            fitted = torch.cat([normals, means, covariances.flatten(2), support], dim=-1)
            its, centres, _, of_its = _of_neighbors(fitted, rows).split((3, 3, 9, 1), dim=-1)
            near = _close(dot(around[:, :, :1] - centres, its) / (FacePlane.NEAR * noise))
            best = rows.gather(2, (of_its * near * usable(its)).argmax(2))
            normals, means, covariances, _ = take_rows(fitted, best)[:, :, 0].split((3, 3, 9, 1), dim=-1)
            covariances = covariances.unflatten(-1, (3, 3))
    return normals, means, support


def _best_directions(
    points: Tensor, rows: Tensor, sensors: Tensor, noise: Tensor, normals: Tensor, directions: Tensor
) -> Tensor:
    """Choose for each point its own normal or a direction of the cloud, by the neighbours on such a plane."""
    around, seen_from = (_of_neighbors(one, rows) for one in (points, sensors))
    tried = directions[:, None].expand(-1, points.shape[1], -1, -1)
    tried = torch.cat([normals[:, :, None], tried], dim=2)  # (B, N, 1 + d, 3)
    heights = tried @ (around - points[:, :, None]).mT  # (B, N, 1 + d, k)
    opposite = dot(tried, sensors[:, :, None]) * (tried @ seen_from.mT) < 0
    usable = (rows >= 0)[:, :, None] & ~opposite
    moved = torch.zeros_like(heights[..., :1])
    for _ in range(FacePlane.MOVED + 1):
        weights = _close((heights - moved) / (FacePlane.ON_SHARED * noise)) * usable
        total = weights.sum(-1, keepdim=True)
        moved = (weights * heights).sum(-1, keepdim=True) / total.clamp(min=1e-6)
    score = (total * _close(moved / (FacePlane.NEAR_SHARED * noise)))[..., 0] * tried.any(-1)
    score = torch.cat([score[..., :1], FacePlane.PREFERRED * score[..., 1:]], dim=-1)  # own one first
    return _chosen(tried, score.argmax(2))


def _fitted_to_whole(
    points: Tensor, sensors: Tensor, noise: Tensor, normals: Tensor, means: Tensor
) -> tuple[Tensor, Tensor]:
    """Return normals and means of planes, each fitted to all samples whose planes agree with it."""
    feet = points - dot(points - means, normals) * normals
    heights = normals @ feet.mT - dot(normals, feet)
    same = (1 - (1 - (normals @ normals.mT).square()) / FacePlane.SAME**2).clamp(0, 1)
    towards = sensors @ normals.mT
    opposite = towards.diagonal(dim1=1, dim2=2)[..., None] * towards.mT < 0
    weights = _close(heights / (FacePlane.AGREEING * noise)) * same.square() * ~opposite
    total = weights.sum(-1, keepdim=True)
    first = weights @ points / total
    products = (points[..., None] * points[..., None, :]).flatten(2)
    second = (weights @ products / total).unflatten(-1, (3, 3))
    covariances = second - first[..., None] * first[..., None, :]
    enough, axes = total > FacePlane.ENOUGH, _axes(covariances, normals)
    return torch.where(enough, axes, normals), torch.where(enough, first, means)


def _close(distance: Tensor) -> Tensor:
    return (1 + distance.square()).reciprocal().square()


def _fitted(
    weights: Tensor, away: Tensor, within_planes: Tensor | float, normals: Tensor, means: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return normals, means and covariances of weighted samples or planes near points, and mean weights."""
    total = weights.sum(2).clamp(min=1e-6)
    first = (weights * away).sum(2) / total
    second = (weights[..., None] * (away[..., None] * away[..., None, :] + within_planes)).sum(2)
    covariances = second / total[..., None] - first[..., None] * first[..., None, :]
    return _axes(covariances, normals), means + first, covariances, total / weights.shape[2]


def _axes(covariances: Tensor, normals: Tensor) -> Tensor:
    """Return unit eigenvectors of the least eigenvalues, with the signs of the normals."""
    axes = _least_axis(1e-6 / FacePlane.FLAT * covariances, FacePlane.SQUARED)
    return torch.where(dot(axes, normals) < 0, -axes, axes)


def nearest_edges(points: Tensor, rows: Tensor, normals: Tensor, radii: Tensor) -> Tensor:
    away = (_of_neighbors(points, rows) - points[:, :, None])[:, :, 1:]
    others = torch.where(rows[..., None] < 0, 0.0, _of_neighbors(normals, rows))[:, :, 1:]
    own, radii = normals[:, :, None], radii[..., None, None]
    along = others - dot(others, own) * own
    slope = along.norm(dim=-1, keepdim=True)
    towards = dot(others, away) / slope.clamp(min=Edge.STEEPEST)
    along = along / slope.clamp(min=Edge.STEEPEST) * torch.where(towards < 0, -1.0, 1.0)
    distance, height = towards.abs(), dot(away, own)
    aside = away - height * own
    aside = aside - dot(along, aside) * along
    near = Edge.NEAR * radii
    gap = (height.abs() < near) & (aside.norm(dim=-1, keepdim=True) < near)
    on_plane = height.mT.abs() < Edge.COPLANAR
    beyond = ((along @ away.mT > distance + Edge.COPLANAR) & on_plane).any(-1, keepdim=True)
    ends = (slope > Edge.STEEPEST) & (gap | ~beyond) & (distance < radii) & own.any(-1, keepdim=True)
    lines, edges = torch.cat([along, distance], dim=-1), []
    for _ in range(Edge.COUNT):
        nearest = _chosen(lines, torch.where(ends, distance, torch.inf)[..., 0].argmin(2))
        edges.append(torch.where(ends.any(2), nearest, 0.0))
        ends = ends & (dot(along, edges[-1][:, :, None, :3]) <= Edge.APART)
    return torch.stack(edges, dim=2)


def list_disks(disks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return empty cells, since :func:`soft_visibility` here tries all disks."""
    nothing = torch.zeros(1, dtype=torch.int32, device=disks.device)
    return disks.new_zeros(disks.shape[0], 7), nothing, nothing.clone()


def soft_visibility(
    points: Tensor, frames: Tensor, disks: Tensor, edges: Tensor, start: Tensor, entries: Tensor
) -> Tensor:
    numbers = disks[:, None].unbind(-1)  # (B, 1, N) each
    centre, squared_radii, normal = numbers[:3], numbers[3], numbers[4:7]
    towards = edges[:, None].unbind(-1)  # (B, 1, N, edges) each
    away = [place[..., None] - middle for place, middle in zip(points.unbind(-1), centre, strict=True)]
    height = _along(normal, away)
    off_plane = height.abs() > Disk.IN_PLANE
    escaped = []  # (B, Q, 2) for each direction
    for direction in directions.tolist():
        slope = _along(normal, direction)
        distance = height / torch.where(slope == 0, 1.0, slope)
        met = [one - distance * along for one, along in zip(away, direction, strict=True)]
        squared = _along(met, met)
        in_all = (_along(towards[:3], [place[..., None] for place in met]) <= towards[3]).all(-1)
        ahead = off_plane & (height * slope < 0) & in_all
        sizes = Disk.INNER**2 * squared_radii, squared_radii
        blocked = ((ahead & (squared < size)).any(-1) for size in sizes)
        escaped.append(torch.stack([1 - one.to(points.dtype) for one in blocked], dim=-1))
    both = [escaped[one] * escaped[other] for one, other in np.argwhere(np.triu(neighboring)).tolist()]
    result = torch.stack([sum(escaped) / Ray.COUNT, sum(both) / PAIRS], dim=-1).flatten(-2)
    return torch.where(points.isfinite().all(-1, keepdim=True), result, torch.nan)


def _along(one: Sequence[Tensor], other: Sequence[Tensor | float]) -> Tensor:
    """Return a scalar product, summed in the order of the kernels."""
    return one[0] * other[0] + one[1] * other[1] + one[2] * other[2]


def nearest_sight_lines(points: Tensor, samples: Tensor, sensors: Tensor, beyond: Tensor) -> Tensor:
    away = points[:, :, None] - samples[:, None]
    ahead = (away * sensors[:, None]).sum(-1)
    squared = (away.square().sum(-1) - ahead.square()).clamp(min=0)
    beyond = beyond[:, None, None]
    begun = (ahead > least for least in (0, beyond))
    nearest = [torch.where(one & (beyond > 0), squared, SightLine.NONE**2).amin(-1).sqrt() for one in begun]
    return torch.where(points.isfinite().all(-1, keepdim=True), torch.stack(nearest, dim=-1), torch.nan)


FORMS = {
    form.__name__: form
    for form in (
        *(local_planes, exact_planes, propagate_planes, nearest_edges),
        *(list_disks, soft_visibility, nearest_sight_lines),
    )
}
"""The plain forms, by the names of the operators in ``torch.ops.pointproj``."""
