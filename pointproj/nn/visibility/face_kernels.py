"""Kernels of :mod:`pointproj.nn.visibility.face_planes`, by Warp, and what they are passed."""

from typing import Annotated, NamedTuple

import warp as wp
from torch import Tensor

from pointproj.nn.visibility.constants import FacePlane
from pointproj.nn.visibility.kernels import adjugate_power, kernel
from pointproj.ops.bridge.warp_launch import record_struct

Vectors = Annotated[Tensor, wp.vec3, 2]


class Fitted(NamedTuple):
    """Planes of clouds of n points, and what they were fitted to."""

    normals: Vectors  # (b, n, 3)
    means: Vectors  # (b, n, 3)
    covariances: Annotated[Tensor, wp.vec3, 3]  # (b, n, 2, 3): xx, yy, zz; yz, zx, xy


class Noisy(NamedTuple):
    """Clouds with noise, and the rows of each point's k nearest."""

    points: Vectors  # (b, n, 3)
    rows: Annotated[Tensor, wp.int64, 3]  # (b, n, k)
    sensors: Vectors  # (b, n, 3)
    noise: Annotated[Tensor, wp.float32, 1]  # (b,)


FittedStruct, NoisyStruct = record_struct(Fitted), record_struct(Noisy)


@wp.func
def closeness(distance: float):
    """How much counts what lies so far off: 1 at 0, 1 / 4 at 1."""
    near = 1.0 / (1.0 + distance * distance)
    return near * near


@wp.func
def not_opposite(clouds: NoisyStruct, cloud: int, row: int, other: int, normal: wp.vec3):
    """0 if the sensors of two points are on different sides of a plane."""
    one = wp.dot(clouds.sensors[cloud, row], normal)
    return wp.where(one * wp.dot(clouds.sensors[cloud, other], normal) < 0.0, 0.0, 1.0)


@wp.func
def mixed(one: wp.vec3):
    """The products yz, zx, xy of a vector's parts."""
    return wp.vec3(one[1] * one[2], one[2] * one[0], one[0] * one[1])


@wp.func
def centred(total: float, first: wp.vec3, squares: wp.vec3, products: wp.vec3):
    """Mean and covariance, from a sum of weights and weighted sums of vectors and their products."""
    mean = first / total
    return mean, squares / total - wp.cw_mul(mean, mean), products / total - mixed(mean)


@wp.func
def least_axis(squares: wp.vec3, products: wp.vec3, before: wp.vec3):
    """Unit eigenvector of a covariance's least eigenvalue, from high powers of its adjugate."""
    x = wp.vec3(squares[0] + FacePlane.FLAT, products[2], products[1])
    y = wp.vec3(products[2], squares[1] + FacePlane.FLAT, products[0])
    z = wp.vec3(products[1], products[0], squares[2] + FacePlane.FLAT)
    power = adjugate_power(x, y, z, FacePlane.SQUARED)
    axis = power * before
    length = wp.length(axis)
    result = before
    if length > 1.0e-12:
        result = axis / length
    return result


@wp.func
def foot(point: wp.vec3, normal: wp.vec3, mean: wp.vec3):
    """Where a plane is nearest to a point."""
    return point - wp.dot(point - mean, normal) * normal


@wp.func
def store(
    fitted: FittedStruct,
    cloud: int,
    row: int,
    normal: wp.vec3,
    mean: wp.vec3,
    squares: wp.vec3,
    products: wp.vec3,
):
    """Write the plane of a point."""
    fitted.normals[cloud, row] = normal
    fitted.means[cloud, row] = mean
    fitted.covariances[cloud, row, 0] = squares
    fitted.covariances[cloud, row, 1] = products


@kernel
def fit_kernel(clouds: NoisyStruct, given: wp.array2d(dtype=wp.vec3), fitted: FittedStruct):
    """One thread a point, launched over (B, N): the plane that is nearest to the neighbours on it."""
    cloud, row = wp.tid()
    point = clouds.points[cloud, row]
    normal = given[cloud, row]
    within = FacePlane.WITHIN * clouds.noise[cloud]
    centre = wp.vec3()
    squares = wp.vec3()
    products = wp.vec3()
    if within > 0.0 and wp.dot(normal, normal) > 0.0:
        for _ in range(FacePlane.REFITTED):
            total = float(1.0e-6)
            first = wp.vec3()
            squares = wp.vec3()
            products = wp.vec3()
            for place in range(clouds.rows.shape[2]):
                other = int(clouds.rows[cloud, row, place])
                if other >= 0:
                    away = clouds.points[cloud, other] - point - centre
                    weight = closeness(wp.dot(away, normal) / within)
                    weight *= not_opposite(clouds, cloud, row, other, normal)
                    total += weight
                    first += weight * away
                    squares += weight * wp.cw_mul(away, away)
                    products += weight * mixed(away)
            first, squares, products = centred(total, first, squares, products)
            centre += first
            normal = least_axis(squares, products, normal)
    store(fitted, cloud, row, normal, point + centre, squares, products)


@kernel
def spread_kernel(
    clouds: NoisyStruct, fitted: FittedStruct, spread: FittedStruct, support: wp.array2d(dtype=wp.float32)
):
    """One thread a point, launched over (B, N): fit its plane to what its neighbours' are fitted to.

    ``support`` gets the share of the neighbours' planes that agree with it.
    """
    cloud, row = wp.tid()
    normal = fitted.normals[cloud, row]
    mean = fitted.means[cloud, row]
    squares = wp.vec3()
    products = wp.vec3()
    total = float(0.0)
    agreeing = FacePlane.AGREEING * clouds.noise[cloud]
    if agreeing > 0.0 and wp.dot(normal, normal) > 0.0:
        here = foot(clouds.points[cloud, row], normal, mean)
        first = wp.vec3()
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
                squares += weight * (wp.cw_mul(away, away) + fitted.covariances[cloud, other, 0])
                products += weight * (mixed(away) + fitted.covariances[cloud, other, 1])
        # Its own plane agrees, so the total is 1 or more.
        first, squares, products = centred(total, first, squares, products)
        mean += first
        normal = least_axis(squares, products, normal)
    store(spread, cloud, row, normal, mean, squares, products)
    support[cloud, row] = total / float(clouds.rows.shape[2])


@kernel
def take_kernel(
    clouds: NoisyStruct, fitted: FittedStruct, support: wp.array2d(dtype=wp.float32), taken: FittedStruct
):
    """One thread a point, launched over (B, N): take the best plane of those of the neighbours."""
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
    taken.covariances[cloud, row, 0] = fitted.covariances[cloud, best, 0]
    taken.covariances[cloud, row, 1] = fitted.covariances[cloud, best, 1]


@kernel
def turn_kernel(
    clouds: NoisyStruct,
    normals: wp.array2d(dtype=wp.vec3),
    directions: wp.array2d(dtype=wp.vec3),
    turned: wp.array2d(dtype=wp.vec3),
):
    """One thread a point, launched over (B, N): of its own normal and the directions of the cloud, the best.

    That is the one in which a plane near the point holds most neighbours; on planes in directions of the
    cloud they count more.
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
                            weight = closeness((its - height) / (FacePlane.ON_TURNED * noise))
                            weight *= not_opposite(clouds, cloud, row, other, normal)
                            total += weight
                            first += weight * its
                    height = first / wp.max(total, 1.0e-6)
                score = preferred * total * closeness(height / (FacePlane.NEAR_TURNED * noise))
                if score > most:
                    most = score
                    best = normal
    turned[cloud, row] = best


@kernel
def whole_kernel(clouds: NoisyStruct, fitted: FittedStruct, whole: FittedStruct):
    """One thread a point, launched over (B, N): fit its plane to all samples of which the planes agree."""
    cloud, row = wp.tid()
    normal = fitted.normals[cloud, row]
    mean = fitted.means[cloud, row]
    agreeing = FacePlane.AGREEING * clouds.noise[cloud]
    if agreeing > 0.0 and wp.dot(normal, normal) > 0.0:
        here = foot(clouds.points[cloud, row], normal, mean)
        total = float(0.0)
        first = wp.vec3()
        squares = wp.vec3()
        products = wp.vec3()
        for other in range(clouds.points.shape[1]):
            its = fitted.normals[cloud, other]
            if wp.abs(wp.dot(its, normal)) > 0.9:  # the others would have no weight, after more work
                across = wp.cross(its, normal)
                same = wp.max(1.0 - wp.dot(across, across) / (FacePlane.SAME * FacePlane.SAME), 0.0)
                point = clouds.points[cloud, other]
                between = foot(point, its, fitted.means[cloud, other]) - here
                weight = closeness(wp.dot(between, normal) / agreeing) * same * same
                weight *= not_opposite(clouds, cloud, row, other, normal)
                if weight > 0.0:  # that of a point that is not finite is not
                    away = point - mean
                    total += weight
                    first += weight * away
                    squares += weight * wp.cw_mul(away, away)
                    products += weight * mixed(away)
        if total > FacePlane.ENOUGH:
            first, squares, products = centred(total, first, squares, products)
            mean += first
            normal = least_axis(squares, products, normal)
    whole.normals[cloud, row] = normal
    whole.means[cloud, row] = mean
