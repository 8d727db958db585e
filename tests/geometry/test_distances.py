"""Distances to meshes against brute force."""

from pathlib import Path

import numpy as np
import pytest

from pointproj.geometry.distances import unsigned_distance
from pointproj.geometry.files import read_mesh
from pointproj.geometry.meshes import Mesh, normalize, query_grid

REAL = Path(__file__).parents[3] / "shared" / "modelnet10" / "ModelNet10"
needs_real = pytest.mark.skipif(not REAL.is_dir(), reason="the sample of real ModelNet files is not here")


def exact_distance(mesh, points):
    """Distance in fp64 from every point to every triangle, the least of them."""
    a, b, c = (mesh.vertices[mesh.faces[:, k]] for k in range(3))
    squared = np.full((len(points), len(mesh.faces)), np.inf)
    p = points.astype(np.float64)[:, None]
    for start, end in ((a, b), (b, c), (c, a)):
        along = end - start
        length = (along**2).sum(-1)
        t = ((p - start) * along).sum(-1) / np.where(length > 0, length, 1)
        nearest = start + np.clip(t, 0, 1)[..., None] * along
        squared = np.minimum(squared, ((p - nearest) ** 2).sum(-1))
    normal = np.cross(b - a, c - a)
    size = (normal**2).sum(-1)
    to_c = (np.cross(b - a, p - a) * normal).sum(-1)
    to_b = (np.cross(p - a, c - a) * normal).sum(-1)
    over = (size > 0) & (to_b >= 0) & (to_c >= 0) & (to_b + to_c <= size)
    height = ((p - a) * normal).sum(-1) ** 2 / np.where(size > 0, size, 1)
    return np.sqrt(np.where(over, np.minimum(squared, height), squared).min(axis=1))


def test_distance_is_exact_to_triangles_of_every_shape():
    generator = np.random.default_rng(1)
    vertices = generator.uniform(-0.9, 0.9, (90, 3))
    thin = np.arange(30, 60)
    vertices[thin] = (
        vertices[thin - 30] + generator.uniform(-1, 1, (30, 3)) * np.logspace(-7, -2, 30)[:, None]
    )
    faces = generator.integers(0, 90, (60, 3))
    faces = np.concatenate([faces, [[k - 30, k, 89 - (k - 30)] for k in thin], [[3, 3, 7], [8, 8, 8]]])
    soup = Mesh(vertices, faces, "soup")
    points = generator.uniform(-1, 1, (3000, 3)).astype(np.float32)
    near = vertices[generator.integers(0, 90, 500)] + generator.normal(0, 1e-3, (500, 3))
    points = np.concatenate([points, near.astype(np.float32)])
    distance = unsigned_distance(soup, points)
    assert distance.dtype == np.float32
    np.testing.assert_allclose(distance, exact_distance(soup, points), rtol=2e-7, atol=1e-8)


@pytest.mark.parametrize("thickness", [1e-3, 1e-5, 1e-6])
@pytest.mark.parametrize("seed", [4, 8, 15])
def test_distance_to_a_sliver_that_single_precision_cannot_resolve(thickness, seed):
    generator = np.random.default_rng(seed)
    start, end, aside = generator.uniform(-0.9, 0.9, (3, 3))
    tip = start + generator.uniform(0.1, 0.9) * (end - start) + thickness * aside / np.linalg.norm(aside)
    sliver = Mesh([start, end, tip], [[0, 1, 2]], "sliver")
    points = np.random.default_rng(2).uniform(-1, 1, (2000, 3)).astype(np.float32)
    np.testing.assert_allclose(
        unsigned_distance(sliver, points), exact_distance(sliver, points), rtol=2e-7, atol=1e-8
    )


@needs_real
@pytest.mark.parametrize("name", ["dresser/train/dresser_0201", "bed/train/bed_0523"])
def test_distance_is_exact_on_real_meshes_with_slivers(name):
    mesh = normalize(read_mesh(REAL / f"{name}.off"))
    points = query_grid(30)[np.random.default_rng(0).choice(27_000, 1500, replace=False)]
    np.testing.assert_allclose(
        unsigned_distance(mesh, points), exact_distance(mesh, points), rtol=2e-7, atol=1e-8
    )
