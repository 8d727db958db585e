"""Where flat pieces of a cloud end: along the planes of their neighbours. A Warp kernel."""

import torch
import warp as wp
from jaxtyping import Float, Int
from torch import Tensor

from pointproj.nn.rows import take_rows
from pointproj.nn.visibility.constants import Edge, ExactPlane
from pointproj.nn.visibility.kernels import displacements, kernel
from pointproj.ops.bridge.warp_op import warp_op


def nearest_edges(
    points: Float[Tensor, "b n 3"],
    rows: Int[Tensor, "b n k"],
    normals: Float[Tensor, "b n 3"],
    radii: Float[Tensor, "b n"],
) -> Float[Tensor, "b n 3 4"]:
    """Find where the exact planes of points end within their radii: (B, N, 3, 4), without gradients.

    The plane of a neighbour crosses that of a point along a line. If no neighbour on the point's own plane is
    beyond it, the flat piece is taken to end there. The piece also ends there if the neighbour is close to
    the plane, and not far along the line: what goes on beyond is the other side of a gap, or of a board that
    ends at the piece, and has disks of its own.

    ``rows`` are those of the nearest points, the point itself first; the first 33 are used. ``normals`` are
    those of exact planes, 0 for points that have none. Of up to three edges, the nearest first, the result
    has the unit vector in the plane towards the edge, and its distance; 0 where there is none.
    """
    floats = (tensor.detach().float().contiguous() for tensor in (points, normals, radii))
    points, normals, radii = floats
    return _edges(points, rows[..., : 1 + ExactPlane.COUNTED].contiguous(), normals, radii)


@wp.func
def crossing(own: wp.vec3, other: wp.vec3, away: wp.vec3):
    """Unit vector in a plane towards another one, and the distance; -1 if they are nearly parallel."""
    along = other - wp.dot(other, own) * own
    slope = wp.length(along)
    if slope <= Edge.STEEPEST:
        return wp.vec4(0.0, 0.0, 0.0, -1.0)
    distance = wp.dot(other, away) / slope
    along = along / wp.where(distance < 0.0, -slope, slope)
    return wp.vec4(along[0], along[1], along[2], wp.abs(distance))


@wp.func
def direction_of_edge(edge: wp.vec4):
    return wp.vec3(edge[0], edge[1], edge[2])


@wp.func
def shows_a_gap(own: wp.vec3, edge: wp.vec4, away: wp.vec3, near: float):
    """Whether a neighbour is close to a plane, and not far along the edge at which its own crosses it."""
    height = wp.dot(own, away)
    aside = away - height * own
    aside = aside - wp.dot(direction_of_edge(edge), aside) * direction_of_edge(edge)
    return wp.abs(height) < near and wp.length(aside) < near


@kernel
def edges_kernel(
    around: wp.array3d(dtype=wp.vec3),
    rows: wp.array3d(dtype=wp.int64),
    normals: wp.array2d(dtype=wp.vec3),
    radii: wp.array2d(dtype=wp.float32),
    edges: wp.array3d(dtype=wp.vec4),
):
    """One thread a point, launched over (B, N)."""
    cloud, row = wp.tid()
    own = normals[cloud, row]
    radius = radii[cloud, row]
    count = around.shape[2]
    ends = int(0)  # a bit for each neighbour at whose plane the piece ends
    if wp.dot(own, own) > 0.0:
        for number in range(count):
            neighbor = int(rows[cloud, row, number + 1])
            if neighbor >= 0:
                edge = crossing(own, normals[cloud, neighbor], around[cloud, row, number])
                if edge[3] >= 0.0 and edge[3] < radius:
                    beyond = int(0)
                    for place in range(count):
                        away = around[cloud, row, place]
                        past = wp.dot(direction_of_edge(edge), away) > edge[3] + Edge.COPLANAR
                        if past and wp.abs(wp.dot(own, away)) < Edge.COPLANAR:
                            beyond = int(1)
                    if beyond == 1 and shows_a_gap(own, edge, around[cloud, row, number], Edge.NEAR * radius):
                        beyond = int(0)
                    ends |= (1 - beyond) << number
    best = wp.vec4()
    for place in range(Edge.COUNT):
        before = direction_of_edge(best)
        best = wp.vec4()
        nearest = radius
        for number in range(count):
            if (ends >> number) & 1:
                neighbor = int(rows[cloud, row, number + 1])
                edge = crossing(own, normals[cloud, neighbor], around[cloud, row, number])
                if wp.dot(direction_of_edge(edge), before) > Edge.APART:
                    ends &= ~(1 << number)  # about the same direction does not matter any more
                elif edge[3] < nearest:
                    best = edge
                    nearest = edge[3]
        edges[cloud, row, place] = best


@warp_op(
    "pointproj::nearest_edges",
    outputs=lambda points, rows, normals, radii: {
        "edges": ((*points.shape[:2], Edge.COUNT, 4), torch.float32)
    },
)
def _edges(launch, points: Tensor, rows: Tensor, normals: Tensor, radii: Tensor, edges: Tensor) -> None:
    around = displacements(launch, points, rows)[:, :, 1:]
    launch(edges_kernel, points.shape[:2], around, rows, normals, radii, edges, block_dim=64)


def plain_nearest_edges(points: Tensor, rows: Tensor, normals: Tensor, radii: Tensor) -> Tensor:
    """The same as operators of torch, which hold every pair of neighbours: what the kernel is held to."""
    away = (take_rows(points, rows.clamp(min=0)) - points[:, :, None])[:, :, 1:]
    others = torch.where(rows[..., None] < 0, 0.0, take_rows(normals, rows.clamp(min=0)))[:, :, 1:]
    own = normals[:, :, None]
    along = others - (others * own).sum(-1, keepdim=True) * own
    slope = along.norm(dim=-1, keepdim=True)
    towards = (others * away).sum(-1, keepdim=True) / slope.clamp(min=Edge.STEEPEST)
    along = along / slope.clamp(min=Edge.STEEPEST) * torch.where(towards < 0, -1.0, 1.0)
    distance = towards.abs()
    height = (away * own).sum(-1, keepdim=True)
    on_plane = height[..., 0].abs() < Edge.COPLANAR
    aside = away - height * own
    aside = aside - (along * aside).sum(-1, keepdim=True) * along
    near = Edge.NEAR * radii[..., None, None]
    gap = (height.abs() < near) & (aside.norm(dim=-1, keepdim=True) < near)
    beyond = ((along @ away.mT > distance + Edge.COPLANAR) & on_plane[:, :, None]).any(-1, keepdim=True)
    ends = (
        (slope > Edge.STEEPEST)
        & (gap | ~beyond)
        & (distance < radii[..., None, None])
        & own.any(-1, keepdim=True)
    )
    edges = []
    for _ in range(Edge.COUNT):
        nearest, place = torch.where(ends, distance, torch.inf).min(2, keepdim=True)
        direction = along.gather(2, place.expand(-1, -1, -1, 3))
        edge = torch.cat([direction, nearest], dim=-1)
        edges.append(torch.where(nearest.isfinite(), edge, 0.0))
        ends = ends & ((along * edges[-1][..., :3]).sum(-1, keepdim=True) <= Edge.APART)
    return torch.cat(edges, dim=2)
