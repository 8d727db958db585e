"""Edges of flat pieces of a cloud: lines where their planes meet those of neighbours. A Warp kernel."""

import torch
import warp as wp
from jaxtyping import Float, Int
from torch import Tensor

from pointproj.nn.visibility.constants import Edge, ExactPlane
from pointproj.nn.visibility.kernels import Around, Numbers, Rows, Vectors, displacements, for_kernels, kernel
from pointproj.ops.bridge.warp_op import warp_op


def nearest_edges(
    points: Float[Tensor, "b n 3"],
    rows: Int[Tensor, "b n k"],
    normals: Float[Tensor, "b n 3"],
    radii: Float[Tensor, "b n"],
) -> Float[Tensor, "b n 3 4"]:
    """Find where the exact planes of points end within their radii: (B, N, 3, 4), without gradients.

    The plane of a neighbour crosses the plane of the point along a line. This line is an edge of the flat
    piece in two cases. Either no neighbour on the point's own plane lies beyond the line. Or the neighbour is
    close to the point's plane and not far along the line; then the plane beyond the line is another piece,
    across a gap or behind a board that ends here, and has disks of its own.

    ``rows`` are those of the nearest points, the point itself first; the first 33 are used. ``normals`` are
    those of exact planes, 0 for points without one. The result has up to three edges, the nearest first: the
    unit vector in the plane towards the edge, and the distance of the edge. It is 0 for edges that do not
    exist.
    """
    points, normals, radii = for_kernels(points, normals, radii)
    return _edges(points, rows[..., : 1 + ExactPlane.NEIGHBORS].contiguous(), normals, radii)


@wp.func
def crossing(own: wp.vec3, other: wp.vec3, away: wp.vec3):
    """Return the unit vector in a plane towards another plane, and its distance; -1 if nearly parallel."""
    along = other - wp.dot(other, own) * own
    slope = wp.length(along)
    if slope <= Edge.STEEPEST:
        return along, -1.0
    distance = wp.dot(other, away) / slope
    return along / wp.where(distance < 0.0, -slope, slope), wp.abs(distance)


@wp.func
def shows_a_gap(own: wp.vec3, towards: wp.vec3, away: wp.vec3, near: float):
    """Return whether a neighbour is close to a plane, and not far along the line where its plane crosses."""
    height = wp.dot(own, away)
    aside = away - height * own
    aside = aside - wp.dot(towards, aside) * towards
    return wp.abs(height) < near and wp.length(aside) < near


@kernel
def edges_kernel(
    around: Around, rows: Rows, normals: Vectors, radii: Numbers, edges: wp.array3d(dtype=wp.vec4)
):
    """One thread a point, launched over (B, N): its nearest edges."""
    cloud, row = wp.tid()
    own = normals[cloud, row]
    radius = radii[cloud, row]
    count = around.shape[2]
    ends = int(0)  # one bit for each neighbour: whether the piece ends at its plane
    if wp.dot(own, own) > 0.0:
        for number in range(count):
            neighbor = int(rows[cloud, row, number + 1])
            if neighbor >= 0:
                its = around[cloud, row, number]
                towards, distance = crossing(own, normals[cloud, neighbor], its)
                if distance >= 0.0 and distance < radius:
                    ended = int(1)
                    for place in range(count):
                        away = around[cloud, row, place]
                        past = wp.dot(towards, away) > distance + Edge.COPLANAR
                        if past and wp.abs(wp.dot(own, away)) < Edge.COPLANAR:
                            ended = int(0)
                    if ended == 0 and shows_a_gap(own, towards, its, Edge.NEAR * radius):
                        ended = int(1)
                    ends |= ended << number
    best = wp.vec4()
    for place in range(Edge.COUNT):
        before = wp.vec3(best[0], best[1], best[2])
        best = wp.vec4()
        nearest = radius
        for number in range(count):
            if (ends >> number) & 1:
                neighbor = int(rows[cloud, row, number + 1])
                towards, distance = crossing(own, normals[cloud, neighbor], around[cloud, row, number])
                if wp.dot(towards, before) > Edge.APART:
                    ends &= ~(1 << number)  # about the direction of an edge already found
                elif distance < nearest:
                    best = wp.vec4(towards[0], towards[1], towards[2], distance)
                    nearest = distance
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
