"""The stage of the visibility network without gradients: it finds the surface that a cloud was sampled from.

Samples become disks: each lies in the plane of its sample, covers the holes between samples, and ends at
edges.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pointproj.nn.visibility.constants import Cloud, Disk, ExactPlane
from pointproj.nn.visibility.disk_grid import DiskGrid, disk_grid
from pointproj.nn.visibility.edges import nearest_edges
from pointproj.nn.visibility.exact_planes import exact_planes
from pointproj.nn.visibility.face_planes import propagate_planes
from pointproj.nn.visibility.local_planes import local_planes

PLANE_ROWS = 1 + Cloud.PLANE_NEIGHBORS  # each point is its own nearest neighbour
NEIGHBORS = max(PLANE_ROWS, 1 + ExactPlane.NEIGHBORS)
"""Number of nearest points of each point that :func:`find_surface` needs."""


class Surface(NamedTuple):
    """Planes, noise and disks of the samples of clouds, without gradients."""

    normals: Float[Tensor, "b n 3"]  # of the planes, of either sign; 0 for a sample without a plane
    shift: Float[Tensor, "b n 3"]  # from a sample onto its plane; 0 in clouds without noise
    fit: Float[Tensor, "b n 1"]  # share of the neighbours on the plane
    exact_fit: Float[Tensor, "b n 1"]  # share of those on it up to rounding; 0 for a plane that is not exact
    noise: Float[Tensor, "b 1 1"]  # standard deviation; 0 if more than 2% of the planes are exact
    holes: Float[Tensor, "b n 1"]  # width of the holes between samples
    grid: DiskGrid  # the disks


def find_surface(
    points: Float[Tensor, "b n 3"],
    distances: Float[Tensor, "b n k"],
    rows: Int[Tensor, "b n k"],
    sensors: Float[Tensor, "b n s"],
) -> Surface:
    """Find planes, noise and disks of clouds of points in the cube [-1, 1]^3, without gradients.

    A sample has an exact plane if its neighbours lie on one up to rounding
    (:func:`~pointproj.nn.visibility.exact_planes.exact_planes`), otherwise a local plane
    (:func:`~pointproj.nn.visibility.local_planes.local_planes`). In clouds with noise, planes are propagated
    over their faces (:func:`~pointproj.nn.visibility.face_planes.propagate_planes`).

    ``distances`` and ``rows`` are those of at least ``NEIGHBORS`` nearest points, the point itself first.
    ``sensors`` are unit vectors to the sensors that saw the points, 0 if unknown; (B, N, 0) if all are
    unknown.
    """
    near = rows[..., :PLANE_ROWS]
    local, (exact, exact_fit) = local_planes(points, near), exact_planes(points, rows)
    is_exact = exact_fit > 0
    noise = torch.where(is_exact.float().mean(1, keepdim=True) > Cloud.EXACT_SHARE, 0.0, local.noise)
    normals = torch.where(is_exact, exact.to(points.dtype), local.normals)
    normals, shift = propagate_planes(points, near, normals, noise, sensors if sensors.shape[-1] else None)
    exact_fit = exact_fit.to(points.dtype)
    holes = distances[..., Disk.HOLE_NEIGHBOR]
    holes = torch.minimum(holes, Disk.LARGEST_HOLE * holes.mean(1, keepdim=True))[..., None]
    radii = _radii(holes, distances[..., ExactPlane.NEIGHBORS : ExactPlane.NEIGHBORS + 1], exact_fit)
    edges = nearest_edges(points, rows, torch.where(is_exact, normals, 0.0), radii)
    grid = disk_grid(points + shift, normals, radii, edges)
    return Surface(normals, shift, local.fit, exact_fit, noise, holes, grid)


def _radii(
    holes: Float[Tensor, "b n 1"], farthest: Float[Tensor, "b n 1"], exact_fit: Float[Tensor, "b n 1"]
) -> Float[Tensor, "b n"]:
    """Return the radii of the disks, which cover the holes between the samples of the same exact plane.

    Near a thin board, half of the nearest samples are on its other face; near a narrow side, nearly all are
    on other faces. So the holes of such a plane are wider than those of the cloud.
    """
    on_plane = ExactPlane.NEIGHBORS * exact_fit.clamp(min=1 / ExactPlane.NEIGHBORS)
    own = farthest * (Disk.HOLE_NEIGHBOR / on_plane).sqrt()  # for samples of uniform density
    largest = Disk.LARGEST_ON_PLANE * holes.mean(1, keepdim=True)
    own = torch.minimum(torch.maximum(own, holes), largest)
    return torch.where(exact_fit > 0, own, holes)[..., 0]
