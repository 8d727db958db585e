"""Planes of flat pieces on which the samples of a cloud lie exactly, however narrow they are: Warp kernels.

Without noise, four points are on one plane only where a surface is flat, up to the rounding of their
coordinates. So a plane that three points span and a fourth one confirms is that of a face, even if the face
is a narrow row of samples: the side of a board, a leg. And shapes that people make repeat directions. Where a
face has two samples, its direction is often one that many other samples of the cloud have.
"""

from typing import NamedTuple

import torch
import warp as wp
from jaxtyping import Float, Int
from torch import Tensor

from pointproj.nn.rows import take_rows
from pointproj.nn.visibility.constants import ExactPlane
from pointproj.nn.visibility.directions import shared_directions
from pointproj.nn.visibility.kernels import displacements, kernel
from pointproj.ops.bridge.warp_op import warp_op


class ExactPlanes(NamedTuple):
    """Of the points of clouds; neither has gradients."""

    normals: Float[Tensor, "b n 3"]  # 0 where a point has no exact plane; of either sign
    support: Float[Tensor, "b n 1"]  # share of the neighbours on the plane, 0 where there is none


def exact_planes(points: Float[Tensor, "b n 3"], rows: Int[Tensor, "b n k"]) -> ExactPlanes:
    """Find for each point the plane that its neighbours lie on up to rounding.

    Of the planes that pairs of near neighbours span with the point, the one that contains most neighbours is
    taken, if it contains a fourth point. A plane in a direction that wide planes of the cloud share is taken
    if it contains more, or any at all where the point has no plane yet; else that of a neighbour that
    contains the point, too. Clouds with noise have none of these planes.

    Points are in the cube [-1, 1]^3, where single precision has the expected rounding. ``rows`` are those of
    the nearest points, the point itself first; the first 33 are used.
    """
    return ExactPlanes(
        *_search(points.detach().float().contiguous(), rows[..., : 1 + ExactPlane.COUNTED].contiguous())
    )


@wp.func
def is_on(normal: wp.vec3, height: float, away: wp.vec3):
    """Whether a point is on a plane that a triangle of that height spans, up to rounding."""
    allowed = ExactPlane.ROUNDING * (1.0 + wp.length(away) / height)
    return wp.abs(wp.dot(normal, away)) < wp.min(allowed, ExactPlane.FARTHEST)


@wp.func
def triangle_height(across: wp.vec3, one: wp.vec3, other: wp.vec3):
    """Height over the longer of two sides, of the triangle whose cross product is given; at least 1e-12."""
    return wp.max(wp.length(across) / wp.max(wp.max(wp.length(one), wp.length(other)), 1.0e-9), 1.0e-12)


@kernel
def pairs_kernel(
    around: wp.array3d(dtype=wp.vec3),
    paired: int,
    planes: wp.array2d(dtype=wp.vec4),
    heights: wp.array2d(dtype=wp.float32),
):
    """One thread a point, launched over (B, N): normal and number of neighbours of the best plane."""
    cloud, row = wp.tid()
    count = around.shape[2]
    best = wp.vec3()
    best_height = float(1.0)
    most = int(0)
    for first in range(paired):
        for second in range(first + 1, paired):
            one = around[cloud, row, first]
            other = around[cloud, row, second]
            across = wp.cross(one, other)
            height = triangle_height(across, one, other)
            # A plane with more than half of the neighbours is not surpassed.
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
    # The farthest neighbours on the plane span it best.
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
    normal = wp.vec3()
    if most >= ExactPlane.CONFIRMED:
        normal = wp.normalize(widest)
    planes[cloud, row] = wp.vec4(normal[0], normal[1], normal[2], float(most))
    heights[cloud, row] = triangle_height(widest, far, wide)


@wp.func
def normal_of(plane: wp.vec4):
    return wp.vec3(plane[0], plane[1], plane[2])


@wp.func
def count_on(normal: wp.vec3, within: float, around: wp.array3d(dtype=wp.vec3), cloud: int, row: int):
    """How many neighbours are that close to a plane through the point."""
    found = int(0)
    for place in range(around.shape[2]):
        if wp.abs(wp.dot(normal, around[cloud, row, place])) < within:
            found += 1
    return found


@wp.func
def of_neighbors(
    planes: wp.array2d(dtype=wp.vec4),
    rows: wp.array3d(dtype=wp.int64),
    cloud: int,
    row: int,
    around: wp.array3d(dtype=wp.vec3),
):
    """Plane of a neighbour that contains the point and most others, and how many; 0 if there is none."""
    best = wp.vec4()
    for number in range(around.shape[2]):
        neighbor = int(rows[cloud, row, number + 1])
        if neighbor >= 0:
            plane = planes[cloud, neighbor]
            normal = normal_of(plane)
            if (
                plane[3] >= float(ExactPlane.CONFIRMED)
                and wp.abs(wp.dot(normal, around[cloud, row, number])) < ExactPlane.ON_NEIGHBORS
            ):
                on_plane = count_on(normal, ExactPlane.ON_NEIGHBORS, around, cloud, row)
                if on_plane >= ExactPlane.SHARED and float(on_plane) > best[3]:
                    best = wp.vec4(normal[0], normal[1], normal[2], float(on_plane))
    return best


@kernel
def directions_kernel(
    around: wp.array3d(dtype=wp.vec3),
    rows: wp.array3d(dtype=wp.int64),
    planes: wp.array2d(dtype=wp.vec4),
    directions: wp.array2d(dtype=wp.vec3),
    normals: wp.array2d(dtype=wp.vec3),
    support: wp.array2d(dtype=wp.float32),
):
    """One thread a point, launched over (B, N): its plane, one in a common direction, or a neighbour's."""
    cloud, row = wp.tid()
    normal = normal_of(planes[cloud, row])
    most = int(planes[cloud, row][3])
    if most < ExactPlane.CONFIRMED:
        most = int(0)
    for number in range(directions.shape[1]):
        direction = directions[cloud, number]
        if wp.dot(direction, direction) > 0.0:
            on_plane = count_on(direction, ExactPlane.ON_DIRECTION, around, cloud, row)
            if on_plane > most:
                normal = direction
                most = on_plane
    if most == 0:
        shared = of_neighbors(planes, rows, cloud, row, around)
        normal = normal_of(shared)
        most = int(shared[3])
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
    clouds, size, _ = points.shape
    around = displacements(launch, points, rows)[:, :, 1:]
    planes = points.new_empty(clouds, size, 4)
    heights = points.new_empty(clouds, size)
    paired = min(ExactPlane.PAIRED, around.shape[2])
    launch(pairs_kernel, (clouds, size), around, paired, planes, heights, block_dim=64)
    sure = (planes[..., 3] >= ExactPlane.SURE) & (heights > ExactPlane.WIDE)
    voters = torch.where(sure[..., None], planes[..., :3], 0.0)
    chosen = shared_directions(voters, same=ExactPlane.SAME, rounds=1, least=ExactPlane.VOTES)
    where = around, rows, planes, chosen
    launch(directions_kernel, (clouds, size), *where, normals, support.view(clouds, size), block_dim=64)


def plain_exact_planes(points: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The same as operators of torch, which hold every pair and neighbour: what the kernels are held to."""
    around = take_rows(points, rows.clamp(min=0)) - points[:, :, None]
    away = torch.where(rows[..., None] < 0, torch.nan, around)[:, :, 1:]
    normals, most, height = _plain_pairs(away)
    voters = torch.where(((most >= ExactPlane.SURE) & (height > ExactPlane.WIDE))[..., None], normals, 0.0)
    directions = shared_directions(voters, same=ExactPlane.SAME, rounds=1, least=ExactPlane.VOTES)
    most = torch.where(most < ExactPlane.CONFIRMED, 0, most)
    on_plane = ((away @ directions.mT[:, None]).abs() < ExactPlane.ON_DIRECTION).sum(2)
    on_plane = torch.where(directions.any(-1)[:, None], on_plane, 0)
    of_directions, best = on_plane.max(-1)
    better = of_directions > most
    normals_of_all = torch.where(better[..., None], take_rows(directions, best), normals)
    shared, on_shared = _plain_shared(away, take_rows(normals, rows.clamp(min=0))[:, :, 1:])
    most = torch.maximum(of_directions, most)
    alone = most == 0
    normals = torch.where(alone[..., None], shared, normals_of_all)
    return normals, torch.where(alone, on_shared, most)[..., None] / away.shape[2]


def _plain_pairs(away: Float[Tensor, "b n k 3"]) -> tuple[Tensor, Tensor, Tensor]:
    """Normals (B, N, 3), neighbours on the plane (B, N), height of the triangle that spans it (B, N)."""
    first, second = torch.triu_indices(*(min(ExactPlane.PAIRED, away.shape[2]),) * 2, 1, device=away.device)
    one, other = away[:, :, first], away[:, :, second]
    across, lengths = torch.linalg.cross(one, other), away.norm(dim=-1)
    height = _plain_height(across, one, other)
    normals = across / across.norm(dim=-1, keepdim=True).clamp(min=1e-20)
    allowed = (ExactPlane.ROUNDING * (1 + lengths[:, :, None] / height[..., None])).clamp(
        max=ExactPlane.FARTHEST
    )
    on_plane = ((normals @ away.mT).abs() < allowed) & (height > ExactPlane.NARROWEST)[..., None]
    most, best = on_plane.sum(-1).max(-1)
    on_plane = on_plane.gather(2, best[..., None, None].expand(-1, -1, 1, away.shape[2]))[:, :, 0]
    reached = torch.where(on_plane, lengths, 0).argmax(-1)
    far = away.gather(2, reached[..., None, None].expand(-1, -1, 1, 3))
    across = torch.where(on_plane[..., None], torch.linalg.cross(far.expand_as(away), away), 0.0)
    widest = across.norm(dim=-1).argmax(-1)[..., None, None].expand(-1, -1, 1, 3)
    across, wide = across.gather(2, widest)[:, :, 0], away.gather(2, widest)[:, :, 0]
    normal = torch.nn.functional.normalize(across, dim=-1, eps=1e-20)
    normal = torch.where((most >= ExactPlane.CONFIRMED)[..., None], normal, 0.0)
    return normal, most, _plain_height(across, far[:, :, 0], wide)


def _plain_shared(away: Tensor, normals: Float[Tensor, "b n k 3"]) -> tuple[Tensor, Tensor]:
    """Normals (B, N, 3) of the neighbours' planes that contain most, and how many those contain."""
    on_plane = (normals @ away.mT).abs() < ExactPlane.ON_NEIGHBORS  # (B, N, planes, neighbours)
    contains = on_plane.diagonal(dim1=2, dim2=3) & normals.any(-1)
    most, best = torch.where(contains, on_plane.sum(-1), 0).max(-1)
    most = torch.where(most < ExactPlane.SHARED, 0, most)
    normal = normals.gather(2, best[..., None, None].expand(-1, -1, 1, 3))[:, :, 0]
    return torch.where(most[..., None] > 0, normal, 0.0), most


def _plain_height(across: Tensor, one: Tensor, other: Tensor) -> Tensor:
    longer = torch.maximum(one.norm(dim=-1), other.norm(dim=-1)).clamp(min=1e-9)
    return (across.norm(dim=-1) / longer).clamp(min=1e-12)
