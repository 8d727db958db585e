"""Exact planes: planes of flat pieces, also narrow ones, that samples lie on up to rounding. Warp kernels.

In a cloud without noise, four nearby points lie on one plane (up to rounding) only if the surface is flat. So
a plane through three points and a fourth one is the plane of a face, even if the face has only a narrow row
of samples, like the side of a board or a leg. Shapes that people make also repeat directions. So the
direction of a face with only two samples is often that of many other samples of the cloud.
"""

import torch
import warp as wp
from jaxtyping import Float, Int
from torch import Tensor

from pointproj.nn.visibility.constants import ExactPlane
from pointproj.nn.visibility.directions import shared_directions
from pointproj.nn.visibility.kernels import (
    Around,
    Fours,
    Numbers,
    Rows,
    Vectors,
    displacements,
    for_kernels,
    kernel,
)
from pointproj.ops.bridge.warp_op import warp_op


def exact_planes(
    points: Float[Tensor, "b n 3"], rows: Int[Tensor, "b n k"]
) -> tuple[Float[Tensor, "b n 3"], Float[Tensor, "b n 1"]]:
    """Find for each point the plane that its neighbours lie on up to rounding, without gradients.

    1. Each pair of near neighbours spans a plane with the point. The plane with most neighbours is taken, if
       it has enough (:attr:`.ExactPlane.CONFIRMED`).
    2. A plane through the point in a direction that wide planes of the cloud share replaces it, if it
       contains more neighbours.
    3. A point without a plane takes the plane of a neighbour that contains the point.

    Clouds with noise have no exact planes. Points are in the cube [-1, 1]^3, where single precision has the
    expected rounding. ``rows`` are those of the nearest points, the point itself first; the first 33 are
    used. The results are normals of either sign, 0 for a point without an exact plane, and the share of the
    neighbours on the plane.
    """
    return _search(*for_kernels(points), rows[..., : 1 + ExactPlane.NEIGHBORS].contiguous())


@wp.func
def is_on(normal: wp.vec3, height: float, away: wp.vec3):
    """Return whether a point is, up to rounding, on the plane of a triangle of this height."""
    allowed = ExactPlane.ROUNDING * (1.0 + wp.length(away) / height)
    return wp.abs(wp.dot(normal, away)) < wp.min(allowed, ExactPlane.FARTHEST)


@wp.func
def triangle_height(across: wp.vec3, one: wp.vec3, other: wp.vec3):
    """Return a triangle's height over the longer of two sides, from their cross product; at least 1e-12."""
    return wp.max(wp.length(across) / wp.max(wp.max(wp.length(one), wp.length(other)), 1.0e-9), 1.0e-12)


@kernel
def pairs_kernel(around: Around, planes: Fours, voters: Vectors):
    """One thread a point, launched over (B, N): normal and number of neighbours of the best plane.

    Both are 0 if it has too few neighbours. ``voters`` get the normals of wide planes with many neighbours.
    """
    cloud, row = wp.tid()
    count = around.shape[2]
    paired = wp.min(ExactPlane.PAIRED, count)
    best = wp.vec3()
    best_height = float(1.0)
    most = int(0)
    for first in range(paired):
        for second in range(first + 1, paired):
            one = around[cloud, row, first]
            other = around[cloud, row, second]
            across = wp.cross(one, other)
            height = triangle_height(across, one, other)
            # No other plane can have more neighbours than one with more than half of them.
            if height > ExactPlane.NARROWEST and 2 * most <= count:
                normal = across / wp.length(across)
                on_plane = int(0)
                for place in range(count):
                    if is_on(normal, height, around[cloud, row, place]):
                        on_plane += 1
                if on_plane > most or (on_plane == most and height > best_height):
                    best = normal
                    best_height = height
                    most = on_plane
    # The farthest neighbours on the plane determine its normal best.
    far = wp.vec3()
    for place in range(count):
        away = around[cloud, row, place]
        if is_on(best, best_height, away) and wp.length(away) > wp.length(far):
            far = away
    widest = wp.vec3()
    wide = wp.vec3()
    for place in range(count):
        away = around[cloud, row, place]
        across = wp.cross(far, away)
        if is_on(best, best_height, away) and wp.length(across) > wp.length(widest):
            widest = across
            wide = away
    plane = wp.vec4()
    vote = wp.vec3()
    if most >= ExactPlane.CONFIRMED:
        normal = wp.normalize(widest)
        plane = wp.vec4(normal[0], normal[1], normal[2], float(most))
        if most >= ExactPlane.SURE and triangle_height(widest, far, wide) > ExactPlane.WIDE:
            vote = normal
    planes[cloud, row] = plane
    voters[cloud, row] = vote


@wp.func
def count_on(normal: wp.vec3, within: float, around: Around, cloud: int, row: int):
    """Count the neighbours that are this close to a plane through the point."""
    found = int(0)
    for place in range(around.shape[2]):
        if wp.abs(wp.dot(normal, around[cloud, row, place])) < within:
            found += 1
    return found


@kernel
def directions_kernel(
    around: Around, rows: Rows, planes: Fours, directions: Vectors, normals: Vectors, support: Numbers
):
    """One thread a point, launched over (B, N): its own plane, one in a shared direction or a neighbour's."""
    cloud, row = wp.tid()
    plane = planes[cloud, row]
    normal = wp.vec3(plane[0], plane[1], plane[2])
    most = int(plane[3])
    for number in range(directions.shape[1]):
        direction = directions[cloud, number]
        if wp.dot(direction, direction) > 0.0:
            on_plane = count_on(direction, ExactPlane.ON_DIRECTION, around, cloud, row)
            if on_plane > most:
                normal = direction
                most = on_plane
    if most == 0:
        for number in range(around.shape[2]):
            neighbor = int(rows[cloud, row, number + 1])
            if neighbor >= 0:
                other = planes[cloud, neighbor]
                its = wp.vec3(other[0], other[1], other[2])
                height = wp.abs(wp.dot(its, around[cloud, row, number]))
                if other[3] > 0.0 and height < ExactPlane.ON_NEIGHBORS:
                    on_plane = count_on(its, ExactPlane.ON_NEIGHBORS, around, cloud, row)
                    if on_plane >= ExactPlane.SHARED and on_plane > most:
                        normal = its
                        most = on_plane
    normals[cloud, row] = normal
    support[cloud, row] = float(most) / float(around.shape[2])


@warp_op(
    "pointproj::exact_planes",
    outputs=lambda points, rows: {
        "normals": (points.shape, torch.float32),
        "support": ((*points.shape[:2], 1), torch.float32),
    },
)
def _search(launch, points: Tensor, rows: Tensor, normals: Tensor, support: Tensor) -> None:
    shape = points.shape[:2]
    around = displacements(launch, points, rows)[:, :, 1:]
    planes, voters = points.new_empty(*shape, 4), torch.empty_like(points)
    launch(pairs_kernel, shape, around, planes, voters, block_dim=64)
    chosen = shared_directions(voters, same=ExactPlane.SAME, rounds=1, least=ExactPlane.VOTES)
    outputs = normals, support.squeeze(-1)
    launch(directions_kernel, shape, around, rows, planes, chosen, *outputs, block_dim=64)
