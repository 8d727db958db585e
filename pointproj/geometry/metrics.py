"""How close a reconstructed solid is to the true one, by the metrics of the Occupancy Networks papers.

Mescheder et al., Occupancy Networks, CVPR 2019, section 4 and supplementary; Peng et al., Convolutional
Occupancy Networks, ECCV 2020; the F-score as in Tatarchenko et al., What do single-view 3D reconstruction
networks learn?, CVPR 2019. All metrics are computed in the query cube, where a shape's longest side is 1.8.

The true solid is the interior of the mesh (:mod:`pointproj.geometry.interior`). The true surface is the part
of the mesh between inside and outside, without walls inside a solid and sheets outside of it.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float
from scipy.spatial import cKDTree

from pointproj.geometry.fields import NoInterior
from pointproj.geometry.interior import inside, inside_at
from pointproj.geometry.isosurfaces import Reconstruction
from pointproj.geometry.meshes import LONGEST_SIDE, Mesh, query_grid
from pointproj.geometry.sampling import SurfaceSampler, sample_surface

CHAMFER_UNIT = LONGEST_SIDE / 10
"""Chamfer distances are given in tenths of the shape's longest side, as in the papers."""

F_SCORE_THRESHOLD = LONGEST_SIDE / 100
"""A point is correct if the other surface is within 1% of the shape's longest side."""

SAMPLES = 100_000
BESIDE = 1e-3
"""Distance from the surface at which its two sides are tested, in units of the query cube."""

METRICS = {
    "iou_grid": "IoU, grid",
    "iou": "IoU",
    "chamfer_l1": "Chamfer-L1",
    "f_score": "F-score",
    "normal_consistency": "normals",
}
"""Keys of the result of :func:`measure`, with headings. For Chamfer-L1 lower is better, else higher."""

# Metrics of a reconstruction without a surface: no point is correct, and all have the largest distance.
_NOTHING = {"chamfer_l1": LONGEST_SIDE * 3**0.5 / CHAMFER_UNIT, "f_score": 0.0, "normal_consistency": 0.0}

SurfacePoints = tuple[Float[np.ndarray, "n 3"], Float[np.ndarray, "n 3"]]


@dataclass(frozen=True)
class Truth:
    """The true solid, which a reconstruction is compared with."""

    mesh: Mesh  # normalised
    grid_inside: Bool[np.ndarray, " g"]  # nodes of the query grid
    points: Float[np.ndarray, "n 3"]  # uniform in the query cube
    points_inside: Bool[np.ndarray, " n"]
    surface: SurfacePoints  # float32 samples of the solid, by area; normals have arbitrary sign


@dataclass(frozen=True)
class Measured:
    """The metrics of one method on one mesh."""

    name: str
    class_name: str
    samples: str  # how the mesh was sampled
    points: int  # of the cloud
    method: str
    label_agreement: float  # from pointproj.geometry.well_posed
    values: dict[str, float]  # with the keys of METRICS
    seconds: float  # taken by the reconstruction


def truth_of(mesh: Mesh, grid: int, *, samples: int = SAMPLES, seed: int = 0, device: str = "cpu") -> Truth:
    """Return the truth about a normalised mesh, on a query grid of ``grid`` points a side and at samples.

    ``samples`` random points are drawn in the cube, and as many on the surface; ``seed`` fixes them.

    Raises
    ------
    NoInterior
        If no point of the query grid is inside: there is no solid to reconstruct.
    """
    grid_inside = inside(mesh, grid, device=device)
    if not grid_inside.any():
        raise NoInterior(mesh.name, f"encloses no point of the grid of {grid} a side")
    generator = np.random.default_rng(seed)
    points = generator.uniform(-1, 1, (samples, 3)).astype(np.float32)
    points_inside = inside_at(mesh, points, device=device)
    surface = _solid_surface(mesh, samples, generator, device)
    return Truth(mesh, grid_inside, points, points_inside, surface)


def measure(reconstruction: Reconstruction, truth: Truth, *, seed: int = 0) -> dict[str, float]:
    """Compare a reconstruction with the truth; return values by the keys of :data:`METRICS`.

    - ``iou_grid``, ``iou``: number of points inside both solids, divided by the number of points inside at
      least one; on the query grid, and at the random points of the cube.
    - ``chamfer_l1``: mean of accuracy (mean distance from samples of the reconstruction to the nearest true
      sample) and completeness (the same in the other direction), in tenths of the longest side.
    - ``f_score``: harmonic mean of precision (share of the reconstruction's samples that have a true sample
      within 1% of the longest side) and recall (the same in the other direction).
    - ``normal_consistency``: mean absolute cosine between the normals of nearest samples, in both directions.

    The reconstruction has as many surface samples as the truth; ``seed`` fixes them.
    """
    grid = query_grid(round(len(truth.grid_inside) ** (1 / 3)))
    measured = {
        "iou_grid": intersection_over_union(reconstruction.inside(grid), truth.grid_inside),
        "iou": intersection_over_union(reconstruction.inside(truth.points), truth.points_inside),
    }
    if not len(reconstruction.mesh.faces):
        return {**measured, **_NOTHING}
    samples = sample_surface(reconstruction.mesh, len(truth.surface[0]), np.random.default_rng(seed))
    return {**measured, **surface_agreement(samples, truth.surface)}


def intersection_over_union(one: Bool[np.ndarray, " n"], other: Bool[np.ndarray, " n"]) -> float:
    """Return the number of points in both sets divided by the number in at least one; 1 if both are empty."""
    either = int((one | other).sum())
    return int((one & other).sum()) / either if either else 1.0


def surface_agreement(predicted: SurfacePoints, true: SurfacePoints) -> dict[str, float]:
    """Compare samples of two surfaces with their normals; see :func:`measure`."""
    (points, normals), (true_points, true_normals) = predicted, true
    accuracy, nearest_true = cKDTree(true_points).query(points)
    completeness, nearest = cKDTree(points).query(true_points)
    precision, recall = ((distance <= F_SCORE_THRESHOLD).mean() for distance in (accuracy, completeness))
    there = np.abs((normals * true_normals[nearest_true]).sum(axis=1)).mean()
    back = np.abs((true_normals * normals[nearest]).sum(axis=1)).mean()
    return {
        "chamfer_l1": float(accuracy.mean() + completeness.mean()) / 2 / CHAMFER_UNIT,
        "f_score": float(2 * precision * recall / (precision + recall)) if precision + recall else 0.0,
        "normal_consistency": float(there + back) / 2,
    }


def _solid_surface(mesh: Mesh, count: int, generator: np.random.Generator, device: str) -> SurfacePoints:
    """Sample, by area, the surface with inside on only one of its sides; copies of a face count once."""
    _, place = np.unique(mesh.vertices, axis=0, return_inverse=True)
    _, first = np.unique(np.sort(place.reshape(-1)[mesh.faces], axis=1), axis=0, return_index=True)
    sampler = SurfaceSampler(mesh.vertices, mesh.faces[np.sort(first)])
    points, normals = sampler.draw(count, generator)
    bounding = _bounds_solid(mesh, points, normals, device)
    while bounding.sum() < count:  # every solid has such a surface, so each round finds more
        wanted = 1.1 * (count - bounding.sum()) * len(bounding) / bounding.sum()
        more = sampler.draw(min(int(wanted) + 1, 10 * count), generator)
        points, normals = np.concatenate([points, more[0]]), np.concatenate([normals, more[1]])
        bounding = np.concatenate([bounding, _bounds_solid(mesh, *more, device)])
    return points[bounding][:count], normals[bounding][:count]


def _bounds_solid(
    mesh: Mesh, points: Float[np.ndarray, "n 3"], normals: Float[np.ndarray, "n 3"], device: str
) -> Bool[np.ndarray, " n"]:
    sides = np.concatenate([points + BESIDE * normals, points - BESIDE * normals])
    first, second = np.split(inside_at(mesh, sides, device=device), 2)
    return first != second
