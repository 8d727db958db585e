"""Face planes, for clouds with noise: planes fitted to whole flat faces. Warp kernels.

The neighbours of a point determine its plane only to some tenths of the noise. A face has hundreds of
samples, which determine it much better. So planes are propagated: each plane is fitted again to all samples
that agreeing planes of its neighbours were fitted to, several times. Finally each is fitted to all samples of
the cloud that are on it. The samples of a narrow face determine its direction badly, but it is often the
direction of wide faces too.
"""

from typing import Annotated, NamedTuple

import torch
import warp as wp
from jaxtyping import Float, Int
from torch import Tensor

from pointproj.nn.visibility.constants import FacePlane
from pointproj.nn.visibility.directions import shared_directions
from pointproj.nn.visibility.kernels import Numbers, Vectors, adjugate_power, for_kernels, kernel
from pointproj.ops.bridge.warp_launch import record_struct
from pointproj.ops.bridge.warp_op import warp_op

Products = wp.types.matrix(shape=(2, 3), dtype=wp.float32)


class Fitted(NamedTuple):
    """Planes of clouds of n points, with mean and covariance of the samples that each was fitted to."""

    normals: Annotated[Tensor, wp.vec3, 2]  # (b, n, 3)
    means: Annotated[Tensor, wp.vec3, 2]  # (b, n, 3)
    covariances: Annotated[Tensor, Products, 2]  # (b, n, 2, 3): xx, yy, zz; yz, zx, xy


class Noisy(NamedTuple):
    """Clouds with noise, with the rows of each point's k nearest neighbours."""

    points: Annotated[Tensor, wp.vec3, 2]  # (b, n, 3)
    rows: Annotated[Tensor, wp.int64, 3]  # (b, n, k)
    sensors: Annotated[Tensor, wp.vec3, 2]  # (b, n, 3)
    noise: Annotated[Tensor, wp.float32, 1]  # (b,)


FittedStruct, NoisyStruct = record_struct(Fitted), record_struct(Noisy)


def propagate_planes(
    points: Float[Tensor, "b n 3"],
    rows: Int[Tensor, "b n k"],
    normals: Float[Tensor, "b n 3"],
    noise: Float[Tensor, "b 1 1"],
    sensors: Float[Tensor, "b n 3"] | None = None,
) -> tuple[Float[Tensor, "b n 3"], Float[Tensor, "b n 3"]]:
    """Improve the planes of points in clouds with noise; return normals and shifts of the points onto them.

    1. Each plane is fitted by least squares to the neighbours on it.
    2. Each plane is fitted to all samples that its neighbours' planes were fitted to, if these planes agree
       with it in place and direction. Repeated, this propagates the plane over its face, but not over edges.
    3. In the last rounds, each point takes the plane of a neighbour: of the planes near the point, the one
       that agrees with most planes around it. So points at edges and on narrow sides get the plane of a face.
    4. Many planes of the cloud share directions. A point takes the shared direction whose plane has most
       neighbours, if they are nearly as many as on its own plane. Then steps 1 to 3 are repeated.
    5. Each plane is fitted to all samples whose own planes agree with it, if there are enough.

    ``rows`` are those of the nearest points, the point itself first. ``normals`` are those of the first
    planes, 0 for a point without one. ``noise`` is the standard deviation of each cloud's noise; a cloud with
    noise 0 stays as it is. ``sensors`` are unit vectors to the sensors that saw the points, 0 if unknown. The
    resulting normals have either sign. The results have no gradients.
    """
    sensors = torch.zeros_like(points) if sensors is None else sensors
    where, *others = for_kernels(points, sensors, noise.flatten(), normals)
    normals, means = _propagate(where, rows.contiguous(), *others)
    off = ((means - where) * normals).sum(-1, keepdim=True)
    farthest = FacePlane.FARTHEST * noise
    off = torch.maximum(torch.minimum(off, farthest), -farthest)
    return normals.to(points.dtype), (off * normals).to(points.dtype)


@wp.func
def closeness(distance: float):
    """Return a weight by distance: 1 at 0, 1 / 4 at 1."""
    near = 1.0 / (1.0 + distance * distance)
    return near * near


@wp.func
def not_opposite(clouds: NoisyStruct, cloud: int, row: int, other: int, normal: wp.vec3):
    """Return 0 if the sensors of two points are on different sides of a plane, else 1."""
    one = wp.dot(clouds.sensors[cloud, row], normal)
    return wp.where(one * wp.dot(clouds.sensors[cloud, other], normal) < 0.0, 0.0, 1.0)


@wp.func
def products_of(one: wp.vec3):
    """Return the products xx, yy, zz and yz, zx, xy of a vector's components."""
    mixed = wp.vec3(one[1] * one[2], one[2] * one[0], one[0] * one[1])
    return wp.matrix_from_rows(wp.cw_mul(one, one), mixed)


@wp.func
def least_squares(total: float, first: wp.vec3, second: Products, before: wp.vec3):
    """Return mean, covariance and normal from the sum of weights and weighted sums of vectors and products.

    The normal is the unit eigenvector of the least eigenvalue, from high powers of the adjugate.
    """
    mean = first / total
    covariance = second / total - products_of(mean)
    yz, zx, xy = covariance[1, 0], covariance[1, 1], covariance[1, 2]
    x = wp.vec3(covariance[0, 0] + FacePlane.FLAT, xy, zx)
    y = wp.vec3(xy, covariance[0, 1] + FacePlane.FLAT, yz)
    z = wp.vec3(zx, yz, covariance[0, 2] + FacePlane.FLAT)
    axis = adjugate_power(x, y, z, FacePlane.SQUARED) * before
    length = wp.length(axis)
    return mean, covariance, wp.where(length > 1.0e-12, axis / length, before)


@wp.func
def foot(point: wp.vec3, normal: wp.vec3, mean: wp.vec3):
    """Return the point of a plane that is nearest to a point."""
    return point - wp.dot(point - mean, normal) * normal


@kernel
def fit_kernel(clouds: NoisyStruct, given: Vectors, fitted: FittedStruct):
    """One thread a point, launched over (B, N): fit its plane to the neighbours on it."""
    cloud, row = wp.tid()
    point = clouds.points[cloud, row]
    normal = given[cloud, row]
    within = FacePlane.WITHIN * clouds.noise[cloud]
    centre = wp.vec3()
    covariance = Products()
    if within > 0.0 and wp.dot(normal, normal) > 0.0:
        for _ in range(FacePlane.REFITTED):
            total = float(1.0e-6)
            first = wp.vec3()
            second = Products()
            for place in range(clouds.rows.shape[2]):
                other = int(clouds.rows[cloud, row, place])
                if other >= 0:
                    away = clouds.points[cloud, other] - point - centre
                    weight = closeness(wp.dot(away, normal) / within)
                    weight *= not_opposite(clouds, cloud, row, other, normal)
                    total += weight
                    first += weight * away
                    second += weight * products_of(away)
            first, covariance, normal = least_squares(total, first, second, normal)
            centre += first
    fitted.normals[cloud, row] = normal
    fitted.means[cloud, row] = point + centre
    fitted.covariances[cloud, row] = covariance


@kernel
def propagate_kernel(clouds: NoisyStruct, fitted: FittedStruct, propagated: FittedStruct, support: Numbers):
    """One thread a point, launched over (B, N): fit its plane to the samples of its neighbours' planes.

    ``support`` gets the share of the neighbours' planes that agree with it.
    """
    cloud, row = wp.tid()
    normal = fitted.normals[cloud, row]
    mean = fitted.means[cloud, row]
    covariance = Products()
    total = float(0.0)
    agreeing = FacePlane.AGREEING * clouds.noise[cloud]
    if agreeing > 0.0 and wp.dot(normal, normal) > 0.0:
        here = foot(clouds.points[cloud, row], normal, mean)
        first = wp.vec3()
        second = Products()
        for place in range(clouds.rows.shape[2]):
            other = int(clouds.rows[cloud, row, place])
            if other >= 0:
                its = fitted.normals[cloud, other]
                centre = fitted.means[cloud, other]
                between = foot(clouds.points[cloud, other], its, centre) - here
                weight = closeness(wp.dot(between, normal) / agreeing)
                weight *= closeness(wp.dot(between, its) / agreeing)
                weight *= closeness(wp.length(wp.cross(its, normal)) / FacePlane.BENT)
                weight *= not_opposite(clouds, cloud, row, other, normal)
                away = centre - mean
                total += weight
                first += weight * away
                second += weight * (products_of(away) + fitted.covariances[cloud, other])
        # The point is its own neighbour, and its plane agrees with itself, so the total is at least 1.
        first, covariance, normal = least_squares(total, first, second, normal)
        mean += first
    propagated.normals[cloud, row] = normal
    propagated.means[cloud, row] = mean
    propagated.covariances[cloud, row] = covariance
    support[cloud, row] = total / float(clouds.rows.shape[2])


@kernel
def take_kernel(clouds: NoisyStruct, fitted: FittedStruct, support: Numbers, taken: FittedStruct):
    """One thread a point, launched over (B, N): take the best of the neighbours' planes."""
    cloud, row = wp.tid()
    point = clouds.points[cloud, row]
    near = FacePlane.NEAR * clouds.noise[cloud]
    best = row
    most = float(0.0)
    own = fitted.normals[cloud, row]
    if near > 0.0 and wp.dot(own, own) > 0.0:
        for place in range(clouds.rows.shape[2]):
            other = int(clouds.rows[cloud, row, place])
            if other >= 0:
                its = fitted.normals[cloud, other]
                height = wp.dot(point - fitted.means[cloud, other], its)
                score = support[cloud, other] * closeness(height / near)
                score *= not_opposite(clouds, cloud, row, other, its)
                if score > most:
                    most = score
                    best = other
    taken.normals[cloud, row] = fitted.normals[cloud, best]
    taken.means[cloud, row] = fitted.means[cloud, best]
    taken.covariances[cloud, row] = fitted.covariances[cloud, best]


@kernel
def direction_kernel(clouds: NoisyStruct, normals: Vectors, directions: Vectors, chosen: Vectors):
    """One thread a point, launched over (B, N): choose its own normal or one of the cloud's directions.

    The best has most neighbours on a plane near the point. Neighbours on planes in the cloud's directions get
    a larger weight.
    """
    cloud, row = wp.tid()
    point = clouds.points[cloud, row]
    noise = clouds.noise[cloud]
    best = normals[cloud, row]
    if noise > 0.0 and wp.dot(best, best) > 0.0:
        most = float(0.0)
        for number in range(-1, directions.shape[1]):
            normal = normals[cloud, row]
            preferred = float(1.0)
            if number >= 0:
                normal = directions[cloud, number]
                preferred = FacePlane.PREFERRED
            if wp.dot(normal, normal) > 0.0:
                height = float(0.0)
                total = float(0.0)
                for _ in range(FacePlane.MOVED + 1):
                    first = float(0.0)
                    total = float(0.0)
                    for place in range(clouds.rows.shape[2]):
                        other = int(clouds.rows[cloud, row, place])
                        if other >= 0:
                            its = wp.dot(clouds.points[cloud, other] - point, normal)
                            weight = closeness((its - height) / (FacePlane.ON_SHARED * noise))
                            weight *= not_opposite(clouds, cloud, row, other, normal)
                            total += weight
                            first += weight * its
                    height = first / wp.max(total, 1.0e-6)
                score = preferred * total * closeness(height / (FacePlane.NEAR_SHARED * noise))
                if score > most:
                    most = score
                    best = normal
    chosen[cloud, row] = best


@kernel
def whole_kernel(clouds: NoisyStruct, fitted: FittedStruct, whole: FittedStruct):
    """One thread a point, launched over (B, N): fit its plane to all samples whose planes agree with it."""
    cloud, row = wp.tid()
    normal = fitted.normals[cloud, row]
    mean = fitted.means[cloud, row]
    agreeing = FacePlane.AGREEING * clouds.noise[cloud]
    if agreeing > 0.0 and wp.dot(normal, normal) > 0.0:
        here = foot(clouds.points[cloud, row], normal, mean)
        total = float(0.0)
        first = wp.vec3()
        second = Products()
        for other in range(clouds.points.shape[1]):
            its = fitted.normals[cloud, other]
            if wp.abs(wp.dot(its, normal)) > 0.9:  # the weight of the others is 0
                across = wp.cross(its, normal)
                same = wp.max(1.0 - wp.dot(across, across) / (FacePlane.SAME * FacePlane.SAME), 0.0)
                point = clouds.points[cloud, other]
                between = foot(point, its, fitted.means[cloud, other]) - here
                weight = closeness(wp.dot(between, normal) / agreeing) * same * same
                weight *= not_opposite(clouds, cloud, row, other, normal)
                if weight > 0.0:  # false for a point that is not finite
                    away = point - mean
                    total += weight
                    first += weight * away
                    second += weight * products_of(away)
        if total > FacePlane.ENOUGH:
            first, _covariance, normal = least_squares(total, first, second, normal)
            mean += first
    whole.normals[cloud, row] = normal
    whole.means[cloud, row] = mean


@warp_op(
    "pointproj::propagate_planes",
    outputs=lambda points, **_: dict.fromkeys(("fitted", "means"), (points.shape, torch.float32)),
)
def _propagate(
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
    _propagate_over_faces(launch, clouds, normals, now, other, support)
    votes = (support > FacePlane.VOTING) & (noise > 0)[:, None]
    voters = torch.where(votes[..., None], now.normals, 0.0)
    directions = shared_directions(
        voters, same=FacePlane.SAME_DIRECTION, rounds=FacePlane.MEANS, least=FacePlane.VOTES
    )
    chosen = torch.empty_like(points)
    launch(direction_kernel, shape, clouds, now.normals, directions, chosen, block_dim=64)
    _propagate_over_faces(launch, clouds, chosen, now, other, support)
    for _ in range(FacePlane.WHOLE):
        launch(whole_kernel, shape, clouds, now, other, block_dim=64)
        now, other = other, now
    # The number of these launches is even, so the last planes are in the outputs.


def _propagate_over_faces(
    launch, clouds: Noisy, normals: Tensor, now: Fitted, other: Fitted, support: Tensor
) -> None:
    """Fit planes with these normals to the neighbours, and propagate them; the result is in ``now``."""
    shape = clouds.points.shape[:2]
    launch(fit_kernel, shape, clouds, normals, now, block_dim=64)
    for number in range(FacePlane.ROUNDS):
        launch(propagate_kernel, shape, clouds, now, other, support, block_dim=64)
        now, other = other, now
        if number >= FacePlane.ROUNDS - FacePlane.LAST_ROUNDS:
            launch(take_kernel, shape, clouds, now, support, other, block_dim=64)
            now, other = other, now
    # The number of swaps, in rounds and last rounds together, is even.
