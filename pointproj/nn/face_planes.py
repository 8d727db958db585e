"""Planes of clouds with noise, each fitted to as much of a flat face as there is: Warp kernels.

The neighbours of a point tell its plane to some tenths of the noise. A face has hundreds of samples, which
tell it far better. So planes are spread: each is fitted anew to what its neighbours' planes were fitted to,
if they agree with it, again and again; and then to all samples of the cloud that are on it.
"""

from typing import NamedTuple

import torch
import warp as wp
from jaxtyping import Float, Int
from torch import Tensor

from pointproj.ops.bridge.warp_op import warp_op

OPTIONS = {"module": "unique", "module_options": {"fuse_fp": False, "enable_backward": False}}

ROUNDS = 8
LAST_ROUNDS = 4  # in which points may take the plane of a neighbour
REFITTED = 3  # times to the neighbours, before
WITHIN = 1.5  # standard deviations of noise: so far off its plane a neighbour counts a quarter
AGREEING = 0.5  # standard deviations between two planes that agree; farther apart, they are of two faces
TURNED = 0.25  # sine of the angle between two such planes
NEAR = 1.5  # standard deviations from a plane that a point may take
WHOLE = 2  # times that planes are fitted to all samples that are on them
SAME = 0.12  # sine of the angle between these planes, at most
ENOUGH = 20.0  # such samples
FARTHEST = 4.0  # standard deviations that a point is moved, at most
FLAT = 1e-7  # added to the variances of the samples of a plane
SQUARED = 9  # times, so that of a covariance's inverse only the largest eigenvalue is left

_REFITTED = wp.constant(REFITTED)
_WITHIN = wp.constant(WITHIN)
_AGREEING = wp.constant(AGREEING)
_TURNED = wp.constant(TURNED)
_SAME_SQUARED = wp.constant(SAME * SAME)
_ENOUGH = wp.constant(ENOUGH)
_NEAR = wp.constant(NEAR)
_FLAT = wp.constant(FLAT)
_SQUARED = wp.constant(SQUARED)


class Fitted(NamedTuple):
    """Planes, and what they were fitted to; passed to the kernels as :class:`FittedStruct`."""

    normals: Float[Tensor, "b n 3"]
    means: Float[Tensor, "b n 3"]
    covariances: Float[Tensor, "b n 2 3"]  # xx, yy, zz; yz, zx, xy


@wp.struct
class FittedStruct:
    """:class:`Fitted` inside a kernel."""

    normals: wp.array2d(dtype=wp.vec3)
    means: wp.array2d(dtype=wp.vec3)
    covariances: wp.array3d(dtype=wp.vec3)


class Noisy(NamedTuple):
    """Clouds with noise; passed to the kernels as :class:`NoisyStruct`."""

    points: Float[Tensor, "b n 3"]
    rows: Int[Tensor, "b n k"]
    sensors: Float[Tensor, "b n 3"]
    noise: Float[Tensor, " b"]


@wp.struct
class NoisyStruct:
    """:class:`Noisy` inside a kernel."""

    points: wp.array2d(dtype=wp.vec3)
    rows: wp.array3d(dtype=wp.int64)
    sensors: wp.array2d(dtype=wp.vec3)
    noise: wp.array(dtype=wp.float32)


def spread_planes(
    points: Float[Tensor, "b n 3"],
    rows: Int[Tensor, "b n k"],
    normals: Float[Tensor, "b n 3"],
    noise: Float[Tensor, "b 1 1"],
    sensors: Float[Tensor, "b n 3"] | None = None,
) -> tuple[Float[Tensor, "b n 3"], Float[Tensor, "b n 3"]]:
    """Improve the planes of points of clouds with noise.

    1. Each plane is moved to where the squared distances of the neighbours on it are least.
    2. Each plane is fitted anew to all that its neighbours' planes were fitted to, as far as these agree with
       it in place and direction; again and again, so that what a sample tells spreads over its face, and not
       over edges or to the other side of a board.
    3. In the last rounds, each point takes the plane of the neighbour that has the most planes around it that
       agree with it, of those that pass the point within the noise. So what lies at an edge or on a narrow
       side gets the plane of a face.
    4. Each plane is fitted to all samples whose own planes agree with it, wherever they are, if there are
       enough of them.

    Parameters
    ----------
    points : (B, N, 3) float tensor
    rows : (B, N, k) integer tensor
        Of the k nearest points, the point itself first; from :func:`pointproj.knn`.
    normals : (B, N, 3) float tensor
        Unit normals of first planes through the points, of either sign; 0 for a point that has none.
    noise : (B, 1, 1) float tensor
        Standard deviation of each cloud's noise. Where it is 0, everything stays as it is.
    sensors : (B, N, 3) float tensor, optional
        Unit vectors to the sensors that saw the points, 0 where not known: points that were seen from
        different sides of a plane are not both on it.

    Returns
    -------
    normals : (B, N, 3) float tensor
        Of either sign.
    shift : (B, N, 3) float tensor
        From the points onto their planes. Neither has gradients.
    """
    where = points.detach().float().contiguous()
    sensors = torch.zeros_like(where) if sensors is None else sensors
    inputs = (tensor.detach().float().contiguous() for tensor in (sensors, noise.flatten(), normals))
    normals, means = _spread(where, rows.contiguous(), *inputs)
    off = ((means - where) * normals).sum(-1, keepdim=True)
    farthest = FARTHEST * noise
    off = torch.maximum(torch.minimum(off, farthest), -farthest)
    return normals.to(points.dtype), (off * normals).to(points.dtype)


@wp.func
def closeness(distance: float):
    """How much counts what lies so far off: 1 at 0, 1 / 4 at 1."""
    near = 1.0 / (1.0 + distance * distance)
    return near * near


@wp.func
def not_opposite(one: wp.vec3, other: wp.vec3, normal: wp.vec3):
    """0 if two sensors are on different sides of a plane."""
    return wp.where(wp.dot(one, normal) * wp.dot(other, normal) < 0.0, 0.0, 1.0)


@wp.func
def mixed(one: wp.vec3):
    """The products yz, zx, xy of a vector's parts."""
    return wp.vec3(one[1] * one[2], one[2] * one[0], one[0] * one[1])


@wp.func
def least_axis(squares: wp.vec3, products: wp.vec3, before: wp.vec3):
    """Unit eigenvector of a covariance's least eigenvalue, from high powers of its adjugate."""
    x = wp.vec3(squares[0] + _FLAT, products[2], products[1])
    y = wp.vec3(products[2], squares[1] + _FLAT, products[0])
    z = wp.vec3(products[1], products[0], squares[2] + _FLAT)
    power = wp.matrix_from_rows(wp.cross(y, z), wp.cross(z, x), wp.cross(x, y))
    for _ in range(_SQUARED):
        power = power / wp.max(power[0, 0] + power[1, 1] + power[2, 2], 1.0e-30)
        power = power * power
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


@wp.kernel(**OPTIONS)
def fit_kernel(clouds: NoisyStruct, given: wp.array2d(dtype=wp.vec3), fitted: FittedStruct):
    """One thread a point, launched over (B, N): the plane that is nearest to the neighbours on it."""
    cloud, row = wp.tid()
    point = clouds.points[cloud, row]
    normal = given[cloud, row]
    within = _WITHIN * clouds.noise[cloud]
    centre = wp.vec3()
    squares = wp.vec3()
    products = wp.vec3()
    if within > 0.0 and wp.dot(normal, normal) > 0.0:
        for _ in range(_REFITTED):
            total = float(1.0e-6)
            first = wp.vec3()
            squares = wp.vec3()
            products = wp.vec3()
            for place in range(clouds.rows.shape[2]):
                other = int(clouds.rows[cloud, row, place])
                if other >= 0:
                    away = clouds.points[cloud, other] - point - centre
                    weight = closeness(wp.dot(away, normal) / within)
                    weight *= not_opposite(clouds.sensors[cloud, row], clouds.sensors[cloud, other], normal)
                    total += weight
                    first += weight * away
                    squares += weight * wp.cw_mul(away, away)
                    products += weight * mixed(away)
            first = first / total
            squares = squares / total - wp.cw_mul(first, first)
            products = products / total - mixed(first)
            centre += first
            normal = least_axis(squares, products, normal)
    fitted.normals[cloud, row] = normal
    fitted.means[cloud, row] = point + centre
    fitted.covariances[cloud, row, 0] = squares
    fitted.covariances[cloud, row, 1] = products


@wp.kernel(**OPTIONS)
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
    agreeing = _AGREEING * clouds.noise[cloud]
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
                weight *= closeness(wp.length(wp.cross(its, normal)) / _TURNED)
                weight *= not_opposite(clouds.sensors[cloud, row], clouds.sensors[cloud, other], normal)
                away = centre - mean
                total += weight
                first += weight * away
                squares += weight * (wp.cw_mul(away, away) + fitted.covariances[cloud, other, 0])
                products += weight * (mixed(away) + fitted.covariances[cloud, other, 1])
        first = first / total  # its own plane agrees, so the total is 1 or more
        squares = squares / total - wp.cw_mul(first, first)
        products = products / total - mixed(first)
        mean += first
        normal = least_axis(squares, products, normal)
    spread.normals[cloud, row] = normal
    spread.means[cloud, row] = mean
    spread.covariances[cloud, row, 0] = squares
    spread.covariances[cloud, row, 1] = products
    support[cloud, row] = total / float(clouds.rows.shape[2])


@wp.kernel(**OPTIONS)
def take_kernel(
    clouds: NoisyStruct, fitted: FittedStruct, support: wp.array2d(dtype=wp.float32), taken: FittedStruct
):
    """One thread a point, launched over (B, N): take the best plane of those of the neighbours."""
    cloud, row = wp.tid()
    point = clouds.points[cloud, row]
    near = _NEAR * clouds.noise[cloud]
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
                score *= not_opposite(clouds.sensors[cloud, row], clouds.sensors[cloud, other], its)
                if score > most:
                    most = score
                    best = other
    taken.normals[cloud, row] = fitted.normals[cloud, best]
    taken.means[cloud, row] = fitted.means[cloud, best]
    taken.covariances[cloud, row, 0] = fitted.covariances[cloud, best, 0]
    taken.covariances[cloud, row, 1] = fitted.covariances[cloud, best, 1]


@wp.kernel(**OPTIONS)
def whole_kernel(clouds: NoisyStruct, fitted: FittedStruct, whole: FittedStruct):
    """One thread a point, launched over (B, N): fit its plane to all samples of which the planes agree."""
    cloud, row = wp.tid()
    normal = fitted.normals[cloud, row]
    mean = fitted.means[cloud, row]
    agreeing = _AGREEING * clouds.noise[cloud]
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
                same = wp.max(1.0 - wp.dot(across, across) / _SAME_SQUARED, 0.0)
                point = clouds.points[cloud, other]
                between = foot(point, its, fitted.means[cloud, other]) - here
                weight = closeness(wp.dot(between, normal) / agreeing) * same * same
                weight *= not_opposite(clouds.sensors[cloud, row], clouds.sensors[cloud, other], normal)
                if weight > 0.0:  # that of a point that is not finite is not
                    away = point - mean
                    total += weight
                    first += weight * away
                    squares += weight * wp.cw_mul(away, away)
                    products += weight * mixed(away)
        if total > _ENOUGH:
            first = first / total
            squares = squares / total - wp.cw_mul(first, first)
            products = products / total - mixed(first)
            mean += first
            normal = least_axis(squares, products, normal)
    whole.normals[cloud, row] = normal
    whole.means[cloud, row] = mean


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
    launch(fit_kernel, shape, clouds, normals, now, block_dim=64)
    for number in range(ROUNDS):
        launch(spread_kernel, shape, clouds, now, other, support, block_dim=64)
        now, other = other, now
        if number >= ROUNDS - LAST_ROUNDS:
            launch(take_kernel, shape, clouds, now, support, other, block_dim=64)
            now, other = other, now
    for _ in range(WHOLE):
        launch(whole_kernel, shape, clouds, now, other, block_dim=64)
        now, other = other, now
    # After an even number of these launches, the last planes are in the outputs.
